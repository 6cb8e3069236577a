"""Programs of the gateway itself, which clients name in JSON; moves between shardings are such."""
