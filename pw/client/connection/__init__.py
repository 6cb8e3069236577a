"""The connected runtime: threads, processes, futures and the current session."""
