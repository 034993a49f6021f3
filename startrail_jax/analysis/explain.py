"""Says which block backend serves an attention, and why, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from startrail_jax import blocks
from startrail_jax.blocks import tiled
from startrail_jax.pieces import Pieces
from startrail_jax.schedule import Schedule, ring_offsets, unit_cases

_SERVES = {
    "cudnn": "every kernel is cuDNN's, over full rectangles and causal squares of the units",
    "tiled": "cuDNN's kernels for whole tiles that are full or causal, one dense tile at a time "
    "for the rest",
    "xla": "plain XLA, tile by tile: every platform and mask, and no platform's fastest",
}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What will run. `print` it."""

    platform: str
    backend: str
    """The block backend, of forward and backward pass alike."""
    refusals: dict[str, str]
    """Better backend -> why it does not serve this."""
    dense: str | None
    """Of "tiled": why no tile is a kernel of cuDNN's, if none is."""
    query_tokens: int
    """Tokens of a query unit: the rows of a kernel call, at most."""
    key_tokens: int
    """Tokens of a key unit."""
    cases: tuple[Pieces, ...]
    """What a round may have to attend to, for "cudnn"; a device chooses as it runs."""
    rounds: int
    """Ring rounds."""
    travels: str
    """What goes round the ring in the backward pass: "query" or "kv"."""

    def __str__(self) -> str:
        lines = [f"on {self.platform}, backend {self.backend!r}: {_SERVES[self.backend]}"]
        lines += [f"  not {name!r}: {refusal}" for name, refusal in self.refusals.items()]
        if self.dense:
            lines.append(f"  dense tiles only, without cuDNN: {self.dense}")
        lines.append(
            f"  {self.rounds} ring rounds of {self.query_tokens} queries by {self.key_tokens} keys;"
            f" in the backward pass {self.travels} travels"
        )
        for pieces in self.cases:
            calls = [f"{b - a} x {keys} full" for a, b, keys in pieces.rectangles]
            calls += [f"{size} x {size} causal" for _, _, size in pieces.squares]
            lines.append(f"  a round may be: {', '.join(calls) or 'nothing'}")
        return "\n".join(lines)


def explain(
    schedule: Schedule,
    seq_len: int,
    kv_seq_len: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    dtype: Any,
    packed: bool,
) -> Explanation:
    """See `Attention.explain`; heads are those of one device, after the exchange of step 0."""
    request = schedule.request(
        seq_len,
        dtype=dtype.name,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        packed=packed,
    )
    choice = blocks.choose(schedule.backend, request)
    shard, key_shard = (
        length // schedule.layout.degree * schedule.head.degree for length in (seq_len, kv_seq_len)
    )
    return Explanation(
        platform=schedule.platform or "cuda (any other platform takes 'xla')",
        backend=choice.backend,
        refusals=choice.refusals,
        dense=tiled.no_kernels(dtype.name, head_dim, value_head_dim)
        if choice.backend == "tiled"
        else None,
        query_tokens=shard * schedule.team.degree,
        key_tokens=key_shard * schedule.group.degree,
        cases=unit_cases(schedule, seq_len, kv_seq_len) if choice.backend == "cudnn" else (),
        rounds=len(ring_offsets(schedule, seq_len)),
        travels=schedule.travels(
            query_tokens=shard,
            key_tokens=key_shard,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            width=dtype.itemsize,
            packed=packed,
        ),
    )
