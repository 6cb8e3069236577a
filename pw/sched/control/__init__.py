"""The controller: clients' sessions, programs, runs and arrays."""
