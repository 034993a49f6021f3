"""Exact linear attention over a sequence that is sharded over the devices of a mesh.

The class has the arguments and the methods with their documentation; `checks.py`, `on_devices.py`,
`conv.py`, `cost.py` and `explain.py` do what they say. `vjp.py` computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from startrail_jax.calls.arguments import check_shared
from startrail_jax.calls.sharding import Sharded
from startrail_jax.calls.validation import check_shardings, check_static, check_whole
from startrail_jax.devices.axes import AxisNames, flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES
from startrail_jax.errors import InputError
from startrail_jax.linear.block import LinearCall
from startrail_jax.linear.checks import (
    check_conv,
    check_inputs,
    check_rows,
    check_state_heads,
    ids_of_call,
)
from startrail_jax.linear.conv import conv_of_all, conv_of_shards, run_conv
from startrail_jax.linear.cost import communication_of_states
from startrail_jax.linear.explain import LinearExplanation
from startrail_jax.linear.forks import Forked
from startrail_jax.linear.on_devices import (
    decode_on_device,
    heads_spec,
    on_device,
    run,
    run_decode,
    state_spec,
)
from startrail_jax.linear.rules import RULES, StateRule
from startrail_jax.linear.scan import Line
from startrail_jax.linear.sizes import LayerSizes, StateSizes
from startrail_jax.linear.vjp import BLOCKS
from startrail_jax.traffic.cost import Communication

_NAMES = ("query", "key", "value", "decay", "beta", "initial_state", "segment_ids")


@dataclasses.dataclass(frozen=True)
class LinearAttention(Sharded):
    """Exact linear attention over a sequence that is sharded over the devices of a mesh.

        S <- exp(decay) S;   S <- S + beta key (value - S^T key)^T;   out = scale S^T query

    for each token and head, in float32, where S is a matrix [key_dim, value_dim]. Devices send each
    other states, whose size does not depend on the number of tokens, and no number of heads limits
    the number of devices: all sequence axes of the mesh are one line. An instance is frozen and
    hashable, like `Attention`, and has its methods for shardings, where `shard` shards arrays of
    more than two dimensions as `heads_spec`.

    Raises:
        ValueError: if an option does not exist or does not fit the mesh.

    References:
        The rules are those of Gated DeltaNet, https://arxiv.org/abs/2412.06464, Kimi Linear,
        https://arxiv.org/abs/2510.26692, and Mamba-2, https://arxiv.org/abs/2405.21060.
    """

    mesh: Mesh | AbstractMesh
    """The mesh of the devices. Its axes have the roles data, group, ring, team, head and tensor;
    arrays are replicated over axes without a role."""
    _: dataclasses.KW_ONLY
    rule: Any
    """Rule by which a token changes the state: "gated_delta" (as above; one decay of a head), "kda"
    (a decay of each channel of the key), "ssd" (one decay of a head, and S <- S + beta key value^T:
    Mamba-2, lightning attention), or a `startrail_jax.linear.rules.StateRule`."""
    scale: float | None = None
    """Factor of the query; None for key_dim ** -0.5, and for 1 under "ssd"."""
    layout: Any = None
    """Placement of tokens: a `Layout`, its kind, or None for "contiguous", natural order, which
    sends about half of what "zigzag" sends. The attribute of an instance is always a `Layout`."""
    padding_id: int | None = None
    """A segment id that marks padding in addition to negative ids; None for only negative ids."""
    backend: str = "xla"
    """Kernels for the tokens of a device: "xla" (plain XLA, everywhere), or "jla" (the kernels of
    the package jax-linear-attention on Hopper, for 16 bits and heads of 64 or 128 channels)."""
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

    def __post_init__(self) -> None:
        self.resolve_places()
        check_shared(self, scale="key_dim ** -0.5, and 1 under rule='ssd'")
        rule = RULES.get(self.rule) if isinstance(self.rule, str) else self.rule
        if not isinstance(rule, StateRule):
            raise InputError(f"rule must be one of {(*RULES,)}; got rule={self.rule!r}. Give one.")
        object.__setattr__(self, "rule", rule)
        if self.backend not in BLOCKS:
            raise InputError(
                f"backend must be one of {(*BLOCKS,)}; got backend={self.backend!r}. Leave it out "
                "for 'xla'."
            )

    def heads_spec(self, heads: int, ndim: int = 4) -> PartitionSpec:
        """PartitionSpec of arrays [batch, seq, heads, ...]: query, key, value, decay and beta.

        Heads that the tensor degree does not divide are replicated over its axis.

        Args:
            heads: heads of the array, over all devices.
            ndim: number of its dimensions.
        """
        return heads_spec(self, heads, ndim)

    @property
    def state_spec(self) -> PartitionSpec:
        """PartitionSpec of states [batch, heads, key_dim, value_dim]."""
        return state_spec(self)

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        *,
        segment_ids: ArrayLike | None = None,
        visible_until: ArrayLike | None = None,
        levels: int = 2,
        initial_state: ArrayLike | None = None,
        return_state: bool = False,
    ) -> Any:
        """Computes the outputs of all tokens.

        There are as many states as the array with most heads has heads. The heads of each array
        divide this number, and neighbouring states share a head.

        Args:
            query, key: [batch, seq, heads, key_dim] with tokens in the order of `layout`; float32,
                bfloat16 or float16. Models normalise both for the delta rule.
            value: [batch, seq, heads, value_dim].
            decay: natural logarithms of the decay, [batch, seq, heads], or [batch, seq, heads,
                key_dim] under "kda"; floats of at most 0, as a rule. -inf forgets everything. None
                for no decay.
            beta: [batch, seq, heads], the factor of the written value; None for 1.
            segment_ids: integers [batch, seq]. Negative ids are padding, wherever it is: such
                tokens neither change nor end the state, and their outputs and gradients are 0. A
                document begins, with a state of zeros, at each other token whose id differs from
                the id of the one before it, also if the id of an earlier document comes back.
            initial_state: float32 [batch, heads, key_dim, value_dim], sharded as `state_spec`: the
                state before the first token that is no padding. None for zeros.
            return_state: whether to return the state after the last token too.

        Returns:
            out [batch, seq, heads, value_dim] with the dtype of value, sharded as `heads_spec`.
            With `return_state`, also the state [batch, heads, key_dim, value_dim] in float32.

        Raises:
            ValueError: if shapes, dtypes or shardings do not fit each other or the mesh.
            NotImplementedError: if `visible_until` comes with `initial_state` or `return_state`.
        """
        check_whole(self.mesh)
        check_static(return_state=return_state, levels=levels)
        states = {"initial_state": initial_state, "return_state": return_state}
        documents = segment_ids, visible_until, levels, jnp.shape(query)[:2]
        levels, ids = ids_of_call(self, self.rule, *documents, **states)
        given = (query, key, value, decay, beta, initial_state)
        arrays = [*(None if x is None else jnp.asarray(x) for x in given), ids]
        heads = check_inputs(self, self.rule, arrays)
        specs = (
            *(None if x is None else self.heads_spec(x.shape[2], x.ndim) for x in arrays[:5]),
            None if initial_state is None else self.state_spec,
            None if ids is None else self.sequence_spec,
        )
        present = [x for x in zip(_NAMES, arrays, specs, strict=True) if x[1] is not None]
        names, found, wanted = zip(*present, strict=True)
        check_shardings(names, found, wanted, self.mesh)
        call = self._call(heads, found[0].shape[3], packed=ids is not None, levels=levels)
        out, last = run(self, call, specs, return_state, *arrays)
        return (out, last) if return_state else out

    def local(
        self,
        query: Array,
        key: Array,
        value: Array,
        decay: Array | None = None,
        beta: Array | None = None,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
        levels: int = 2,
        initial_state: Array | None = None,
        return_state: bool = False,
    ) -> Any:
        """Computes one device's part of a call, inside a fully manual `shard_map` of the caller.

        Args:
            query, key, value, decay, beta: this device's shards, of the heads of its states.
            segment_ids, visible_until: int32 [b, t]; negative numbers are padding.
            levels: as in a call.
            initial_state: float32 [b, heads, key_dim, value_dim] of this device's heads.
            return_state: as in a call.

        Returns:
            As a call, of this device's tokens and heads.
        """
        given = (query, key, value, decay, beta)
        states = {"initial_state": initial_state, "return_state": return_state}
        documents = segment_ids, visible_until, levels, None
        levels, ids = ids_of_call(self, self.rule, *documents, **states)
        counts, call = self._call_of_shards(given, packed=ids is not None, levels=levels)
        arrays = (*given, initial_state, ids)
        out, last = on_device(self, call, counts, return_state, *arrays)
        return (out, last) if return_state else out

    def decode(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        *,
        state: ArrayLike | None,
    ) -> tuple[Array, Array]:
        """The outputs of new tokens, and the state after them.

        A call with `return_state` gives the state of a prompt. Every device along the sequence axes
        holds the new tokens and the state, and computes the same: nothing is sent.

        Args:
            query, key, value, decay, beta: as in a call, of a few new tokens.
            state: float32 [batch, heads, key_dim, value_dim] before them, sharded as `state_spec`;
                not None.

        Returns:
            out [batch, new, heads, value_dim] with the dtype of value, and the state.

        Raises:
            ValueError: if shapes or dtypes do not fit each other or the mesh.
        """
        check_whole(self.mesh)
        if state is None:
            raise InputError(
                "state must be float32 [batch, heads, key_dim, value_dim]; got state=None. Pass "
                "what a call with return_state=True returned, or zeros before the first token."
            )
        given = (query, key, value, decay, beta, state)
        arrays = [x if x is None else jnp.asarray(x) for x in given]
        heads = check_inputs(self, self.rule, [*arrays, None], whole=False)
        return run_decode(self, self._call(heads, jnp.shape(query)[3]), *arrays)

    def decode_local(
        self, query: Array, key: Array, value: Array, decay: Array, beta: Array, *, state: Array
    ) -> tuple[Array, Array]:
        """Computes one device's part of `decode`, as `local` does that of a call."""
        given = (query, key, value, decay, beta)
        counts, call = self._call_of_shards(given)
        return decode_on_device(self, call, counts, *given, state)

    def causal_conv(
        self,
        x: ArrayLike,
        kernel: ArrayLike,
        *,
        segment_ids: ArrayLike | None = None,
        visible_until: ArrayLike | None = None,
        levels: int = 2,
        initial: ArrayLike | None = None,
        return_last: bool = False,
    ) -> Any:
        """The short causal convolution, each channel by itself, that models have in front.

            out_t = sum_i kernel_i x_(t - width + 1 + i)

        Each device receives the last width - 1 tokens before its slices. Tokens of other documents,
        and padding, count as zeros, and outputs at padding are 0. Sums are in float32.

        Args:
            x: floats [batch, seq, channels] or [batch, seq, heads, channels], with tokens in the
                order of `layout`.
            kernel: [width, ...] with the channels of x; the last row is that of the token itself.
            segment_ids, visible_until: integers [batch, seq], as in a call. In trees, the tokens
                before are those that a token continues.
            levels: as in a call.
            initial: [batch, width - 1, ...], the inputs before the first token; None for zeros.
            return_last: whether to return the last width - 1 inputs of each row too, which are the
                `initial` of what follows: up to the last token that is no padding, with zeros for
                those of other documents.

        Returns:
            out with the shape, dtype and sharding of x; with `return_last`, also the last inputs,
            of the shape of `initial`.

        Raises:
            ValueError: if shapes do not fit each other or the mesh, or, without
                `visible_until`, if a slice of a device is shorter than width - 1.
            NotImplementedError: if `visible_until` comes with `initial` or `return_last`.
        """
        check_whole(self.mesh)
        check_static(return_last=return_last, levels=levels)
        x, kernel = jnp.asarray(x), jnp.asarray(kernel)
        first = check_conv(x, kernel, initial)
        inputs = {"initial": initial, "return_last": return_last}
        documents = segment_ids, visible_until, levels, x.shape[:2]
        levels, ids = ids_of_call(self, self.rule, *documents, **inputs)
        check_rows(self, x.shape[:2], ids)
        out, last = run_conv(self, return_last, levels, x, kernel, first, ids)
        return (out, last) if return_last else out

    def conv_local(
        self,
        x: Array,
        kernel: Array,
        *,
        segment_ids: Array | None = None,
        visible_until: Array | None = None,
        levels: int = 2,
        return_last: bool = False,
    ) -> Any:
        """Computes one device's part of `causal_conv`, as `local` does that of a call."""
        first = check_conv(x, kernel, None)
        documents = segment_ids, visible_until, levels, None
        levels, ids = ids_of_call(self, self.rule, *documents, return_last=return_last)
        out, last = conv_of_shards(self, return_last, levels, x, kernel, first, ids)
        return (out, last) if return_last else out

    def decode_conv(
        self, x: ArrayLike, kernel: ArrayLike, *, initial: ArrayLike | None
    ) -> tuple[Array, Array]:
        """`causal_conv` of a few new tokens, which all devices along the sequence axes hold.

        Args:
            x, kernel: as for `causal_conv`.
            initial: [batch, width - 1, ...], the last inputs that `causal_conv` or this returned;
                not None.

        Returns:
            out with the shape and the dtype of x, and the new last inputs.

        Raises:
            ValueError: if shapes do not fit each other.
        """
        if initial is None:
            raise InputError(
                "initial must be [batch, width - 1, ...]; got initial=None. Pass what causal_conv "
                "with return_last=True returned, or zeros before the first token."
            )
        x, kernel = jnp.asarray(x), jnp.asarray(kernel)
        first = check_conv(x, kernel, initial)
        return conv_of_all(x, kernel, first)

    def communication(
        self,
        *,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        packed: bool = False,
        levels: int = 0,
        initial_state: bool = False,
        return_state: bool = False,
        order: str | Sequence[str] | None = None,
        devices_per_node: int | None = None,
    ) -> Communication:
        """Bytes that one device receives in one call; the number of tokens does not matter.

        With P devices along the sequence, the forward pass receives ceil(log2 P) - 1 maps of a
        state, of key_dim * (key_dim + value_dim) float32 numbers a head (1 + key_dim * value_dim
        under "ssd"), and two states; under zigzag about twice as much. The backward pass receives
        as much again.

        Args:
            batch: rows. This and the heads are those of the whole arrays, over all devices.
            heads: states of a row.
            key_dim, value_dim: sizes of a state.
            packed: whether there are segment ids.
            levels: those of calls with `visible_until`; 0 for calls without. States and maps are so
                many times as large.
            initial_state: whether there is an initial state of which a gradient is taken.
            return_state: whether the last state is returned.
            order, devices_per_node: as in `communication`.

        Returns:
            As `communication`, with a map of all states of a device as the unit.

        Raises:
            ValueError: if the mesh does not divide batch or heads.
        """
        self.check_batch(batch)
        check_state_heads(self.degrees, {"state": heads})
        return communication_of_states(
            self.degrees,
            StateSizes(
                rule=self.rule,
                batch=batch // self.degrees.data,
                heads=heads // self.degrees.tensor,
                key_dim=key_dim,
                value_dim=value_dim,
                levels=levels,
            ),
            zigzag=self._line.zigzag,
            packed=packed,
            initial_state=initial_state,
            return_state=return_state,
            order=order,
            devices_per_node=devices_per_node,
        )

    def explain(
        self,
        *,
        seq_len: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        key_heads: int | None = None,
        batch: int | None = None,
        dtype: DTypeLike = "bfloat16",
        packed: bool = False,
        levels: int = 0,
    ) -> LinearExplanation:
        """Compares messages, memory and FLOPs of a call with other ways, without running it.

        `print(linear.explain(...))` shows the answer in a few lines.

        Args:
            seq_len: tokens of the whole sequence.
            heads, key_dim, value_dim, packed, levels: as for `communication`.
            key_heads: heads of query and key, over all devices; None for as many as states.
            batch: rows, over all devices; None for one of each data shard.
            dtype: dtype of query, key and value.

        Raises:
            ValueError: if sizes do not fit the mesh.
        """
        rows = self.degrees.data if batch is None else batch
        key_heads = heads if key_heads is None else key_heads
        check_rows(self, (rows, seq_len), None)
        check_state_heads(self.degrees, {"state": heads, "key": key_heads})
        tensor = self.degrees.tensor
        sizes = LayerSizes(
            rule=self.rule,
            batch=rows // self.degrees.data,
            heads=heads // tensor,
            key_dim=key_dim,
            value_dim=value_dim,
            tokens=seq_len // self.degrees.sequence,
            key_heads=key_heads // tensor if key_heads % tensor == 0 else key_heads,
            itemsize=jnp.dtype(dtype).itemsize,
            slices=self._line.slices,
            levels=levels,
        )
        sent = self.communication(
            batch=rows,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            packed=packed,
            levels=levels,
        )
        return LinearExplanation(devices=self.degrees.sequence, sizes=sizes, communication=sent)

    def _spec_of(self, shape: tuple[int, ...]) -> PartitionSpec:
        return self.heads_spec(shape[2], len(shape)) if len(shape) > 2 else self.sequence_spec

    @property
    def _line(self) -> Line:
        ranks = flat_axis(self.axes, SEQUENCE_ROLES)
        return Line(self.rule, ranks, self.layout.kind == "zigzag")

    def _call(
        self, heads: int, key_dim: int, *, packed: bool = False, levels: int = 0
    ) -> LinearCall:
        """What is static in a call, for states of so many heads over all devices."""
        here, scale, line = heads // self.degrees.tensor, self._scale(key_dim), self._line
        if not levels:
            return LinearCall(line, here, scale, packed, self.backend)
        line = dataclasses.replace(line, rule=Forked(self.rule, levels))
        return LinearCall(line, here, scale, packed, self.backend, levels)

    def _scale(self, key_dim: int) -> float:
        default = key_dim**-0.5 if self.rule.delta else 1.0
        return default if self.scale is None else self.scale

    def _call_of_shards(
        self, given: Sequence[Any], *, packed: bool = False, levels: int = 0
    ) -> tuple[tuple[int, ...], LinearCall]:
        """The heads over all devices of arrays of one device, 0 for None, and their call."""
        counts = tuple(0 if x is None else x.shape[2] * self.degrees.tensor for x in given)
        key_dim = given[0].shape[3]
        return counts, self._call(max(counts), key_dim, packed=packed, levels=levels)
