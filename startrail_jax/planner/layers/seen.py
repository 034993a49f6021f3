"""What layers with a window send where only the keys that it shows are sent.

The plan is that of `startrail_jax.rings.sparse_plan`, in zigzag order, and its bytes are those of
`startrail_jax.analysis.transfers`; there, one setting is looked at, with any mask.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from startrail_jax.planner.links import Cost, Links
from startrail_jax.planner.traffic import Moves
from startrail_jax.rings.sparse_plan import Exchange, Slices, exchange_of

_FLOAT32 = 4
_RANKS = ("ring", "group", "team", "head")
"""The axes of a rank, slowest first."""


class Seen:
    """The exchange of each setting for layers with a window; arrays [setting]."""

    def __init__(self, traffic: Moves, links: Links, window: int, gradient_bytes: int) -> None:
        """The exchanges.

        Args:
            traffic: what the rings send, and the settings and the call.
            links: the links of the cluster.
            window: keys that a query sees, its own included.
            gradient_bytes: bytes of an element of a gradient that travels.
        """
        self._links, self._settings = links, traffic.settings
        s, call = traffic.settings, traffic.call
        model = call.model
        degrees, kind = np.unique(s.sequence, return_inverse=True)
        self._exchanges = [
            _exchange(degree, call.padded(degree) // (2 * degree), window)
            for degree in degrees.tolist()
        ]
        self._kind = kind.ravel()
        channels = call.batch // s.data * np.maximum(model.kv_heads // s.tensor, 1)
        channels = 2 * channels * model.head_dim
        self._key = channels * model.itemsize
        self._gradient = channels * gradient_bytes
        self._shared_gradient = channels * _FLOAT32
        *_, self._sums = traffic.gradient_exchange

    def received(self, *, forward: bool, backward: bool) -> np.ndarray:
        """Bytes that a device receives in the passes; infinite where there is no exchange."""
        key, gradient = self._key * (forward + backward), self._gradient * backward
        found = np.full(len(self._settings), np.inf)
        for number, exchange in enumerate(self._exchanges):
            if exchange is None:
                continue
            mine = self._kind == number
            size = int(self._settings.sequence[mine][0])
            keys, gradients = exchange.received(size)
            permuted = np.outer(keys, key[mine]) + np.outer(gradients, gradient[mine])
            summed = exchange.shared * key[mine], exchange.shared * self._shared_gradient[mine]
            times = 2 * (size - 1)
            found[mine] = permuted.max(0) - (-times * summed[0] // size)
            found[mine] -= backward * (-times * summed[1] // size)
        return found + backward * self._sums.received

    def costs(self, taken: np.ndarray) -> tuple[Cost, Cost]:
        """What it costs to send the keys, and to send their gradients home.

        Args:
            taken: the settings that are asked about; the cost of others is 0.
        """
        links, s = self._links, self._settings
        sizes = [np.zeros((3, len(s))) for _ in range(2)]
        columns = np.stack([*(links.placement.strides[role] for role in _RANKS),
                            *(vars(s)[role] for role in _RANKS), s.tensor])  # fmt: skip
        unique, index = np.unique(columns[:, taken], axis=1, return_inverse=True)
        rows = np.flatnonzero(taken)
        for number, column in enumerate(unique.T.tolist()):
            mine = rows[index.ravel() == number]
            exchange = self._exchanges[self._kind[mine[0]]]
            assert exchange is not None
            found = _crossing(
                exchange, tuple(column[:4]), tuple(column[4:8]), column[8], links.placement.per_node
            )
            for size, values in zip(sizes, found, strict=True):
                size[:, mine] = np.array(values)[:, None]
        keys, gradients = (
            links.messages(across * each, inside * each, count)
            for (across, inside, count), each in zip(
                sizes, (self._key, self._gradient), strict=True
            )
        )
        shared = np.array([0 if x is None else x.shared for x in self._exchanges])[self._kind]
        count, inside = s.sequence, np.minimum(links.placement.per_node, s.sequence)
        of_sums = 2 * np.where(taken, shared, 0) * (count - 1) / count
        sum_of = lambda each: links.collective("all_reduce", count, inside, of_sums * each)  # noqa: E731
        replicas = replace(self._sums, received=np.where(taken, self._sums.received, 0))
        home = gradients + sum_of(self._shared_gradient) + links.cost(replicas)
        return keys + sum_of(self._key), home


@lru_cache(maxsize=1 << 10)
def _exchange(ranks: int, size: int, window: int) -> Exchange | None:
    """The exchange of a causal window, in zigzag order with slices of `size` tokens."""
    if ranks == 1:
        return None

    def shows(rank: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        found = np.zeros(np.broadcast_shapes(rank.shape, first.shape), bool)
        for index in (rank, 2 * ranks - 1 - rank):
            begin = index * size
            found |= (first < begin + size) & (last > begin - window)
        return found

    return exchange_of(Slices(ranks, 2, size), shows)


@lru_cache(maxsize=1 << 12)
def _crossing(
    exchange: Exchange,
    strides: tuple[int, ...],
    degrees: tuple[int, ...],
    tensor: int,
    per_node: int,
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Keys that cross nodes and that stay inside, of the busiest node, and the number of messages:
    for the keys, and for their gradients, which go the other way."""
    digits = np.indices(degrees).reshape(len(degrees), -1)
    node = np.tensordot(strides, digits, 1) // per_node
    copies = min(tensor, per_node)
    found = []
    for back in (False, True):
        sent, messages = np.zeros((2, node.max() + 1), int), 0
        for move in (x for x in exchange.moves if not x.shared):
            sender, receiver = node[np.array(move.returning if back else move.pairs).T]
            np.add.at(sent, ((sender == receiver).astype(int), sender), copies * move.length)
            messages += 1
        found.append((*map(int, sent.max(1)), messages))
    return found[0], found[1]
