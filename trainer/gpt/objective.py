"""The objective of a language model: to predict the next token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Integer

from models.config import GPTConfig
from models.gpt import GPT
from models.hooks import Hooks
from models.parts.gpt import gpt_weights
from startrail_jax.tokens.layout import Layout
from trainer.config import LoraConfig
from trainer.gpt.batches import PADDING, TokenBatch
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.objectives.replay import EXPERTS
from trainer.gpt.sizes import sizes_of
from trainer.objective import Objective, add_lora
from trainer.parallel.partition import path_name
from trainer.planner.models import ModelSizes


class NextToken(Objective):
    """Cross-entropy of the token after each token, in nats."""

    causal = GPTTrainConfig.causal

    def __init__(self, config: GPTTrainConfig) -> None:
        self._config = config
        self.head = config.model.head
        self.flops_per_token = self.sizes.flops_per_token(config.seq_len)

    def flops_at(self, length: int) -> float:
        return self.sizes.flops_per_token(length)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        return sizes_of(self._config)

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> GPT:
        config = self._config
        windows = (None,) if config.model.has_one_window else config.layer_windows
        return make_gpt(config.model, config.lora, attention_fn, hooks, rngs, windows=windows)

    def batch_shapes(self, layout: Layout) -> TokenBatch:
        shape = (self._config.batch_size, layout.padded_length(self._config.seq_len))
        integers: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
        segments = integers if self._config.data.mask_documents else None
        ends = integers if self._config.shares_prefixes else None
        return TokenBatch(integers, integers, integers, segments, weights, visible_until=ends)

    def prepare(self, batch: TokenBatch, *, training: bool) -> TokenBatch:
        return batch

    def hidden(self, model: GPT, batch: TokenBatch) -> Float[Array, "B T width"]:
        arrays: Any = (batch.tokens, batch.positions, batch.segment_ids)
        return model.hidden(*arrays, **_options(batch))

    def make_optimizer(self, default: optax.GradientTransformation) -> optax.GradientTransformation:
        experts = self._config.model.experts
        if not experts.has_choice_bias:
            return default
        rate: Any = experts.balance_rate
        steps = optax.chain(optax.scale_by_sign(), optax.scale(-rate)) if rate else None
        steps = steps or optax.set_to_zero()
        return optax.partition({"default": default, "balance": steps}, _balanced)

    def gradients_of_loss(self, gradients: Any) -> Any:
        if not self._config.model.experts.has_choice_bias:
            return gradients
        labels = _balanced(gradients)
        return jax.tree.map(lambda x, y: None if y == "balance" else x, gradients, labels)

    @property
    def metric_names(self) -> tuple[str, ...]:
        has_experts = "experts" in self._config.model.layer_feed_forwards
        return ("busiest_expert",) if has_experts else ()

    def hidden_and_auxiliary(
        self, model: GPT, batch: TokenBatch
    ) -> tuple[Float[Array, "B T width"], Float32[Array, "B T"] | None, dict[str, Array]]:
        arrays: Any = (batch.tokens, batch.positions, batch.segment_ids, batch.weights)
        hidden, added = model.hidden_and_added(*arrays, **_options(batch))
        if added is None:
            return hidden, None, {}
        return hidden, added.auxiliary, {"busiest_expert": added.busiest}

    def outputs(self, model: GPT, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        return model.logits(hidden)

    def losses(
        self, model: GPT, hidden: Float[Array, "B T width"], targets: Int32[Array, "B T"]
    ) -> Float32[Array, "B T"]:
        logits = model.logits(hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


class OfRollouts(NextToken):
    """A loss of rows, on data with numbers beside their tokens: see `RowLoss`."""

    of_rows = True

    def __init__(self, config: GPTTrainConfig) -> None:
        super().__init__(config)
        assert config.row_loss is not None, "the next token needs none"
        self._loss = config.row_loss
        self.names_of_means = self._loss.metrics

    def batch_shapes(self, layout: Layout) -> TokenBatch:
        batch: Any = super().batch_shapes(layout)
        shape = batch.weights.shape
        numbers: Any = {
            name: jax.ShapeDtypeStruct((*shape, *dims), kind)
            for name, (kind, dims) in (self._config.arrays or {}).items()
        }
        return batch._replace(numbers=numbers)

    def numbers(
        self, model: GPT, hidden: Float[Array, "B T width"], batch: TokenBatch
    ) -> Float32[Array, "B T n"]:
        return self._loss.numbers(model.logits(hidden), batch)

    def loss(
        self, numbers: Float32[Array, "b t n"], batch: TokenBatch, sums: Callable[..., Array]
    ) -> tuple[Float32[Array, "b t"], dict[str, Float32[Array, "b t"]]]:
        return self._loss.losses(numbers, batch, sums)


def _options(batch: TokenBatch) -> dict[str, Any]:
    return {"experts": _given_experts(batch), "visible_until": batch.visible_until}


def _given_experts(batch: TokenBatch) -> Integer[Array, "B T layers k"] | None:
    """The experts that a batch names; the first ones for padding, as those of a token differ."""
    experts: Any = (batch.numbers or {}).get(EXPERTS)
    if experts is None:
        return None
    assert batch.segment_ids is not None, "rollouts attend to themselves alone"
    is_padding = jnp.asarray(batch.segment_ids == PADDING)[..., None, None]
    first = jnp.arange(experts.shape[-1], dtype=experts.dtype)[None, None, None]
    return jnp.where(is_padding, first, experts)


def _balanced(weights: Any) -> Any:
    """Which weights are moved to balance experts."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "balance" if "choice_bias" in path_name(path) else "default", weights
    )


def make_gpt(
    model: GPTConfig,
    lora: LoraConfig,
    attention_fn: Callable[..., Array],
    hooks: Hooks,
    rngs: nnx.Rngs,
    **others: Any,
) -> GPT:
    """The model of a run, with its adapters if it has some; `others` are arguments of `GPT`."""
    gpt = GPT(model, attention_fn=attention_fn, hooks=hooks, rngs=rngs, **others)
    add_lora(gpt, gpt_weights(model), lora, model.dtype, rngs)
    return gpt
