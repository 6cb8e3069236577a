"""Profiles: where the time of a block went, from the timeline of the cluster, and what to change."""
