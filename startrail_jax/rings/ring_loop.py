"""The ring loop: travellers go round, and every device visits them as they come by.

There are no attention maths here. `rings.py` sends keys round in the forward pass, and queries or
keys in the backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from startrail_jax.devices.degrees import Cycle
from startrail_jax.rings import collectives

# (most, turn) of each platform. A ring of up to `most` rounds is unrolled. The middle of a longer
# one is a loop whose body has `turn` rounds, which bounds the time to compile it. XLA copies what a
# loop carries at every turn, so turns are longer on GPUs, whose kernels compile fast.
UNROLLED_ROUNDS = {"cuda": (16, 8), "default": (4, 1)}

Visit = Callable[[Any, Any, Any], tuple[Any, Any]]


def circulate(
    cycles: Sequence[Cycle],
    offsets: tuple[int, ...],
    *,
    direction: int,
    travellers: Any,
    visit: Visit,
    settle: Callable[[Any], Any],
    unrolled: tuple[int, int],
    follows_dtype: Any = jnp.float32,
) -> tuple[Any, Any]:
    """The ring loop of the forward pass and of both backward passes (algorithm 3 of the paper).

    In round i, every device holds the travellers that live `offsets[i]` behind it (ahead of it, if
    `direction` is -1) and visits them. A visit gives two results: one stays on the device and
    accumulates there, the other belongs to the travellers and follows them home. The travellers of
    round 0 are at home already, and their result stays there. The results of the other rounds
    start in round 1. They move one round late, together with the next travellers, so that every
    hop but the last runs beside a visit, and are added to the result of round 0 on arrival. That
    takes len(offsets) - 1 hops.

    In a double ring (LoongTrain's Double-Ring-Attention, https://arxiv.org/abs/2406.18485), the
    same loop runs in two cycles: a visit of the outer one is a whole inner one. A message of the
    outer cycle therefore has as many visits to run beside as the inner cycle has rounds. The hops
    are as many as in a single ring: what follows returns home within the first inner cycle, stays
    with the last visit of every other one, and comes home from there in one message.

    Args:
        cycles: the cycle to go round, or the outer and the inner one.
        offsets: the distances to visit, 0 first; see `schedule.py` for those of a double ring,
            which are those of whole inner cycles.
        direction: +1 sends to the next ring index, -1 to the one before.
        travellers: pytree of arrays that move.
        visit: (travellers, distance, stays so far) -> (stays, follows), pytrees of arrays. It adds
            to what stays, which is None in round 0; `follows` may be ().
        settle: brings what stays into a form that is the same in every round, for a loop to carry.
        unrolled: see `UNROLLED_ROUNDS`.
        follows_dtype: dtype in which what follows makes its hops.

    Returns:
        What stays, summed over all rounds; and what follows, summed in float32, on the device
        where its travellers live.
    """
    outer, *inner = [cycle for cycle in cycles if cycle.degree > 1] or cycles[:1]
    go_round = functools.partial(
        _go_round, direction=direction, settle=settle, follows_dtype=follows_dtype
    )
    if not inner:
        visits = lambda i, *state: visit(*state)  # noqa: E731
        return go_round(
            outer, offsets, travellers=travellers, visit=visits, unrolled=unrolled, stays=None
        )
    size = inner[0].degree

    def visit_cycle(i: int, travellers: Any, distance: Any, stays: Any) -> tuple[Any, Any]:
        def visit_one(_: int, travellers: Any, step: Any, stays: Any) -> tuple[Any, Any]:
            return visit(travellers, distance * size + step, stays)

        return go_round(
            inner[0],
            tuple(range(size)),
            travellers=travellers,
            visit=visit_one,
            unrolled=unrolled,
            stays=stays,
            returns=i == 0,
        )

    most, turn = unrolled
    return go_round(
        outer,
        tuple(offset // size for offset in offsets[::size]),
        travellers=travellers,
        visit=visit_cycle,
        unrolled=(max(most // size, 1), max(turn // size, 1)),
        stays=None,
        inner=inner[0],
    )


def _go_round(
    cycle: Cycle,
    offsets: tuple[int, ...],
    *,
    direction: int,
    travellers: Any,
    visit: Callable[..., tuple[Any, Any]],
    settle: Callable[[Any], Any],
    unrolled: tuple[int, int],
    follows_dtype: Any,
    stays: Any,
    returns: bool = True,
    inner: Cycle | None = None,
) -> tuple[Any, Any]:
    """One cycle of `circulate`, whose arguments it has, but for these.

    Args:
        cycle: the cycle.
        visit: gets the number of the round first.
        stays: what stays so far.
        returns: whether what follows comes home. If not, it starts in round 0, and is returned in
            `follows_dtype` where the travellers are in the last round.
        inner: the cycle of which each visit is a whole one: what follows is at home after round 0,
            and where the last of its visits was after the others.
    """
    steps = [direction * (b - a) for a, b in itertools.pairwise(offsets)]
    last = len(offsets) - 1
    start = 1 if returns else 0

    def play(i: int, offset: Any, state: Any) -> Any:
        """One round. In a loop over rounds of one kind, i is their first and `offset` is traced."""
        travellers, stays, follows = state
        arriving = collectives.shift(travellers, cycle, steps[i]) if i < last else None
        followed = collectives.shift(follows, cycle, steps[i - 1]) if i > start else None
        stays, follows = visit(i, travellers, offset, stays)
        # What comes home from the first inner cycle is needed at the end only.
        waits = None if inner is not None and i == 0 else follows
        # Without the barrier XLA sends everything first, and nothing runs beside the messages.
        # Cheap work comes after it, or XLA would take that alone for enough to hide a message.
        arriving, stays, waits, followed = lax.optimization_barrier(
            (arriving, stays, waits, followed)
        )
        follows = follows if waits is None else waits
        if i > start:
            follows = jax.tree.map(jnp.add, as_float32(follows), as_float32(followed))
        if i >= start:
            follows = jax.tree.map(lambda x: x.astype(follows_dtype), follows)
        return arriving, stays, follows

    def next_door(i: int) -> bool:
        """Whether the hops into and out of round i both go to the next place."""
        return steps[i - 1] == steps[i] == direction

    def loop(first: int, turns: int, state: Any) -> Any:
        """Plays `turns * turn` rounds from round `first` on, all of them `next_door`."""

        def play_turn(n: Any, state: Any) -> Any:
            for j in range(turn):
                state = play(first, offsets[first] + n * turn + j, state)
            travellers, stays, follows = state
            return travellers, settle(stays), follows

        travellers, stays, follows = state
        return lax.fori_loop(0, turns, play_turn, (travellers, settle(stays), follows))

    travellers, stays, home = play(0, 0, (travellers, stays, None))
    if last == 0:
        return stays, as_float32(home) if returns else home
    state = play(1, offsets[1], (travellers, stays, None if returns else home))
    most, turn = unrolled
    i = 2
    while i <= last:
        rounds = sum(1 for _ in itertools.takewhile(next_door, range(i, last)))
        turns = rounds // turn if last >= most else 0
        state = loop(i, turns, state) if turns else play(i, offsets[i], state)
        i += turns * turn or 1
    _, stays, follows = state
    if not returns:
        return stays, follows
    back = [(cycle, -direction * offsets[last])]
    if inner is not None:
        back.append((inner, direction))
    follows = collectives.shift_along(follows, back)
    return stays, jax.tree.map(jnp.add, as_float32(home), as_float32(follows))


def as_float32(tree: Any) -> Any:
    """Every array of a pytree, cast to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
