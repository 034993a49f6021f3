"""Chooses the messages of an attention, and whether it exchanges tokens to balance the work.

Both choices compare closed forms of the bytes: see `startrail_jax.rings.transfers`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import UnsupportedError
from startrail_jax.rings.balance import in_zigzag, why_not_balanced
from startrail_jax.rings.options import Balance, Exchange
from startrail_jax.rings.schedule import Schedule, ring_offsets
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.sparse_plan import plan_sparse, why_not_sparse
from startrail_jax.rings.transfers import Steps, Transfer
from startrail_jax.rings.work import shares, visible_pairs


def choose(schedule: Schedule, degrees: Degrees, sizes: Sizes) -> tuple[Schedule, str, str]:
    """Chooses the exchange and the balance of a schedule, and gives a reason for each.

    Args:
        schedule: the schedule with the wishes of the user.
        degrees: the degrees of the mesh.
        sizes: the sizes of the call, over all devices.

    Raises:
        NotImplementedError: if a wish cannot be met.
    """
    exchange, why = choose_exchange(schedule, degrees, sizes)
    schedule = replace(schedule, exchange=exchange)
    balance, why_balance = choose_balance(schedule, degrees, sizes)
    return replace(schedule, balance=balance), why, why_balance


def choose_exchange(schedule: Schedule, degrees: Degrees, sizes: Sizes) -> tuple[Exchange, str]:
    """Chooses whether an attention sends the key units of its rings, or only visible keys.

    Args:
        schedule: the schedule, whose `exchange` is the wish of the user.
        degrees: the degrees of the mesh.
        sizes: the sizes of the call, over all devices.

    Returns:
        "rings" or "sparse", and why.

    Raises:
        NotImplementedError: if "sparse" is wished for and cannot be.
    """
    if schedule.exchange == "rings":
        return "rings", "exchange='rings'"
    reason = why_not_sparse(schedule.mask, schedule.layout, sizes.query_tokens)
    if "bias" in schedule.scores:
        reason = "the columns of a bias lie where the rings bring their keys"
    if sizes.latent_dim is not None:
        reason = "latents are expanded where the rings bring them"
    if schedule.published:
        reason = "published=True is the schedule of the paper"
    if schedule.exchange == "sparse":
        if reason:
            raise UnsupportedError(
                "exchange='sparse' needs a mask that shows few keys of other devices; got mask="
                f"{schedule.mask}, layout={schedule.layout.kind!r} and {degrees.sequence} "
                f"sequence shards: {reason}. Use exchange='auto', which takes the rings here."
            )
        return "sparse", "exchange='sparse'"
    if reason:
        return "rings", reason
    received: dict[Exchange, int] = {}
    for name in ("rings", "sparse"):
        *_, both = passes_of(replace(schedule, exchange=name), degrees, sizes)
        received[name] = sum(x.received_bytes for x in both)
    best = min(received, key=lambda name: received[name])
    sent = ", ".join(f"{size:,} bytes with {name!r}" for name, size in received.items())
    return best, f"a device receives, in both passes, {sent}"


WORTH_BALANCING = 10_000
"""FLOPs that an exchange of tokens must save the busiest device for each byte that it receives."""


def choose_balance(schedule: Schedule, degrees: Degrees, sizes: Sizes) -> tuple[Balance, str]:
    """Chooses whether to exchange tokens so that all devices work alike: see `rings.balance`.

    In the time of a byte through a port of 400 Gbit/s, an H100 that attends at 650 TFLOP/s does
    13,000 FLOPs; in that of a byte inside a node, 1,500.

    Args:
        schedule: the schedule, whose `balance` is the wish of the user and whose `exchange` is
            chosen.
        degrees: the degrees of the mesh.
        sizes: the sizes of the call, over all devices.

    Returns:
        "layout" or "exchange", and why.

    Raises:
        NotImplementedError: if "exchange" is wished for and cannot be.
    """
    if schedule.balance == "layout":
        return "layout", "balance='layout'"
    reason = why_not_balanced(schedule, sizes.query_tokens, sizes.key_tokens)
    if schedule.balance == "exchange":
        if reason:
            raise UnsupportedError(
                "balance='exchange' needs tokens in contiguous order, of which late ones see more "
                f"keys; got mask={schedule.mask}, layout={schedule.layout.kind!r} and "
                f"{degrees.sequence} sequence shards: {reason}. Use balance='auto', which leaves "
                "them where they are here."
            )
        return "exchange", "balance='exchange'"
    if reason:
        return "layout", reason
    steps = steps_of(schedule, degrees, sizes)
    moves = (
        *steps.balance(shared_ids=True),
        *steps.balance_output(back=True),
        *steps.balance_output(back=False),
        *steps.balance_gradients(),
    )
    size = sum(move.received_bytes for move in moves)
    saved = _saved_by_balance(replace(schedule, balance="layout"), sizes.query_tokens)
    # Two products forward, q k and p v, and five backward.
    channels = 8 * sizes.head_dim + 6 * sizes.value_head_dim
    flops = saved * channels * sizes.batch * sizes.heads / degrees.num_devices
    ratio = flops / size
    name = "exchange" if ratio >= WORTH_BALANCING else "layout"
    return name, (
        f"an exchange of tokens saves the busiest device {ratio:,.0f} FLOPs for each byte that it "
        f"receives; it is worth {WORTH_BALANCING:,}"
    )


@functools.lru_cache(maxsize=1024)
def _saved_by_balance(schedule: Schedule, seq_len: int) -> float:
    """Visible pairs that the busiest device has less in zigzag order, times the devices."""
    busiest = [shares(x, seq_len).max() for x in (schedule, in_zigzag(schedule))]
    return float(busiest[0] - busiest[1]) * visible_pairs(schedule.mask, seq_len)


def steps_of(schedule: Schedule, degrees: Degrees, sizes: Sizes) -> Steps:
    """The closed form of each step of a schedule."""
    visited = in_zigzag(schedule) if schedule.balance == "exchange" else schedule
    in_rings = schedule.exchange != "sparse"
    return Steps(
        degrees=degrees,
        share=sizes.share(degrees),
        kv_heads=sizes.kv_heads,
        offsets=ring_offsets(visited, sizes.query_tokens) if in_rings else (),
        options=schedule,
    )


def passes_of(
    schedule: Schedule, degrees: Degrees, sizes: Sizes, *, shared_ids: bool = True
) -> tuple[list[Transfer], list[Transfer], list[Transfer]]:
    """The transfers of the forward pass, of the backward pass, and of both.

    Args:
        schedule: the schedule, whose exchange and balance are chosen.
        degrees: the degrees of the mesh.
        sizes: the sizes of the call, over all devices.
        shared_ids: whether queries and keys have the same array of segment ids.
    """
    steps = steps_of(schedule, degrees, sizes)
    if schedule.exchange == "sparse":
        moves = plan_sparse(schedule.mask, schedule.layout, sizes.query_tokens)
        assert moves is not None
        there, back, both = (
            steps.sparse(moves, forward=forward, backward=backward)
            for forward, backward in ((True, False), (False, True), (True, True))
        )
        sums = steps.replica_sum()
        return there, [*back, *sums], [*both, *sums]
    forward, backward = steps.in_rings(shared_ids=shared_ids)
    return forward, backward, forward + backward
