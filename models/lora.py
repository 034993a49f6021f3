"""Low-rank adapters (LoRA): frozen weights, and beside some of them two narrow matrices to train.

References:
    LoRA: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.experts import ExpertLinear
from models.linear import project_adapted
from models.weights import Weight, layer_stacks


class Adapted(nnx.Module):
    """x W + scale * (x A) B, with W as it was and A and B float32.

    A is random and B is zero, so that it begins as x W, bit for bit. The product of A and B is
    never formed: it would be as large as W, and 16 bits would round W's change away.
    """

    def __init__(
        self, base: nnx.LinearGeneral, *, rank: int, scale: float, stacked: int, rngs: nnx.Rngs
    ) -> None:
        """Puts adapters beside the kernel of a projection.

        Args:
            base: the projection, whose kernel this one takes.
            rank: columns of A, and rows of B.
            scale: factor of their output.
            stacked: number of leading dimensions of the kernel, which count projections.
            rngs: source of A.
        """
        self.kernel = base.kernel
        self.scale = scale
        self.dtype = base.dtype
        self.contracted = len(base.in_features)
        self.lora_a, self.lora_b = narrow_matrices(
            self.kernel.shape, rank=rank, stacked=stacked, contracted=self.contracted, rngs=rngs
        )

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        kernel, a, b = (x[...] for x in (self.kernel, self.lora_a, self.lora_b))
        return project_adapted(x.astype(self.dtype), kernel, a, b, self.scale, self.contracted)


def narrow_matrices(
    shape: tuple[int, ...], *, rank: int, stacked: int, contracted: int, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param]:
    """A and B for a kernel [*stacked, *contracted, *outputs]; `stacked` and `contracted` are
    numbers of dimensions."""
    inputs = shape[stacked : stacked + contracted]
    # As PEFT does: uniform, of variance 1 / (3 * fan_in).
    bound = math.prod(inputs) ** -0.5
    lora_a = jax.random.uniform(
        rngs.params(), (*shape[:stacked], *inputs, rank), jnp.float32, -bound, bound
    )
    outputs = shape[stacked + contracted :]
    lora_b = jnp.zeros((*shape[:stacked], rank, *outputs), jnp.float32)
    return nnx.Param(lora_a), nnx.Param(lora_b)


def add_adapters(
    model: Any,
    weights: Mapping[str, Weight],
    *,
    rank: int,
    scale: float,
    targets: Collection[str],
    base_dtype: Any,
    rngs: nnx.Rngs,
) -> None:
    """Puts adapters into the layers of a model, and narrows its other weights.

    Args:
        model: a `GPT` or a `Wan`.
        weights: its weights, by path.
        rank: rank of the adapters.
        scale: factor of their output.
        targets: names of the projections.
        base_dtype: type of the matrices of the model, and of the biases of queries, keys and
            values, which have a dimension of heads. Vectors, such as the scales of norms, are used
            in float32 and stay so.
        rngs: source of the adapters.
    """
    for path, weight in list(nnx.iter_graph(model)):
        if isinstance(weight, nnx.Param) and not weights["/".join(map(str, path))].is_vector:
            weight.set_value(weight[...].astype(base_dtype))
    for stack in layer_stacks(weights):
        for path, module in list(nnx.iter_modules(getattr(model, stack))):
            for name in sorted(targets):  # The order in which they are given changes nothing.
                declared = weights.get("/".join((stack, *map(str, path), name, "kernel")))
                if declared is None or not declared.projects:
                    continue
                base = getattr(module, name)
                if isinstance(base, nnx.LinearGeneral):
                    adapted = Adapted(base, rank=rank, scale=scale, stacked=1, rngs=rngs)
                    setattr(module, name, adapted)
                elif isinstance(base, ExpertLinear):
                    base.scale = scale
                    base.lora_a, base.lora_b = narrow_matrices(
                        base.kernel.shape, rank=rank, stacked=2, contracted=1, rngs=rngs
                    )
