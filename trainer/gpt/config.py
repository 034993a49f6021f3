"""What can be set for a run of a GPT. Imports no jax: `--help` is to be fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from trainer.config import TrainConfig, check_minimum


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
            check_minimum("model.rope.original_length", self.original_length, 1)


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
            check_minimum(f"model.{name}", getattr(self, name), 1)
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
            check_minimum("data.end_of_document", self.end_of_document, 0)


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
        check_minimum("seq_len", self.seq_len, 1)
        for name in ("sample_length", "temperature"):
            check_minimum(name, getattr(self, name), 0)
        if self.sample_length >= self.seq_len:
            raise ValueError(
                "sample_length must be below seq_len, which holds prompt and sample; got "
                f"sample_length={self.sample_length}, seq_len={self.seq_len}. "
                f"Use {self.seq_len // 2}."
            )

    @property
    def num_tokens(self) -> int:
        return self.seq_len
