"""Rows of trees for linear attention: a node begins with the state at the end of its parent.

Of a tree in depth-first order, only the states of nodes that are still seen can be needed again,
and these lie in each other. They are the *slots* of a row: slot 0 has the state of the outermost
node, slot 1 that of the node in it, and so on. Nodes that end at the same token share a slot, as
the first is not needed again once the second has begun: of a beginning and its answers, the last
answer follows the beginning in slot 0, and all others are in slot 1. A token goes on with its slot,
or is *fresh*: its slot then begins with the state of the slot before, or with zeros.

So a chunk of tokens maps each slot affinely from one slot before the chunk, and such maps compose
as others do: their scan over the devices has as many messages as without trees, each as many times
as large as there are slots. Beside it, each device tells all others the ends of the nodes that are
still seen after its slices. None of these sizes depends on the number of tokens or of nodes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from startrail_jax.devices.degrees import Axis
from startrail_jax.linear.halo import numbers_of_slices, of_all_slices
from startrail_jax.linear.rules import Chunk, StateRule, dot, inverse
from startrail_jax.rings import collectives
from startrail_jax.tokens.layout import Layout


class Forks(NamedTuple):
    """The tokens of a device in their trees."""

    places: Int32[Array, "b t"]
    """Natural place of each token in its row."""
    ends: Int32[Array, "b t"]
    """The place after the last token that continues it, and 0 for padding."""
    slots: Int32[Array, "b t"]
    """Slot of each token; any number for padding."""
    fresh: Int32[Array, "b t"]
    """1 where a slot begins, else 0."""
    open_ends: Int32[Array, "b s d"]
    """Ends of the slots before each slice of the device; -1 for one that has not begun."""
    left_open: Int32[Array, "b s d"]
    """The different ends of tokens of each slice that lie behind it, the largest first, and -1."""
    left_open_by_all: Int32[Array, "n b d"]
    """The same of the slices of all devices, in natural order."""
    nan: Float32[Array, ""]
    """NaN if a row of this data shard needs more slots than there are, else 0."""

    @property
    def of_tokens(self) -> Int32[Array, "b t 4"]:
        """What a chunk needs to know of each token."""
        return jnp.stack([self.places, self.ends, self.slots, self.fresh], -1)


def forks_of(ends: Int32[Array, "b t"], layout: Layout, axis: Axis, levels: int) -> Forks:
    """The `Forks` of this device's tokens, from their `visible_until`."""
    slices = 2 if layout.kind == "zigzag" else 1
    rows, tokens = ends.shape
    length = tokens * layout.degree
    places = layout.unit_positions(length, collectives.index(axis), 1).vector()
    places = places.reshape(1, slices, -1)
    size = places.shape[2]
    ends = jnp.where(ends < 0, 0, ends).reshape(rows, slices, size)
    real = ends > places
    after = places[..., -1:] + 1
    # One more than there are slots, which says whether they do.
    still = _largest(ends, ends > after, levels + 1)
    by_all = of_all_slices(still, axis)
    before = jnp.arange(len(by_all))[None] < numbers_of_slices(axis, slices)[:, None]
    line = jnp.moveaxis(by_all, 0, 1)[:, None]  # [b, 1, all slices, levels + 1]
    seen = (line > places[:, :, :1, None]) & before[None, :, :, None]
    flat = jnp.broadcast_to(line, seen.shape).reshape(rows, slices, -1)
    every = _largest(flat, seen.reshape(flat.shape), levels + 1)
    open_ends, too_many = every[..., :levels], (every[..., levels] >= 0).any()
    # A slot begins at the first token with its end.
    row = np.arange(rows)[:, None, None], np.arange(slices)[None, :, None]
    index = np.arange(size, dtype=np.int32)[None, None]
    firsts = jnp.full((rows, slices, length + 1), size, jnp.int32)
    firsts = firsts.at[*row, ends].min(jnp.where(real, index, size))
    known = (ends[..., None] == open_ends[:, :, None]).any(-1)
    fresh = real & ~known & (jnp.take_along_axis(firsts, ends, 2) == index)
    # Slots that have begun, less those that have ended, up to each token.
    begun = (open_ends >= 0).sum(-1, dtype=jnp.int32)[..., None]
    begun = begun + jnp.cumsum(fresh, -1, dtype=jnp.int32)
    start = places[..., :1]
    counts = jnp.zeros((rows, slices, size + 1), jnp.int32)
    counts = counts.at[*row, jnp.where(fresh, ends - start, size + 1)].add(1, mode="drop")
    there = jnp.where(open_ends >= 0, open_ends - start, size + 1)
    counts = counts.at[*row, there].add(1, mode="drop")
    slots = begun - jnp.cumsum(counts, -1, dtype=jnp.int32)[..., :size] - 1
    deep = too_many | (real & (slots >= levels)).any()
    places, ends, slots, begins = (
        jnp.broadcast_to(x, ends.shape).reshape(rows, tokens)
        for x in (places, ends, slots, fresh.astype(jnp.int32))
    )
    deep = collectives.gather(deep.astype(jnp.int32)[None], axis, 0).any()
    nan = jnp.where(deep, jnp.nan, 0.0)
    still, by_all = still[..., :levels], by_all[..., :levels]
    return Forks(places, ends, slots, begins, open_ends, still, by_all, nan)


