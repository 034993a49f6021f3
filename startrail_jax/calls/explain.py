"""Says which block backend runs for an attention, and why, without running anything."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from startrail_jax import blocks
from startrail_jax.blocks import tiled
from startrail_jax.blocks.pieces import Pieces
from startrail_jax.calls.score_checks import check_scores
from startrail_jax.calls.sharding import Sharded
from startrail_jax.devices.degrees import ROLES, Axis
from startrail_jax.devices.nodes import mesh_crossing
from startrail_jax.errors import BalanceWarning
from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.rings.balance import in_zigzag
from startrail_jax.rings.choices import choose
from startrail_jax.rings.head_chunks import check_head_chunks
from startrail_jax.rings.schedule import Schedule, ring_offsets, unit_cases
from startrail_jax.rings.sizes import Sizes, heads_at_once
from startrail_jax.rings.sparse import sparse_cases, sparse_request
from startrail_jax.rings.sparse_plan import plan_sparse
from startrail_jax.rings.work import advice_on_balance, kernel_shares, shares

_SERVES = {
    "cudnn": "every kernel is a cuDNN kernel, over full rectangles and causal squares of the "
    "units, with a window where the mask has one",
    "fa4": "every kernel is one of FlashAttention-4, over the same pieces as those of cuDNN",
    "tiled": "cuDNN kernels for tiles that are full or causal, and one dense tile at a time for "
    "the rest",
    "xla": "plain XLA, tile by tile; it serves every platform and mask, but is not the fastest",
}

# The backends that call flash kernels alone.
FLASH = ("cudnn", "fa4")


def warn_of_balance(advice: str | None, *, stacklevel: int) -> None:
    """Warns the caller, `stacklevel` calls above, with the advice on balance, if there is any."""
    if advice:
        warnings.warn(advice, BalanceWarning, stacklevel=stacklevel + 1)


def explain_call(
    attention: Sharded,
    schedule: Schedule,
    sizes: Sizes,
    *,
    platform: str | None,
    capability: tuple[int, int] | None,
    devices_per_node: int | None,
    scores: tuple[str, ...],
) -> Explanation:
    """`Attention.explain`, for a call of these sizes over all devices."""
    check_scores(schedule, scores, sizes.query_tokens, sizes.key_tokens)
    schedule = replace(schedule.on(platform, capability), scores=tuple(scores))
    degrees = attention.degrees
    sizes.check(degrees, mask=schedule.mask, layout=attention.layout)
    nodes = mesh_crossing(attention.mesh, attention.axes, devices_per_node)
    schedule, why, why_balance = choose(schedule, degrees, sizes)
    share = degrees
    if schedule.exchange == "sparse":  # Every sequence device has all heads of its tensor rank.
        schedule = schedule.alone
        share = replace(share, ring=share.sequence, group=1, team=1, head=1)
    explanation = explain(
        schedule,
        sizes.share(share),
        axes=attention.axes,
        nodes=nodes,
        why=why,
        why_balance=why_balance,
    )
    warn_of_balance(explanation.advice, stacklevel=3)
    return explanation


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The kernels and messages of an attention; `print` shows them in a few lines."""

    platform: str
    """Platform of the devices."""
    backend: str
    """Name of the block backend of the forward and the backward pass."""
    refusals: dict[str, str]
    """Name of each better backend -> why it does not support this attention."""
    dense: str | None
    """The reason why backend "tiled" uses no cuDNN kernel at all; None if it does, or for other
    backends."""
    kernels: dict[str, float]
    """For backend "tiled", the part of the work in "full" and "causal" tiles, which cuDNN computes,
    and in "dense" tiles, without regard to segment ids."""
    packed: bool
    """True if there are segment ids."""
    query_tokens: int
    """Tokens of a query unit: a kernel call has at most this many queries."""
    key_tokens: int
    """Tokens of a key unit: a kernel call has at most this many keys."""
    cases: tuple[Pieces, ...]
    """For backends "cudnn" and "fa4", the sets of kernel calls that a round may consist of; for the
    exchange "sparse", those over a device's own keys. Each device chooses one of them as it
    runs."""
    arrived: tuple[tuple[Pieces, ...], ...]
    """The same for each run of keys that arrives, for these backends and the exchange "sparse"."""
    exchange: str
    """Messages between devices: "rings" (units of the scheme) or "sparse" (keys that the mask
    shows)."""
    why: str
    """The reason for this exchange."""
    balance: str
    """"exchange" if tokens are exchanged so that all devices have the same work, else "layout"."""
    why_balance: str
    """The reason for this balance."""
    moves: tuple[int, ...]
    """For the exchange "sparse", the number of keys in each message that a device receives."""
    rounds: int
    """Number of ring rounds; 1 for the exchange "sparse"."""
    inner: int
    """Number of rounds of an inner cycle of a double ring; 1 for a single ring."""
    head_chunks: int
    """Number of parts of the heads, each of which goes through all rounds."""
    heads_at_once: int | None
    """With latents, the number of heads whose keys and values a device makes at a time."""
    travels: str
    """Side that travels round the ring in the backward pass: "query" or "kv"."""
    mask: Mask
    """The simplest mask for sequences of this length."""
    busiest: float
    """Work of the busiest device divided by the mean, in tiles; a partly visible tile counts
    half."""
    advice: str | None
    """Advice if devices wait for the busiest device; None if there is none."""
    num_nodes: int | None
    """Number of nodes of the mesh; None if it has no devices."""
    across: tuple[str, ...]
    """Roles of the mesh axes that cross nodes."""
    inside: tuple[str, ...]
    """Roles of the mesh axes that stay inside a node."""

    def __str__(self) -> str:
        serves = _SERVES.get(self.backend, "a kernel of your own")
        lines = [f"on {self.platform}, backend {self.backend!r}: {serves}"]
        lines += [f"  not {name!r}: {refusal}" for name, refusal in self.refusals.items()]
        if self.dense:
            lines.append(f"  dense tiles only, without cuDNN: {self.dense}")
        cycles = f" (inner cycles of {self.inner})" if self.inner > 1 else ""
        parts = f", for each of {self.head_chunks} parts of the heads" * (self.head_chunks > 1)
        if self.kernels:
            work = ", ".join(f"{part:.0%} {kind}" for kind, part in self.kernels.items())
            lines.append(f"  work in tiles, of which cuDNN attends the full and causal: {work}")
        if self.packed and self.backend in FLASH:
            lines.append(
                "  each call is cut to packed documents, if their ids increase along the sequence; "
                "tiles serve other ids"
            )
        if self.exchange == "sparse":
            moves = " + ".join(f"{keys:,}" for keys in self.moves) or "no"
            lines.append(
                f"  {self.query_tokens} queries by the {self.key_tokens} keys beside them and "
                f"{moves} of others, which alone are sent{parts}"
            )
        else:
            lines.append(
                f"  {self.rounds} ring rounds{cycles} of {self.query_tokens} queries by "
                f"{self.key_tokens} keys{parts}; in the backward pass {self.travels} travels"
            )
        if self.heads_at_once is not None:
            lines.append(
                "  keys and values are made of latents as these arrive, for "
                f"{self.heads_at_once} of a device's heads at a time"
            )
        if not isinstance(self.mask, (Full, Causal)):
            lines.append(f"  exchange {self.exchange!r}: {self.why}")
        if self.balance == "exchange":
            lines.append("  tokens are exchanged on the way in and out, to share the work evenly")
        if self.balance == "exchange" or self.advice:
            lines.append(f"  balance {self.balance!r}: {self.why_balance}")
        if self.advice:
            lines.append(f"  {self.advice}")
        elif not isinstance(self.mask, Full):
            busiest = f"the busiest device has {self.busiest:.2f} times the mean of the work"
            lines.append(f"  mask {self.mask}: {busiest}")
        if self.num_nodes is not None and self.num_nodes > 1:
            across, inside = (", ".join(x) or "nothing" for x in (self.across, self.inside))
            lines.append(f"  {self.num_nodes} nodes: {across} across, {inside} inside")
        what = "own keys" if self.exchange == "sparse" else "a round"
        lines += [f"  {what} may be: {_calls(pieces)}" for pieces in self.cases]
        for number, cases in enumerate(self.arrived, 1):
            lines.append(f"  run {number} of keys may be: {' or '.join(map(_calls, cases))}")
        return "\n".join(lines)


