"""Settings of `run.py`: flags of its command line, and the schemes that these name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import startrail_jax as st
from benchmarks.cluster.links import PORT
from benchmarks.cluster.nodes import Topology
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import MeshConfig, check_minimum
from trainer.parallel.degrees import choose_degrees

PASSES = ("forward", "both")
LOCAL_LAYERS = 5
"""Layers with a window before one without, as in Gemma 3."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Topology):
    """What to time, and on which cluster. The topology is that of emulated nodes."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("batch_size", "seq_len", "heads", "head_dim", "layers")
        for name in (*sizes, "kv_heads", "window", "rounds"):
            if getattr(self, name) is not None:
                check_minimum(name, getattr(self, name), 1)
        if self.window is not None and not self.causal:
            raise InputError(
                "window is one of causal attention; got "
                f"window={self.window}, causal={self.causal}. Leave out one of them."
            )
        for name in ("schemes", "passes"):
            if not getattr(self, name):
                raise InputError(f"{name} must name one at least; got none. Leave the flag out.")

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


# Schemes -----------------------------------------------------------------------------------------

# Name -> degrees, given the number of devices and the number in the name.
SCHEMES: dict[str, Callable[[int, int], st.Degrees]] = {
    "ring": lambda n, _: st.Degrees.ring_attention(n),
    "all-gather": lambda n, _: st.Degrees.all_gather(n),
    "ulysses": lambda n, _: st.Degrees.ulysses(n),
    "head-U": lambda n, u: st.Degrees.loongtrain(n, head=u),
    "published-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "startrail-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "team-A": lambda n, a: st.Degrees(team=a, ring=n // a),
}
TRAIN_DEFAULT = "train-default"
HELP = (
    "ring, all-gather, ulysses; head-U (LoongTrain: Ulysses over U devices, rings outside); "
    "startrail-C and published-C (StarTrail here and in its paper); team-A (teams of A, a ring); "
    "train-default (what train.py takes without flags); or degrees, such as "
    "group=2,ring=4,team=2; with options of attention after a colon, such as ring:inner=4 or "
    "team-4:gradient_dtype=bfloat16"
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A setting of the degrees under a name."""

    name: str
    """Its name in the table."""
    degrees: st.Degrees
    """Its degrees."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `Attention` and of `st.communication`."""


def read_scheme(text: str, num_devices: int) -> Scheme:
    """Reads the name of a scheme, or its degrees.

    Args:
        text: the name: see `HELP`.
        num_devices: number of devices of the cluster.

    Raises:
        ValueError: if there is no such scheme, or none for so many devices.
    """
    base, colon, words = text.partition(":")
    options: dict[str, Any] = {}
    if colon:
        known = {"inner": int, "gradient_dtype": str, "exchange": str}
        options = _read_pairs("Options of a scheme", words, known)
    if "=" in base:
        degrees = st.Degrees(
            **_read_pairs("Degrees of a scheme", base, dict.fromkeys(SEQUENCE_ROLES, int))
        )
    else:
        name = re.sub(r"-\d+$", "", base)
        number = int(base[len(name) + 1 :] or 0)
        found = next((x for x in SCHEMES if x == name or (number and x[:-2] == name)), None)
        if found is None or (found == name) != (number == 0):
            raise InputError(f"A scheme must be one of {HELP}; got {text!r}. Correct the name.")
        degrees = SCHEMES[found](num_devices, number)
        options |= {"published": True} if name == "published" else {}
    if degrees.sequence != num_devices:
        raise InputError(
            f"The product of the degrees must be the number of devices; got {text}, which has "
            f"{degrees.sequence}, for {num_devices} devices. Change a degree, or the devices."
        )
    return Scheme(name=text, degrees=degrees, options=options)


def _read_pairs(what: str, text: str, known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Reads text such as "inner=4,gradient_dtype=bfloat16"."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        found = {name: known[name](value) for name, _, value in pairs}
    except (KeyError, ValueError):
        found = {}
    if len(found) < len(pairs):
        raise InputError(
            f"{what} must be values of {', '.join(known)}, each at most once; got {text!r}. Write "
            "for example group=2,ring=4,team=2 or ring:inner=4."
        )
    return found


def named_schemes(
    names: Sequence[str], call: dict[str, Any], nodes: Sequence[int], platform: str = "cpu"
) -> list[Scheme]:
    """The schemes of some names.

    Args:
        names: the names: see `HELP`.
        call: what is known of the attention call.
        nodes: the node of each device.
        platform: platform of the devices; those of emulated nodes are CPUs.

    Raises:
        ValueError: as `read_scheme`.
    """
    default = choose_degrees(MeshConfig(), len(nodes), call, nodes=nodes, platform=platform)
    return [
        Scheme(name=name, degrees=default)
        if name == TRAIN_DEFAULT
        else read_scheme(name, len(nodes))
        for name in names
    ]
