"""What one device receives in each step of an attention, for many settings at a time.

The steps and their bytes are those of `startrail_jax.analysis.transfers`, to the byte; there, one
setting is looked at, with every option. Here are the options of the planner: no segment ids, keys
as long as queries, all rounds of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.layers.visits import Visits

_FLOAT32 = 4
_QUERY_ARRAYS = 4
"""What of a query the backward pass needs: itself, the gradient of its output, the log-sum-exp of
its rows, and the sum of output times gradient."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Share:
    """What a device works on after the head exchange, in bytes: arrays [setting]."""

    tokens: np.ndarray
    """Query tokens of a sequence, before any gather."""
    query: np.ndarray
    """The query."""
    rows: np.ndarray
    """Log-sum-exp of each query and head, in float32."""
    keys: np.ndarray
    """Key and value together."""
    query_gradient: np.ndarray
    """A partial gradient of the query."""
    key_gradient: np.ndarray
    """A partial gradient of key and value."""
    summed_key_gradient: np.ndarray
    """The same, summed over all queries: in float32 where key heads are copied."""

    @classmethod
    def of(cls, settings: Settings, call: Call, gradient_bytes: int) -> Share:
        """The share for each setting.

        Args:
            settings: the settings.
            call: the model, its tokens and its batch.
            gradient_bytes: bytes of an element of a gradient that travels.
        """
        model, parts = call.model, settings.head * settings.tensor
        tokens = call.padded(settings.sequence) // (settings.sequence // settings.head)
        rows = call.batch // settings.data * tokens
        query = rows * (model.heads // parts) * model.head_dim
        keys = 2 * rows * np.maximum(model.kv_heads // parts, 1) * model.head_dim
        copied = np.where(model.kv_heads < parts, _FLOAT32, model.itemsize)
        return cls(
            tokens=tokens,
            query=query * model.itemsize,
            rows=rows * (model.heads // parts) * _FLOAT32,
            keys=keys * model.itemsize,
            query_gradient=query * gradient_bytes,
            key_gradient=keys * gradient_bytes,
            summed_key_gradient=keys * copied,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Move:
    """One step that moves bytes, through one kind of collective."""

    collective: str
    """One of `startrail_jax.analysis.COLLECTIVES`, or "hop", "inner hop" or "outer hop" of the ring
    and "trade" for the permute of the paper."""
    role: str
    """The axis over which it goes."""
    received: np.ndarray
    """Bytes that a device receives; of a hop, in each of them."""
    count: np.ndarray | int = 1
    """Number of hops."""
    arrays: np.ndarray | int = 1
    """Number of arrays that these bytes are."""
    visits: Visits | None = None
    """Of hops, the rounds that a window leaves; None for all of them."""
    home: bool = False
    """Of hops, whether gradients make them, one round later: the last one takes them home."""

    @property
    def total(self) -> np.ndarray:
        """Bytes that a device receives in all hops."""
        return self.received * self.count


class Moves:
    """The moves of one attention call, forward and backward."""

    def __init__(
        self,
        settings: Settings,
        call: Call,
        gradient_bytes: int = _FLOAT32,
        *,
        float32_sums: bool = False,
    ) -> None:
        """The moves of a call.

        Args:
            settings: the settings.
            call: the model, its tokens and its batch.
            gradient_bytes: bytes of an element of a gradient that travels.
            float32_sums: whether the network sums in float32 alone, as XLA's CPU backend does.
        """
        self.settings, self.call = settings, call
        self._summed_bytes = _FLOAT32 if float32_sums else call.model.itemsize
        self.share = Share.of(settings, call, gradient_bytes)
        self._summing = "reduce_scatter" if gradient_bytes == _FLOAT32 else "all_to_all"
        share = self.share
        query_hop = settings.team * (2 * share.query + 2 * share.rows + share.query_gradient)
        key_hop = settings.group * (share.keys + share.key_gradient)
        self.queries_travel = (query_hop <= key_hop) | settings.published
        """Whether it is queries that go round the ring in the backward pass."""

    @property
    def exchange(self) -> list[Move]:
        """Step 0: query, key and value go from tokens to heads."""
        return [self._head(self.share.query + self.share.keys, 3)]

    def gathers(self, *, backward: bool) -> list[Move]:
        """Steps 1 and 2: the units of the team and of the group."""
        s, share = self.settings, self.share
        query = 2 * share.query + 2 * share.rows if backward else share.query
        gathered = (s.group - 1) * share.keys
        return [
            Move(
                collective="all_gather",
                role="team",
                received=(s.team - 1) * query,
                arrays=_QUERY_ARRAYS if backward else 1,
            ),
            Move(
                collective="all_gather",
                role="group",
                received=self._of_group(gathered),
                arrays=2,
            ),
            Move(
                collective="all_gather",
                role="team",
                received=self._of_paper(gathered),
                arrays=2,
            ),
            self._trade(share.keys),
        ]

    def ring(self, visits: Visits | None = None) -> list[Move]:
        """Step 3: what travels round the ring in the forward pass, hop by hop.

        Args:
            visits: the rounds that a window leaves; None for all.
        """
        return self._hops(self.settings.group * self.share.keys, 2, visits)

    def gradient_ring(self, visits: Visits | None = None) -> tuple[list[Move], list[Move]]:
        """The same in the backward pass: operands, and the gradients that go with them."""
        s, share = self.settings, self.share
        operands = np.where(
            self.queries_travel,
            s.team * (2 * share.query + 2 * share.rows),
            s.group * share.keys,
        )
        gradients = np.where(
            self.queries_travel, s.team * share.query_gradient, s.group * share.key_gradient
        )
        queries = self.queries_travel
        return (
            self._hops(operands, np.where(queries, _QUERY_ARRAYS, 2), visits),
            self._hops(gradients, np.where(queries, 1, 2), visits, home=True),
        )

    def combination(self) -> list[Move]:
        """Step 4: outputs and log-sum-exp to their owners."""
        s, share = self.settings, self.share
        # In float32, what rounding took from the log-sum-exp goes along.
        parts = 2 if self.call.model.itemsize == _FLOAT32 else 1
        rows = share.rows * parts
        summed = share.query // self.call.model.itemsize * self._summed_bytes
        sums = -(-2 * (s.team - 1) * (s.team * share.rows) // s.team)
        ours, paper = ~s.published, s.published
        return [
            Move(
                collective="all_to_all",
                role="team",
                received=ours * (s.team - 1) * (share.query + rows),
                arrays=1 + parts,
            ),
            Move(
                collective="reduce_scatter",
                role="team",
                received=paper * (s.team - 1) * summed,
            ),
            # A maximum and a sum.
            Move(collective="all_reduce", role="team", received=paper * sums, count=2),
        ]

    @property
    def output_exchange(self) -> list[Move]:
        """Step 5: the output goes back from heads to tokens."""
        return [self._head(self.share.query, 1)]

    def scatters(self) -> list[Move]:
        """The gradients of steps 1 and 2, and of copies of key heads."""
        s, share = self.settings, self.share
        summed = (s.group - 1) * share.key_gradient
        return [
            Move(
                collective=self._summing,
                role="team",
                received=(s.team - 1) * share.query_gradient,
            ),
            Move(collective=self._summing, role="group", received=self._of_group(summed), arrays=2),
            self._trade(share.key_gradient),
            Move(collective=self._summing, role="team", received=self._of_paper(summed), arrays=2),
        ]

    @property
    def gradient_exchange(self) -> list[Move]:
        """The gradient of step 0, and of copies of key heads along `tensor`."""
        s, model = self.settings, self.call.model
        head = self._head(self.share.query + self.share.summed_key_gradient, 3)
        tokens = self.share.tokens // s.head * (self.call.batch // s.data)
        row = tokens * model.kv_heads * model.head_dim * _FLOAT32
        copied = model.kv_heads % s.tensor != 0
        sums = 2 * copied * -(-2 * (s.tensor - 1) * row // s.tensor)
        return [head, Move(collective="all_reduce", role="tensor", received=sums, arrays=2)]

    def forward(self, visits: Visits | None = None) -> list[Move]:
        """All moves of the forward pass."""
        return [
            *self.exchange,
            *self.gathers(backward=False),
            *self.ring(visits),
            *self.combination(),
            *self.output_exchange,
        ]

    def backward(self, visits: Visits | None = None) -> list[Move]:
        """All moves of the backward pass."""
        operands, gradients = self.gradient_ring(visits)
        return [
            *self.output_exchange,
            *self.gathers(backward=True),
            *operands,
            *gradients,
            *self.scatters(),
            *self.gradient_exchange,
        ]

    def _head(self, size: np.ndarray, arrays: int) -> Move:
        head = self.settings.head
        received = size * (head - 1) // head
        return Move(collective="all_to_all", role="head", received=received, arrays=arrays)

    def _trade(self, size: np.ndarray) -> Move:
        """The paper's permute of units of keys, of so many bytes a share."""
        units = self._of_paper(self.settings.team)
        return Move(collective="trade", role="group and team", received=units * size, arrays=2)

    def _of_group(self, received: np.ndarray) -> np.ndarray:
        return np.where(self.settings.published, 0, received)

    def _of_paper(self, received: np.ndarray) -> np.ndarray:
        return np.where(self.settings.published, received, 0)

    def _hops(
        self,
        size: np.ndarray,
        arrays: np.ndarray | int,
        visits: Visits | None,
        *,
        home: bool = False,
    ) -> list[Move]:
        s = self.settings
        outer, double = s.ring // s.inner if visits is None else visits.outer, s.inner > 1
        skips: dict[str, Any] = dict(arrays=arrays, visits=visits, home=home)
        return [
            Move(
                collective="hop",
                role="ring",
                received=np.where(double, 0, size),
                count=np.where(double, 0, outer - 1),
                **skips,
            ),
            Move(
                collective="inner hop",
                role="ring",
                received=np.where(double, size, 0),
                count=outer * (s.inner - 1),
                **skips,
            ),
            Move(
                collective="outer hop",
                role="ring",
                received=np.where(double, size, 0),
                count=np.where(double, outer - 1, 0),
                **skips,
            ),
        ]
