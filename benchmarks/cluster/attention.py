"""Attention as `run.py` times it, forward and backward: programs, inputs, and what is right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import startrail_jax as st
from benchmarks.cluster.rounds import Timed, largest
from benchmarks.cluster.settings import ClusterSettings
from benchmarks.schemes import Scheme
from startrail_jax import masks, testing
from startrail_jax.devices.nodes import node_grid
from startrail_jax.errors import UnsupportedError
from startrail_jax.traffic.cost import default_order
from startrail_jax.traffic.ports import Messages, messages
from trainer.config import MeshConfig
from trainer.parallel.degrees import algorithms, choose_order

RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the devices are."""

    devices: tuple[Any, ...]
    """All devices, node by node."""
    devices_per_node: int
    """Number of devices of a node."""

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

    def received(
        self, degrees: st.Degrees, order: tuple[str, ...], sent: Callable[[Any], Messages]
    ) -> float:
        """Bytes that the busiest node receives; NaN if an algorithm is not known.

        Args:
            sent: the messages, given the algorithms of collectives: of NCCL, or of gloo, over which
                CPUs talk.
        """
        try:
            divided = sent(algorithms(self.devices[0].platform))
            traffic = divided.through(node_grid(degrees, order, self.nodes).ravel())
        except UnsupportedError:  # The algorithm for such groups is not known here.
            return math.nan
        return traffic.port_received_bytes


class AttentionCalls:
    """The programs of all schemes.

    Args:
        settings: sizes.
        place: the devices.
    """

    def __init__(self, settings: ClusterSettings, place: Place) -> None:
        self._settings = settings
        self.place = place
        self._reference: tuple[dict[str, np.ndarray], float] | None = None

    @functools.cached_property
    def _inputs(self) -> testing._Inputs:
        own = self._settings
        query = own.batch_size, own.seq_len, own.heads, own.head_dim
        return testing._draw_inputs(
            np.random.default_rng(0),
            query=query,
            key=(*query[:2], own.num_kv_heads, own.head_dim),
            value_head_dim=own.head_dim,
            dtype=own.dtype,
            segment_ids=None,
        )

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
            **{"layout": settings.layout} | scheme.options,
        )

    def order(self, scheme: Scheme) -> tuple[str, ...]:
        """The mesh roles, slowest first, as train.py or `make_mesh` takes them for the call."""
        degrees, nodes = scheme.degrees, self.place.nodes
        if self._settings.window is not None:  # Layers may differ.
            return choose_order(MeshConfig(), degrees, nodes, self._settings.call)
        return default_order(degrees, nodes, self._call(scheme))

    def prepare(self, scheme: Scheme) -> Timed:
        """Compiles the program of a scheme, and compares its results with the reference."""
        call, order = self._call(scheme), self.order(scheme)
        traffic = st.communication(scheme.degrees, **call).total
        mesh = self.place.mesh(scheme.degrees, order)
        ordered = {"layout": call["layout"]} | scheme.options
        attention = st.Attention(mesh, mask=call["mask"], **ordered)
        given = self._inputs
        arrays = attention.shard(given.query, given.key, given.value, given.dout)

        def both_passes(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
            out, pull = jax.vjp(attention, q, k, v)
            return out, *pull(dout)

        program = jax.jit(both_passes).lower(*arrays).compile()
        error, tolerance = self._error(attention, program(*arrays))
        return Timed(
            name=scheme.name,
            run=lambda: jax.block_until_ready(program(*arrays)),
            expected=self.place.received(
                scheme.degrees, order, partial(messages, scheme.degrees, traffic.transfers)
            ),
            error=error,
            tolerance=tolerance,
        )

    def _error(self, attention: st.Attention, results: tuple[Any, ...]) -> tuple[float, float]:
        """The largest error of any process, and the largest that is allowed."""
        self._reference = self._reference or _reference(attention, self._inputs)
        reference, tolerance = self._reference
        worst = 0.0 if reference else math.nan
        for result, right in zip(results, reference.values(), strict=bool(reference)):
            scale, right = np.abs(right).max(), attention.layout.permute(right)
            for shard in result.addressable_shards:
                apart = np.abs(np.asarray(shard.data, np.float64) - right[shard.index]).max()
                worst = max(worst, apart / scale)
        return largest([worst])[0], tolerance


def _reference(
    attention: st.Attention, given: testing._Inputs
) -> tuple[dict[str, np.ndarray], float]:
    """Dense attention in float64, and the largest error that is allowed; nothing if too large."""
    batch, seq_len, heads, head_dim = given.query.shape
    if batch * heads * seq_len**2 > testing.MAX_LOGITS:
        return {}, 0.0
    given = replace(given, dlse=np.zeros_like(given.dlse))
    compute = partial(testing._reference, given, testing._visible(attention, given), head_dim**-0.5)
    right, tolerance = compute(), testing.FLOAT32_TOLERANCE
    if given.query.dtype != np.float32:
        rounded = compute(dtype=given.query.dtype)
        tolerance = testing.NARROW_ERROR_RATIO * max(
            float(np.abs(rounded[name] - right[name]).max() / np.abs(right[name]).max())
            for name in RESULTS
        )
    return {name: right[name] for name in RESULTS}, tolerance
