"""Training: data, loop and checkpoints. Uses the models, never the engine."""
