"""Weights in the files of other libraries."""
