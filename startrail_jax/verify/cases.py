"""What is verified: a call of attention or of linear attention, of the sizes of the flags."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from startrail_jax import masks
from startrail_jax.attention import Attention
from startrail_jax.device_mesh import make_mesh
from startrail_jax.devices.degrees import Degrees
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.linear.attention import LinearAttention
from startrail_jax.rings.work import visible_pairs
from startrail_jax.testing import MAX_LOGITS, Trial, draw_documents, draw_trial
from startrail_jax.tokens.layout import KINDS
from startrail_jax.traffic.cost import Communication, communication
from startrail_jax.verify.schemes import NAMES, Scheme, schemes_of

PASSES = ("forward", "both")
"""What is compiled and timed: the forward pass, and the forward with the backward pass."""

_SIMULATED_LOGITS = 2**22
"""As `MAX_LOGITS`, on simulated devices: there, the op takes longer than its reference."""
_STATE_NUMBERS = {"cpu": 2**25, "default": 2**29}
"""Numbers in all states that the reference of linear attention keeps, 8 bytes each."""
# Of the draw of arrays that are timed.
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call on some devices. Sizes are those of whole arrays, over all devices."""

    devices: tuple[Any, ...]
    seq_len: int
    """Tokens of a row, as timed; exactness is checked on fewer."""
    rows: int
    heads: int
    """Query heads; of linear attention, states."""
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    documents: bool
    """Whether rows are packed: four documents of random lengths, and padding."""
    layout: str | None
    data: int
    tensor: int
    options: Mapping[str, Any]
    """Further arguments of the attention."""
    wanted: tuple[str, ...] = NAMES
    """Names of the schemes to verify."""

    @property
    def sequence(self) -> int:
        """Devices that share a row."""
        return len(self.devices) // (self.data * self.tensor)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are simulated."""
        return self.devices[0].platform == "cpu"

    @property
    def check_rows(self) -> int:
        """Rows of the problem of the check."""
        return 2 * self.data

    @property
    def check_len(self) -> int:
        """Tokens of the rows on which exactness is checked: what the reference can compute."""
        step = 2 * self.sequence
        most = max(min(self.seq_len, self._most_tokens) // step, 1)
        return step * (most if most * step == self.seq_len else 1 << most.bit_length() - 1)

    @property
    def byte_dtype(self) -> str:
        """Dtype of the program whose bytes are counted. XLA's CPU backend sends bfloat16 as
        float32, so that float16, which is as wide, stands for it."""
        return "float16" if self.on_cpu and self.dtype == "bfloat16" else self.dtype

    @functools.cached_property
    def ids(self) -> np.ndarray | None:
        """Segment ids [rows, seq] of what is timed."""
        if not self.documents:
            return None
        return draw_documents(np.random.default_rng(_SEED), self.rows, self.seq_len)

    @functools.cached_property
    def trial(self) -> Trial:
        """The problem of the check, with its reference."""
        scheme = self.schemes[0][0]
        return draw_trial(
            self.checked(scheme),
            seq_len=self.check_len,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            batch=self.check_rows,
            dtype=self.dtype,
            packed=self.documents,
        )

    @property
    def schemes(self) -> tuple[list[Scheme], dict[str, str]]:
        """Schemes that serve the call, and for others the reason to leave them out."""
        raise NotImplementedError

    @property
    def call(self) -> str:
        """The call in words."""
        rows = f"{self.rows} row{'s' * (self.rows > 1)} of {self.seq_len:,} tokens"
        heads = f"{self.heads} heads of {self.head_dim}"
        values = f", values of {self.value_head_dim}" * (self.value_head_dim != self.head_dim)
        kv_heads = f", {self.kv_heads} key heads" * (self.kv_heads != self.heads)
        packed = ", packed documents" * self.documents
        return f"{rows}, {heads}{kv_heads}{values}, {self.dtype}, {self._kind}{packed}"

    @property
    def _kind(self) -> str:
        """The mask or the rule, in words."""
        raise NotImplementedError

    @property
    def cuts(self) -> str:
        """What the check has less of than what is timed; "" if nothing."""
        if self.check_len == self.seq_len:
            return ""
        return f"rows of {self.check_len:,} tokens instead of {self.seq_len:,}"

    def timed(self, scheme: Scheme) -> Any:
        """The attention that is timed."""
        raise NotImplementedError

    def checked(self, scheme: Scheme) -> Any:
        """The attention whose exactness is checked, with the messages of the timed one."""
        raise NotImplementedError

    def closed_form(self, scheme: Scheme) -> Communication:
        """What a device receives, in arrays of `byte_dtype`."""
        raise NotImplementedError

    def flops(self, which: str) -> float | None:
        """Useful FLOPs of a pass of `PASSES`, over all devices; None if they are not known."""
        raise NotImplementedError

    def arguments(self, attention: Any, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a call, and the cotangent of its output, by name."""
        raise NotImplementedError

    def _mesh(self, degrees: Degrees) -> Any:
        return make_mesh(degrees, devices=self.devices)

    @property
    def _most_tokens(self) -> int:
        raise NotImplementedError

    def draw(self, attention: Any, dtype: str) -> tuple[Array, ...]:
        """Arrays for the arguments, drawn on the devices."""
        return tuple(
            jax.jit(functools.partial(_drawn, name, x.shape, x.dtype), out_shardings=x.sharding)(
                jax.random.key(_SEED + number)
            )
            for number, (name, x) in enumerate(self.arguments(attention, dtype).items())
        )

    def function(self, attention: Any, which: str) -> Any:
        """A pass of `PASSES` as a function of (segment ids, *arguments)."""

        def both(ids: Any, *arrays: Any) -> Any:
            *inputs, dout = arrays
            out, pull = jax.vjp(lambda *x: attention(*x, segment_ids=ids), *inputs)
            return out if which == "forward" else (out, pull(dout))

        return both


def _drawn(name: str, shape: tuple[int, ...], dtype: Any, key: Any) -> Array:
    """Random numbers of the kind that an argument has."""
    x = jax.random.normal(key, shape, dtype)
    if name == "decay":
        return -jnp.exp(x - 2)
    if name == "beta":
        return jax.nn.sigmoid(x)
    if name == "unit key":
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x


@dataclass(frozen=True, kw_only=True)
class DenseCase(Case):
    """A call of `Attention`."""

    mask: str
    """"causal", "full", "window" or "block-causal"."""
    width: int = 0
    """Keys of a window, or tokens of a block."""

    @property
    def _kind(self) -> str:
        return str(self.mask_of(self.seq_len))

    def mask_of(self, length: int) -> masks.Mask:
        """The mask of rows of so many tokens: narrower in proportion in rows that its width would
        hide."""
        width = self.width
        if width >= length:
            width = max(self.width * length // self.seq_len, 2)
        if self.mask == "window":
            return masks.Window(width - 1, 0)
        if self.mask == "block-causal":
            return masks.BlockCausal(width)
        return masks.Causal() if self.mask == "causal" else masks.Full()

    @functools.cached_property
    def schemes(self) -> tuple[list[Scheme], dict[str, str]]:
        """Schemes that serve the call, and for others the reason to leave them out."""
        nodes = nodes_of(self.devices)
        found, reasons = schemes_of(
            len(self.devices),
            data=self.data,
            tensor=self.tensor,
            devices_per_node=max(nodes.count(0), 1),
            wanted=self.wanted,
            batch=self.rows,
            seq_len=self.seq_len,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mask=self.mask_of(self.seq_len),
            layout=self.layout,
        )
        served = []
        for scheme in found:
            try:
                for length in (self.seq_len, self.check_len):
                    of = self.timed(scheme) if length == self.seq_len else self.checked(scheme)
                    self._explain(of, length)
                self.closed_form(scheme)
            except (InputError, UnsupportedError) as error:
                reasons |= dict.fromkeys(scheme.names, str(error))
            else:
                served.append(scheme)
        if not served:
            raise UnsupportedError(
                f"At least one scheme must serve the call; got none: {next(iter(reasons.values()))}"
            )
        return served, reasons

    @property
    def cuts(self) -> str:
        """What the check has less of than what is timed; "" if nothing."""
        short, long = self.mask_of(self.check_len), self.mask_of(self.seq_len)
        narrower = f", {short} instead of {long}" if short != long else ""
        return super().cuts + narrower

    def timed(self, scheme: Scheme) -> Attention:
        """The attention that is timed."""
        return Attention(
            self._mesh(scheme.degrees),
            mask=self.mask_of(self.seq_len),
            layout=self.layout,
            inner=scheme.inner,
            **self.options,
        )

    def checked(self, scheme: Scheme) -> Attention:
        """The attention whose exactness is checked, with the messages of the timed one."""
        timed = self.timed(scheme)
        said = self._explain(timed, self.seq_len)
        return dataclasses.replace(
            timed,
            mask=self.mask_of(self.check_len),
            causal=None,
            window=None,
            exchange=said.exchange,
            balance=said.balance,
        )

    def _explain(self, attention: Attention, length: int) -> Any:
        return attention.explain(
            seq_len=length,
            heads=self.heads,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads,
            value_head_dim=self.value_head_dim,
            dtype=self.dtype,
            packed=self.documents,
        )

    def closed_form(self, scheme: Scheme) -> Communication:
        """What a device receives, in arrays of `byte_dtype`."""
        names = ("exchange", "head_chunks", "keep_gathered")
        return communication(
            scheme.degrees,
            batch=self.rows,
            seq_len=self.seq_len,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            dtype=self.byte_dtype,
            mask=self.mask_of(self.seq_len),
            layout=self.layout,
            packed=self.documents,
            inner=scheme.inner,
            **{name: self.options[name] for name in names if name in self.options},
        )

    def flops(self, which: str) -> float | None:
        """Those of visible pairs; None for blocks, which are not those of documents."""
        lengths = [self.seq_len] * self.rows
        if self.ids is not None:
            if self.mask == "block-causal":
                return None
            lengths = [int((row == x).sum()) for row in self.ids for x in np.unique(row[row >= 0])]
        pairs = sum(visible_pairs(self.mask_of(self.seq_len), length) for length in lengths)
        products = (1, 1) if which == "forward" else (4, 3)
        channels = products[0] * self.head_dim + products[1] * self.value_head_dim
        return 2.0 * pairs * self.heads * channels

    def arguments(self, attention: Attention, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Query, key, value and the cotangent of the output."""
        sizes = {
            "query": (self.heads, self.head_dim, attention.query_spec(self.heads)),
            "key": (self.kv_heads, self.head_dim, attention.key_spec(self.kv_heads)),
            "value": (self.kv_heads, self.value_head_dim, attention.key_spec(self.kv_heads)),
            "dout": (self.heads, self.value_head_dim, attention.query_spec(self.heads)),
        }
        return {
            name: _shape(attention.mesh, spec, dtype, self.rows, self.seq_len, heads, dim)
            for name, (heads, dim, spec) in sizes.items()
        }

    @property
    def _most_tokens(self) -> int:
        limit = _SIMULATED_LOGITS if self.on_cpu else MAX_LOGITS
        return math.isqrt(limit // (self.check_rows * self.heads))


@dataclass(frozen=True, kw_only=True)
class StateCase(Case):
    """A call of `LinearAttention`: all sequence axes are one line, so that only the order of the
    tokens makes a difference."""

    @functools.cached_property
    def schemes(self) -> tuple[list[Scheme], dict[str, str]]:
        """One scheme for each order of the tokens."""
        degrees = Degrees(data=self.data, ring=self.sequence, tensor=self.tensor)
        found = [
            Scheme(names=(kind,), degrees=degrees, layout=kind)
            for kind in ([self.layout] if self.layout else KINDS)
        ]
        for scheme in found:
            self._explain(self.timed(scheme))
        return found, {}

    def timed(self, scheme: Scheme) -> LinearAttention:
        """The attention that is timed."""
        return LinearAttention(self._mesh(scheme.degrees), layout=scheme.layout, **self.options)

    checked = timed

    @property
    def _kind(self) -> str:
        return self.options["rule"]

    def _explain(self, attention: LinearAttention) -> Any:
        return attention.explain(
            seq_len=self.seq_len,
            heads=self.heads,
            key_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
            batch=self.rows,
            dtype=self.dtype,
        )

    def closed_form(self, scheme: Scheme) -> Communication:
        """What a device receives; states are in float32."""
        return self.timed(scheme).communication(
            batch=self.rows,
            heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
            packed=self.documents,
        )

    def flops(self, which: str) -> float:
        """Those of the recurrence."""
        sizes = self._explain(self.timed(self.schemes[0][0])).sizes
        return sizes.model_flops * len(self.devices) * (1.0 if which == "forward" else 3.0)

    def arguments(self, attention: LinearAttention, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Query, key, value, decay, beta and the cotangent of the output."""
        rule = attention.rule
        key = "unit key" if rule.delta else "key"
        gates = (self.head_dim,) if rule.by_channel else ()
        sizes: dict[str, tuple[str, Sequence[int]]] = {
            "query": (dtype, (self.kv_heads, self.head_dim)),
            key: (dtype, (self.kv_heads, self.head_dim)),
            "value": (dtype, (self.heads, self.value_head_dim)),
            "decay": ("float32", (self.heads, *gates)),
            "beta": ("float32", (self.heads,)),
            "dout": (dtype, (self.heads, self.value_head_dim)),
        }
        return {
            name: _shape(
                attention.mesh,
                attention.heads_spec(dims[0], 2 + len(dims)),
                of_type,
                self.rows,
                self.seq_len,
                *dims,
            )
            for name, (of_type, dims) in sizes.items()
        }

    @property
    def _most_tokens(self) -> int:
        limit = _STATE_NUMBERS.get(self.devices[0].platform, _STATE_NUMBERS["default"])
        return limit // (self.check_rows * self.heads * self.head_dim * self.value_head_dim)


def _shape(
    mesh: Any | AbstractMesh, spec: PartitionSpec, dtype: str, *shape: int
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
