"""Which keys each device must be sent under a mask, and in which messages: static arithmetic.

A ring sends every key to every device. A *sparse plan* sends a device only those that it needs,
which are few under a window, a chunk or the like. All sequence ranks count as shards, also those of
the head axis, and queries stay where they are.

* A *slice* is a run of neighbouring positions that one rank holds: one for each rank in contiguous
  order, and two in zigzag order.
* A *piece* is a run of neighbouring keys of one slice that one rank sends to another.
* A *move* is one message on each device: a rank sends at most one piece and receives at most one,
  and all pieces are of one length. Pieces are the edges of a bipartite graph of senders and
  receivers, and moves are its colours: as many as the busiest rank has pieces (Konig's theorem).
* A run of keys that most ranks need, such as attention sinks, is *shared*: all get it from one sum.

It is as exact as `masks.Mask.some` is for spans of positions: runs end at the first and at the last
key that may be seen, and have gaps where whole blocks of a slice are hidden.

This module needs NumPy alone, as the planner uses it too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.tokens.layout import Layout, Span

# A gap between keys that are needed is found where it hides one of so many blocks of a slice.
_BLOCKS = 64
# Slices whose keys the queries of a slice may see, on average. Beyond, a ring is no worse.
_MOST_SLICES = 64
# Tokens of the tiles of kernels are multiples of this, and how much longer a run may be for that.
_TILE, _SLACK = 128, 0.01
# Pairs of a rank and a slice that a mask is asked about at once.
_AT_ONCE = 2**21


@dataclass(frozen=True)
class Slices:
    """The slices of a sequence, in order of position."""

    ranks: int
    per_rank: int
    """Slices that a rank holds: 1, or 2 in zigzag order."""
    size: int
    """Tokens in a slice."""

    @property
    def count(self) -> int:
        """Number of slices."""
        return self.ranks * self.per_rank

    def holder(self, index: Any) -> Any:
        """The rank of a slice, or of an array of them."""
        return np.minimum(index, 2 * self.ranks - 1 - index)

    def place(self, position: int, length: int) -> tuple[int, int]:
        """Where `length` keys of one slice that begin at a position, or before it, lie: the
        position of the first of them, and its index in the shard of its rank."""
        index, within = divmod(position, self.size)
        within = min(within, self.size - length)
        late = self.size if index >= self.ranks else 0
        return index * self.size + within, late + within


Shows = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(ranks, first, last) -> whether some query of each rank may see some key of positions `first` to
`last`, both included; arrays that broadcast. False is certain."""
Needs = dict[int, list[tuple[int, int]]]
"""For each rank, the runs (first, last) of keys that it needs and does not hold, in order."""


@dataclass(frozen=True)
class KeyRun:
    """What each rank sends and receives in one move: a run of keys of one slice."""

    length: int
    """The same on all ranks."""
    starts: tuple[int, ...]
    """Of each rank, the index in its shard of the first key that it sends."""
    positions: tuple[int, ...]
    """Of each rank, the position of the first key that it receives."""
    needed: tuple[tuple[int, int], ...]
    """Of each rank, the first and the last position, both included, of the keys that count there;
    none if the first is greater. Others come along as all runs have one length."""
    owner: int | None = None
    """The rank that holds a shared run; None for a run from one rank to another."""


@dataclass(frozen=True)
class KeyMove:
    """One message of each rank."""

    pairs: tuple[tuple[int, int], ...]
    """(sender, receiver); each rank at most once a sender and once a receiver. Empty if shared."""
    runs: tuple[KeyRun, ...]
    """The runs that lie one after another in the message."""

    @property
    def returning(self) -> tuple[tuple[int, int], ...]:
        """The pairs of the way back."""
        return tuple((target, source) for source, target in self.pairs)

    @property
    def length(self) -> int:
        """Keys in the message."""
        return sum(part.length for part in self.runs)

    @property
    def shared(self) -> bool:
        """Whether all ranks receive the keys from a sum over all of them."""
        return self.runs[0].owner is not None


