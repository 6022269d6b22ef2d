"""`sglcache demo`: a daemon, a small model, and a conversation that survives its runner."""
