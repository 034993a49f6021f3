"""The seconds and the bytes of the attention layers of a training step.

What is sent is what `startrail_jax.rings.transfers` says, one setting of the degrees at a time;
the orders of the axes share it. In a round of a ring, messages travel while kernels run, so that it
takes the longer of both. Collectives that a layer waits for are added: the head exchange, gathers
and scatters of team and group. Where a layer sends only the keys that its window shows, kernels
over a device's own keys run beside the messages.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES, Axis, Degrees
from startrail_jax.masks import Window
from startrail_jax.options import Options
from startrail_jax.planner.grid import Call, Settings
from startrail_jax.planner.hardware import Cluster
from startrail_jax.planner.links import Cost, Links, Move
from startrail_jax.rings.rounds import Rounds, ring_offsets
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.sparse_plan import SparsePlan, plan_sparse
from startrail_jax.rings.transfers import Steps, Transfer
from startrail_jax.tokens.layout import Layout

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass of attention over those of the forward pass: it has five matrix
products instead of two, as flash attention computes the scores again."""
_FLOAT32 = 4
_MOST_RANKS = 512
"""Of more sequence ranks, what a window shows is found for so many, with as many tokens each."""
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

    def take(self, rows: Any) -> Pass:
        """The pass in some of the settings."""
        return Pass(**{name: value[rows] for name, value in vars(self).items()})

    def __add__(self, other: Pass) -> Pass:
        return Pass(**{name: value + vars(other)[name] for name, value in vars(self).items()})


