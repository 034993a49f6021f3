"""What a run trains: a model, what it is given of a batch, and its loss.

An objective knows no mesh. `Program` runs it on one, as the program of each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float, Float32

from models.hooks import Hooks
from startrail_jax.layout import Layout


@runtime_checkable
class Objective(Protocol):
    """A model and its loss.

    The loss of a batch is the mean of the losses of its tokens, weighted. Batches are trees of
    arrays [B], [B T] or [B T ...], with as many T as the model has streams of tokens.
    """

    head: str
    """Name of the weights that `losses` and `outputs` need, and no others."""
    flops_per_token: float
    """FLOPs of a training step for each token, of all devices together: see `flops`."""

    def make_model(
        self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs
    ) -> nnx.Module:
        """The model with initial weights."""
        ...

    def batch_shapes(self, layout: Layout) -> Any:
        """A batch of the run, as `jax.ShapeDtypeStruct`s."""
        ...

    def prepare(self, batch: Any, *, training: bool) -> Any:
        """What the model is shown of a batch; runs compiled, on global arrays.

        It has the fields `targets`, [B T ...], and `weights`, float32 [B T], of the losses.

        Args:
            batch: as the data gives it.
            training: whether what is random may be so; else it is the same every time.
        """
        ...

    def hidden(self, model: Any, batch: Any) -> Float[Array, "B T width"]:
        """Of a prepared batch, what `losses` takes."""
        ...

    def outputs(self, model: Any, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T out"]:
        """What the model says of every token."""
        ...

    def losses(
        self, model: Any, hidden: Float[Array, "B T width"], targets: Any
    ) -> Float32[Array, "B T"]:
        """The loss of every token."""
        ...
