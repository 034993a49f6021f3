"""The splits of a mesh into sets of devices that share a row, for batches of whole documents.

All splits have the same order of devices, and weights are sharded over all devices: a document that
fits on one device is attended there, and no weight moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from startrail_jax.attention import Attention
from startrail_jax.devices.axes import device_kind
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Degrees
from startrail_jax.devices.nodes import mesh_nodes, slowest_first
from startrail_jax.errors import InputError
from startrail_jax.traffic.ports import messages
from startrail_jax.traffic.settings import legal_degrees
from trainer.config import TrainConfig
from trainer.data.parts import DeviceSplit, Parts
from trainer.objective import Objective
from trainer.parallel.checks import kinds_of_keys, kv_heads_of
from trainer.parallel.degrees import algorithms, transfers


def make_parts(
    config: TrainConfig, attention: Attention, objective: Objective
) -> tuple[Parts, tuple[Attention, ...]]:
    """Makes the division of batches of whole documents, and the attention of each split.

    The longest document takes all devices along the sequence, with the degrees of the mesh. For
    each smaller number that divides the devices there is one split: the one with the fewest bytes
    through the busiest port of a node and, among equals, the fewest bytes received by a device.
    """
    mesh: Any = attention.mesh
    # Neighbours in this order are in one node. Axes of degree 1 are in no spec.
    names = tuple(x for x in slowest_first(mesh) if x != "tensor" and mesh.shape[x] > 1)
    devices = math.prod(mesh.shape[name] for name in names)
    longest = attention.degrees.sequence
    share = attention.layout.padded_length(config.num_tokens) // longest
    dims = [mesh.axis_names.index(name) for name in names]
    nodes = np.moveaxis(mesh_nodes(mesh, config.mesh.devices_per_node), dims, range(len(dims)))
    splits, attentions = [], []
    for c in range(1, longest + 1):
        if devices % c:
            continue
        if c == longest:
            of_split, places = attention, _places(attention, names)
        else:
            degrees = _degrees(nodes.reshape(devices // c, -1), c * share, config, attention)
            layout_name = attention.layout.kind
            of_split = dataclasses.replace(
                attention, axis=names, degrees=degrees, axis_names=None, layout=layout_name
            )
            places = tuple((place // c, place % c) for place in range(devices))
        splits.append(DeviceSplit(of_split.layout, places))
        attentions.append(of_split)
    parts = Parts(
        splits=tuple(splits),
        share=share,
        most=config.batch_size // attention.degrees.data,
        sharding=NamedSharding(mesh, PartitionSpec(None, names)),
        cost=objective.sizes.document_cost,
        draw=config.documents_drawn or 1,
    )
    return parts, tuple(attentions)


def check_parts(config: TrainConfig, degrees: Degrees) -> None:
    """Raises if a setting does not work with batches of whole documents."""
    if config.gradient_accumulation > 1:
        raise InputError(
            "Parts of a batch of whole documents are processed one after another already; got "
            f"gradient_accumulation={config.gradient_accumulation} with data.batches='documents'. "
            "Leave it out."
        )
    if config.attention.inner > 1:
        raise InputError(
            "attention.inner divides the ring of all rows, and documents are on rings of several "
            f"sizes; got inner={config.attention.inner} with data.batches='documents'. Leave one "
            "of them out."
        )
    # Devices along `tensor` share latents as they are.
    heads = [x.heads for x in kinds_of_keys(config.model) if x.latent_dim is None]
    shared = [x for x in heads if x % degrees.tensor]
    if shared:
        raise InputError(
            "With data.batches='documents', mesh.tensor must divide the key heads; got "
            f"tensor={degrees.tensor}, kv_heads={shared[0]}. Use a smaller "
            "--mesh.tensor, or --data.batches rows."
        )


def _places(attention: Attention, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The row and the rank of each device in the split of the mesh itself, in the order of axes."""
    mesh: Any = attention.mesh
    sizes = {role: mesh.shape[role] for role in ("data", *SEQUENCE_ROLES)}
    index = dict(zip(names, np.indices([sizes[name] for name in names]), strict=True))
    nothing = np.zeros([sizes[name] for name in names], int)
    rank = nothing
    for role in SEQUENCE_ROLES:
        rank = rank * sizes[role] + index.get(role, nothing)
    rows = index.get("data", nothing)
    return tuple(zip(rows.ravel().tolist(), rank.ravel().tolist(), strict=True))


def _degrees(nodes: np.ndarray, seq_len: int, config: TrainConfig, attention: Attention) -> Degrees:
    """The degrees of a split with the fewest bytes, among the degrees that the heads allow."""
    chunks, tensor = config.attention.head_chunks, attention.degrees.tensor
    heads = kv_heads_of(config.model)
    # Rows whose devices lie alike on nodes send alike.
    places = {tuple(np.unique(row, return_inverse=True)[1].tolist()) for row in nodes}
    divided = algorithms(device_kind(attention.mesh)[0])
    call = {**config.attention_call, "seq_len": seq_len}
    sizes = {name: call[name] for name in ("heads", "kv_heads", "causal", "layout", "seq_len")}
    options: Any = {"given": {"tensor": tensor}, "batch": 1, **sizes}
    legal = [legal_degrees(nodes.shape[1], **{**options, "kv_heads": x}) for x in heads]
    settings = [
        degrees
        for degrees in legal[0]
        if all(degrees in others for others in legal[1:])
        and all(max(x // (degrees.head * degrees.tensor), 1) % chunks == 0 for x in heads)
    ]

    def received(degrees: Degrees) -> tuple[int, int, bool, int]:
        sent = transfers(degrees, call)
        traffic = messages(degrees, sent, divided)
        port = max(traffic.through(place).port_bytes for place in places)
        return port, sum(x.received_bytes for x in sent), degrees.ring == 1, degrees.ring

    return dataclasses.replace(min(settings, key=received), data=len(nodes))
