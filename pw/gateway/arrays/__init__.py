"""The arrays of one client, its devices, and its transfers."""
