"""Families of models of the library transformers: what one of them alone has is in its file."""
