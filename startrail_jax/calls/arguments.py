"""The arguments of `Attention`, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from startrail_jax import blocks, masks
from startrail_jax.calls.sharding import Sharded
from startrail_jax.errors import InputError
from startrail_jax.rings.options import Options
from startrail_jax.values import adopt, is_real, real, truth, whole


@dataclass(frozen=True, kw_only=True)
class Arguments(Options, Sharded):
    """The static arguments of an attention: what it computes, where, and how it communicates."""

    causal: bool | None = None
    """Whether a query sees only keys at its own position or before. One of `causal`, `window` and
    `mask` must be given; the attribute of an instance is always a bool."""
    window: int | None = None
    """Number of keys that a query sees, including the key at its own position; None for all. An
    attention with a window is causal."""
    mask: masks.Mask | None = None
    """A mask of `startrail_jax.masks`, such as `masks.Prefix(512)`; None for the mask of `causal`
    and `window`. To change it by `dataclasses.replace`, also pass `causal=None`."""
    scale: float | None = None
    """Factor that scales the logits; None for head_dim ** -0.5."""
    softcap: float | None = None
    """Soft cap c of the scaled logits, c * tanh(logits / c), as in Gemma 2; None for no cap."""
    padding_id: int | None = None
    """A segment id that marks padding in addition to negative ids, such as 0 in MaxText; None for
    only negative ids."""
    backend: blocks.Backend | list[str | blocks.Block] = "auto"
    """Block kernels: "cudnn" (NVIDIA GPUs, 16-bit dtypes, simple masks), "tiled" (NVIDIA
    GPUs, everything), "xla" (all platforms, everything), or "auto" for the first of these that
    supports the inputs on the devices of the mesh; "fa4" (FlashAttention-4, on Hopper and later, by
    the package fa4-jax); your own kernel, which is any hashable object with the methods of
    `startrail_jax.blocks.Block`; or a sequence of these, of which the first that supports the
    inputs is taken. See `explain`."""

    def __post_init__(self) -> None:
        adopt(self, whole, "window", "padding_id")
        adopt(self, truth, "causal")
        adopt(self, real, "scale", "softcap")
        Sharded.__post_init__(self)
        Options.__post_init__(self)
        if not (self.scale is None or is_real(self.scale)):
            raise InputError(
                f"scale must be a finite number or None; got scale={self.scale!r}. None is "
                "head_dim ** -0.5."
            )
        self.check(self.degrees)
        object.__setattr__(self, "backend", blocks.check_backend(self.backend))
        object.__setattr__(self, "causal", self.resolved_mask.causal)
        check_softcap(self.softcap)
        check_padding_id(self.padding_id)

    @functools.cached_property
    def resolved_mask(self) -> masks.Mask:
        """The mask: `mask`, or what `causal` and `window` stand for."""
        return masks.resolve(self.mask, causal=self.causal, window=self.window)


def check_softcap(softcap: Any) -> None:
    """Raises a ValueError unless a soft cap is None or a positive number."""
    if softcap is not None and not (is_real(real(softcap)) and softcap > 0):
        raise InputError(f"softcap must be a positive number or None; got softcap={softcap!r}.")


def check_padding_id(padding_id: Any) -> None:
    """Raises a ValueError unless the segment id of padding is None or an integer."""
    if padding_id is not None and not (type(whole(padding_id)) is int and abs(padding_id) < 2**31):
        raise InputError(
            "padding_id must be the int32 that marks padding among segment_ids, or None; got "
            f"padding_id={padding_id!r}. Negative ids are always padding."
        )
