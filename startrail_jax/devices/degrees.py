"""Degrees of parallelism and the roles of mesh axes; nothing here depends on attention.

`P = group * ring * team * head` devices share one sequence, and every known scheme is a setting of
these four degrees (see `Degrees`). The degree `data` splits the batch, and `tensor` splits heads
and features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from startrail_jax.errors import InputError

# The six roles that a mesh axis can play, slowest to fastest in device order.
ROLES = ("data", "ring", "group", "team", "head", "tensor")
# The platforms on which programs may run.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The roles that together shard the token axis, slowest to fastest.
SEQUENCE_ROLES = ("ring", "group", "team", "head")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of the six kinds of parallelism: the sizes of the mesh axes.

    With P = group * ring * team * head devices for one sequence, these are the known schemes:

    | scheme                           | head | team | ring      | group |
    |----------------------------------|------|------|-----------|-------|
    | Ring Attention                   | 1    | 1    | P         | 1     |
    | all-gather context parallelism   | 1    | 1    | 1         | P     |
    | Ulysses                          | P    | 1    | 1         | 1     |
    | LoongTrain 2D-Attention, USP     | U    | 1    | P/U       | 1     |
    | StarTrail with the paper's C     | 1    | C    | P/C^2     | C     |
    | fewest bytes forward if head = 1 | 1    | A    | P/A       | 1     |
    | 2-D tiles, no ring               | 1    | A    | 1         | P/A   |
    | StarTrail x Ulysses              | U    | C    | P/(U C^2) | C     |

    Raises:
        ValueError: if a degree is not a positive integer.

    References:
        Ring Attention, https://arxiv.org/abs/2310.01889; Ulysses, https://arxiv.org/abs/2309.14509;
        LoongTrain, https://arxiv.org/abs/2406.18485; StarTrail, https://arxiv.org/abs/2407.00611;
        2-D tiles: Attention2D, https://arxiv.org/abs/2503.15758, and Mesh-Attention,
        https://arxiv.org/abs/2512.20968.
    """

    data: int = 1
    """Number of shards of the batch."""
    group: int = 1
    """Number of devices that gather the same keys; in the paper C, the same as `team`."""
    ring: int = 1
    """Number of devices round which keys (or queries) travel; in the paper P / C^2."""
    team: int = 1
    """Number of devices that share their queries; in the paper C."""
    head: int = 1
    """Ulysses degree: number of devices that trade tokens for heads before anything else."""
    tensor: int = 1
    """Number of tensor-parallel shards of the heads."""

    def __post_init__(self) -> None:
        for role in ROLES:
            degree = getattr(self, role)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise InputError(
                    f"Every degree must be an integer of at least 1; got {role}={degree!r}. "
                    f"Use {role}=1 to leave that axis out."
                )

    @property
    def sequence(self) -> int:
        """P: number of devices that share one sequence."""
        return self.group * self.ring * self.team * self.head

    @property
    def num_devices(self) -> int:
        """Number of devices in the whole mesh."""
        return self.data * self.sequence * self.tensor

    @classmethod
    def ring_attention(cls, sequence: int, *, data: int = 1, tensor: int = 1) -> Degrees:
        """Ring Attention (arXiv 2310.01889) over `sequence` devices."""
        return cls(data=data, ring=sequence, tensor=tensor)

    @classmethod
    def all_gather(cls, sequence: int, *, data: int = 1, tensor: int = 1) -> Degrees:
        """All-gather context parallelism: every device gathers all keys and values."""
        return cls(data=data, group=sequence, tensor=tensor)

    @classmethod
    def ulysses(cls, sequence: int, *, data: int = 1, tensor: int = 1) -> Degrees:
        """DeepSpeed-Ulysses (arXiv 2309.14509), which trades tokens for heads."""
        return cls(data=data, head=sequence, tensor=tensor)

    @classmethod
    def loongtrain(cls, sequence: int, *, head: int, data: int = 1, tensor: int = 1) -> Degrees:
        """LoongTrain's 2D-Attention (arXiv 2406.18485): Ulysses over `head` devices, rings outside.

        Raises:
            ValueError: if `head` does not divide `sequence`.
        """
        _check_divides(sequence, "head", head, head)
        return cls(data=data, ring=sequence // head, head=head, tensor=tensor)

    @classmethod
    def startrail(
        cls, sequence: int, *, c: int, head: int = 1, data: int = 1, tensor: int = 1
    ) -> Degrees:
        """StarTrail (arXiv 2407.00611): teams of `c`, sub-rings of `sequence / c^2` devices.

        A `head` degree above 1 combines it with Ulysses, which the paper leaves to future work: the
        sub-rings are then of `sequence / (head * c^2)` devices.

        Raises:
            ValueError: if `head * c^2` does not divide `sequence`. The message names the nearest
                values that do.
        """
        _check_divides(sequence, "head", head, head)
        _check_divides(sequence // head, "c", c, c * c)
        return cls(
            data=data,
            group=c,
            ring=sequence // (head * c * c),
            team=c,
            head=head,
            tensor=tensor,
        )


def check_degrees(degrees: Any) -> None:
    """Raises unless degrees are `Degrees`.

    Raises:
        ValueError: if they are another thing, such as a number of devices.
    """
    if isinstance(degrees, Degrees):
        return
    raise InputError(
        f"degrees must be startrail_jax.Degrees; got {degrees!r}. Say how the devices share the "
        "work, for example startrail_jax.Degrees.startrail(8, c=2), or Degrees(ring=8) for Ring "
        "Attention."
    )


def check_mesh(mesh: Any) -> None:
    """Raises unless a mesh is one of jax.

    Raises:
        ValueError: if it is another thing, such as the degrees of a mesh.
    """
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return
    way = "startrail_jax.make_mesh(degrees)"
    if isinstance(mesh, Degrees):
        way = f"startrail_jax.make_mesh({mesh})"
    raise InputError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}. Make one with {way}.")


def _check_divides(sequence: int, name: str, value: int, block: int) -> None:
    """Raises unless `block`, which is `value` or its square, divides `sequence`."""
    if value >= 1 and sequence >= 1 and sequence % block == 0:
        return
    square = block != value or name == "c"
    rule = f"{name}^2" if square else name
    power = 2 if square else 1
    valid = [d for d in range(1, max(sequence, 1) + 1) if sequence % d**power == 0]
    below = [d for d in valid if d <= value][-2:]
    above = [d for d in valid if d > value][:2]
    near = ", ".join(f"{name}={d}" for d in below + above)
    lengths = ""
    if value >= 1:
        lower = sequence // block * block
        sizes = [size for size in (lower, lower + block) if size > 0]
        lengths = f", or {' or '.join(map(str, sizes))} devices"
    raise InputError(
        f"{rule} must divide the sequence degree; got {name}={value}, sequence degree={sequence}. "
        f"Use {near or f'{name}=1'}{lengths}."
    )


@dataclass(frozen=True, kw_only=True)
class AxisNames:
    """Which mesh axis, or tuple of axes with the slowest first, plays each role.

    The value of each field is the name of a mesh axis. A role that keeps its own name is of degree
    1 if the mesh has no axis of that name.
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


@dataclass(frozen=True)
class Axis:
    """The devices that play one role: all those along some mesh axes, or one digit of their index.

    Index p along mesh axes of `places` devices has the digit `p // stride % degree`. Several roles
    can thus share one mesh axis, each as one digit.
    """

    names: tuple[str, ...]
    """Names of the mesh axes, slowest first; axes of size 1 are left out."""
    degree: int
    """Number of devices that play the role together."""
    stride: int = 1
    """Distance of two neighbours, in places along the mesh axes."""
    places: int | None = None
    """Product of the sizes of the mesh axes; None for `degree`."""

    @property
    def groups(self) -> list[list[int]] | None:
        """The places of each set of devices that play the role together; None for one of all."""
        if self.places in (None, self.degree):
            return None
        places = np.arange(self.places).reshape(-1, self.degree, self.stride)
        return places.swapaxes(1, 2).reshape(-1, self.degree).tolist()

    @classmethod
    def joined(cls, *axes: Axis) -> Axis:
        """Several as one, the first slowest; digits must be neighbours."""
        axes = tuple(axis for axis in axes if axis.degree > 1)
        degree = math.prod(axis.degree for axis in axes)
        if axes and axes[-1].groups:
            return dataclasses.replace(axes[-1], degree=degree)
        return cls(tuple(name for axis in axes for name in axis.names), degree)


@dataclass(frozen=True)
class Cycle:
    """Devices round which data travel: all those of an axis, or those of one digit of its index.

    Index p along the axis has the digit `p // stride % degree`. An axis of `outer * inner` devices
    thus falls into cycles of `inner` neighbours, and into cycles of `outer` devices that lie
    `inner` places apart.
    """

    axis: Axis
    """The axis."""
    degree: int
    """Number of devices in a cycle."""
    stride: int = 1
    """Distance of two neighbours in a cycle, in places of the axis."""

    def place(self, p: Any, step: Any) -> Any:
        """The index that lies `step` places further in the cycle of p; both may be traced."""
        if self.degree == 1:
            return p
        if self.degree == self.axis.degree:
            return (p + step) % self.degree
        digit = p // self.stride % self.degree
        return p + ((digit + step) % self.degree - digit) * self.stride


# Names that other programs give to axes of these roles, for the message of `check_sequence_axis`.
_OTHER_NAMES = {
    "data": ("dp", "fsdp", "batch", "replica", "ddp", "hsdp", "x"),
    "tensor": ("tp", "model", "mp", "y"),
    "head": ("ulysses", "heads", "up"),
    "team": ("teams",),
    "group": ("groups",),
}


def check_sequence_axis(
    mesh: Mesh | AbstractMesh, names: AxisNames | Mapping[str, str | tuple[str, ...]] | None
) -> None:
    """Raises if no axis of several devices shards the sequence and no axis_names is given.

    Args:
        mesh: the mesh.
        names: the names of the axes that the caller gave, if any.

    Raises:
        ValueError: if the mesh has several devices and no axis of a sequence role, and `names` maps
            nothing. The message gives the mapping that is probably meant.
    """
    if mesh.size == 1 or set(SEQUENCE_ROLES) & set(mesh.axis_names) or names:
        return
    guess: dict[str, str] = {}
    for name in mesh.axis_names:
        role = next((role for role, others in _OTHER_NAMES.items() if name in others), "ring")
        guess.setdefault(name if name in ROLES else role, name)
    if not set(guess) & set(SEQUENCE_ROLES):
        guess["ring"] = guess.pop(next(iter(guess)))
    meant = {role: name for role, name in guess.items() if role != name}
    raise InputError(
        f"A mesh of several devices needs an axis that shards the sequence, {SEQUENCE_ROLES}; got "
        f"the axes {dict(mesh.shape)}, of which none does. Say which axis plays which role, "
        f"probably axis_names={meant}; or pass axis_names=AxisNames() to have every device work on "
        "whole sequences."
    )


def resolve_axes(mesh: Mesh | AbstractMesh, names: AxisNames) -> dict[str, Axis]:
    """The `Axis` of each role on `mesh`.

    Raises:
        ValueError: if a name that the caller gave is not an axis of the mesh, or plays two roles.
    """
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
    neighbours share a row, and each set of neighbours has rows of its own.

    Args:
        mesh: the mesh.
        axes: what `resolve_axes` says, for data and tensor.
        names: the axis of the mesh, or several as one, slowest first.
        degrees: the degrees; None for Ring Attention.

    Raises:
        ValueError: if the mesh has no such axis, if the axis plays another role or another one
            shards the sequence too, or if the degrees do not fit.
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
    """Platform of the devices of a mesh, and their least CUDA compute capability.

    An abstract mesh counts as one of the devices that jax has here.

    Returns:
        One of `PLATFORMS`; and a pair such as (9, 0) for Hopper, or None if it is not known or the
        devices are not NVIDIA GPUs.
    """
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
