"""Which degrees a run uses, and how its parameters lie on the mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from startrail_jax.mesh import Degrees
from startrail_jax.training.config import MeshConfig

# StarTrail with C = 2, then what fits where C^2 = 4 does not divide the devices: (team, group).
DEFAULT_TEAMS = ((2, 2), (2, 1), (1, 1))

# Megatron's split: the dimension of each kernel that lies over `tensor`. Heads and MLP channels are
# split where they are made and summed where they are used up.
TENSOR_DIMS = {"query": 1, "key": 1, "value": 1, "out": 0, "gate": 1, "up": 1, "down": 0}


def choose_degrees(mesh: MeshConfig, num_devices: int) -> Degrees:
    """Fills in what `mesh` leaves open so that the product is the number of devices.

    Given degrees stay as they are. `group` follows a given `team`, and `ring` takes the devices
    that are left. With no `team` given it is 2, and so is `group`, or else the first of
    `DEFAULT_TEAMS` that fits what is given.

    Raises:
        ValueError: if no choice gives the number of devices.
    """
    fixed = mesh.data * mesh.head * mesh.tensor
    for team, group in _teams(mesh):
        ring = mesh.ring or max(num_devices // (fixed * team * group), 1)
        if fixed * team * group * ring == num_devices:
            return Degrees(**vars(mesh) | {"team": team, "group": group, "ring": ring})
    team, group = _teams(mesh)[-1]
    sizes = vars(mesh) | {"team": team, "group": group}
    given = {name: degree for name, degree in sizes.items() if degree is not None}
    product = math.prod(given.values())
    must = "be" if mesh.ring else "divide"
    raise ValueError(
        f"The product of the mesh degrees must {must} the number of devices; got "
        f"{' * '.join(f'{name}={degree}' for name, degree in given.items())} = {product} for "
        f"{num_devices} devices. {_way_out(mesh, product, num_devices)}"
    )


def describe_degrees(mesh: MeshConfig, degrees: Degrees) -> str:
    """One line for the log: the degrees, and why they are not the default where they are not."""
    line = ", ".join(f"{name} {degree}" for name, degree in vars(degrees).items())
    chosen = (degrees.team, degrees.group)
    if (mesh.team, mesh.group) == (None, None) and chosen != DEFAULT_TEAMS[0]:
        line += " (team = group = 2 does not fit the devices and the degrees given)"
    return line


def _teams(mesh: MeshConfig) -> list[tuple[int, int]]:
    """The (team, group) that `mesh` allows, best first."""
    if mesh.team is not None:
        return [(mesh.team, mesh.team if mesh.group is None else mesh.group)]
    if mesh.group is not None:
        return [(2, mesh.group), (1, mesh.group)]
    return list(DEFAULT_TEAMS)


def _way_out(mesh: MeshConfig, product: int, num_devices: int) -> str:
    team_only = mesh.team if mesh.group is None and mesh.ring is None else None
    if team_only and num_devices % (product // team_only) == 0:
        return f"Use --mesh.group 1 with --mesh.team {team_only}, or --devices {product}."
    if mesh.ring is not None and num_devices % (product // mesh.ring) == 0:
        return f"Leave out --mesh.ring, or use --devices {product}."
    return f"Change a degree, or use --devices {product}."


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of a train state: replicated, or split over `tensor`.

    One rule serves parameters and optimizer state, since the path of a moment ends in the path of
    its parameter. Key and value kernels stay whole where `tensor` does not divide the heads.

    Args:
        state: a tree of arrays or of their shapes.
        mesh: a mesh with an axis `tensor`.

    Raises:
        ValueError: if the tensor degree does not divide a dimension that must be split.
    """
    tensor = mesh.shape["tensor"]

    def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/")
        layer = names.rpartition("/kernel")[0]
        name = layer.rpartition("/")[2]
        dim = TENSOR_DIMS.get(name)
        few_keys = name in ("key", "value") and x.shape[1] % tensor
        if tensor == 1 or dim is None or few_keys:
            return NamedSharding(mesh, PartitionSpec())
        if x.shape[dim] % tensor:
            raise ValueError(
                f"mesh.tensor must divide heads and mlp_width; got tensor={tensor} for dimension "
                f"{dim} of {layer}, of size {x.shape[dim]}. Change one of them."
            )
        return NamedSharding(mesh, PartitionSpec(*(None,) * dim, "tensor"))

    return jax.tree_util.tree_map_with_path(sharding, state)
