"""The public callable: it checks its inputs, enters `shard_map`, and calls `vjp.py`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from startrail_jax.calls.arguments import check_padding_id
from startrail_jax.calls.key_masks import as_negative
from startrail_jax.calls.sharding import Sharded, int32_ids
from startrail_jax.calls.validation import DTYPES, check_shardings, check_static, check_whole
from startrail_jax.devices.axes import device_kind, flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Axis
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.linear.block import LinearCall, LinearRequest
from startrail_jax.linear.conv import conv_of_all, conv_on_device, last_inputs
from startrail_jax.linear.cost import communication_of_states
from startrail_jax.linear.explain import LinearExplanation
from startrail_jax.linear.halo import begins, ids_before, kept
from startrail_jax.linear.rules import RULES, StateRule
from startrail_jax.linear.scan import Line
from startrail_jax.linear.sizes import LayerSizes, StateSizes
from startrail_jax.linear.vjp import BLOCKS, decode, linear_attention
from startrail_jax.rings import collectives
from startrail_jax.traffic.cost import Communication
from startrail_jax.values import adopt, is_real, real, whole
from startrail_jax.xla.varying import alike, vary

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

    rule: Any = dataclasses.field(default=None, kw_only=True)
    """Rule by which a token changes the state: "gated_delta" (as above; one decay of a head), "kda"
    (a decay of each channel of the key), "ssd" (one decay of a head, and S <- S + beta key value^T:
    Mamba-2, lightning attention), or a `startrail_jax.linear.rules.StateRule`. It must be given."""
    scale: float | None = dataclasses.field(default=None, kw_only=True)
    """Factor of the query; None for key_dim ** -0.5, and for 1 under "ssd"."""
    padding_id: int | None = dataclasses.field(default=None, kw_only=True)
    """A segment id that marks padding in addition to negative ids; None for only negative ids."""
    backend: str = dataclasses.field(default="xla", kw_only=True)
    """Kernels for the tokens of a device: "xla" (plain XLA, everywhere), or "jla" (the kernels of
    the package jax-linear-attention on Hopper, for 16 bits and heads of 64 or 128 channels)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        adopt(self, whole, "padding_id")
        adopt(self, real, "scale")
        check_padding_id(self.padding_id)
        rule = RULES.get(self.rule) if isinstance(self.rule, str) else self.rule
        if not isinstance(rule, StateRule):
            raise InputError(f"rule must be one of {(*RULES,)}; got rule={self.rule!r}. Give one.")
        object.__setattr__(self, "rule", rule)
        if self.backend not in BLOCKS:
            raise InputError(
                f"backend must be one of {(*BLOCKS,)}; got backend={self.backend!r}. Leave it out "
                "for 'xla'."
            )
        if not (self.scale is None or is_real(self.scale)):
            raise InputError(
                f"scale must be a finite number or None; got scale={self.scale!r}. None is "
                "key_dim ** -0.5, and 1 under rule='ssd'."
            )

    def heads_spec(self, heads: int, ndim: int = 4) -> PartitionSpec:
        """PartitionSpec of arrays [batch, seq, heads, ...]: query, key, value, decay and beta.

        Heads that the tensor degree does not divide are replicated over its axis.

        Args:
            heads: heads of the array, over all devices.
            ndim: number of its dimensions.
        """
        return PartitionSpec(*self.key_spec(heads)[:3], *[None] * (ndim - 3))

    @property
    def state_spec(self) -> PartitionSpec:
        """PartitionSpec of states [batch, heads, key_dim, value_dim]."""
        return PartitionSpec(self.sequence_spec[0], self._spec_entry("tensor"), None, None)

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        *,
        segment_ids: ArrayLike | None = None,
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
        """
        check_whole(self.mesh)
        check_static(return_state=return_state)
        ids = self._ids(segment_ids)
        given = (query, key, value, decay, beta, initial_state)
        arrays = [*(None if x is None else jnp.asarray(x) for x in given), ids]
        heads = self._check(arrays)
        specs = (
            *(None if x is None else self.heads_spec(x.shape[2], x.ndim) for x in arrays[:5]),
            None if initial_state is None else self.state_spec,
            None if ids is None else self.sequence_spec,
        )
        present = [x for x in zip(_NAMES, arrays, specs, strict=True) if x[1] is not None]
        names, found, wanted = zip(*present, strict=True)
        check_shardings(names, found, wanted, self.mesh)
        out, last = _run(self, specs, heads, return_state, *arrays)
        return (out, last) if return_state else out

    def _check(self, arrays: Any, *, whole: bool = True) -> int:
        """The number of states of a row; raises a ValueError unless arrays fit each other."""
        query, key, value, decay, beta, state, ids = arrays
        inputs = dict(query=query, key=key, value=value)
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
        if {x.ndim for x in inputs.values()} != {4} or not (
            query.shape[:2] == key.shape[:2] == value.shape[:2]
            and query.shape[3] == key.shape[3]
            and all(x.size for x in inputs.values())
        ):
            raise InputError(
                "query and key must be [batch, seq, heads, key_dim] and value [batch, seq, heads, "
                f"value_dim], of one batch, seq and key_dim; got {shapes}. Correct the odd one out."
            )
        dtypes = {str(x.dtype) for x in inputs.values()}
        if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            raise InputError(
                f"query, key and value must have one dtype of {DTYPES}; got "
                f"{', '.join(sorted(dtypes))}. Cast them."
            )
        batch, length, _, key_dim = query.shape
        rows = (key_dim,) if self.rule.by_channel else ()
        gates = {name: x for name, x in (("decay", decay), ("beta", beta)) if x is not None}
        for name, x in gates.items():
            rest = rows if name == "decay" else ()
            fits = x.ndim == 3 + len(rest) and x.shape == (batch, length, x.shape[2], *rest)
            if not fits or not jnp.issubdtype(x.dtype, jnp.floating):
                form = ", ".join(map(str, (batch, length, "heads", *rest)))
                raise InputError(
                    f"{name} must be floats [{form}] under rule={self.rule.name!r}; got "
                    f"{x.dtype} {list(x.shape)}."
                )
        heads = self._check_heads({name: x.shape[2] for name, x in (inputs | gates).items()})
        if state is not None:
            form = (batch, heads, key_dim, value.shape[3])
            if state.shape != form or state.dtype != jnp.float32:
                raise InputError(
                    "initial_state must be float32 [batch, heads, key_dim, value_dim] = "
                    f"{list(form)}; got {state.dtype} {list(state.shape)}."
                )
        if whole:
            self._check_rows((batch, length), ids)
        else:
            self._check_batch(batch)
        return heads

    def _check_heads(self, counts: dict[str, int]) -> int:
        """The largest number of heads; raises a ValueError unless all fit it and the mesh."""
        heads = max(counts.values())
        if any(heads % x for x in counts.values()) or heads % self.degrees.tensor:
            raise InputError(
                "The heads of each array must divide the largest number of heads, and this must be "
                f"divisible by tensor; got heads {counts}, tensor={self.degrees.tensor}."
            )
        return heads

    def _on_device(
        self, heads: int, counts: tuple[int, ...], returns_state: bool, *arrays: Any
    ) -> tuple[Array, Any]:
        """What one device computes, from its parts of the arrays."""
        *given, state, ids = arrays
        tokens = self._tokens(heads, counts, *given)
        b, t = tokens[0].shape[:2]
        call = self._call(heads, tokens[0].shape[3], packed=ids is not None)
        self._check_backend(tokens[2], tokens[0].shape[3])
        line, fresh = call.line, jnp.zeros((b, t), bool)
        if ids is not None:
            tokens = [kept(ids >= 0, x) for x in tokens]
            before = ids_before(ids, line.axis, zigzag=line.zigzag)
            fresh = begins(ids.reshape(*before.shape, -1), before).reshape(b, t)
        if state is None:
            state = jnp.zeros((b, call.heads, *(x.shape[3] for x in tokens[::2][:2])), jnp.float32)
        out, last = linear_attention(call, vary(state, *line.axis.names), fresh, *tokens)
        if ids is not None:  # For the gradients: what comes from padding goes nowhere.
            out = kept(ids >= 0, out)
        return out, collectives.total(last, line.axis) if returns_state else None

    def local(
        self,
        query: Array,
        key: Array,
        value: Array,
        decay: Array | None = None,
        beta: Array | None = None,
        *,
        segment_ids: Array | None = None,
        initial_state: Array | None = None,
        return_state: bool = False,
    ) -> Any:
        """Computes one device's part of a call, inside a fully manual `shard_map` of the caller.

        Args:
            query, key, value, decay, beta: this device's shards, of the heads of its states.
            segment_ids: int32 [b, t]; negative ids are padding.
            initial_state: float32 [b, heads, key_dim, value_dim] of this device's heads.
            return_state: as in a call.

        Returns:
            As a call, of this device's tokens and heads.
        """
        given = (query, key, value, decay, beta)
        counts = tuple(0 if x is None else x.shape[2] * self.degrees.tensor for x in given)
        ids = None if segment_ids is None else as_negative(self.padding_id, segment_ids)
        out, last = self._on_device(max(counts), counts, return_state, *given, initial_state, ids)
        return (out, last) if return_state else out

    def decode_local(
        self, query: Array, key: Array, value: Array, decay: Array, beta: Array, *, state: Array
    ) -> tuple[Array, Array]:
        """Computes one device's part of `decode`, as `local` does that of a call."""
        given = (query, key, value, decay, beta)
        counts = tuple(x.shape[2] * self.degrees.tensor for x in given)
        return self._decode_on_device(max(counts), counts, *given, state)

    def _decode_on_device(
        self, heads: int, counts: tuple[int, ...], *arrays: Any
    ) -> tuple[Array, Array]:
        """What one device computes of `decode`."""
        *given, state = arrays
        tokens = self._tokens(heads, counts, *given)
        return decode(self._call(heads, tokens[0].shape[3]), state, *tokens)

    def conv_local(
        self,
        x: Array,
        kernel: Array,
        *,
        segment_ids: Array | None = None,
        return_last: bool = False,
    ) -> Any:
        """Computes one device's part of `causal_conv`, as `local` does that of a call."""
        first = _check_conv(x, kernel, None)
        ids = None if segment_ids is None else as_negative(self.padding_id, segment_ids)
        out, last = self._conv_on_device(return_last, x, kernel, first, ids)
        return (out, last) if return_last else out

    def _conv_on_device(
        self, returns_last: bool, x: Array, kernel: Array, first: Array, ids: Array | None
    ) -> tuple[Array, Any]:
        """What one device computes of a convolution."""
        # In float32, for the sum of its gradient over devices.
        x, kernel, first, ids = alike(x, kernel.astype(jnp.float32), first, ids)
        here = x.shape[1] // self._line.slices
        if here < first.shape[1]:
            raise InputError(
                "Each slice of a device must have at least width - 1 tokens; got "
                f"{here}, width={len(kernel)}. Use fewer devices."
            )
        x = x if ids is None else kept(ids >= 0, x)
        out = conv_on_device(self.layout, self._ranks, x, kernel, ids, first)
        out = out if ids is None else kept(ids >= 0, out)
        if not returns_last:
            return out, None
        ids = jnp.zeros_like(x, jnp.int32, shape=x.shape[:2]) if ids is None else ids
        return out, last_inputs(self.layout, self._ranks, x, ids, first)

    def _call(self, heads: int, key_dim: int, *, packed: bool = False) -> LinearCall:
        """What is static on a device, for states of so many heads over all devices."""
        here, scale = heads // self.degrees.tensor, self._scale(key_dim)
        return LinearCall(self._line, here, scale, packed, self.backend)

    def _check_backend(self, value: Array, key_dim: int) -> None:
        """Raises a NotImplementedError unless the backend serves a call."""
        platform, capability = device_kind(self.mesh)
        request = LinearRequest(
            platform=platform,
            capability=capability,
            rule=self.rule.name,
            dtype=str(value.dtype),
            key_dim=key_dim,
            value_dim=value.shape[3],
        )
        refusal = BLOCKS[self.backend].refusal(request)
        if refusal is not None:
            raise UnsupportedError(
                f"backend={self.backend!r} does not serve this: {refusal}. Use backend='xla', "
                "which serves everything."
            )

    def _scale(self, key_dim: int) -> float:
        default = key_dim**-0.5 if self.rule.delta else 1.0
        return default if self.scale is None else self.scale

    def _tokens(self, heads: int, counts: tuple[int, ...], *given: Any) -> list[Array]:
        """Query, key, value, decay [b, t, _, 1 or k] and beta, with the heads of this device."""
        own: list[Any] = [
            x if x is None else self._own_heads(x, count, heads)
            for x, count in zip(given, counts, strict=True)
        ]
        query, key, value, decay, beta = own
        shape = (*query.shape[:2], heads // self.degrees.tensor)
        if decay is None:
            decay = jnp.zeros(shape, jnp.float32)
        if beta is None:
            beta = jnp.ones(shape, jnp.float32)
        return [query, key, value, decay if decay.ndim == 4 else decay[..., None], beta]

    def _own_heads(self, x: Array, count: int, heads: int) -> Array:
        """The heads of this device's states, of an array with `count` heads over all devices."""
        tensor = self.axes["tensor"]
        if count % tensor.degree == 0:
            return x
        here, of_head = heads // tensor.degree, heads // count
        neighbours = math.gcd(here, of_head)
        states = collectives.index(tensor) * here + jnp.arange(0, here, neighbours)
        return collectives.copy_heads(x, states // of_head, tensor).astype(x.dtype)

    def communication(
        self,
        *,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        packed: bool = False,
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
            initial_state: whether there is an initial state of which a gradient is taken.
            return_state: whether the last state is returned.
            order, devices_per_node: as in `communication`.

        Returns:
            As `communication`, with a map of all states of a device as the unit.

        Raises:
            ValueError: if the mesh does not divide batch or heads.
        """
        self._check_batch(batch)
        self._check_heads({"state": heads})
        return communication_of_states(
            self.degrees,
            StateSizes(
                rule=self.rule,
                batch=batch // self.degrees.data,
                heads=heads // self.degrees.tensor,
                key_dim=key_dim,
                value_dim=value_dim,
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
    ) -> LinearExplanation:
        """Compares messages, memory and FLOPs of a call with other ways, without running it.

        `print(linear.explain(...))` shows the answer in a few lines.

        Args:
            seq_len: tokens of the whole sequence.
            heads, key_dim, value_dim, packed: as for `communication`.
            key_heads: heads of query and key, over all devices; None for as many as states.
            batch: rows, over all devices; None for one of each data shard.
            dtype: dtype of query, key and value.

        Raises:
            ValueError: if sizes do not fit the mesh.
        """
        rows = self.degrees.data if batch is None else batch
        key_heads = heads if key_heads is None else key_heads
        self._check_rows((rows, seq_len), None)
        self._check_heads({"state": heads, "key": key_heads})
        tensor = self.degrees.tensor
        sizes = LayerSizes(
            rule=self.rule,
            batch=rows // self.degrees.data,
            heads=heads // tensor,
            key_dim=key_dim,
            value_dim=value_dim,
            tokens=seq_len // self._ranks.degree,
            key_heads=key_heads // tensor if key_heads % tensor == 0 else key_heads,
            itemsize=jnp.dtype(dtype).itemsize,
            slices=self._line.slices,
        )
        sent = self.communication(
            batch=rows, heads=heads, key_dim=key_dim, value_dim=value_dim, packed=packed
        )
        return LinearExplanation(devices=self._ranks.degree, sizes=sizes, communication=sent)

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
        return _run_decode(self, self._check([*arrays, None], whole=False), *arrays)

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
        first = _check_conv(x, kernel, initial)
        return conv_of_all(x, kernel, first)

    def causal_conv(
        self,
        x: ArrayLike,
        kernel: ArrayLike,
        *,
        segment_ids: ArrayLike | None = None,
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
            segment_ids: integers [batch, seq], as in a call.
            initial: [batch, width - 1, ...], the inputs before the first token; None for zeros.
            return_last: whether to return the last width - 1 inputs of each row too, which are the
                `initial` of what follows: up to the last token that is no padding, with zeros for
                those of other documents.

        Returns:
            out with the shape, dtype and sharding of x; with `return_last`, also the last inputs,
            of the shape of `initial`.

        Raises:
            ValueError: if shapes do not fit each other or the mesh, or if a slice of a device is
                shorter than width - 1.
        """
        check_whole(self.mesh)
        check_static(return_last=return_last)
        x, kernel = jnp.asarray(x), jnp.asarray(kernel)
        first = _check_conv(x, kernel, initial)
        ids = self._ids(segment_ids)
        self._check_rows(x.shape[:2], ids)
        out, last = _run_conv(self, return_last, x, kernel, first, ids)
        return (out, last) if return_last else out

    def _ids(self, segment_ids: Any) -> Array | None:
        """Segment ids as int32, with padding negative."""
        if segment_ids is None:
            return None
        return jnp.asarray(int32_ids(as_negative(self.padding_id, segment_ids)))

    def _check_rows(self, shape: tuple[int, ...], ids: Array | None) -> None:
        """Raises a ValueError unless arrays [batch, seq, ...] fit the mesh, and ids fit them."""
        if ids is not None and ids.shape != shape:
            raise InputError(
                f"segment_ids must be [batch, seq] = {list(shape)}; got {list(ids.shape)}. "
                "Linear attention has no keys of its own length, and takes no pair."
            )
        self._check_batch(shape[0])
        self.layout.check_length(shape[1])

    def _spec_of(self, shape: tuple[int, ...]) -> PartitionSpec:
        return self.heads_spec(shape[2], len(shape)) if len(shape) > 2 else self.sequence_spec

    @property
    def _line(self) -> Line:
        return Line(self.rule, self._ranks, self.layout.kind == "zigzag")

    @property
    def _ranks(self) -> Axis:
        return flat_axis(self.axes, SEQUENCE_ROLES)


def _check_conv(x: Array, kernel: Array, initial: Any) -> Array:
    """What stands before the first token; raises a ValueError unless all fit each other."""
    form = (x.shape[0], max(len(kernel) - 1, 0), *x.shape[2:]) if x.ndim in (3, 4) else ()
    first = jnp.zeros(form, x.dtype) if initial is None else jnp.asarray(initial)
    if not all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, kernel, first)):
        raise InputError(
            f"x, kernel and initial must be floats; got x {x.dtype}, kernel {kernel.dtype}, "
            f"initial {first.dtype}. Cast them."
        )
    if not form or kernel.shape[1:] != x.shape[2:] or not kernel.size or first.shape != form:
        raise InputError(
            "x must be [batch, seq, ...] with one or two dimensions of channels, kernel [width, "
            "...] and initial [batch, width - 1, ...] with the same ones; got x "
            f"{list(x.shape)}, kernel {list(kernel.shape)}, initial {list(first.shape)}."
        )
    return first.astype(x.dtype)


# Jitted, because outside a jit shard_map runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    attention: LinearAttention, specs: Any, heads: int, returns_state: bool, *arrays: Any
) -> tuple[Array, Any]:
    """Linear attention of whole arrays on the devices of its mesh."""
    counts = tuple(0 if x is None else x.shape[2] for x in arrays[:5])
    return jax.shard_map(
        functools.partial(attention._on_device, heads, counts, returns_state),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=(attention.heads_spec(heads), attention.state_spec if returns_state else None),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_decode(attention: LinearAttention, heads: int, *arrays: Any) -> tuple[Array, Array]:
    """New tokens of whole arrays, on the devices of the mesh."""
    counts = tuple(0 if x is None else x.shape[2] for x in arrays[:5])
    data = attention.sequence_spec[0]

    def spec(heads: int, ndim: int) -> PartitionSpec:
        return PartitionSpec(data, None, *attention.heads_spec(heads, ndim)[2:])

    return jax.shard_map(
        functools.partial(attention._decode_on_device, heads, counts),
        mesh=attention.mesh,
        in_specs=(
            *(None if x is None else spec(x.shape[2], x.ndim) for x in arrays[:5]),
            attention.state_spec,
        ),
        out_specs=(spec(heads, 4), attention.state_spec),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_conv(attention: LinearAttention, returns_last: bool, *arrays: Any) -> tuple[Array, Any]:
    """The convolution of whole arrays on the devices of the mesh."""
    data, seq, *rest = attention.heads_spec(arrays[0].shape[2], arrays[0].ndim)
    spec, beside = PartitionSpec(data, seq, *rest), PartitionSpec(data, None, *rest)
    return jax.shard_map(
        functools.partial(attention._conv_on_device, returns_last),
        mesh=attention.mesh,
        in_specs=(spec, PartitionSpec(None, *rest), beside, attention.sequence_spec),
        out_specs=(spec, beside if returns_last else None),
    )(*arrays)
