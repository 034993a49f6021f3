"""The mesh of a program: that of its run before, of a plan, of its flags, or of the rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

import startrail_jax as st
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError, UserError
from trainer.config import MeshConfig, TrainConfig
from trainer.objective import Objective
from trainer.parallel.abstract_step import AbstractStep, step_limit
from trainer.parallel.degrees import (
    choose_order,
    default_degrees,
    describe_nodes,
    keep_degrees,
)
from trainer.planner.here import known_gpu
from trainer.planning import Planner
from trainer.run.commands import command
from trainer.run.folder import MESH_FILE, FormerMesh
from trainer.run.settings import CONFIG_FILE
from trainer.task import Task


def choose_mesh(
    config: TrainConfig, devices: Sequence[Any], former: FormerMesh | None, task: Task[Any, Any]
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of a training run, and lines for the log. All processes must call it.

    A run that goes on keeps its mesh where that fits the flags. A new one has the mesh of
    `config.plan`, or the degrees of its flags. What these leave open is filled in: first `data`,
    whose rows cost no messages in attention, then the rest by `default_degrees`.
    """
    flags, call = config.mesh, config.attention_call
    before: list[str] = []
    if former is None and (config.run_dir / CONFIG_FILE).is_file():
        before.append(
            f"WARNING: {config.run_dir} holds a run without {MESH_FILE}: it was lost. The mesh "
            "below is chosen anew; give --mesh flags for the one with which the run began"
        )
    degrees = keep_degrees(flags, len(devices), former)
    order, after = former and former.order, ()
    if config.plan == "show" or (config.plan == "use" and degrees is None):
        plan = Planner(config, task).choose(devices)
        degrees, order, after = plan.degrees, plan.order, plan.description
    elif degrees is None:
        nodes, order = _devices_of_node(devices, flags), None
        # Simulated devices share a memory, which says nothing of GPUs.
        limit = None if devices[0].platform == "cpu" else step_limit(devices)
        objective = task.make_objective(config)
        degrees = new_degrees(config, objective, len(devices), devices_per_node=nodes, limit=limit)
        after = advice(config, degrees, devices, nodes)
    mesh, lines = place(degrees, order, devices, flags, call)
    return mesh, (*before, *lines, *after)


def mesh_of_flags(
    flags: MeshConfig,
    devices: Sequence[Any],
    former: FormerMesh | None,
    call: Mapping[str, Any],
    *,
    adapts: bool = False,
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of a program that does not train, and lines for the log: `choose_mesh` without a
    plan, and with one shard of the batch unless flags give more. With `adapts`, it is any mesh if
    that of the flags does not fit the devices."""
    degrees, order = keep_degrees(flags, len(devices), former), former and former.order
    if degrees is None:
        try:
            nodes, order = _devices_of_node(devices, flags), None
            degrees = default_degrees(flags, len(devices), call, devices_per_node=nodes)
        except InputError:
            if not adapts:
                raise
            mesh, lines = mesh_of_flags(MeshConfig(), devices, None, call)
            remark = f"the mesh of the run does not fit {len(devices)} devices: another is used"
            return mesh, (remark, *lines)
    return place(degrees, order, devices, flags, call)


def place(
    degrees: st.Degrees,
    order: Sequence[str] | None,
    devices: Sequence[Any],
    flags: MeshConfig,
    call: Mapping[str, Any],
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of some degrees, and lines for the log. Flags go before `order`, the order of the
    axes; without both, it is the one that sends the fewest bytes from node to node."""
    nodes = nodes_of(devices, flags.devices_per_node)
    if order is None or flags.order is not None:
        order = choose_order(flags, degrees, nodes, call, devices[0].platform)
    sizes = ", ".join(f"{name} {degree}" for name, degree in vars(degrees).items())
    lines = [f"mesh: {sizes}"]
    if flags.order or len(set(nodes)) > 1:
        lines.append(f"nodes: {describe_nodes(degrees, order, nodes)}")
    mesh = st.make_mesh(
        degrees,
        # The optimizer runs outside of `shard_map`, where the compiler shards it.
        axis_type="auto",
        devices=devices,
        order=tuple(order),
        devices_per_node=flags.devices_per_node,
    )
    return mesh, tuple(lines)


def _devices_of_node(devices: Sequence[Any], flags: MeshConfig) -> int:
    """Number of devices of a node; the smallest, if they differ."""
    return min(Counter(nodes_of(devices, flags.devices_per_node)).values())


def new_degrees(
    config: TrainConfig,
    objective: Objective,
    num_devices: int,
    *,
    devices_per_node: int | None = None,
    limit: int | None = None,
) -> st.Degrees:
    """The degrees of a run that neither goes on nor asks for a plan.

    `data` is the largest divisor of the batch and the devices with which a step surely fits in
    `limit` bytes of a device, by the closed form. It is 1 without a limit, for whole documents, and
    with Muon, whose products the closed form does not count.
    """

    def with_data(data: int) -> st.Degrees:
        return default_degrees(
            config.mesh,
            num_devices,
            config.attention_call,
            devices_per_node=devices_per_node,
            data=data,
            head_chunks=config.attention.head_chunks,
        )

    degrees = with_data(1)
    counted = not config.whole_documents and config.optimizer.kind != "muon"
    if limit is None or not counted or not config.mesh.leaves_data_open:
        return degrees
    rows = config.batch_size // config.gradient_accumulation
    most = math.gcd(rows, num_devices // degrees.tensor)
    shards = (with_data(data) for data in range(most, 1, -1) if most % data == 0)
    return next((x for x in shards if _fits(config, objective, x, limit)), degrees)


def _fits(config: TrainConfig, objective: Objective, degrees: st.Degrees, limit: int) -> bool:
    """True if a run can have these degrees, and a step surely fits the memory."""
    try:
        return AbstractStep.of_degrees(config, objective, degrees, limit).fits(limit)
    except UserError:
        return False


def advice(
    config: TrainConfig, degrees: st.Degrees, devices: Sequence[Any], devices_per_node: int
) -> tuple[str, ...]:
    """A line with the source of the degrees, and the command that ranks all of them."""
    if not config.mesh.follows_rule or len(devices) == 1:
        return ()
    gpu, nodes = known_gpu(devices[0]), -(-len(devices) // devices_per_node)
    flags = [f"--nodes {nodes}", f"--gpus-per-node {devices_per_node}"]
    flags.append(f"--gpu {'YOUR_GPU' if gpu is None else gpu.name}")
    flags += ["--port YOUR_PORT"] if nodes > 1 else []
    planner = command("plan.py", config.run_dir / CONFIG_FILE)
    c = config.mesh.default_c
    source = "by the rule of docs/planner.md"
    if c is not None and degrees.team == degrees.group == c:
        source = f"StarTrail, by --mesh.default-c {c}"
    return (f"default mesh: {source}; all meshes by time: {planner} {' '.join(flags)}",)
