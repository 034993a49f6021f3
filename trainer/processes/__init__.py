"""Several processes that share a run, and their devices."""
