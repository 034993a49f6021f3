"""Rollouts on the disk: vectors of all tokens, and of all rollouts, that are mapped into memory.

Tokens after the last target that counts are left out, and so are rollouts of which none counts: the
model is causal, so they change nothing. The reward of such a rollout counts in its group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, Num

from startrail_jax.errors import InputError
from trainer.data.cache import filled_folder
from trainer.data.documents import Record, digest_files, read_records
from trainer.data.files import Files
from trainer.data.progress_bar import shown_progress
from trainer.gpt.batches import TokenExample
from trainer.gpt.encoding import VectorWriter, largest_share, share_of_key
from trainer.gpt.objectives.distill import TEACHER
from trainer.gpt.objectives.preference import REFERENCES
from trainer.gpt.objectives.replay import EXPERTS, Replay
from trainer.gpt.rollouts.records import (
    LISTS,
    Rollout,
    advantages_of,
    group_of,
    of_each_answer,
    read_rollout,
)

# Changes when the same rollouts give other files than before.
FORMAT = 1
OF_TOKENS = {
    **dict.fromkeys(("tokens", "targets"), np.dtype(np.int32)),
    "weights": np.dtype(np.float32),
}
"""The vectors of tokens that all rollouts have, and their types."""
ABOUT_FILE = ".about.json"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What decides the vectors that are made of rollouts."""

    vocab_size: int
    longest: int
    """Most tokens of a rollout."""
    lists: tuple[str, ...] = ()
    """Those of `LISTS` that are kept, which every rollout must have."""
    advantages: bool = False
    """Whether every rollout must have advantages, or reward and group."""
    deviation: bool = True
    """As `advantages_of` takes it."""
    teacher: int | None = None
    """Number of tokens of a teacher that are kept in each place, which every rollout must have;
    None for none."""
    replay: Replay | None = None
    """The experts that every rollout must name; None for none."""
    ignored: tuple[str, ...] = ()
    """Keys without a meaning."""
    pairs: str | None = None
    """For pairs, a hash of what turns them into tokens; None for rollouts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRollouts:
    """Rollouts by their number."""

    tokens: Int32[np.ndarray, " tokens"]
    """Those of all rollouts, one after another, as all vectors of tokens."""
    targets: Int32[np.ndarray, " tokens"]
    weights: Float32[np.ndarray, " tokens"]
    lists: Mapping[str, Num[np.ndarray, "tokens *dims"]]
    """`Form.lists`; `advantages` if the records have them; what is kept of a teacher; experts."""
    documents: Int32[np.ndarray, " tokens"] | None
    """As in `Rollout`."""
    ends: Int64[np.ndarray, " rollouts"]
    """Where each rollout ends in the vectors of tokens."""
    rewards: Float64[np.ndarray, " rollouts"]
    """NaN for none."""
    advantages: Float32[np.ndarray, " rollouts"]
    """Those that follow from rewards; NaN if the records have them, or none are needed."""
    about: Mapping[str, int]
    """Numbers for the log: see `description`."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Int64[np.ndarray, " rollouts"]:
        """Number of tokens of each."""
        return np.diff(self.ends, prepend=0)

    def example(self, number: int, reads: tuple[str, ...], *, adds_to_one: bool) -> TokenExample:
        """A rollout with the numbers that an objective reads. Its weights may add up to 1."""
        here = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        weights = np.asarray(self.weights[here])
        total, shape = weights.sum(dtype=np.float64), weights.shape
        numbers = {}
        for name in reads:
            if name == "rewards":
                numbers[name] = np.full(shape, self.rewards[number], np.float32)
            elif name == "counts":
                numbers[name] = np.full(shape, total, np.float32)
            elif name in self.lists:
                numbers[name] = np.asarray(self.lists[name][here])
            else:
                numbers[name] = np.full(shape, self.advantages[number], np.float32)
        return TokenExample(
            np.asarray(self.tokens[here]),
            np.asarray(self.targets[here]),
            (weights / total).astype(np.float32) if adds_to_one else weights,
            None if self.documents is None else np.asarray(self.documents[here]),
            numbers or None,
        )

    @property
    def description(self) -> str:
        """A part of the line of the log."""
        about = self.about
        text = f"{len(self):,} {'rollouts' if self.documents is None else 'pairs'}"
        if about["groups"]:
            text += f" in {about['groups']:,} groups"
            if about["alike"]:
                text += f", {about['alike']:,} of them with equal rewards, which teach nothing"
        if about["uncounted"]:
            text += f", {about['uncounted']:,} left out, of which no token counts"
        counted = int(np.count_nonzero(self.weights))
        return f"{text}, {len(self.tokens):,} tokens, {counted:,} of them counted"


