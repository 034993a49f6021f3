"""What a degree setting costs on the network, in closed form.

`communication` gives the bytes that one device receives in the forward and the backward pass of one
attention call. In float32 they equal the bytes read from the compiled program (see `hlo`)
exactly; narrower types travel at their own width on an accelerator, while XLA's CPU backend widens
them.

Reference: StarTrail, https://arxiv.org/abs/2407.00611, equations 1-3. Those leave out the first
rearrangement of keys and values; here it is counted, for the paper's order of it as for ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from startrail_jax.mesh import Degrees

Placement = Literal["permute_gather", "gather_permute"]
Combine = Literal["merge", "reduce_scatter"]
Backward = Literal["auto", "query", "kv"]

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
"""Kinds of collective, in the words of `jax.lax`; `startrail_jax.analysis.hlo` uses the same."""

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = 4
_INT32 = 4


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What one device receives in one step of the schedule through one kind of collective."""

    step: str
    """Step of the schedule, for example "query gather"."""
    collective: str
    """One of `COLLECTIVES`."""
    tensor_bytes: int = 0
    """Bytes of query, key, value, output and their gradients."""
    row_bytes: int = 0
    """Bytes of what has no head_dim: lse, delta and segment ids."""

    @property
    def received_bytes(self) -> int:
        """Bytes of both."""
        return self.tensor_bytes + self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the device that receives most receives in one pass."""

    transfers: tuple[Transfer, ...]
    """The steps that move bytes, in the order of the schedule."""
    unit_bytes: int
    """Bytes of one unit: the device's share of one query-sized tensor, at input width."""

    @property
    def received_bytes(self) -> int:
        """All bytes, those of lse, delta and segment ids included."""
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
        """Tensor bytes in units; lse, delta and segment ids are apart, in `row_bytes`.

        One unit is (N/P tokens) x query heads x head_dim at input width, so that a float32 gradient
        of a 16-bit query counts two.
        """
        return sum(transfer.tensor_bytes for transfer in self.transfers) / self.unit_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of lse, delta and segment ids: the part of `received_bytes` outside `units`."""
        return sum(transfer.row_bytes for transfer in self.transfers)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Network traffic of one attention call on one device, the one that receives most."""

    forward: Traffic
    """The forward pass."""
    backward: Traffic
    """The backward pass: it repeats the forward's gathers, but not its head exchange."""
    backward_mode: Literal["query", "kv"]
    """What travels round the ring in the backward pass."""

    @property
    def total(self) -> Traffic:
        """Forward and backward, without rematerialisation of the forward."""
        return Traffic(
            transfers=self.forward.transfers + self.backward.transfers,
            unit_bytes=self.forward.unit_bytes,
        )


