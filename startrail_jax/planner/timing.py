"""The seconds of a training step, from its arithmetic and its messages.

In a round of a ring, messages travel while kernels run, so that it takes the longer of both.
Collectives that a layer waits for are added: the head exchange, gathers and scatters of team and
group, and sums over `tensor`. ZeRO's collectives of a layer run beside the matrix products of a
neighbouring layer, and what they take longer than these is added.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.hardware import Cluster
from startrail_jax.planner.layers.seen import Seen
from startrail_jax.planner.layers.visits import Visits
from startrail_jax.planner.links import Cost, Links
from startrail_jax.planner.traffic import Move, Moves

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass of attention over those of the forward pass: it has five matrix
products instead of two, as flash attention computes the scores again."""
_ADAM_BYTES = 28
"""Bytes that AdamW reads and writes for each weight: weight, two moments and gradient."""
_FLOAT32 = 4
_LARGEST_TILE = 4096
"""Tokens that a kernel call treats under a window: `startrail_jax.blocks.tiled.COARSE`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """One pass of attention: arrays [setting]."""

    seconds: np.ndarray
    """Seconds of all of it."""
    compute: np.ndarray
    """Seconds in which kernels run."""
    across: np.ndarray
    """Bytes that the busiest node sends to other nodes."""
    inside: np.ndarray
    """Bytes that the devices of a node send each other."""

    def times(self, count: int) -> Pass:
        """So many of them, one after another."""
        return Pass(**{name: count * value for name, value in vars(self).items()})

    def __add__(self, other: Pass) -> Pass:
        return Pass(**{name: value + vars(other)[name] for name, value in vars(self).items()})


class Timing:
    """Times the parts of a training step for many settings at a time."""

    def __init__(
        self, settings: Settings, cluster: Cluster, call: Call, *, gradient_bytes: int = _FLOAT32
    ) -> None:
        self.settings, self.cluster, self.call = settings, cluster, call
        self.links = Links(settings, cluster)
        float32_sums = cluster.algorithms == "gloo"
        self.traffic = Moves(settings, call, gradient_bytes, float32_sums=float32_sums)
        gpu, model = cluster.gpu, call.model
        self.speed = gpu.peak_flops * (gpu.single_speed if model.itemsize == _FLOAT32 else 1.0)
        """FLOP/s at peak."""
        windows = [window for window in call.windows if window is not None]
        self._visits: dict[int | None, Visits | None] = {None: None}
        self._visits |= {window: Visits(settings, call, window) for window in windows}
        self._seen = {
            window: Seen(self.traffic, self.links, window, gradient_bytes) for window in windows
        }
        self.rounds = {window: self._rounds(window) for window in self._visits}
        """Window of a layer -> seconds of the kernels of a round of the ring, forward and
        backward."""

    def _rounds(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        s, call, gpu, share = self.settings, self.call, self.cluster.gpu, self.traffic.share
        model, visits = call.model, self._visits[window]
        # Their squares would overflow integers.
        length = call.padded(s.sequence).astype(float)
        if visits is None:
            pairs = length**2 * call.batch / (2 if call.causal else 1)
            flops = 4 * pairs * model.heads * model.head_dim / self.cluster.num_gpus / s.ring
        else:
            heads = call.batch // s.data * (model.heads // (s.head * s.tensor))
            flops = 4 * visits.pairs * heads * model.head_dim / (visits.outer * s.inner)
        # A causal unit is two runs of tokens, and a kernel call treats one; in the first round, it
        # treats the run of one device. Under a window, it treats a tile.
        later = share.tokens * np.minimum(s.team, s.group) / (2 if call.causal else 1)
        lengths = share.tokens / 2 if call.causal else later, later
        if window is not None:
            lengths = (np.minimum(later, min(window, _LARGEST_TILE)),) * 2
        slowness = [
            [1 / gpu.attention_efficiency(x, model.head_dim, backward=back) for x in lengths]
            for back in (False, True)
        ]
        ends = [s.ring / (first + (s.ring - 1) * later) for first, later in slowness]
        query = share.query * s.team / model.itemsize
        keys = share.keys * s.group / model.itemsize
        merged = np.where(s.ring > 1, query * (model.itemsize + 2 * _FLOAT32), 0)
        summed = np.where(s.ring > 1, (query + keys) * 3 * _FLOAT32, 0)
        return (
            flops / (self.speed * ends[0]) + merged / gpu.memory_rate,
            BACKWARD_FLOPS * flops / (self.speed * ends[1]) + summed / gpu.memory_rate,
        )

    # Attention.

    def all_layers(self, *, backward: bool) -> Pass:
        """One pass of the attentions of all layers."""
        one = self.backward if backward else self.forward
        found = [one(window).times(layers) for window, layers in self.call.windows.items()]
        return functools.reduce(operator.add, found)

    def forward(self, window: int | None = None) -> Pass:
        """The forward pass of the attention of a layer, one with a window or without."""
        return self._chosen(self._forward(window), window, backward=False)

    def backward(self, window: int | None = None) -> Pass:
        """The backward pass of the attention of a layer, one with a window or without."""
        return self._chosen(self._backward(window), window, backward=True)

    def sends_seen(self, window: int | None) -> np.ndarray:
        """Whether a layer sends only the keys that its window shows: if these are fewer bytes."""
        if window is None:
            return np.zeros(len(self.settings), bool)
        visits = self._visits[window]
        rings = self.traffic.forward(visits) + self.traffic.backward(visits)
        sent = self._seen[window].received(forward=True, backward=True)
        return (sent < sum(move.total for move in rings)) & ~self.settings.published

    def _chosen(self, rings: Pass, window: int | None, *, backward: bool) -> Pass:
        """A pass of a layer by what it sends."""
        taken = self.sends_seen(window)
        if window is None or not taken.any():
            return rings
        keys, home = self._seen[window].costs(taken)
        compute = self._alone(window, backward=backward)
        # Kernels over a device's own keys run while those of others are under way.
        overlaps = self.cluster.overlaps
        seconds = np.maximum(compute, keys.seconds) if overlaps else compute + keys.seconds
        sent = keys + home if backward else keys
        found = Pass(
            seconds=seconds + (home.seconds if backward else 0),
            compute=compute,
            across=sent.across,
            inside=sent.inside,
        )
        both = zip(vars(rings).items(), vars(found).values(), strict=True)
        return Pass(**{name: np.where(taken, ours, rest) for (name, rest), ours in both})

    def _alone(self, window: int, *, backward: bool) -> np.ndarray:
        """Seconds of the kernels of a layer with a window, where no query moves."""
        s, call, gpu, model = self.settings, self.call, self.cluster.gpu, self.call.model
        pairs = call.padded(s.sequence).astype(float) * window * call.batch
        flops = 4 * pairs * model.heads * model.head_dim / self.cluster.num_gpus
        run = call.padded(s.sequence) // (2 * s.sequence)
        length = np.minimum(run, min(window, _LARGEST_TILE))
        speed = gpu.attention_efficiency(length, model.head_dim, backward=backward) * self.speed
        return (BACKWARD_FLOPS if backward else 1) * flops / speed

    def _forward(self, window: int | None) -> Pass:
        traffic, links = self.traffic, self.links
        waits = links.costs(
            [
                *traffic.exchange,
                *traffic.gathers(backward=False),
                *traffic.combination(),
                *traffic.output_exchange,
            ]
        )
        turns = self._turns(traffic.ring(self._visits[window]), None, window)
        return self._pass(waits, turns, self.rounds[window][0], window)

    def _backward(self, window: int | None) -> Pass:
        traffic, links = self.traffic, self.links
        waits = links.costs(
            [
                *traffic.output_exchange,
                *traffic.gathers(backward=True),
                *traffic.scatters(),
                *traffic.gradient_exchange,
            ]
        )
        turns = self._turns(*traffic.gradient_ring(self._visits[window]), window)
        return self._pass(waits, turns, self.rounds[window][1], window)

    def _pass(self, waits: Cost, turns: Cost, of_round: np.ndarray, window: int | None) -> Pass:
        return Pass(
            seconds=waits.seconds + turns.seconds,
            compute=self._outer(window) * self.settings.inner * of_round,
            across=waits.across + turns.across,
            inside=waits.inside + turns.inside,
        )

    def _outer(self, window: int | None) -> np.ndarray:
        """Visited places of the outer cycle of a double ring, or of a single ring."""
        visits = self._visits[window]
        return self.settings.ring // self.settings.inner if visits is None else visits.outer

    def _turns(
        self, operands: list[Move], gradients: list[Move] | None, window: int | None
    ) -> Cost:
        """The rounds of the ring: kernels, and what travels meanwhile.

        Gradients make as many hops as operands, one round later; the last one takes them home when
        there are no kernels left.
        """
        s, links = self.settings, self.links
        outer = self._outer(window)
        of_round = self.rounds[window][gradients is not None]
        moves = operands + (gradients or [])
        total = links.costs(moves)
        if not self.cluster.overlaps:
            seconds = total.seconds + outer * s.inner * of_round
            return Cost(seconds=seconds, across=total.across, inside=total.inside)
        one, inner, far = (links.hop(move).seconds for move in operands)
        home = np.zeros(len(s))
        if gradients is not None:
            back = [links.hop(move).seconds for move in gradients]
            one, inner, far = one + back[0], inner + back[1], far + back[2]
            home = np.where(outer > 1, np.where(s.inner > 1, back[2], back[0]), 0)
        single = (outer - 1) * np.maximum(of_round, one) + of_round
        cycle = (s.inner - 1) * np.maximum(of_round, inner) + of_round
        double = (outer - 1) * np.maximum(cycle, far) + cycle
        seconds = np.where(s.inner > 1, double, single) + home
        return Cost(seconds=seconds, across=total.across, inside=total.inside)

    # The rest of a layer, and of a step.

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of a device."""
        length = self.call.padded(self.settings.sequence)
        return self.call.batch * length // self.settings.replicas

    def products(self, elements: int) -> np.ndarray:
        """Seconds of the matrix products of all tokens with so many weights, forward."""
        flops = 2 * self.tokens * elements / self.settings.tensor
        return flops / (self.speed * self.cluster.gpu.matrix_efficiency)

    def tensor_sum(self) -> Cost:
        """One sum over `tensor` of an activation [tokens, width]."""
        s, model = self.settings, self.call.model
        size = self.tokens * model.width * model.itemsize
        received = 2 * size * (s.tensor - 1) / s.tensor
        return self.links.cost(Move(collective="all_reduce", role="tensor", received=received))

    def exchanges_again(self) -> Cost:
        """The head exchanges of all layers, which remat repeats: attention saves nothing from
        before them."""
        windows = self.call.windows.items()
        count = sum(layers * ~self.sends_seen(window) for window, layers in windows)
        return self.links.costs(self.traffic.exchange).times(count)

    def update(self, elements: np.ndarray) -> np.ndarray:
        """Seconds of the optimizer for so many weights of a device."""
        return _ADAM_BYTES * elements / self.cluster.gpu.memory_rate

    def gathered(self, elements: np.ndarray) -> Cost:
        """The weights of all devices brought together, in the type in which they are used."""
        return self.links.over_replicas("all_gather", self.call.model.itemsize * elements)

    def summed(self, elements: np.ndarray, *, whole: bool) -> Cost:
        """Gradients summed over all devices, each of which gets all of them or its own part."""
        kind = "all_reduce" if whole else "reduce_scatter"
        return self.links.over_replicas(kind, _FLOAT32 * elements)
