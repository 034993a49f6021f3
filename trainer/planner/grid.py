"""Every legal setting of a cluster and a model, as arrays with one element for each setting."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.weights import OVER_TENSOR
from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES
from trainer.planner.hardware import Cluster
from trainer.planner.models import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is trained: a model, and how much at a time."""

    model: ModelSizes
    seq_len: int
    batch: int
    """Sequences of a batch, over all devices."""
    visible: Mapping[int, float] = field(default_factory=dict)
    """Data-parallel degree -> of the pairs of a query and a key that a layer without a window
    shows, the share that documents leave to the replica that has most; 1 for all others."""

    @property
    def flops(self) -> float:
        """FLOPs of a training step, as `ModelSizes.flops_per_token` counts them."""
        model, length = self.model, self.seq_len
        # Forward and backward, a visible pair takes 12 FLOPs for each channel of the queries.
        hidden = (1 - self.visible.get(1, 1.0)) * (length + 1) / 2
        attention = sum(
            12 * x.model.heads * x.model.head_dim * hidden * x.windows.get(None, 0)
            for x in self.attentions
        )
        return (model.flops_per_token(length) - attention) * length * self.batch

    @property
    def attentions(self) -> tuple[Call, ...]:
        """The call for each of `ModelSizes.attentions`."""
        return tuple(replace(self, model=x) for x in self.model.attentions.values())

    @property
    def causal(self) -> bool:
        return self.model.causal

    @property
    def windows(self) -> dict[int | None, int]:
        """How many layers have each window, None for those that attend to all earlier tokens."""
        windows = self.model.layer_windows
        return dict(Counter(None if (x or math.inf) >= self.seq_len else x for x in windows))

    def padded(self, sequence: Any) -> Any:
        """Tokens of a sequence that so many devices share, with what `train.py` fills it up."""
        multiple = sequence * (2 if self.causal else 1)
        return -(-self.seq_len // multiple) * multiple


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Degrees, and the order of the axes over the nodes: int64 arrays [setting]."""

    data: np.ndarray
    group: np.ndarray
    ring: np.ndarray
    team: np.ndarray
    head: np.ndarray
    tensor: np.ndarray
    order: np.ndarray
    """Index into `ORDERS`."""
    inner: np.ndarray
    """Devices in an inner cycle of a double ring; 1 for a single ring."""
    published: np.ndarray
    """Whether keys are placed, and outputs combined, as in StarTrail's paper."""

    def __len__(self) -> int:
        return len(self.data)

    @property
    def sequence(self) -> np.ndarray:
        """Devices that share a sequence."""
        return self.group * self.ring * self.team * self.head

    @property
    def replicas(self) -> np.ndarray:
        """Devices with different tokens: ZeRO splits over them."""
        return self.data * self.sequence

    def take(self, index: np.ndarray) -> Settings:
        """The settings of an index or a mask."""
        return Settings(**{name: values[index] for name, values in vars(self).items()})


def number_of(*columns: np.ndarray) -> np.ndarray:
    """Numbers that two settings share if they are alike in all columns: int64 [setting]."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        number = number * len(values) + place
    return number


ORDERS = tuple(("data", *order, "tensor") for order in itertools.permutations(SEQUENCE_ROLES))
"""The orders of the axes over the nodes that are tried, slowest first."""


def all_settings(
    cluster: Cluster,
    call: Call,
    *,
    given: Mapping[str, int] | None = None,
    published: bool = True,
) -> Settings:
    """The settings that a cluster and a model allow: degrees, of which the `given` ones are fixed,
    and orders of the axes. Two orders that differ in axes of degree 1 alone are one. Orders in
    which a node ends in the middle of an axis without dividing it evenly are left out."""
    degrees = _legal_degrees(cluster.num_gpus, call, dict(given or {}))
    parts = [_ordered(degrees, index, cluster) for index in range(len(ORDERS))]
    single = _joined(parts)
    # A ring that is partly inside of the nodes may be a double ring, with its cycles inside.
    inside = Placement(single, cluster).inside("ring")
    cut = (inside > 1) & (inside < single.ring)
    double = Settings(**{**vars(single.take(cut)), "inner": inside[cut]})
    both = _joined([single, double])
    if published:
        alike = (both.group == both.team) & (both.team > 1) & (both.head == 1) & (both.inner == 1)
        paper = both.take(alike)
        both = _joined([both, Settings(**{**vars(paper), "published": paper.team > 0})])
    return both


def _joined(parts: list[Settings]) -> Settings:
    names = vars(parts[0])
    return Settings(**{x: np.concatenate([vars(part)[x] for part in parts]) for x in names})


def _ordered(degrees: dict[str, np.ndarray], index: int, cluster: Cluster) -> Settings:
    """The degrees for which an order is one of its own, and fits the nodes."""
    order = ORDERS[index]
    count = len(degrees["data"])
    settings = Settings(
        **degrees,
        order=np.full(count, index),
        inner=np.ones(count, np.int64),
        published=np.zeros(count, bool),
    )
    # Of orders that differ in axes of degree 1, the one with these axes first, in their own order.
    keys = [np.where(degrees[role] == 1, SEQUENCE_ROLES.index(role), 4) for role in order[1:-1]]
    own = np.all([a <= b for a, b in itertools.pairwise(keys)], axis=0)
    settings = settings.take(own)
    return settings.take(Placement(settings, cluster).fits)


def _legal_degrees(num_gpus: int, call: Call, given: dict[str, int]) -> dict[str, np.ndarray]:
    """The degrees that `train.py` takes for this call: see `trainer.parallel.checks.check_step`."""
    divisors = np.array([n for n in range(1, num_gpus + 1) if num_gpus % n == 0], np.int64)
    model, found = call.model, np.ones((1, 0), np.int64)
    limits = {"data": call.batch, "tensor": model.heads, "head": model.heads}
    for role in ("data", "tensor", "head", "team", "group"):
        limit = limits.get(role, num_gpus)
        extra = np.array([given[role]]) if role in given else divisors[limit % divisors == 0]
        found = np.concatenate(
            [np.repeat(found, len(extra), axis=0), np.tile(extra, len(found))[:, None]], axis=1
        )
        found = found[num_gpus % np.prod(found, axis=1) == 0]
    data, tensor, head, team, group = found.T
    ring = num_gpus // np.prod(found, axis=1)
    parts, shards = head * tensor, group * ring * team * head
    legal = call.padded(shards) // shards % tensor == 0
    legal &= (call.batch % data == 0) & (model.heads % parts == 0)
    for x in model.attentions.values():
        legal &= (x.kv_heads % parts == 0) | (parts % x.kv_heads == 0)
    for sizes in (model.sizes, *(x.sizes for x in model.recurrences.values())):
        for name in OVER_TENSOR.keys() & sizes.keys():
            if size := sizes[name]:
                is_copied = bool(OVER_TENSOR[name])
                legal &= (size % tensor == 0) | (is_copied & (tensor % size == 0))
    if "ring" in given:
        legal &= ring == given["ring"]
    columns = dict(data=data, group=group, ring=ring, team=team, head=head, tensor=tensor)
    return {role: values[legal].astype(np.int64) for role, values in columns.items()}


class Placement:
    """Where the axes of settings lie on the nodes of a cluster."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.settings = settings
        self.per_node = cluster.gpus_per_node
        # Role -> distance in devices of two neighbours along it.
        self.strides = {role: np.ones(len(settings), np.int64) for role in ROLES}
        for index, order in enumerate(ORDERS):
            mine = settings.order == index
            stride = np.ones(int(mine.sum()), np.int64)
            for role in reversed(order):
                self.strides[role][mine] = stride
                stride = stride * vars(settings)[role][mine]

    def inside(self, role: str) -> np.ndarray:
        """Neighbours along an axis that share a node."""
        stride = self.strides[role]
        reach = np.minimum(stride * vars(self.settings)[role], self.per_node)
        return np.maximum(reach // np.minimum(stride, self.per_node), 1)

    @property
    def fits(self) -> np.ndarray:
        """Whether every axis is cut evenly where nodes end."""
        good = np.ones(len(self.settings), bool)
        for role in ROLES:
            size = vars(self.settings)[role]
            for edge in (self.strides[role], self.strides[role] * size):
                within = self.per_node % np.minimum(edge, self.per_node) == 0
                good &= within & ((edge <= self.per_node) | (edge % self.per_node == 0))
        return good
