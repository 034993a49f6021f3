"""Rotary positions, and how they are stretched for longer contexts.

References:
    RoPE: https://arxiv.org/abs/2104.09864
    Position interpolation: https://arxiv.org/abs/2306.15595
    YaRN, and NTK-aware scaling in its appendix: https://arxiv.org/abs/2309.00071
    Llama 3: https://arxiv.org/abs/2407.21783, and the code published with Llama 3.1
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32

from models.config import GPTConfig
from startrail_jax.errors import InputError

# A channel pair that makes more turns in the original context than the first number keeps its
# wavelength; one that makes fewer turns than the second is stretched by the whole factor.
TURNS = {"llama3": (4.0, 1.0), "yarn": (32.0, 1.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles of the rotary embedding of the first `head_dim` channels of heads."""

    head_dim: int
    """Channels of a head that turn, even."""
    base: float = 10_000.0
    """Wavelengths range from 2 pi to about 2 pi * base tokens."""
    scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] = "none"
    """Wavelengths that are stretched: none; all, by one factor ("linear"); the more the longer
    ("ntk"); or the long ones alone ("llama3" and "yarn")."""
    factor: float = 1.0
    """Ratio of a wavelength after stretching to the one before; with "ntk", of the longest one."""
    original_length: int | None = None
    """Tokens of the original context; "llama3" and "yarn" need it to tell long wavelengths from
    short ones."""
    turns: tuple[float, float] | None = None
    """Turns in the original context above which a pair keeps its wavelength, and below which the
    whole factor stretches it. None for (4, 1) with "llama3" and (32, 1) with "yarn"."""
    truncate: bool = True
    """True if "yarn" begins and ends its blend at whole pairs."""
    pairs: int | None = None
    """Channel pairs that turn, the first ones; None for all."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; None for the factor of the papers: see `magnitude`."""

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise InputError(
                f"head_dim must be even for rotary positions; got head_dim={self.head_dim}. "
                f"Use {self.head_dim + 1}."
            )
        if self.scaling in ("llama3", "yarn") and self.original_length is None:
            raise InputError(
                f"scaling={self.scaling!r} needs original_length; got None. Use the length that "
                "the model was trained on."
            )

    def frequencies(self) -> Float64[np.ndarray, " half"]:
        """Radians per token of each channel pair: base^(-i / half), stretched; 0 for a pair that
        does not turn."""
        half = self.head_dim // 2
        pairs = np.arange(half)
        base = self.base
        if self.scaling == "ntk":
            # The longest wavelength, of the pair half - 1, grows by the whole factor.
            base *= self.factor ** (half / max(half - 1, 1))
        frequencies = base ** (-pairs / half)
        if self.scaling in ("none", "ntk"):
            stretched = np.zeros(half)
        elif self.scaling == "linear":
            stretched = np.ones(half)
        elif self.scaling == "llama3":
            turns = self._original_length * frequencies / (2 * np.pi)
            most, least = self._turns
            stretched = np.clip((most - turns) / (most - least), 0, 1)
        else:
            # YaRN blends by the index of the pair, between the pairs that make 32 turns and 1 turn.
            first, last = (self._pair_of(turns) for turns in self._turns)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.head_dim - 1)
            stretched = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
        blend = (1 - stretched) + stretched / self.factor
        turning = pairs < (half if self.pairs is None else self.pairs)
        return np.where(turning, frequencies * blend, 0.0)

    @property
    def _original_length(self) -> int:
        assert self.original_length is not None, "as __post_init__ has checked"
        return self.original_length

    @property
    def _turns(self) -> tuple[float, float]:
        return TURNS[self.scaling] if self.turns is None else self.turns

    def _pair_of(self, turns: float) -> float:
        """Index, as a real number, of the pair that makes `turns` turns in the original context."""
        half = self.head_dim // 2
        return half * math.log(self._original_length / (turns * 2 * math.pi)) / math.log(self.base)

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys; in YaRN it is above 1, which sharpens the softmax."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    def rotation(self, positions: Int32[Array, "B T"]) -> Float32[Array, "2 B T half"]:
        """Cosines and sines of the angles of every channel pair, times `magnitude`.

        Angles are integers, in units of 2^-32 turns: a product that overflows loses whole turns
        and nothing else. Angles computed in float32 would be wrong by up to 0.03 at 500,000 tokens,
        and by different amounts for pairs of tokens at the same distance.
        """
        frequencies = np.round(self.frequencies() * (2**32 / (2 * np.pi))).astype(np.uint32)
        turns = positions.astype(jnp.uint32)[:, :, None] * frequencies[None, None, :]
        angles = turns.astype(jnp.int32).astype(jnp.float32) * (2 * np.pi / 2**32)
        return self.magnitude * jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(
    x: Float[Array, "B T heads H"],
    rotation: Float32[Array, "2 B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T heads H"]:
    """Rotates the channel pairs (i, i + half) of every head by `rotation`, in float32; or, if they
    are interleaved, the neighbours (2 i, 2 i + 1).

    Where a head has more channels than 2 * half, the others stay as they are.
    """
    turns = 2 * rotation.shape[-1]
    if turns < x.shape[-1]:
        first, unrotated = x[..., :turns], x[..., turns:]
        turned = rotate(first, rotation, interleaved=interleaved)
        return jnp.concatenate([turned, unrotated], axis=-1)
    cos, sin = rotation[:, :, :, None, :]
    if interleaved:
        pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        both = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return both.reshape(x.shape).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def ropes_of(config: GPTConfig) -> tuple[Rope | None, ...]:
    """The rotary positions of each layer of a model."""
    of_all = ("bases", "stretches", "channels", "interleaved")
    scaling = {name: value for name, value in vars(config.rope).items() if name not in of_all}

    own = config.global_attention.of_model(config)

    def rope(base: float | None, window: int | None, mixer: str) -> Rope | None:
        if base is None:
            return None
        stretched = config.rope.stretches == "all" or window is None
        head_dim, pairs = config.head_dim, None
        if mixer == "latent":
            turned = config.latent.rotary_dim
            return Rope(head_dim=turned, base=base, **scaling) if turned else None
        if mixer == "global_attention":
            head_dim, pairs = own.head_dim, own.rotary_pairs
        channels = config.rope.channels or head_dim
        return Rope(head_dim=channels, base=base, pairs=pairs, **scaling if stretched else {})

    return tuple(map(rope, config.layer_bases, config.layer_windows, config.layer_mixers))