class Stored(NamedTuple):
    """The rollouts of a path."""

    parts: dict[str, StoredRollouts]
    """Those to train on, `train`, and those held out, `val`, if there are some."""
    digest: str
    """A hash of the content of the files to train on."""
    tokens: str
    """A hash of what is stored of them."""


def store_rollouts(
    parts: Mapping[str, Files],
    form: Form,
    cache: Path | None,
    fraction: float,
    pairs: Callable[[Iterable[Record]], Iterator[tuple[Record, Rollout]]] | None = None,
) -> Stored:
    """Reads the files of `train`, and those of `val`; without these, a `fraction` of the groups of
    `train` is held out, or nothing if this is 0. `pairs` reads records of pairs.

    Raises:
        InputError: if a record is wrong; the message names the line.
    """
    digests = {part: digest_files(files) for part, files in parts.items()}
    key = hashlib.sha256(json.dumps([FORMAT, digests, vars(form), fraction]).encode())
    names = ("train", "val") if fraction or "val" in parts else ("train",)

    def write(folder: Path) -> None:
        with ExitStack() as stack:
            writers = {name: _Writer(folder, name, form, stack) for name in names}
            reader = _Reader(parts, form, fraction, pairs)
            for part, record, rollout in reader.rollouts():
                writers[part].add(record, rollout)
        for writer in writers.values():
            writer.finish(has_advantages=reader.has_advantages)

    with filled_folder(cache, f"rollouts-{key.hexdigest()[:32]}", write) as (folder, sums):
        stored = {name: _read(folder, name, form) for name in names}
    train = " ".join(f"{name} {x}" for name, x in sorted(sums.items()) if name.startswith("train."))
    return Stored(
        stored,
        hashlib.sha256(json.dumps([digests["train"], fraction]).encode()).hexdigest()[:16],
        hashlib.sha256(train.encode()).hexdigest(),
    )


class _Reader:
    """Reads the records of all parts, checked."""

    def __init__(self, parts: Mapping[str, Files], form: Form, fraction: float, pairs: Any) -> None:
        self._parts, self._form, self._fraction = parts, form, fraction
        self._read = self._read_rollouts if pairs is None else pairs
        self.has_advantages = False
        """Whether the records read so far have advantages."""
        # The place of the record that says so.
        self._first: str | None = None

    def rollouts(self) -> Iterator[tuple[str, Record, Rollout]]:
        """Each with its part."""
        most = None
        if self._fraction:
            records = read_records(self._parts["train"], without=self._form.ignored)
            most = largest_share(map(_share, records), self._fraction)
        for part, files in self._parts.items():
            size = sum(path.stat().st_size for path in files.paths.values())
            with shown_progress(f"reading {files.name}", size) as advance:
                records = read_records(files, advance, without=self._form.ignored)
                for record, rollout in self._read(records):
                    is_held = most is not None and _share(record) <= most
                    yield "val" if is_held else part, record, rollout

    def _read_rollouts(self, records: Iterable[Record]) -> Iterator[tuple[Record, Rollout]]:
        form = self._form
        for record in itertools.chain.from_iterable(map(of_each_answer, records)):
            options: Any = dict(teacher=form.teacher, replay=form.replay)
            rollout = read_rollout(record, form.vocab_size, form.lists, **options)
            if form.advantages:
                self._check_advantages(rollout)
            yield record, rollout

    def _check_advantages(self, rollout: Rollout) -> None:
        has = "advantages" in rollout.lists
        if self._first is None:
            self.has_advantages, self._first = has, rollout.place
        if has != self.has_advantages:
            raise InputError(
                "All rollouts must have advantages, or none; got "
                f"{'some' if has else 'none'} in {rollout.place!r}, unlike {self._first!r}. "
                "Give them everywhere, or leave them to reward and group."
            )
        if not has and (rollout.reward is None or rollout.group is None):
            raise InputError(
                "A rollout must have advantages, or the reward and group that they follow from; "
                f"got reward={rollout.reward}, group={rollout.group} in {rollout.place!r}. Add "
                "them to the line."
            )


def _share(record: Record) -> float:
    """A number in [0, 1) that decides what is held out: one for all rollouts of a group."""
    return share_of_key(f"{record.key.rpartition(':')[0]}:{group_of(record)}")


