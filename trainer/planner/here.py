"""The cluster at hand, measured: links inside of the nodes and between them, and kernels.

Several processes must be joined already (`jax.distributed`), and all of them must call
`measure_cluster`. Each of them gets the same figures, so that all of them plan alike.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from startrail_jax.attention import Attention
from startrail_jax.device_mesh import make_mesh
from startrail_jax.devices.degrees import Axis, Degrees
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from startrail_jax.rings.collectives import gather, permute
from trainer.planner.hardware import GPUS, Cluster, Gpu
from trainer.planner.timing import BACKWARD_FLOPS

SMALL = 1 << 10
"""Bytes of the message by which latency is measured."""
LARGE = ((1 << 19, 0.1), (1 << 22, 2e-3), (1 << 26, 0.0))
"""Bytes of the messages by which the rate is measured: the next one if a message takes fewer
seconds than stand beside it."""
_CHAIN, _LARGE_CHAIN = 16, 2
"""Messages, small or large, that a program sends in a row: the time of its start does not count."""
_REPEATS = 5
_SAME_PORT = 1.5
"""Two messages that take this many times as long as one share what carries them."""
SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable that says which share of a GPU's memory jax takes."""
_KNOWN = {
    r"\bA100\b.*40GB(?!.*MIG)": "a100_40",
    r"\bA100\b.*80GB(?!.*MIG)": "a100_80",
    r"\bH100\b(?!.*(PCIe|NVL|MIG))": "h100",
    r"\bH200\b(?!.*(NVL|MIG))": "h200",
    r"\bB200\b(?!.*MIG)": "b200",
}
"""What jax calls a device -> the GPU. Others with a like name, and parts of a GPU, are measured."""


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """What a kind of link was measured to do."""

    latency: float
    """Seconds of a short message."""
    rate: float
    """Bytes/s of a long one."""


def measure_cluster(
    devices: Sequence[Any] | None = None,
    *,
    devices_per_node: int | None = None,
    head_dim: int = 128,
    itemsize: int = 2,
    causal: bool = True,
) -> Cluster:
    """Measures the devices at hand, those of all processes; takes seconds, mostly to compile.

    Latency and rate inside of a node are those of a message that each of its devices sends to the
    next one at the same time. Between nodes, one pair of devices and then all pairs of two nodes
    send messages: if all pairs are as fast as one, each device has a port. If a message each way
    takes longer than one alone, the ports are half-duplex. The attention kernel is timed with
    `head_dim`, `causal` and activations of `itemsize` bytes: 2 for bfloat16, 4 for float32.
    """
    everything = list(jax.devices() if devices is None else devices)
    numbers = nodes_of(everything, devices_per_node)
    sizes = np.bincount(numbers).tolist()
    if len(set(sizes)) > 1:
        raise InputError(
            "All nodes must have the same number of devices; got "
            f"{', '.join(map(str, sizes))}. Use as many of each."
        )
    nodes, per_node = len(sizes), sizes[0]
    ordered = [everything[i] for i in np.argsort(numbers, kind="stable")]
    links = Probe(ordered)
    start, inside, across = 0.0, None, None
    ports, half_duplex = per_node, False
    if per_node > 1:
        inside = links.speed(_ring(per_node, nodes))
        if per_node > 2:
            start = links.start(inside.latency + SMALL / inside.rate, per_node)
    if nodes > 1:
        across, ports, half_duplex = _ports(links, per_node)
        if per_node == 1 and nodes > 2:
            start = links.start(across.latency + SMALL / across.rate, nodes)
    unmeasured = LinkSpeed(latency=0.0, rate=math.inf)
    inside, across = inside or across or unmeasured, across or unmeasured
    gpu = _kernels(links, head_dim, itemsize, causal)
    is_cpu = ordered[0].platform == "cpu"
    return Cluster(
        nodes=nodes,
        gpus_per_node=per_node,
        gpu=replace(gpu, inside_rate=inside.rate),
        port_rate=across.rate,
        ports=ports,
        half_duplex=half_duplex,
        latency=max(across.latency - start, 0.0),
        inside_latency=max(inside.latency - start, 0.0),
        start_latency=start,
        algorithms="gloo" if is_cpu else "nccl",
        overlaps=not is_cpu,
    )


