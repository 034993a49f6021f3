"""AdamW with clipping, linear warm-up and cosine decay."""

from __future__ import annotations

from typing import Any

import jax
import optax

from trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of earlier updates.

    Neither the first update nor the last has a rate of 0.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(round(config.warmup_fraction * steps), steps - 1),
        decay_steps=steps + 1,
        end_value=config.final_learning_rate,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps.

    Scales of norms, biases and sinks are not decayed. They are recognised by their names, not by
    their dimensions: stacked for all layers, they are matrices.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(weights: Any) -> Any:
    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return not any(part in name for part in ("scale", "_bias", "sinks"))

    return jax.tree_util.tree_map_with_path(is_decayed, weights)
