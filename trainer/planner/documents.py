"""What a step takes for documents of many lengths: in rows of one length, or each on few GPUs.

In rows, documents follow each other, and attention sees no pair of two documents. As parts of a
batch (`startrail_jax.tokens.documents`), a document lies on as few GPUs as hold it. Both have the
matrices of all tokens and the visible pairs; they differ in what is sent, in padding, and in what
the busiest replica has to do. Of a row, all devices count with the same work.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import ROLES
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import (
    DocumentCost,
    DocumentSizes,
    PartStream,
    PartSummary,
    first_of_rows,
    summary,
)
from trainer.planner.grid import all_settings
from trainer.planner.quantities import parse_count
from trainer.planner.search import Candidates, Prediction

_DRAWN = 10_000
"""Documents that are drawn from a distribution, or from a data set."""
_TREES = 1000
"""Trees of one shape, which are all alike."""
_STEPS = 50
"""Steps of a batch that are assigned."""
_SLOWEST = 1.5
"""Meshes are tried whose rows take at most so many times as long as the fastest ones."""
_CAUSAL = DocumentCost()
"""Counts the pairs of causal attention without a window."""
_TREE = re.compile(r"([^+:]+)\+(\d+)x([^+:]+)")
"""A beginning, and so many answers."""


@dataclass(frozen=True, kw_only=True)
class DocumentForecast:
    """A step of whole documents, on the mesh that is the fastest for them."""

    mesh: Prediction
    """The setting of rows of the longest documents, on whose mesh the parts lie."""
    tokens_per_second: float
    """Tokens of documents that all GPUs train on in a second."""
    rows_tokens_per_second: float
    """The same in rows, in the fastest setting for these."""
    held: PartSummary

    @property
    def comparison(self) -> str:
        """A sentence on rows and whole documents, with the flags for the latter."""
        faster = self.tokens_per_second / self.rows_tokens_per_second
        degrees = vars(self.mesh.degrees)
        mesh = " ".join(f"--mesh.{x} {degrees[x]}" for x in ROLES if degrees[x] > 1)
        flags, held = " ".join(["--data.batches documents", *filter(None, [mesh])]), self.held
        return (
            f"In rows, {self.rows_tokens_per_second:,.0f} tokens of documents in a second; "
            f"{faster:.2f} times as many with each document on as few GPUs as hold it "
            f"({flags}): {held.alone / held.tokens:.0%} of the tokens are sent nowhere, "
            f"{held.padding:.1%} of the places are padding, and the busiest GPU works "
            f"{held.balance:.2f} times the mean."
        )


def read_lengths(given: str) -> DocumentSizes:
    """Sizes of documents: drawn from a distribution, "lognormal:MEDIAN,MEAN", read from a text file
    with the tokens of one on each line, or a tree, "BEGINNING+NxANSWER"."""
    if tree := _TREE.fullmatch(given):
        beginning, answer = (parse_count(x, "--lengths") for x in tree.group(1, 3))
        answers = int(tree[2])
        if not answers:
            raise InputError(
                f"--lengths of a tree need at least one answer; got {given!r}. Write for example "
                "28K+8x4K."
            )
        texts = [(0, beginning)] + [(beginning, beginning + answer)] * answers
        numbers = np.repeat(np.arange(_TREES), len(texts))
        return DocumentSizes(
            lengths=np.full(_TREES, beginning + answers * answer),
            stretches=np.column_stack([numbers, np.tile(texts, (_TREES, 1))]),
        )
    return DocumentSizes(lengths=_read_texts(given))


def _read_texts(given: str) -> np.ndarray:
    if given.startswith("lognormal:"):
        sizes = [parse_count(x, "--lengths") for x in given.partition(":")[2].split(",")]
        median, mean = sizes if len(sizes) == 2 else (1, 0)
        if mean <= median:
            raise InputError(
                "--lengths lognormal takes a median and a larger mean; got "
                f"{given!r}. Write for example lognormal:12432,18372."
            )
        spread = np.sqrt(2 * np.log(mean / median))
        drawn = np.random.default_rng(0).lognormal(np.log(median), spread, _DRAWN)
        return np.maximum(drawn, 1).astype(np.int64)
    try:
        lengths = np.loadtxt(Path(given), np.int64, ndmin=1, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(
            "--lengths must be lognormal:MEDIAN,MEAN, BEGINNING+NxANSWER such as 28K+8x4K, or a "
            f"text file with the tokens of a document on each line; got {given!r}: {error}. "
            "Correct it."
        ) from None
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise InputError(
            f"--lengths {given}: each line must hold one number of at least 1. Correct the file."
        )
    return lengths


def sample(sizes: DocumentSizes) -> DocumentSizes:
    """At most 10,000 of the documents, drawn without replacement."""
    count = min(len(sizes.lengths), _DRAWN)
    return _chosen(sizes, np.random.default_rng(0).choice(len(sizes.lengths), count, replace=False))


def _chosen(sizes: DocumentSizes, numbers: np.ndarray) -> DocumentSizes:
    """Documents by their numbers, some perhaps several times."""
    if sizes.stretches is None:
        return DocumentSizes(lengths=sizes.lengths[numbers])
    order = np.argsort(sizes.stretches[:, 0], kind="stable")
    borders = np.searchsorted(sizes.stretches[order, 0], np.arange(len(sizes.lengths) + 1))
    counts = np.diff(borders)[numbers]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    stretches = sizes.stretches[order[np.repeat(borders[numbers], counts) + within]].copy()
    stretches[:, 0] = np.repeat(np.arange(len(numbers)), counts)
    return DocumentSizes(lengths=sizes.lengths[numbers], stretches=stretches)


def cut(sizes: DocumentSizes, longest: int) -> DocumentSizes:
    """Texts, cut into pieces of `longest` tokens and what is left; or trees, which must fit."""
    lengths = sizes.lengths
    if sizes.stretches is not None:
        if lengths.max() > longest:
            raise InputError(
                f"A tree must fit a sequence; got {lengths.max():,} tokens in --lengths, with "
                f"--seq-len {longest:,}. Use a larger --seq-len."
            )
        return sizes
    whole = np.full((lengths // longest).sum(), longest)
    rest = lengths % longest
    return DocumentSizes(lengths=np.concatenate([whole, rest[rest > 0]]))


@dataclass(frozen=True, kw_only=True)
class FilledRows:
    """Rows of documents."""

    visible: dict[int, float]
    """Data-parallel degree -> of the pairs of causal rows, the share that the documents leave to
    the busiest replica, as a mean over steps. That of degree 1 is of all rows."""
    fill: float
    """Of the places, the share that holds tokens."""


def fill_rows(sizes: DocumentSizes, seq_len: int, batch: int) -> FilledRows:
    """Rows in which documents follow each other in random order. The end of a row cuts texts, and
    trees stay whole. Those that fill no step come several times."""
    lengths = sizes.lengths
    times = -(-seq_len * batch // int(lengths.sum()))
    if sizes.stretches is not None:  # Rows have padding.
        times *= 2
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(lengths)), times))
    if sizes.stretches is None:
        ends = np.cumsum(lengths[order])
        steps = max(int(ends[-1]) // (seq_len * batch), 1)
        rows = np.arange(steps * batch + 1) * seq_len
        bounds = np.union1d(ends[ends < rows[-1]], rows)
        pairs, row = _CAUSAL.visible_pairs(np.diff(bounds)), bounds[:-1] // seq_len
        fill = 1.0
    else:
        firsts = first_of_rows(np.cumsum(lengths[order]), seq_len)
        steps = max((len(firsts) - 1) // batch, 1)
        held = order[: firsts[steps * batch]]
        pairs = sizes.pairs(_CAUSAL)[held]
        row = np.searchsorted(firsts, np.arange(len(held)), side="right") - 1
        fill = float(lengths[held].sum() / (steps * batch * seq_len))
    of_row = np.bincount(row, pairs, minlength=steps * batch)
    share = of_row.reshape(steps, batch) / _CAUSAL.visible_pairs(np.array(seq_len))
    visible = {
        n: float(share.reshape(steps, n, -1).mean(2).max(1).mean())
        for n in range(1, batch + 1)
        if batch % n == 0
    }
    return FilledRows(visible=visible, fill=fill)


def forecast(found: Candidates, sizes: DocumentSizes, fill: float = 1.0) -> DocumentForecast | None:
    """The mesh on which whole documents, none of them longer than a row, are predicted to be the
    fastest; None if no setting of rows fits the memory and has key heads for all shards of
    `tensor`, as documents need."""
    # Those along `tensor` share latents as they are.
    each = found.call.model.attentions.values()
    kv_heads = math.gcd(*(x.kv_heads for x in each if x.latent_dim is None))
    ours = ~found.mask(lambda s: s.published | (kv_heads % s.tensor > 0))
    counts = sorted({int(n) for step, _ in found.kinds for n in step.settings.sequence})
    meshes = [
        mesh
        for count in counts
        for mesh in found.best(ours & found.mask(lambda s, n=count: s.sequence == n))
        if mesh.fits
    ]
    return forecasts(found, sizes, meshes, fill=fill)[0] if meshes else None


def forecasts(
    found: Candidates,
    sizes: DocumentSizes,
    meshes: Sequence[Prediction],
    window: int = 4096,
    fill: float = 1.0,
) -> list[DocumentForecast]:
    """What is predicted for whole documents, none of them longer than a row, the fastest first: on
    those meshes whose rows are not much slower than others. `window` is that of `PartStream`, and
    `fill` that of rows."""
    fastest = min(mesh.seconds for mesh in meshes)
    rows = fill * found.call.seq_len * found.call.batch / fastest
    tried = [
        _on_mesh(found, mesh, sizes, window, rows)
        for mesh in meshes
        if mesh.seconds <= _SLOWEST * fastest
    ]
    return sorted(tried, key=lambda x: -x.tokens_per_second)


def _on_mesh(
    found: Candidates, mesh: Prediction, sizes: DocumentSizes, window: int, rows: float
) -> DocumentForecast:
    call, data, tensor = found.call, mesh.degrees.data, mesh.degrees.tensor
    devices = found.cluster.num_gpus // tensor
    longest = devices // data
    share, cost = call.padded(longest) // longest, call.model.document_cost
    parts = PartStream(
        sizes.lengths,
        devices,
        share=share,
        parts_per_step=call.batch // data,
        window=window,
        cost=cost,
        degrees=[c for c in range(1, longest + 1) if devices % c == 0],
        pairs=sizes.pairs,
    )
    steps = list(itertools.islice(parts, _STEPS))
    options: Any = {"share": share, "cost": cost, "pairs": sizes.pairs(cost)}
    held = summary(steps, sizes.lengths, devices, **options)
    pairs = sizes.pairs(_CAUSAL)
    seconds = len(steps) * _once(mesh)
    for c, count in held.parts.items():
        alike = (part for step in steps for part in step if part.c == c)
        most = [max(pairs[list(row)].sum() for row in part.rows) for part in alike]
        visible = float(np.mean(most) / _CAUSAL.visible_pairs(np.array(c * share)))
        replicas = devices // c
        whole = replace(call, seq_len=c * share, batch=replicas, visible={replicas: visible})
        options = replace(
            found.options,
            degrees=vars(mesh.degrees) if c == longest else {"data": replicas, "tensor": tensor},
            zero=(mesh.savings.zero,),
            remat=(mesh.savings.remat,),
            offload=(mesh.savings.offload,),
            tiled=(False, True),
            baselines=False,
        )
        given = all_settings(found.cluster, whole, given=options.degrees, published=False)
        # Documents are on rings of several sizes, none of which is a double ring.
        alone = Candidates(found.cluster, whole, options, given.take(given.inner == 1))
        part = alone.best(np.ones(len(alone.seconds), bool))[0]
        seconds += count * (part.seconds - _once(part))
    return DocumentForecast(
        mesh=mesh,
        tokens_per_second=held.tokens / seconds,
        rows_tokens_per_second=rows,
        held=held,
    )


def _once(step: Prediction) -> float:
    """Seconds of what a step does once, however many parts it has."""
    sums = step.parts["zero waits"] if step.savings.zero < 2 else 0.0
    return step.parts["optimizer"] + sums