def known_gpu(device: Any) -> Gpu | None:
    """The GPU that a device is, if its data sheet is known."""
    kinds = (name for words, name in _KNOWN.items() if re.search(words, device.device_kind))
    return next((GPUS[name] for name in kinds), None)


Pairs = Sequence[tuple[int, int]]
"""Places of a sender and of a receiver among the devices."""


def _ring(per_node: int, nodes: int) -> Pairs:
    """Each device sends to the next one of its node."""
    return [
        (node * per_node + i, node * per_node + (i + 1) % per_node)
        for node in range(nodes)
        for i in range(per_node)
    ]


def _ports(links: Any, per_node: int) -> tuple[LinkSpeed, int, bool]:
    """Speed of a port between the first two nodes, ports of a node, whether they are
    half-duplex."""
    there = [(i, i + per_node) for i in range(per_node)]
    back = [(j, i) for i, j in there]
    one, both = links.speed(there[:1]), links.speed([there[0], back[0]])
    half_duplex = one.rate > _SAME_PORT * both.rate
    if per_node == 1:
        return one, 1, half_duplex
    # All devices of a node together send this many times as much as one of them.
    gain = per_node * links.speed(there).rate / one.rate
    counts = [n for n in range(1, per_node + 1) if per_node % n == 0]
    return one, min(counts, key=lambda n: abs(math.log(n / gain))), half_duplex