def _calls(pieces: Pieces) -> str:
    """The kernel calls of a set of pieces, in words."""
    calls = [f"{b - a} x {d - c} full" for a, b, c, d in pieces.rectangles]
    for squares, kind in (
        (pieces.squares, "causal"),
        (pieces.windows, f"causal with a window of {pieces.window}"),
        (pieces.edges, "causal in reverse"),
    ):
        calls += [f"{size} x {size} {kind}" for _, _, size in squares]
    return ", ".join(calls) or "nothing"


def explain(
    schedule: Schedule,
    share: Sizes,
    *,
    axes: Mapping[str, Axis],
    nodes: tuple[int, tuple[str, ...]] | None,
    why: str,
    why_balance: str,
) -> Explanation:
    """Explains what a schedule runs on the share of one device: see `Attention.explain`.

    Args:
        schedule: the schedule, whose exchange is chosen; `Schedule.alone` for "sparse".
        share: the share of one device.
        axes: the axes of each role.
        why: why the exchange is the one that the schedule names.
        why_balance: why the balance is, likewise.
        nodes: result of `startrail_jax.devices.nodes.mesh_crossing` for the mesh.

    Raises:
        ValueError: if the heads of the device cannot be cut into `head_chunks`.
        NotImplementedError: if the backend of the schedule does not support this.
    """
    check_head_chunks(schedule.head_chunks, share.kv_heads)
    balance = schedule.balance
    if balance == "exchange":
        schedule = in_zigzag(schedule)
    is_sparse = schedule.exchange == "sparse"
    request = sparse_request(schedule, share) if is_sparse else schedule.request(share)
    choice = blocks.choose(schedule.backend, request)
    seq_len, kv_seq_len = (
        tokens * schedule.num_shards for tokens in (share.query_tokens, share.key_tokens)
    )
    dense, cases, arrived, kernels = None, (), (), {}
    if choice.backend == "tiled":
        dense = tiled.no_kernels(
            share.dtype,
            share.head_dim,
            share.value_head_dim,
            schedule.softcap,
            schedule.scores,
        )
        kernels = kernel_shares(schedule, share, dense=dense is not None)
    if choice.backend in FLASH:
        cases = unit_cases(schedule, seq_len, kv_seq_len)
        if is_sparse:
            found = sparse_cases(schedule.mask, schedule.layout, seq_len)
            cases, *arrived = (tuple(dict.fromkeys(by_rank)) for by_rank in found)
    seen = plan_sparse(schedule.mask, schedule.layout, seq_len) if is_sparse else None
    num_nodes, across = nodes or (None, ())
    stays = (role for role in ROLES if axes[role].degree > 1 and role not in across)
    return Explanation(
        mask=schedule.mask.within(seq_len),
        busiest=float(shares(schedule, seq_len).max()),
        advice=advice_on_balance(schedule, seq_len, kv_seq_len),
        num_nodes=num_nodes,
        across=across,
        inside=tuple(stays),
        platform=schedule.platform,
        backend=choice.backend,
        refusals=choice.refusals,
        dense=dense,
        kernels=kernels,
        packed=share.packed,
        query_tokens=share.query_tokens * schedule.team.degree,
        key_tokens=share.key_tokens * schedule.group.degree,
        cases=cases,
        arrived=tuple(arrived),
        exchange=schedule.exchange,
        why=why,
        balance=balance,
        why_balance=why_balance,
        moves=() if seen is None else tuple(move.length for move in seen.moves),
        rounds=1 if is_sparse else len(ring_offsets(schedule, seq_len)),
        inner=schedule.inner,
        head_chunks=schedule.head_chunks,
        heads_at_once=None
        if share.latent_dim is None
        else heads_at_once(
            share.heads,
            share.batch * share.key_tokens * schedule.group.degree,
            share.head_dim + share.value_head_dim,
            share.width,
        ),
        travels=schedule.travels(share),
    )
