"""What several models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from models.linear import linear

AttentionFn = Callable[..., Float[Array, "B T N H"]]
"""(query [B T N H], key [B T K H], value [B T K H], segment_ids=[B T] or None) -> [B T N H]"""


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self,
        kind: Literal["swiglu", "gelu"],
        *,
        width: int,
        hidden: int,
        out_gain: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the projections.

        Args:
            kind: "swiglu" has a gate and three matrices, "gelu" has two.
            width: channels of inputs and outputs.
            hidden: channels between the projections.
            out_gain: standard deviation of the outputs of `down` for inputs of variance 1.
            dtype: type of activations and matrix products.
            rngs: source of the initial weights.
        """
        gated = kind == "swiglu"
        self.gate = linear(width, hidden, dtype=dtype, rngs=rngs) if gated else None
        self.up = linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, gain=out_gain, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
