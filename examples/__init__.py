"""Programs to read first: `quickstart` (ten lines) and `train_lm` (a model on two islands)."""
