"""Roles of the axes of a mesh, and the kind of its devices; nothing depends on attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES, Axis, Degrees, check_degrees
from startrail_jax.errors import InputError


def check_mesh(mesh: Any) -> None:
    """Raises unless a mesh is one of jax, and not, say, the degrees of a mesh."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return
    way = "startrail_jax.make_mesh(degrees)"
    if isinstance(mesh, Degrees):
        way = f"startrail_jax.make_mesh({mesh})"
    raise InputError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}. Make one with {way}.")


@dataclass(frozen=True, kw_only=True)
class AxisNames:
    """The mesh axis, or tuple of axes with the slowest first, of each role.

    The value of each field is the name of a mesh axis. A role that keeps its own name has degree 1
    if the mesh has no axis with that name.
    """

    data: str | tuple[str, ...] = "data"
    group: str | tuple[str, ...] = "group"
    ring: str | tuple[str, ...] = "ring"
    team: str | tuple[str, ...] = "team"
    head: str | tuple[str, ...] = "head"
    tensor: str | tuple[str, ...] = "tensor"

    @classmethod
    def of(cls, names: AxisNames | Mapping[str, str | tuple[str, ...]] | None) -> AxisNames:
        """Reads a mapping from roles to mesh axes; roles that it leaves out keep their own name.

        Raises:
            ValueError: if a key of the mapping is not a role.
        """
        if isinstance(names, AxisNames):
            return names
        unknown = sorted(set(names or {}) - set(ROLES))
        if unknown:
            raise InputError(
                f"axis_names must map roles {ROLES} to axes of the mesh; got unknown {unknown}. "
                "Write for example axis_names={'ring': 'context'}."
            )
        return cls(**{k: v if isinstance(v, str) else tuple(v) for k, v in (names or {}).items()})


def check_sequence_axis(
    mesh: Mesh | AbstractMesh, names: AxisNames | Mapping[str, str | tuple[str, ...]] | None
) -> None:
    """Raises if no axis of a mesh of several devices shards the sequence and `names` maps
    nothing."""
    if mesh.size == 1 or set(SEQUENCE_ROLES) & set(mesh.axis_names) or names:
        return
    raise InputError(
        f"A mesh of several devices needs an axis that shards the sequence, {SEQUENCE_ROLES}; got "
        f"the axes {dict(mesh.shape)}, of which none does. Say which axis plays which role, such "
        f"as axis_names={{'ring': {mesh.axis_names[-1]!r}}}; or pass axis_names=AxisNames() to "
        "have every device work on whole sequences."
    )


def resolve_axes(mesh: Mesh | AbstractMesh, names: AxisNames) -> dict[str, Axis]:
    """The `Axis` of each role on `mesh`; raises if a given name is no axis, or plays two roles."""
    sizes = dict(mesh.shape)
    axes: dict[str, Axis] = {}
    taken: dict[str, str] = {}
    for field in dataclasses.fields(names):
        role, value = field.name, getattr(names, field.name)
        members = (value,) if isinstance(value, str) else value
        for name in members:
            if name not in sizes and name != role:
                raise InputError(
                    f"axis_names must name axes of the mesh; got {role}={name!r}, and the mesh "
                    f"has {tuple(sizes)}. Correct the name, or leave {role} out for degree 1."
                )
            if name in taken:
                raise InputError(
                    f"A mesh axis must play one role; got {name!r} for both {taken[name]} and "
                    f"{role}. Map one of them to another axis."
                )
            taken[name] = role
        present = tuple(name for name in members if sizes.get(name, 1) > 1)
        axes[role] = Axis(present, math.prod(sizes[name] for name in present))
    return axes


def share_axis(
    mesh: Mesh | AbstractMesh,
    axes: Mapping[str, Axis],
    names: str | Sequence[str],
    degrees: Degrees | None,
) -> dict[str, Axis]:
    """The `Axis` of each role where all sequence roles share one axis of the mesh.

    Index p along it has the digits of ring, group, team and head, which make the sequence rank.
    Where their product only divides the size of the axis, the digit of data comes before them:
    neighbours share a row, and each set of neighbours has rows of its own. Several `names` count as
    one axis, slowest first. `axes` are those of data and tensor. Without degrees it is Ring
    Attention.

    Raises a ValueError if there is no such axis, if it plays another role, if another one shards
    the sequence too, or if the degrees do not fit.
    """
    members = (names,) if isinstance(names, str) or not isinstance(names, Sequence) else (*names,)
    sizes = dict(mesh.shape)
    if not set(members) <= set(sizes) or len(set(members)) != len(members) or not members:
        raise InputError(
            f"axis must name an axis of the mesh, or several, once each; got axis={names!r}, and "
            f"the mesh has {tuple(sizes)}. Correct the name."
        )
    present = tuple(name for name in members if sizes[name] > 1)
    places = math.prod(sizes[name] for name in members)
    degrees = degrees or Degrees(ring=places)
    check_degrees(degrees)
    # Rows are split along the same axis.
    splits_rows = degrees.data > 1 and degrees.data * degrees.sequence == places
    inside = (*SEQUENCE_ROLES, "data") if splits_rows else SEQUENCE_ROLES
    for role, axis in axes.items():
        both = [name for name in axis.names if (name in members) != (role in inside)]
        if both:
            raise InputError(
                f"axis={names!r} must be all that shards the sequence, and play no other role; got "
                f"{both[0]!r} as {role} on the mesh {sizes}. Leave out axis= to give each "
                "role an axis of its own, or map data and tensor to other axes by axis_names."
            )
    for role in ("data", "tensor"):
        if role not in inside and getattr(degrees, role) not in (1, axes[role].degree):
            raise InputError(
                f"The {role} degree must be that of the mesh, {axes[role].degree}, or be left out; "
                f"got {role}={getattr(degrees, role)} beside axis={names!r}. Map {role} to an axis "
                "of the mesh by axis_names."
            )
    if not splits_rows and degrees.sequence != places:
        raise InputError(
            f"The product of ring, group, team and head must be the size of axis={names!r}, "
            f"{places}; got {degrees}. Change a degree, as in Degrees.startrail({places}, c=...)."
        )
    shared, stride = dict(axes), 1
    for role in sorted(inside, key=ROLES.index, reverse=True):
        degree = getattr(degrees, role)
        shared[role] = Axis(present, degree, stride, places) if degree > 1 else Axis((), 1)
        stride *= degree
    return shared


def flat_axis(axes: Mapping[str, Axis], roles: Sequence[str]) -> Axis:
    """Several roles as one axis, the first of `roles` slowest."""
    return Axis.joined(*(axes[role] for role in roles))


def device_kind(mesh: Mesh | AbstractMesh) -> tuple[str, tuple[int, int] | None]:
    """Platform of the devices of a mesh, one of `PLATFORMS`, and their least CUDA compute
    capability, such as (9, 0) for Hopper; None if it is not known, or not CUDA. An abstract mesh
    counts as one of the devices that jax has here."""
    devices = jax.devices() if isinstance(mesh, AbstractMesh) else mesh.devices.flat
    device = devices[0]
    if device.platform != "gpu":
        return device.platform, None
    if not device.device_kind.startswith("NVIDIA"):
        return "rocm", None
    versions = [str(getattr(x, "compute_capability", "")).split(".") for x in devices]
    if not all(len(x) == 2 and "".join(x).isdigit() for x in versions):
        return "cuda", None
    return "cuda", min((int(major), int(minor)) for major, minor in versions)
