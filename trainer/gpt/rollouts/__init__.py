"""Rollouts: tokens with numbers of each, such as log-probabilities, that were made elsewhere."""
