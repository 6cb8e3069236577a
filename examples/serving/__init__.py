"""Two models answer requests on one cluster; run `python -m examples.serving`."""
