"""Divides documents of all lengths into rows, and decides on how many devices each row lies.

A step has P devices, and its batch is a list of parts, one after another. In a part of
context-parallel degree c, each of P / c rows lies on c neighbouring devices, and has c * S tokens:
S, the share, is the number of tokens that a device holds. So all devices work in each part. Each c
is one compiled program. With P = 4, documents of 3, 1, 1, 1, 1 and 1 shares make two parts:

    c = 4   | a a a b |             one row of 4 shares on 4 devices
    c = 1   | c | d | e | f |       four rows of 1 share, each on a device, which sends nothing

This module runs on the host, with NumPy and without jax, and needs only the lengths of the
documents. So a process knows without any data which documents it will read, and every process
computes the same parts.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from startrail_jax.errors import InputError
from startrail_jax.tokens.trees import branch_positions
from startrail_jax.values import is_whole, whole


@dataclass(frozen=True, kw_only=True)
class DocumentCost:
    """The time that a step takes for its documents, in any unit, since only ratios matter.

    A device of a part of degree c takes

        token * S + pair * (visible pairs of its row) / c + hop * (c - 1) * S

    Matrix products include padding like other tokens, and attention skips it. The defaults are
    about right for Llama 3 8B on H100s with a port of 400 Gb/s each.
    """

    token: float = 1.0
    """Time of a token in matrix products, and in all other work that grows with the number of
    tokens."""
    pair: float = 4e-5
    """Time of one query and one key in attention. A model of width w and L layers takes 14 * w * L
    FLOPs for a pair, forward and backward, and 6 FLOPs per parameter for a token."""
    hop: float = 0.05
    """Time to send a token's keys and values to the next device, and their gradients, without the
    part that overlaps with computation."""
    windows: tuple[int | None, ...] = (None,)
    """The windows of the layers, or of one period of them; None is causal attention without a
    window. Without windows, n tokens have n * (n + 1) / 2 visible pairs. For attention that is not
    causal, give twice the `pair`."""

    def __post_init__(self) -> None:
        prices = self.token, self.pair, self.hop
        if not (min(prices) >= 0 < self.token and sum(prices) < np.inf):
            raise InputError(
                "A token must take some time, and nothing less than 0 or without end; got "
                f"token={self.token}, pair={self.pair}, hop={self.hop}. Give each in one unit."
            )
        if not self.windows or min(1 if w is None else w for w in self.windows) < 1:
            raise InputError(
                "A window is at least 1, or None for all earlier tokens; got "
                f"windows={self.windows}. Give that of each layer, or of one period of layers."
            )

    def visible_pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Visible pairs of documents of these lengths, as the mean over the layers."""
        lengths = np.asarray(lengths, np.int64)
        total = np.zeros(lengths.shape)
        for window, layers in Counter(self.windows).items():
            near = lengths if window is None else np.minimum(lengths, window)
            total += layers * (near * (near + 1) // 2 + (lengths - near) * near)
        return total / len(self.windows)

    def tree_pairs(self, visible_until: np.ndarray) -> np.ndarray:
        """Visible pairs of rows of trees, as the mean over the layers: the `pairs` of `parts`.

        Args:
            visible_until: integers [batch, seq] in natural order, as `Attention` takes them.

        Returns:
            float64 [batch].

        Raises:
            ValueError: if a row is not a tree.
        """
        before = branch_positions(visible_until).astype(np.int64)
        pairs = self.visible_pairs(before + 1) - self.visible_pairs(before)
        return np.where(np.asarray(visible_until) >= 0, pairs, 0).sum(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSizes:
    """Tokens of documents, of which some may be trees of texts with shared beginnings."""

    lengths: np.ndarray
    """Tokens of each: int64 [documents]."""
    stretches: np.ndarray | None = None
    """Tokens that follow one another, int64 [stretches, 3]: the number of their document, and the
    positions of the first and after the last one in their text. None if each document is one text.
    """

    def pairs(self, cost: DocumentCost) -> np.ndarray:
        """Visible pairs of each, as the mean over the layers: float64 [documents]."""
        if self.stretches is None:
            return cost.visible_pairs(self.lengths)
        numbers, first, last = self.stretches.T
        own = cost.visible_pairs(last) - cost.visible_pairs(first)
        return np.bincount(numbers, own, minlength=len(self.lengths))


def first_of_rows(ends: np.ndarray, length: int) -> np.ndarray:
    """The first document of each row of at most `length` tokens, and the number of documents; each
    of these ends at so many tokens after the first, and fits a row."""
    firsts, begun = [0], 0
    while firsts[-1] < len(ends):
        firsts.append(int(np.searchsorted(ends, begun + length, side="right")))
        begun = int(ends[firsts[-1] - 1])
    return np.array(firsts, np.int64)


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """One of the parts of a batch."""

    c: int
    """Context-parallel degree: devices of a row."""
    rows: tuple[tuple[int, ...], ...]
    """The numbers of the documents of each of the P / c rows, in the order of their tokens. Row i
    lies on devices i * c to i * c + c - 1. A row of padding has no documents."""


def parts(
    lengths: Sequence[int] | np.ndarray,
    devices: int,
    *,
    share: int,
    cost: DocumentCost | None = None,
    degrees: Sequence[int] | None = None,
    pairs: Sequence[float] | np.ndarray | None = None,
) -> list[BatchPart]:
    """The parts of one step of these documents.

    A document lies on the fewest devices that can hold it, or on more if padding or waiting would
    take longer than sending its keys. Short documents fill the space that long documents leave.

    Args:
        lengths: tokens of each document. A document of length 0 is in no part.
        devices: P, the devices that share the rows of a step.
        share: S, tokens that a device holds in a part.
        cost: the time of tokens and pairs; None for the default.
        degrees: values that c may take, divisors of P; by default all divisors. Each value is one
            program to compile.
        pairs: visible pairs of each document, if some are trees, which have fewer than texts of
            their length: `DocumentCost.tree_pairs`. By default, `cost.visible_pairs(lengths)`.

    Returns:
        Parts in order of c. Every document that has tokens is in one row of one part.

    Raises:
        ValueError: if a document is longer than the row of the largest degree.
    """
    layout = _Assignment(devices, share, DocumentCost() if cost is None else cost, degrees)
    lengths = layout.checked(lengths)
    seen = _checked_pairs(pairs, lengths, layout.cost)
    return layout.parts(lengths, np.arange(len(lengths)), seen)


class _Document(NamedTuple):
    """Sorted from the longest to the shortest, and documents of one length by their numbers."""

    shortness: int
    """The tokens, negative."""
    number: int
    pairs: float


# The degree of a part, and its rows.
_Rows = tuple[int, list[list[_Document]]]


def _pairs(row: Iterable[_Document]) -> float:
    return sum(document.pairs for document in row)


def _checked_pairs(pairs: Any, lengths: np.ndarray, cost: DocumentCost) -> np.ndarray:
    """The visible pairs of each document."""
    if pairs is None:
        return cost.visible_pairs(lengths)
    found = np.asarray(pairs)
    if found.shape != lengths.shape or found.dtype.kind not in "iuf" or not (found >= 0).all():
        raise InputError(
            "pairs must be numbers from 0 on, the visible pairs of each of the "
            f"{len(lengths)} documents; got {found.dtype} {list(found.shape)}. Leave them out "
            "for texts."
        )
    return found.astype(np.float64)


class _Assignment:
    """What the parts depend on, besides the documents."""

    def __init__(
        self, devices: int, share: int, cost: DocumentCost, degrees: Sequence[int] | None
    ) -> None:
        devices, share = whole(devices), whole(share)
        if not (is_whole(devices, 1) and is_whole(share, 1)):
            raise InputError(
                f"Parts need at least one device, which holds a token; got devices={devices!r}, "
                f"share={share!r}. Give how many devices share rows, and the tokens that one holds."
            )
        if not isinstance(cost, DocumentCost):
            raise InputError(
                f"cost must be a DocumentCost or None; got cost={cost!r}. Leave it out for that "
                "of a usual model."
            )
        divisors = [c for c in range(1, devices + 1) if devices % c == 0]
        given = degrees if degrees is None or isinstance(degrees, Iterable) else (degrees,)
        degrees = divisors if given is None else [whole(c) for c in given]
        if not degrees or not all(is_whole(c, 1) and c in divisors for c in degrees):
            raise InputError(
                f"The degrees of parts must divide the devices; got degrees={degrees}, "
                f"devices={devices}. Use some of {divisors}."
            )
        degrees = sorted(set(degrees))
        self.devices, self.share, self.cost, self.degrees = devices, share, cost, degrees
        self._capacities = [c * share for c in degrees]

    def checked(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """The lengths as an array, if each document has a row that holds it."""
        try:
            found = np.asarray(lengths)
        except ValueError:  # Lists of several lengths.
            found = np.asarray(lengths, object)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise InputError(
                "lengths must be a series of whole numbers, the tokens of each document; got an "
                f"array of {found.dtype} {list(found.shape)}. Give one integer for each document."
            )
        found = found.astype(np.int64, copy=False)
        if found.size and (first := int(found.argmin()), found[first])[1] < 0:
            raise InputError(
                f"A document has 0 tokens or more; got lengths[{first}]={found[first]}. Count the "
                "tokens of each document."
            )
        longest = int(found.argmax()) if found.size else 0
        if found.size and found[longest] > self._capacities[-1]:
            needed = -(-int(found[longest]) // self.degrees[-1])
            raise InputError(
                "A document must fit the longest row; got lengths"
                f"[{longest}]={found[longest]}, where {self.degrees[-1]} devices of "
                f"share={self.share} hold {self._capacities[-1]} tokens. Cut the document, or use "
                f"share={needed}, or more devices."
            )
        return found

    def parts(self, lengths: np.ndarray, numbers: np.ndarray, pairs: np.ndarray) -> list[BatchPart]:
        """The parts of these documents, of those with tokens."""
        numbers = numbers[lengths[numbers] > 0]
        columns = -lengths[numbers], numbers, pairs[numbers]
        documents = sorted(map(_Document._make, zip(*(x.tolist() for x in columns), strict=True)))
        return [
            BatchPart(c=c, rows=tuple(tuple(x.number for x in row) for row in rows))
            for c, rows in sorted(self._cheapest(documents), key=lambda part: part[0])
        ]

    def _cheapest(self, documents: list[_Document]) -> list[_Rows]:
        """Raises all documents of some length to more devices for as long as that takes less."""
        degree_of = {c: c for c in self.degrees}
        best = self._complete(documents, degree_of)
        least = self._seconds(best)
        bound = self._bound(documents)
        for c in self.degrees:
            for higher in self.degrees:
                if higher <= c or self._seconds(best, hop=0) < 1.02 * bound:
                    continue
                tried = {**degree_of, c: higher}
                found = self._complete(documents, tried)
                if (seconds := self._seconds(found)) < least:
                    best, least, degree_of = found, seconds, tried
        return best

    def _complete(self, documents: list[_Document], degree_of: Mapping[int, int]) -> list[_Rows]:
        """Parts of rows of nearly equal work. The rows that no part has go to more devices, or are
        filled up to a part with rows of padding, whichever takes less."""
        rows: dict[int, list[list[_Document]]] = {}
        for c, row in self._rows(documents, degree_of):
            rows.setdefault(c, []).append(row)
        whole: list[_Rows] = []
        left: list[_Rows] = []
        for c, found in rows.items():
            found.sort(key=_pairs, reverse=True)
            size = self.devices // c
            groups = [found[i : i + size] for i in range(0, len(found), size)]
            if len(groups[-1]) < size:
                left.append((c, groups.pop()))
            # In turn from the first device and from the last, as the first row has most work.
            whole += [(c, group[::-1] if i % 2 else group) for i, group in enumerate(groups)]
        if not left:
            return whole
        padded = [(c, row + [[]] * (self.devices // c - len(row))) for c, row in left]
        lowest = min(c for c, _ in left)
        if lowest == self.degrees[-1]:  # No row is longer.
            return whole + padded
        floor = min(c for c in self.degrees if c > lowest)
        again = sorted(document for _, group in left for row in group for document in row)
        raised = self._complete(again, {c: max(floor, up) for c, up in degree_of.items()})
        return whole + min(padded, raised, key=self._seconds)

    def _rows(
        self, documents: list[_Document], degree_of: Mapping[int, int]
    ) -> list[tuple[int, list[_Document]]]:
        """Best fit decreasing: a document goes where it leaves least, or opens a row."""
        rows: list[tuple[int, list[_Document]]] = []
        free: list[tuple[int, int]] = []  # Tokens that are left of a row, and its number.
        for document in documents:
            tokens = -document.shortness
            place = bisect.bisect_left(free, (tokens, -1))
            if place < len(free):
                left, row = free.pop(place)
            else:
                fewest = self.degrees[bisect.bisect_left(self._capacities, tokens)]
                c = degree_of[fewest]
                left, row = c * self.share, len(rows)
                rows.append((c, []))
            rows[row][1].append(document)
            if left > tokens:
                bisect.insort(free, (left - tokens, row))
        return rows

    def _seconds(self, found: list[_Rows], hop: float | None = None) -> float:
        """What the parts take, one after another."""
        cost, hop = self.cost, self.cost.hop if hop is None else hop
        return sum(
            self.share * (cost.token + hop * (c - 1)) + cost.pair * max(map(_pairs, rows)) / c
            for c, rows in found
        )

    def _bound(self, documents: list[_Document]) -> float:
        """What they take at least, if nothing is sent: no padding but that of the last part, and
        equal work."""
        num_parts = -(sum(x.shortness for x in documents) // (self.devices * self.share))
        matrices = self.cost.token * self.share * num_parts
        return matrices + self.cost.pair * _pairs(documents) / self.devices


class PartStream(Iterator[list[BatchPart]]):
    """An endless series of steps over all documents, in a new random order in each epoch.

    An epoch divides the documents into windows, and the documents of a window into the parts of its
    steps, so that rows of one part have nearly equal work. Each document with tokens is in exactly
    one step of an epoch. Steps depend only on the arguments.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        devices: int,
        *,
        share: int,
        parts_per_step: int,
        window: int = 4096,
        seed: int = 0,
        cost: DocumentCost | None = None,
        degrees: Sequence[int] | None = None,
        epochs: Callable[[int], np.ndarray] | None = None,
        pairs: Callable[[DocumentCost], np.ndarray] | None = None,
    ) -> None:
        """Starts at the first step. A window is assigned when its first step is requested.

        Args:
            lengths: as for `parts`, of all documents.
            devices: as for `parts`.
            share: as for `parts`.
            parts_per_step: largest number of parts in a step, each of nearly P * S tokens. The
                parts of a window are divided among its steps as evenly as possible.
            window: approximate number of documents in a window.
            seed: seed of the order.
            cost: as for `parts`.
            degrees: as for `parts`.
            epochs: (number of an epoch) -> the numbers of its documents [documents], integers, in
                order; as many in each epoch, and some may be there several times. By default, an
                epoch has all documents, in random order.
            pairs: (cost) -> the `pairs` of `parts`.

        Raises:
            ValueError: as `parts`, or if no document has a token.
        """
        cost = DocumentCost() if cost is None else cost
        assignment = _Assignment(devices, share, cost, degrees)
        self._lengths = assignment.checked(lengths)
        self._epochs = epochs or self._all_documents
        self._given_pairs = pairs
        # Windows have the same cost, but for those of a state that was saved with another.
        self._pairs = functools.lru_cache(maxsize=1)(self._pairs_at)
        if not np.count_nonzero(self._lengths):
            raise InputError(
                "Some document must have a token; got documents of the lengths "
                f"{self._lengths.tolist()[:4]}, {len(self._lengths)} in all. Use other data."
            )
        if min(parts_per_step, window) < 1:
            raise InputError(
                "A step must have a part, and a window a document; got "
                f"{parts_per_step=}, {window=}. Give 1 or more."
            )
        if seed < 0:
            raise InputError(f"The seed must be 0 or more; got {seed=}. Give another.")
        self.order: Mapping[str, Any] = {
            "seed": seed,
            "window": window,
            "documents": len(self._lengths),
            "checksum_of_lengths": zlib.crc32(self._lengths.tobytes()),
        }
        self._settings: dict[str, Any] = {
            "devices": devices,
            "share": share,
            "parts_per_step": parts_per_step,
            "cost": {**asdict(cost), "windows": list(cost.windows)},
            "degrees": assignment.degrees,
            "steps": 0,
        }
        self._num_windows = max(round(len(self._epochs(0)) / window), 1)
        self.epoch = -1
        """Number of the epoch of the last step, from 0."""
        self._go_to(0, 0, [self._settings])

    def _all_documents(self, epoch: int) -> np.ndarray:
        documents = np.flatnonzero(self._lengths)
        return documents[shuffled(len(documents), self.order["seed"], epoch)]

    def _pairs_at(self, cost: DocumentCost) -> np.ndarray:
        """The visible pairs of all documents."""
        given = self._given_pairs
        return _checked_pairs(None if given is None else given(cost), self._lengths, cost)

    def _go_to(self, epoch: int, window: int, stretches: list[dict[str, Any]]) -> None:
        """Opens a window.

        Args:
            epoch: number of the epoch, from 0.
            window: number of the window in it, from 0.
            stretches: the settings by which the window has been assigned until now, each with the
                number of steps that were taken; the next step is one of the last.
        """
        if epoch != self.epoch:
            self._mixed = self._epochs(epoch)
        self.epoch, self._window = epoch, window
        self._stretches = [dict(stretch) for stretch in stretches]
        first, last = (len(self._mixed) * (window + i) // self._num_windows for i in (0, 1))
        numbers = self._mixed[first:last]
        for stretch in self._stretches:
            steps = self._steps_of(numbers, stretch)
            self._left = steps[stretch["steps"] :]
            rows = (row for step in self._left for part in step for row in part.rows)
            numbers = np.array([number for row in rows for number in row], np.int64)

    def _steps_of(self, numbers: np.ndarray, settings: Mapping[str, Any]) -> list[list[BatchPart]]:
        """The steps of the documents of a window, or of those that are still to come."""
        if not len(numbers):
            return []
        assignment = _Assignment(
            settings["devices"],
            settings["share"],
            DocumentCost(**{**settings["cost"], "windows": tuple(settings["cost"]["windows"])}),
            settings["degrees"],
        )
        parts = assignment.parts(self._lengths, numbers, self._pairs(assignment.cost))
        order = shuffled(len(parts), self.order["seed"], self.epoch, self._window)
        groups = np.array_split(order, -(-len(parts) // settings["parts_per_step"]))
        return [[parts[i] for i in sorted(group)] for group in groups]

    def __next__(self) -> list[BatchPart]:
        while not self._left:
            ended = self._window + 1 == self._num_windows
            epoch, window = (self.epoch + 1, 0) if ended else (self.epoch, self._window + 1)
            self._go_to(epoch, window, [self._settings])
        self._stretches[-1]["steps"] += 1
        return self._left.pop(0)

    def get_state(self) -> dict[str, Any]:
        """The position of the next step, and the settings that determine the order, for JSON."""
        return {
            **self.order,
            "epoch": self.epoch,
            "opened": self._window,
            "stretches": [dict(stretch) for stretch in self._stretches],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position: the next step is the one that followed it.

        If devices, share, parts per step, cost or degrees differ from those of the state, the
        remaining documents of the current window are assigned anew.

        Args:
            state: what `get_state` returned at that position.

        Raises:
            ValueError: if documents, seed or window differ, so that some documents would come
                twice.
        """
        missing = {*self.order, "epoch", "opened", "stretches"} - set(state)
        if missing:
            raise InputError(
                "A state must be what get_state returned; got one without "
                f"{', '.join(sorted(missing))}. Leave set_state out to begin with the first step."
            )
        for name, value in self.order.items():
            if state[name] != value:
                raise InputError(
                    "Documents must go on in the order in which they began; got "
                    f"{name}={value}, where the state has {name}={state[name]}. Use the documents, "
                    "the seed and the window of the state, or start another series."
                )
        *before, last = state["stretches"]
        if last["steps"]:
            before.append(last)
        if not before or {**before[-1], "steps": 0} != self._settings:
            before.append(self._settings)
        self._go_to(state["epoch"], state["opened"], before)


def shuffled(count: int, *seed: int) -> np.ndarray:
    """The numbers below count in random order, which no later NumPy changes: only the raw bits of
    a generator are promised to stay."""
    bits = np.random.PCG64(np.random.SeedSequence(list(seed))).random_raw(count)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True, kw_only=True)
class PartSummary:
    """Tokens, padding and time of steps of parts."""

    tokens: int
    """Tokens of documents."""
    places: int
    """Places of tokens: S on each device for each part."""
    alone: int
    """Tokens in rows on a single device, which need no communication."""
    seconds: float
    """Time of a device for all steps, in the unit of the cost."""
    balance: float
    """The work of the busiest device of each part divided by the mean, with the matrix products of
    all places; 1 is best. Devices of a part wait for each other."""
    parts: Mapping[int, int]
    """The number of parts of each degree."""

    @property
    def padding(self) -> float:
        """Fraction of the places that hold no token."""
        return 1 - self.tokens / self.places if self.places else 0.0


def summary(
    steps: Iterable[Iterable[BatchPart]],
    lengths: Sequence[int] | np.ndarray,
    devices: int,
    *,
    share: int,
    cost: DocumentCost | None = None,
    pairs: Sequence[float] | np.ndarray | None = None,
) -> PartSummary:
    """Tokens, padding and time of steps.

    Args:
        steps: parts of each step.
        lengths: as for `parts`.
        devices: as for `parts`.
        share: as for `parts`.
        cost: as for `parts`.
        pairs: as for `parts`.
    """
    cost = DocumentCost() if cost is None else cost
    lengths = np.asarray(lengths, np.int64)
    seen = _checked_pairs(pairs, lengths, cost)
    tokens = alone = 0
    work = seconds = hops = 0.0
    count: Counter[int] = Counter()
    for part in itertools.chain.from_iterable(steps):
        count[part.c] += 1
        of_rows = [float(seen[list(row)].sum()) for row in part.rows]
        of_part = sum(int(lengths[list(row)].sum()) for row in part.rows)
        tokens += of_part
        alone += of_part if part.c == 1 else 0
        work += cost.token * share + cost.pair * sum(of_rows) / devices
        seconds += cost.token * share + cost.pair * max(of_rows) / part.c
        hops += cost.hop * share * (part.c - 1)
    return PartSummary(
        tokens=tokens,
        places=count.total() * devices * share,
        alone=alone,
        seconds=seconds + hops,
        balance=seconds / work if work else 1.0,
        parts=dict(sorted(count.items())),
    )
