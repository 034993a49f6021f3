"""Degrees of parallelism, the axes of a mesh, and which devices share a node."""
