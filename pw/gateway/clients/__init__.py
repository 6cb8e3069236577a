"""One client: its requests, their order, and what it has by its handles."""
