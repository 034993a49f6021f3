"""Settings of `run.py`: flags of its command line, and the schemes that these name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.schemes import Scheme, read_scheme
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import MeshConfig, check_minimum
from trainer.parallel.degrees import choose_degrees

TRAIN_DEFAULT = "train-default"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What to time."""

    schemes: tuple[str, ...] = ("ring", TRAIN_DEFAULT)
    """What to time, such as "ring", "startrail-2", "team-4" or "group=2,ring=4,team=2", or
    "train-default", which train.py takes without flags; the first is compared with the others."""
    batch_size: int = 1
    """Number of sequences."""
    seq_len: int = 1024
    """Number of tokens of a sequence."""
    heads: int = 16
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key heads. The default is as many as query heads."""
    head_dim: int = 64
    """Number of channels of a head."""
    causal: bool = True
    """Whether attention is causal."""
    window: int | None = None
    """Number of keys that a query sees, its own included, if attention is causal. The default is
    all earlier ones."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of attention."""
    rounds: int = 3
    """Number of rounds; each times all rows once, in turn."""

    def __post_init__(self) -> None:
        sizes = ("batch_size", "seq_len", "heads", "head_dim")
        for name in (*sizes, "kv_heads", "window", "rounds"):
            if getattr(self, name) is not None:
                check_minimum(name, getattr(self, name), 1)
        if self.window is not None and not self.causal:
            raise InputError(
                "window is one of causal attention; got "
                f"window={self.window}, causal={self.causal}. Leave out one of them."
            )
        if not self.schemes:
            raise InputError("schemes must name one at least; got none. Leave the flag out.")

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads."""
        return self.kv_heads or self.heads

    @property
    def layout(self) -> str:
        """Order of tokens in which all devices have the same work, unless a scheme has its own."""
        return "zigzag" if self.causal else "contiguous"

    @property
    def call(self) -> dict[str, Any]:
        """What is known of the attention call: see `TrainConfig.attention_call`."""
        names = ("heads", "head_dim", "dtype", "causal", "layout")
        call = {name: getattr(self, name) for name in names} | {"kv_heads": self.num_kv_heads}
        if self.window is None:
            return call
        return call | {"seq_len": self.seq_len, "windows": {self.window: 1}}

    def check_length(self, num_devices: int) -> None:
        """Raises a ValueError unless so many devices divide the sequence in the order of tokens."""
        Layout(self.layout, num_devices).check_length(self.seq_len, "--seq-len")

    def read_schemes(self, nodes: Sequence[int], platform: str = "cpu") -> list[Scheme]:
        """The schemes that are named."""
        default = choose_degrees(
            MeshConfig(), len(nodes), self.call, nodes=nodes, platform=platform
        )
        return [
            Scheme(name=name, degrees=default)
            if name == TRAIN_DEFAULT
            else read_scheme(name, len(nodes))
            for name in self.schemes
        ]
