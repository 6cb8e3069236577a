"""Programs and their planning: lowering, segments, edges and their ways, re-sharding. Pure functions."""
