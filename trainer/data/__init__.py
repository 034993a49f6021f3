"""Files, examples and batches, for every kind of data."""