class Timing:
    """Times the attentions of a training step for many settings at a time."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        call: Call,
        *,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        """What is sent in each setting.

        Args:
            settings: the settings.
            cluster: the links and the GPUs.
            call: the model, its tokens and its batch.
            options: the options of attention, of which `gradient_dtype` and `exchange` count.
        """
        self.settings, self.cluster, self.call = settings, cluster, call
        self._options = options
        self.links = Links(settings, cluster)
        gpu, model = cluster.gpu, call.model
        self.speed = gpu.peak_flops * (gpu.single_speed if model.itemsize == _FLOAT32 else 1.0)
        """FLOP/s at peak."""
        columns = np.stack([vars(settings)[x] for x in (*ROLES, "inner", "published")])
        unique, form = np.unique(columns.astype(np.int64), axis=1, return_inverse=True)
        self._form = form.ravel()
        """Of each setting, the number of its degrees and kind of ring."""
        self._forms = [
            _Form(Degrees(**dict(zip(ROLES, x, strict=False))), x[-2], bool(x[-1]))
            for x in unique.T.tolist()
        ]
        padded = call.padded(settings.sequence)
        self._lengths = dict(zip(self._form.tolist(), padded.tolist(), strict=True))
        self._sizes = {
            length: Sizes(
                batch=call.batch,
                query_tokens=length,
                key_tokens=length,
                heads=model.heads,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                value_head_dim=model.head_dim,
                dtype="float32" if model.itemsize == _FLOAT32 else "bfloat16",
                packed=False,
            )
            for length in np.unique(padded).tolist()
        }
        shares = [
            self._sizes[self._lengths[number]].share(x.degrees)
            for number, x in enumerate(self._forms)
        ]
        self._shares = shares
        travel = [self._steps(number, (0,)).traveller for number in range(len(self._forms))]
        self._queries_travel = (np.array(travel) == "query")[self._form]
        names = ("query_tokens", "query_bytes", "key_value_bytes")
        of_shares = np.array([[getattr(share, name) for name in names] for share in shares])
        self._tokens, self._query, self._keys = of_shares[self._form].T
        self._ways = {x: self._in_rings(x) for x in call.windows}
        self._sparse: dict[int | None, _Sparse] = {}
        for window, way in self._ways.items():
            if window is not None and options.exchange == "auto":
                self._sparse[window] = self._where_fewer(window, way)

    # What is sent.

    def _steps(self, number: int, offsets: Sequence[int]) -> Steps:
        """The steps of the degrees and the kind of ring of a number."""
        form = self._forms[number]
        return Steps(
            degrees=form.degrees,
            share=self._shares[number],
            kv_heads=self.call.model.kv_heads,
            offsets=offsets,
            options=replace(self._options, inner=form.inner, published=form.published),
        )

    def _in_rings(self, window: int | None) -> _Way:
        """What a layer sends where keys go round the rings."""
        passes: tuple[list[list[Transfer]], ...] = ([], [])
        outer = np.ones(len(self._forms), np.int64)
        for number, form in enumerate(self._forms):
            offsets = form.offsets(window, self._lengths[number])
            steps = self._steps(number, offsets)
            outer[number] = len(offsets) // form.inner
            for found, transfers in zip(passes, steps.in_rings(), strict=True):
                found.append(transfers)
        return _Way(self._moves(passes[0]), self._moves(passes[1]), outer[self._form])

    def _moves(self, passes: Sequence[Sequence[Transfer]]) -> list[Move]:
        """The transfers of all settings, those of one step and kind together."""
        cells: dict[Any, dict[int, Transfer]] = {}
        for number, transfers in enumerate(passes):
            for x in transfers:
                if x.received_bytes:
                    cells.setdefault((x.step, x.collective, x.roles), {})[number] = x
        moves = []
        for (step, collective, roles), found in cells.items():
            received, count = np.zeros(len(passes)), np.zeros(len(passes), np.int64)
            for number, x in found.items():
                # The log-sum-exp of the paper takes a maximum and a sum.
                twice = step == "combine" and collective == "all_reduce"
                count[number] = len(x.hops) or (2 if twice else 1)
                received[number] = x.received_bytes / count[number]
            if step == "combine" and collective == "reduce_scatter":
                # XLA's CPU backend sums in float32 alone.
                gloo = self.cluster.algorithms == "gloo"
                received *= _FLOAT32 / self.call.model.itemsize if gloo else 1
            moves.append(
                Move(
                    step=step,
                    collective=collective,
                    roles=roles,
                    received=received[self._form],
                    count=count[self._form],
                    arrays=self._arrays(step, collective, passes),
                    last=self._last(step, found),
                )
            )
        return moves

    def _arrays(self, step: str, collective: str, passes: Any) -> np.ndarray | int:
        """Number of arrays that a step sends."""
        backward = any(x.step == "query scatter" for x in passes[0])
        queries = self._queries_travel
        if step.endswith("gradient ring"):
            return np.where(queries, 1, 2)
        if step.endswith("ring"):
            # The query, the gradient of its output, log-sum-exp, and output times gradient.
            return np.where(queries, 4, 2) if backward else 2
        if step == "query gather":
            return 4 if backward else 1
        if step == "combine" and collective == "all_to_all":
            # In float32, what rounding took from the log-sum-exp goes along.
            return 3 if self.call.model.itemsize == _FLOAT32 else 2
        several = {"head exchange": 3, "key placement": 2, "key gradient placement": 2}
        return {**several, "replica sum": 2}.get(step, 1)

    def _last(self, step: str, found: dict[int, Transfer]) -> np.ndarray | float:
        """Of neighbours in a node, how many send to another node, on average over hops.

        Where a window skips rounds, a hop goes over several places, and more devices than the last
        one of a node send to another.
        """
        inside = self.links.inside["ring"]
        if step.startswith("outer"):
            inside = np.ones_like(inside)
        last = np.ones(len(self.settings))
        for number, x in found.items():
            if not step.endswith("ring") or x.hops == x.hops[:1] * len(x.hops):
                continue
            places = self._forms[number].degrees.ring // x.inner
            far = np.abs(np.array(x.hops)[:, 0])
            far = np.minimum(far, places - far)
            if far.max() <= 1:
                continue
            mine = np.flatnonzero(self._form == number)
            last[mine] = [np.minimum(n, far).mean() for n in inside[mine].tolist()]
        return last

    def _where_fewer(self, window: int, way: _Way) -> _Sparse:
        """The settings in which a layer sends only the keys that its window shows, and what."""
        rings = way.received(backward=False) + way.received(backward=True)
        s = self.settings
        keys = np.stack([s.sequence, s.data, s.tensor])
        unique, kind = np.unique(keys, axis=1, return_inverse=True)
        kind, found = kind.ravel(), []
        sent = np.full(len(s), np.inf)
        for number, (sequence, data, tensor) in enumerate(unique.T.tolist()):
            ranks = min(sequence, _MOST_RANKS)
            degrees = Degrees(ring=ranks, data=data, tensor=tensor)
            length = int(self.call.padded(np.array(sequence)))
            mask, layout = Window(window - 1, 0), Layout("zigzag", ranks)
            plan = None
            if ranks > 1:
                plan = plan_sparse(mask, layout, length // sequence * ranks)
            found.append(None)
            if plan is None:
                continue
            share = self._sizes[length].share(degrees)
            steps = Steps(
                degrees=degrees,
                share=share,
                kv_heads=self.call.model.kv_heads,
                offsets=(0,),
                options=self._options,
            )
            found[-1] = _Sent(plan, steps, sequence)
            both = (*steps.sparse(plan, forward=True, backward=True), *steps.replica_sum())
            sent[kind == number] = sum(x.received_bytes for x in both)
        taken = (sent < rings) & ~s.published
        return _Sparse(taken, kind, found)

    def received(self, window: int | None = None, *, backward: bool) -> np.ndarray:
        """Bytes that a device receives in a pass of a layer whose keys go round the rings."""
        return self._ways[window].received(backward=backward)

    def sends_sparse(self, window: int | None) -> np.ndarray:
        """Whether a layer sends only the keys that its window shows: if these are fewer bytes."""
        if window in self._sparse:
            return self._sparse[window].taken
        return np.zeros(len(self.settings), bool)

    def received_keys(self, window: int | None) -> np.ndarray:
        """Keys of a sequence that a device receives where `sends_sparse`; 0 in other settings."""
        if window not in self._sparse:
            return np.zeros(len(self.settings), np.int64)
        sparse = self._sparse[window]
        counts = [0 if x is None else x.plan.permuted + x.plan.shared for x in sparse.sent]
        return np.where(sparse.taken, np.array(counts)[sparse.kind], 0)

    # Attention.

    @functools.cached_property
    def passes(self) -> tuple[Pass, Pass]:
        """The forward and the backward pass of the attentions of all layers."""
        return self.all_layers(backward=False), self.all_layers(backward=True)

    @functools.cached_property
    def exchanges_again_seconds(self) -> np.ndarray:
        """Seconds of the head exchanges of all layers, which remat repeats: attention saves nothing
        from before them."""
        total = np.zeros(len(self.settings))
        for window, layers in self.call.windows.items():
            exchanges = [x for x in self._ways[window].forward if x.step == "head exchange"]
            seconds = self.links.costs(exchanges).seconds
            total = total + layers * seconds * ~self.sends_sparse(window)
        return total

    def all_layers(self, *, backward: bool) -> Pass:
        """One pass of the attentions of all layers."""
        one = self.backward if backward else self.forward
        found = [one(window).times(layers) for window, layers in self.call.windows.items()]
        return functools.reduce(operator.add, found)

    def forward(self, window: int | None = None) -> Pass:
        """The forward pass of the attention of a layer, one with a window or without."""
        return self._pass(window, backward=False)

    def backward(self, window: int | None = None) -> Pass:
        """The backward pass of the attention of a layer, one with a window or without."""
        return self._pass(window, backward=True)

    def _pass(self, window: int | None, *, backward: bool) -> Pass:
        """A pass of a layer, by what it sends."""
        rings = self.in_rings(window, backward=backward)
        taken = self.sends_sparse(window)
        if window is None or not taken.any():
            return rings
        keys, home = self._costs(window)
        compute = self._alone(window, backward=backward)
        overlaps = self.cluster.overlaps
        seconds = np.maximum(compute, keys.seconds) if overlaps else compute + keys.seconds
        sent = keys + home if backward else keys
        seconds = seconds + home.seconds * backward
        found = Pass(seconds=seconds, compute=compute, across=sent.across, inside=sent.inside)
        both = zip(vars(rings).items(), vars(found).values(), strict=True)
        return Pass(**{name: np.where(taken, ours, rest) for (name, rest), ours in both})

    def in_rings(self, window: int | None, *, backward: bool) -> Pass:
        """A pass of a layer whose keys go round the rings.

        Gradients make as many hops as operands, one round later; the last one takes them home when
        there are no kernels left.
        """
        s, links, way = self.settings, self.links, self._ways[window]
        outer, of_round = way.outer, self._round(window, backward=backward)
        moves = way.backward if backward else way.forward
        waits = links.costs([move for move in moves if not move.step.endswith("ring")])
        total = links.costs([move for move in moves if move.step.endswith("ring")])
        compute = outer * s.inner * of_round
        if self.cluster.overlaps:
            hops = {move.step: links.hop(move).seconds for move in moves if move.goes_round}
            zero = np.zeros(len(s))
            back, far_back = (hops.get(x, zero) for x in ("gradient ring", "outer gradient ring"))
            one, far = hops.get("ring", zero) + back, hops.get("outer ring", zero) + far_back
            home = np.where(outer > 1, np.where(s.inner > 1, far_back, back), 0)
            single = (outer - 1) * np.maximum(of_round, one) + of_round
            cycle = (s.inner - 1) * np.maximum(of_round, one) + of_round
            double = (outer - 1) * np.maximum(cycle, far) + cycle
            seconds = np.where(s.inner > 1, double, single) + home
        else:
            seconds = total.seconds + compute
        sent = waits + total
        return Pass(
            seconds=waits.seconds + seconds, compute=compute, across=sent.across, inside=sent.inside
        )

    def _round(self, window: int | None, *, backward: bool) -> np.ndarray:
        """Seconds of the kernels of a round of the ring."""
        s, call, gpu, model = self.settings, self.call, self.cluster.gpu, self.call.model
        # Their squares would overflow integers.
        length = call.padded(s.sequence).astype(float)
        if window is None:
            pairs = length**2 * call.batch / (2 if call.causal else 1)
            flops = 4 * pairs * model.heads * model.head_dim / self.cluster.num_gpus / s.ring
        else:
            heads = call.batch // s.data * (model.heads // (s.head * s.tensor))
            rounds = self._ways[window].outer * s.inner
            flops = 4 * self._busiest_pairs(window) * heads * model.head_dim / rounds
        # A causal unit is two runs of tokens, and a kernel call treats one; in the first round, it
        # treats the run of one device. Under a window, it treats a tile.
        later = self._tokens * np.minimum(s.team, s.group) / (2 if call.causal else 1)
        lengths = self._tokens / 2 if call.causal else later, later
        if window is not None:
            lengths = (np.minimum(later, min(window, _LARGEST_TILE)),) * 2
        first, later = (
            1 / gpu.attention_efficiency(x, model.head_dim, backward=backward) for x in lengths
        )
        efficiency = s.ring / (first + (s.ring - 1) * later)
        query = self._query * s.team / model.itemsize
        keys = self._keys * s.group / model.itemsize
        summed = (query + keys) * 3 * _FLOAT32
        merged = query * (model.itemsize + 2 * _FLOAT32)
        moved = np.where(s.ring > 1, summed if backward else merged, 0)
        flops = flops * (BACKWARD_FLOPS if backward else 1)
        return flops / (self.speed * efficiency) + moved / gpu.memory_rate

    def _busiest_pairs(self, window: int) -> np.ndarray:
        """Pairs of a query and a key of a sequence that the busiest device attends to, in each of
        its heads: under a window, the devices of a team do not have the same work."""
        s = self.settings
        run = self.call.padded(s.sequence) // (2 * (s.sequence // s.head))
        columns = np.stack([s.group * s.ring, s.team, run])
        unique, kind = np.unique(columns, axis=1, return_inverse=True)
        return np.array([_busiest(*x, window) for x in unique.T.tolist()])[kind.ravel()]

    def _alone(self, window: int, *, backward: bool) -> np.ndarray:
        """Seconds of the kernels of a layer with a window, where no query moves."""
        s, call, gpu, model = self.settings, self.call, self.cluster.gpu, self.call.model
        pairs = call.padded(s.sequence).astype(float) * window * call.batch
        flops = 4 * pairs * model.heads * model.head_dim / self.cluster.num_gpus
        run = call.padded(s.sequence) // (2 * s.sequence)
        length = np.minimum(run, min(window, _LARGEST_TILE))
        speed = gpu.attention_efficiency(length, model.head_dim, backward=backward) * self.speed
        return (BACKWARD_FLOPS if backward else 1) * flops / speed

    def _costs(self, window: int) -> tuple[Cost, Cost]:
        """What it costs to send the keys that a window shows, and to send their gradients home;
        0 where the rings are taken."""
        sparse, links, s = self._sparse[window], self.links, self.settings
        across, inside, count, summed = np.zeros((4, 2, len(s)))
        for kind in np.unique(sparse.kind[sparse.taken]).tolist():
            sent, mine = sparse.sent[kind], np.flatnonzero(sparse.taken & (sparse.kind == kind))
            assert sent is not None
            for home in (0, 1):
                bytes_of = sent.messages[home][1]
                found = links.of_pairs(mine, *sent.messages[home])
                across[home, mine], inside[home, mine] = found
                count[home, mine], summed[home, mine] = len(bytes_of), sent.summed[home]
        groups = s.sequence, np.minimum(links.placement.per_node, s.sequence)
        keys, home = (
            links.messages(across[i], inside[i], count[i])
            + links.collective("all_reduce", *groups, summed[i])
            for i in (0, 1)
        )
        replicas = [x for x in self._ways[window].backward if x.step == "replica sum"]
        return keys, home + links.costs(replicas).times(sparse.taken)


@dataclass(frozen=True)
class _Form:
    """A setting of the degrees and a kind of ring: what is sent depends on nothing else."""

    degrees: Degrees
    inner: int
    published: bool

    def offsets(self, window: int | None, seq_len: int) -> Sequence[int]:
        """The ring distances that are visited."""
        if window is None:
            return range(self.degrees.ring)
        ring, group, team, head = (
            Axis((role,), getattr(self.degrees, role)) for role in SEQUENCE_ROLES
        )
        rounds = Rounds(
            ring=ring,
            group=group,
            team=team,
            head=head,
            layout=Layout("zigzag", self.degrees.sequence),
            mask=Window(window - 1, 0),
            inner=self.inner,
        )
        return ring_offsets(rounds, seq_len)


@dataclass(frozen=True, eq=False)
class _Way:
    """What a layer sends round the rings, and in the collectives before and after."""

    forward: list[Move]
    backward: list[Move]
    outer: np.ndarray
    """Visited places of the outer cycle of a double ring, or of a single ring."""

    def received(self, *, backward: bool) -> np.ndarray:
        """Bytes that a device receives in a pass."""
        moves = self.backward if backward else self.forward
        return np.sum([move.received * move.count for move in moves], axis=0)


@dataclass(frozen=True, eq=False)
class _Sparse:
    """The settings in which a layer sends only the keys that its window shows."""

    taken: np.ndarray
    kind: np.ndarray
    """Of each setting, the number of what it sends."""
    sent: list[_Sent | None]


class _Sent:
    """The messages of an exchange of keys, and of their gradients on the way home."""

    def __init__(self, plan: SparsePlan, steps: Steps, sequence: int) -> None:
        self.plan = plan
        *permutes, keys, gradients = steps.sparse(plan, forward=False, backward=True)
        self.summed = keys.received_bytes, gradients.received_bytes
        """Bytes of the keys that are shared by a sum, and of their gradients."""
        self.messages = []
        """Of keys, and of their gradients: the receiver of each message and sender, which is the
        sender itself if there is none, [message, rank]; and the bytes of each message."""
        # Ranks in the middle send as far as the one in the middle of those that are looked at.
        ranks, places = np.arange(steps.degrees.sequence), np.arange(sequence)
        half = len(ranks) // 2
        alike = np.where(
            places < half,
            places,
            np.maximum(places - sequence + len(ranks), half),
        )
        # A move has one message for its keys, and one for their gradients.
        for those in (permutes[::2], permutes[1::2]):
            receivers = np.tile(ranks, (len(those), 1))
            for row, x in zip(receivers, those, strict=True):
                senders, targets = np.array(x.pairs).T
                row[senders] = targets
            receivers = places + (receivers - ranks)[:, alike]
            self.messages.append((receivers, np.array([x.sent_bytes for x in those])))


_SPREAD = 4
"""Query units whose work is counted, from the first to the last."""
_LAST = 16
"""Query units, at most, whose work is counted among the last ones: in these, both runs of a unit
lie near the middle of the sequence, where the window of one reaches into the other."""


@functools.lru_cache(maxsize=1 << 14)
def _busiest(number: int, team: int, run: int, window: int) -> float:
    """Pairs of the device that attends to most in zigzag order.

    Args:
        number: number of query units, each of which is `team` runs from the beginning of the
            sequence, and as many from its end.
        team: team degree; a member attends to every team-th run, of those from either end.
        run: tokens of a run.
        window: keys that a query sees.
    """
    length = 2.0 * number * team * run
    spread = np.linspace(0, number - 1, _SPREAD).astype(np.int64)
    units = np.union1d(spread, np.arange(max(number - _LAST, 0), number))[:, None]
    ends = np.arange(2 * number * team + 1) * float(run)
    begin, end = units * float(team * run), (units + 1) * float(team * run)
    before = sum(
        _earlier(b, ends)
        - _earlier(a, ends)
        - _earlier(b - window, ends)
        + _earlier(a - window, ends)
        for a, b in ((begin, end), (length - end, length - begin))
    )
    pairs = np.diff(before)
    pairs = pairs + pairs[:, ::-1]
    return float(pairs[:, : number * team].reshape(len(units), number, team).sum(1).max())


def _earlier(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Pairs of a query and a key before these positions, of which the key is not the later one."""
    both = np.maximum(np.minimum(query, key), 0)
    return both * (both + 1) / 2 + np.maximum(query - key, 0) * key
