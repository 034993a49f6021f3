"""The network traffic of one attention call, in closed form.

`communication` gives the bytes that one device receives in the forward and in the backward pass. In
float32 they equal the bytes that `startrail_jax.analysis.hlo` reads from the compiled program. For
narrower dtypes this holds only on accelerators: XLA's CPU backend sends them as float32.

References:
    StarTrail, https://arxiv.org/abs/2407.00611, equations 1-3. They leave out the first
    rearrangement of keys and values; it is counted here, also for the paper's schedule.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import ROLES, Degrees, check_degrees
from startrail_jax.devices.nodes import node_grid, nodes_of, resolve_order
from startrail_jax.errors import InputError
from startrail_jax.masks import Mask, resolve
from startrail_jax.rings.choices import choose, passes_of
from startrail_jax.rings.head_chunks import check_head_chunks
from startrail_jax.rings.options import OPTIONS, Options, Side
from startrail_jax.rings.schedule import check_mask_of_trees, for_trees, schedule_of
from startrail_jax.rings.sizes import Sizes, dtype_name, sizes_of_heads, traveller
from startrail_jax.rings.transfers import Transfer
from startrail_jax.tokens.layout import Layout
from startrail_jax.traffic import COLLECTIVES
from startrail_jax.traffic.ports import NodeTraffic, cheapest_order, messages

# Arguments of `communication` that are no properties of an attention call.
_SAID_BY_MESH = {"degrees", "order", "devices_per_node", "options"}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Network traffic of one pass, on the device that receives the most bytes."""

    transfers: tuple[Transfer, ...]
    """The steps that move bytes, in the order of the schedule."""
    unit_bytes: int
    """Bytes of one unit of traffic: one device's share of the query, at input width."""
    unit: str = "one device's share of the query"
    """Description of a unit."""
    nodes: NodeTraffic | None = None
    """Bytes through the ports of the nodes; None if the size of a node is not given."""

    @property
    def received_bytes(self) -> int:
        """All bytes, with lse, delta and segment ids."""
        return sum(transfer.received_bytes for transfer in self.transfers)

    @property
    def by_collective(self) -> dict[str, int]:
        """`received_bytes` split by kind of collective; a kind that is not used has 0."""
        split: dict[str, int] = {kind: 0 for kind in COLLECTIVES}
        for transfer in self.transfers:
            split[transfer.collective] += transfer.received_bytes
        return split

    @property
    def units(self) -> float:
        """Tensor bytes in units of traffic, without lse, delta and segment ids.

        A unit is (N/P tokens) x query heads x head_dim elements at input width, so that a float32
        gradient of a 16-bit query counts two.
        """
        return sum(transfer.tensor_bytes for transfer in self.transfers) / self.unit_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of lse, delta and segment ids: the part of `received_bytes` outside `units`."""
        return sum(transfer.row_bytes for transfer in self.transfers)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Network traffic of one attention call, on the device that receives the most bytes."""

    forward: Traffic
    """The forward pass."""
    backward: Traffic
    """The backward pass. It repeats the gathers of the forward pass unless they are kept, but not
    the head exchange."""
    total: Traffic
    """Both passes, with no part of the forward pass recomputed."""
    backward_mode: Side | None
    """Side that travels round the ring in the backward pass; None for linear attention."""
    order: tuple[str, ...] | None
    """Order of the mesh axes over the nodes, slowest first; None if the size of a node is not
    given."""

    def __str__(self) -> str:
        lines = [_table({name: getattr(self, name) for name in ("forward", "backward", "total")})]
        if any(x.step == "gradient ring" for x in self.backward.transfers):
            side = "keys and values" if self.backward_mode == "kv" else "queries"
            lines.append(f"In the backward pass, {side} and their gradients go round the ring.")
        if self.order is not None:
            lines.append(f"Order of the axes over the nodes: {', '.join(self.order)}.")
        return "\n".join(lines)


