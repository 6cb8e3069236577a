"""The Python API, and the client's session with a cluster."""
