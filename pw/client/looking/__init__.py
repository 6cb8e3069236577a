"""What a script asks about its cluster: status, plan, memory, and the pictures of arrays."""
