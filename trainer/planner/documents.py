"""What a step takes for documents of many lengths: in rows of one length, or each on few GPUs.

In rows, documents follow each other, and attention sees no pair of two documents. As parts of a
batch (`startrail_jax.tokens.documents`), a document lies on as few GPUs as hold it. Both have the
matrices of all tokens and the visible pairs; they differ in what is sent, in padding, and in what
the busiest replica has to do. Of a row, all devices count with the same work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from startrail_jax.devices.degrees import ROLES
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentCost, PartStream, PartSummary, summary
from trainer.planner.grid import all_settings
from trainer.planner.quantities import parse_count
from trainer.planner.search import Candidates, Prediction

_DRAWN = 10_000
"""Documents that are drawn from a distribution, or from a data set."""
_STEPS = 50
"""Steps of a batch that are assigned."""
_SLOWEST = 1.5
"""Meshes are tried whose rows take at most so many times as long as the fastest ones."""
_visible_pairs = DocumentCost().visible_pairs
"""Those of causal attention without a window."""


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


def read_lengths(given: str) -> np.ndarray:
    """Tokens of documents, int64 [documents]: drawn from a distribution, "lognormal:MEDIAN,MEAN",
    or read from a text file with a whole number on each line."""
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
            "--lengths must be lognormal:MEDIAN,MEAN or a text file with the tokens of a document "
            f"on each line; got {given!r}: {error}. Correct it."
        ) from None
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise InputError(
            f"--lengths {given}: each line must hold one number of at least 1. Correct the file."
        )
    return lengths


def sample(lengths: np.ndarray) -> np.ndarray:
    """The lengths of at most 10,000 of the documents, drawn without replacement."""
    count = min(len(lengths), _DRAWN)
    return np.random.default_rng(0).choice(lengths, count, replace=False)


def cut(lengths: np.ndarray, longest: int) -> np.ndarray:
    """The lengths of documents that are cut into pieces of `longest` tokens, and what is left."""
    whole = np.full((lengths // longest).sum(), longest)
    rest = lengths % longest
    return np.concatenate([whole, rest[rest > 0]])


def visible_shares(lengths: np.ndarray, seq_len: int, batch: int) -> dict[int, float]:
    """Data-parallel degree -> of the pairs of causal rows, the share that documents of these
    lengths leave to the busiest replica, as a mean over steps. That of degree 1 is of all rows.

    Documents follow each other in random order, and the end of a row cuts them. Those that fill no
    step come several times.
    """
    lengths = np.tile(lengths, -(-seq_len * batch // int(lengths.sum())))
    ends = np.cumsum(np.random.default_rng(0).permutation(lengths))
    steps = max(int(ends[-1]) // (seq_len * batch), 1)
    rows = np.arange(steps * batch + 1) * seq_len
    bounds = np.union1d(ends[ends < rows[-1]], rows)
    of_row = np.bincount(bounds[:-1] // seq_len, _visible_pairs(np.diff(bounds)))
    share = of_row.reshape(steps, batch) / _visible_pairs(np.array(seq_len))
    return {
        n: float(share.reshape(steps, n, -1).mean(2).max(1).mean())
        for n in range(1, batch + 1)
        if batch % n == 0
    }


def forecast(found: Candidates, lengths: np.ndarray) -> DocumentForecast | None:
    """The mesh on which whole documents, none of them longer than a row, are predicted to be the
    fastest; None if no setting of rows fits the memory and has key heads for all shards of
    `tensor`, as documents need."""
    kv_heads = found.call.model.kv_heads
    ours = ~found.mask(lambda s: s.published | (kv_heads % s.tensor > 0))
    counts = sorted({int(n) for step, _ in found.kinds for n in step.settings.sequence})
    meshes = [
        mesh
        for count in counts
        for mesh in found.best(ours & found.mask(lambda s, n=count: s.sequence == n))
        if mesh.fits
    ]
    return forecasts(found, lengths, meshes)[0] if meshes else None


def forecasts(
    found: Candidates, lengths: np.ndarray, meshes: Sequence[Prediction], window: int = 4096
) -> list[DocumentForecast]:
    """What is predicted for whole documents, none of them longer than a row, the fastest first: on
    those meshes whose rows are not much slower than others. `window` is that of `PartStream`."""
    fastest = min(mesh.seconds for mesh in meshes)
    rows = found.call.seq_len * found.call.batch / fastest
    tried = [
        _on_mesh(found, mesh, lengths, window, rows)
        for mesh in meshes
        if mesh.seconds <= _SLOWEST * fastest
    ]
    return sorted(tried, key=lambda x: -x.tokens_per_second)


def _on_mesh(
    found: Candidates, mesh: Prediction, lengths: np.ndarray, window: int, rows: float
) -> DocumentForecast:
    call, data, tensor = found.call, mesh.degrees.data, mesh.degrees.tensor
    devices = found.cluster.num_gpus // tensor
    longest = devices // data
    share, cost = call.padded(longest) // longest, call.model.document_cost
    parts = PartStream(
        lengths,
        devices,
        share=share,
        parts_per_step=call.batch // data,
        window=window,
        cost=cost,
        degrees=[c for c in range(1, longest + 1) if devices % c == 0],
    )
    steps = list(itertools.islice(parts, _STEPS))
    held = summary(steps, lengths, devices, share=share, cost=cost)
    pairs = _visible_pairs(lengths)
    seconds = len(steps) * _once(mesh)
    for c, count in held.parts.items():
        alike = (part for step in steps for part in step if part.c == c)
        most = [max(pairs[list(row)].sum() for row in part.rows) for part in alike]
        visible = float(np.mean(most) / _visible_pairs(np.array(c * share)))
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
