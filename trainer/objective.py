"""The objective of a run: a model, its inputs and its loss.

An objective does not know the mesh. `Program` runs it on one, as the program of each device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.hooks import Hooks
from models.lora import add_adapters
from models.weights import Weight
from startrail_jax.tokens.layout import Layout
from trainer.config import LoraConfig
from trainer.planner.models import ModelSizes


class Objective(ABC):
    """A model and its loss.

    The loss of a batch is the weighted mean of the losses of its tokens. Batches are trees of
    arrays [B], [B T] or [B T ...]. A model with several streams of tokens has a T for each.

    The loss of a token may depend on other tokens of its row, as where a document has one reward:
    then the objective is `of_rows`. It gives `numbers` of each token by itself, computed in tiles,
    and a `loss` of all numbers of a row, which lies on several devices. A mean over documents, or
    over pairs of them, is a matter of weights: those of the tokens of each add up to 1.
    """

    causal: bool
    """True if a token attends only to itself and to earlier tokens."""
    head: str
    """Name of the part of the model with all weights that `losses` and `outputs` use."""
    flops_per_token: float
    """FLOPs of a training step for each token, over all devices together."""

    def flops_at(self, length: int) -> float:
        """`flops_per_token` for examples of a length, in a task whose batches differ in length."""
        return self.flops_per_token

    @property
    @abstractmethod
    def sizes(self) -> ModelSizes:
        """The weights of the model with the names and the sizes of their dimensions, by which
        `--plan` also predicts the time and the memory of a step."""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """All weights of the model, by path, without adapters: see `models.weights`. Tensor
        parallelism, adapters, Muon and weight decay go by the names of their dimensions."""
        return self.sizes.weights

    @abstractmethod
    def make_model(
        self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs
    ) -> nnx.Module:
        """The model with the initial values of `weights` and of adapters."""

    @abstractmethod
    def batch_shapes(self, layout: Layout) -> Any:
        """A batch of the run, as `jax.ShapeDtypeStruct`s."""

    @abstractmethod
    def prepare(self, batch: Any, *, training: bool) -> Any:
        """Turns a batch of data into the inputs and targets of the model.

        It is part of the compiled program, and works on global arrays.

        Args:
            batch: a batch as `Dataset.collate` makes it, on the devices.
            training: True if the inputs may be random; otherwise they are always the same.

        Returns:
            A tree with the fields `targets`, [B T ...], and `weights`, float32 [B T], the weights
            of the losses.
        """

    @abstractmethod
    def hidden(self, model: Any, batch: Any) -> Float[Array, "B T width"]:
        """The hidden states from which `losses` and `outputs` start, for a prepared batch."""

    metric_names: tuple[str, ...] = ()
    """Names of the metrics that `hidden_and_auxiliary` returns."""

    def hidden_and_auxiliary(
        self, model: Any, batch: Any
    ) -> tuple[Float[Array, "B T width"], Float32[Array, "B T"] | None, dict[str, Array]]:
        """`hidden` in training, and auxiliary losses of the layers, to add to the loss of each
        token; None without such losses.

        An example is the loss that balances the experts of a layer. Evaluation leaves auxiliary
        losses out. The third result is metrics by name: scalars that are the same on all devices.
        """
        return self.hidden(model, batch), None, {}

    @abstractmethod
    def outputs(self, model: Any, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T out"]:
        """The prediction of the model for every token."""

    @abstractmethod
    def losses(
        self, model: Any, hidden: Float[Array, "B T width"], targets: Any
    ) -> Float32[Array, "B T"]:
        """The loss of every token, if it depends on no other token."""

    of_rows: bool = False
    """True if the loss is `loss` of `numbers`, and False if it is `losses`."""

    def numbers(
        self, model: Any, hidden: Float[Array, "B T width"], batch: Any
    ) -> Float32[Array, "B T n"]:
        """What `loss` needs of every token, from its hidden state and from its part of a prepared
        batch alone, such as the log-probability of its target. Tokens may be any, in any order."""
        return self.losses(model, hidden, batch.targets)[..., None]

    def loss(
        self,
        numbers: Float32[Array, "b t n"],
        batch: Any,
        sums: Callable[[Float32[Array, "b t"], Int32[Array, "b t"]], Float32[Array, "b t"]],
    ) -> tuple[Float32[Array, "b t"], dict[str, Float32[Array, "b t"]]]:
        """The losses of the tokens of a device, and what to report of them, by name: of both, the
        weighted mean over the tokens of a batch is taken.

        Args:
            numbers: those of the device's tokens; 0 for tokens without a weight.
            batch: their part of a prepared batch.
            sums: (x, ids) -> for every token, the sum of x over all tokens of its row that have its
                id and a weight, on whatever device. Ids are from 0 and below the length of a row.
                Differentiable by x.

        Returns:
            Losses, whose values for tokens without a weight are ignored; and metrics with the names
            of `names_of_means`.
        """
        return numbers[..., 0], {}

    names_of_means: tuple[str, ...] = ()
    """Names of the metrics that `loss` returns."""

    def make_optimizer(self, default: optax.GradientTransformation) -> optax.GradientTransformation:
        """Makes the optimizer of the weights: that of `config.optimizer`, or one's own.

        One's own, such as `optax.partition` of groups of weights, takes its learning rate from
        `trainer.parallel.optimizer.learning_rate`. Its moments have the shapes of their weights.

        Args:
            default: the optimizer of `config.optimizer`.
        """
        return default

    def gradients_of_loss(self, gradients: Any) -> Any:
        """The gradients whose norm is reported. Leaves out substitutes of a gradient, such as the
        load of an expert, which moves a bias."""
        return gradients


def abstract_weights(objective: Objective) -> Any:
    """Shapes and types of the weights of a model."""
    model = nnx.eval_shape(
        lambda: objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))
    )
    return nnx.state(model)


def add_lora(
    model: Any, weights: Mapping[str, Weight], lora: LoraConfig, dtype: str, rngs: nnx.Rngs
) -> None:
    """Puts the adapters of a run into its model, if it has some.

    Args:
        weights: `Objective.weights`.
        dtype: type of the activations.
    """
    if lora.rank is not None:
        add_adapters(
            model,
            weights,
            rank=lora.rank,
            scale=lora.scale,
            targets=lora.targets,
            base_dtype=lora.base_dtype or dtype,
            rngs=rngs,
        )
