"""Pipelines: schedules as data, models cut into stages, and the programs that run them."""
