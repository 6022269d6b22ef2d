"""Every decoder under bad input: `python -m sglcache.fuzzing`. The mutator and the law are `sglcache.testing.fuzz`."""
