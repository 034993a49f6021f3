"""The state before each group of tokens: a scan of maps over the groups of all devices.

The sequence is a line of groups. Each device holds one slice of it in natural order, and slices p
and 2P - 1 - p in zigzag order. Maps of groups are composed on their devices; then a Hillis-Steele
scan over the P devices gives each slice the state before it, in ceil(log2 P) messages of one map
and one of a state (natural order; zigzag order takes as many again, and sums one state over all
devices). Their size does not depend on the number of tokens. Gradients of states go the same way
back, through transposed maps.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from startrail_jax.devices.degrees import Axis
from startrail_jax.linear.halo import pairs_along
from startrail_jax.linear.rules import Map, StateRule
from startrail_jax.rings import collectives


@dataclass(frozen=True)
class Line:
    """The slices of a sequence, over the devices of one axis."""

    rule: StateRule
    axis: Axis
    zigzag: bool

    @property
    def slices(self) -> int:
        """Number of slices that a device holds."""
        return 2 if self.zigzag else 1

    def enter(
        self, maps: Map, first: Float32[Array, "b h *state"], *, reverse: bool = False
    ) -> tuple[Float32[Array, "b s g h *state"], Float32[Array, "b h *state"]]:
        """The state before each group, and the last state, on its device, zeros on all others.

        Maps are [b, s, g, h, ...] for s slices of g groups. Of `first`, that of the device of the
        first group counts. `reverse` walks the line from its end to its beginning.
        """
        if reverse:
            return dataclasses.replace(self, rule=self.rule.adjoint)._enter(maps, first, True)
        return self._enter(maps, first, False)

    def _enter(self, maps: Map, first: Array, reverse: bool) -> tuple[Array, Array]:
        upto = lax.associative_scan(self.rule.then, maps, reverse=reverse, axis=2)
        end = 0 if reverse else -1
        wholes = [jax.tree.map(lambda x, i=i: x[:, i, end], upto) for i in range(self.slices)]
        if self.zigzag:
            near, far = (1, 0) if reverse else (0, 1)
            before: Any = [None, None]
            before[near], before[far] = self._both(wholes[near], wholes[far], first)
            at_last = collectives.index(self.axis) == 0
            last = self.rule.apply(wholes[far], before[far])
        else:
            before = [self._one(wholes[0], first, up=not reverse)]
            at_last = collectives.index(self.axis) == (0 if reverse else self.axis.degree - 1)
            last = self.rule.apply(wholes[0], before[0])
        state = jnp.stack(before, 1)[:, :, None]
        # Each group is entered after those before it.
        earlier = jax.tree.map(lambda x: x[:, :, 1:] if reverse else x[:, :, :-1], upto)
        later = self.rule.apply(earlier, jnp.broadcast_to(state, earlier[1].shape))
        states = jnp.concatenate([later, state] if reverse else [state, later], 2)
        return states, jnp.where(at_last, last, 0)

    def _one(self, own: Map, first: Array, *, up: bool) -> Array:
        """Natural order: the state before this device's slice."""
        n, p = self.axis.degree, collectives.index(self.axis)
        if n == 1:
            return first
        is_first = p == (0 if up else n - 1)
        own = own[0], jnp.where(is_first, self.rule.apply(own, first), own[1])
        _, state = self._scan(own, up, all_of_it=False)
        return jnp.where(is_first, first, self._send(state, 1, up))

    def _both(self, near: Map, far: Map, first: Array) -> tuple[Array, Array]:
        """Zigzag order: the states before both slices of this device. The near slices go up the
        devices, the far ones come down again."""
        n, p = self.axis.degree, collectives.index(self.axis)
        if n == 1:
            return first, self.rule.apply(near, first)
        near = near[0], jnp.where(p == 0, self.rule.apply(near, first), near[1])
        _, state = self._scan(near, up=True, all_of_it=False)
        turn = collectives.total(jnp.where(p == n - 1, state, 0), self.axis)
        before_near = jnp.where(p == 0, first, self._send(state, 1, up=True))
        # Devices may not send in different orders, which independent messages could have.
        far, before_near = lax.optimization_barrier((far, before_near))
        later = self._send(self._scan(far, up=False), 1, up=False)
        return before_near, jnp.where(p == n - 1, turn, self.rule.apply(later, turn))

    def _scan(self, own: Map, up: bool, *, all_of_it: bool = True) -> Map:
        """The map of all slices up to this device's, inclusive; only N of it unless `all_of_it`."""
        n, p = self.axis.degree, collectives.index(self.axis)
        total, distance = own, 1
        while distance < n:
            receives = p >= distance if up else p < n - distance
            if 2 * distance >= n and not all_of_it:
                added = self._send(total[1], distance, up)
                both = total[0], self.rule.apply(total, added)
            else:
                both = self.rule.then(self._send(total, distance, up), total)
            total = jax.tree.map(lambda x, y, to=receives: jnp.where(to, x, y), both, total)
            distance *= 2
        return total

    def _send(self, tree: Any, distance: int, up: bool) -> Any:
        """Sends arrays [b, h, _, _] along the devices, in one message; zeros come from nowhere."""
        leaves, form = jax.tree.flatten(tree)
        lead = leaves[0].shape[:2]
        message = jnp.concatenate([x.reshape(*lead, -1) for x in leaves], -1)
        pairs = pairs_along(self.axis.degree, distance, up)
        message = collectives.permute(message, self.axis, pairs)
        ends = np.cumsum([math.prod(x.shape[2:]) for x in leaves])[:-1]
        parts = jnp.split(message, ends.tolist(), -1)
        return form.unflatten([x.reshape(y.shape) for x, y in zip(parts, leaves, strict=True)])
