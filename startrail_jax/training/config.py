"""What can be set for a training run. Imports neither jax nor a model: `--help` is to be fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


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
                _check_minimum(f"mesh.{name}", degree, 1)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model: the keyword arguments of `models.gpt.GPT`."""

    vocab_size: int = 256
    """Number of token ids; bytes need 256."""
    width: int
    """Channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads, a divisor of `heads`."""
    head_dim: int
    """Channels of a head, even."""
    mlp_width: int
    """Hidden channels of the SwiGLU MLP."""
    rope_base: float = 10_000.0
    """Ratio of the longest to the shortest wavelength of the rotary positions."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights and logits are float32."""

    def __post_init__(self) -> None:
        _check_minimum("model.vocab_size", self.vocab_size, 256)
        for name in ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"):
            _check_minimum(f"model.{name}", getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads must divide model.heads; got kv_heads={self.kv_heads}, "
                f"heads={self.heads}. Use kv_heads={self.heads} or kv_heads=1."
            )
        if self.head_dim % 2:
            raise ValueError(
                "model.head_dim must be even for rotary positions; got "
                f"head_dim={self.head_dim}. Use {self.head_dim + 1}."
            )


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
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"optimizer.{name} must be above 0; got {name}={getattr(self, name)}. "
                    "Leave it out for the default."
                )
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(
                "optimizer.warmup_fraction must be at least 0 and below 1; got "
                f"warmup_fraction={self.warmup_fraction}. Use 0.05 for a twentieth of the steps."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    model: GPTConfig
    """Sizes of the model."""
    optimizer: OptimizerConfig
    """Optimizer and learning rate."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Degrees of parallelism."""
    devices: int | None = None
    """Devices to use: the first of them, or simulated ones where there is only a CPU. By default
    all real devices, or 8 simulated ones."""
    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences in a batch, on all devices together."""
    seq_len: int
    """Tokens in a sequence."""
    seed: int = 0
    """Seed of the weights, the order of the data and the sample."""
    log_every: int = 50
    """Steps between reports; each gives the mean training loss since the last."""
    evaluate_every: int = 200
    """Steps between evaluations; there is always one after the last step."""
    validation_windows: int = 64
    """Held-out sequences that an evaluation measures, rounded up to whole batches."""
    sample_length: int = 256
    """Bytes to sample at the end; 0 for none."""
    temperature: float = 0.8
    """Temperature of the sample; 0 takes the likeliest byte."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "log_every", "evaluate_every"):
            _check_minimum(name, getattr(self, name), 1)
        _check_minimum("validation_windows", self.validation_windows, 1)
        for name in ("seed", "sample_length", "temperature"):
            _check_minimum(name, getattr(self, name), 0)
        if self.devices is not None:
            _check_minimum("devices", self.devices, 1)
        if self.batch_size % self.mesh.data:
            raise ValueError(
                f"batch_size must be divisible by mesh.data; got batch_size={self.batch_size}, "
                f"mesh.data={self.mesh.data}. Use batch_size="
                f"{-(-self.batch_size // self.mesh.data) * self.mesh.data}."
            )
        if self.sample_length >= self.seq_len:
            raise ValueError(
                "sample_length must be below seq_len, which holds prompt and sample; got "
                f"sample_length={self.sample_length}, seq_len={self.seq_len}. "
                f"Use {self.seq_len // 2}."
            )


def _check_minimum(name: str, value: Any, minimum: int) -> None:
    if value < minimum:
        raise ValueError(
            f"{name} must be at least {minimum}; got {name}={value}. Leave it out for the default."
        )
