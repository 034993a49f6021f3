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
                _check_minimum(f"mesh.{name}", degree, 1)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, and how they stretch beyond the length that a model was trained on."""

    base: float = 10_000.0
    """Ratio of the longest to the shortest wavelength."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How angles shrink: not; all alike (https://arxiv.org/abs/2306.15595); or the long
    wavelengths alone, as in Llama 3.1 or in YaRN (https://arxiv.org/abs/2309.00071)."""
    factor: float = 1.0
    """By how much the context grows beyond `original_length`."""
    original_length: int | None = None
    """Tokens of the context that the model was trained on; "llama3" and "yarn" need it."""

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ValueError(
                f"model.rope.base must be above 1; got base={self.base}. Use 10000, or more for "
                "long contexts."
            )
        if not self.factor >= 1:
            raise ValueError(
                f"model.rope.factor must be at least 1; got factor={self.factor}. Use the new "
                "length over the one that the model was trained on."
            )
        if (self.scaling == "none") != (self.factor == 1):
            raise ValueError(
                "model.rope.factor must be above 1 with a scaling, and 1 without; got "
                f"scaling={self.scaling!r}, factor={self.factor}. Set both or neither."
            )
        if (self.scaling in ("llama3", "yarn")) != (self.original_length is not None):
            raise ValueError(
                "model.rope.original_length must be given for scaling 'llama3' or 'yarn', and for "
                f"no other; got scaling={self.scaling!r}, original_length={self.original_length}. "
                "Set both or neither."
            )
        if self.original_length is not None:
            _check_minimum("model.rope.original_length", self.original_length, 1)


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
    """Hidden channels of the MLP."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Kind of MLP: gated, of three matrices, or of two with a GELU between."""
    tied_head: bool = False
    """Whether the embedding is the output projection too."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights and logits are float32."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"):
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
class DiTConfig:
    """Sizes of the model: the keyword arguments of `models.dit.DiT`."""

    channels: int
    """Channels of a latent, or of an image."""
    classes: int
    """Classes that a sample can be asked for; 0 for none."""
    caption_length: int = 0
    """Bytes of text that a sample can be asked for, which images attend to; 0 for none."""
    patch: tuple[int, int, int] = (1, 2, 2)
    """Frames, height and width of what becomes a token."""
    width: int
    """Channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads, a divisor of `width`."""
    mlp_width: int
    """Hidden channels of the MLP."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights and the output are float32."""

    def __post_init__(self) -> None:
        for name in ("channels", "width", "layers", "heads", "mlp_width"):
            _check_minimum(f"model.{name}", getattr(self, name), 1)
        for name in ("classes", "caption_length"):
            _check_minimum(f"model.{name}", getattr(self, name), 0)
        for size in self.patch:
            _check_minimum("model.patch", size, 1)
        if self.width % self.heads:
            raise ValueError(
                f"model.heads must divide model.width; got heads={self.heads}, "
                f"width={self.width}. Use a width of {-(-self.width // self.heads) * self.heads}."
            )
        if self.width % 2 or self.width < 8:
            raise ValueError(
                "model.width must be even and at least 8, for sines and cosines of frame, row and "
                f"column; got width={self.width}. Use {max(8, self.width + self.width % 2)}."
            )

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def mlp(self) -> str:
        """Kind of MLP."""
        return "gelu"


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What the model learns of noise, and at which times."""

    target: Literal["flow", "v", "eps"] = "flow"
    """What it predicts: the velocity of rectified flow (https://arxiv.org/abs/2209.03003), or, of
    the diffusion with a cosine schedule, v (https://arxiv.org/abs/2202.00512) or the noise."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Density of the times that it learns; "logit_normal" has more in the middle
    (https://arxiv.org/abs/2403.03206)."""
    dropout: float = 0.1
    """Share of the examples that lose class and caption, where they have any, so that samples can
    be guided."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(
                "diffusion.dropout must be at least 0 and below 1; got "
                f"dropout={self.dropout}. Use 0.1, or 0 for samples that are not to be guided."
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
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"optimizer.{name} must be above 0 and finite; got {name}={value}. "
                    "Leave it out for the default."
                )
        for name in ("final_learning_rate", "weight_decay"):
            _check_minimum(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("warmup_fraction", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(
                    f"optimizer.{name} must be at least 0 and below 1; got {name}={value}. "
                    "Leave it out for the default."
                )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read, and how documents become sequences."""

    path: Path | None = None
    """A text file, *.jsonl, tokens in *.bin or *.npy, or a folder of such files, all of one kind.
    By default the source of the Python standard library."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json for text. By default a token is a byte of UTF-8."""
    text_key: str = "text"
    """The field of a JSONL line that holds the text."""
    bin_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the tokens in *.bin files."""
    end_of_document: int | None = None
    """Token that ends a document. Bytes use 0; a tokenizer's own is found by its usual names;
    files of tokens without one are a single document each."""
    mask_documents: bool = True
    """Whether a token sees only its own document; otherwise all that is before it in its
    sequence."""
    validation_path: Path | None = None
    """Held-out data, of the kind of `path`. By default a share of `path`."""
    held_out: float = 0.05
    """Share that is held out where there is no `validation_path`: of the documents of text, or of
    the tokens at the end of each file of tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(
                "data.held_out must be above 0 and below 1; got "
                f"held_out={self.held_out}. Use 0.05, or give --data.validation-path."
            )
        if self.end_of_document is not None:
            _check_minimum("data.end_of_document", self.end_of_document, 0)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What images or latents to read."""

    path: Path | None = None
    """A folder of images, with one of its own for each class, or an *.npz file of latents. By
    default the handwritten digits that come with scikit-learn."""
    held_out: float = 0.1
    """Share of the examples that is held out."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(
                f"data.held_out must be above 0 and below 1; got held_out={self.held_out}. Use 0.1."
            )

    @property
    def holds_latents(self) -> bool:
        """Whether the data are no pixels that could be shown."""
        return self.path is not None and self.path.suffix == ".npz"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved, and how much of it is kept."""

    every: int = 200
    """Steps between checkpoints; there is always one after the last step, and one on SIGTERM."""
    keep: int = 2
    """Newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_minimum(f"checkpoint.{name}", value, 1)


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
            _check_minimum(name, getattr(self, name), 1)
        _check_minimum("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32; got seed={self.seed}. Use another.")
        for name in ("devices", "tile"):
            if getattr(self, name) is not None:
                _check_minimum(name, getattr(self, name), 1)
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


@dataclass(frozen=True, kw_only=True)
class GPTTrainConfig(TrainConfig):
    """A run of a GPT."""

    kind: ClassVar[str] = "gpt"
    causal: ClassVar[bool] = True

    model: GPTConfig
    """Sizes of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """What to read."""

    seq_len: int
    """Tokens in a sequence."""
    sample_length: int = 0
    """Tokens to sample at the end; 0 for none."""
    temperature: float = 0.8
    """Temperature of the sample; 0 takes the likeliest token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_minimum("seq_len", self.seq_len, 1)
        for name in ("sample_length", "temperature"):
            _check_minimum(name, getattr(self, name), 0)
        if self.sample_length >= self.seq_len:
            raise ValueError(
                "sample_length must be below seq_len, which holds prompt and sample; got "
                f"sample_length={self.sample_length}, seq_len={self.seq_len}. "
                f"Use {self.seq_len // 2}."
            )

    @property
    def num_tokens(self) -> int:
        return self.seq_len


@dataclass(frozen=True, kw_only=True)
class DiTTrainConfig(TrainConfig):
    """A run of a diffusion transformer."""

    kind: ClassVar[str] = "dit"
    causal: ClassVar[bool] = False

    model: DiTConfig
    """Sizes of the model."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """What the model learns."""
    data: ImageConfig = field(default_factory=ImageConfig)
    """What to read."""

    size: tuple[int, int, int]
    """Frames, height and width of a latent, or of an image of one frame."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.size:
            _check_minimum("size", size, 1)
        if any(size % patch for size, patch in zip(self.size, self.model.patch, strict=True)):
            raise ValueError(
                "model.patch must divide size, in frames, height and width; got "
                f"patch={self.model.patch}, size={self.size}. Change one of them."
            )

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in frames, height and width."""
        frames, height, width = (n // m for n, m in zip(self.size, self.model.patch, strict=True))
        return frames, height, width

    @property
    def patch_elements(self) -> int:
        """Numbers in a patch: those that become a token."""
        return math.prod(self.model.patch) * self.model.channels


def _check_minimum(name: str, value: Any, minimum: int) -> None:
    if not minimum <= value < math.inf:
        raise ValueError(
            f"{name} must be at least {minimum}; got {name}={value}. Leave it out for the default."
        )
