"""What a run trains: a model, its inputs and its loss.

An objective does not know the mesh. `Program` runs it on one, as the program of each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float, Float32

from models.hooks import Hooks
from startrail_jax.tokens.layout import Layout


@runtime_checkable
class Objective(Protocol):
    """A model and its loss.

    The loss of a batch is the weighted mean of the losses of its tokens. Batches are trees of
    arrays [B], [B T] or [B T ...]. A model with several streams of tokens has a T for each.
    """

    causal: bool
    """Whether a token attends only to itself and to earlier tokens."""
    head: str
    """Name of the part of the model whose weights `losses` and `outputs` use; they use no
    others."""
    flops_per_token: float
    """FLOPs of a training step for each token, over all devices together."""

    def make_model(
        self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs
    ) -> nnx.Module:
        """The model with initial weights."""
        ...

    def batch_shapes(self, layout: Layout) -> Any:
        """A batch of the run, as `jax.ShapeDtypeStruct`s."""
        ...

    def prepare(self, batch: Any, *, training: bool) -> Any:
        """Turns a batch of data into the inputs and targets of the model.

        It is part of the compiled program, and works on global arrays.

        Args:
            batch: a batch as `Dataset.collate` makes it, on the devices.
            training: whether the inputs may be random; otherwise they are always the same.

        Returns:
            A tree with the fields `targets`, [B T ...], and `weights`, float32 [B T], the weights
            of the losses.
        """
        ...

    def hidden(self, model: Any, batch: Any) -> Float[Array, "B T width"]:
        """The hidden states from which `losses` and `outputs` start, for a prepared batch."""
        ...

    def outputs(self, model: Any, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T out"]:
        """The prediction of the model for every token."""
        ...

    def losses(
        self, model: Any, hidden: Float[Array, "B T width"], targets: Any
    ) -> Float32[Array, "B T"]:
        """The loss of every token."""
        ...
