"""Counts the work that a mask leaves, and how evenly the devices share it."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import jax
import numpy as np

from startrail_jax.blocks import tiled
from startrail_jax.blocks.visibility import Visibility
from startrail_jax.masks import Full, Mask
from startrail_jax.rings.balance import why_not_balanced
from startrail_jax.rings.schedule import Schedule, ring_offsets
from startrail_jax.rings.sizes import Sizes
from startrail_jax.tokens.layout import KINDS, Layout, Runs, Span

# Tokens of the tiles in which `visible_pairs` looks at every pair, and how many it takes at once.
_LEAF, _AT_ONCE = 32, 2**12
# Questions that `shares` may ask. More of them cut units into finer tiles.
_QUESTIONS = 2**22
# A device with this share of the mean keeps the others waiting. A layout is worth naming if the
# share is smaller by this factor.
BUSY, WORTH_NAMING = 1.2, 1.1
# With fewer query tokens a device computes for microseconds, and no other waits long for it.
_TOKENS_TO_WAIT_FOR = 128


def visible_pairs(mask: Mask, seq_len: int) -> int:
    """Number of (query, key) pairs of one sequence that a mask shows.

    Attention takes 4 * head_dim FLOPs for each pair and head forward, and 10 * head_dim backward.

    Args:
        mask: a mask of `startrail_jax.masks`. A prefix whose length calls give counts as one of the
            whole sequence.
        seq_len: tokens of the sequence. The time that this takes grows with it, and under a `Rule`
            without bounds with its square.
    """
    mask = mask.given(np.int32(seq_len)).within(seq_len)
    size = _LEAF * 2 ** max(math.ceil(math.log2(seq_len / _LEAF)), 0)
    tiles, total = np.zeros((2, 1), int), 0
    while True:
        first, last = tiles, np.minimum(tiles + size, seq_len) - 1
        query, key = (Span(first[i], last[i]) for i in (0, 1))
        with jax.ensure_compile_time_eval():
            answers = (mask.some(query, key), mask.every(query, key))
            some, every = (np.broadcast_to(np.asarray(x, bool), first[0].shape) for x in answers)
        rows, columns = last - first + 1
        total += int((rows * columns)[every].sum())
        tiles = tiles[:, some & ~every]
        if size == _LEAF or tiles.shape[1] == 0:
            break
        size //= 2
        halves = np.array(list(itertools.product((0, size), repeat=2))).T
        tiles = (tiles[:, :, None] + halves[:, None]).reshape(2, -1)
        tiles = tiles[:, (tiles < seq_len).all(0)]
    for start in range(0, tiles.shape[1], _AT_ONCE):
        query, key = (x[:, None] + np.arange(_LEAF) for x in tiles[:, start : start + _AT_ONCE])
        query, key = query[:, :, None], key[:, None, :]
        with jax.ensure_compile_time_eval():
            seen = np.asarray(mask.visible(query.astype(np.int32), key.astype(np.int32)), bool)
        total += int((seen & (query < seq_len) & (key < seq_len)).sum())
    return total


def kernel_shares(schedule: Schedule, share: Sizes, *, dense: bool) -> dict[str, float]:
    """The part of the work of backend "tiled" that each kernel does, over all devices.

    Work is counted in pairs of a query and a key for which something is computed: half of the pairs
    of a causal tile, and all pairs of others. Segment ids are not known, and are left out.

    Args:
        schedule: the schedule.
        share: the share of one device.
        dense: whether cuDNN supports no tile.

    Returns:
        "full" and "causal" (tiles that cuDNN attends) and "dense" -> part of the whole.
    """
    if dense:
        return {"full": 0.0, "causal": 0.0, "dense": 1.0}
    tokens = share.query_tokens * schedule.num_shards, share.key_tokens * schedule.num_shards
    # All units at once: tiles lie in runs, and do not know which unit a run belongs to.
    p, g, a = np.indices((schedule.ring.degree, schedule.group.degree, schedule.team.degree))
    query = _all_runs(schedule.query_runs(tokens[0], p[..., 0], g[..., 0]))
    key = _all_runs(schedule.key_runs(tokens[1], p[:, 0], a[:, 0]))
    mask = Visibility(schedule.mask.within(tokens[0]), query, key)
    work = {"full": 0.0, "causal": 0.0, "dense": 0.0}
    with jax.ensure_compile_time_eval():
        rows = share.batch * share.heads // schedule.head_chunks
        for pairs in tiled.pair_lists(mask, *tokens, rows, dense=False):
            kernel = {"full": "full", "mixed": "dense"}.get(pairs.kind, "causal")
            area = pairs.query.size * pairs.key.size / (2 if kernel == "causal" else 1)
            work[kernel] += area * int(pairs.count)
    total = sum(work.values())
    return {kernel: area / total for kernel, area in work.items()}


def _all_runs(units: Runs) -> Runs:
    """The runs of many units as those of one."""
    starts = np.concatenate([np.ravel(x) for x in units.starts])
    return replace(units, starts=tuple(map(int, starts)))


@functools.lru_cache(maxsize=1024)
def shares(schedule: Schedule, seq_len: int) -> np.ndarray:
    """The work of each device over the mean, [ring, group, team].

    Units are cut into tiles; one that is visible in part counts half.

    Args:
        schedule: the schedule.
        seq_len: tokens of the whole sequence.
    """
    mask, offsets = schedule.mask.within(seq_len), ring_offsets(schedule, seq_len)
    query, key = schedule.units_that_meet(seq_len, offsets)
    met = query.starts[0].shape
    if isinstance(mask, Full):
        return np.ones(met[1:])
    questions = math.prod(met) * len(query.starts) * len(key.starts)
    parts = max(math.isqrt(_QUESTIONS // questions), 1)
    work = np.zeros(met)
    for (area, a), (width, b) in itertools.product(_cut(query, parts), _cut(key, parts)):
        with jax.ensure_compile_time_eval():
            some, every = (np.asarray(x, float) for x in (mask.some(a, b), mask.every(a, b)))
        work += area * width * (some + every) / 2
    work = work.sum(0)
    return work / work.mean() if work.any() else np.ones(work.shape)


def _cut(runs: Runs, parts: int) -> list[tuple[int, Span]]:
    """Each run cut into at most `parts` parts: tokens, and first and last position."""
    ends = np.unique(np.linspace(0, runs.length, min(parts, runs.length, 64) + 1).astype(int))
    return [
        (int(stop - start), Span(begin + start, begin + stop - 1))
        for begin in runs.starts
        for start, stop in itertools.pairwise(ends)
    ]


def advice_on_balance(schedule: Schedule, query_tokens: int, key_tokens: int) -> str | None:
    """Advice if devices wait long for the busiest one; None if none does.

    Args:
        schedule: the schedule.
        query_tokens, key_tokens: tokens of the whole sequences.
    """
    if query_tokens < _TOKENS_TO_WAIT_FOR * schedule.layout.degree:
        return None
    busiest = shares(schedule, query_tokens).max()
    if busiest < BUSY:
        return None
    found = {
        layout.kind: float(shares(replace(schedule, layout=layout), query_tokens).max())
        for layout in (Layout(kind, schedule.layout.degree) for kind in KINDS)
        if query_tokens % layout.multiple == 0
    }
    best = min(found, key=lambda kind: round(found[kind], 1))
    if found[best] * WORTH_NAMING >= busiest:
        return None
    exchange = why_not_balanced(schedule, query_tokens, key_tokens) is None
    inside = "balance='exchange', or " if exchange else ""
    of_shard = " for arrays that attention.shard brings into its order" if best == "zigzag" else ""
    return (
        f"mask {schedule.mask.within(query_tokens)}: the busiest device has {busiest:.2f} times "
        f"the mean of the work, and the others wait for it. Use {inside}"
        f"layout={best!r}{of_shard}, where it has {found[best]:.2f}."
    )
