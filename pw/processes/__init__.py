"""Child processes: forks, and the servers that make them."""
