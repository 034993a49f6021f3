"""Predicts the time and the memory of a training step, and finds the fastest setting of a cluster.

Nothing here imports jax or looks at devices: it is arithmetic on NumPy arrays, one element for each
setting.
"""
