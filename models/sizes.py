"""Checks of the sizes of a model. Imports no jax, so that a config can call them."""

from __future__ import annotations

from startrail_jax.errors import InputError


def check_dit_width(*, width: int, heads: int, prefix: str = "") -> None:
    """Raises unless a diffusion transformer can have this width. `prefix`, such as "model.", begins
    both names in the message."""
    if width % heads:
        raise InputError(
            f"{prefix}heads must divide {prefix}width; got heads={heads}, width={width}. "
            f"Use {prefix}width={-(-width // heads) * heads}."
        )
    if width % 2 or width < 8:
        raise InputError(
            f"{prefix}width must be even and at least 8, for sines and cosines of frame, row and "
            f"column; got width={width}. Use {max(8, width + width % 2)}."
        )