class _Writer:
    """Writes the vectors of a part, as rollouts are added."""

    def __init__(self, folder: Path, part: str, form: Form, stack: ExitStack) -> None:
        self._folder, self._part, self._form, self._stack = folder, part, form, stack
        advantages = ("advantages",) if form.advantages else ()
        teacher = () if form.teacher is None else TEACHER
        experts = () if form.replay is None else (EXPERTS,)
        self._lists = (*form.lists, *advantages, *teacher, *experts)
        self._vectors = {name: self._vector(name, dtype) for name, dtype in OF_TOKENS.items()}
        # Of each rollout, also of those that are left out.
        self._rewards, self._groups, self._kept = list[float](), list[int](), list[bool]()
        self._numbers = dict[str, int]()
        self._ends = list[int]()

    def _vector(self, name: str, dtype: Any) -> VectorWriter:
        path = self._folder / f"{self._part}.{name}.npy"
        return self._stack.enter_context(VectorWriter(path, dtype))

    def add(self, record: Record, rollout: Rollout) -> None:
        """Writes the tokens of a rollout up to the last that counts."""
        self._rewards.append(np.nan if rollout.reward is None else rollout.reward)
        name = f"{record.key.rpartition(':')[0]}:{rollout.group}"
        is_known = rollout.group is not None
        number = self._numbers.setdefault(name, len(self._numbers)) if is_known else -1
        self._groups.append(number)
        counted = np.flatnonzero(rollout.weights)
        self._kept.append(len(counted) > 0)
        if not self._kept[-1]:
            return
        length, longest = int(counted[-1]) + 1, self._form.longest
        if length > longest:
            raise InputError(
                "A rollout must fit a row; got "
                f"{length:,} tokens up to the last that counts in {rollout.place!r}, with "
                f"seq_len={longest:,}. Use a larger --seq-len, or remove the line."
            )
        arrays = {name: getattr(rollout, name) for name in OF_TOKENS}
        arrays |= {x: rollout.lists[x] for x in self._lists if x in rollout.lists}
        if rollout.documents is not None:
            arrays["documents"] = rollout.documents
        for name, x in arrays.items():
            if name not in self._vectors:  # All rollouts have the same lists.
                self._vectors[name] = self._vector(name, x.dtype)
            self._vectors[name].add(x[:length].ravel())
        self._ends.append(self._vectors["tokens"].length)

    def finish(self, *, has_advantages: bool) -> None:
        """Writes the vectors of rollouts. If these have no advantages, groups make them."""
        rewards, groups = np.array(self._rewards), np.array(self._groups, np.int64)
        kept = np.array(self._kept, bool)
        advantages = np.full(len(rewards), np.nan, np.float32)
        if self._form.advantages and len(rewards) and not has_advantages:
            advantages = advantages_of(rewards, groups, deviation=self._form.deviation)
        vectors = {"ends": np.array(self._ends, np.int64), "rewards": rewards[kept]}
        for name, x in (vectors | {"of_group": advantages[kept]}).items():
            np.save(self._folder / f"{self._part}.{name}.npy", x)
        about = {
            "groups": int(groups.max(initial=-1)) + 1,
            "alike": _count_alike(rewards, groups),
            "uncounted": int(np.count_nonzero(~kept)),
        }
        file = self._folder / f"{self._part}{ABOUT_FILE}"
        file.write_text(json.dumps(about), encoding="utf-8")


def _count_alike(
    rewards: Float64[np.ndarray, " rollouts"], groups: Int64[np.ndarray, " rollouts"]
) -> int:
    """Number of groups whose rewards are all equal; 0 if some rollouts have no group."""
    if not len(groups) or groups.min() < 0:
        return 0
    order = np.lexsort((rewards, groups))
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lasts = np.append(firsts[1:], len(groups)) - 1
    return int(np.count_nonzero(rewards[order][firsts] == rewards[order][lasts]))


def _read(folder: Path, part: str, form: Form) -> StoredRollouts:
    def vector(name: str) -> Any:
        path = folder / f"{part}.{name}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:  # An empty file cannot be mapped.
            return np.load(path, allow_pickle=False)

    def vectors(names: Iterable[str]) -> dict[str, Any]:
        return {x: vector(x) for x in names if (folder / f"{part}.{x}.npy").exists()}

    tokens, dims = vector("tokens"), {name: (-1,) for name in TEACHER[:2]}
    lists = vectors((*LISTS, *REFERENCES, "advantages", *TEACHER, EXPERTS))
    if form.replay is not None:
        dims |= {name: shape for name, (_, shape) in form.replay.arrays.items()}
    return StoredRollouts(
        tokens=tokens,
        targets=vector("targets"),
        weights=vector("weights"),
        lists={name: x.reshape(len(tokens), *dims.get(name, ())) for name, x in lists.items()},
        documents=vectors(("documents",)).get("documents"),
        ends=vector("ends"),
        rewards=vector("rewards"),
        advantages=vector("of_group"),
        about=json.loads((folder / f"{part}{ABOUT_FILE}").read_text(encoding="utf-8")),
    )