def communication(
    degrees: Degrees,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: object = "bfloat16",
    causal: bool = True,
    placement: Placement = "permute_gather",
    combine: Combine = "merge",
    backward: Backward = "auto",
    packed: bool = False,
    rounds: int | None = None,
    key_len: int | None = None,
    value_head_dim: int | None = None,
) -> Communication:
    """Bytes that one device receives in one attention call, forward and backward.

    With G, R, A the degrees group, ring and team, head degree 1 and g = kv_heads / heads, the
    forward pass receives

        (A - 1)  +  2 g G  +  2 g G (R - 1)  +  (A - 1)
        query       key       ring              combine
        gather      placement

    units if it is causal and 1 < G < P, with 2 g (G - 1) for the placement otherwise. A head degree
    U adds (2 + 2 g') (U - 1) / U units and leaves the rest at P / U. lse and ids come on top.

    Args:
        degrees: the setting; the degrees `data` and `tensor` first divide batch and heads.
        batch: sequences, on all devices together, as are all sizes here.
        seq_len: tokens of one query sequence.
        heads: query heads.
        kv_heads: key and value heads; fewer than head degree * tensor degree are replicated.
        head_dim: channels of a query or key head.
        dtype: type of query, key and value: a name, a numpy dtype or a jax scalar type.
        causal: whether key units must be runs of tokens, which is what the permute is for.
        placement: "permute_gather" (ours) or "gather_permute" (the paper's Algorithm 2).
        combine: "merge" (ours) or "reduce_scatter" (the paper).
        backward: what travels in the backward ring; "auto" asks `cheaper_backward`.
        packed: whether int32 segment ids travel: one array for queries and keys, or two of them
            with `key_len`.
        rounds: rounds of the ring that the call visits, all of them by default. A sliding window
            may need fewer.
        key_len: tokens of one key sequence in cross-attention; `seq_len` by default.
        value_head_dim: channels of a value or output head; `head_dim` by default.

    Returns:
        The bytes, with collectives counted as on a ring of n devices: all_gather and reduce_scatter
        receive n - 1 shards, all_to_all (n - 1) / n of the buffer, all_reduce twice that, a permute
        the whole buffer. lse that the caller asks for is not counted: returning it, or a cotangent
        for it, costs something only with a head degree above 1.

    Raises:
        ValueError: if the degrees do not divide the sizes, or an option is unknown.

    References:
        StarTrail: https://arxiv.org/abs/2407.00611
    """
    _check_option("placement", placement, Placement)
    _check_option("combine", combine, Combine)
    _check_option("backward", backward, Backward)
    rounds = _check_schedule(degrees, placement, rounds)
    _check_heads(degrees, heads, kv_heads)
    num_id_arrays = 1 if key_len is None else 2
    key_len = _check_key_len(seq_len, key_len, causal)
    product = "the sequence degree group * ring * team * head"
    shard = _Shard(
        degrees=degrees,
        batch=_divide("batch", batch, "the data degree", degrees.data),
        query_tokens=_divide("seq_len", seq_len, product, degrees.sequence) * degrees.head,
        key_tokens=_divide("key_len", key_len, product, degrees.sequence) * degrees.head,
        heads=heads // (degrees.head * degrees.tensor),
        kv_heads=max(kv_heads // (degrees.head * degrees.tensor), 1),
        head_dim=_positive("head_dim", head_dim),
        value_head_dim=_positive("value_head_dim", value_head_dim or head_dim),
        width=_width(dtype),
        packed=packed,
    )
    mode = shard.cheaper_backward() if backward == "auto" else backward
    place = _key_placement(shard, causal, placement, shared_ids=num_id_arrays == 1)
    forward = [
        *_head_exchange(shard, num_id_arrays=num_id_arrays),
        _query_gather(shard),
        *place,
        *_forward_ring(shard, rounds),
        *_combine(shard, combine),
        _output_exchange(shard),
    ]
    reverse = [
        _output_exchange(shard),
        _query_gather(shard, with_cotangent=True),
        *place,
        *_backward_ring(shard, rounds, mode),
        _query_scatter(shard),
        *_key_gradient_placement(shard, causal, placement),
        *_head_exchange(shard, num_id_arrays=0),
        *_replica_sum(shard, kv_heads),
    ]
    return Communication(
        forward=_traffic(forward, shard), backward=_traffic(reverse, shard), backward_mode=mode
    )


def cheaper_backward(
    *,
    team: int,
    group: int,
    query_tokens: int,
    key_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    width: int,
    packed: bool = False,
) -> Literal["query", "kv"]:
    """The side that should travel round the ring in the backward pass: fewer bytes a hop.

        query: team  * (q, dout and ids; dq, lse and delta in float32)
        kv:    group * (k, v and ids; dk and dv in float32)

    Args:
        team: team degree.
        group: group degree.
        query_tokens: query tokens of one device inside `shard_map`, after the head exchange and
            before any gather, as are all sizes here. The batch size favours neither side.
        key_tokens: key tokens.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: channels of a query or key head.
        value_head_dim: channels of a value or output head.
        width: bytes of one element of query, key and value.
        packed: whether int32 segment ids travel too.

    Returns:
        "query" or "kv"; at a tie "query", which is the paper's choice.
    """
    ids = _INT32 if packed else 0
    rows = 2 * _FLOAT32
    query = heads * (head_dim * (width + _FLOAT32) + value_head_dim * width + rows) + ids
    key = kv_heads * (head_dim + value_head_dim) * (width + _FLOAT32) + ids
    return "query" if team * query_tokens * query <= group * key_tokens * key else "kv"


def all_reduce_bytes(size: int, num_devices: int) -> int:
    """Bytes that a device receives when `num_devices` sum buffers of `size` bytes, rounded up."""
    return -(-2 * (num_devices - 1) * size // num_devices)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One device's share after the head exchange, which trades heads for tokens; in bytes."""

    degrees: Degrees
    batch: int
    query_tokens: int
    key_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    width: int
    packed: bool

    @property
    def query(self) -> int:
        return self.batch * self.query_tokens * self.heads * self.head_dim * self.width

    @property
    def out(self) -> int:
        return self.batch * self.query_tokens * self.heads * self.value_head_dim * self.width

    @property
    def key_value(self) -> int:
        channels = self.head_dim + self.value_head_dim
        return self.batch * self.key_tokens * self.kv_heads * channels * self.width

    @property
    def lse(self) -> int:
        return self.batch * self.query_tokens * self.heads * _FLOAT32

    @property
    def query_ids(self) -> int:
        return self.batch * self.query_tokens * _INT32 * self.packed

    @property
    def key_ids(self) -> int:
        return self.batch * self.key_tokens * _INT32 * self.packed

    def in_float32(self, size: int) -> int:
        """Bytes of a gradient whose tensor has `size` bytes at input width."""
        return size // self.width * _FLOAT32

    def exchanged(self, size: int) -> int:
        """The part of `size` bytes that comes from other devices of the head axis."""
        return size * (self.degrees.head - 1) // self.degrees.head

    def cheaper_backward(self) -> Literal["query", "kv"]:
        return cheaper_backward(
            team=self.degrees.team,
            group=self.degrees.group,
            query_tokens=self.query_tokens,
            key_tokens=self.key_tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            width=self.width,
            packed=self.packed,
        )


def _head_exchange(shard: _Shard, num_id_arrays: int) -> list[Transfer]:
    """Query, key and value forward, or their gradients back; the ids go one way only."""
    tensors = shard.exchanged(shard.query) + shard.exchanged(shard.key_value)
    ids = sum(map(shard.exchanged, (shard.query_ids, shard.key_ids)[:num_id_arrays]))
    return [
        _copies("head exchange", "all_to_all", 1, tensors),
        _copies("head exchange", "all_gather", 1, 0, ids),
    ]


def _output_exchange(shard: _Shard) -> Transfer:
    return _copies("output exchange", "all_to_all", 1, shard.exchanged(shard.out))


def _query_gather(shard: _Shard, with_cotangent: bool = False) -> Transfer:
    tensors, rows = shard.query, shard.query_ids
    if with_cotangent:
        # The gradient of a block needs dout, lse and delta beside the query.
        tensors, rows = tensors + shard.out, rows + 2 * shard.lse
    return _copies("query gather", "all_gather", shard.degrees.team - 1, tensors, rows)


def _query_scatter(shard: _Shard) -> Transfer:
    dq = shard.in_float32(shard.query)
    return _copies("query scatter", "reduce_scatter", shard.degrees.team - 1, dq)


def _key_placement(
    shard: _Shard, causal: bool, placement: Placement, *, shared_ids: bool
) -> list[Transfer]:
    tensors, ids = shard.key_value, shard.key_ids
    if placement == "gather_permute":
        others, moved = _published_copies(shard)
        # The queries' ids are gathered over the team already; XLA does not do so twice.
        gathered = 0 if shared_ids else ids
        return [
            _copies("key placement", "all_gather", others, tensors, gathered),
            _copies("key placement", "collective_permute", moved, tensors, ids),
        ]
    others, moved = _our_copies(shard, causal)
    return [
        _copies("key placement", "collective_permute", moved, tensors, ids),
        _copies("key placement", "all_gather", others, tensors, ids),
    ]


def _key_gradient_placement(shard: _Shard, causal: bool, placement: Placement) -> list[Transfer]:
    step, dkv = "key gradient placement", shard.in_float32(shard.key_value)
    if placement == "gather_permute":
        others, moved = _published_copies(shard)
        return [
            _copies(step, "collective_permute", moved, dkv),
            _copies(step, "reduce_scatter", others, dkv),
        ]
    others, moved = _our_copies(shard, causal)
    return [
        _copies(step, "reduce_scatter", others, dkv),
        # The sum is complete: from here the input width is enough.
        _copies(step, "collective_permute", moved, shard.key_value),
    ]


def _our_copies(shard: _Shard, causal: bool) -> tuple[int, int]:
    """Shards gathered over the group, and shards permuted before."""
    group = shard.degrees.group
    ranks = shard.degrees.sequence // shard.degrees.head
    return group - 1, int(causal and 1 < group < ranks)


def _published_copies(shard: _Shard) -> tuple[int, int]:
    """Shards gathered over the team, and shards permuted after."""
    team = shard.degrees.team
    return team - 1, team if team > 1 else 0


def _forward_ring(shard: _Shard, rounds: int) -> list[Transfer]:
    hops = (rounds - 1) * shard.degrees.group
    return [_copies("ring", "collective_permute", hops, shard.key_value, shard.key_ids)]


def _backward_ring(shard: _Shard, rounds: int, mode: Literal["query", "kv"]) -> list[Transfer]:
    """Gradients start one round after their operands, and come home in one hop more."""
    if mode == "kv":
        hops, operands = (rounds - 1) * shard.degrees.group, shard.key_value
        rows, gradients = shard.key_ids, shard.in_float32(shard.key_value)
    else:
        hops, operands = (rounds - 1) * shard.degrees.team, shard.query + shard.out
        rows, gradients = shard.query_ids + 2 * shard.lse, shard.in_float32(shard.query)
    return [
        _copies("ring", "collective_permute", hops, operands, rows),
        _copies("gradient ring", "collective_permute", hops, gradients),
    ]


def _combine(shard: _Shard, combine: Combine) -> list[Transfer]:
    team = shard.degrees.team
    if combine == "merge":
        return [_copies("combine", "all_to_all", team - 1, shard.out, shard.lse)]
    # The logsumexp over the team is a pmax and a psum of the whole team's lse.
    return [
        _copies("combine", "reduce_scatter", team - 1, shard.out),
        _copies("combine", "all_reduce", 2, 0, all_reduce_bytes(team * shard.lse, team)),
    ]


def _replica_sum(shard: _Shard, kv_heads: int) -> list[Transfer]:
    """With fewer key heads than tensor ranks, all ranks hold all of them and sum gradients."""
    tensor = shard.degrees.tensor
    if kv_heads % tensor == 0:
        return []
    row = shard.batch * (shard.key_tokens // shard.degrees.head) * kv_heads * _FLOAT32
    size = sum(all_reduce_bytes(row * h, tensor) for h in (shard.head_dim, shard.value_head_dim))
    return [_copies("replica sum", "all_reduce", 1, size)]


def _copies(step: str, collective: str, copies: int, tensors: int, rows: int = 0) -> Transfer:
    """A transfer of `copies` buffers of `tensors` + `rows` bytes."""
    return Transfer(
        step=step, collective=collective, tensor_bytes=copies * tensors, row_bytes=copies * rows
    )


def _traffic(transfers: list[Transfer], shard: _Shard) -> Traffic:
    moving = tuple(transfer for transfer in transfers if transfer.received_bytes)
    return Traffic(transfers=moving, unit_bytes=shard.query)


def _width(dtype: object) -> int:
    """Bytes of one element."""
    # A numpy dtype has a name, a scalar type (jnp.float32) has a __name__.
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))
    if name not in _WIDTHS:
        raise ValueError(
            f"dtype must be one of {', '.join(_WIDTHS)}; got dtype={name!r}. "
            "Name the type that query, key and value have when they enter the attention."
        )
    return _WIDTHS[name]


def _positive(name: str, size: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"{name} must be a positive integer; got {name}={size!r}. "
            "Pass the size over all devices."
        )
    return size


def _divide(name: str, size: int, divisor: str, degree: int) -> int:
    """`size / degree`, or raises with the nearest sizes that can be divided."""
    if _positive(name, size) % degree:
        lower = size // degree * degree
        nearest = f"{lower} or {lower + degree}" if lower else f"{degree}"
        raise ValueError(
            f"{name} must be divisible by {divisor}; got {name}={size}, degree={degree}. "
            f"Use {name}={nearest}, or another degree."
        )
    return size // degree


def _check_heads(degrees: Degrees, heads: int, kv_heads: int) -> None:
    shards = degrees.head * degrees.tensor
    _divide("heads", heads, "head degree * tensor degree", shards)
    if heads % _positive("kv_heads", kv_heads):
        raise ValueError(
            "heads must be divisible by kv_heads; "
            f"got heads={heads}, kv_heads={kv_heads}. Give every key head equally many query heads."
        )
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"kv_heads and head * tensor must divide one another; got kv_heads={kv_heads}, "
            f"head={degrees.head}, tensor={degrees.tensor}. Change a degree, so that key heads "
            "are split evenly or replicated evenly."
        )


def _check_key_len(seq_len: int, key_len: int | None, causal: bool) -> int:
    if key_len is not None and causal and key_len != seq_len:
        raise ValueError(
            "causal=True needs as many keys as queries; "
            f"got seq_len={seq_len}, key_len={key_len}. Pass causal=False for cross-attention."
        )
    return seq_len if key_len is None else key_len


def _check_schedule(degrees: Degrees, placement: Placement, rounds: int | None) -> int:
    """The rounds of the ring that the call visits."""
    if placement == "gather_permute" and degrees.team != degrees.group:
        raise ValueError(
            "placement='gather_permute' needs equal team and group degrees; got "
            f"team={degrees.team}, group={degrees.group}. Use placement='permute_gather'."
        )
    if rounds is not None and not 1 <= rounds <= degrees.ring:
        raise ValueError(
            f"rounds must lie between 1 and the ring degree; got rounds={rounds}, "
            f"ring={degrees.ring}. Leave it out to visit every round."
        )
    return degrees.ring if rounds is None else rounds


def _check_option(name: str, value: str, options: object) -> None:
    allowed = get_args(options)
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}; got {name}={value!r}. "
            "Choose one of these."
        )
