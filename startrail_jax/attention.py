"""Exact attention over a sequence that is sharded over the devices of a mesh: the front door.

The class has the arguments and the methods with their documentation. `calls/` does what they say:
it checks inputs, enters `shard_map`, decodes and explains. `rings/vjp.py` computes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from startrail_jax import masks
from startrail_jax.calls.arguments import BackendArgument, check_arguments, options_of_call
from startrail_jax.calls.cache import (
    decode,
    decode_shards,
    decode_spec,
    key_copies,
    update,
    update_shards,
)
from startrail_jax.calls.explain import Explanation, explain_call
from startrail_jax.calls.latents import (
    check_latents,
    decode_latent_shards,
    decode_latents,
    joined,
    latent_call,
)
from startrail_jax.calls.on_devices import attend, attend_whole
from startrail_jax.calls.score_checks import given_to_call, given_to_shards
from startrail_jax.calls.sharding import Sharded
from startrail_jax.calls.trees import check_trees, int32_ends
from startrail_jax.calls.validation import (
    check_causal,
    check_segments,
    check_shards,
    check_static,
    check_whole,
    ids_of_shards,
    refuse_unserved,
    served_call,
)
from startrail_jax.devices.axes import AxisNames, device_kind
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.rings.latents import Expansion
from startrail_jax.rings.options import (
    OPTIONS,
    Backward,
    Balance,
    Exchange,
    GradientDtype,
)
from startrail_jax.rings.residuals import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from startrail_jax.rings.schedule import Schedule, for_trees, ring_offsets
from startrail_jax.rings.score_units import ScoreInputs
from startrail_jax.rings.sizes import Sizes, dtype_name, sizes_of_heads


@dataclasses.dataclass(frozen=True)
class Attention(Sharded):
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

    mesh: Mesh | AbstractMesh
    """The mesh of the devices. Its axes have the roles data, group, ring, team, head and tensor;
    arrays are replicated over axes without a role."""
    _: dataclasses.KW_ONLY
    causal: bool | None = None
    """Whether a query sees only keys at its own position or before. One of `causal`, `window` and
    `mask` must be given; the attribute of an instance is always a bool."""
    window: int | None = None
    """Number of keys that a query sees, including the key at its own position; None for all. An
    attention with a window is causal."""
    mask: masks.Mask | None = None
    """A mask of `startrail_jax.masks`, such as `masks.Prefix(512)`; None for the mask of `causal`
    and `window`. To change it by `dataclasses.replace`, also pass `causal=None`."""
    layout: Any = None
    """Placement of tokens: a `Layout`, its kind, or None for "contiguous", natural order. Under a
    causal mask "zigzag" gives all devices the same work, and `shard` brings arrays into its order.
    The attribute of an instance is always a `Layout`."""
    scale: float | None = None
    """Factor that scales the logits; None for head_dim ** -0.5."""
    softcap: float | None = None
    """Soft cap c of the scaled logits, c * tanh(logits / c), as in Gemma 2; None for no cap."""
    padding_id: int | None = None
    """A segment id that marks padding in addition to negative ids, such as 0 in MaxText; None for
    only negative ids."""
    backend: BackendArgument = "auto"
    """Block kernels: "cudnn" (NVIDIA GPUs, 16-bit dtypes, simple masks), "tiled" (NVIDIA
    GPUs, everything), "xla" (all platforms, everything), or "auto" for the first of these that
    supports the inputs on the devices of the mesh; "fa4" (FlashAttention-4, on Hopper and later, by
    the package fa4-jax); your own kernel, which is any hashable object with the methods of
    `startrail_jax.blocks.Block`; or a sequence of these, of which the first that supports the
    inputs is taken. See `explain`."""
    axis_names: AxisNames | Mapping[str, str | tuple[str, ...]] | None = None
    """Mesh axes whose role differs from their name, such as {"ring": "context"}."""
    axis: str | Sequence[str] | None = None
    """One axis for all sequence roles, such as "context", on a mesh of another program; None if
    each role has its own axis. Several axes count as one, the first slowest. Along the axis, the
    closest neighbours form a head exchange, and the next sets a team, a group and a ring."""
    degrees: Any = None
    """With `axis`, the `Degrees` along it; None for Ring Attention. The mesh determines the degrees
    of data and tensor. The attribute of an instance always holds all six degrees: to change the
    mesh by `dataclasses.replace`, also pass `degrees`, or None."""
    backward: Backward = "auto"
    """Side that travels round the ring in the backward pass: "query" (as in the paper), "kv", or
    "auto" for the side with fewer bytes, and for "query" if `published`."""
    published: bool = False
    """Whether keys and outputs are sent as in the StarTrail paper (arXiv 2407.00611, algorithm 2),
    as a baseline for measurements: the team gathers keys and trades places with the group, and a
    reduce_scatter sums outputs in the dtype of the query. Otherwise the group gathers keys, which
    takes fewer bytes, and the owner of the queries sums outputs in float32."""
    inner: int = 1
    """Number of devices in an inner cycle of a double ring (LoongTrain's Double-Ring-Attention),
    which divides the ring degree: keys (or queries) travel round these neighbours while those of
    the next cycle are on their way. It is meant for rings that cross nodes, with inner cycles
    inside a node. 1 is a single ring."""
    head_chunks: int = 1
    """Number of parts in which a device computes the attention of its heads, one after another; it
    divides the key heads of a device. Gathered units, messages of the ring and sums of gradients
    then take memory for two parts at a time, and the same bytes are sent in more messages."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which partial gradients travel round the ring and to their owners, which sum them in
    float32: "float32" (exact), or "bfloat16" (half of these bytes; the docs give the error)."""
    keep_gathered: bool = False
    """Whether the gathered units of queries, keys and values are kept from the forward to the
    backward pass, which otherwise gathers them again. Each layer then keeps `team` shares of the
    queries and `group` shares of keys and values in place of one."""
    exchange: Exchange = "auto"
    """Messages between devices: "rings" (the units of the scheme), "sparse" (only the keys that a
    static mask shows to the queries of each device, such as those of a window), or "auto" for the
    choice with fewer bytes. See `Attention.explain`."""
    balance: Balance = "auto"
    """How to balance the work of devices on tokens in contiguous order, where late tokens see more
    keys: "exchange" (the op brings tokens into zigzag order and outputs back, in four permutes of
    half a share), "layout" (the op leaves the work as the layout divides it), or "auto" for the
    exchange where it saves more time than it takes. See `Attention.explain`."""

    def __post_init__(self) -> None:
        check_arguments(self)

    @functools.cached_property
    def resolved_mask(self) -> masks.Mask:
        """The mask: `mask`, or what `causal` and `window` stand for."""
        return masks.resolve(self.mask, causal=self.causal, window=self.window)

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
            **{name: getattr(self, name) for name in OPTIONS},
        )

    def _schedule_of(self, trees: bool) -> Schedule:
        return for_trees(self.schedule) if trees else self.schedule

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
        latent_dim: int | None = None,
        dtype: DTypeLike = "bfloat16",
        packed: bool = False,
        kv_seq_len: int | None = None,
        platform: str | None = None,
        capability: tuple[int, int] | None = None,
        devices_per_node: int | None = None,
        scores: tuple[str, ...] = (),
        trees: bool = False,
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
            latent_dim: of `latent`, rank + rotary; None for keys and values.
            dtype: dtype of query, key and value.
            packed: whether there are segment ids.
            kv_seq_len: key tokens of the whole sequence; None for as many as query tokens.
            platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None for that of the mesh.
            capability: CUDA compute capability, such as (9, 0); None for that of the mesh.
            devices_per_node: number of devices in a node, in the order of `jax.devices()`; None to
                read it from the devices.
            scores: the score inputs that calls pass, among "slopes", "bias" and "dropout".
            trees: whether calls pass `visible_until`.

        Raises:
            ValueError: if sizes do not fit the mesh, or if the platform is unknown.
            NotImplementedError: if the backend of this attention does not support these inputs, or
                if no backend supports these scores.
        """
        sizes = Sizes(
            batch=self.degrees.data,
            query_tokens=seq_len,
            key_tokens=seq_len if kv_seq_len is None else kv_seq_len,
            **sizes_of_heads(heads, kv_heads, head_dim, value_head_dim, latent_dim),
            dtype=dtype_name(dtype),
            packed=packed or trees,
        )
        if trees:
            check_trees(self.resolved_mask, segment_ids=None, slopes=None)
        schedule = self._schedule_of(trees)
        return explain_call(
            self,
            schedule,
            dataclasses.replace(sizes, id_arrays=schedule.id_arrays),
            platform=platform,
            capability=capability,
            devices_per_node=devices_per_node,
            scores=scores,
        )

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
        visible_until: ArrayLike | None = None,
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
            visible_until: integers [batch, seq] sharded as `sequence_spec`, for rows that hold
                trees of texts with shared beginnings, each beginning once. A token sees those
                before it that it continues: key k is visible to the queries at places k to
                visible_until[k] - 1 of the row, counted in natural order in every layout. Rows are
                written depth first, so that all that continues a token follows it, and its number
                is the place after the last of that. A packed document is a tree without branches.
                Negative numbers are padding. In place of `segment_ids`, in a causal attention.
                Numbers on the host are checked.
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
        check_whole(self.mesh)
        refuse_unserved(unserved)
        check_static(is_causal=is_causal)
        check_causal(is_causal, self.resolved_mask)
        options = options_of_call(
            self,
            scale=scale,
            backend=implementation,
            window=local_window_size,
            softcap=softcap,
            padding_id=padding_id,
        )
        if visible_until is not None:
            check_trees(self.resolved_mask, segment_ids=segment_ids, slopes=slopes)
            segment_ids = int32_ends(self, visible_until, np.shape(query)[:2])
            options["padding_id"] = None
        attention = dataclasses.replace(self, **options) if options else self
        inputs, specs = served_call(
            attention,
            (query, key, value),
            segment_ids,
            dtype,
            of_scores=self.resolved_mask,
            mask=mask,
            pads_keys=bias is None,
        )
        given, given_specs = given_to_call(
            self,
            attention.schedule,
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
        trees = visible_until is not None
        out, lse = attention._whole(specs, given_specs, given, *inputs, trees=trees)
        return (out, lse) if return_lse else out

    def local(
        self,
        query: Array,
        key: Array,
        value: Array,
        query_segments: Array | None = None,
        key_segments: Array | None = None,
        *,
        visible_until: Array | None = None,
        **given: Any,
    ) -> tuple[Array, Array]:
        """Computes one device's part of a call, inside a fully manual `shard_map` of the caller.

        Args:
            query: this device's shard [b, t, n, h].
            key, value: this device's shards [b, s, k, h] and [b, s, k, v], with the key heads that
                its query heads need.
            query_segments, key_segments: int32 segment ids [b, t] and [b, s] of the same tokens;
                both or neither.
            visible_until: int32 [b, t] of the same tokens, as in a call; it is not checked.
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
        trees, ids = visible_until is not None, (query_segments, key_segments)
        if visible_until is not None:
            ids = self._ends_as_ids(visible_until, ids, given.get("slopes"))
        check_shards(
            query,
            key,
            value,
            *ids,
            degrees=self.degrees,
            layout=self.layout,
            mask=self.resolved_mask,
        )
        whole = given_to_shards(self.schedule, query, key, **given)
        kv_heads = key.shape[2] * self.degrees.tensor
        ids = ids if trees else self._marked(ids)
        return self._on_device(whole, query, key, value, *ids, kv_heads=kv_heads, trees=trees)

    def _ends_as_ids(
        self, visible_until: Array, ids: tuple[Array | None, Array | None], slopes: Any = None
    ) -> tuple[Array, Array]:
        """`visible_until` in the place of segment ids, of which none may be given."""
        given = ids[1] if ids[0] is None else ids[0]
        check_trees(self.resolved_mask, segment_ids=given, slopes=slopes)
        return visible_until, visible_until

    def _marked(self, ids: tuple[Array | None, Array | None]) -> tuple[Any, Any]:
        """Segment ids with their padding marked; one array for both sides stays one."""
        of_queries, of_keys = self.mark_padding(ids)
        return of_queries, of_queries if ids[0] is ids[1] else of_keys

    def latent(
        self,
        query: ArrayLike,
        latent: ArrayLike,
        rotated_key: ArrayLike | None,
        key_kernel: ArrayLike,
        value_kernel: ArrayLike,
        *,
        segment_ids: ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None = None,
        visible_until: ArrayLike | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Computes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in
        which one latent of each token stands for the keys and values of all heads.

            key of head n = [latent @ key_kernel[:, n], rotated_key],  value = latent @ value_kernel

        Devices send each other latents, and gradients of latents, alone: `rank + rotary` numbers a
        token in place of `heads * (head_dim + value_head_dim)`. A device makes the keys and values
        of a unit as it arrives, for as many heads at a time as take 256 MiB, at least for one, and
        in the backward pass again. With a head degree above 1, queries and outputs are exchanged,
        and latents gathered.

        Args:
            query: [batch, seq, heads, head_dim] sharded as `query_spec(heads)`, as in a call. The
                last `rotary` channels of a head meet `rotated_key`.
            latent: [batch, kv_seq, rank] sharded as `sequence_spec`, in the order of `layout`.
            rotated_key: [batch, kv_seq, rotary], sharded like latent: the part of the key that all
                heads share, with its rotary positions; None if `head_dim` has no such part.
            key_kernel: [rank, heads, head_dim - rotary] sharded over heads as the query is. It and
                its gradient are float32 inside, whatever its dtype, and it is used in that of the
                query.
            value_kernel: [rank, heads, value_head_dim], likewise.
            segment_ids, visible_until, return_lse: as in a call.

        Returns:
            out [batch, seq, heads, value_head_dim], and with `return_lse` lse, as in a call. Logits
            are scaled by head_dim ** -0.5 unless this attention has a `scale`.

        Raises:
            ValueError: if shapes, dtypes or shardings do not fit each other or the mesh.
            NotImplementedError: if an option is not supported, such as exchange="sparse".
        """
        check_static(return_lse=return_lse)
        check_whole(self.mesh)
        trees, attention = visible_until is not None, self
        if trees:
            check_trees(self.resolved_mask, segment_ids=segment_ids, slopes=None)
            segment_ids = int32_ends(self, visible_until, np.shape(query)[:2])
            attention = dataclasses.replace(self, padding_id=None)
        self.resolved_mask.check_closed("latent")
        arrays = query, latent, rotated_key, key_kernel, value_kernel
        inputs, specs, given, given_specs = latent_call(
            attention, self.resolved_mask, arrays, segment_ids
        )
        out, lse = attention._whole(specs, given_specs, given, *inputs, trees=trees)
        return (out, lse) if return_lse else out

    def latent_local(
        self,
        query: Array,
        latent: Array,
        rotated_key: Array | None,
        key_kernel: Array,
        value_kernel: Array,
        query_segments: Array | None = None,
        key_segments: Array | None = None,
        *,
        visible_until: Array | None = None,
    ) -> tuple[Array, Array]:
        """Computes one device's part of `latent`, inside a fully manual `shard_map` of the caller.

        Args:
            query: this device's shard [b, t, n, h].
            latent, rotated_key: this device's shards [b, s, r] and [b, s, rotary] or None, the same
                along `tensor`.
            key_kernel, value_kernel: [r, n, h - rotary] and [r, n, v], of this device's heads.
            query_segments, key_segments, visible_until: as in `local`.

        Returns:
            out [b, t, n, v] and lse [b, n, t], as `local` does.

        Raises:
            ValueError: if shapes or dtypes do not fit each other or the mesh.
        """
        trees, ids = visible_until is not None, (query_segments, key_segments)
        if visible_until is not None:
            ids = self._ends_as_ids(visible_until, ids)
        self.resolved_mask.check_closed("latent_local")
        arrays = query, latent, rotated_key, key_kernel, value_kernel
        rest = {"degrees": self.degrees, "layout": self.layout, "mask": self.resolved_mask}
        check_latents(*arrays, **rest, shards=True)
        check_segments(query, latent, ids_of_shards(*ids))
        given = ScoreInputs(expansion=Expansion.of(key_kernel, value_kernel))
        ids = ids if trees else self._marked(ids)
        shards = query, joined(latent, rotated_key), None, *ids
        return self._on_device(given, *shards, kv_heads=self.degrees.tensor, trees=trees)

    def latent_decode(
        self,
        query: ArrayLike,
        cache: ArrayLike,
        positions: ArrayLike,
        key_kernel: ArrayLike,
        value_kernel: ArrayLike,
        *,
        visible_until: ArrayLike | None = None,
    ) -> Array:
        """Computes latent attention of new tokens to a cache of latents: see `latent`, `decode`.

        No keys and values are made: each query is multiplied by `key_kernel`, and meets the latents
        themselves; what it finds is multiplied by `value_kernel` (the absorbed form of DeepSeek-V2,
        arXiv 2405.04434, section 2.1.2). As many bytes are sent as in `decode`.

        Args:
            query: [batch, new, heads, head_dim], as for `decode`.
            cache: [batch, slots, 1, rank + rotary] sharded as `key_spec(1)`: for each slot the
                latent and then the rotated key, which `update_cache` writes.
            positions, visible_until: as for `decode`.
            key_kernel, value_kernel: as for `latent`.

        Returns:
            out [batch, new, heads, value_head_dim] in the dtype of query and sharded like it.

        Raises:
            ValueError, NotImplementedError: as `decode`.
        """
        arrays = query, cache, positions, key_kernel, value_kernel
        return decode_latents(self, self.schedule, *arrays, visible_until=visible_until)

    def latent_decode_local(
        self,
        query: Array,
        cache: Array,
        positions: Array,
        key_kernel: Array,
        value_kernel: Array,
        *,
        visible_until: Array | None = None,
    ) -> Array:
        """Computes one device's part of `latent_decode`, inside a fully manual `shard_map`.

        Args:
            query: the new tokens [b, t, n, h] of this device's rows and heads.
            cache: this device's slots [b, s, 1, r + rotary].
            positions: int32 [b, t].
            key_kernel, value_kernel: [r, n, h - rotary] and [r, n, v], of this device's heads.
            visible_until: integers [b, s] of this device's slots.

        Returns:
            out [b, t, n, v] of this device's queries, in the dtype of query.

        Raises:
            ValueError, NotImplementedError: as `decode`.
        """
        arrays = query, cache, positions, key_kernel, value_kernel
        return decode_latent_shards(self, self.schedule, *arrays, visible_until)

    # `startrail_jax.testing` replaces these two by dense attention.

    def _whole(
        self,
        specs: tuple[Any, ...],
        given_specs: ScoreInputs,
        given: ScoreInputs,
        *inputs: Any,
        trees: bool,
    ) -> tuple[Array, Array]:
        return attend_whole(self, self._schedule_of(trees), specs, given_specs, given, *inputs)

    def _on_device(
        self, given: ScoreInputs, *shards: Any, kv_heads: int, trees: bool
    ) -> tuple[Array, Array]:
        return attend(self, self._schedule_of(trees), given, *shards, kv_heads=kv_heads)

    def decode(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        positions: ArrayLike,
        *,
        visible_until: ArrayLike | None = None,
        slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
    ) -> Array:
        """Computes the attention of new tokens to a cache that is sharded over the sequence axes.

        The result is that of a call with the whole sequence: each token attends to itself and to
        all tokens before it. Each of the P sequence devices r attends to its own slots, in float32,
        and the results are merged:

            L = log sum_r exp(lse_r),    out = sum_r exp(lse_r - L) out_r

        This takes two all_reduces, of one and of v + 1 float32 numbers for each query of each head.
        A device receives 2 (P - 1) / P * 4 * b * t * n * (v + 2) bytes, whatever the length of the
        cache.

        Args:
            query: [batch, new, heads, head_dim] sharded as `decode_spec(heads)`, replicated over
                the sequence axes. `new` should be small, as all logits exist at once.
            key_cache: [batch, slots, kv_heads, head_dim] sharded as `key_spec(kv_heads)`, in the
                order of `layout`. It already holds the keys of `query`: see `update_cache`. Slots
                of padding in front of a prompt would be seen: leave padding out of the cache, or
                mark it by `visible_until`.
            value_cache: [batch, slots, kv_heads, value_head_dim], sharded like key_cache.
            positions: int32 [batch, new], the position of each query. A query sees the slots up to
                its own position that the mask shows. A query at a negative position sees no slot.
                Positions may lie beyond the last slot.
            visible_until: integers [batch, slots] sharded as `sequence_spec`, in the order of the
                cache, for slots that hold a tree: a beginning and several texts that continue it.
                A query at position p sees the slots s <= p with visible_until[s] > p. To go on with
                one branch, give its slots, and those of the new tokens, a number beyond the new
                positions, and all other slots one that is not, such as where they ended. Branches
                may have grown in any order, and new tokens may branch too. Negative numbers are
                padding; no values are checked. A window counts the tokens of the branch, for which
                each device also receives 4 (P - 1) b t bytes, and twice that in zigzag order.
            slopes, sinks: as in a call.

        Returns:
            out [batch, new, heads, value_head_dim] in the dtype of query and sharded like it; 0
            where no slot is visible.

        Raises:
            ValueError: if this attention is not causal, or if shapes, dtypes or shardings do not
                fit.
            NotImplementedError: if `visible_until` is given with slopes, or with a mask that is
                neither causal nor a causal window.
        """
        return decode(
            self,
            self.schedule,
            query,
            key_cache,
            value_cache,
            positions,
            visible_until=visible_until,
            slopes=slopes,
            sinks=sinks,
        )

    def decode_local(
        self,
        query: Array,
        key_cache: Array,
        value_cache: Array,
        positions: Array,
        sinks: Array | None = None,
        slopes: Array | None = None,
        *,
        visible_until: Array | None = None,
    ) -> Array:
        """Computes one device's part of `decode`, inside a fully manual `shard_map` of the caller.

        Args:
            query: the new tokens [b, t, n, h] of this device's rows and heads.
            key_cache, value_cache: this device's slots [b, s, k, h] and [b, s, k, v], with the key
                heads that its query heads need; neighbouring query heads share a key head.
            positions: int32 [b, t], the positions of the new tokens.
            sinks, slopes: floats [n] of this device's heads, as in a call.
            visible_until: integers [b, s] of this device's slots, as in `decode`.

        Returns:
            out [b, t, n, v] of this device's queries, in the dtype of query.

        Raises:
            ValueError: if this attention is not causal, or if shapes or dtypes do not fit.
            NotImplementedError: as in `decode`.
        """
        arrays = query, key_cache, value_cache, positions
        return decode_shards(self, self.schedule, *arrays, sinks, slopes, visible_until)

    def update_cache(self, cache: ArrayLike, new: ArrayLike, positions: ArrayLike) -> Array:
        """Writes the keys, or the values, of new tokens into their slots; nothing is sent.

        Args:
            cache: [batch, slots, kv_heads, head_dim] sharded as `key_spec(kv_heads)`. It is written
                in place in a `jit` to which it is donated (`donate_argnums`), and in a loop that
                carries it; on CPUs, which have no 16-bit floats, only if it is float32.
            new: [batch, new, kv_heads, head_dim], sharded like the cache, but replicated over the
                sequence axes.
            positions: int32 [batch, new], distinct in each row. Positions outside the cache are not
                written: give padding in front of a prompt negative ones, and count from 0 after it.

        Returns:
            The cache, with its sharding and dtype unchanged.

        Raises:
            ValueError: if shapes or shardings do not fit, or if positions are not int32.
        """
        return update(self, cache, new, positions)

    def update_cache_local(
        self, cache: Array, new: Array, positions: Array, *, layer: Array | int | None = None
    ) -> Array:
        """Does one device's part of `update_cache`, inside a `shard_map` of the caller.

        Args:
            cache: this device's slots [b, s, k, h]; with a `layer`, those of all layers, [layers,
                b, s, k, h].
            new: keys or values of the new tokens [b, t, k, h], of this device's rows and key heads.
                They are cast to the dtype of the cache.
            positions: int32 [b, t], the positions of the new tokens.
            layer: the layer whose slots are written, if the cache has those of all layers.

        Returns:
            The cache.

        Raises:
            ValueError: if shapes do not fit, or if positions are not int32.
        """
        return update_shards(self, cache, new, positions, layer)

    def decode_spec(self, heads: int) -> PartitionSpec:
        """PartitionSpec of the queries and outputs of `decode`: [batch, new, heads, head_dim].

        Raises:
            ValueError: if the heads cannot be split over `head` and `tensor`.
        """
        return decode_spec(self, heads)

    def key_copies(self, kv_heads: int) -> int:
        """How many neighbouring key heads in the input of `local` are copies of one head.

        There are copies only if `tensor` does not divide `kv_heads` and `head` is above 1. A cache
        needs only one copy of each head, `key[:, :, ::copies]`.
        """
        return key_copies(self.degrees, kv_heads)
