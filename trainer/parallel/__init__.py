"""One training step over a mesh, and what it takes."""
