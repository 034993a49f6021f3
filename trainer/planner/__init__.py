"""Predicts the time and the memory of a training step, and finds the fastest setting of a cluster.

It is arithmetic on NumPy arrays, one element for each setting. Only `here`, which measures
the devices at hand, imports jax.
"""
