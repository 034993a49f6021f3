"""Degrees of parallelism that the flags of a run leave open, and the order of the axes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from startrail_jax import masks
from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.devices.nodes import crossing, node_grid, resolve_order
from startrail_jax.errors import InputError
from startrail_jax.rings.transfers import Transfer
from startrail_jax.tokens.layout import Layout
from startrail_jax.traffic.algorithms import GLOO, NCCL, Algorithm
from startrail_jax.traffic.cost import communication
from startrail_jax.traffic.ports import cheapest_order
from trainer.config import SEQUENCE_ROLES, MeshConfig
from trainer.run.folder import FormerMesh


def default_degrees(
    mesh: MeshConfig,
    num_devices: int,
    call: Mapping[str, Any],
    *,
    devices_per_node: int | None = None,
    data: int = 1,
    head_chunks: int = 1,
) -> Degrees:
    """Fills in the degrees that `mesh` leaves open, so that their product is the number of devices.

    If flags give none of team, group, ring and head, it is StarTrail with `mesh.default_c`, where
    the devices allow that, or `Degrees.recommended`. If they give some, the others are 1, and what
    is left over is the ring; or the team, if the ring is given.

    Args:
        mesh: the flags.
        num_devices: all devices.
        call: `TrainConfig.attention_call`.
        devices_per_node: devices of a node; all by default.
        data: number of shards of the batch, if `mesh` leaves it open.
        head_chunks: parts of the key heads of a device, which `head` must leave to it.

    Raises:
        ValueError: if no degrees have that product.
    """
    data, tensor = mesh.data or data, mesh.tensor or 1
    sequence, left_over = divmod(num_devices, data * tensor)
    if left_over:
        raise _misfit(mesh, num_devices)
    if mesh.follows_rule:
        if mesh.default_c is not None and sequence % mesh.default_c**2 == 0:
            return Degrees.startrail(sequence, c=mesh.default_c, data=data, tensor=tensor)
        # Devices make the keys of the heads that they have: with `head`, they make fewer.
        of_latents = call.get("latent_dim") is not None
        kv_heads = call["heads"] if of_latents else call["kv_heads"]
        return Degrees.recommended(
            num_devices,
            heads=call["heads"],
            kv_heads=max(kv_heads // head_chunks, 1),
            devices_per_node=devices_per_node,
            # With these, devices may share a key head, which then has no parts.
            fast_ports=mesh.fast_ports and head_chunks == 1,
            data=data,
            tensor=tensor,
        )
    sizes = {role: mesh.degrees[role] for role in SEQUENCE_ROLES}
    product = math.prod(size or 1 for size in sizes.values())
    open_role = next((role for role in ("ring", "team", "group") if sizes[role] is None), None)
    if sequence % product or (open_role is None and sequence != product):
        raise _misfit(mesh, num_devices)
    if open_role is not None:
        sizes[open_role] = sequence // product
    return Degrees(data=data, tensor=tensor, **{role: size or 1 for role, size in sizes.items()})


def keep_degrees(mesh: MeshConfig, num_devices: int, former: FormerMesh | None) -> Degrees | None:
    """The degrees of a run that goes on, if they fit the flags; None if they must be chosen."""
    if former is None:
        return None
    fits = mesh.given.items() <= former.degrees.items()
    fits &= math.prod(former.degrees.values()) == num_devices
    return Degrees(**former.degrees) if fits and set(former.degrees) == set(ROLES) else None


def choose_order(
    mesh: MeshConfig,
    degrees: Degrees,
    nodes: Sequence[int],
    call: Mapping[str, Any],
    platform: str | None = None,
) -> tuple[str, ...]:
    """The order of the axes over the nodes, slowest first: the given one, or the default one.
    `call` is `TrainConfig.attention_call`."""
    if given := given_order(mesh):
        return given
    if len(set(nodes)) == 1:
        return ROLES
    sent = transfers(degrees, call)
    return cheapest_order(degrees, nodes, [sent], algorithms(platform))


def describe_nodes(degrees: Degrees, order: Sequence[str], nodes: Sequence[int]) -> str:
    """The order of the axes, and which of them go from node to node, for the log."""
    sizes = " or ".join(str(size) for size in sorted(set(Counter(nodes).values())))
    axes = [role for role in order if getattr(degrees, role) > 1]
    across = crossing(node_grid(degrees, order, nodes))
    named = {
        "axes from slow to fast": axes,
        "across nodes": across,
        "inside": [role for role in axes if role not in across],
    }
    parts = (f"{name}: {', '.join(roles) or 'none'}" for name, roles in named.items())
    return "; ".join([f"{len(set(nodes))} of {sizes} devices", *parts])


def given_order(mesh: MeshConfig) -> tuple[str, ...] | None:
    """The order of the axes that flags give, slowest first; None if they give none."""
    if mesh.order is None:
        return None
    return resolve_order(mesh.order[0] if len(mesh.order) == 1 else mesh.order)


def algorithms(platform: str | None) -> Mapping[str, Algorithm]:
    """How the devices of a platform divide collectives into messages."""
    return GLOO if platform == "cpu" else NCCL


def transfers(degrees: Degrees, call: Mapping[str, Any]) -> tuple[Transfer, ...]:
    """What a device receives in attention: in one layer, or in all of them where they differ."""
    if kinds := call.get("kinds"):
        same = {name: x for name, x in call.items() if name != "kinds"}
        return tuple(sent for kind in kinds for sent in transfers(degrees, {**same, **kind}))
    options = {"batch": degrees.data, "seq_len": 2 * degrees.sequence, **call}
    windows = options.pop("windows", None)
    if windows is None:
        return communication(degrees, **options).total.transfers
    layout = Layout.of(options.pop("layout"), degrees.sequence)
    # As rows are padded.
    options["seq_len"] = layout.padded_length(options["seq_len"])
    del options["causal"]
    sent: list[Transfer] = []
    for window, layers in windows.items():
        mask = masks.resolve(None, causal=True, window=window)
        layer = communication(degrees, **options, mask=mask, layout=layout).total
        sent += [x.times(layers) for x in layer.transfers]
    return tuple(sent)


def _misfit(mesh: MeshConfig, num_devices: int) -> InputError:
    """The error about degrees whose product does not fit the number of devices."""
    sizes = mesh.given
    product = math.prod(sizes.values())
    must, use = "divide", "Change a degree, or use"
    if mesh.ring is not None:
        if num_devices % (product // mesh.ring) == 0:
            use = "Leave out --mesh.ring, or use"
    elif mesh.c is not None and num_devices % (product // mesh.c) == 0:
        use = f"Use --mesh.team {mesh.c} in place of --mesh.c {mesh.c}, or"
    if all(sizes.get(role) for role in ("ring", "team", "group")):
        must = "be"
    return InputError(
        f"The product of the mesh degrees must {must} the number of devices; got "
        f"{' * '.join(f'{name}={degree}' for name, degree in sizes.items())} = {product} for "
        f"{num_devices} devices. {use} --devices {product}."
    )
