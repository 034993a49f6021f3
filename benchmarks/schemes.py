"""The schemes that benchmarks compare, by name: "ring", "startrail-2", "group=2,ring=4,team=2"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import startrail_jax as st
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.errors import InputError

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
STRINGS = ("gradient_dtype", "exchange", "layout", "balance")
OPTIONS: dict[str, Any] = {"inner": int, **dict.fromkeys(STRINGS, str)}
HELP = (
    "ring, all-gather, ulysses; head-U (LoongTrain: Ulysses over U devices, rings outside); "
    "startrail-C and published-C (StarTrail here and in its paper); team-A (teams of A, a ring); "
    "or degrees, such as group=2,ring=4,team=2; with options of attention after a colon, such as "
    "ring:inner=4, team-4:gradient_dtype=bfloat16 or ring:layout=contiguous,balance=exchange"
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
    """Reads the name of a scheme, or its degrees."""
    base, colon, words = text.partition(":")
    options = _read_pairs("Options of a scheme", words, OPTIONS) if colon else {}
    if "=" in base:
        known: dict[str, Any] = {role: int for role in SEQUENCE_ROLES}
        degrees = st.Degrees(**_read_pairs("Degrees of a scheme", base, known))
    else:
        name, _, number = base.rpartition("-") if base[-1:].isdigit() else (base, "", "0")
        found = [x for x in SCHEMES if re.sub("-[A-Z]$", "", x) == name]
        if not found or (found[0] == name) != (int(number) == 0):
            raise InputError(f"A scheme must be one of {HELP}; got {text!r}. Correct the name.")
        degrees = SCHEMES[found[0]](num_devices, int(number))
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
