"""Settings of `run.py`: flags of its command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.cluster.links import PORT
from benchmarks.cluster.nodes import Topology
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout

DEFAULT_NODES, DEFAULT_DEVICES = 4, 4
PASSES = ("forward", "both")
LOCAL_LAYERS = 5
"""Layers with a window before one without, as in Gemma 3."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What to time, and on which cluster."""

    nodes: int | None = None
    """Number of nodes. The default is 4 emulated nodes, or those that exist."""
    devices: int | None = None
    """Number of devices of a node. The default is 4 simulated devices, or those that exist."""
    rate: str = "100mbit"
    """Rate of an emulated port, which both directions share."""
    rails: bool = False
    """Whether each emulated device has a port of its own, as GPUs of large clusters have, or all
    devices of a node share one. With rails, every device has a process of its own."""
    inside: str | None = None
    """With rails: rate of a device inside its emulated node, such as "800mbit". The default is no
    limit."""

    schemes: tuple[str, ...] = ("ring", "train-default")
    """What to time, such as "ring", "startrail-2", "team-4" or "group=2,ring=4,team=2"; the first
    is compared with the others."""
    train: tuple[Literal["gpt", "dit"], ...] = ()
    """Models of which a training step is timed instead of attention."""

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
    layers: int = 2
    """Number of layers of the models of `train`, whose width is heads * head_dim."""
    causal: bool = True
    """Whether attention is causal. The GPT always is, the DiT never."""
    window: int | None = None
    """Number of keys that a query sees, its own included: of causal attention, or in five of six
    layers of the GPT. The default is all earlier ones."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of attention, or of the activations of the models."""
    passes: tuple[Literal["forward", "both"], ...] = PASSES
    """The forward pass alone, and both passes."""

    rounds: int = 3
    """Number of rounds; each times all rows once, in turn."""
    interface: str | None = None
    """Network interface whose bytes are counted. The default is the emulated port, or none."""
    json: Path | None = None
    """File for the whole result."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices", "kv_heads", "window"):
            if getattr(self, name) is not None:
                self._check(name)
        for name in ("batch_size", "seq_len", "heads", "head_dim", "layers", "rounds"):
            self._check(name)
        if self.window is not None and not self.causal:
            raise InputError(
                "window is one of causal attention; got "
                f"window={self.window}, causal={self.causal}. Leave out one of them."
            )
        for name in ("schemes", "passes"):
            if not getattr(self, name):
                raise InputError(f"{name} must name one at least; got none. Leave the flag out.")
        # Raises if the topology is none.
        assert self.topology

    def _check(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise InputError(
                f"{name} must be at least 1; got {name}={getattr(self, name)}. Use more."
            )

    @property
    def topology(self) -> Topology:
        """The emulated cluster."""
        return Topology(
            nodes=self.nodes or DEFAULT_NODES,
            devices=self.devices or DEFAULT_DEVICES,
            rate=self.rate,
            rails=self.rails,
            inside=self.inside,
        )

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads."""
        return self.kv_heads or self.heads

    @property
    def layout(self) -> str:
        """Order of tokens in which all devices have the same work."""
        return "zigzag" if self.causal else "contiguous"

    @property
    def call(self) -> dict[str, Any]:
        """What is known of the attention call: see `TrainConfig.attention_call`."""
        names = ("heads", "head_dim", "dtype", "causal", "layout")
        call = {name: getattr(self, name) for name in names} | {"kv_heads": self.num_kv_heads}
        if self.window is None:
            return call
        windows = {self.window: LOCAL_LAYERS, None: 1} if self.train else {self.window: 1}
        return call | {"seq_len": self.seq_len, "windows": windows}

    def of_model(self, kind: str) -> ClusterSettings:
        """These settings with the mask and the key heads of a kind of model."""
        if kind == "gpt":
            return dataclasses.replace(self, causal=True)
        return dataclasses.replace(self, causal=False, kv_heads=None)

    def check_length(self, num_devices: int) -> None:
        """Raises a ValueError unless so many devices divide the sequence in the order of tokens."""
        for own in [self.of_model(kind) for kind in self.train] or [self]:
            layout = Layout(own.layout, num_devices)
            layout.check_length(self.seq_len, "--seq-len")

    @property
    def port(self) -> str:
        """The interface that is counted in an emulated node."""
        return self.interface or PORT
