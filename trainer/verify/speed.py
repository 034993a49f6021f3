"""Seconds of a step in three schemes, beside the planner's, and what attention waits for."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import startrail_jax as st
from models.config import GPTConfig
from models.parts.attention import keys_of
from startrail_jax.attention import Attention
from startrail_jax.devices.degrees import Degrees
from startrail_jax.devices.nodes import mesh_devices
from startrail_jax.errors import UserError
from startrail_jax.rings.work import visible_pairs
from trainer.config import MeshConfig
from trainer.mesh import place
from trainer.parallel.step import Program
from trainer.planner.hardware import Cluster
from trainer.planner.here import timed
from trainer.planner.search import Prediction
from trainer.planning import Planner
from trainer.processes import gather
from trainer.tasks import TASKS
from trainer.verify import ways
from trainer.verify.report import Check

_STEPS = 3


def speed(
    config: Any, program: Program, cluster: Cluster, cut: Sequence[str] = ()
) -> Iterator[Check]:
    """Seconds of a step of a config on three meshes: its own, Ring Attention, and the plan's.

    Args:
        config: a config that fits the devices: that of the run, or a part of it.
        program: that of the run.
        cluster: what `measure_cluster` has measured.
        cut: to what the config is cut, if it is not that of the run.
    """
    own = program.attention.degrees
    for name, degrees, order in _schemes(config, own, cluster):
        seconds = _seconds(config, program, degrees, order)
        planned = _planned(config, cluster, degrees)
        note = ", ".join(f"{x} {n}" for x, n in vars(degrees).items() if n > 1) or "one device"
        note += f"; cut to {', '.join(cut)}" if cut else ""
        if planned is not None:
            parts = config.gradient_accumulation
            predicted, waits = parts * planned.seconds, parts * planned.exposed_seconds
            note += f"; planned {predicted:.3g} s, of which {waits:.2g} s wait for messages"
            note += f"; {seconds / predicted:.2f} times the plan"
        yield Check(name=f"speed: a step, {name}", value=seconds, unit="s", note=note)
    if own.sequence > 1 and not config.whole_documents:
        yield _waits(config, program)


def _schemes(
    config: Any, own: Degrees, cluster: Cluster
) -> Iterator[tuple[str, Degrees, tuple[str, ...] | None]]:
    """The mesh of the run, and others that suit it, each once."""
    fixed = {"data": own.data, "tensor": own.tensor}
    found: dict[Degrees, tuple[str, tuple[str, ...] | None]] = {own: ("the run's mesh", None)}
    ring = Degrees(ring=own.sequence, **fixed)
    found.setdefault(ring, ("Ring Attention", None))
    planned = _planned(config, cluster)
    if planned is not None:
        # All processes take the choice of the first.
        degrees, order = gather([vars(planned.degrees), planned.order])[0]
        found.setdefault(Degrees(**degrees), ("the plan's mesh", tuple(order)))
    for degrees, (name, order) in found.items():
        yield name, degrees, order


def _planned(config: Any, cluster: Cluster, degrees: Degrees | None = None) -> Prediction | None:
    """The prediction of a mesh, or of the fastest one; None if the planner has none."""
    if config.whole_documents or config.optimizer.kind == "muon":
        return None
    given = {} if degrees is None else vars(degrees)
    asked = dataclasses.replace(config, mesh=MeshConfig(**given))
    if degrees is None and config.attention.inner > 1:
        return None
    try:
        return Planner(asked, TASKS[config.kind]).forecasts(cluster, 1)[0]
    except UserError:
        return None


def _seconds(
    config: Any, program: Program, degrees: Degrees, order: tuple[str, ...] | None
) -> float:
    """Median time of a step, of the slowest process, after one that does not count."""
    mesh: Any = program.attention.mesh
    own = program
    if degrees != program.attention.degrees:
        flags = MeshConfig(devices_per_node=config.mesh.devices_per_node)
        mesh, _ = place(degrees, order, mesh_devices(mesh), flags, config.attention_call)
    if degrees != program.attention.degrees or config is not program.config:
        inner = config.attention.inner if degrees.ring % config.attention.inner == 0 else 1
        attention = dataclasses.replace(config.attention, inner=inner)
        own = ways.program_of(dataclasses.replace(config, attention=attention), mesh)
    data = TASKS[config.kind].drawn_data(config, own.attention.layout)
    if config.whole_documents:
        batch, _ = ways.documents(own, data)
    else:
        batch = ways.rows(own, data, [n % len(data.train) for n in range(config.batch_size)])
    state = ways.random_state(own)
    step: Any = own.train_step
    compiled = step.lower(state, batch).compile()
    taken = []
    for _ in range(1 + _STEPS):
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - begin)
    return max(gather(statistics.median(taken[1:])))


def _waits(config: Any, program: Program) -> Check:
    """Share of the attention of a layer, both passes, in which its kernels wait: the same kernels
    without messages see as many pairs in rows of their own."""
    own, model = program.attention, config.model
    degrees, tensor = own.degrees, own.degrees.tensor
    dtype, length = model.dtype, own.layout.padded_length(config.num_tokens)
    rows = config.batch_size // config.gradient_accumulation
    alone_len = _as_many_pairs(own, length)
    devices: Any = own.mesh.devices  # pyright: ignore[reportAttributeAccessIssue]
    alone_mesh = st.make_mesh(
        Degrees(data=degrees.data * degrees.sequence, tensor=tensor),
        devices=devices.ravel().tolist(),
        axis_type="auto",
    )
    alone = dataclasses.replace(
        own, mesh=alone_mesh, degrees=None, layout="contiguous", inner=1, axis=None, axis_names=None
    )
    with_messages = _attention_seconds(own, rows, length, model, dtype)
    without = _attention_seconds(alone, rows * degrees.sequence, alone_len, model, dtype)
    return Check(
        name="speed: attention that waits",
        value=100 * max(0.0, 1 - without / with_messages),
        unit="%",
        note=f"{1e3 * with_messages:.3g} ms of a layer, both passes, and {1e3 * without:.3g} ms "
        "for as many pairs without messages",
    )


def _as_many_pairs(attention: Attention, length: int) -> int:
    """Tokens of a row in which as many pairs are seen as by a device of a row of `length`."""
    mask, devices = attention.resolved_mask, attention.degrees.sequence
    wanted = visible_pairs(mask, length) / devices
    low, high = 1, length
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if visible_pairs(mask, middle) < wanted else (low, middle)
    return low


def _attention_seconds(
    attention: Attention, rows: int, length: int, model: Any, dtype: str
) -> float:
    def ones(spec: Any, *shape: int) -> Any:
        sharding = NamedSharding(attention.mesh, spec)
        return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()

    def of_tokens(spec: Any, *shape: int) -> Any:
        return ones(spec, rows, length, *shape)

    queries = attention.query_spec(model.heads)
    keys = keys_of(model) if isinstance(model, GPTConfig) else {}
    if [*keys] == ["latent"]:
        attend: Any = attention.latent
        own, tokens = model.latent.of_model(model), attention.sequence_spec
        of_heads = PartitionSpec(None, queries[2], None)
        arrays = (
            of_tokens(queries, model.heads, own.key_dim + own.rotary_dim),
            of_tokens(tokens, own.rank),
            of_tokens(tokens, own.rotary_dim) if own.rotary_dim else None,
            *(ones(of_heads, own.rank, model.heads, x) for x in (own.key_dim, own.value_dim)),
        )
    else:
        attend = attention
        key = of_tokens(attention.key_spec(model.kv_heads), model.kv_heads, model.head_dim)
        arrays = of_tokens(queries, model.heads, model.head_dim), key, key

    def total(arrays: Any) -> Any:
        return jnp.sum(attend(*arrays).astype(jnp.float32))

    return max(gather(timed(jax.jit(jax.value_and_grad(total)), arrays)))
