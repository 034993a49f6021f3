"""The schemes that are verified: settings of the degrees, and the reasons to leave some out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import InputError
from startrail_jax.traffic.settings import refusal

NAMES = ("rule", "ring", "all-gather", "ulysses", "usp", "startrail", "double-ring")
"""Names of schemes: the degrees that `Degrees.recommended` gives, and those of other programs."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A setting of the degrees, under one or several names."""

    names: tuple[str, ...]
    degrees: Degrees
    inner: int = 1
    """Devices of an inner cycle of a double ring."""
    layout: str | None = None
    """Order of the tokens; None for that of the case."""

    @property
    def name(self) -> str:
        """All names of the scheme."""
        return " = ".join(self.names)

    @property
    def setting(self) -> str:
        """The degrees above 1, in words."""
        degrees = [f"{x} {getattr(self.degrees, x)}" for x in ROLES if getattr(self.degrees, x) > 1]
        degrees += [f"inner {self.inner}"] * (self.inner > 1)
        return ", ".join(degrees) or "one device"


def schemes_of(
    num_devices: int,
    *,
    data: int,
    tensor: int,
    devices_per_node: int,
    wanted: tuple[str, ...],
    **call: Any,
) -> tuple[list[Scheme], dict[str, str]]:
    """The schemes that fit the devices and the heads, and for others the reason to leave them out.

    Args:
        num_devices: all devices.
        data, tensor: degrees of the batch and of tensor parallelism.
        devices_per_node: devices of a node.
        wanted: those of `NAMES` to return.
        **call: keyword arguments of `startrail_jax.traffic.settings.refusal`.

    Raises:
        ValueError: if `data * tensor` does not divide the devices, or if no scheme fits.
    """  # fmt: skip
    fixed: dict[str, Any] = dict(data=data, tensor=tensor)
    rule = Degrees.recommended(
        num_devices,
        heads=call["heads"],
        kv_heads=call["kv_heads"],
        devices_per_node=devices_per_node,
        **fixed,
    )
    found: dict[tuple[Degrees, int], list[str]] = {}
    reasons: dict[str, str] = {}
    for name, degrees, inner in _named(rule.sequence, fixed, rule, devices_per_node, call):
        if name not in wanted:
            continue
        reason = degrees if isinstance(degrees, str) else refusal(degrees, **call)
        if reason is not None:
            reasons[name] = reason
        elif not isinstance(degrees, str):
            found.setdefault((degrees, inner), []).append(name)
    if not found:
        raise InputError(
            f"At least one scheme must fit {num_devices} devices with data={data} and "
            f"tensor={tensor}; got none: {next(iter(reasons.values()))}"
        )
    schemes = [
        Scheme(names=tuple(names), degrees=degrees, inner=inner)
        for (degrees, inner), names in found.items()
    ]
    return schemes, reasons


def _named(
    p: int, fixed: dict[str, Any], rule: Degrees, devices_per_node: int, call: dict[str, Any]
) -> Iterator[tuple[str, Degrees | str, int]]:
    """Name, degrees or the reason for none, and devices of an inner cycle."""
    parts = [part for part in range(2, p) if p % part == 0]
    yield "rule", rule, 1
    yield "ring", Degrees.ring_attention(p, **fixed), 1
    yield "all-gather", Degrees(group=p, **fixed), 1
    yield "ulysses", Degrees.ulysses(p, **fixed), 1
    usp = [Degrees.loongtrain(p, head=part, **fixed) for part in reversed(parts)]
    fitting = [degrees for degrees in usp if refusal(degrees, **call) is None]
    yield "usp", next(iter(fitting or usp), f"{p} devices have no divisor between 1 and {p}."), 1
    four = f"C = 2 needs a number of devices that 4 divides; got {p}."
    yield "startrail", Degrees.startrail(p, c=2, **fixed) if p % 4 == 0 else four, 1
    inner = devices_per_node if devices_per_node in parts else max(parts, default=1)
    ring = Degrees.ring_attention(p, **fixed)
    yield "double-ring", ring if parts else f"{p} devices have no inner cycle.", inner
