"""Users' Python functions as hosts call them: calls, elements of streams, parts of results."""
