"""The seconds of a training step, from its arithmetic and its messages.

In a round of a ring, messages travel while kernels run, so that it takes the longer of both.
Collectives that a layer waits for are added: the head exchange, gathers and scatters of team and
group, and sums over `tensor`. ZeRO's collectives of a layer run beside the matrix products of a
neighbouring layer, and what they take longer than these is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.hardware import Cluster
from startrail_jax.planner.links import Cost, Links
from startrail_jax.planner.traffic import Move, Moves

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass of attention over those of the forward pass: it has five matrix
products instead of two, as flash attention computes the scores again."""
_ADAM_BYTES = 28
"""Bytes that AdamW reads and writes for each weight: weight, two moments and gradient."""
_FLOAT32 = 4


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
        # Their squares would overflow integers.
        length = call.padded(settings.sequence).astype(float)
        pairs = length**2 * call.batch / (2 if call.causal else 1)
        share = 4 * pairs * model.heads * model.head_dim / cluster.num_gpus
        s, tokens = settings, self.traffic.share.tokens
        # A causal unit is two runs of tokens, and a kernel call treats one.
        length = tokens * np.minimum(s.team, s.group) / (2 if call.causal else 1)
        ends = [
            gpu.attention_efficiency(length, model.head_dim, backward=back)
            for back in (False, True)
        ]
        query = self.traffic.share.query * s.team / model.itemsize
        keys = self.traffic.share.keys * s.group / model.itemsize
        merged = np.where(s.ring > 1, query * (model.itemsize + 2 * _FLOAT32), 0)
        summed = np.where(s.ring > 1, (query + keys) * 3 * _FLOAT32, 0)
        self.rounds = (
            share / s.ring / (self.speed * ends[0]) + merged / gpu.memory_rate,
            BACKWARD_FLOPS * share / s.ring / (self.speed * ends[1]) + summed / gpu.memory_rate,
        )
        """Seconds of the kernels of a round of the ring, forward and backward."""

    # Attention.

    def forward(self) -> Pass:
        """The forward pass of the attention of a layer."""
        traffic, links = self.traffic, self.links
        waits = links.costs(
            [
                *traffic.exchange,
                *traffic.gathers(backward=False),
                *traffic.combination(),
                *traffic.output_exchange,
            ]
        )
        turns = self._turns(traffic.ring(), None, self.rounds[0])
        return self._pass(waits, turns, self.rounds[0])

    def backward(self) -> Pass:
        """The backward pass of the attention of a layer."""
        traffic, links = self.traffic, self.links
        waits = links.costs(
            [
                *traffic.output_exchange,
                *traffic.gathers(backward=True),
                *traffic.scatters(),
                *traffic.gradient_exchange,
            ]
        )
        turns = self._turns(*traffic.gradient_ring(), self.rounds[1])
        return self._pass(waits, turns, self.rounds[1])

    def _pass(self, waits: Cost, turns: Cost, of_round: np.ndarray) -> Pass:
        return Pass(
            seconds=waits.seconds + turns.seconds,
            compute=self.settings.ring * of_round,
            across=waits.across + turns.across,
            inside=waits.inside + turns.inside,
        )

    def _turns(
        self, operands: list[Move], gradients: list[Move] | None, of_round: np.ndarray
    ) -> Cost:
        """The rounds of the ring: kernels, and what travels meanwhile.

        Gradients make as many hops as operands, one round later; the last one takes them home when
        there are no kernels left.
        """
        s, links = self.settings, self.links
        outer = s.ring // s.inner
        moves = operands + (gradients or [])
        total = links.costs(moves)
        if not self.cluster.overlaps:
            seconds = total.seconds + s.ring * of_round
            return Cost(seconds=seconds, across=total.across, inside=total.inside)
        one, inner, far = (links.hop(move).seconds for move in operands)
        home = np.zeros(len(s))
        if gradients is not None:
            back = [links.hop(move).seconds for move in gradients]
            one, inner, far = one + back[0], inner + back[1], far + back[2]
            home = np.where(s.ring > 1, np.where(s.inner > 1, back[2], back[0]), 0)
        single = (s.ring - 1) * np.maximum(of_round, one) + of_round
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

    def exchange_again(self) -> Cost:
        """The head exchange, which remat repeats: attention saves nothing from before it."""
        return self.links.costs(self.traffic.exchange)

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
