"""Bytes that an attention sends, in closed form."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
"""Kinds of collective that are counted, in the words of `jax.lax`."""