def _largest(
    x: Int32[Array, "*m t"], mask: Bool[Array, "*m t"], count: int
) -> Int32[Array, "*m n"]:
    """The largest different numbers where a mask holds, in order, and -1 for each missing."""
    found: list[Array] = []
    for _ in range(count):
        x = jnp.where(mask, x, -1)
        found.append(x.max(-1))
        mask = x < found[-1][..., None]
    return jnp.stack(found, -1)


class ForkTerms(NamedTuple):
    """What a chunk of a tree does to the slots before it: see `rules.ChunkTerms`."""

    source: Float32[Array, "*m c d"]
    """1 for the slot that each token goes on with or forks from, 0 for all others."""
    origin: Float32[Array, "*m d d"]
    """1 for the slot before the chunk from which each slot after it comes, 0 for all others."""
    end: Float32[Array, "*m d g 1"]
    """Decay from there to the end of each slot."""
    written: Float[Array, "*m d c k"]
    new: Float32[Array, "*m c v"]
    known: Float[Array, "*m c k"] | None
    read: Float[Array, "*m c k"]
    scores: Float[Array, "*m c c"]


@dataclass(frozen=True)
class Forked(StateRule):
    """A rule over trees: its states are slots [..., levels, key_dim, value_dim].

    The factor of a map is the origin of each slot, [..., levels, levels], and the factor of the
    rule from there.
    """

    name: ClassVar[str] = "forked"
    rule: StateRule
    levels: int
    back: bool = False
    """Whether maps take gradients from the end to the beginning: then a slot gets what all slots
    give it that come from it."""

    @property
    def by_channel(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the rule."""
        return self.rule.by_channel

    @property
    def adjoint(self) -> Forked:
        """The rule of the gradients of states."""
        return dataclasses.replace(self, back=not self.back)

    def terms(self, chunk: Chunk) -> Any:
        place, end, slot, fresh = jnp.moveaxis(chunk.document, -1, 0)
        real, c = end > place, place.shape[-1]
        seen = (place[..., None, :] <= place[..., None]) & (place[..., None] < end[..., None, :])
        seen &= real[..., None, :] & real[..., None]
        # The slot from which the branch of a token comes into the chunk: that of its first token
        # here, or the one before if that is fresh.
        first = seen.argmax(-1)
        slot_before = slot - fresh
        source = jnp.take_along_axis(slot_before, first, -1)
        source = jax.nn.one_hot(jnp.where(real, source, -1), self.levels)
        # The last token of each slot.
        slots = jnp.arange(self.levels).reshape(*[1] * (slot.ndim - 1), -1, 1)
        of_slot = (slot[..., None, :] == slots) & real[..., None, :]
        there = of_slot.any(-1)[..., None]
        last = c - 1 - of_slot[..., ::-1].argmax(-1)
        seen_at_end = jnp.take_along_axis(seen, last[..., None], -2) & there
        origin = jnp.take_along_axis(source, last[..., None], -2)
        origin = jnp.where(there, origin, self._same(origin.shape[:-2]))

        decay = chunk.decay
        before, between = _total(seen, decay), _between(seen, decay)
        end_decay = jnp.exp(_total(seen_at_end, decay))
        after = jnp.exp(_between(seen_at_end, decay))
        (query, key, value), dtype, beta = chunk[:3], chunk.dtype, chunk.beta[..., None]
        known, new = None, value * beta
        if self.rule.delta:
            of_keys = _products(key * beta, key, between, dtype)
            system = jnp.tril(jnp.where(seen, of_keys, 0), -1)
            given = jnp.concatenate([new, key * beta * jnp.exp(before)], -1)
            full = lax.Precision.HIGHEST if dtype == jnp.float32 else None
            solved = jnp.einsum("...cd,...de->...ce", inverse(system), given, precision=full)
            new, known = jnp.split(solved, [value.shape[-1]], -1)
            known = known.astype(dtype)
        written = key[..., None, :, :] * jnp.where(seen_at_end[..., None], after, 0)
        scores = _products(query, key, between, dtype)
        return ForkTerms(
            source=source,
            origin=origin,
            end=end_decay[..., None],
            written=written.astype(dtype),
            new=new,
            known=known,
            read=(query * jnp.exp(before)).astype(dtype),
            scores=jnp.where(seen, scores, 0).astype(dtype),
        )

    def step(self, terms: Any, state: Array) -> Array:
        begun = _select(terms.origin, state)
        return terms.end * begun + dot("...dck,...cv->...dkv", terms.written, _new(terms, state))

    def out(self, terms: Any, state: Array) -> Array:
        of_chunk = dot("...cd,...dv->...cv", terms.scores, _new(terms, state))
        return _read(terms, terms.read, state) + of_chunk

    def unit(self, like: Array) -> Any:
        lead, (k, v) = like.shape[:-2], like.shape[-2:]
        slots = self.rule.unit(jnp.zeros((*lead, self.levels, k, v), like.dtype))
        return self._same(lead), slots

    def _same(self, lead: tuple[int, ...]) -> Array:
        one = jnp.eye(self.levels, dtype=jnp.float32)
        return jnp.broadcast_to(one, (*lead, *one.shape))

    def extend(self, map_: Any, terms: Any) -> Any:
        origin, slots = map_
        begun = _select(terms.origin, origin[..., None])[..., 0]
        if not self.rule.delta:
            factor, added = slots
            factor = terms.end * _select(terms.origin, factor)
            return begun, (factor, self.step(terms, added))
        # As `rules.StateRule.extend`: what M maps is a state to which nothing is written.
        k = slots.shape[-1] - terms.new.shape[-1]
        new = jnp.pad(terms.new, [(0, 0)] * (terms.new.ndim - 1) + [(k, 0)])
        return begun, self.step(terms._replace(new=new), slots)

    def parts(self, map_: Any) -> Any:
        origin, slots = map_
        factor, added = self.rule.parts(slots)
        return (origin, factor), added

    def then(self, first: Any, second: Any) -> Any:
        if self.back:
            return self._then_back(first, second)
        (first_origin, first_factor), first_added = first
        (origin, factor), added = second
        before = _select(origin, first_factor), _select(origin, first_added)
        factor, added = self.rule.then(before, (factor, added))
        return (_select(origin, first_origin[..., None])[..., 0], factor), added

    def _then_back(self, first: Any, second: Any) -> Any:
        (first_origin, first_factor), first_added = first
        (origin, factor), _ = second
        both, _ = self.rule.then(
            (first_factor, jnp.zeros_like(first_added)),
            (_select(first_origin, factor), jnp.zeros_like(first_added)),
        )
        joined = _select(first_origin, origin[..., None])[..., 0]
        return (joined, both), self.apply(second, first_added)

    def apply(self, map_: Any, state: Array) -> Array:
        (origin, factor), added = map_
        if not self.back:
            return self.rule.apply((factor, added), _select(origin, state))
        given = self.rule.apply((factor, jnp.zeros_like(state)), state)
        return _select(origin.swapaxes(-1, -2), given) + added

    def transposed(self, factor: Any) -> Any:
        origin, of_slots = factor
        return origin, self.rule.transposed(of_slots)


def _select(origin: Float32[Array, "*m d e"], x: Float32[Array, "*n e k v"]) -> Array:
    """The slot of x from which each slot comes, zeros for one that begins empty; or their sums."""
    return jnp.einsum("...de,...ekv->...dkv", origin, x, precision=lax.Precision.HIGHEST)


def _read(terms: ForkTerms, rows: Array, state: Array) -> Array:
    """What rows of tokens find in the slot of each."""
    found = dot("...ck,...dkv->...dcv", rows, state)
    return jnp.einsum("...cd,...dcv->...cv", terms.source, found, precision=lax.Precision.HIGHEST)


def _new(terms: ForkTerms, state: Array) -> Array:
    """What the tokens of a chunk write."""
    return terms.new if terms.known is None else terms.new - _read(terms, terms.known, state)


def _total(seen: Bool[Array, "*m q c"], decay: Float32[Array, "*n c g"]) -> Array:
    """Sums of the decays of the tokens seen, [*n, q, g]."""
    full = lax.Precision.HIGHEST
    return jnp.einsum("...qc,...cg->...qg", seen.astype(jnp.float32), decay, precision=full)


def _between(seen: Bool[Array, "*m q c"], decay: Float32[Array, "*n c g"]) -> Array:
    """Sums of the decays of the tokens seen that come after token j, [*n, q, c, g]."""
    each = jnp.where(seen[..., None], decay[..., None, :, :], 0)
    later = np.tri(each.shape[-2], k=-1, dtype=np.float32)
    return jnp.einsum("...cg,cd->...dg", each, later, precision=lax.Precision.HIGHEST)


def _products(
    x: Float32[Array, "*m c k"],
    y: Float32[Array, "*m c k"],
    between: Float32[Array, "*m c c g"],
    dtype: Any,
) -> Float32[Array, "*m c c"]:
    """Products of rows with the decay between them."""
    if between.shape[-1] == 1:
        return dot("...ck,...dk->...cd", x.astype(dtype), y) * jnp.exp(between[..., 0])
    return (x[..., :, None, :] * y[..., None, :, :] * jnp.exp(between)).sum(-1)
