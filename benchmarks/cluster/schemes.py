"""Which settings `run.py` times: names of schemes, and orders of the mesh axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import startrail_jax as st
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.errors import InputError
from trainer.config import MeshConfig
from trainer.parallel.degrees import choose_degrees

# Name -> degrees, given the number of devices and the number in the name.
SCHEMES: dict[str, Callable[[int, int], st.Degrees]] = {
    "ring": lambda n, _: st.Degrees.ring_attention(n),
    "all-gather": lambda n, _: st.Degrees.all_gather(n),
    "ulysses": lambda n, _: st.Degrees.ulysses(n),
    "head-U": lambda n, u: st.Degrees.loongtrain(n, head=u),
    "published-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "startrail-C": lambda n, c: st.Degrees.startrail(n, c=c),
    "team-A": lambda n, a: st.Degrees(team=a, ring=_quotient(n, a, "team")),
}
TRAIN_DEFAULT = "train-default"
HELP = (
    "ring, all-gather, ulysses; head-U (LoongTrain: Ulysses over U devices, rings outside); "
    "startrail-C and published-C (StarTrail here and in its paper); team-A (teams of A, a ring); "
    "train-default (what train.py takes without flags); or degrees, such as "
    "group=2,ring=4,team=2; with options of attention after a colon, such as ring:inner=4 or "
    "team-4:gradient_dtype=bfloat16"
)
# Options that a name may have, and how their values are read.
OPTIONS: dict[str, Callable[[str], Any]] = {
    "inner": int,
    "gradient_dtype": str,
    "exchange": str,
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A setting of the degrees under a name."""

    name: str
    """Its name in the table."""
    degrees: st.Degrees
    """Its degrees."""
    published: bool = False
    """Whether it is StarTrail as its paper has it."""
    given: dict[str, Any] = field(default_factory=dict)
    """Options that stand in its name."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Attention` and of `st.communication`."""
        return ({"published": True} if self.published else {}) | self.given


def read_scheme(text: str, num_devices: int) -> Scheme:
    """Reads the name of a scheme, or its degrees.

    Args:
        text: the name: see `HELP`.
        num_devices: number of devices of the cluster.

    Raises:
        ValueError: if there is no such scheme, or none for so many devices.
    """
    base, _, options = text.partition(":")
    given = _read_options(options, text) if ":" in text else {}
    if "=" in base:
        return Scheme(name=text, degrees=_read_degrees(base, num_devices), given=given)
    name = re.sub(r"-\d+$", "", base)
    number = int(base[len(name) + 1 :] or 0)
    found = next((x for x in SCHEMES if x == name or (number and x[:-2] == name)), None)
    if found is None or (found == name) != (number == 0):
        raise InputError(f"A scheme must be one of {HELP}; got {text!r}. Correct the name.")
    degrees = SCHEMES[found](num_devices, number)
    return Scheme(name=text, degrees=degrees, published=name == "published", given=given)


def _read_options(options: str, text: str) -> dict[str, Any]:
    """Reads options such as "inner=4,gradient_dtype=bfloat16" of the scheme `text`."""
    pairs = [part.partition("=") for part in options.split(",")]
    try:
        return {name: OPTIONS[name](value) for name, _, value in pairs}
    except (KeyError, ValueError):
        raise InputError(
            "Options of a scheme must be a number for inner, a dtype for gradient_dtype, or the "
            f"name of an exchange; got {text!r}. Write for example ring:inner=4."
        ) from None


def _read_degrees(text: str, num_devices: int) -> st.Degrees:
    """Reads degrees such as "group=2,ring=4,team=2"."""
    pairs = [part.partition("=") for part in text.split(",")]
    wrong = [role for role, _, number in pairs
             if role not in SEQUENCE_ROLES or not number.isdecimal()]  # fmt: skip
    if wrong or len({role for role, _, _ in pairs}) < len(pairs):
        raise InputError(
            f"Degrees must be numbers for {', '.join(SEQUENCE_ROLES)}, each at most once; got "
            f"{text!r}. Write for example group=2,ring=4,team=2."
        )
    degrees = st.Degrees(**{role: int(number) for role, _, number in pairs})
    if degrees.sequence != num_devices:
        raise InputError(
            f"The product of the degrees must be the number of devices; got {text} = "
            f"{degrees.sequence} for {num_devices} devices. Change a degree, or the devices."
        )
    return degrees


def _quotient(num_devices: int, degree: int, role: str) -> int:
    if num_devices % degree:
        raise InputError(
            f"{role} must divide the number of devices; got {role}={degree} for {num_devices} "
            "devices. Use another degree."
        )
    return num_devices // degree


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
