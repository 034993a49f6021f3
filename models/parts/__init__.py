"""Parts of models, declared: weights by the names of their dimensions. Imports no jax."""
