"""Images and videos as tokens, in numpy or jax: patches of some frames, rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Array, Shaped

Size = tuple[int, int, int]
"""Frames, height and width."""


def grid_of(size: Size, patch: Size) -> Size:
    """Number of patches along frames, height and width."""
    frames, height, width = (n // m for n, m in zip(size, patch, strict=True))
    return frames, height, width


def patchify(
    latent: Shaped[np.ndarray | Array, "... F H W C"], patch: Size
) -> Shaped[np.ndarray | Array, "... T P"]:
    """Cuts a latent into patches, in the order of frame, row and column; the P values of a patch
    are in this order too, then channel. An image has one frame."""
    return rearrange(latent, "... (f a) (h b) (w c) d -> ... (f h w) (a b c d)", **_of_patch(patch))


def unpatchify(
    patches: Shaped[np.ndarray | Array, "... T P"], size: Size, patch: Size
) -> Shaped[np.ndarray | Array, "... F H W C"]:
    """The latent that `patchify` has cut into patches."""
    frames, height, width = grid_of(size, patch)
    return rearrange(
        patches,
        "... (f h w) (a b c d) -> ... (f a) (h b) (w c) d",
        f=frames,
        h=height,
        w=width,
        **_of_patch(patch),
    )


def _of_patch(patch: Size) -> dict[str, Any]:
    return dict(zip("abc", patch, strict=True))
