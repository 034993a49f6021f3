"""The public callable: it checks its inputs, enters `shard_map` and dispatches.

This module computes nothing itself: `rings/vjp.py` computes attention inside `shard_map`, and
`cache.py` has the methods for decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from startrail_jax.calls.cache import Decoding
from startrail_jax.calls.explain import Explanation, explain, warn_of_balance
from startrail_jax.calls.key_masks import as_negative, empty_padding, without_padding
from startrail_jax.calls.score_checks import check_scores, given_to_call, given_to_shards
from startrail_jax.calls.validation import check_shards, check_static, served_call
from startrail_jax.devices.axes import device_kind, flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.devices.nodes import mesh_crossing
from startrail_jax.rings import collectives, score_units, vjp
from startrail_jax.rings.balance import from_zigzag, in_zigzag, to_zigzag
from startrail_jax.rings.choices import choose
from startrail_jax.rings.schedule import Schedule, ring_offsets
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes, dtype_name
from startrail_jax.rings.work import advice_on_balance


@dataclasses.dataclass(frozen=True)
class Attention(Decoding):
    """Exact attention over a sequence that is sharded over the devices of a mesh.

        out = softmax(scale * query key^T + mask) value

    An instance is frozen and hashable: build it once and call it anywhere, under `jit`, `grad`,
    `jax.checkpoint` and `lax.scan`. It can be the `attention_fn` of `nnx.MultiHeadAttention` and of
    `linen.MultiHeadDotProductAttention`. The sizes of the mesh axes choose the scheme: see
    `Degrees`.

    Raises:
        ValueError: if an option does not exist or does not fit the mesh.

    References:
        StarTrail, https://arxiv.org/abs/2407.00611; Attention2D, https://arxiv.org/abs/2503.15758,
        and Mesh-Attention, https://arxiv.org/abs/2512.20968, tile queries by keys without a ring.
    """

    @functools.cached_property
    def schedule(self) -> Schedule:
        """All static settings of this attention, which `local` uses."""
        platform, capability = device_kind(self.mesh)
        return Schedule(
            platform=platform,
            capability=capability,
            mask=self.resolved_mask,
            **{role: self.axes[role] for role in SEQUENCE_ROLES},
            layout=self.layout,
            backend=cast(Any, self.backend),
            scale=self.scale,
            softcap=self.softcap,
            **self.options,
        )

    def num_rounds(self, seq_len: int) -> int:
        """Number of ring rounds: the ring degree, or fewer if no device needs some of the rounds.

        Args:
            seq_len: tokens of the whole sequence.

        Raises:
            ValueError: if the length does not fit the layout.
        """
        self.layout.check_length(seq_len)
        return len(ring_offsets(self.schedule, seq_len))

    def explain(
        self,
        *,
        seq_len: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_head_dim: int | None = None,
        dtype: DTypeLike = "bfloat16",
        packed: bool = False,
        kv_seq_len: int | None = None,
        platform: str | None = None,
        capability: tuple[int, int] | None = None,
        devices_per_node: int | None = None,
        scores: tuple[str, ...] = (),
    ) -> Explanation:
        """Says which backend runs for inputs of these sizes, and why, without running anything.

        On several nodes it also says which mesh axes cross nodes. A `BalanceWarning` names another
        layout that would balance the work much better.

        `print(attention.explain(...))` shows the answer in a few lines.

        Args:
            seq_len: query tokens of the whole sequence.
            heads: query heads, over all devices.
            head_dim: channels of a query or key head.
            kv_heads: key heads, over all devices; None for as many as query heads.
            value_head_dim: channels of a value head; None for `head_dim`.
            dtype: dtype of query, key and value.
            packed: whether there are segment ids.
            kv_seq_len: key tokens of the whole sequence; None for as many as query tokens.
            platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None for that of the mesh.
            capability: CUDA compute capability, such as (9, 0); None for that of the mesh.
            devices_per_node: number of devices in a node, in the order of `jax.devices()`; None to
                read it from the devices.
            scores: the score inputs that calls pass, among "slopes", "bias" and "dropout".

        Raises:
            ValueError: if sizes do not fit the mesh, or if the platform is unknown.
            NotImplementedError: if the backend of this attention does not support these inputs, or
                if no backend supports these scores.
        """
        check_scores(self, scores, seq_len, seq_len if kv_seq_len is None else kv_seq_len)
        schedule = self.schedule.on(platform, capability)
        schedule = dataclasses.replace(schedule, scores=tuple(scores))
        sizes = Sizes(
            batch=self.degrees.data,
            query_tokens=seq_len,
            key_tokens=seq_len if kv_seq_len is None else kv_seq_len,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim if value_head_dim is None else value_head_dim,
            dtype=dtype_name(dtype),
            packed=packed,
        )
        sizes.check(self.degrees, mask=self.resolved_mask, layout=self.layout)
        nodes = mesh_crossing(self.mesh, self.axes, devices_per_node)
        schedule, why, why_balance = choose(schedule, self.degrees, sizes)
        share = self.degrees
        if schedule.exchange == "sparse":  # Every sequence device has all heads of its tensor rank.
            schedule = schedule.alone
            share = dataclasses.replace(share, ring=share.sequence, group=1, team=1, head=1)
        explanation = explain(
            schedule,
            sizes.share(share),
            axes=self.axes,
            nodes=nodes,
            why=why,
            why_balance=why_balance,
        )
        warn_of_balance(explanation.advice, stacklevel=2)
        return explanation

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
        slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        prefix_lengths: ArrayLike | None = None,
        return_lse: bool = False,
        dtype: DTypeLike | None = None,
        is_causal: bool = False,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = False,
        deterministic: bool = False,
        force_fp32_for_softmax: bool = False,
        scale: ArrayLike | None = None,
        softcap: float | None = None,
        padding_id: int | None = None,
        implementation: str | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        **unserved: Any,
    ) -> Any:
        """Computes the attention of every query to its visible keys.

        Args:
            query: [batch, seq, heads, head_dim] sharded as `query_spec(heads)`, with tokens in the
                order of `layout`; float32, bfloat16 or float16.
            key: [batch, kv_seq, kv_heads, head_dim] sharded as `key_spec(kv_heads)`. `kv_heads`
                divides `heads`, and neighbouring query heads share a key head. Keys of
                cross-attention may have any length: the call pads them.
            value: [batch, kv_seq, kv_heads, value_head_dim], sharded like key.
            segment_ids: integers [batch, seq] sharded as `sequence_spec`, or a pair of such arrays
                for queries and keys, where None stands for zeros. Tokens with equal ids see each
                other. Negative ids are padding, whose outputs and gradients are 0.
            bias: floats [1 or batch, 1 or heads, seq, kv_seq] to add to the scaled and capped
                logits, sharded as `bias_spec`: queries and keys in the order of `layout`, each
                device with the rows of its queries; see `shard_bias`. It may be learned. Over all
                devices together, memory holds the whole bias twice in the forward pass, and once
                more in float32 in the backward pass, which rotates keys.
            slopes: [heads], the ALiBi slope m of each head: `-m |query - key|` is added to the
                scaled and capped logits, where query and key are natural positions in the row. They
                may be learned.
            sinks: [heads], a logit for each head that counts in the denominator of its softmax and
                has no value, as in gpt-oss: out * sigmoid(lse - sink), exactly. It may be learned.
                With zeros, this is the softmax-off-by-one. None for no sinks. Rows that see no key
                stay 0.
            prefix_lengths: integers [batch], the number of tokens in the prefix of each row, from 0
                to all tokens. A `masks.Prefix()` without a length needs them. Traced lengths count
                as if clipped to that range.
            return_lse: whether to return the log-sum-exp too; gradients flow through both.
            dtype: dtype to cast query, key and value to; None leaves them as they are.
            is_causal: must not be True unless this attention is causal. False changes nothing.
            dropout_rate: share of the probabilities to drop after the softmax; the others are
                scaled by 1 / (1 - rate). 0 for no dropout.
            dropout_rng: a key of `jax.random`, which a rate above 0 needs. It drops the same
                entries on any mesh, under any scheme and layout.
            broadcast_dropout: whether all rows and heads drop the same pairs of positions. Flax's
                modules pass True.
            deterministic: whether nothing is dropped.
            mask: bools, or 0 and 1, [batch or 1, 1, 1, kv_seq], True for visible keys, with tokens
                in the order of `layout`; or any mask on the host that is all True. Traced numbers
                count as in Flax: keys with 0 are hidden. Write other masks as
                `mask=` of the attention.
            force_fp32_for_softmax: any value; the softmax is always in float32.
            scale, implementation, local_window_size: as in `jax.nn.dot_product_attention`. For this
                call, they set `scale`, `backend` and, for a causal attention, `window` of the
                instance, which must be unset or equal.
            softcap, padding_id: the same options of the instance, for this call; those of the
                instance must be unset or equal.
            **unserved: other arguments of Flax or `jax.nn.dot_product_attention`, None or False.
                Other values raise an error that names the equivalent here; but `precision` may be
                any, as float32 inputs are always computed in full precision.

        Returns:
            out [batch, seq, heads, value_head_dim] with the dtype and the sharding of query; 0 in
            rows that see no key. With `return_lse`, also lse [batch, heads, seq] in float32,
            sharded as `lse_spec`: the natural logarithm of the sum of the exponentials of the
            scaled logits and the sink, if there is one; -1e30 in rows that see no key.

        Raises:
            ValueError: if shapes, dtypes or shardings do not fit each other or the mesh.
            NotImplementedError: if an option is not supported.
            TypeError: if neither Flax nor jax has an argument of such a name.
        """
        del force_fp32_for_softmax
        check_static(return_lse=return_lse)
        options, inputs, specs = served_call(
            self,
            (query, key, value),
            segment_ids,
            dtype,
            scale=scale,
            implementation=implementation,
            local_window_size=local_window_size,
            softcap=softcap,
            padding_id=padding_id,
            mask=mask,
            pads_keys=bias is None,
            is_causal=is_causal,
            **unserved,
        )
        attention = dataclasses.replace(self, **options) if options else self
        given, given_specs = given_to_call(
            attention,
            inputs,
            slopes=slopes,
            bias=bias,
            sinks=sinks,
            prefix_lengths=prefix_lengths,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
        )
        out, lse = attention._whole(specs, given_specs, given, *inputs)
        return (out, lse) if return_lse else out

    def local(
        self,
        query: Array,
        key: Array,
        value: Array,
        query_segments: Array | None = None,
        key_segments: Array | None = None,
        **given: Any,
    ) -> tuple[Array, Array]:
        """Computes one device's part of a call, inside a fully manual `shard_map` of the caller.

        Args:
            query: this device's shard [b, t, n, h].
            key, value: this device's shards [b, s, k, h] and [b, s, k, v], with the key heads that
                its query heads need.
            query_segments, key_segments: int32 segment ids [b, t] and [b, s] of the same tokens;
                both or neither.
            **given: as in a call: slopes and sinks [n] of this device's heads, a `bias` [1 or b, 1
                or n, t, kv_seq], `prefix_lengths` [b] and the arguments of dropout. All devices
                that share a sequence need the same dropout key; with check_vma=False this is not
                checked.

        Returns:
            out [b, t, n, v] in the dtype of query and lse [b, n, t] in float32, of this device's
            queries.

        Raises:
            ValueError: if shapes or dtypes do not fit each other or the mesh.
        """
        check_shards(
            query,
            key,
            value,
            query_segments,
            key_segments,
            degrees=self.degrees,
            layout=self.layout,
            mask=self.resolved_mask,
        )
        whole = given_to_shards(self, query, key, **given)
        kv_heads = key.shape[2] * self.degrees.tensor
        shared = query_segments is key_segments
        query_segments, key_segments = as_negative(self.padding_id, (query_segments, key_segments))
        ids = query_segments, query_segments if shared else key_segments
        return self._attend(whole, query, key, value, *ids, kv_heads=kv_heads)

    def _whole(
        self,
        specs: tuple[PartitionSpec, ...],
        given_specs: ScoreInputs,
        given: ScoreInputs,
        *inputs: Array,
    ) -> tuple[Array, Array]:
        """The attention of whole arrays, after all checks."""
        return _run(self, specs, given_specs, given, *inputs)

    def _on_device(
        self,
        given: ScoreInputs,
        query: Array,
        key: Array,
        value: Array,
        *ids: Array,
        kv_heads: int,
    ) -> tuple[Array, Array]:
        """Attention on one device, where `kv_heads` may all lie on every device along `tensor`."""
        both: tuple[Any, Any] = (ids[0], ids[-1]) if ids else (None, None)
        return self._attend(given, query, key, value, *both, kv_heads=kv_heads)

    def _attend(
        self,
        given: ScoreInputs,
        query: Array,
        key: Array,
        value: Array,
        query_ids: Array | None,
        key_ids: Array | None,
        *,
        kv_heads: int,
    ) -> tuple[Array, Array]:
        """Attention on one device, between the exchanges of tokens that balance the work."""
        if query_ids is not None:
            query = without_padding(query, query_ids)
        if key_ids is not None:
            key, value = (without_padding(x, key_ids) for x in (key, value))
        padded = query_ids
        schedule, given = score_units.of_device(self.schedule, given, query, self.axes)
        schedule = self._exchanging(schedule, query, key, value, query_ids, kv_heads)
        ranks = flat_axis(self.axes, SEQUENCE_ROLES)
        balances, shared = schedule.balance == "exchange", query_ids is key_ids
        if balances:
            schedule = in_zigzag(schedule)
            query, key, value = (to_zigzag(ranks, x) for x in (query, key, value))
            if query_ids is not None and key_ids is not None:
                query_ids = to_zigzag(ranks, query_ids)
                key_ids = query_ids if shared else to_zigzag(ranks, key_ids)
        if kv_heads % self.degrees.tensor and key.shape[2] == kv_heads:
            tensor = self.axes["tensor"]
            parts = 1 if schedule.exchange == "sparse" else self.degrees.head
            needed = collectives.needed_heads(kv_heads, parts, tensor)
            key, value = (collectives.copy_heads(x, needed, tensor) for x in (key, value))
        out, lse = vjp.sharded_attention(schedule, query, key, value, query_ids, key_ids, given)
        if balances:
            out, lse = from_zigzag(ranks, out), from_zigzag(ranks, lse, 2)
        if padded is not None:  # For their gradients: what comes from padding goes nowhere.
            out, lse = without_padding(out, padded), empty_padding(lse, padded)
        return out, lse

    def _exchanging(
        self,
        schedule: Schedule,
        query: Array,
        key: Array,
        value: Array,
        segments: Array | None,
        kv_heads: int,
    ) -> Schedule:
        """The schedule whose `exchange` and `balance` are chosen, for arrays of one device."""
        degrees = self.degrees
        here = Sizes.of(query, key, value, packed=segments is not None)
        sizes = dataclasses.replace(
            here,
            batch=degrees.data,  # Both choices are the same for every batch, also a symbolic one.
            query_tokens=here.query_tokens * degrees.sequence,
            key_tokens=here.key_tokens * degrees.sequence,
            heads=here.heads * degrees.tensor,
            kv_heads=kv_heads,
        )
        schedule, *_ = choose(schedule, degrees, sizes)
        if self.balance == "auto" and (schedule.balance, schedule.exchange) == ("layout", "rings"):
            advice = advice_on_balance(schedule, sizes.query_tokens, sizes.key_tokens)
            # Functions of jax are between this line and that of the caller.
            warn_of_balance(advice, stacklevel=1)
        return schedule


# Jitted, because outside a jit shard_map runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    attention: Attention,
    specs: tuple[PartitionSpec, ...],
    given_specs: ScoreInputs,
    given: ScoreInputs,
    *inputs: Array,
) -> tuple[Array, Array]:
    """The attention of whole arrays on the devices of its mesh."""
    return jax.shard_map(
        functools.partial(attention._on_device, kv_heads=inputs[1].shape[2]),
        mesh=attention.mesh,
        in_specs=(given_specs, *specs),
        out_specs=(specs[0], attention.lse_spec),
    )(given, *inputs)
