"""Buffers between processes: shared pages on one machine, streams of chunks between machines."""
