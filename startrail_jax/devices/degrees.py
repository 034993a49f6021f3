"""Degrees of parallelism, and the devices of each role. This module needs only NumPy.

`P = group * ring * team * head` devices share one sequence, and every known scheme is a setting of
these four degrees (see `Degrees`). The degree `data` splits the batch, and `tensor` splits heads
and features.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.values import adopt, is_whole, whole

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
    """Ulysses degree: number of devices that exchange tokens for heads before anything else."""
    tensor: int = 1
    """Number of tensor-parallel shards of the heads."""

    def __post_init__(self) -> None:
        adopt(self, whole, *ROLES)
        for role in ROLES:
            degree = getattr(self, role)
            if not is_whole(degree, 1):
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
        """DeepSpeed-Ulysses (arXiv 2309.14509), which exchanges tokens for heads."""
        return cls(data=data, head=sequence, tensor=tensor)

    @classmethod
    def loongtrain(cls, sequence: int, *, head: int, data: int = 1, tensor: int = 1) -> Degrees:
        """LoongTrain's 2D-Attention (arXiv 2406.18485): Ulysses over `head` devices, rings outside.

        Raises:
            ValueError: if `head` does not divide `sequence`.
        """
        _check_divides(sequence, "head", head)
        return cls(data=data, ring=sequence // head, head=head, tensor=tensor)

    @classmethod
    def startrail(
        cls, sequence: int, *, c: int, head: int = 1, data: int = 1, tensor: int = 1
    ) -> Degrees:
        """StarTrail (arXiv 2407.00611): teams of `c`, sub-rings of `sequence / c^2` devices.

        A `head` degree above 1 combines it with Ulysses, which the paper leaves to future work: the
        sub-rings are then of `sequence / (head * c^2)` devices.

        Raises:
            ValueError: if `head * c^2` does not divide `sequence`. The message names the values
                that do.
        """
        _check_divides(sequence, "head", head)
        _check_divides(sequence // head, "c", c)
        return cls(
            data=data,
            group=c,
            ring=sequence // (head * c * c),
            team=c,
            head=head,
            tensor=tensor,
        )

    @classmethod
    def recommended(
        cls,
        num_devices: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        devices_per_node: int | None = None,
        fast_ports: bool = False,
        data: int = 1,
        tensor: int = 1,
    ) -> Degrees:
        """A good setting for any number of devices, by a rule that fits in four lines.

        For the P = num_devices / (data * tensor) devices of one sequence:

        1. `head` is the largest number that divides P and the key heads. On several nodes, P /
           `head` must be at least the number of devices of a node.
        2. If each device of several nodes has a fast port, `head` is at least the largest number
           that divides the devices of a node and the query heads, and fits the key heads.
        3. The rest, P / `head`, is `ring`.
        4. From 32 on, the rest is a `team` of 2 and rings; from 128 on, it is StarTrail with C = 2.

        docs/planner.md compares the rule with the fastest of all settings, for 8 to 256 GPUs.

        Args:
            num_devices: all devices.
            heads: query heads.
            kv_heads: key and value heads; as many as query heads by default.
            devices_per_node: devices of a node; by default, all are in one node.
            fast_ports: True if each device has a network port of 400 Gb/s or more.
            data: number of shards of the batch.
            tensor: number of tensor-parallel shards of the heads, which share a node.

        Raises:
            ValueError: if a number is not a positive integer, or `data * tensor` does not divide
                `num_devices`.
        """
        numbers = {
            **{"num_devices": num_devices, "heads": heads, "data": data, "tensor": tensor},
            "kv_heads": heads if kv_heads is None else kv_heads,
            "devices_per_node": num_devices if devices_per_node is None else devices_per_node,
        }
        for name, number in numbers.items():
            if not is_whole(number, 1):
                raise InputError(f"{name} must be an integer of at least 1; got {number!r}.")
        if num_devices % (data * tensor):
            raise InputError(
                f"data * tensor must divide the number of devices; got data={data}, tensor="
                f"{tensor}, num_devices={num_devices}. Use divisors of it."
            )
        sequence = num_devices // (data * tensor)
        node = max(numbers["devices_per_node"] // tensor, 1)
        queries, keys = max(heads // tensor, 1), max(numbers["kv_heads"] // tensor, 1)
        divisors = [degree for degree in range(1, sequence + 1) if sequence % degree == 0]
        least = node if sequence > node else 1
        heads_of_keys = [x for x in divisors if keys % x == 0 and sequence // x >= least]
        # Several devices may have copies of a key head.
        common = math.gcd(node, queries)
        in_node = [x for x in divisors if common % x == 0 and (x % keys == 0 or keys % x == 0)]
        head = max([1, *heads_of_keys, *(in_node if fast_ports and sequence > node else ())])
        rest, options = sequence // head, {"head": head, "data": data, "tensor": tensor}
        if rest >= 128 and rest % 4 == 0:
            return cls.startrail(sequence, c=2, **options)
        team = 2 if rest >= 32 and rest % 2 == 0 else 1
        return cls(team=team, ring=rest // team, **options)


def check_degrees(degrees: Any) -> None:
    """Raises unless degrees are `Degrees`, and not, say, a number of devices."""
    if isinstance(degrees, Degrees):
        return
    raise InputError(
        f"degrees must be startrail_jax.Degrees; got {degrees!r}. Say how the devices share the "
        "work, for example startrail_jax.Degrees.startrail(8, c=2), or Degrees(ring=8) for Ring "
        "Attention."
    )


def _check_divides(sequence: int, name: str, value: int) -> None:
    """Raises unless a head degree, or the square of c, divides `sequence`."""
    power = 2 if name == "c" else 1
    valid = [d for d in range(1, sequence + 1) if sequence % d**power == 0]
    if value in valid:
        return
    raise InputError(
        f"{name}{'^2' if power == 2 else ''} must divide the sequence degree; got {name}={value}, "
        f"sequence degree={sequence}. Use one of {valid}, or another number of devices."
    )


@dataclass(frozen=True)
class Axis:
    """The devices of one role: all devices along some mesh axes, or one digit of their index.

    Index p along mesh axes of `places` devices has the digit `p // stride % degree`, so that
    several roles can share them.
    """

    names: tuple[str, ...]
    """Names of the mesh axes, slowest first; axes of size 1 are left out."""
    degree: int
    """Number of devices that take the role together."""
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
