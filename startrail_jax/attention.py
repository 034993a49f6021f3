"""The public callable: validates, enters `shard_map`, dispatches. No maths."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from startrail_jax import blocks, collectives, rings
from startrail_jax.analysis.explain import (
    Explanation,
    explain,
)
from startrail_jax.cache import (
    check_decode,
    check_update,
    sharded_decode,
    write_slots,
)
from startrail_jax.layout import Layout
from startrail_jax.mesh import (
    PLATFORMS,
    SEQUENCE_ROLES,
    AxisNames,
    Degrees,
    device_kind,
    flat_axis,
    resolve_axes,
)
from startrail_jax.schedule import Schedule, ring_offsets
from startrail_jax.validation import (
    check_arrays,
    check_heads,
    check_sharding,
    check_shards,
    refuse_unserved,
    segment_array,
)

_OPTIONS = {
    "backend": ("auto", *blocks.BACKENDS),
    "backward": ("auto", "query", "kv"),
    "placement": ("permute_gather", "gather_permute"),
    "combine": ("merge", "reduce_scatter"),
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Exact attention over a sequence that is sharded over the devices of a mesh.

        out = softmax(scale * query key^T + mask) value

    Frozen and hashable: build it once, call it anywhere, under `jit`, `grad`, `jax.checkpoint` and
    `lax.scan`. It is an `attention_fn` for `nnx.MultiHeadAttention` and for
    `linen.MultiHeadDotProductAttention`. The mesh degrees choose the scheme: see `Degrees`.

    Raises:
        ValueError: on an option that does not exist or does not fit the mesh.

    References:
        StarTrail, https://arxiv.org/abs/2407.00611.
    """

    mesh: Mesh | AbstractMesh
    """Its axes play the roles of `ROLES`; axes that play none are allowed, and replicate."""
    _: dataclasses.KW_ONLY
    causal: bool = True
    """Whether a query sees only keys at its own position or before."""
    layout: Any = None
    """Placement of tokens: a `Layout`, its kind, or None for "zigzag" if causal, else "contiguous".
    Always a `Layout` once built."""
    backend: str = "auto"
    """Block kernel: "cudnn" (NVIDIA GPUs; 16 bit; full and causal masks), "tiled" (NVIDIA GPUs;
    all else), "xla" (everywhere, everything), or "auto" for the first of them that serves the case
    on the devices of the mesh. See `explain`."""
    backward: str = "auto"
    """What goes round the ring in the backward pass: "query" (the paper), "kv", or "auto" for the
    one of fewer bytes."""
    placement: str = "permute_gather"
    """How key units form: ours, or "gather_permute", the paper's order of more bytes."""
    combine: str = "merge"
    """How a team joins its outputs: in float32 at their owner, or "reduce_scatter" (the paper)."""
    window: int | None = None
    """Number of keys that a query sees, itself included; causal only. None for all."""
    scale: float | None = None
    """Factor of the logits; None for head_dim ** -0.5."""
    axis_names: AxisNames | Mapping[str, str | tuple[str, ...]] | None = None
    """Which mesh axes play which role, where they are not named after it: {"ring": "context"}."""

    def __post_init__(self) -> None:
        for name, values in _OPTIONS.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {values}; got {name}={getattr(self, name)!r}. "
                    f"Leave it out for {values[0]!r}."
                )
        object.__setattr__(self, "axis_names", AxisNames.of(self.axis_names))
        object.__setattr__(self, "layout", self._resolve_layout())
        degrees = self.degrees
        if self.window is not None and not (
            self.causal and type(self.window) is int and self.window >= 1
        ):
            raise ValueError(
                "window needs causal=True and an integer of at least 1 key; got "
                f"window={self.window}, causal={self.causal}. Use window=None to see every key."
            )
        if self.placement == "gather_permute" and degrees.team != degrees.group:
            raise ValueError(
                "placement='gather_permute' needs team == group; got "
                f"team={degrees.team}, group={degrees.group}. Use placement='permute_gather'."
            )

    @classmethod
    def as_published(cls, mesh: Mesh | AbstractMesh, **options: Any) -> Attention:
        """StarTrail as in the paper: its key placement, combination and backward pass.

        The baseline to measure against. Takes the other options of `Attention`.
        """
        paper = dict(placement="gather_permute", combine="reduce_scatter", backward="query")
        return cls(mesh, **{**paper, **options})

    @functools.cached_property
    def degrees(self) -> Degrees:
        """Degrees of the mesh axes that play a role."""
        return Degrees(**{role: axis.degree for role, axis in self._axes.items()})

    @property
    def sequence_spec(self) -> PartitionSpec:
        """PartitionSpec of [batch, seq] arrays, such as tokens or segment ids."""
        return PartitionSpec(self._spec_entry("data"), self._spec_entry(*SEQUENCE_ROLES))

    def query_spec(self, heads: int) -> PartitionSpec:
        """PartitionSpec of queries and outputs [batch, seq, heads, head_dim].

        Raises:
            ValueError: if the heads cannot be split over `head` and `tensor`.
        """
        check_heads(self.degrees, heads, heads)
        return PartitionSpec(*self.sequence_spec, self._spec_entry("tensor"), None)

    def key_spec(self, kv_heads: int) -> PartitionSpec:
        """PartitionSpec of keys and values [batch, seq, kv_heads, head_dim].

        Fewer key heads than the tensor degree are replicated over it.
        """
        sharded = kv_heads % self.degrees.tensor == 0
        entry = self._spec_entry("tensor") if sharded else None
        return PartitionSpec(*self.sequence_spec, entry, None)

    @property
    def lse_spec(self) -> PartitionSpec:
        """PartitionSpec of the log-sum-exp [batch, heads, seq]."""
        batch, seq = self.sequence_spec
        return PartitionSpec(batch, self._spec_entry("tensor"), seq)

    def num_rounds(self, seq_len: int) -> int:
        """Ring rounds at this length: the ring degree, or fewer under a short window."""
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
    ) -> Explanation:
        """Which backend serves what, and why: `print(attention.explain(...))`. Runs nothing.

        Args:
            seq_len: tokens of the whole sequence.
            heads: query heads, over all devices.
            kv_heads: key heads, over all devices; None for as many.
            value_head_dim: None for `head_dim`.
            packed: whether there are segment ids.
            kv_seq_len: tokens of the keys; None for as many.
            platform: one of `PLATFORMS`; None for that of the mesh.
            capability: CUDA compute capability, such as (9, 0); None for that of the mesh.

        Raises:
            ValueError: if lengths or heads do not fit the mesh, or on an unknown platform.
            NotImplementedError: if a backend that was named does not serve this.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        kv_seq_len = seq_len if kv_seq_len is None else kv_seq_len
        if platform not in (None, *PLATFORMS):
            raise ValueError(
                f"platform must be one of {PLATFORMS}; got {platform!r}. "
                "Leave it out for that of the mesh."
            )
        batch, tensor, ranks = self.degrees.data, self.degrees.tensor, self.degrees.head
        query, key, value = (
            jax.ShapeDtypeStruct((batch, *shape), dtype)
            for shape in (
                (seq_len, heads, head_dim),
                (kv_seq_len, kv_heads, head_dim),
                (kv_seq_len, kv_heads, value_head_dim or head_dim),
            )
        )
        check_arrays(
            query, key, value, (), degrees=self.degrees, layout=self.layout, causal=self.causal
        )
        schedule = self.schedule
        if platform not in (None, schedule.platform):
            schedule = dataclasses.replace(schedule, platform=platform, capability=None)
        if capability is not None:
            schedule = dataclasses.replace(schedule, capability=capability)
        return explain(
            schedule,
            seq_len,
            kv_seq_len,
            heads=heads // (ranks * tensor),
            kv_heads=max(1, kv_heads // (ranks * tensor)),
            head_dim=head_dim,
            value_head_dim=value_head_dim or head_dim,
            dtype=jnp.dtype(dtype),
            packed=packed,
        )

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
        return_lse: bool = False,
        dtype: DTypeLike | None = None,
        is_causal: bool = False,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        precision: Any = None,
        module: Any = None,
        input_positions: ArrayLike | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Any:
        """Attends every query to the keys that it may see.

        Args:
            query: [batch, seq, heads, head_dim], sharded as `query_spec(heads)`, tokens in the
                order of `layout`; float32, bfloat16 or float16.
            key: [batch, kv_seq, kv_heads, head_dim], as `key_spec(kv_heads)`; `kv_heads` divides
                `heads`, and each key head serves neighbouring query heads.
            value: [batch, kv_seq, kv_heads, value_head_dim], likewise.
            segment_ids: integers [batch, seq] as `sequence_spec`, or a pair for queries and keys.
                Equal ids see each other; negative ids are padding, of output and gradient 0.
            return_lse: whether to return the log-sum-exp too; gradients flow through both.
            dtype: to cast query, key and value to; None leaves them.
            is_causal: True is an error on an instance that is not causal; False changes nothing.
            bias, mask, dropout_rng, dropout_rate, broadcast_dropout, deterministic, precision,
            module, input_positions, force_fp32_for_softmax, einsum_dot_general,
            qk_attn_weights_einsum, attn_weights_value_einsum: what Flax passes to an attention
                function; anything that asks for more than this op serves raises. The softmax is
                always in float32.

        Returns:
            out [batch, seq, heads, value_head_dim] in the dtype of query and sharded like it; 0 in
            rows that see no key. With `return_lse` also lse [batch, heads, seq] in float32, the
            natural log of the sum of exponentials of the scaled logits, sharded as `lse_spec`;
            -1e30 in such rows.

        Raises:
            ValueError: if shapes, dtypes or shardings do not fit each other or the mesh.
            NotImplementedError: for a Flax option that is not served.
        """
        del dropout_rng, broadcast_dropout, force_fp32_for_softmax
        refuse_unserved(
            bias=bias,
            mask=mask,
            dropout_rate=0.0 if deterministic else dropout_rate,
            precision=precision,
            module=module,
            input_positions=input_positions,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if is_causal and not self.causal:
            raise ValueError(
                "is_causal=True needs a causal attention; got an instance with causal=False. "
                "Build Attention(mesh, causal=True)."
            )
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
        ids = () if segment_ids is None else tuple(segment_array(x) for x in pair)
        check_arrays(
            query, key, value, ids, degrees=self.degrees, layout=self.layout, causal=self.causal
        )
        query_spec, key_spec = self.query_spec(query.shape[2]), self.key_spec(key.shape[2])
        in_specs = (query_spec, key_spec, key_spec, *(self.sequence_spec for _ in ids))
        arrays = (query, key, value, *ids)
        names = ("query", "key", "value", "segment_ids", "key segment_ids")
        for name, array, spec in zip(names, arrays, in_specs, strict=False):
            check_sharding(name, array, spec, self.mesh)
        out, lse = _run(self, in_specs, *arrays)
        return (out, lse) if return_lse else out

    def local(
        self,
        query: Array,
        key: Array,
        value: Array,
        query_segments: Array | None = None,
        key_segments: Array | None = None,
    ) -> tuple[Array, Array]:
        """The same on one device's shards, for use inside a fully manual `shard_map` of yours.

        Args:
            query, key, value: this device's shards, with the key heads of its own query heads.
            query_segments, key_segments: int32 segment ids of the same tokens, both or neither.

        Returns:
            out and lse [b, n, t] of this device's queries.

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
            causal=self.causal,
        )
        return rings.sharded_attention(
            self.schedule, query, key, value, query_segments, key_segments
        )

    def _on_device(
        self, query: Array, key: Array, value: Array, *ids: Array, kv_heads: int
    ) -> tuple[Array, Array]:
        if kv_heads % self.degrees.tensor:
            needed = self._needed_heads(kv_heads)
            key, value = (
                collectives.copy_heads(x, needed, self._axes["tensor"]) for x in (key, value)
            )
        query_ids, key_ids = (ids[0], ids[-1]) if ids else (None, None)
        return self.local(query, key, value, query_ids, key_ids)

    def _needed_heads(self, kv_heads: int) -> Array:
        """Of all key heads, replicated over `tensor`, those that this device needs, in order.

        One for each part of its query heads that `head` splits them into.
        """
        splits = self.degrees.head * self.degrees.tensor
        first = collectives.index(self._axes["tensor"]) * self.degrees.head
        return (first + jnp.arange(self.degrees.head)) // (splits // kv_heads)

    # Decoding: a few new tokens and a cache.

    def decode(
        self, query: ArrayLike, key_cache: ArrayLike, value_cache: ArrayLike, positions: ArrayLike
    ) -> Array:
        """Attends new tokens to a cache of keys and values that is sharded over the sequence axes.

        The same attention as of a call: that of a token to itself and to all before it. Each device
        attends to its own slots, and float32 results are merged: `startrail_jax.cache` says how,
        and how many bytes it takes, which does not depend on the length of the cache.

        Args:
            query: [batch, new, heads, head_dim] as `decode_spec(heads)`, replicated over the
                sequence axes; few, as their logits exist as a whole.
            key_cache: [batch, slots, kv_heads, head_dim] as `key_spec(kv_heads)`, in the order of
                `layout`, with the keys of `query` in it already: see `update_cache`.
            value_cache: [batch, slots, kv_heads, value_head_dim], likewise.
            positions: int32 [batch, new], of each query; it sees slots of its own position and
                below, the last `window` of them. A query of negative position sees none.

        Returns:
            out [batch, new, heads, value_head_dim] in the dtype of query and sharded like it; 0
            where no slot is visible.

        Raises:
            ValueError: if this attention is not causal, or shapes, dtypes or shardings do not fit.
        """
        query, key, value = (jnp.asarray(x) for x in (query, key_cache, value_cache))
        positions = jnp.asarray(positions)
        check_decode(
            query,
            key,
            value,
            positions,
            causal=self.causal,
            layout=self.layout,
            slots=key.shape[1],
        )
        query_spec, key_spec = self.decode_spec(query.shape[2]), self.key_spec(key.shape[2])
        check_heads(self.degrees, query.shape[2], key.shape[2])
        specs = (query_spec, key_spec, key_spec, PartitionSpec(query_spec[0]))
        names = ("query", "key_cache", "value_cache", "positions")
        arrays = (query, key, value, positions)
        for name, array, spec in zip(names, arrays, specs, strict=True):
            check_sharding(name, array, spec, self.mesh)
        return _decode(self, specs, *arrays)

    def decode_local(
        self, query: Array, key_cache: Array, value_cache: Array, positions: Array
    ) -> Array:
        """The same on one device, for use inside a fully manual `shard_map` of yours.

        Args:
            query: new tokens of this device's rows and heads.
            key_cache, value_cache: its slots, of the key heads of those heads: neighbouring query
                heads share one.
            positions: of the new tokens.

        Returns:
            out of all this device's queries.

        Raises:
            ValueError: if this attention is not causal, or shapes or dtypes do not fit.
        """
        check_decode(
            query,
            key_cache,
            value_cache,
            positions,
            causal=self.causal,
            layout=self.layout,
            slots=key_cache.shape[1] * self.degrees.sequence,
        )
        return sharded_decode(
            query,
            key_cache,
            value_cache,
            positions,
            layout=self.layout,
            ranks=flat_axis(self._axes, SEQUENCE_ROLES),
            window=self.window,
            scale=self.scale,
        )

    def update_cache(self, cache: ArrayLike, new: ArrayLike, positions: ArrayLike) -> Array:
        """Puts keys, or values, of new tokens into their slots of a cache; nothing is sent.

        Args:
            cache: [batch, slots, kv_heads, head_dim] as `key_spec(kv_heads)`. Written in place
                under a `jit` that is given it to keep (`donate_argnums`), or that loops over it.
            new: [batch, new, kv_heads, head_dim], sharded likewise, but for the new tokens, which
                are replicated over the sequence axes.
            positions: int32 [batch, new], distinct in each row; positions that are not in the
                cache are not written.

        Returns:
            The cache, sharded as it was.

        Raises:
            ValueError: if shapes or shardings do not fit.
        """
        cache, new, positions = (jnp.asarray(x) for x in (cache, new, positions))
        check_update(cache, new, positions, layout=self.layout, slots=cache.shape[1])
        spec = self.key_spec(cache.shape[2])
        specs = (spec, PartitionSpec(spec[0], None, *spec[2:]), PartitionSpec(spec[0]))
        names = ("cache", "new", "positions")
        for name, array, wanted in zip(names, (cache, new, positions), specs, strict=True):
            check_sharding(name, array, wanted, self.mesh)
        return _update(self, specs, cache, new, positions)

    def update_cache_local(
        self, cache: Array, new: Array, positions: Array, *, layer: Array | int | None = None
    ) -> Array:
        """The same on one device, for use inside a fully manual `shard_map` of yours.

        Args:
            cache: this device's slots; with a `layer` those of all layers, [layers, b, s, k, h].
            new: of this device's rows and key heads.
            positions: of the new tokens.
            layer: which layer's slots to write.

        Raises:
            ValueError: if shapes do not fit, or positions are not int32; `new` is cast to the
                dtype of the cache.
        """
        check_update(
            cache,
            new,
            positions,
            layout=self.layout,
            slots=cache.shape[-3] * self.degrees.sequence,
            layers=layer is not None,
        )
        ranks = flat_axis(self._axes, SEQUENCE_ROLES)
        return write_slots(cache, new, positions, layout=self.layout, ranks=ranks, layer=layer)

    def decode_spec(self, heads: int) -> PartitionSpec:
        """PartitionSpec of the queries and outputs of `decode`: [batch, new, heads, head_dim].

        Raises:
            ValueError: if the heads cannot be split over `head` and `tensor`.
        """
        batch, _, split, _ = self.query_spec(heads)
        return PartitionSpec(batch, None, split, None)

    def key_copies(self, kv_heads: int) -> int:
        """How many neighbours among the key heads that `local` gets are copies of the same one.

        More than 1 only where `head` trades tokens for heads that `tensor` has none of its own of:
        of those, a cache needs every such one, `key[:, :, ::copies]`.
        """
        splits = self.degrees.head * self.degrees.tensor
        if kv_heads % self.degrees.tensor == 0:
            return 1
        return math.gcd(self.degrees.head, splits // kv_heads)

    def _decode_on_device(
        self, query: Array, key: Array, value: Array, positions: Array, *, kv_heads: int
    ) -> Array:
        if kv_heads % self.degrees.tensor:
            needed = self._needed_heads(kv_heads)[:: self.key_copies(kv_heads)]
            key, value = (jnp.take(x, needed, axis=2, mode="clip") for x in (key, value))
        return self.decode_local(query, key, value, positions)

    @functools.cached_property
    def _axes(self) -> dict[str, Any]:
        return resolve_axes(self.mesh, AxisNames.of(self.axis_names))

    @functools.cached_property
    def schedule(self) -> Schedule:
        """What `local` runs: all that is static about this attention."""
        platform, capability = device_kind(self.mesh)
        return Schedule(
            platform=platform,
            capability=capability,
            **{role: self._axes[role] for role in SEQUENCE_ROLES},
            **{
                name: getattr(self, name)
                for name in (*_OPTIONS, "layout", "causal", "window", "scale")
            },
        )

    def _spec_entry(self, *roles: str) -> str | tuple[str, ...] | None:
        names = flat_axis(self._axes, roles).names
        return names[0] if len(names) == 1 else names or None

    def _resolve_layout(self) -> Layout:
        layout, degree = self.layout, self.degrees.sequence
        if layout is None:
            layout = "zigzag" if self.causal else "contiguous"
        if isinstance(layout, str):
            return Layout(layout, degree)
        if layout.degree != degree:
            raise ValueError(
                f"The layout must have as many shards as the mesh has sequence ranks; got "
                f"layout.degree={layout.degree}, sequence degree={degree}. "
                f"Pass layout={layout.kind!r} to have it built."
            )
        return layout


# Jitted, as shard_map outside jit runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    attention: Attention, in_specs: tuple[PartitionSpec, ...], *arrays: Array
) -> tuple[Array, Array]:
    """The op on global arrays that have been checked."""
    return jax.shard_map(
        functools.partial(attention._on_device, kv_heads=arrays[1].shape[2]),
        mesh=attention.mesh,
        in_specs=in_specs,
        out_specs=(in_specs[0], attention.lse_spec),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(attention: Attention, specs: tuple[PartitionSpec, ...], *arrays: Array) -> Array:
    """`decode` of arrays that have been checked."""
    return jax.shard_map(
        functools.partial(attention._decode_on_device, kv_heads=arrays[1].shape[2]),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=specs[0],
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(attention: Attention, specs: tuple[PartitionSpec, ...], *arrays: Array) -> Array:
    """`update_cache` of arrays that have been checked."""
    return jax.shard_map(
        attention.update_cache_local,
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=specs[0],
    )(*arrays)
