"""`python -m sglcache`."""

from sglcache.cli import main

if __name__ == "__main__":
    main()
