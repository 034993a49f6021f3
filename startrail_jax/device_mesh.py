"""Builds the mesh: the device at each coordinate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from startrail_jax.devices.degrees import ROLES, Degrees, check_degrees
from startrail_jax.devices.nodes import arrangement, nodes_of, resolve_order
from startrail_jax.errors import InputError
from startrail_jax.traffic.cost import default_order

_AUTO = (AxisType.Auto,) * len(ROLES)


def make_mesh(
    degrees: Degrees,
    axis_type: str | AxisType = "auto",
    devices: Sequence[Any] | None = None,
    *,
    order: str | Sequence[str] | None = None,
    devices_per_node: int | None = None,
    call: Mapping[str, Any] | None = None,
) -> Mesh:
    """Builds a mesh with the six axes data, ring, group, team, head and tensor.

    The mesh always has its axes in this sequence, so data, ranks and results do not depend on
    `order`. `order` decides which device is at which coordinate: with the devices sorted node by
    node, consecutive devices first fill the last axis of `order`.

    Args:
        degrees: sizes of the axes.
        axis_type: "auto", where the compiler chooses the sharding of the arrays of a model, as the
            layers of Flax expect; or "explicit", where shardings are part of types and mismatches
            are errors. It may also be a `jax.sharding.AxisType`.
        devices: the devices of the mesh; None for all visible ones.
        order: the six axes, slowest first, or a name: "rings_inside" (the paper's; rings inside a
            node, teams and groups across nodes), "collectives_inside" (teams and groups inside a
            node, rings across nodes), "head_first" (the head exchange inside a node) or
            "context_first" (the head exchange across nodes). None chooses the order of the axes
            above on one node, and the order with the fewest bytes through the port of a node on
            several (`startrail_jax.traffic.cost.default_order`).
        devices_per_node: number of devices in a node; each run of this many `devices` is a node.
            None reads the nodes from the devices: see `startrail_jax.devices.nodes.nodes_of`.
        call: the call for which the order is chosen if `order` is None: keyword arguments of
            `communication` such as dict(heads=32, kv_heads=8, causal=True). The best order depends
            on them.

    Returns:
        The mesh.

    Raises:
        ValueError: if the product of the degrees is not the number of devices, if the axis type or
            the order is unknown, or if `devices_per_node` does not divide the number of devices.
    """
    check_degrees(degrees)
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    kind = types.get(axis_type) if isinstance(axis_type, str) else axis_type
    if kind is None or kind not in types.values():
        raise InputError(
            f"axis_type must be 'auto' or 'explicit'; got {axis_type!r}. Use 'auto' unless the "
            "whole model is written for Explicit axes."
        )
    chosen, devices = devices is not None, list(jax.devices() if devices is None else devices)
    shape = tuple(getattr(degrees, role) for role in ROLES)
    if degrees.num_devices != len(devices):
        sizes = " * ".join(f"{role}={size}" for role, size in zip(ROLES, shape, strict=True))
        raise InputError(
            f"The product of the degrees must be the number of devices; got {sizes} = "
            f"{degrees.num_devices} for {len(devices)} devices. Change a degree, or "
            f"{_way_to_devices(degrees.num_devices, devices, chosen)}."
        )
    nodes = nodes_of(devices, devices_per_node)
    order = default_order(degrees, nodes, call) if order is None else resolve_order(order)
    placed = place_devices(degrees, order, devices, nodes)
    return Mesh(placed, ROLES, axis_types=(kind,) * len(ROLES))


def _way_to_devices(needed: int, devices: Sequence[Any], chosen: bool) -> str:
    """Advice on how to get the needed number of devices."""
    if chosen or needed < len(devices):
        return f"pass devices= with {needed} of them"
    if all(device.platform == "cpu" for device in devices):
        return (
            f'simulate {needed} devices with jax.config.update("jax_num_cpu_devices", {needed}), '
            "before the program first uses jax"
        )
    return f"use {needed} devices"


def place_devices(
    degrees: Degrees, order: Sequence[str], devices: Sequence[Any], nodes: Sequence[int]
) -> np.ndarray:
    """The device at each coordinate of a mesh, with the devices sorted node by node.

    The devices of a TPU node are sorted by the links between them, as jax sorts them.

    Args:
        degrees: sizes of the axes.
        order: the six roles, slowest first.
        devices: the devices.
        nodes: the node of each device.
    """
    by_node: list[Any] = []
    for node in sorted(set(nodes)):
        pairs = zip(devices, nodes, strict=True)
        members = [device for device, other in pairs if other == node]
        if members[0].platform == "tpu":
            shape = _inner_shape(degrees, order, len(members))
            members = jax.make_mesh(shape, ROLES, _AUTO, devices=members).devices.flat
        by_node += members
    return np.array(by_node, dtype=object)[arrangement(degrees, order)]


def _inner_shape(degrees: Degrees, order: Sequence[str], num_devices: int) -> tuple[int, ...]:
    """Sizes of the parts of the axes that lie inside a node, in the order of the axes.

    Returns one long axis if nodes end in the middle of an axis without dividing it.
    """
    sizes, left = [], num_devices
    for role in reversed(order):
        sizes.insert(0, math.gcd(getattr(degrees, role), left))
        left //= sizes[0]
        if sizes[0] < getattr(degrees, role):
            break
    if left > 1:
        sizes = [num_devices]
    return (1,) * (len(ROLES) - len(sizes)) + tuple(sizes)
