"""The degrees of parallelism of a run whose flags leave some of them open."""

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
from startrail_jax.traffic.ports import cheapest_order, messages
from startrail_jax.traffic.settings import all_degrees
from trainer.config import OPEN, MeshConfig


def choose_degrees(
    mesh: MeshConfig,
    num_devices: int,
    call: Mapping[str, Any],
    *,
    nodes: Sequence[int] | None = None,
    platform: str | None = None,
) -> Degrees:
    """Fills in the degrees that `mesh` leaves open, so that their product is the number of devices.

    The fewest bytes decide: on several nodes through the busiest port of a node, and then per
    device. Where group and ring cost the same, several nodes get the smallest group, because the
    messages of a ring travel beside kernels. One node, where no port is shared, gets the shortest
    ring of at least 2, which needs the fewest kernel calls.

    `call` is `TrainConfig.attention_call`, and `nodes` the node of each device (None if they share
    one). On the platform "cpu" gloo divides collectives into messages, and otherwise NCCL.
    """
    given = _given(mesh)
    settings = list(all_degrees(num_devices, roles=OPEN, given=given))
    if not settings:
        raise _misfit(mesh, num_devices)
    several = nodes is not None and len(set(nodes)) > 1
    try:
        costs = {degrees: _bytes(degrees, call, mesh, nodes, platform) for degrees in settings}
    except InputError:
        # Heads that `head` and `tensor` cannot split: the program refuses them in every setting.
        return settings[0]
    tie = (lambda d: d.group) if several else (lambda d: (d.ring == 1, d.ring))
    return min(settings, key=lambda degrees: (costs[degrees], tie(degrees)))


def keep_degrees(
    mesh: MeshConfig,
    num_devices: int,
    former: Mapping[str, int] | None,
    *,
    planned: bool = False,
) -> Degrees | None:
    """The degrees of a run that goes on, if they fit the flags; None if they must be chosen. With
    `planned`, the planner chose `former`, so that degrees of 1 may be open."""
    if former is None:
        return None
    given = mesh.given_to_plan if planned else _given(mesh)
    fits = given.items() <= former.items() and math.prod(former.values()) == num_devices
    return Degrees(**former) if fits and set(former) == set(mesh.degrees) else None


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


def _given(mesh: MeshConfig) -> dict[str, int]:
    """The degrees that are given."""
    return {name: degree for name, degree in mesh.degrees.items() if degree is not None}


def _bytes(
    degrees: Degrees,
    call: Mapping[str, Any],
    mesh: MeshConfig,
    nodes: Sequence[int] | None,
    platform: str | None,
) -> tuple[int, int]:
    """Bytes through the busiest port of a node, and bytes that a device receives."""
    sent = transfers(degrees, call)
    received = sum(transfer.received_bytes for transfer in sent)
    if nodes is None or len(set(nodes)) == 1:
        return 0, received
    divided = algorithms(platform)
    order = given_order(mesh) or cheapest_order(degrees, nodes, [sent], divided)
    through = messages(degrees, sent, divided).through(node_grid(degrees, order, nodes).ravel())
    return through.port_bytes, received


def algorithms(platform: str | None) -> Mapping[str, Algorithm]:
    """How the devices of a platform divide collectives into messages."""
    return GLOO if platform == "cpu" else NCCL


def transfers(degrees: Degrees, call: Mapping[str, Any]) -> tuple[Transfer, ...]:
    """What a device receives in attention: in one layer, or in all of them where they differ."""
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
    given = {"team": 1, "group": 1} | _given(mesh)
    sizes = {name: given[name] for name in mesh.degrees if name in given}
    product = math.prod(sizes.values())
    must, use = "divide", "Change a degree, or use"
    if mesh.ring is not None:
        must = "be"
        if num_devices % (product // mesh.ring) == 0:
            use = "Leave out --mesh.ring, or use"
    elif mesh.c is not None and num_devices % (product // mesh.c) == 0:
        use = f"Use --mesh.team {mesh.c} in place of --mesh.c {mesh.c}, or"
    return InputError(
        f"The product of the mesh degrees must {must} the number of devices; got "
        f"{' * '.join(f'{name}={degree}' for name, degree in sizes.items())} = {product} for "
        f"{num_devices} devices. {use} --devices {product}."
    )
