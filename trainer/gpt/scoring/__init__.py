"""Scores: what a model gives tokens that are there already."""
