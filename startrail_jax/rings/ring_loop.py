"""The ring loop: travellers go round, and every device visits them as they come by.

There are no attention maths here. `concentric.py` sends keys round in the forward pass, and
queries or keys in the backward pass.
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
    finalise: Callable[[Any], Any],
    unrolled: tuple[int, int],
    carried_dtype: Any = jnp.float32,
) -> tuple[Any, Any]:
    """The ring loop of the forward pass and of both backward passes (algorithm 3 of the paper).

    In round i, every device holds the travellers that live `offsets[i]` behind it (ahead of it, if
    `direction` is -1: they then move to the previous ring index) and visits them: (travellers,
    distance, accumulator) -> (accumulator, carried). The accumulator, None in round 0, stays with
    the device; `finalise` brings it into a form that is the same in every round of a loop. What is
    carried, which may be (), goes to the device that owns the travellers, in `carried_dtype`. It
    starts in round 1 and moves one round late, together with the next travellers, so that every hop
    but the last runs beside a visit. That takes len(offsets) - 1 hops.

    In a double ring (LoongTrain's Double-Ring-Attention, https://arxiv.org/abs/2406.18485), the
    same loop runs in two cycles, the outer one first in `cycles`: a visit of it is a whole inner
    one. A message of the outer cycle therefore has as many visits to run beside as the inner cycle
    has rounds. The hops are as many as in a single ring: what is carried returns to its owner
    within the first inner cycle, stays with the last visit of every other one, and comes from there
    in one message.

    Returns the accumulator of all rounds, and the carried results, summed in float32, on the device
    that owns their travellers. Offsets begin with 0, and in a double ring are those of whole inner
    cycles (`schedule.py`). For `unrolled` see `UNROLLED_ROUNDS`.
    """
    outer, *inner = [cycle for cycle in cycles if cycle.degree > 1] or cycles[:1]
    go_round = functools.partial(
        _go_round, direction=direction, finalise=finalise, carried_dtype=carried_dtype
    )
    if not inner:
        visits = lambda i, *state: visit(*state)  # noqa: E731
        return go_round(
            outer, offsets, travellers=travellers, visit=visits, unrolled=unrolled, accumulator=None
        )
    size = inner[0].degree

    def visit_cycle(i: int, travellers: Any, distance: Any, accumulator: Any) -> tuple[Any, Any]:
        def visit_one(_: int, travellers: Any, step: Any, accumulator: Any) -> tuple[Any, Any]:
            return visit(travellers, distance * size + step, accumulator)

        return go_round(
            inner[0],
            tuple(range(size)),
            travellers=travellers,
            visit=visit_one,
            unrolled=unrolled,
            accumulator=accumulator,
            returns=i == 0,
        )

    most, turn = unrolled
    return go_round(
        outer,
        tuple(offset // size for offset in offsets[::size]),
        travellers=travellers,
        visit=visit_cycle,
        unrolled=(max(most // size, 1), max(turn // size, 1)),
        accumulator=None,
        inner=inner[0],
    )


def _go_round(
    cycle: Cycle,
    offsets: tuple[int, ...],
    *,
    direction: int,
    travellers: Any,
    visit: Callable[..., tuple[Any, Any]],
    finalise: Callable[[Any], Any],
    unrolled: tuple[int, int],
    carried_dtype: Any,
    accumulator: Any,
    returns: bool = True,
    inner: Cycle | None = None,
) -> tuple[Any, Any]:
    """One cycle of `circulate`, from the accumulator of the rounds so far.

    `visit` gets the number of the round first. If not `returns`, carried results start in round 0,
    and are returned in `carried_dtype` where the travellers are in the last round. Each visit is a
    whole cycle of `inner`, if there is one: the carried results are with their owner after round 0,
    and where the last of their visits was after the others.
    """
    steps = [direction * (b - a) for a, b in itertools.pairwise(offsets)]
    last = len(offsets) - 1
    start = 1 if returns else 0

    def play(i: int, offset: Any, state: Any) -> Any:
        """One round. In a loop over rounds of one kind, i is their first and `offset` is traced."""
        travellers, accumulator, carried = state
        arriving = collectives.shift(travellers, cycle, steps[i]) if i < last else None
        arrived = collectives.shift(carried, cycle, steps[i - 1]) if i > start else None
        accumulator, carried = visit(i, travellers, offset, accumulator)
        # What comes to its owner from the first inner cycle is needed at the end only.
        waits = None if inner is not None and i == 0 else carried
        # Without the barrier XLA sends everything first, and nothing runs beside the messages.
        # Cheap work comes after it, or XLA would take that alone for enough to hide a message.
        arriving, accumulator, waits, arrived = lax.optimization_barrier(
            (arriving, accumulator, waits, arrived)
        )
        carried = carried if waits is None else waits
        if i > start:
            carried = jax.tree.map(jnp.add, as_float32(carried), as_float32(arrived))
        if i >= start:
            carried = jax.tree.map(lambda x: x.astype(carried_dtype), carried)
        return arriving, accumulator, carried

    def next_door(i: int) -> bool:
        """Whether the hops into and out of round i both go to the next place."""
        return steps[i - 1] == steps[i] == direction

    def loop(first: int, turns: int, state: Any) -> Any:
        """Plays `turns * turn` rounds from round `first` on, all of them `next_door`."""

        def play_turn(n: Any, state: Any) -> Any:
            for j in range(turn):
                state = play(first, offsets[first] + n * turn + j, state)
            travellers, accumulator, carried = state
            return travellers, finalise(accumulator), carried

        travellers, accumulator, carried = state
        return lax.fori_loop(0, turns, play_turn, (travellers, finalise(accumulator), carried))

    travellers, accumulator, at_owner = play(0, 0, (travellers, accumulator, None))
    if last == 0:
        return accumulator, as_float32(at_owner) if returns else at_owner
    state = play(1, offsets[1], (travellers, accumulator, None if returns else at_owner))
    most, turn = unrolled
    i = 2
    while i <= last:
        rounds = sum(1 for _ in itertools.takewhile(next_door, range(i, last)))
        turns = rounds // turn if last >= most else 0
        state = loop(i, turns, state) if turns else play(i, offsets[i], state)
        i += turns * turn or 1
    _, accumulator, carried = state
    if not returns:
        return accumulator, carried
    back = [(cycle, -direction * offsets[last])]
    if inner is not None:
        back.append((inner, direction))
    carried = collectives.shift_along(carried, back)
    return accumulator, jax.tree.map(jnp.add, as_float32(at_owner), as_float32(carried))


def as_float32(tree: Any) -> Any:
    """Every array of a pytree, cast to float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
