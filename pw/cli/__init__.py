"""The daemons and the command line: the only place where all parts are put together."""
