"""Shardings of arrays: the partition specs of an attention, and copies from the host and back.

The devices of a mesh hold the tokens in the order of the layout. `shard` brings host arrays into
this order and onto the devices; `unshard` undoes both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from startrail_jax.devices.axes import (
    AxisNames,
    check_mesh,
    check_sequence_axis,
    flat_axis,
    resolve_axes,
    share_axis,
)
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Axis, Degrees
from startrail_jax.errors import InputError
from startrail_jax.rings.sizes import check_heads
from startrail_jax.tokens.layout import Layout, check_unsharded, token_axis


class Sharded:
    """Arrays on the mesh of an `Attention` or a `LinearAttention`: their shardings, and copies from
    the host and back. The fields are those of the two."""

    mesh: Mesh | AbstractMesh
    layout: Any
    axis_names: AxisNames | Mapping[str, str | tuple[str, ...]] | None
    axis: str | Sequence[str] | None
    degrees: Any
    padding_id: int | None

    def resolve_places(self) -> None:
        """Checks the fields of a new instance, and gives them the form that they have from then on:
        an `AxisNames`, all six degrees, and a `Layout`."""
        check_mesh(self.mesh)
        if self.axis is None:
            check_sequence_axis(self.mesh, self.axis_names)
        elif isinstance(self.axis, Sequence) and not isinstance(self.axis, str):
            object.__setattr__(self, "axis", tuple(self.axis))
        object.__setattr__(self, "axis_names", AxisNames.of(self.axis_names))
        degrees = Degrees(**{role: axis.degree for role, axis in self.axes.items()})
        if self.axis is None and self.degrees not in (None, degrees):
            raise InputError(
                f"degrees go with axis=, the axis of the mesh that they split; got {self.degrees} "
                f"for a mesh whose axes say {degrees}. Give axis=, or leave degrees out: "
                "dataclasses.replace(attention, mesh=mesh, degrees=None)."
            )
        object.__setattr__(self, "degrees", degrees)
        object.__setattr__(self, "layout", Layout.of(self.layout, degrees.sequence))

    @functools.cached_property
    def axes(self) -> dict[str, Axis]:
        """The devices that play each role: mesh axes, or digits of one."""
        axes = resolve_axes(self.mesh, AxisNames.of(self.axis_names))
        return axes if self.axis is None else share_axis(self.mesh, axes, self.axis, self.degrees)

    @property
    def sequence_spec(self) -> PartitionSpec:
        """PartitionSpec of arrays [batch, seq], such as tokens or segment ids."""
        return PartitionSpec(self._spec_entry("data"), self._spec_entry(*SEQUENCE_ROLES))

    def query_spec(self, heads: int) -> PartitionSpec:
        """PartitionSpec of queries and outputs [batch, seq, heads, head_dim]."""
        check_heads(self.degrees, heads, heads)
        return PartitionSpec(*self.sequence_spec, self._spec_entry("tensor"), None)

    def key_spec(self, kv_heads: int) -> PartitionSpec:
        """PartitionSpec of keys and values [batch, seq, kv_heads, head_dim].

        Key heads that the tensor degree does not divide are replicated over its axis.
        """
        sharded = kv_heads % self.degrees.tensor == 0
        entry = self._spec_entry("tensor") if sharded else None
        return PartitionSpec(*self.sequence_spec, entry, None)

    def bias_spec(self, batch: int, heads: int) -> PartitionSpec:
        """PartitionSpec of a bias [batch, heads, seq, kv_seq]: rows as queries, whole columns.

        Args:
            batch: 1 for a bias that all rows of the batch share.
            heads: 1 for a bias that all heads share.
        """
        data, seq = self.sequence_spec
        tensor = self._spec_entry("tensor")
        return PartitionSpec(data if batch > 1 else None, tensor if heads > 1 else None, seq, None)

    @property
    def lse_spec(self) -> PartitionSpec:
        """PartitionSpec of the log-sum-exp [batch, heads, seq]."""
        batch, seq = self.sequence_spec
        return PartitionSpec(batch, self._spec_entry("tensor"), seq)

    def shard(self, *trees: Any) -> Any:
        """Puts host arrays into the order of the layout, and onto the devices of the mesh.

        Do everything that pairs tokens with each other first: shift the targets of a language
        model, then shard. With token ids [batch, seq + 1] on the host:

            tokens, targets = attention.shard(ids[:, :-1], ids[:, 1:])

        Afterwards, adjacent array entries are no longer adjacent tokens, unless the layout is
        "contiguous". With several processes, each process passes the whole arrays, and its devices
        take their shards.

        Args:
            *trees: arrays, or trees of arrays, in natural order: [batch, seq] such as tokens,
                targets, positions and segment ids; [batch, seq, channels]; or [batch, seq, heads,
                head_dim] such as queries, keys and values. A bias has two token dimensions: see
                `shard_bias`.

        Returns:
            The trees with sharded arrays in place of host arrays: one tree if one was given, else a
            tuple. Arrays of four dimensions are sharded as `key_spec`, which is `query_spec` for
            query heads, and all others as `sequence_spec`.
        """
        _check_devices("shard", self.mesh)
        sharded = tuple(jax.tree.map(self._shard_array, tree) for tree in trees)
        return sharded[0] if len(sharded) == 1 else sharded

    def shard_bias(self, bias: Any) -> jax.Array:
        """Puts a bias into the order of the layout, and onto the devices of the mesh.

        Args:
            bias: [1 or batch, 1 or heads, seq, kv_seq] on the host, in natural order.

        Returns:
            The bias sharded as `bias_spec`, with queries and keys in the order of the layout.
        """
        _check_devices("shard_bias", self.mesh)
        _check_not_traced("shard_bias", bias)
        shape = np.shape(bias)
        if len(shape) != 4:
            raise InputError(
                "shard_bias needs a bias [1 or batch, 1 or heads, seq, kv_seq]; got one of shape "
                f"{list(shape)}. Add dimensions of 1 for what rows or heads share."
            )
        if shape[0] > 1:
            self.check_batch(shape[0])
        if shape[1] > 1:
            check_heads(self.degrees, shape[1], shape[1])
        ordered = self.layout.permute(self.layout.permute(bias, axis=2), axis=3)
        return self._put(ordered, self.bias_spec(*shape[:2]))

    def unshard(self, *trees: Any, axis: int = 1) -> Any:
        """Brings arrays in layout order to the host, in natural order: the inverse of `shard`.

        With several processes, each calls it with the same arrays and gets the whole results.

        Results are on the host, so `unshard` of a result raises an error. But if a result was put
        onto the devices of the mesh again, `unshard` cannot know that its tokens are already in
        natural order, and returns them in a wrong third order. This happens by `jax.device_put`, by
        an operation with an array on the mesh or, on a mesh of only the default device, by any
        function of `jax.numpy`.

        Args:
            *trees: arrays, or trees of arrays, on the devices of the mesh, whose tokens are in the
                order of the layout, such as the outputs of a model. For host arrays in that order,
                use `layout.unpermute`.
            axis: the token dimension; 2 for the log-sum-exp [batch, heads, seq].

        Returns:
            NumPy arrays in place of arrays: one tree if one was given, else a tuple.
        """

        def unshard_array(x: Any) -> np.ndarray:
            _check_not_traced("unshard", x)
            self._check_on_mesh(x)
            return self.layout.unpermute(self._on_host(x), axis)

        whole = tuple(jax.tree.map(unshard_array, tree) for tree in trees)
        return whole[0] if len(whole) == 1 else whole

    def pad(self, *trees: Any, segment_ids: Any = None) -> tuple[Any, ...]:
        """`shard` for sequences of any length, which are padded at their end.

            query, key, value, segment_ids = attention.pad(query, key, value)
            out = attention(query, key, value, segment_ids=segment_ids)
            result = attention.unpad(out, seq_len=1000)

        Padding costs its share of work and memory: fewer than `layout.multiple` tokens, the
        sequence degree, or twice that under zigzag. On GPUs older than Hopper, and without a causal
        mask, segment ids cost more: "cudnn" does not support them there, so that "tiled" takes
        over. A causal attention gives the same outputs and gradients without segment ids, as long
        as the padding does not count in the loss, because no token sees later tokens.

        Args:
            *trees: arrays, or trees of arrays, in natural order, as `shard` takes them, all with
                the same number of tokens.
            segment_ids: integers [batch, seq] in natural order, for packed documents; None for rows
                of a single document.

        Returns:
            The trees as `shard` gives them, with zeros as padding, and last the segment ids as
            int32, -1 for padding. The ids are None if none were given and no padding was needed. A
            call takes the ids of queries and of keys as a pair, and either may be None.
        """
        if segment_ids is not None and not hasattr(segment_ids, "shape"):
            raise InputError(
                "segment_ids of pad must be one array [batch, seq], of the tokens that it pads; "
                f"got a {type(segment_ids).__name__}. Pad queries with their ids, and keys with "
                "theirs in another call."
            )
        given = jax.tree.leaves((trees, segment_ids))
        for x in given:
            _check_not_traced("pad", x)
            check_unsharded(x)
        sizes = {np.shape(x)[:2] for x in given}
        if len(sizes) != 1 or len(min(sizes)) < 2:
            raise InputError(
                "pad needs arrays [batch, seq, ...] of one batch and length; got "
                f"{', '.join(map(str, sorted(sizes))) or 'none'}. Call it for queries and for keys "
                "where these differ."
            )
        ((batch, length),) = sizes
        missing = self.layout.padded_length(length) - length
        if segment_ids is not None:
            segment_ids = int32_ids(segment_ids)
        elif missing:
            segment_ids = np.zeros((batch, length), np.int32)

        def padded(x: Any, fill: int = 0) -> np.ndarray:
            x = np.asarray(x)
            widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
            return np.pad(x, widths, constant_values=fill)

        filled = [self.shard(jax.tree.map(padded, tree)) for tree in trees]
        ids = None if segment_ids is None else self.shard(padded(segment_ids, -1))
        return *filled, ids

    def unpad(self, *trees: Any, seq_len: int, axis: int = 1) -> Any:
        """`unshard` without the padding: the inverse of `pad`.

        Args:
            *trees: arrays, or trees of arrays, as `unshard` takes them.
            axis: the token dimension; 2 for the log-sum-exp [batch, heads, seq]. It may be counted
                from the end, as -1.

        Returns:
            As `unshard`, with `seq_len` tokens.
        """
        length = self.layout.padded_length(seq_len)

        def cut(x: Any) -> np.ndarray:
            dim = token_axis(x, axis)
            if np.shape(x)[dim] != length:
                raise InputError(
                    f"unpad needs arrays of the length that pad gives {seq_len} tokens, {length}; "
                    f"got shape {list(np.shape(x))} and axis={axis}. Give the seq_len and the axis "
                    "of the array."
                )
            index = [slice(None)] * dim + [slice(seq_len)]
            return self.unshard(x, axis=dim)[tuple(index)]

        whole = tuple(jax.tree.map(cut, tree) for tree in trees)
        return whole[0] if len(whole) == 1 else whole

    def _shard_array(self, x: Any) -> jax.Array:
        _check_not_traced("shard", x)
        shape = np.shape(x)
        if len(shape) < 2:
            raise InputError(
                f"shard needs arrays [batch, seq, ...]; got one of shape {list(shape)}. "
                "Add a batch dimension, x[None]."
            )
        self.check_batch(shape[0])
        return self._put(self.layout.permute(x), self._spec_of(shape))

    def _spec_of(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How `shard` shards arrays of a shape."""
        return self.key_spec(shape[2]) if len(shape) == 4 else self.sequence_spec

    def mark_padding(self, segment_ids: Any) -> Any:
        """Segment ids, or a tree of them, with -1 in the place of the id of padding; None stays
        None."""
        if self.padding_id is None:
            return segment_ids

        def marked(ids: Any) -> Any:
            where = jnp.where if isinstance(ids, jax.Array) else np.where
            return where(ids == self.padding_id, np.int32(-1), int32_ids(ids))

        return jax.tree.map(marked, segment_ids)

    def placed(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array on the Explicit axes of the mesh; the compiler places it on others."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return x
        return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))

    def check_batch(self, batch: int) -> None:
        """Raises a ValueError unless the data degree divides a batch."""
        if batch % self.degrees.data:
            raise InputError(
                f"The data degree must divide the batch; got batch={batch}, "
                f"data={self.degrees.data}. Pad the batch, or lower data."
            )

    def _check_on_mesh(self, x: Any) -> None:
        """Raises if an array cannot be what a call of this attention gave. Permuting a result again
        would give a third order that nothing tells from the natural one."""
        if isinstance(x, jax.Array):
            devices = x.sharding.device_set
            if isinstance(self.mesh, AbstractMesh) or devices == set(self.mesh.devices.flat):
                return
            given = f"on {len(devices)} of other devices"
        else:
            given = "on the host"
        raise InputError(
            "unshard needs arrays on the devices of the mesh, in the order of the layout; got a "
            f"{type(x).__name__} of shape {list(np.shape(x))} {given}. What unshard returned is in "
            "natural order already: use it as it is. Host arrays in the order of the layout come "
            "to natural order with attention.layout.unpermute."
        )

    def _put(self, ordered: Any, spec: PartitionSpec) -> jax.Array:
        # A transfer for each device, so that a process handles only the shards of its own devices.
        host = np.asarray(ordered)
        sharding = NamedSharding(self.mesh, spec)
        places = sharding.addressable_devices_indices_map(host.shape)
        shards = [jax.device_put(host[index], device) for device, index in places.items()]
        if any(isinstance(shard, Tracer) for shard in shards):
            raise InputError(
                "A function under jit, grad or vmap cannot put a NumPy array onto devices; got one "
                f"of shape {list(host.shape)}. Call attention.shard, pad and shard_bias outside."
            )
        return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)

    def _on_host(self, x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            x = jax.jit(lambda y: y, out_shardings=everywhere)(x)
        return jax.device_get(x)

    def _spec_entry(self, *roles: str) -> str | tuple[str, ...] | None:
        if self.axis is not None and self.axes["data"].groups is not None:
            raise InputError(
                "A PartitionSpec cannot say that a part of a mesh axis shards the rows; got "
                f"axis={self.axis!r} with {self.degrees}. Call `attention.local` inside a "
                "shard_map whose arrays are sharded over the whole axis, or give data an axis of "
                "its own."
            )
        names = flat_axis(self.axes, roles).names
        return names[0] if len(names) == 1 else names or None


def int32_ids(ids: Any) -> Any:
    """Segment ids as int32, on the host or where they are."""
    on_host = not isinstance(ids, jax.Array)
    ids = np.asarray(ids) if on_host else ids
    kind = ids.dtype
    limits = np.iinfo(np.int32)
    fits = np.issubdtype(kind, np.integer) and (
        np.can_cast(kind, np.int32)
        or (on_host and ids.size > 0 and limits.min <= ids.min() and ids.max() <= limits.max)
    )
    if not fits:
        raise InputError(
            f"segment_ids must be integers that fit int32; got {kind} {list(ids.shape)}. "
            "Number the documents of each row from 0, pad with -1, and cast them to int32."
        )
    return ids.astype(np.int32)


def _check_devices(method: str, mesh: Mesh | AbstractMesh) -> None:
    if isinstance(mesh, AbstractMesh):
        raise InputError(
            f"{method} needs an attention on a mesh of devices; got an AbstractMesh. "
            "Build the Attention on a jax.sharding.Mesh."
        )


def _check_not_traced(method: str, x: Any) -> None:
    if isinstance(x, Tracer):
        raise InputError(
            f"{method} needs arrays that hold values; got the traced {jax.typeof(x)}. "
            f"Call attention.{method} outside of jit, grad and vmap."
        )