class Probe:
    """Sends messages between devices, and times them."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.mesh = Mesh(np.array(list(devices)), ("device",))

    def speed(self, pairs: Pairs) -> LinkSpeed:
        """Latency and rate of messages between some pairs at the same time."""
        latency = self._hop(pairs, SMALL)
        size, seconds = SMALL, latency
        for size, enough in LARGE:
            seconds = self._hop(pairs, size)
            if seconds >= enough:
                break
        # No link is infinitely fast, whatever the clock says.
        rate = (size - SMALL) / max(seconds - latency, 1e-9)
        # On a slow link, the bytes of a short message are most of its time.
        return LinkSpeed(latency=max(latency - SMALL / rate, 0.0), rate=rate)

    def start(self, hop: float, size: int) -> float:
        """Seconds that every collective takes on top of its steps: n - 1 for a gather among n
        devices, 1 for a hop."""
        mesh = Mesh(self.mesh.devices.reshape(-1, size), ("node", "device"))
        axis = Axis(("device",), size)

        def run(x: Any) -> Any:
            for _ in range(_CHAIN):
                # One row of the gathered ones, so that the next gather has an input of its size.
                x = jax.lax.optimization_barrier(gather(x, axis, 0)[:1])
            return x

        gathered = self.time(run, (1, SMALL // 4), dtype="float32", mesh=mesh) / _CHAIN
        step = (gathered - hop) / (size - 2)
        return min(max(hop - step, 0.0), hop)

    def _hop(self, pairs: Pairs, size: int) -> float:
        """Seconds of a message of so many bytes, in the middle of several of them."""
        axis = Axis(("device",), self.mesh.size)
        count = _CHAIN if size == SMALL else _LARGE_CHAIN

        def run(x: Any) -> Any:
            for _ in range(count):
                x = jax.lax.optimization_barrier(permute(x, axis, list(pairs)))
            return x

        return self.time(run, (1, size // 4), dtype="float32") / count

    def time(
        self, function: Callable[..., Any], *shapes: Any, dtype: Any, mesh: Mesh | None = None
    ) -> float:
        """Seconds of a function of arrays of such shapes, on all devices at the same time."""
        mesh = mesh or self.mesh
        spec, count = PartitionSpec(mesh.axis_names), mesh.size
        ones = jax.jit(
            lambda: tuple(jnp.ones((count * x, *rest), dtype) for x, *rest in shapes),
            out_shardings=NamedSharding(mesh, spec),
        )()
        mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return self.agreed(timed(jax.jit(mapped), *ones))

    def agreed(self, number: float, choose: Callable[..., Any] = np.max) -> float:
        """A number that all processes have: the largest of theirs, or another choice."""
        if jax.process_count() == 1:
            return number
        return float(choose(multihost_utils.process_allgather(np.float32(number))))


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds of a call, the median of several, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _kernels(links: Probe, head_dim: int, itemsize: int, causal: bool) -> Gpu:
    """What attention, matrix products and the memory of a device do, on all devices at once."""
    device = links.mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    dtype = "bfloat16" if itemsize == 2 else "float32"
    products = _product_rate(links, dtype, is_cpu)
    memory_rate = _memory_rate(links, is_cpu)
    rates = _attention_rates(links, head_dim, dtype, is_cpu, causal)
    known = known_gpu(device)
    single = known.single_speed if known is not None and itemsize == 4 else 1.0
    memory = known.memory_bytes if known is not None else memory_of(device)
    # Of an unknown device, what its matrix products reach stands for the peak.
    peak = known.peak_flops * single if known is not None else products
    return Gpu(
        name=re.sub(r"\W+", "_", device.device_kind) if known is None else known.name,
        peak_flops=peak / single,
        # In whole MiB, which a float32 holds.
        memory_bytes=int(links.agreed(memory >> 20, np.min)) << 20,
        memory_rate=memory_rate,
        inside_rate=math.inf,
        host_rate=memory_rate if is_cpu else (known or GPUS["a100_40"]).host_rate,
        attention={head_dim: {1: (rates[0] / peak, rates[1] / peak)}},
        matrix_efficiency=products / peak,
        single_speed=single,
    )


def jax_share() -> float:
    """Share of the memory of a GPU that jax takes, by its variable or by the newer name of it."""
    return float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get(SHARE) or 0.75)


def memory_of(device: Any) -> int:
    """Bytes of memory of a device, of which jax takes a share."""
    own = jax.local_devices()[0]
    stats = own.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] / jax_share())
    # Simulated devices share the memory of the machine.
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // jax.local_device_count()


def _product_rate(links: Probe, dtype: str, is_cpu: bool) -> float:
    """FLOP/s in a gated MLP with its norm and its sum, as layers have it."""
    tokens, width, hidden = (128, 256, 512) if is_cpu else (8192, 4096, 11_008)

    def layer(x: Any, up: Any, gate: Any, down: Any) -> Any:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + 1e-6)
        y = y.astype(x.dtype)
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down

    shapes = ((tokens, width), (width, hidden), (width, hidden), (hidden, width))
    return 6 * tokens * width * hidden / links.time(layer, *shapes, dtype=dtype)


def _memory_rate(links: Probe, is_cpu: bool) -> float:
    """Bytes/s that a device reads from its memory and writes to it."""
    elements = 1 << (20 if is_cpu else 27)
    return 2 * 4 * elements / links.time(lambda x: x + 1, (elements,), dtype="float32")


def _attention_rates(
    links: Probe, head_dim: int, dtype: str, is_cpu: bool, causal: bool
) -> tuple[float, float]:
    """FLOP/s of the attention of this package on one device, forward and backward."""
    count = links.mesh.size
    tokens, heads = (512, 2) if is_cpu else (16_384, 8)
    # Each device has a sequence of its own.
    mesh = make_mesh(Degrees(data=count), devices=list(links.mesh.devices.flat), axis_type="auto")
    attention = Attention(mesh, causal=causal)
    shape, sharding = (count, tokens, heads, head_dim), NamedSharding(mesh, attention.sequence_spec)
    x = jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()

    def total(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(attention(query, key, value).astype(jnp.float32))

    flops = 4 * tokens**2 * heads * head_dim / (2 if causal else 1)
    forward = links.agreed(timed(jax.jit(attention), x, x, x))
    # The gradient computes the forward pass too.
    both = links.agreed(timed(jax.jit(jax.grad(total, argnums=(0, 1, 2))), x, x, x))
    return flops / forward, BACKWARD_FLOPS * flops / max(both - forward, forward)
