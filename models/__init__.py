"""Flax NNX models. They take an attention callable and know no mesh."""
