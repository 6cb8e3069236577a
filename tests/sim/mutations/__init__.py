"""Deliberate bugs that the simulator must find, one at a time (`table`)."""
