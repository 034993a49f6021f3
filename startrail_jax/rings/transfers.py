"""Bytes that one device receives in each step of the schedule, in closed form.

The steps are those of `startrail_jax.rings.vjp`. `startrail_jax.traffic.cost` adds them up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.rings.options import Options, Side
from startrail_jax.rings.sizes import WIDTHS, Sizes, traveller
from startrail_jax.rings.sparse_plan import SparsePlan
from startrail_jax.tokens.layout import slice_pairs

_FLOAT32 = 4
_INT32 = 4
# The flat axis over which the paper permutes keys.
_TRADED = ("group", "team")


class Transfer(NamedTuple):
    """Bytes that one device receives in one step of the schedule by one kind of collective."""

    step: str
    """Step of the schedule, for example "query gather"."""
    collective: str
    """One of `startrail_jax.traffic.COLLECTIVES`."""
    roles: tuple[str, ...]
    """Roles of the mesh axes over which it goes, slowest first: one, but for the paper's permute of
    keys, which goes over group and team."""
    hops: tuple[tuple[int, int] | None, ...] = ()
    """For a collective_permute, its messages, which have equal sizes: in a ring, the distances that
    they travel in the outer and in the inner cycle, in places; a single ring is an outer cycle.
    None where group and team trade places."""
    inner: int = 1
    """For messages in a ring, number of devices in an inner cycle."""
    pairs: tuple[tuple[int, int], ...] = ()
    """For a permute that is not a ring, (sender, receiver) along the flat axis of `roles`."""
    message_bytes: int | None = None
    """Bytes of a message, where not all devices receive one; None for `received_bytes`."""
    tensor_bytes: int = 0
    """Bytes of query, key, value, output and their gradients."""
    row_bytes: int = 0
    """Bytes of arrays without head_dim: lse, delta and segment ids."""

    @property
    def received_bytes(self) -> int:
        """`tensor_bytes` and `row_bytes` together."""
        return self.tensor_bytes + self.row_bytes

    def times(self, count: int) -> Transfer:
        """The transfer for this many attentions."""
        names = ("tensor_bytes", "row_bytes", "message_bytes")
        sizes = {name: getattr(self, name) for name in names}
        return self._replace(**{x: count * size for x, size in sizes.items() if size is not None})

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends, if it sends anything."""
        return self.received_bytes if self.message_bytes is None else self.message_bytes


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The transfers of each step, for one setting and one device's share of the sizes."""

    degrees: Degrees
    """The degrees of the mesh."""
    share: Sizes
    """The sizes on one device: `Sizes.share` of these degrees."""
    kv_heads: int
    """Key heads over all devices."""
    offsets: Sequence[int]
    """Ring distances that are visited, in whole inner cycles, 0 first."""
    options: Options
    """The options of the attention."""

    def exchange(self, *, id_arrays: int) -> list[Transfer]:
        """Step 0: query, key and value.

        Args:
            id_arrays: number of arrays of segment ids that go along.
        """
        share = self.share
        tensors = self._exchanged(share.query_bytes) + self._exchanged(share.key_value_bytes)
        ids = (share.query_id_bytes, share.key_id_bytes)[:id_arrays]
        return [
            _copies("head exchange", "all_to_all", "head", 1, tensors),
            _copies("head exchange", "all_gather", "head", 1, 0, sum(map(self._exchanged, ids))),
        ]

    def gradient_exchange(self) -> list[Transfer]:
        """The gradient of step 0: dq, dk and dv back."""
        tensors = map(self._exchanged, (self.share.query_bytes, self._summed_key_gradient_bytes))
        return [_copies("head exchange", "all_to_all", "head", 1, sum(tensors))]

    @property
    def _summed_key_gradient_bytes(self) -> int:
        """Bytes of dk and dv, summed over all queries but not yet over copies of a key head: in the
        input dtype if there are no copies, else in float32."""
        copied = self.kv_heads < self.degrees.head * self.degrees.tensor
        size = self.share.key_value_bytes
        return self.share.in_dtype(size, "float32") if copied else size

    def output_exchange(self) -> list[Transfer]:
        """Step 5: the output, or its gradient back."""
        return [
            _copies(
                "output exchange", "all_to_all", "head", 1, self._exchanged(self.share.out_bytes)
            ),
        ]

    def places(self) -> list[Transfer]:
        """Before all else, the ends of trees, where a window needs places in branches too: see
        `rings.branches`."""
        if self.share.id_arrays == 1:
            return []
        size = self._of_rank(self.share.query_id_bytes) // self.share.id_arrays
        others = self.degrees.sequence - 1
        return [_copies("places", "all_gather", SEQUENCE_ROLES, others, 0, size)]

    def balance(self, *, shared_ids: bool) -> list[Transfer]:
        """Before step 0, queries, keys and values to zigzag order: see `rings.balance`.

        Args:
            shared_ids: whether queries and keys have the same array of segment ids.
        """
        share = self.share
        ids = share.query_id_bytes + (0 if shared_ids else share.key_id_bytes)
        return self._slices("balance", share.query_bytes + self._own_key_bytes, self._of_rank(ids))

    def balance_gradients(self) -> list[Transfer]:
        """The gradient of `balance`."""
        return self._slices("balance", self.share.query_bytes + self._own_key_bytes, back=True)

    def balance_output(self, *, back: bool) -> list[Transfer]:
        """After step 5, the output back to contiguous order; or its gradient to zigzag order."""
        return self._slices("balance", self.share.out_bytes, back=back)

    @property
    def _own_key_bytes(self) -> int:
        """Bytes of the keys and values of a device as they come, before any copies."""
        share, tensor = self.share, self.degrees.tensor
        heads = self.kv_heads if self.kv_heads % tensor else self.kv_heads // tensor
        return self._of_rank(share.key_value_bytes // share.kv_heads) * heads

    def _of_rank(self, size: int) -> int:
        """Bytes of the tokens of one rank, of those that it has after the head exchange."""
        return size // self.degrees.head

    def _slices(
        self, step: str, tensors: int, rows: int = 0, *, back: bool = False
    ) -> list[Transfer]:
        """The permutes of the even and of the odd slices, each of half a share."""
        moves = []
        for pairs in slice_pairs(self.degrees.sequence):
            if all(source == target for source, target in pairs):
                continue
            moves.append(
                Transfer(
                    step=step,
                    collective="collective_permute",
                    roles=SEQUENCE_ROLES,
                    pairs=tuple((b, a) if back else (a, b) for a, b in pairs),
                    tensor_bytes=tensors // 2,
                    row_bytes=rows // 2,
                )
            )
        return moves

    def _chunks(self, each: bool) -> int:
        """How often segment ids are sent: for each chunk of heads, or once for all. In the forward
        pass XLA sends them once; backward, only where a device sends what it has not gathered."""
        return self.options.head_chunks if each else 1

    def _partial(self, size: int) -> int:
        """Bytes of parts of gradients of arrays that have `size` bytes."""
        return self.share.in_dtype(size, self.options.gradient_dtype)

    def _exchanged(self, size: int) -> int:
        """How many of `size` bytes come from other devices of the head axis."""
        return size * (self.degrees.head - 1) // self.degrees.head

    def query_gather(self, *, backward: bool = False) -> list[Transfer]:
        """Step 1; the backward pass gathers dout, lse and delta too, and perhaps not the query."""
        tensors, rows = self.share.query_bytes, self.share.query_id_bytes * self._chunks(backward)
        if backward and self.options.keep_gathered:
            tensors, rows = 0, 0
        if backward:
            tensors, rows = tensors + self.share.out_bytes, rows + 2 * self.share.lse_bytes
        return [_copies("query gather", "all_gather", "team", self.degrees.team - 1, tensors, rows)]

    def query_scatter(self) -> list[Transfer]:
        """The gradient of step 1: dq is summed over the team."""
        dq = self._partial(self.share.query_bytes)
        return [_copies("query scatter", self._summing, "team", self.degrees.team - 1, dq)]

    @property
    def _summing(self) -> str:
        """The collective that brings parts of gradients to their owners."""
        return "reduce_scatter" if self.options.gradient_dtype == "float32" else "all_to_all"

    def key_placement(self, *, shared_ids: bool, backward: bool = False) -> list[Transfer]:
        """Step 2: keys and values to the devices that need them in round 0.

        Args:
            shared_ids: whether queries and keys have the same array of segment ids. In the order of
                the paper it is then gathered over the team already, and XLA does not repeat that.
        """
        step, tensors = "key placement", self.share.key_value_bytes
        ids = self.share.key_id_bytes * self._chunks(backward)
        gathered = self.degrees.group - 1
        if self.options.published:
            gathered_ids = 0 if shared_ids else ids
            return [
                _copies(step, "all_gather", "team", gathered, tensors, gathered_ids),
                self._trade(step, tensors, ids),
            ]
        return [_copies(step, "all_gather", "group", gathered, tensors, ids)]

    def key_gradient_placement(self) -> list[Transfer]:
        """The gradient of step 2: dk and dv are summed over the group and sent to their owners."""
        step, dkv = "key gradient placement", self._partial(self.share.key_value_bytes)
        gathered = self.degrees.group - 1
        if self.options.published:
            return [
                self._trade(step, dkv),
                _copies(step, self._summing, "team", gathered, dkv),
            ]
        return [_copies(step, self._summing, "group", gathered, dkv)]

    def _trade(self, step: str, tensors: int, rows: int = 0) -> Transfer:
        """The permute of the paper, of whole units, in which group and team trade places."""
        units = self.degrees.team if self.degrees.team > 1 else 0
        return _copies(step, "collective_permute", _TRADED, units, tensors, rows, hops=(None,))

    def ring(self) -> list[Transfer]:
        """Step 3 of the forward pass: a key unit goes round."""
        share = self.share
        return self._turns("ring", 1, self.degrees.group, share.key_value_bytes, share.key_id_bytes)

    def gradient_ring(self, mode: Side) -> list[Transfer]:
        """Step 3 of the backward pass; gradients make as many hops as their operands."""
        share = self.share
        if mode == "kv":
            direction, members, operands = 1, self.degrees.group, share.key_value_bytes
            rows = share.key_id_bytes * self.options.head_chunks
            gradients = self._partial(share.key_value_bytes)
        else:
            direction, members = -1, self.degrees.team
            operands = share.query_bytes + share.out_bytes
            rows = share.query_id_bytes * self._chunks(members > 1) + 2 * share.lse_bytes
            gradients = self._partial(share.query_bytes)
        return [
            *self._turns("ring", direction, members, operands, rows),
            *self._turns("gradient ring", direction, members, gradients, to_owner=True),
        ]

    def _turns(
        self,
        step: str,
        direction: int,
        members: int,
        tensors: int,
        rows: int = 0,
        *,
        to_owner: bool = False,
    ) -> list[Transfer]:
        """Messages round the outer and the inner cycle of the ring, each of `members` buffers of
        `tensors` + `rows` bytes (see `Transfer`), in `direction` +1 or -1.

        The step of the outer cycle of a double ring is "outer " + step. Gradients that go
        `to_owner` start in round 1, and their last hop takes them to the owner of their travellers.
        """
        inner = self.options.inner
        within, between = _hops(tuple(self.offsets[::inner]), inner, direction, to_owner)
        turns = []
        for name, hops in ((step, within), (f"outer {step}" if inner > 1 else step, between)):
            permute, copies = (name, "collective_permute", "ring"), len(hops) * members
            if hops:
                turns.append(_copies(*permute, copies, tensors, rows, hops=hops, inner=inner))
        return turns

    def combination(self) -> list[Transfer]:
        """Step 4: outputs and lse to the owners of the queries."""
        team, out, lse = self.degrees.team, self.share.out_bytes, self.share.lse_bytes
        if not self.options.published:
            # In float32, the rounding error of lse goes along.
            stats = 2 * lse if self.share.width == _FLOAT32 else lse
            return [_copies("combine", "all_to_all", "team", team - 1, out, stats)]
        # The log-sum-exp over the team is a pmax and a psum of the lse of the whole query unit.
        return [
            _copies("combine", "reduce_scatter", "team", team - 1, out),
            _copies("combine", "all_reduce", "team", 2, 0, all_reduce_bytes(team * lse, team)),
        ]

    @functools.cached_property
    def traveller(self) -> Side:
        """The side that goes round the ring in the backward pass."""
        degrees = self.degrees
        return traveller(self.options, self.share, team=degrees.team, group=degrees.group)

    def in_rings(self, *, shared_ids: bool = True) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers of the forward and of the backward pass where keys go round the rings.

        Tokens are exchanged for zigzag order if that is the balance of the options.

        Args:
            shared_ids: whether queries and keys have the same array of segment ids.
        """
        balances = self.options.balance == "exchange"
        forward = [
            *self.places(),
            *(self.balance(shared_ids=shared_ids) if balances else ()),
            *self.exchange(id_arrays=1 if shared_ids else 2),
            *self.query_gather(),
            *self.key_placement(shared_ids=shared_ids),
            *self.ring(),
            *self.combination(),
            *self.output_exchange(),
            *(self.balance_output(back=True) if balances else ()),
        ]
        again = self.key_placement(shared_ids=shared_ids, backward=True)
        backward = [
            *(self.balance_output(back=False) if balances else ()),
            *self.output_exchange(),
            *self.query_gather(backward=True),
            *([] if self.options.keep_gathered else again),
            *self.gradient_ring(self.traveller),
            *self.query_scatter(),
            *self.key_gradient_placement(),
            *self.gradient_exchange(),
            *self.replica_sum(),
            *(self.balance_gradients() if balances else ()),
        ]
        return forward, backward

    def sparse(self, plan: SparsePlan, *, forward: bool, backward: bool) -> list[Transfer]:
        """The moves of the sparse exchange, which takes the place of all steps: see `rings.sparse`.

        Args:
            plan: the moves.
            forward, backward: whether these are the moves of the forward pass, of the backward
                pass, or of both.

        Returns:
            The transfers of the device that receives the most in these passes.
        """
        share, ranks = self.share, self.degrees.sequence
        heads = max(self.kv_heads // self.degrees.tensor, 1)
        channels = share.batch * heads * (share.head_dim + share.value_head_dim)
        times = (forward, backward and not self.options.keep_gathered)
        # Of one key, in bytes: itself and its segment id, as often as they are sent, and gradients.
        key = channels * share.width * sum(times)
        ids = times[0] + times[1] * self._chunks(True)
        row = share.batch * _INT32 * share.packed * ids
        gradient = channels * WIDTHS[self.options.gradient_dtype] * backward
        of_keys, of_gradients = plan.received(ranks)
        busiest = int((of_keys * (key + row) + of_gradients * gradient).argmax())
        permutes = [
            (pairs, *(move.length * size for size in sizes))
            for move in plan.moves
            for pairs, *sizes in ((move.pairs, key, row), (move.returning, gradient, 0))
            if not move.shared
        ]
        moves = [
            Transfer(
                step="sparse keys",
                collective="collective_permute",
                roles=SEQUENCE_ROLES,
                pairs=pairs,
                tensor_bytes=tensors * (busiest in dict(pairs).values()),
                row_bytes=rows * (busiest in dict(pairs).values()),
                message_bytes=tensors + rows,
            )
            for pairs, tensors, rows in permutes
        ]
        sums = [(key, row), (channels * _FLOAT32 * backward, 0)]
        for sizes in sums:
            total = [all_reduce_bytes(plan.shared * size, ranks) for size in sizes]
            moves.append(_copies("shared keys", "all_reduce", SEQUENCE_ROLES, 1, *total))
        return moves

    def replica_sum(self) -> list[Transfer]:
        """Gradients of keys and values that lie on every device along `tensor`, summed over it.

        If `tensor` divides the number of key heads, each head lies on one device.
        """
        share, tensor = self.share, self.degrees.tensor
        if self.kv_heads % tensor == 0:
            return []
        # What is summed is as it was before the head exchange.
        row = share.batch * (share.key_tokens // self.degrees.head) * self.kv_heads * _FLOAT32
        size = sum(all_reduce_bytes(row * channels, tensor) for channels in share.key_channels)
        return [_copies("replica sum", "all_reduce", "tensor", 1, size)]


def all_reduce_bytes(size: int, num_devices: int) -> int:
    """Bytes that a device receives when `num_devices` sum buffers of `size` bytes, rounded up."""
    return -(-2 * (num_devices - 1) * size // num_devices)


@functools.lru_cache(maxsize=1024)
def _hops(
    offsets: tuple[int, ...], inner: int, direction: int, to_owner: bool
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """The hops within the inner cycles that begin at these offsets, and those between them."""
    outer = [offset // inner for offset in offsets]
    within = ((0, direction),) * ((inner - 1) * len(outer))
    between = tuple((direction * (b - a), 0) for a, b in itertools.pairwise(outer))
    if to_owner and between:
        # From the last visit of the last inner cycle.
        between = *between[1:], (-direction * outer[-1], direction if inner > 1 else 0)
    return within, between


def _copies(
    step: str,
    collective: str,
    roles: str | tuple[str, ...],
    copies: int,
    tensors: int,
    rows: int = 0,
    *,
    hops: tuple[tuple[int, int] | None, ...] = (),
    inner: int = 1,
) -> Transfer:
    """A transfer of `copies` buffers of `tensors` + `rows` bytes each."""
    return Transfer(
        step=step,
        collective=collective,
        roles=(roles,) if isinstance(roles, str) else roles,
        hops=hops,
        inner=inner,
        tensor_bytes=copies * tensors,
        row_bytes=copies * rows,
    )
