"""The network traffic of one attention call, in closed form.

`communication` gives the bytes that one device receives in the forward and in the backward pass. In
float32 they equal the bytes that `startrail_jax.analysis.hlo` reads from the compiled program. Of
narrower dtypes this holds on accelerators only: XLA's CPU backend sends them as float32.

References:
    StarTrail, https://arxiv.org/abs/2407.00611, equations 1-3. These leave out the first
    rearrangement of keys and values, which is counted here, for the order of the paper too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from startrail_jax.analysis import COLLECTIVES
from startrail_jax.analysis.transfers import Combine, Placement, Steps, Transfer
from startrail_jax.errors import InputError
from startrail_jax.mesh import Degrees
from startrail_jax.sizes import GRADIENT_DTYPES, Sizes, dtype_name
from startrail_jax.validation import check_option, check_placement

Backward = Literal["auto", "query", "kv"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the device that receives most receives in one pass."""

    transfers: tuple[Transfer, ...]
    """The steps that move bytes, in the order of the schedule."""
    unit_bytes: int
    """Bytes of one unit of traffic: one device's share of the query, at input width."""

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
        """Tensor bytes in units of traffic, without those of lse, delta and segment ids.

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
    """Network traffic of one attention call, on the device that receives most."""

    forward: Traffic
    """The forward pass."""
    backward: Traffic
    """The backward pass. It repeats the gathers of the forward pass unless they are kept, but not
    the head exchange."""
    backward_mode: Literal["query", "kv"]
    """Which side travels round the ring in the backward pass."""

    @property
    def total(self) -> Traffic:
        """Both passes, with no part of the forward pass recomputed."""
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
    dtype: Any = "bfloat16",
    causal: bool = True,
    placement: Placement = "permute_gather",
    combine: Combine = "merge",
    backward: Backward = "auto",
    packed: bool = False,
    rounds: int | None = None,
    key_len: int | None = None,
    value_head_dim: int | None = None,
    gradient_dtype: str = "float32",
    keep_gathered: bool = False,
) -> Communication:
    """Bytes that one device receives in one attention call, forward and backward.

    One unit of traffic is one device's share of the query. With G, R and A the degrees of group,
    ring and team, head degree 1 and g = kv_heads / heads, the forward pass receives

        (A - 1)  +  2 g G  +  2 g G (R - 1)  +  (A - 1)
        query       key       ring              combine
        gather      placement

    units if it is causal and 1 < G < P, and 2 g (G - 1) for the placement otherwise. A head degree
    U adds (2 + 2 g') (U - 1) / U units, g' = max(kv_heads, head * tensor) / heads, and leaves the
    rest as it is on P / U devices. Bytes of lse and segment ids come on top.

    Args:
        degrees: the setting.
        batch: sequences. This and all other sizes are those of the whole arrays, over all devices.
        seq_len: query tokens of each sequence.
        heads: query heads.
        kv_heads: key and value heads. If there are fewer than head degree * tensor degree, they are
            copied.
        head_dim: channels of a query or key head.
        dtype: dtype of query, key and value: a name, a NumPy dtype or a JAX scalar type.
        causal: whether the attention is causal. Key units are then runs of consecutive ranks, which
            is what the permute is for.
        placement: "permute_gather" (ours) or "gather_permute" (algorithm 2 of the paper).
        combine: "merge" (ours) or "reduce_scatter" (the paper).
        backward: what travels in the backward ring: "query" (the paper), "kv", or "auto" for the
            one of fewer bytes.
        packed: whether there are int32 segment ids: one array for queries and keys, or two arrays
            if `key_len` is given.
        rounds: rounds of the ring that are visited, of which a sliding window may need few; None
            for all.
        key_len: key tokens of each sequence in cross-attention; None for `seq_len`.
        value_head_dim: channels of a value or output head; None for `head_dim`.
        gradient_dtype: dtype in which parts of gradients travel: "float32" or "bfloat16".
        keep_gathered: whether the backward pass has the units that the forward pass has gathered,
            and does not gather them again.

    Returns:
        The bytes. Of a group of n devices, each receives n - 1 shards in an all_gather or
        reduce_scatter, (n - 1) / n of the buffer in an all_to_all, twice that in an all_reduce, and
        the whole buffer in a permute. Returning lse to the caller, or a gradient for it, is not
        counted; it costs something only if the head degree is above 1.

    Raises:
        ValueError: if the degrees do not divide the sizes, or if an option is unknown.

    References:
        StarTrail: https://arxiv.org/abs/2407.00611
    """
    check_option("placement", placement, get_args(Placement))
    check_option("combine", combine, get_args(Combine))
    check_option("backward", backward, get_args(Backward))
    check_option("gradient_dtype", gradient_dtype, GRADIENT_DTYPES)
    check_placement(placement, degrees)
    sizes = Sizes(
        batch=batch,
        query_tokens=seq_len,
        key_tokens=seq_len if key_len is None else key_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        dtype=dtype_name(dtype),
        packed=packed,
        gradient_dtype=gradient_dtype,
    )
    sizes.check(degrees, causal=causal)
    share = sizes.share(degrees)
    steps = Steps(
        degrees=degrees,
        share=share,
        kv_heads=kv_heads,
        causal=causal,
        rounds=_checked_rounds(degrees, rounds),
        placement=placement,
        keep_gathered=keep_gathered,
    )
    mode = backward
    if mode == "auto":
        mode = share.cheaper_traveller(team=degrees.team, group=degrees.group)
    forward = [
        *steps.exchange(id_arrays=1 if key_len is None else 2),
        *steps.query_gather(),
        *steps.key_placement(shared_ids=key_len is None),
        *steps.ring(),
        *steps.combination(combine),
        *steps.output_exchange(),
    ]
    reverse = [
        *steps.output_exchange(),
        *steps.query_gather(backward=True),
        *([] if keep_gathered else steps.key_placement(shared_ids=key_len is None)),
        *steps.gradient_ring(mode),
        *steps.query_scatter(),
        *steps.key_gradient_placement(),
        *steps.gradient_exchange(),
        *steps.replica_sum(),
    ]
    return Communication(
        forward=_traffic(forward, share), backward=_traffic(reverse, share), backward_mode=mode
    )


def _traffic(transfers: list[Transfer], share: Sizes) -> Traffic:
    moving = tuple(transfer for transfer in transfers if transfer.received_bytes)
    return Traffic(transfers=moving, unit_bytes=share.query_bytes)


def _checked_rounds(degrees: Degrees, rounds: int | None) -> int:
    if rounds is not None and not 1 <= rounds <= degrees.ring:
        raise InputError(
            f"rounds must lie between 1 and the ring degree; got rounds={rounds}, "
            f"ring={degrees.ring}. Leave it out to visit every round."
        )
    return degrees.ring if rounds is None else rounds
