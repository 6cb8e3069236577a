"""A host's actors (executor, shard coordinator, object store), and their view of the devices."""
