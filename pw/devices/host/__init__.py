"""A host's actors: executor, shard coordinator and object store, and the device backend as they see it."""
