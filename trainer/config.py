"""What can be set for a training run. Imports neither jax nor a model: `--help` is to be fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

SHARDED_AXES = ("data", "group", "ring", "team", "head")
"""The mesh axes over which ZeRO may split a state, slowest first."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of parallelism. The product must be the number of devices."""

    data: int = 1
    """Shards of the batch."""
    team: int | None = None
    """Devices that share their queries; the paper's C. By default 2 where the devices allow it."""
    group: int | None = None
    """Devices that gather one key unit. As `team` by default."""
    ring: int | None = None
    """Devices round which keys travel. By default the devices that the other degrees leave."""
    head: int = 1
    """Ulysses degree: devices that trade tokens for heads."""
    tensor: int = 1
    """Shards of heads and MLP channels."""

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            if degree is not None:
                check_minimum(f"mesh.{name}", degree, 1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping, linear warm-up and cosine decay."""

    learning_rate: float
    """Peak learning rate."""
    final_learning_rate: float = 0.0
    """Learning rate after the last step."""
    warmup_fraction: float = 0.05
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """Decay of weight matrices; vectors are not decayed."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    beta1: float = 0.9
    """Decay of the mean gradient."""
    beta2: float = 0.95
    """Decay of the mean squared gradient."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"optimizer.{name} must be above 0 and finite; got {name}={value}. "
                    "Leave it out for the default."
                )
        for name in ("final_learning_rate", "weight_decay"):
            check_minimum(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("warmup_fraction", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(
                    f"optimizer.{name} must be at least 0 and below 1; got {name}={value}. "
                    "Leave it out for the default."
                )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved, and how much of it is kept."""

    every: int = 200
    """Steps between checkpoints; there is always one after the last step, and one on SIGTERM."""
    keep: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_minimum(f"checkpoint.{name}", value, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run, whatever it trains: see `GPTTrainConfig` and `DiTTrainConfig`."""

    kind: ClassVar[str]
    """Of the model, as config.json names it."""
    causal: ClassVar[bool]
    """Whether a token sees only those before it."""

    model: Any
    """Sizes of the model."""
    optimizer: OptimizerConfig
    """Optimizer and learning rate."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Degrees of parallelism."""
    data: Any
    """What to read."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save."""

    devices: int | None = None
    """Devices to use: the first of them, or simulated ones where there is only a CPU. By default
    all real devices, or 8 simulated ones."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO: what is split over devices: 1 the optimizer's state, 2 gradients too, 3 weights too."""
    zero_axes: tuple[Literal["data", "group", "ring", "team", "head"], ...] = SHARDED_AXES
    """Mesh axes that ZeRO splits over. The last ones alone keep gathers between near devices
    (LoongTrain's hybrid ZeRO, https://arxiv.org/abs/2406.18485)."""
    remat: Literal["none", "attention_saved", "full"] = "none"
    """What a layer computes again in the backward pass: nothing; all but attention, which is never
    recomputed; or all."""
    offload: bool = False
    """Whether what remat saves waits in the host's memory. GPUs only; needs a `remat`."""
    tile: int | None = None
    """Tokens of a device that MLP and loss treat at a time; fewer save memory. By default all."""
    accumulation: int = 1
    """Parts into which a batch is cut, one after another; fewer sequences at a time save memory."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences, or images, in a batch, on all devices together."""
    seed: int = 0
    """Seed of the weights, the order of the data, noise, and the sample."""

    run_dir: Path
    """Folder of the run: checkpoints, metrics, config. A run that is found there goes on."""
    allow_changes: bool = False
    """Whether a run that is found may go on with other data, batches, loss, optimizer, steps or
    rotary positions; the rest of its model may never change."""
    log_every: int = 50
    """Steps between reports; each gives the mean training loss since the last."""
    tensorboard: bool = True
    """Whether to write metrics for TensorBoard beside metrics.jsonl."""
    evaluate_every: int = 200
    """Steps between evaluations; there is always one after the last step."""
    validation_sequences: int = 64
    """Held-out sequences, or images, that an evaluation measures, rounded up to whole batches."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do where the loss or the gradient is not finite. Weights never take such a step."""
    profile: tuple[int, int] | None = None
    """First and last step to trace; the trace goes to the folder `profile` of the run."""
    ema_decay: float | None = None
    """Decay of the average of the weights that samples are drawn from; None for no average."""

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch_size", "accumulation", "log_every", "evaluate_every"),
            "validation_sequences",
        ):
            check_minimum(name, getattr(self, name), 1)
        check_minimum("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32; got seed={self.seed}. Use another.")
        for name in ("devices", "tile"):
            if getattr(self, name) is not None:
                check_minimum(name, getattr(self, name), 1)
        parts = self.mesh.data * self.accumulation
        if self.batch_size % parts:
            raise ValueError(
                "batch_size must be divisible by mesh.data * accumulation; got "
                f"batch_size={self.batch_size}, mesh.data={self.mesh.data}, "
                f"accumulation={self.accumulation}. Use batch_size="
                f"{-(-self.batch_size // parts) * parts}."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(
                f"ema_decay must be above 0 and below 1; got ema_decay={self.ema_decay}. "
                "Use 0.999, or None for no average."
            )
        if self.offload and self.remat == "none":
            raise ValueError(
                "offload moves what remat saves, so it needs a remat; got offload=True, "
                "remat='none'. Use --remat attention_saved."
            )
        if self.zero and not self.zero_axes:
            raise ValueError(
                f"zero_axes must name an axis for zero={self.zero}; got none. Leave it out for all."
            )
        if not self.zero and self.zero_axes != SHARDED_AXES:
            raise ValueError(
                "zero_axes need a ZeRO level of at least 1; got zero=0, "
                f"zero_axes={self.zero_axes}. Use --zero 1, 2 or 3."
            )
        if len(set(self.zero_axes)) < len(self.zero_axes):
            raise ValueError(
                f"zero_axes must name an axis once; got zero_axes={self.zero_axes}. "
                "Leave the second out."
            )
        if self.profile is not None:
            first, last = self.profile
            if not 1 <= first <= last <= self.steps:
                raise ValueError(
                    "profile must be a first and a last step of the run; got "
                    f"profile={self.profile}, steps={self.steps}. Use, say, --profile 10 12."
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence or of an image."""
        raise NotImplementedError


def check_minimum(name: str, value: Any, minimum: int) -> None:
    if not minimum <= value < math.inf:
        raise ValueError(
            f"{name} must be at least {minimum}; got {name}={value}. Leave it out for the default."
        )
