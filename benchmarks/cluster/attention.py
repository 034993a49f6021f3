"""Attention as `run.py` times it: programs, inputs, and the dense reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import startrail_jax as st
from benchmarks.cluster.rounds import Processes, Timed
from benchmarks.cluster.settings import ClusterSettings, Scheme
from startrail_jax import masks, testing
from startrail_jax.analysis.algorithms import GLOO, NCCL
from startrail_jax.analysis.cost import Traffic, default_order
from startrail_jax.analysis.ports import Messages, messages
from startrail_jax.devices.nodes import node_grid
from startrail_jax.errors import UnsupportedError
from trainer.config import MeshConfig
from trainer.parallel.degrees import choose_order

RESULTS = ("out", "dq", "dk", "dv")
TITLES = {"forward": "forward", "both": "forward + backward"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the devices are, and which of their ports count."""

    devices: tuple[Any, ...]
    """All devices, node by node."""
    devices_per_node: int
    """Number of devices of a node."""
    rails: bool
    """Whether each device has a port of its own."""

    @property
    def nodes(self) -> list[int]:
        """The node of each device."""
        return [index // self.devices_per_node for index in range(len(self.devices))]

    def mesh(self, degrees: st.Degrees, order: tuple[str, ...]) -> Mesh:
        """A mesh of all devices, its axes on the nodes in some order."""
        return st.make_mesh(
            degrees,
            axis_type="auto",
            devices=self.devices,
            order=order,
            devices_per_node=self.devices_per_node,
        )

    @property
    def algorithms(self) -> Any:
        """Those of the collectives: of NCCL, or of gloo, over which CPUs talk."""
        return GLOO if self.devices[0].platform == "cpu" else NCCL

    def received(
        self, degrees: st.Degrees, order: tuple[str, ...], sent: Callable[[Any], Messages]
    ) -> float:
        """Bytes that the busiest port receives; NaN if an algorithm is not known.

        Args:
            degrees, order: those of the mesh.
            sent: the messages, given `algorithms`.
        """
        try:
            traffic = sent(self.algorithms).through(node_grid(degrees, order, self.nodes).ravel())
        except UnsupportedError:  # The algorithm for such groups is not known here.
            return math.nan
        return max(traffic.received_by_device) if self.rails else traffic.port_received_bytes


class AttentionCalls:
    """The programs of all schemes.

    Args:
        settings: sizes and passes.
        place: the devices.
        processes: the processes that share them.
    """

    def __init__(self, settings: ClusterSettings, place: Place, processes: Processes) -> None:
        self._settings = settings
        self.place = place
        self._processes = processes

    @functools.cached_property
    def _inputs(self) -> list[np.ndarray]:
        return _draw(self._settings)

    @functools.cached_property
    def _reference(self) -> _Reference:
        return self._processes.once(lambda: _Reference(self._settings, self._inputs))

    def _call(self, scheme: Scheme) -> dict[str, Any]:
        """Sizes and options of the attention call."""
        settings = self._settings
        return dict(
            batch=settings.batch_size,
            seq_len=settings.seq_len,
            heads=settings.heads,
            kv_heads=settings.num_kv_heads,
            head_dim=settings.head_dim,
            dtype=settings.dtype,
            mask=masks.resolve(None, causal=settings.causal, window=settings.window),
            layout=settings.layout,
            **scheme.options,
        )

    def order(self, scheme: Scheme) -> tuple[str, ...]:
        """The mesh roles, slowest first, as train.py or `make_mesh` takes them for the call."""
        degrees, nodes = scheme.degrees, self.place.nodes
        if self._settings.window is not None:  # Layers may differ.
            return choose_order(MeshConfig(), degrees, nodes, self._settings.call)
        return default_order(degrees, nodes, self._call(scheme))

    def prepare(self, scheme: Scheme) -> list[Timed]:
        """Compiles the programs of a scheme, and compares their results with the reference.

        Raises:
            ValueError: if the scheme does not serve these sizes.
        """
        call, order = self._call(scheme), self.order(scheme)
        report = st.communication(scheme.degrees, **call)
        mesh = self.place.mesh(scheme.degrees, order)
        attention = st.Attention(mesh, mask=call["mask"], layout=call["layout"], **scheme.options)
        arrays = attention.shard(*self._inputs)
        timed = []
        for which in self._settings.passes:
            function, arguments = (attention, arrays[:3]) if which == "forward" else (
                partial(_both_passes, attention), arrays)  # fmt: skip
            out = tuple(RESULTS) if which == "both" else RESULTS[0]
            program, _ = self._processes.compile(jax.jit(function), arguments, out)
            traffic: Traffic = report.forward if which == "forward" else report.total
            found = Timed(
                name=scheme.name,
                what=TITLES[which],
                run=partial(_finished, program, arguments),
                expected=self.place.received(
                    scheme.degrees, order, partial(messages, scheme.degrees, traffic.transfers)
                ),
                tolerance=self._reference.tolerance,
            )
            results = found.run()
            results = results if which == "both" else (results,)
            error = self._reference.error(attention, results)
            found.error = self._processes.largest([error])[0]
            timed.append(found)
        return timed


def _draw(settings: ClusterSettings) -> list[np.ndarray]:
    """Random q, k, v and dout on the host."""
    rng = np.random.default_rng(0)
    heads = (settings.heads, settings.num_kv_heads, settings.num_kv_heads, settings.heads)
    size = settings.batch_size, settings.seq_len
    dtype = jnp.dtype(settings.dtype)
    return [rng.normal(size=(*size, n, settings.head_dim)).astype(dtype) for n in heads]


def _both_passes(attention: Any, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(dout)


def _finished(program: Any, arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(program(*arguments))


class _Reference:
    """Dense attention in float64 of the first row, for the queries of its first and last key head.

    The reference is that of `startrail_jax.testing`; every process compares its own shards.
    """

    def __init__(self, settings: ClusterSettings, inputs: Sequence[np.ndarray]) -> None:
        self.tolerance = 0.0
        self._seq_len = settings.seq_len
        ratio = settings.heads // settings.num_kv_heads
        keys = sorted({0, settings.num_kv_heads - 1})
        queries = [key * ratio + i for key in keys for i in range(ratio)]
        self._heads = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        self._values: dict[str, np.ndarray] = {}
        if len(queries) * settings.seq_len**2 > testing.MAX_LOGITS:
            return
        q, k, v, dout = (x[:1, :, which] for x, which in
                         zip(inputs, (queries, keys, keys, queries), strict=True))  # fmt: skip
        dlse = np.zeros((1, len(queries), settings.seq_len), np.float32)
        arrays = testing._Inputs(query=q, key=k, value=v, dout=dout, dlse=dlse, segment_ids=None)
        seen = np.ones((1, settings.seq_len, settings.seq_len), bool)
        seen = np.tril(seen) if settings.causal else seen
        seen = seen if settings.window is None else np.triu(seen, 1 - settings.window)
        compute = partial(testing._reference, arrays, seen, settings.head_dim**-0.5)
        self._values = {name: compute()[name] for name in RESULTS}
        self.tolerance = testing.FLOAT32_TOLERANCE
        if q.dtype != np.float32:
            rounded = compute(dtype=q.dtype)
            self.tolerance = testing.NARROW_ERROR_RATIO * max(
                _error(rounded[name], self._values[name]) for name in RESULTS
            )

    def error(self, attention: st.Attention, results: Sequence[Any]) -> float:
        """The largest error of the shards of this process; NaN if the reference is too large."""
        if not self._values:
            return float("nan")
        positions = np.asarray(attention.layout.positions(self._seq_len))
        worst = 0.0
        for name, result in zip(RESULTS, results, strict=False):
            wanted, heads = self._values[name], self._heads[name]
            for shard in result.addressable_shards:
                rows, tokens, columns, _ = shard.index
                if rows.start not in (None, 0):
                    continue
                here = list(range(result.shape[2])[columns])
                both = [head for head in heads if head in here]
                if both:
                    found = np.asarray(shard.data)[0][:, [here.index(head) for head in both]]
                    right = wanted[0][positions[tokens]][:, [heads.index(head) for head in both]]
                    worst = max(worst, _error(found, right, np.abs(wanted).max()))
        return worst


def _error(found: np.ndarray, right: np.ndarray, largest: float | None = None) -> float:
    largest = np.abs(right).max() if largest is None else largest
    return float(np.abs(found.astype(np.float64) - right).max() / largest)
