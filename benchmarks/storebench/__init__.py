"""Other systems that store records in an object store, for benchmarks/object_store.py."""
