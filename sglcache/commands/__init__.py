"""Commands of the command line that have a file of their own; each is imported when it is asked for."""