def _table(passes: Mapping[str, Traffic]) -> str:
    """The steps of passes as a table, and the sums of these and of the total."""
    rows = [["pass", "step", "collective", "axes", "bytes received", "units"]]
    for name, traffic in passes.items():
        for x in traffic.transfers if name != "total" else ():
            units = f"{x.tensor_bytes / traffic.unit_bytes:.2f}"
            received = f"{x.received_bytes:,}"
            rows.append([name, x.step, x.collective, " ".join(x.roles), received, units])
        rows.append([name, "all", "", "", f"{traffic.received_bytes:,}", f"{traffic.units:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [x.ljust(width) for x, width in zip(row[:-2], widths[:-2], strict=True)]
        cells += [x.rjust(width) for x, width in zip(row[-2:], widths[-2:], strict=True)]
        lines.append("  ".join(cells))
    one = next(iter(passes.values()))
    lines.append(f"A unit is {one.unit}, {one.unit_bytes:,} bytes.")
    for name, traffic in passes.items():
        if (nodes := traffic.nodes) is not None:
            lines.append(
                f"Through the ports of a node, {name}: at most {nodes.port_sent_bytes:,} bytes "
                f"sent, {nodes.port_received_bytes:,} received; inside, {nodes.inside_bytes:,}."
            )
    return "\n".join(lines)


def communication(
    degrees: Degrees,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any = "bfloat16",
    causal: bool | None = None,
    mask: Mask | None = None,
    layout: Layout | str | None = None,
    packed: bool = False,
    trees: bool = False,
    key_len: int | None = None,
    value_head_dim: int | None = None,
    latent_dim: int | None = None,
    order: str | Sequence[str] | None = None,
    devices_per_node: int | None = None,
    **options: Any,
) -> Communication:
    """Bytes that one device receives in one attention call, and bytes through the port of a node.

    One unit of traffic is one device's share of the query. With G, R and A the degrees of group,
    ring and team, head degree 1 and g = kv_heads / heads, the forward pass receives

        (A - 1)  +  2 g (G - 1)  +  2 g G (R - 1)  +  (A - 1)
        query       key             ring              combine
        gather      gather

    units. Rounds that no device needs under a mask are left out, and not counted. A head degree U
    adds (2 + 2 g') (U - 1) / U units, with g' = max(kv_heads, head * tensor) / heads; the other
    terms are then those of P / U devices. Bytes of lse and segment ids are added. Sinks and
    prefixes send nothing. The messages of other scores are not counted, such as the exchanges of a
    bias over head and team (`startrail_jax.rings.score_units.of_units`).

    Args:
        degrees: the setting.
        batch: sequences. This and all other sizes are those of the whole arrays, over all devices.
        seq_len: query tokens of each sequence.
        heads: query heads.
        kv_heads: key and value heads. If there are fewer than head degree * tensor degree, they are
            copied.
        head_dim: channels of a query or key head.
        dtype: dtype of query, key and value: a name, a NumPy dtype or a JAX scalar type.
        causal: short form of a mask: True for `masks.Causal()`, the default, and False for
            `masks.Full()`.
        mask: a mask of `startrail_jax.masks`, as for `Attention`.
        layout: the placement of tokens, as for `Attention`; it decides which rounds a mask needs.
        packed: whether there are int32 segment ids: one array for queries and keys, or two arrays
            if `key_len` is given.
        trees: whether calls pass `visible_until`, which takes the bytes of segment ids. A window
            then sends what a causal mask does, as nobody knows before which branches it reaches,
            and a second number for each token.
        key_len: key tokens of each sequence in cross-attention; None for `seq_len`.
        value_head_dim: channels of a value or output head; None for `head_dim`.
        latent_dim: channels of a latent with its rotated key, in `Attention.latent`; `kv_heads` is
            1 then. The sum of the gradients of its two matrices is not counted, as that of no
            weights is. None for keys and values.
        order: order of the mesh axes over the nodes, as for `make_mesh`; None for the order with
            the fewest bytes through the port of a node, which `make_mesh` chooses if it gets the
            `call`.
        devices_per_node: number of devices in a node. Each `Traffic` then has `nodes`, the bytes
            that the ports of the nodes carry.
        **options: those of `Attention` that say how it communicates, from `backward` to `balance`.

    Returns:
        The bytes. In a group of n devices, each receives n - 1 shards in an all_gather or
        reduce_scatter, (n - 1) / n of the buffer in an all_to_all, twice that in an all_reduce, and
        the whole buffer in a permute. The bytes for returning lse to the caller, or for its
        gradient, are not counted; there are none unless the head degree is above 1.

    Raises:
        ValueError: if the degrees do not divide the sizes, if `devices_per_node` does not divide
            the number of devices, or if an option is unknown.

    References:
        StarTrail: https://arxiv.org/abs/2407.00611
    """
    check_degrees(degrees)
    wished = Options(**options)
    wished.check(degrees)
    sizes = Sizes(
        batch=batch,
        query_tokens=seq_len,
        key_tokens=seq_len if key_len is None else key_len,
        **sizes_of_heads(heads, kv_heads, head_dim, value_head_dim, latent_dim),
        dtype=dtype_name(dtype),
        packed=packed or trees,
    )
    shown = resolve(mask, causal=causal, default=True)
    placed = Layout.of(layout, degrees.sequence)
    sizes.check(degrees, mask=shown, layout=placed if mask is not None or layout else None)
    share = sizes.share(degrees)
    check_head_chunks(wished.head_chunks, share.kv_heads)
    schedule = schedule_of(degrees, shown, placed, **vars(wished))
    if trees:
        check_mask_of_trees(shown)
        schedule = for_trees(schedule)
        sizes = replace(sizes, id_arrays=schedule.id_arrays)
        share = sizes.share(degrees)
    schedule, *_ = choose(schedule, degrees, sizes)
    passes = passes_of(schedule, degrees, sizes, shared_ids=key_len is None)
    order, grid = placed_on_nodes(degrees, order, devices_per_node, passes[-1])
    there, back, total = (_traffic(degrees, transfers, share, grid) for transfers in passes)
    side = traveller(wished, share, team=degrees.team, group=degrees.group)
    return Communication(forward=there, backward=back, total=total, backward_mode=side, order=order)


def placed_on_nodes(
    degrees: Degrees,
    order: str | Sequence[str] | None,
    devices_per_node: int | None,
    transfers: list[Transfer],
) -> tuple[tuple[str, ...] | None, np.ndarray | None]:
    """The order of the mesh axes, and the node of each device; None without nodes."""
    if devices_per_node is None:
        if order is None:
            return None, None
        raise InputError(
            f"order says which devices share a node; got order={order!r} and devices_per_node=None."
            " Give devices_per_node too."
        )
    nodes = nodes_of(range(degrees.num_devices), devices_per_node)
    order = resolve_order(order or cheapest_order(degrees, nodes, [transfers]))
    return order, node_grid(degrees, order, nodes).ravel()


def _traffic(
    degrees: Degrees, transfers: list[Transfer], share: Sizes, grid: np.ndarray | None
) -> Traffic:
    moving = tuple(transfer for transfer in transfers if transfer.sent_bytes)
    return Traffic(
        transfers=moving,
        unit_bytes=share.query_bytes,
        nodes=None if grid is None else messages(degrees, moving).through(grid),
    )


def default_order(
    degrees: Degrees, nodes: Sequence[int], call: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """The order of the mesh axes that `make_mesh` takes if the caller names no order.

    On one node it is `ROLES`. On several nodes it is the order with the fewest bytes through the
    busiest port of a node, forward and backward. It depends on the call: with as many key heads as
    query heads, keys are the heavier load, and rings belong inside a node; with few key heads,
    teams, which gather queries, belong inside a node. Without a call, it is the order of least
    regret: the order whose worst ratio to the best order is the smallest, over calls with and
    without grouped queries (4:1), causal and not.

    Args:
        degrees: the degrees of the mesh.
        nodes: the node of each device, as `startrail_jax.devices.nodes.nodes_of` gives it.
        call: the known arguments of the attention call: keyword arguments of `communication`, which
            must include `heads` and `kv_heads`; None if nothing is known.

    Returns:
        The six roles, slowest first.

    Raises:
        ValueError: if the degrees do not divide the sizes of the call, or if one has another name.
    """
    parts = degrees.head * degrees.tensor
    if call is None:
        kinds = itertools.product((4 * parts, parts), (True, False))
        usual = [dict(heads=4 * parts, kv_heads=heads, causal=causal) for heads, causal in kinds]
        calls: list[dict[str, Any]] = usual
    else:
        calls = [dict(call)]
        known = {*inspect.signature(communication).parameters, *OPTIONS} - _SAID_BY_MESH
        if not {"heads", "kv_heads"} <= set(call) <= known:
            raise InputError(
                f"call must give heads and kv_heads, and may give others of {sorted(known)}; got "
                f"{sorted(call)}. Correct the names."
            )
    if len(set(nodes)) == 1:
        return ROLES
    common: dict[str, Any] = dict(batch=degrees.data, seq_len=1024 * degrees.sequence, head_dim=128)
    reports = [communication(degrees, **{**common, **call}) for call in calls]
    return cheapest_order(degrees, nodes, [report.total.transfers for report in reports])
