"""Video models: Wan 2.1 and 2.2."""
