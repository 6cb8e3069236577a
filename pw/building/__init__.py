"""Built on the public API: models in stages, mixtures of experts, streams of data."""
