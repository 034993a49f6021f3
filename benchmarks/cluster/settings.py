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
CHOSEN = "chosen"
EVERY = "every"
PLANNED_OPTIONS = {"inner"}
"""Options in the name of a scheme whose effect on the time the planner knows."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What to time, and on which cluster."""

    nodes: int | None = None
    """Number of nodes. The default is 4 emulated nodes, or those that exist."""
    devices: int | None = None
    """Number of devices of a node. The default is 4 simulated devices, or those that exist."""
    rate: str = "100mbit"
    """Rate of an emulated port."""
    inside: str | None = None
    """Rate of a device inside its emulated node, such as "800mbit". Without rails the devices of a
    node share one link of as many times this rate. The default is no limit."""
    rails: bool = False
    """Whether each emulated device has a port of its own, as GPUs of large clusters have, or all
    devices of a node share one. With rails, every device has a process of its own."""
    duplex: Literal["half", "full"] = "half"
    """Whether both directions of an emulated port share its rate, or have it each. On full-duplex
    ports, exchanges of two devices over gloo take 1.5 to 2 times as long as their bytes."""

    schemes: tuple[str, ...] = ()
    """What to time, such as "ring", "startrail-2", "team-4" or "group=2,ring=4,team=2"; the first
    is compared with the others. The default is every named scheme that the devices allow; "every"
    is every legal setting of the planner, with every order of the axes and double rings."""
    orders: tuple[str, ...] = (CHOSEN,)
    """Orders of the mesh axes on the nodes: "chosen", which `make_mesh` takes if it knows the call;
    "default", which it takes if it knows only the degrees; a name such as "rings_inside"; axes with
    the slowest first, such as "team,ring,group,head"; or "best" and "worst" of all, by bytes."""
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
    plan: bool = False
    """Whether to measure the cluster as `startrail_jax.plan --here` does, and to predict each row
    of attention from that. Names of schemes may then have no option but inner."""

    rounds: int = 3
    """Number of rounds; each times all rows once, in turn."""
    free_rounds: int = 1
    """Number of further rounds without limits of the emulated ports."""
    interface: str | None = None
    """Network interface whose bytes are counted. The default is the emulated port, or none."""
    json: Path | None = None
    """File for the whole result."""
    picture: Path | None = None
    """File for a picture, such as cluster.png. Needs matplotlib."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices", "kv_heads"):
            if getattr(self, name) is not None:
                self._check(name, 1)
        for name in ("batch_size", "seq_len", "heads", "head_dim", "layers", "rounds"):
            self._check(name, 1)
        self._check("free_rounds", 0)
        if self.plan and self.train:
            raise InputError(
                "plan predicts attention, not steps of models; got --plan with --train "
                f"{' '.join(self.train)}. Leave out one of them."
            )
        if self.window is not None:
            self._check("window", 1)
            if self.plan or not self.causal:
                raise InputError(
                    "window is one of causal attention, which plan does not predict here; got "
                    f"window={self.window}, causal={self.causal}, plan={self.plan}. Leave out "
                    "--window, or the others."
                )
        unplanned = [x for x in self.schemes if _names_of_options(x) - PLANNED_OPTIONS]
        if self.plan and unplanned:
            raise InputError(
                f"plan predicts schemes without options other than {', '.join(PLANNED_OPTIONS)}; "
                f"got --plan with --schemes {' '.join(unplanned)}. Leave out --plan, or the "
                "options."
            )
        if EVERY in self.schemes and (len(self.schemes) > 1 or self.orders != (CHOSEN,)):
            raise InputError(
                f"--schemes {EVERY} is every setting with every order; got --schemes "
                f"{' '.join(self.schemes)} --orders {' '.join(self.orders)}. Give it alone."
            )
        for name in ("orders", "passes"):
            if not getattr(self, name):
                raise InputError(f"{name} must name one at least; got none. Leave the flag out.")
        # Raises if the topology is none.
        assert self.topology

    def _check(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise InputError(
                f"{name} must be at least {least}; got {name}={getattr(self, name)}. Use more."
            )

    @property
    def topology(self) -> Topology:
        """The emulated cluster."""
        return Topology(
            nodes=self.nodes or DEFAULT_NODES,
            devices=self.devices or DEFAULT_DEVICES,
            rate=self.rate,
            inside=self.inside,
            rails=self.rails,
            duplex=self.duplex,
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


def _names_of_options(scheme: str) -> set[str]:
    """The names of the options after the colon, such as "inner" of "ring:inner=4"."""
    options = scheme.partition(":")[2]
    return {part.partition("=")[0] for part in options.split(",") if part}
