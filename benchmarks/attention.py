"""Times forward + backward of every scheme on simulated CPU devices, beside two baselines.

    python benchmarks/attention.py                      # 8 devices, 16K tokens, causal
    python benchmarks/attention.py --seq-len 32768 --kv-heads 1 --full

Each row is one setting of the mesh degrees. Rows are timed in turn, several times over, and the
median is printed, so that all of them meet the same load of the machine. The columns:

    ms        median wall time of one forward + backward
    GFLOP/s   useful work (visible pairs only) over that time, all devices together
    temp MiB  temporary memory of one device, from the compiled program, scheduled for least memory
    balance   block work of the busiest device over the mean, counted in tiles

The baselines are the package `ringattention` 0.1.2, if it is installed, and a plain matrix product.
No accelerator is needed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import re
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from startrail_jax.blocks import xla
from startrail_jax.blocks.tiles import visible_tiles
from startrail_jax.rings.sizes import check_heads


@dataclass
class Row:
    """One line of the table."""

    name: str
    step: Callable[..., Any]
    inputs: tuple[jax.Array, ...]
    temp_bytes: int
    flops: float
    balance: float | None = None
    seconds: list[float] = field(default_factory=list)

    def line(self) -> str:
        seconds = statistics.median(self.seconds)
        balance = f"{self.balance:9.3f}" if self.balance else f"{'-':>9}"
        return (
            f"{self.name:<44}{1e3 * seconds:10.0f}{self.flops / seconds / 1e9:10.1f}"
            f"{self.temp_bytes / 2**20:10.1f}{balance}"
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
        f"batch {args.batch}, {args.seq_len} tokens, {args.heads} heads ({args.kv_heads} key heads)"
        f" of {args.head_dim}, {args.dtype}, {'causal' if args.causal else 'full'}"
    )
    rows = [ours(args, name, attention) for name, attention in settings(args)]
    rows += ringattention(args)
    products = matrix_product()
    print(f"compiled; timing {args.repeats} rounds of {len(rows)} rows", flush=True)
    for _ in range(args.repeats):
        for row in rows:
            row.seconds.append(seconds_of(row.step, *row.inputs))
        products.seconds.append(seconds_of(products.step, *products.inputs))
    print(f"{'':<44}{'ms':>10}{'GFLOP/s':>10}{'temp MiB':>10}{'balance':>9}")
    for row in [*rows, products]:
        print(row.line())


def settings(args: argparse.Namespace) -> list[tuple[str, st.Attention]]:
    """Every row of the scheme table that the devices and heads allow."""
    n, degrees = args.devices, st.Degrees
    table = [
        ("Ring Attention", lambda: degrees.ring_attention(n)),
        ("all-gather", lambda: degrees.all_gather(n)),
        ("Ulysses", lambda: degrees.ulysses(n)),
        ("LoongTrain, head 2", lambda: degrees.loongtrain(n, head=2)),
        ("LoongTrain, head 4", lambda: degrees.loongtrain(n, head=4)),
        ("StarTrail, C 2", lambda: degrees.startrail(n, c=2)),
        ("team 2, group 1", lambda: degrees(team=2, ring=n // 2)),
        ("team 4, group 1", lambda: degrees(team=4, ring=n // 4)),
        ("2-D tiles, team 2", lambda: degrees(team=2, group=n // 2)),
        ("StarTrail x Ulysses, C 2, head 2", lambda: degrees.startrail(n, c=2, head=2)),
    ]
    options = {"causal": args.causal, "layout": "zigzag" if args.causal else "contiguous"}
    rows = []
    for name, build in table:
        if not re.search(args.rows, name):
            continue
        try:
            attention = st.Attention(st.make_mesh(build()), **options)
            check_heads(attention.degrees, args.heads, args.kv_heads)
        except ValueError as error:
            print(f"left out: {name}: {error}")
            continue
        rows.append((name, attention))
        if name == "StarTrail, C 2":
            published = st.Attention(attention.mesh, published=True, **options)
            rows.append((f"{name}, as published", published))
    return rows


def ours(args: argparse.Namespace, name: str, attention: st.Attention) -> Row:
    """A setting of the mesh degrees."""
    specs = [attention.query_spec(args.heads)] + 2 * [attention.key_spec(args.kv_heads)]
    inputs = random_inputs(args, attention.mesh, specs)
    return compiled_row(name, args, attention, inputs, balance(args, attention))


def balance(args: argparse.Namespace, attention: st.Attention) -> float:
    """Tiles visited by the busiest device, over the mean."""
    degrees, schedule = attention.degrees, attention.schedule
    shard = args.seq_len // degrees.sequence
    work = []
    ring, group, team = (range(x) for x in (degrees.ring, degrees.group, degrees.team))
    for device in itertools.product(ring, group, team):
        visited = 0
        for distance in range(attention.num_rounds(args.seq_len)):
            mask = schedule.visibility(args.seq_len, device, keys_behind=distance)
            query, key = xla.tilings(
                mask,
                shard * schedule.query_ranks,
                shard * schedule.key_ranks,
                args.heads // args.kv_heads,
            )
            visited += int(visible_tiles(mask, query, key).sum())
        work.append(visited)
    return max(work) / statistics.mean(work)


def ringattention(args: argparse.Namespace) -> list[Row]:
    """The package `ringattention` 0.1.2, by the authors of Ring Attention, in three chunk sizes."""
    # Its import needs jax.lib.xla_bridge, which current jax no longer has.
    bridge = types.SimpleNamespace(get_backend=lambda: types.SimpleNamespace(platform="cpu"))
    jax.lib.__dict__.setdefault("xla_bridge", bridge)
    try:
        package = importlib.import_module("ringattention")
    except ImportError as error:
        print(
            f"left out: ringattention: {error}. Install it with: pip install ringattention==0.1.2"
        )
        return []
    mesh = jax.make_mesh((args.devices,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "ring")

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, *, chunk: int) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        blockwise = dict(
            causal_block_size=1 if args.causal else None, deterministic=True, dropout_rng=None,
            attn_pdrop=0.0, query_chunk_size=chunk, key_chunk_size=chunk,
            dtype=jnp.dtype(args.dtype), policy=jax.checkpoint_policies.nothing_saveable,
            precision=None, prevent_cse=False,
        )  # fmt: skip
        return package.ringattention(q, k, v, None, None, None, "ring", True, blockwise)

    rows = []
    for chunk in (256, 512, 1024):
        attend = jax.shard_map(
            functools.partial(on_device, chunk=min(chunk, args.seq_len // args.devices)),
            mesh=mesh, in_specs=3 * (spec,), out_specs=spec, check_vma=False,
        )  # fmt: skip
        name = f"ringattention 0.1.2, chunks of {chunk}"
        if not re.search(args.rows, name):
            continue
        inputs = random_inputs(args, mesh, 3 * [spec])
        rows.append(compiled_row(name, args, attend, inputs))
    return rows


def matrix_product() -> Row:
    """The most that the machine can do: a plain matrix product in float32, on one device."""
    size = 2048
    x = jnp.ones((size, size), jnp.float32)
    step = jax.jit(jnp.matmul)
    step(x, x).block_until_ready()
    return Row(f"matrix product, {size} x {size}, one device", step, (x, x), 0, 2.0 * size**3)


def compiled_row(
    name: str,
    args: argparse.Namespace,
    attend: Callable[..., jax.Array],
    inputs: tuple[jax.Array, ...],
    balance: float | None = None,
) -> Row:
    """Compiles forward + backward of `attend` on inputs (q, k, v, dout)."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(dout)

    compiled = jax.jit(step).lower(*inputs).compile()
    pairs = args.seq_len**2 / (2 if args.causal else 1)
    flops = 7 * 2 * args.batch * args.heads * args.head_dim * pairs
    memory: Any = compiled.memory_analysis()
    return Row(name, compiled, inputs, memory.temp_size_in_bytes, flops, balance)


def random_inputs(args: argparse.Namespace, mesh: Any, specs: list[P]) -> tuple[jax.Array, ...]:
    """Normal q, k, v and dout."""
    rng = np.random.default_rng(0)
    return tuple(
        jax.device_put(
            rng.normal(size=(args.batch, args.seq_len, heads, args.head_dim)).astype(args.dtype),
            NamedSharding(mesh, spec),
        )
        for heads, spec in zip(
            (args.heads, args.kv_heads, args.kv_heads, args.heads), [*specs, specs[0]], strict=True
        )
    )


def seconds_of(step: Callable[..., Any], *inputs: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*inputs))
    return time.perf_counter() - start


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="simulated devices")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens, over all devices")
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=None, help="key heads; as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--full", dest="causal", action="store_false", help="no causal mask")
    parser.add_argument("--rows", default="", help="regular expression: only the rows it finds")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    return args


if __name__ == "__main__":
    sys.exit(main())
