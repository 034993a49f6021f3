"""Training steps as `run.py` times them: those that train.py runs, on random data."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import startrail_jax as st
from benchmarks.cluster.attention import AttentionCalls
from benchmarks.cluster.rounds import Timed
from benchmarks.cluster.settings import LOCAL_LAYERS, ClusterSettings
from benchmarks.schemes import Scheme
from startrail_jax.analysis.messages import read_messages
from startrail_jax.tokens.layout import Layout
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data.batches import place as put
from trainer.dit.batches import Grid, ImageBatch
from trainer.dit.config import DiTConfig, DiTTrainConfig
from trainer.gpt.batches import TokenBatch
from trainer.gpt.config import DataConfig, GPTConfig, GPTTrainConfig
from trainer.parallel.step import Program
from trainer.tasks import TASKS

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
"""Largest relative difference of the first loss from that of the first row."""
CLASSES, CHANNELS = 10, 4
TITLES = {"gpt": "GPT step", "dit": "DiT step"}


class TrainingSteps:
    """The training steps of all schemes, for one kind of model.

    Args:
        kind: "gpt" or "dit".
        settings: sizes of the model's attention.
        calls: the calls of its attention, which know the devices.
    """

    def __init__(self, kind: str, settings: ClusterSettings, calls: AttentionCalls) -> None:
        self._kind = kind
        self._calls = calls
        self._first_loss: float | None = None
        self._tolerance = LOSS_TOLERANCE[settings.dtype]
        self.config = train_config(kind, settings)

    def prepare(self, scheme: Scheme) -> Timed:
        """Compiles the step of a scheme and takes the first one."""
        place, order = self._calls.place, self._calls.order(scheme)
        objective = TASKS[self._kind].make_objective(self.config)
        options = self.config.attention_of_model | scheme.options
        mesh = place.mesh(scheme.degrees, order)
        attention = st.Attention(mesh, causal=objective.causal, **options)
        program = Program(self.config, attention, objective)
        batch = put(random_batch(self.config, attention.layout), program.batch_sharding)
        state = random_state(program)
        step = program.train_step.lower(state, batch).compile()
        sent = partial(read_messages, step.as_text())

        def take() -> float:
            nonlocal state
            state, metrics = step(state, batch)
            jax.block_until_ready(state)
            return float(metrics.loss)

        loss = take()
        first = self._first_loss = self._first_loss or loss
        return Timed(
            name=scheme.name,
            what=TITLES[self._kind],
            run=take,
            # Counted in the program: a step sends more than attention does.
            expected=place.received(scheme.degrees, order, sent),
            error=abs(loss - first) / abs(first),
            tolerance=self._tolerance,
        )


def train_config(kind: str, settings: ClusterSettings) -> TrainConfig:
    """The config of a run of so many tokens and heads."""
    width = settings.heads * settings.head_dim
    sizes: dict[str, Any] = {"width": width, "layers": settings.layers, "heads": settings.heads,
             "mlp_width": width, "dtype": settings.dtype}  # fmt: skip
    run: dict[str, Any] = {"optimizer": OptimizerConfig(learning_rate=1e-3), "steps": 1000,
           "batch_size": settings.batch_size, "run_dir": Path("unused")}  # fmt: skip
    if kind == "gpt":
        heads: dict[str, Any] = {"kv_heads": settings.num_kv_heads, "head_dim": settings.head_dim}
        if settings.window is not None:
            heads["windows"] = (settings.window,) * LOCAL_LAYERS + ("none",)
        return GPTTrainConfig(
            model=GPTConfig(**sizes, **heads),
            data=DataConfig(mask_documents=False),
            seq_len=settings.seq_len,
            **run,
        )
    height = max(x for x in range(1, math.isqrt(settings.seq_len) + 1) if settings.seq_len % x == 0)
    return DiTTrainConfig(
        model=DiTConfig(channels=CHANNELS, classes=CLASSES, patch=(1, 1, 1), **sizes),
        size=(1, height, settings.seq_len // height),
        **run,
    )


def random_batch(config: TrainConfig, layout: Layout) -> Any:
    """The same random sequences, or images, in the order of any layout."""
    rng = np.random.default_rng(0)
    rows = config.batch_size
    if isinstance(config, GPTTrainConfig):
        stream = rng.integers(0, config.model.vocab_size, (rows, config.seq_len + 1), np.int32)
        positions = np.broadcast_to(np.arange(config.seq_len, dtype=np.int32), stream[:, 1:].shape)
        tokens, targets, positions = (
            layout.permute(x) for x in (stream[:, :-1], stream[:, 1:], positions)
        )
        weights = np.ones(tokens.shape, np.float32)
        return TokenBatch(tokens, targets, positions, None, weights)
    assert isinstance(config, DiTTrainConfig)
    patches = rng.normal(size=(rows, config.num_tokens, config.patch_elements)).astype(np.float32)
    padding = layout.padded_length(config.num_tokens) - config.num_tokens
    patches = layout.permute(np.pad(patches, ((0, 0), (0, padding), (0, 0))))
    numbers = np.arange(rows, dtype=np.int32)
    grid = Grid.of(config.size, config.model.patch)
    return ImageBatch(patches, numbers % CLASSES, numbers, grid)


def random_state(program: Program) -> Any:
    """Random weights and an optimizer that has taken no step, the same on every mesh."""
    rng = np.random.default_rng(1)

    def filled(shape: Any, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(shape.shape, shape.sharding, value.__getitem__)

    def weight(shape: Any) -> jax.Array:
        return filled(shape, (0.02 * rng.standard_normal(shape.shape)).astype(shape.dtype))

    shapes = program.state_shapes
    return shapes._replace(
        weights=jax.tree.map(weight, shapes.weights),
        optimizer=jax.tree.map(lambda x: filled(x, np.zeros(x.shape, x.dtype)), shapes.optimizer),
    )
