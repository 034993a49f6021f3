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
from typing import Any, NamedTuple

import numpy as np

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES, Axis, Degrees
from startrail_jax.masks import Window
from startrail_jax.rings.options import Options
from startrail_jax.rings.rounds import Rounds, ring_offsets
from startrail_jax.rings.sizes import Sizes
from startrail_jax.rings.sparse_plan import plan_sparse
from startrail_jax.rings.transfers import Steps, Transfer
from startrail_jax.tokens.layout import Layout
from trainer.planner.grid import Call, Settings, number_of
from trainer.planner.hardware import Cluster
from trainer.planner.links import Cost, Links, Move
from trainer.planner.models import ModelSizes

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass of attention over those of the forward pass: it has five matrix
products instead of two, as flash attention computes the scores again."""
_FLOAT32 = 4
_MOST_RANKS = 512
"""Of more sequence ranks, what a window shows is found for so many, with as many tokens each."""
_LARGEST_TILE = 4096
"""Tokens that a kernel call treats under a window: `startrail_jax.blocks.tiled.COARSE`."""


class _Turns(NamedTuple):
    """What a layer sends round the rings."""

    forward: list[Move]
    backward: list[Move]
    outer: np.ndarray
    """Visited places of the outer cycle of a double ring, or of a single ring."""


@dataclass(frozen=True, eq=False)
class _Sparse:
    """What a layer sends where that is only the keys that its window shows: arrays [setting]."""

    taken: np.ndarray
    """Whether it does: if these are fewer bytes."""
    keys: np.ndarray
    """Keys of a sequence that a device receives; 0 where the rings are taken, as all costs."""
    there: Cost
    """The cost of the keys."""
    home: Cost
    """The cost of their gradients on the way home."""


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
        """Of the options of attention, `gradient_dtype` and `exchange` count."""
        self.settings, self.cluster, self.call = settings, cluster, call
        self._options = options
        self.links = Links(settings, cluster)
        gpu, model = cluster.gpu, call.model
        self.speed = gpu.peak_flops * (gpu.single_speed if model.itemsize == _FLOAT32 else 1.0)
        """FLOP/s at peak."""
        kinds = (vars(settings)[x] for x in (*SEQUENCE_ROLES, "inner", "published"))
        first, self._form, self._factor = _alike(settings, call, *kinds)
        """Of each setting, the number of its form, and its bytes over those of the form."""
        self._rows = np.split(np.argsort(self._form), np.cumsum(np.bincount(self._form))[:-1])
        """The settings of each form."""
        self._forms = [
            steps_of(
                call,
                Degrees(**dict(zip(ROLES, degrees, strict=True))),
                _with(options, inner=inner, published=bool(published)),
            )
            for *degrees, inner, published in zip(
                *(vars(settings)[x][first].tolist() for x in (*ROLES, "inner", "published")),
                strict=True,
            )
        ]
        self._tokens, query, keys = (
            np.array([getattr(x.share, size) for x in self._forms])[self._form]
            for size in ("query_tokens", "query_bytes", "key_value_bytes")
        )
        self._query, self._keys = query * self._factor, keys * self._factor
        self._queries_travel = np.array([x.traveller == "query" for x in self._forms])[self._form]
        passes = [x.in_rings() for x in self._forms]
        self._waits = tuple(self._moves([x[i] for x in passes], backward=i > 0) for i in (0, 1))
        """What a layer with any window waits for, forward and backward."""
        self._ways = {window: self._round_trips(window) for window in call.windows}
        windows = {*call.windows} - {None} if options.exchange == "auto" else ()
        self._sparse = {window: self._where_fewer(window) for window in windows if window}

    # What is sent.

    def _round_trips(self, window: int | None) -> _Turns:
        """What a layer sends round the rings, of which a window may leave rounds out."""
        forms = [_with_rounds(x, window) for x in self._forms]
        outer = np.array([len(x.offsets) // x.options.inner for x in forms])
        forward = self._moves([x.ring() for x in forms], backward=False)
        pairs = zip(forms, self._forms, strict=True)
        backward = [x.gradient_ring(alike.traveller) for x, alike in pairs]
        return _Turns(forward, self._moves(backward, backward=True), outer[self._form])

    def _moves(self, passes: Sequence[Sequence[Transfer]], *, backward: bool) -> list[Move]:
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
                    received=received[self._form] * self._factor,
                    count=count[self._form],
                    arrays=self._arrays(step, collective, backward),
                    last=self._last(step, found),
                )
            )
        return moves

    def _arrays(self, step: str, collective: str, backward: bool) -> np.ndarray | int:
        """Number of arrays that a step sends."""
        keys = 2 if self.call.model.latent_dim is None else 1
        if step.endswith("gradient ring"):
            return np.where(self._queries_travel, 1, keys)
        if step.endswith("ring"):
            # The query, the gradient of its output, log-sum-exp, and output times gradient.
            return np.where(self._queries_travel, 4, keys) if backward else keys
        if step == "combine" and collective == "all_to_all":
            # In float32, the rounding error of the log-sum-exp goes along.
            return 3 if self.call.model.itemsize == _FLOAT32 else 2
        several = dict.fromkeys(("key placement", "key gradient placement", "replica sum"), keys)
        several |= {"head exchange": 1 + keys, "query gather": 4 if backward else 1}
        return several.get(step, 1)

    def _last(self, step: str, found: dict[int, Transfer]) -> np.ndarray | float:
        """Of neighbours in a node, how many send to another node, on average over hops: the last
        one, and more where a window skips rounds, so that a hop goes over several places."""
        last = np.ones(len(self.settings))
        for number, x in found.items():
            far = _far(x.hops, self._forms[number].degrees.ring // x.inner)
            if far is None:
                continue
            mine = self._rows[number]
            inside = 1 if step.startswith("outer") else self.links.inside["ring"][mine, None]
            last[mine] = np.minimum(inside, far).mean(-1)
        return last

    def _where_fewer(self, window: int) -> _Sparse:
        """The settings in which a layer sends only the keys that its window shows, and what."""
        s, links = self.settings, self.links
        sums = [x for x in self._waits[1] if x.step == "replica sum"]
        rings = self.received(window, backward=False) + self.received(window, backward=True)
        rings = rings - sum(x.received for x in sums)
        keys, moves = np.zeros(len(s), np.int64), np.zeros((2, 4, len(s)))
        first, kind, factor = _alike(s, self.call, s.sequence)
        for number, row in enumerate(first.tolist()):
            sequence, data, tensor = (int(x[row]) for x in (s.sequence, s.data, s.tensor))
            ranks = min(sequence, _MOST_RANKS)
            tokens = self.call.padded(sequence) // sequence * ranks
            mask, layout = Window(window - 1, 0), Layout("zigzag", ranks)
            plan = plan_sparse(mask, layout, tokens) if ranks > 1 else None
            if plan is None:
                continue
            degrees = Degrees(ring=ranks, data=data, tensor=tensor)
            steps = steps_of(self.call, degrees, self._options)
            both = steps.sparse(plan, forward=True, backward=True)
            mine = (kind == number) & ~s.published
            mine &= sum(x.received_bytes for x in both) * factor < rings
            mine = np.flatnonzero(mine)
            if not len(mine):
                continue
            keys[mine] = plan.permuted + plan.shared
            *permutes, of_keys, of_gradients = steps.sparse(plan, forward=False, backward=True)
            # A move has one message for its keys, and one for their gradients.
            for i, total in enumerate((of_keys, of_gradients)):
                those = permutes[i::2]
                receivers = _receivers(those, ranks, sequence)
                sizes = np.array([x.sent_bytes for x in those], float)
                sent = factor[mine] * links.of_pairs(mine, receivers, sizes)
                moves[i, :2, mine] = sent.T
                moves[i, 2, mine] = len(those)
                moves[i, 3, mine] = factor[mine] * total.received_bytes
        there, home = (
            links.messages(across, inside, count, inside / links.placement.per_node)
            + links.collective(
                "all_reduce", s.sequence, np.minimum(links.placement.per_node, s.sequence), summed
            )
            for across, inside, count, summed in moves
        )
        return _Sparse(keys > 0, keys, there, home + links.costs(sums).times(keys > 0))

    def received(self, window: int | None = None, *, backward: bool) -> np.ndarray:
        """Bytes that a device receives in a pass of a layer whose keys go round the rings."""
        moves = [*self._waits[backward], *self._ways[window][backward]]
        return np.sum([move.received * move.count for move in moves], axis=0)

    def sends_sparse(self, window: int | None) -> np.ndarray:
        """Whether a layer sends only the keys that its window shows: if these are fewer bytes."""
        return self.received_keys(window) > 0

    def received_keys(self, window: int | None) -> np.ndarray:
        """Keys of a sequence that a device receives where `sends_sparse`; 0 in other settings."""
        if window not in self._sparse:
            return np.zeros(len(self.settings), np.int64)
        return self._sparse[window].keys

    # Attention.

    @functools.cached_property
    def passes(self) -> tuple[Cost, Cost]:
        """The forward and the backward pass of the attentions of all layers."""
        return self.all_layers(backward=False), self.all_layers(backward=True)

    @functools.cached_property
    def exchanges_again_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the exchanges over `head` of all layers that remat repeats though it saves
        attention, without offload and with it. Attention saves no query, key or value from before
        their exchange; with offload, what the exchange of its output gives is not saved either."""
        layers = sum(n * ~self.sends_sparse(window) for window, n in self.call.windows.items())

        def seconds(step: str) -> np.ndarray:
            moves = [x for x in self._waits[0] if x.step == step]
            return self.links.costs(moves).seconds * layers

        inputs = seconds("head exchange")
        return inputs, inputs + seconds("output exchange")

    def all_layers(self, *, backward: bool) -> Cost:
        """One pass of the attentions of all layers."""
        one = self.backward if backward else self.forward
        found = [one(window).times(layers) for window, layers in self.call.windows.items()]
        return functools.reduce(operator.add, found)

    def forward(self, window: int | None = None) -> Cost:
        """The forward pass of the attention of a layer, one with a window or without."""
        return self._pass(window, backward=False)

    def backward(self, window: int | None = None) -> Cost:
        """The backward pass of the attention of a layer, one with a window or without."""
        return self._pass(window, backward=True)

    def _pass(self, window: int | None, *, backward: bool) -> Cost:
        """A pass of a layer, by what it sends."""
        rings = self.in_rings(window, backward=backward)
        if window is None or not self.sends_sparse(window).any():
            return rings
        sparse = self._sparse[window]
        compute = self._alone(window, backward=backward)
        found = sparse.there + sparse.home if backward else sparse.there
        # Kernels run beside the keys, and gradients wait at the end.
        beside = np.minimum(compute, sparse.there.seconds) if self.cluster.overlaps else 0
        found = replace(found, seconds=found.seconds + compute - beside, compute=compute)
        both = zip(vars(rings).items(), vars(found).values(), strict=True)
        return Cost(**{x: np.where(sparse.taken, ours, rest) for (x, rest), ours in both})

    def in_rings(self, window: int | None, *, backward: bool) -> Cost:
        """A pass of a layer whose keys go round the rings. Gradients make as many hops as operands,
        one round later; the last one takes them home when there are no kernels left."""
        s, links, way = self.settings, self.links, self._ways[window]
        outer, of_round = way.outer, self._round(window, backward=backward)
        compute = outer * s.inner * of_round
        total = links.costs(way[backward])
        seconds = total.seconds + compute
        if self.cluster.overlaps:
            hops = {move.step: links.hop(move).seconds for move in way[backward]}
            zero = np.zeros(len(s))
            back, far_back = (hops.get(x, zero) for x in ("gradient ring", "outer gradient ring"))
            one, far = hops.get("ring", zero) + back, hops.get("outer ring", zero) + far_back
            home = np.where(outer > 1, np.where(s.inner > 1, far_back, back), 0)
            single = (outer - 1) * np.maximum(of_round, one) + of_round
            cycle = (s.inner - 1) * np.maximum(of_round, one) + of_round
            double = (outer - 1) * np.maximum(cycle, far) + cycle
            seconds = np.where(s.inner > 1, double, single) + home
        turns = replace(total, seconds=seconds, compute=compute)
        return links.costs(self._waits[backward]) + turns

    def _round(self, window: int | None, *, backward: bool) -> np.ndarray:
        """Seconds of the kernels of a round of the ring."""
        s, call, gpu, model = self.settings, self.call, self.cluster.gpu, self.call.model
        # Their squares would overflow integers.
        length = call.padded(s.sequence).astype(float)
        if window is None:
            pairs = length**2 * call.batch / (2 if call.causal else 1)
            if call.visible:
                pairs = pairs * [call.visible.get(n, 1.0) for n in s.data.tolist()]
            flops = pairs * model.heads / self.cluster.num_gpus / s.ring
        else:
            heads = call.batch // s.data * (model.heads // (s.head * s.tensor))
            rounds = self._ways[window].outer * s.inner
            flops = self._busiest_pairs(window) * heads / rounds
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
        flops = flops * _flops_of_pair(model, backward=backward)
        seconds = flops / (self.speed * efficiency) + moved / gpu.memory_rate
        return seconds + self._expansion(backward=backward)

    def _expansion(self, *, backward: bool) -> np.ndarray | float:
        """Seconds in which a device makes the keys and values of a unit of latents; in the backward
        pass also the gradients of these and of the matrices. They are written and read, the keys
        once more to lie beside their rotated parts."""
        s, call, gpu, model = self.settings, self.call, self.cluster.gpu, self.call.model
        if model.latent_dim is None:
            return 0.0
        tokens = self._tokens * s.group * (call.batch // s.data)
        made = model.sizes["latent_key_dim"] + model.value_head_dim
        heads = tokens * (model.heads // (s.head * s.tensor))
        flops = 2 * heads * model.sizes["latent_rank"] * made * (3 if backward else 1)
        moved = heads * (model.head_dim + model.value_head_dim) * model.itemsize
        moved = moved * (9 if backward else 3)
        return flops / (self.speed * gpu.matrix_efficiency) + moved / gpu.memory_rate

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
        flops = pairs * model.heads / self.cluster.num_gpus
        run = call.padded(s.sequence) // (2 * s.sequence)
        length = np.minimum(run, min(window, _LARGEST_TILE))
        speed = gpu.attention_efficiency(length, model.head_dim, backward=backward) * self.speed
        return _flops_of_pair(model, backward=backward) * flops / speed


def _flops_of_pair(model: ModelSizes, *, backward: bool) -> int:
    """FLOPs of a visible pair in each head: two products forward, and five backward."""
    keys, values = model.head_dim, model.value_head_dim
    return 2 * (3 * keys + 2 * values) if backward else 2 * (keys + values)


class Timings:
    """`Timing` of the attentions of all layers, which may differ in their heads."""

    def __init__(self, settings: Settings, cluster: Cluster, call: Call, options: Options) -> None:
        self.settings, self.cluster, self.call = settings, cluster, call
        self.each = [Timing(settings, cluster, x, options=options) for x in call.attentions]
        self.speed = self.each[0].speed
        """FLOP/s at peak."""

    def received_keys(self, window: int | None) -> np.ndarray:
        """`Timing.received_keys`: the most of any layer."""
        return np.max([x.received_keys(window) for x in self.each], axis=0)

    def sends_sparse(self, window: int | None) -> np.ndarray:
        """`Timing.sends_sparse`: whether some layer does."""
        return self.received_keys(window) > 0

    @functools.cached_property
    def passes(self) -> tuple[Cost, Cost]:
        """The forward and the backward pass of the attentions of all layers."""
        forward, backward = zip(*(x.passes for x in self.each), strict=True)
        return functools.reduce(operator.add, forward), functools.reduce(operator.add, backward)

    @functools.cached_property
    def exchanges_again_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """The sum of `Timing.exchanges_again_seconds`."""
        inputs, both = zip(*(x.exchanges_again_seconds for x in self.each), strict=True)
        return np.sum(inputs, axis=0), np.sum(both, axis=0)


@functools.lru_cache
def _with(options: Options, **kind: Any) -> Options:
    return replace(options, **kind)


def _alike(
    settings: Settings, call: Call, *kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Settings whose devices send the same, but for the number of rows and heads that they have."""
    # Where a key head is on several devices, bytes do not follow the number of heads.
    shared = call.model.kv_heads % (settings.head * settings.tensor) > 0
    number = number_of(np.where(shared, settings.tensor, 0), *kinds)
    _, first, form = np.unique(number, return_index=True, return_inverse=True)
    parts = settings.data * settings.tensor
    return first, form, parts[first][form] / parts


@functools.lru_cache(maxsize=1024)
def _far(hops: tuple[tuple[int, int] | None, ...], places: int) -> np.ndarray | None:
    """Places that each hop of a ring goes; None if all go alike, or none further than one place."""
    if None in hops or len({*hops}) <= 1:
        return None
    far = np.abs(np.array(hops)[:, 0])
    far = np.minimum(far, places - far)
    return far if far.max() > 1 else None


def steps_of(call: Call, degrees: Degrees, options: Options) -> Steps:
    """What each step of the attention of a layer sends, but for the rounds of its ring."""
    model, length = call.model, int(call.padded(degrees.sequence))
    sizes = Sizes(
        batch=call.batch,
        query_tokens=length,
        key_tokens=length,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        value_head_dim=model.value_head_dim,
        latent_dim=model.latent_dim,
        dtype="float32" if model.itemsize == _FLOAT32 else "bfloat16",
        packed=False,
    )
    return Steps(
        degrees=degrees,
        share=sizes.share(degrees),
        kv_heads=model.kv_heads,
        offsets=(),
        options=options,
    )


def _with_rounds(steps: Steps, window: int | None) -> Steps:
    """The steps with the rounds of the ring that a window shows."""
    if window is None:
        return replace(steps, offsets=range(steps.degrees.ring))
    axes: dict[str, Any] = {
        role: Axis((role,), getattr(steps.degrees, role)) for role in SEQUENCE_ROLES
    }
    layout, mask = Layout("zigzag", steps.degrees.sequence), Window(window - 1, 0)
    rounds = Rounds(**axes, layout=layout, mask=mask, inner=steps.options.inner)
    length = steps.share.query_tokens * steps.degrees.sequence // steps.degrees.head
    return replace(steps, offsets=ring_offsets(rounds, length))


def _receivers(moves: Sequence[Transfer], ranks: int, sequence: int) -> np.ndarray:
    """The receiver of each message and sender, which is the sender itself if there is none."""
    places, half = np.arange(sequence), ranks // 2
    alike = np.where(places < half, places, np.maximum(places - sequence + ranks, half))
    receivers = np.tile(np.arange(ranks), (len(moves), 1))
    for row, x in zip(receivers, moves, strict=True):
        senders, targets = np.array(x.pairs).T
        row[senders] = targets
    return places + (receivers - np.arange(ranks))[:, alike]


_SPREAD = 4
"""Query units whose work is counted, from the first to the last."""
_LAST = 16
"""Query units, at most, whose work is counted among the last ones: in these, both runs of a unit
lie near the middle of the sequence, where the window of one reaches into the other."""


@functools.lru_cache(maxsize=1 << 14)
def _busiest(number: int, team: int, run: int, window: int) -> float:
    """Pairs of the device that attends to most in zigzag order."""
    ranks = number * team
    spread = np.linspace(0, number - 1, _SPREAD).astype(np.int64)
    units = np.union1d(spread, np.arange(max(number - _LAST, 0), number))
    # Of the runs of keys, those from the first one that a run of queries sees to its own last one.
    visible = min(team + -(-window // run), 2 * ranks)
    pairs = np.zeros((len(units), team))
    for first in (units * team, 2 * ranks - (units + 1) * team):
        runs = np.maximum(first + team - visible, 0)[:, None] + np.arange(visible + 1)
        keys, begin, end = (x * float(run) for x in (runs, first[:, None], first[:, None] + team))
        before = _earlier(end, keys) - _earlier(begin, keys)
        before += _earlier(begin - window, keys) - _earlier(end - window, keys)
        member = np.minimum(runs, 2 * ranks - 1 - runs)[:, :-1] % team
        np.add.at(pairs, (np.arange(len(units))[:, None], member), np.diff(before))
    return float(pairs.max())


def _earlier(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Pairs of a query and a key before these positions, of which the key is not the later one."""
    both = np.maximum(np.minimum(query, key), 0)
    return both * (both + 1) / 2 + np.maximum(query - key, 0) * key
