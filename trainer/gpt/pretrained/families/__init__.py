"""Families of models of the library transformers, a file for each family with parts of its own."""
