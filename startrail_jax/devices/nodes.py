"""Finds which devices share a node, and which mesh axes therefore go from node to node.

A node is a set of devices that reach each other without a network port: the GPUs of one machine, or
one TPU slice. Nothing here depends on attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from startrail_jax.devices.degrees import ROLES, Axis, Degrees
from startrail_jax.errors import InputError
from startrail_jax.values import is_whole

ORDERS = {
    "rings_inside": ("data", "group", "team", "head", "ring", "tensor"),
    "collectives_inside": ("data", "ring", "head", "group", "team", "tensor"),
    "head_first": ("data", "group", "ring", "team", "head", "tensor"),
    "context_first": ("data", "head", "group", "ring", "team", "tensor"),
}
"""Named orders of the mesh axes, slowest first: the last ones lie inside a node. "rings_inside"
comes from StarTrail (https://arxiv.org/abs/2407.00611, section 3.3); "head_first" and
"context_first" come from LoongTrain (https://arxiv.org/abs/2406.18485)."""


def resolve_order(order: str | Sequence[str]) -> tuple[str, ...]:
    """The six roles in the order of a name of `ORDERS`, or as they are given, slowest first.

    Raises:
        ValueError: if there is no such name, or if the roles are not each of `ROLES` once.
    """
    if isinstance(order, str):
        if order not in ORDERS:
            raise InputError(
                f"order must be one of {', '.join(map(repr, ORDERS))}, or the six roles, slowest "
                f"first; got order={order!r}. Write for example order='rings_inside'."
            )
        return ORDERS[order]
    roles = tuple(order)
    if sorted(roles) == sorted(ROLES):
        return roles
    raise InputError(
        f"order must have each of {ROLES} once, slowest first; got order={roles}. Put axes of "
        "degree 1 anywhere."
    )


def nodes_of(devices: Sequence[Any], devices_per_node: int | None = None) -> tuple[int, ...]:
    """The number of the node of each device; nodes are numbered as they first occur.

    Devices share a node if they have one slice index, which jax gives to a TPU slice and, where
    there are several processes, to the GPUs or CPUs of one machine (with NVLink between machines,
    of one NVLink domain), however many processes drive them. Devices without a slice index share a
    node if one process drives them.

    Args:
        devices: the devices, real or not.
        devices_per_node: number of devices in a node: each run of so many of `devices` is one node,
            whatever the devices say. None reads it from the devices.

    Raises:
        ValueError: if `devices_per_node` does not divide the number of devices.
    """
    if devices_per_node is not None:
        check_devices_per_node(len(devices), devices_per_node)
        return tuple(index // devices_per_node for index in range(len(devices)))
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(_node(device), len(numbers)) for device in devices)


def _node(device: Any) -> tuple[str, int]:
    """What two devices have in common if they share a node."""
    for name in ("slice_index", "partition_index"):
        if (index := getattr(device, name, None)) is not None:
            return name, index
    return "process_index", device.process_index


def check_devices_per_node(num_devices: int, devices_per_node: int) -> None:
    """Raises unless so many devices make whole nodes.

    Raises:
        ValueError: if they do not.
    """
    if is_whole(devices_per_node, 1) and num_devices % devices_per_node == 0:
        return
    near = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    raise InputError(
        "devices_per_node must be a positive integer that divides the number of devices; got "
        f"devices_per_node={devices_per_node!r} for {num_devices} devices. Use one of {near}."
    )


def arrangement(degrees: Degrees, order: Sequence[str]) -> np.ndarray:
    """The device at each coordinate of the mesh, counted node by node.

    Args:
        degrees: sizes of the mesh axes.
        order: the six roles, slowest first.

    Returns:
        Numbers from 0 on, in an array whose dimensions are the degrees in the order of `ROLES`.
    """
    sizes = [getattr(degrees, role) for role in order]
    flat = np.arange(math.prod(sizes)).reshape(sizes)
    return flat.transpose([list(order).index(role) for role in ROLES])


def node_grid(degrees: Degrees, order: Sequence[str], nodes: Sequence[int]) -> np.ndarray:
    """The node of each coordinate of the mesh that `make_mesh` builds.

    Args:
        degrees: sizes of the mesh axes.
        order: the six roles, slowest first.
        nodes: the node of each device, as `nodes_of` gives it.

    Returns:
        Numbers of nodes, in an array whose dimensions are the degrees in the order of `ROLES`. A
        compiled program numbers its devices by their place in the flat array.
    """
    return np.sort(np.asarray(nodes, dtype=np.int64))[arrangement(degrees, order)]


def crossing(grid: np.ndarray) -> tuple[str, ...]:
    """The roles whose axes go from node to node.

    Args:
        grid: the node of each device, with one dimension for each of `ROLES`.
    """
    return tuple(role for dim, role in enumerate(ROLES) if _varies(grid, dim))


def mesh_crossing(
    mesh: Mesh | AbstractMesh, axes: Mapping[str, Axis], devices_per_node: int | None = None
) -> tuple[int, tuple[str, ...]] | None:
    """Number of nodes of a mesh, and the roles whose axes go from node to node.

    Args:
        mesh: any mesh. An abstract one has no devices, and the result is None.
        axes: the axes of each role.
        devices_per_node: number of devices in a node, in the order of `jax.devices()`; None to read
            it from the devices.

    Raises:
        ValueError: if `devices_per_node` is given for an abstract mesh, or does not divide the
            number of devices.
    """
    if isinstance(mesh, AbstractMesh):
        if devices_per_node is None:
            return None
        raise InputError(
            f"devices_per_node needs a mesh of devices; got devices_per_node={devices_per_node!r} "
            "and an abstract mesh. Leave it out."
        )
    grid, across = mesh_nodes(mesh, devices_per_node), []
    for role in ROLES:
        axis = axes[role]
        dims = [mesh.axis_names.index(name) for name in axis.names]
        last = np.moveaxis(grid, dims, range(-len(dims), 0)) if dims else grid[..., None]
        if _varies(last.reshape(-1, axis.degree, axis.stride), 1):
            across.append(role)
    return len(np.unique(grid)), tuple(across)


def mesh_nodes(mesh: Mesh, devices_per_node: int | None = None) -> np.ndarray:
    """The node of each device of a mesh, in an array of its shape.

    Args:
        mesh: the mesh.
        devices_per_node: as in `mesh_crossing`.

    Raises:
        ValueError: if `devices_per_node` does not divide the number of devices.
    """
    devices = mesh_devices(mesh)
    node = dict(zip(devices, nodes_of(devices, devices_per_node), strict=True))
    return np.array([node[device] for device in mesh.devices.flat]).reshape(mesh.devices.shape)


def mesh_devices(mesh: Mesh) -> list[Any]:
    """The devices of a mesh in the order of `jax.devices()`, in which runs of them are nodes."""
    return sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))


def slowest_first(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh in the order in which they lie on the devices, slowest first.

    A collective over several axes that names them in this order goes from node to node as seldom as
    it can: it visits all its devices of a node before those of the next. In the order of the mesh,
    each step of it may leave the node.

    Args:
        mesh: any mesh. An abstract one has no devices, and its axes come in its own order.
    """
    if isinstance(mesh, AbstractMesh):
        return mesh.axis_names
    devices = mesh_devices(mesh)
    node = dict(zip(devices, nodes_of(devices), strict=True))
    place = {device: i for i, device in enumerate(sorted(devices, key=node.__getitem__))}
    places = np.array([place[device] for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    # How far apart neighbours along an axis are. Inside a TPU slice this differs between places.
    distances = {
        name: np.abs(np.diff(places, axis=dim)).mean() if places.shape[dim] > 1 else 0.0
        for dim, name in enumerate(mesh.axis_names)
    }
    return tuple(sorted(mesh.axis_names, key=distances.__getitem__, reverse=True))


def _varies(grid: np.ndarray, dim: int) -> bool:
    return not np.array_equal(grid, np.broadcast_to(grid.take([0], axis=dim), grid.shape))
