"""Timelines: what all processes of a cluster did at each moment (`pw.trace`)."""
