"""Times forward + backward of every scheme on simulated CPU devices, beside two baselines.

    python benchmarks/attention.py                      # 8 devices, 16K tokens, causal
    python benchmarks/attention.py --seq-len 32768 --kv-heads 1 --schemes ring head-2 startrail-2

Each row is a scheme (`schemes.py`). Rows are timed in turn, several times over, and the median is
printed, so that all of them meet the same load of the machine. The columns:

    ms        median wall time of one forward + backward
    GFLOP/s   useful work (visible pairs only) over that time, all devices together
    temp MiB  temporary memory of one device, from the compiled program, scheduled for least memory

The baselines are the package `ringattention` 0.1.2, if it is installed, and a plain matrix product.
No accelerator is needed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import statistics
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from benchmarks.schemes import HELP, Scheme, read_scheme

CHUNKS = (256, 512)
"""Chunk sizes of the package `ringattention`; larger ones are slower."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    step: Callable[..., Any]
    inputs: tuple[jax.Array, ...]
    flops: float
    temp_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def line(self) -> str:
        seconds = statistics.median(self.seconds)
        return (
            f"{self.name:<44}{1e3 * seconds:10.0f}{self.flops / seconds / 1e9:10.1f}"
            f"{self.temp_bytes / 2**20:10.1f}"
        )


def main() -> None:
    args = parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    # XLA's default schedule on CPU sets up every buffer as early as it can, and so shows what it
    # hoisted and not what an algorithm needs. GPUs have no such schedule. The same for all rows.
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    print(
        f"{args.devices} simulated devices on {os.cpu_count()} CPU cores, jax {jax.__version__}; "
        f"{args.seq_len} tokens, {args.heads} heads ({args.kv_heads} key heads) of "
        f"{args.head_dim}, float32, {'causal' if args.causal else 'full'}"
    )
    rows = [ours(args, read_scheme(name, args.devices)) for name in args.schemes]
    rows += [*ringattention(args), matrix_product()]
    print(f"compiled; timing {args.repeats} rounds of {len(rows)} rows", flush=True)
    for _, row in itertools.product(range(args.repeats), rows):
        start = time.perf_counter()
        jax.block_until_ready(row.step(*row.inputs))
        row.seconds.append(time.perf_counter() - start)
    print(f"{'':<44}{'ms':>10}{'GFLOP/s':>10}{'temp MiB':>10}")
    for row in rows:
        print(row.line())


def ours(args: argparse.Namespace, scheme: Scheme) -> Row:
    """A setting of the mesh degrees."""
    attention = st.Attention(
        st.make_mesh(scheme.degrees),
        causal=args.causal,
        layout="zigzag" if args.causal else "contiguous",
        **scheme.options,
    )
    query, key = attention.query_spec(args.heads), attention.key_spec(args.kv_heads)
    return compiled_row(scheme.name, args, attention, attention.mesh, query, key)


def ringattention(args: argparse.Namespace) -> Iterator[Row]:
    """The package `ringattention` 0.1.2, by the authors of Ring Attention."""
    # Its import needs jax.lib.xla_bridge, which current jax no longer has.
    bridge = types.SimpleNamespace(get_backend=lambda: types.SimpleNamespace(platform="cpu"))
    jax.lib.__dict__.setdefault("xla_bridge", bridge)
    try:
        package = importlib.import_module("ringattention")
    except ImportError as error:
        print(f"left out: {error}. Install it with: pip install ringattention==0.1.2")
        return
    mesh = jax.make_mesh((args.devices,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "ring")

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, *, chunk: int) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        blockwise = dict(
            causal_block_size=1 if args.causal else None, deterministic=True, dropout_rng=None,
            attn_pdrop=0.0, query_chunk_size=chunk, key_chunk_size=chunk, dtype=jnp.float32,
            policy=jax.checkpoint_policies.nothing_saveable, precision=None, prevent_cse=False,
        )  # fmt: skip
        return package.ringattention(q, k, v, None, None, None, "ring", True, blockwise)

    for chunk in CHUNKS:
        attend = jax.shard_map(
            functools.partial(on_device, chunk=min(chunk, args.seq_len // args.devices)),
            mesh=mesh, in_specs=3 * (spec,), out_specs=spec, check_vma=False,
        )  # fmt: skip
        name = f"ringattention 0.1.2, chunks of {chunk}"
        yield compiled_row(name, args, attend, mesh, spec, spec)


def matrix_product() -> Row:
    """The most that the machine can do: a plain matrix product in float32, on one device."""
    size = 2048
    x = jnp.ones((size, size), jnp.float32)
    step = jax.jit(jnp.matmul).lower(x, x).compile()
    return Row(f"matrix product, {size} x {size}, one device", step, (x, x), 2.0 * size**3)


def compiled_row(
    name: str, args: argparse.Namespace, attend: Callable[..., Any], mesh: Any, query: P, key: P
) -> Row:
    """Compiles forward + backward of `attend` on normal q, k, v and dout of these shardings."""
    rng = np.random.default_rng(0)

    def normal(heads: int, spec: P) -> jax.Array:
        shape = 1, args.seq_len, heads, args.head_dim
        return jax.device_put(rng.normal(size=shape).astype("float32"), NamedSharding(mesh, spec))

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(dout)

    sharded = ((args.heads, query), (args.kv_heads, key), (args.kv_heads, key), (args.heads, query))
    inputs = tuple(normal(*x) for x in sharded)
    compiled = jax.jit(step).lower(*inputs).compile()
    pairs = args.seq_len**2 / (2 if args.causal else 1)
    flops = 7 * 2 * args.heads * args.head_dim * pairs
    memory: Any = compiled.memory_analysis()
    return Row(name, compiled, inputs, flops, memory.temp_size_in_bytes)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="simulated devices")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens, over all devices")
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=None, help="key heads; as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--full", dest="causal", action="store_false", help="no causal mask")
    schemes = ["ring", "startrail-2", "published-2"]
    parser.add_argument("--schemes", nargs="+", default=schemes, help=f"what to time: {HELP}")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    return args


if __name__ == "__main__":
    main()
