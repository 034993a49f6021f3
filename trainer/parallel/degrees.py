"""The degrees of parallelism of a run whose flags leave some of them open."""

from __future__ import annotations

import math

from startrail_jax.errors import InputError
from startrail_jax.mesh import Degrees
from trainer.config import MeshConfig

# Default (team, group), best first: StarTrail with C = 2, then what fits where C^2 = 4 does not
# divide the number of devices.
DEFAULT_TEAMS = ((2, 2), (2, 1), (1, 1))


def choose_degrees(mesh: MeshConfig, num_devices: int) -> Degrees:
    """Fills in the degrees that `mesh` leaves open, so that their product is the number of devices.

    Given degrees stay as they are. Where `team` is given and `group` is not, `group` equals
    `team`. Where `team` is not given, the two are the first of `DEFAULT_TEAMS` that fits the
    devices and the given degrees. `ring` takes the remaining devices.

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
    raise InputError(
        f"The product of the mesh degrees must {must} the number of devices; got "
        f"{' * '.join(f'{name}={degree}' for name, degree in given.items())} = {product} for "
        f"{num_devices} devices. {_way_out(mesh, product, num_devices)}"
    )


def describe_degrees(mesh: MeshConfig, degrees: Degrees) -> str:
    """One line for the log: the degrees, and whether the default did not fit."""
    line = ", ".join(f"{name} {degree}" for name, degree in vars(degrees).items())
    chosen = (degrees.team, degrees.group)
    if (mesh.team, mesh.group) == (None, None) and chosen != DEFAULT_TEAMS[0]:
        line += " (team = group = 2 does not fit the devices and the degrees given)"
    return line


def _teams(mesh: MeshConfig) -> list[tuple[int, int]]:
    """The pairs (team, group) that `mesh` allows, best first."""
    if mesh.team is not None:
        return [(mesh.team, mesh.team if mesh.group is None else mesh.group)]
    if mesh.group is not None:
        return [(2, mesh.group), (1, mesh.group)]
    return list(DEFAULT_TEAMS)


def _way_out(mesh: MeshConfig, product: int, num_devices: int) -> str:
    """What to do about degrees whose product does not fit the number of devices."""
    team_only = mesh.team if mesh.group is None and mesh.ring is None else None
    if team_only and num_devices % (product // team_only) == 0:
        return f"Use --mesh.group 1 with --mesh.team {team_only}, or --devices {product}."
    if mesh.ring is not None and num_devices % (product // mesh.ring) == 0:
        return f"Leave out --mesh.ring, or use --devices {product}."
    return f"Change a degree, or use --devices {product}."
