"""Checkpoints of a run: saved beside training, checked when they are read, set aside if damaged."""
