"""What was lost with a host or with an earlier controller, and how it is made again."""
