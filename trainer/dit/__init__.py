"""Diffusion transformers: their config, data, objective, and images from them."""
