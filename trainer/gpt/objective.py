"""The objective of a language model: to predict the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.gpt import GPT
from models.hooks import Hooks
from models.rope import Rope
from startrail_jax.layout import Layout
from trainer.gpt.batches import TokenBatch
from trainer.gpt.config import GPTConfig, GPTTrainConfig
from trainer.gpt.flops import gpt_flops_per_token


class NextToken:
    """Cross-entropy of the token after each token, in nats: an `Objective`."""

    causal = True

    def __init__(self, config: GPTTrainConfig) -> None:
        self._config = config
        self.head = "embedding" if config.model.tied_head else "head"
        self.flops_per_token = gpt_flops_per_token(config.model, config.seq_len)

    def make_model(self, attention_fn: Callable[..., Array], hooks: Hooks, rngs: nnx.Rngs) -> GPT:
        arguments = model_arguments(self._config.model)
        return GPT(**arguments, attention_fn=attention_fn, hooks=hooks, rngs=rngs)

    def batch_shapes(self, layout: Layout) -> TokenBatch:
        layout.check_length(self._config.seq_len)
        shape = (self._config.batch_size, self._config.seq_len)
        integers: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
        segments = integers if self._config.data.mask_documents else None
        return TokenBatch(integers, integers, integers, segments, weights)

    def prepare(self, batch: TokenBatch, *, training: bool) -> TokenBatch:
        return batch

    def hidden(self, model: GPT, batch: TokenBatch) -> Float[Array, "B T width"]:
        tokens: Any = batch.tokens
        positions: Any = batch.positions
        segment_ids: Any = batch.segment_ids
        return model.hidden(tokens, positions, segment_ids)

    def outputs(self, model: GPT, hidden: Float[Array, "B T width"]) -> Float32[Array, "B T vocab"]:
        return model.logits(hidden)

    def losses(
        self, model: GPT, hidden: Float[Array, "B T width"], targets: Int32[Array, "B T"]
    ) -> Float32[Array, "B T"]:
        logits = model.logits(hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def model_arguments(config: GPTConfig) -> dict[str, Any]:
    """The keyword arguments of `models.gpt.GPT` for a config."""
    rope = Rope(head_dim=config.head_dim, **vars(config.rope))
    return vars(config) | {"rope": rope}
