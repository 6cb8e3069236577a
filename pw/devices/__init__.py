"""A host's actors: executor, shard coordinator, object store, and the device backends under them."""
