"""Streams: generators that feed programs."""
