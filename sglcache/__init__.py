"""A KV cache server."""