@dataclass(frozen=True)
class SparsePlan:
    """All that is sent for one mask, one layout and one length."""

    moves: tuple[KeyMove, ...]

    def received(self, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys, and gradients of keys, that each of so many ranks receives in permutes."""
        keys, gradients = np.zeros((2, ranks), int)
        for move in self.moves:
            # Each rank sends at most one message of a move, and receives at most one.
            sources, targets = np.reshape(move.pairs, (-1, 2)).astype(int).T
            keys[targets] += move.length
            gradients[sources] += move.length
        return keys, gradients

    @property
    def permuted(self) -> int:
        """Keys that a rank receives from others in permutes."""
        return sum(move.length for move in self.moves if not move.shared)

    @property
    def shared(self) -> int:
        """Keys that all ranks receive from a sum."""
        return sum(move.length for move in self.moves if move.shared)


def why_not_sparse(mask: Mask, layout: Layout, seq_len: int) -> str | None:
    """Why only the keys that are seen cannot or need not be sent; None if they can."""
    within = mask.within(seq_len)
    if layout.degree == 1:
        return "one device holds all keys"
    if isinstance(within, (Full, Causal)):
        return f"the mask {within} shows the keys of nearly all devices"
    if within.per_row:
        return f"the mask {within} leaves lengths open until a call gives them"
    if plan_sparse(mask, layout, seq_len) is None:
        return f"the mask {within} shows each device keys of nearly all others"
    return None


@functools.lru_cache(maxsize=1024)
def plan_sparse(mask: Mask, layout: Layout, seq_len: int) -> SparsePlan | None:
    """The plan for a mask of static positions and a contiguous or zigzag layout: see `plan_of`."""
    mask = mask.within(seq_len)

    def shows(ranks: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        found = mask.shows(layout.unit_positions(seq_len, ranks, 1), Span(first, last))
        return np.broadcast_to(found, np.broadcast_shapes(ranks.shape, first.shape))

    slices = Slices(layout.degree, layout.multiple // layout.degree, seq_len // layout.multiple)
    return plan_of(slices, shows)


def plan_of(slices: Slices, shows: Shows) -> SparsePlan | None:
    """The plan of the fewest bytes found; None if each device needs keys of very many slices."""
    needs = _needs(slices, shows)
    if needs is None:
        return None
    found = []
    for shared in dict.fromkeys([(), _wanted_by_most(slices, needs)]):
        moves = [_shared_move(slices, shared)] if shared else []
        found.append(SparsePlan((*moves, *_joined(_moves(slices, _without(needs, shared))))))
    return min(found, key=lambda x: (x.permuted + 2 * x.shared, len(x.moves)))


def _needs(slices: Slices, shows: Shows) -> Needs | None:
    """The keys that each rank needs and does not hold; None if they lie in very many slices."""
    indices, ranks = np.arange(slices.count), np.arange(slices.ranks)
    begin = indices * slices.size
    met = [
        shows(some[:, None], begin, begin + slices.size - 1)
        for some in np.array_split(ranks, -(-slices.ranks * slices.count // _AT_ONCE))
    ]
    rank, index = np.nonzero(np.concatenate(met) & (slices.holder(indices) != ranks[:, None]))
    if len(rank) > _MOST_SLICES * slices.count:
        return None
    size = -(-slices.size // _BLOCKS)
    starts = np.arange(0, slices.size, size)
    first = begin[index][:, None] + starts
    last = begin[index][:, None] + np.minimum(starts + size, slices.size) - 1
    row, start, stop = _runs(shows(rank[:, None], first, last))
    receiver = rank[row]
    # The first key of the first block that is needed, and the last one of the last block.
    low, high = first[row, start], last[row, start]
    end = low
    while (low < high).any():
        middle = (low + high) // 2
        found = shows(receiver, end, middle)
        low, high = np.where(found, low, middle + 1), np.where(found, middle, high)
    lowest = low
    low, high = first[row, stop - 1], last[row, stop - 1]
    end = high
    while (low < high).any():
        middle = (low + high + 1) // 2
        found = shows(receiver, middle, end)
        low, high = np.where(found, middle, low), np.where(found, high, middle - 1)
    needs: Needs = defaultdict(list)
    for one, a, b in sorted(zip(receiver.tolist(), lowest.tolist(), low.tolist(), strict=True)):
        # Two runs of a slice stay apart: between them is a block, a 64th of the slice, and each
        # grows by at most a hundredth of its length.
        needs[one].append(_whole_tiles(slices, a, b))
    return dict(needs)


def _whole_tiles(slices: Slices, first: int, last: int) -> tuple[int, int]:
    """A run of keys, a few keys longer if it then begins and ends where tiles of kernels do: a
    causal window of 4096 shows 4095 keys before a slice, and the mask hides one more."""
    begin = first // slices.size * slices.size
    end = begin + slices.size
    low = begin + (first - begin) // _TILE * _TILE
    high = min(begin - (begin - last - 1) // _TILE * _TILE, end) - 1
    return (low, high) if high - low <= (last - first) * (1 + _SLACK) else (first, last)


def _runs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, start and stop of each run of True in rows of bools."""
    steps = np.diff(np.pad(rows.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, start = np.nonzero(steps == 1)
    return row, start, np.nonzero(steps == -1)[1]


def _wanted_by_most(slices: Slices, needs: Needs) -> tuple[tuple[int, int], ...]:
    """Runs of keys that more than half of the ranks need."""
    changes: Counter[int] = Counter()
    for first, last in itertools.chain.from_iterable(needs.values()):
        changes[first] += 1
        changes[last + 1] -= 1
    shared, begin, count = [], None, 0
    for position in sorted(changes):
        count += changes[position]
        if begin is None and 2 * count > slices.ranks:
            begin = position
        elif begin is not None and 2 * count <= slices.ranks:
            shared.append((begin, position - 1))
            begin = None
    # A run is of one slice.
    return tuple(
        (max(first, start), min(last, start + slices.size - 1))
        for first, last in shared
        for start in range(first // slices.size * slices.size, last + 1, slices.size)
    )


def _without(needs: Needs, shared: Iterable[tuple[int, int]]) -> Needs:
    """What is needed beside what is shared."""
    for first, last in shared:
        needs = {
            rank: [
                part
                for a, b in runs
                for part in ((a, min(b, first - 1)), (max(a, last + 1), b))
                if part[0] <= part[1]
            ]
            for rank, runs in needs.items()
        }
    return needs


def _shared_move(slices: Slices, shared: Iterable[tuple[int, int]]) -> KeyMove:
    """The move of shared runs. They count at all ranks but their owner, which has them."""
    runs = []
    for first, last in shared:
        owner = int(slices.holder(first // slices.size))
        start = slices.place(first, last - first + 1)[1]
        runs.append(
            KeyRun(
                length=last - first + 1,
                starts=(start,) * slices.ranks,
                positions=(first,) * slices.ranks,
                needed=tuple(
                    (first, first - 1) if rank == owner else (first, last)
                    for rank in range(slices.ranks)
                ),
                owner=owner,
            )
        )
    return KeyMove((), tuple(runs))


@dataclass
class _Colour:
    """Pieces of one move, as they are found: (source, target, first, last)."""

    number: int
    length: int
    sends: Counter[int]
    """Rank -> the bits of the moves in which it sends."""
    receives: Counter[int]
    by_source: dict[int, tuple[int, int, int, int]] = dataclasses.field(default_factory=dict)
    by_target: dict[int, tuple[int, int, int, int]] = dataclasses.field(default_factory=dict)

    def add(self, piece: tuple[int, int, int, int]) -> None:
        self.by_source[piece[0]] = self.by_target[piece[1]] = piece
        self._flip(piece)

    def remove(self, piece: tuple[int, int, int, int]) -> None:
        del self.by_source[piece[0]], self.by_target[piece[1]]
        self._flip(piece)

    def _flip(self, piece: tuple[int, int, int, int]) -> None:
        self.sends[piece[0]] ^= 1 << self.number
        self.receives[piece[1]] ^= 1 << self.number


def _moves(slices: Slices, needs: Needs) -> list[KeyMove]:
    """Few moves of few keys: long pieces first, those of one distance together."""
    pieces = [
        (int(slices.holder(first // slices.size)), target, first, last)
        for target, runs in needs.items()
        for first, last in runs
    ]
    pieces.sort(key=lambda piece: (piece[2] - piece[3], piece[1] - piece[0], piece[0], piece[2]))
    colours: list[_Colour] = []
    sends, receives = Counter[int](), Counter[int]()
    for piece in pieces:
        taken = sends[piece[0]] | receives[piece[1]]
        lowest = (~taken & (taken + 1)).bit_length() - 1  # The first move in which both are free.
        colour = colours[lowest] if lowest < len(colours) else _freed(colours, piece)
        if colour is None:
            colour = _Colour(len(colours), piece[3] - piece[2] + 1, sends, receives)
            colours.append(colour)
        colour.add(piece)
    return [_move(slices, colour) for colour in colours]


def _freed(colours: list[_Colour], piece: tuple[int, int, int, int]) -> _Colour | None:
    """A colour that fits a piece after others have traded two colours; None if there is none.

    One colour is free at the source and the other at the target. The pieces of the two that hang
    together at the target form a path that does not reach the source: trading the colours along it
    frees the first one at the target, too.
    """
    source, target, *_ = piece
    here = [x for x in colours if source not in x.by_source]
    there = [x for x in colours if target not in x.by_target]
    for one, other in itertools.product(here, there):
        if one.length != other.length:
            continue
        path = []
        step = one.by_target.get(target)
        while step is not None:
            path.append((one, step))
            step = other.by_source.get(step[0])
            if step is not None:
                path.append((other, step))
                step = one.by_target.get(step[1])
        for colour, step in path:
            colour.remove(step)
        for colour, step in path:
            (other if colour is one else one).add(step)
        return one
    return None


def _move(slices: Slices, colour: _Colour) -> KeyMove:
    starts, positions = [0] * slices.ranks, [0] * slices.ranks
    needed = [(0, -1)] * slices.ranks
    for source, target, first, last in colour.by_source.values():
        positions[target], starts[source] = slices.place(first, colour.length)
        needed[target] = (first, last)
    part = KeyRun(colour.length, tuple(starts), tuple(positions), tuple(needed))
    return KeyMove(tuple(sorted(piece[:2] for piece in colour.by_source.values())), (part,))


def _joined(moves: Iterable[KeyMove]) -> list[KeyMove]:
    """One move in place of several between the same ranks."""
    runs = defaultdict(list)
    for move in moves:
        runs[move.pairs] += move.runs
    return [KeyMove(pairs, tuple(those)) for pairs, those in runs.items()]
