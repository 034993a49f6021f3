"""Layers with sliding windows: what these leave of a ring, and how layers that differ are loops."""
