"""The hosts of the cluster, the islands that they form, and the slices of clients on them."""
