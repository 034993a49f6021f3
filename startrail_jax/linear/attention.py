"""The public callable: it checks its inputs, enters `shard_map`, and calls `vjp.py`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from startrail_jax.calls.arguments import check_padding_id
from startrail_jax.calls.key_masks import as_negative
from startrail_jax.calls.sharding import Sharded, int32_ids
from startrail_jax.calls.validation import DTYPES, check_shardings, check_static, check_whole
from startrail_jax.devices.axes import flat_axis
from startrail_jax.devices.degrees import SEQUENCE_ROLES, Axis
from startrail_jax.errors import InputError
from startrail_jax.linear.conv import conv_on_device, last_inputs
from startrail_jax.linear.halo import begins, with_tokens_before
from startrail_jax.linear.rules import RULES, StateRule
from startrail_jax.linear.scan import Line
from startrail_jax.linear.vjp import LinearCall, linear_attention
from startrail_jax.rings import collectives
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
    hashable, like `Attention`, and has its methods for shardings.

    Raises:
        ValueError: if an option does not exist or does not fit the mesh.

    References:
        The rules are those of Gated DeltaNet, https://arxiv.org/abs/2412.06464, Kimi Linear,
        https://arxiv.org/abs/2510.26692, and Mamba-2, https://arxiv.org/abs/2405.21060.
    """

    rule: Any = dataclasses.field(default=None, kw_only=True)
    """What a token does to the state: "gated_delta" (as above; one decay of a head), "kda" (a decay
    of each channel of the key), "ssd" (one decay of a head, and S <- S + beta key value^T: Mamba-2,
    lightning attention), or a `startrail_jax.linear.rules.StateRule`. It must be given."""
    scale: float | None = dataclasses.field(default=None, kw_only=True)
    """Factor of the query; None for key_dim ** -0.5, and for 1 under "ssd"."""
    padding_id: int | None = dataclasses.field(default=None, kw_only=True)
    """A segment id that marks padding in addition to negative ids; None for only negative ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        adopt(self, whole, "padding_id")
        adopt(self, real, "scale")
        check_padding_id(self.padding_id)
        rule = RULES.get(self.rule) if isinstance(self.rule, str) else self.rule
        if not isinstance(rule, StateRule):
            raise InputError(f"rule must be one of {(*RULES,)}; got rule={self.rule!r}. Give one.")
        object.__setattr__(self, "rule", rule)
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
            beta: [batch, seq, heads], what the written value is multiplied by; None for 1.
            segment_ids: integers [batch, seq]. A document begins, with a state of zeros, at a token
                whose id differs from that of the token before it. Negative ids are padding: such
                tokens neither change nor end the state, and their outputs and gradients are 0.
            initial_state: float32 [batch, heads, key_dim, value_dim], sharded as `state_spec`: the
                state before the first token. None for zeros.
            return_state: whether to return the state after the last token too.

        Returns:
            out [batch, seq, heads, value_dim] with the dtype of value, sharded as `query_spec`.
            With `return_state`, also the state [batch, heads, key_dim, value_dim] in float32.

        Raises:
            ValueError: if shapes, dtypes or shardings do not fit each other or the mesh.
        """
        check_whole(self.mesh)
        check_static(return_state=return_state)
        ids = segment_ids
        if ids is not None:
            ids = jnp.asarray(int32_ids(as_negative(self.padding_id, ids)))
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
        out, last = _run(self, specs, heads, *arrays)
        return (out, last) if return_state else out

    def _check(self, arrays: Any) -> int:
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
        counts = {name: x.shape[2] for name, x in (inputs | gates).items()}
        heads = max(counts.values())
        if any(heads % x for x in counts.values()) or heads % self.degrees.tensor:
            raise InputError(
                "The heads of each array must divide the largest number of heads, and this must be "
                f"divisible by tensor; got heads {counts}, tensor={self.degrees.tensor}."
            )
        if state is not None:
            form = (batch, heads, key_dim, value.shape[3])
            if state.shape != form or state.dtype != jnp.float32:
                raise InputError(
                    "initial_state must be float32 [batch, heads, key_dim, value_dim] = "
                    f"{list(form)}; got {state.dtype} {list(state.shape)}."
                )
        self._check_rows((batch, length), ids)
        return heads

    def _on_device(self, heads: int, *arrays: Any, counts: tuple[int, ...]) -> tuple[Array, Array]:
        """What one device computes, from its parts of the arrays."""
        tokens: list[Any]
        *tokens, state, ids = arrays
        line = Line(self.rule, self._ranks, self.layout.kind == "zigzag")
        here = heads // self.degrees.tensor
        (b, t, _, key_dim), value_dim = tokens[0].shape, tokens[2].shape[3]
        tokens = [
            x if x is None else self._own_heads(x, count, heads)
            for x, count in zip(tokens, counts, strict=True)
        ]
        if tokens[3] is None:
            tokens[3] = jnp.zeros((b, t, here), jnp.float32)
        if tokens[4] is None:
            tokens[4] = jnp.ones((b, t, here), jnp.float32)
        if tokens[3].ndim == 3:
            tokens[3] = tokens[3][..., None]
        fresh = jnp.zeros((b, t), bool)
        if ids is not None:
            tokens = [jnp.where(_wide(ids >= 0, x), x, 0) for x in tokens]
            behind = with_tokens_before(ids, ids[:, :1], line.axis, zigzag=line.zigzag)
            fresh = begins(behind).reshape(b, t)
        if state is None:
            state = jnp.zeros((b, here, key_dim, value_dim), jnp.float32)
        scale = self.scale
        if scale is None:
            scale = key_dim**-0.5 if self.rule.scaled else 1.0
        state = vary(state, *line.axis.names)
        out, last = linear_attention(LinearCall(line, here, scale), state, fresh, *tokens)
        if ids is not None:  # For the gradients: what comes from padding goes nowhere.
            out = jnp.where(_wide(ids >= 0, out), out, 0)
        return out, collectives.total(last, line.axis)

    def _own_heads(self, x: Array, count: int, heads: int) -> Array:
        """The heads of this device's states, of an array with `count` heads over all devices."""
        tensor = self.axes["tensor"]
        if count % tensor.degree == 0:
            return x
        here = heads // tensor.degree
        states = collectives.index(tensor) * here + jnp.arange(here)
        return jnp.take(x, states // (heads // count), axis=2)

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
            initial: [batch, width - 1, ...], what stands before the first token; None for zeros.
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
        form = (x.shape[0], max(kernel.shape[0] - 1, 0), *x.shape[2:]) if x.ndim in (3, 4) else ()
        first = jnp.zeros(form, x.dtype) if initial is None else jnp.asarray(initial)
        if not form or kernel.shape[1:] != x.shape[2:] or not kernel.size or first.shape != form:
            raise InputError(
                "x must be [batch, seq, ...] with one or two dimensions of channels, kernel [width,"
                " ...] and initial [batch, width - 1, ...] with the same ones; got x "
                f"{list(x.shape)}, kernel {list(kernel.shape)}, initial {list(first.shape)}."
            )
        ids = jnp.zeros(x.shape[:2], jnp.int32)
        if segment_ids is not None:
            ids = jnp.asarray(int32_ids(as_negative(self.padding_id, segment_ids)))
        self._check_rows(x.shape[:2], ids)
        if x.shape[1] // self.layout.multiple < form[1]:
            raise InputError(
                "Each slice of a device must have at least width - 1 tokens; got "
                f"{x.shape[1] // self.layout.multiple}, width={kernel.shape[0]}. Use fewer devices."
            )
        out, last = _run_conv(self, return_last, x, kernel, ids, first.astype(x.dtype))
        return (out, last) if return_last else out

    def _check_rows(self, shape: tuple[int, ...], ids: Array | None) -> None:
        """Raises a ValueError unless arrays [batch, seq, ...] fit the mesh, and ids fit them."""
        if ids is not None and ids.shape != shape:
            raise InputError(
                f"segment_ids must be [batch, seq] = {list(shape)}; got {list(ids.shape)}. "
                "Linear attention has no keys of its own length, and takes no pair."
            )
        self._check_batch(shape[0])
        self.layout.check_length(shape[1])

    @property
    def _ranks(self) -> Axis:
        return flat_axis(self.axes, SEQUENCE_ROLES)


def _wide(kept: Array, x: Array) -> Array:
    return kept.reshape(*kept.shape, *[1] * (x.ndim - 2))


# Jitted, because outside a jit shard_map runs its body one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(attention: LinearAttention, specs: Any, heads: int, *arrays: Any) -> tuple[Array, Array]:
    """Linear attention of whole arrays on the devices of its mesh."""
    counts = tuple(0 if x is None else x.shape[2] for x in arrays[:5])
    return jax.shard_map(
        functools.partial(attention._on_device, heads, counts=counts),
        mesh=attention.mesh,
        in_specs=specs,
        out_specs=(attention.heads_spec(heads), attention.state_spec),
    )(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_conv(
    attention: LinearAttention, returns_last: bool, *arrays: Array
) -> tuple[Array, Array | None]:
    """The convolution of whole arrays on the devices of the mesh."""
    layout, axis = attention.layout, attention._ranks
    data, seq, *rest = attention.heads_spec(arrays[0].shape[2], arrays[0].ndim)
    spec, beside = PartitionSpec(data, seq, *rest), PartitionSpec(data, None, *rest)

    def on_device(*arrays: Array) -> tuple[Array, Array | None]:
        x, kernel, ids, first = alike(*arrays)
        x = jnp.where(_wide(ids >= 0, x), x, 0)
        last = last_inputs(layout, axis, x, ids, first) if returns_last else None
        out = conv_on_device(layout, axis, x, kernel, ids, first)
        return jnp.where(_wide(ids >= 0, out), out, 0), last

    return jax.shard_map(
        on_device,
        mesh=attention.mesh,
        in_specs=(spec, PartitionSpec(None, *rest), attention.sequence_spec, beside),
        out_specs=(spec, beside if returns_last else None),
    )(*arrays)
