"""The sizes of one attention call, and the share of them that one device works on.

This is plain arithmetic, which the checks of `Attention`, the schedule and the closed form of the
traffic (`startrail_jax.traffic.cost`) share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.masks import Causal, Full, Mask
from startrail_jax.rings.options import Options, Side
from startrail_jax.tokens.layout import Layout

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, for every dtype that query, key and value may have."""

EXPANDED_BYTES = 2**28
"""Keys and values of a unit are made for as many heads at a time as take this many bytes, and for
one head at least."""

# Bytes of an element of what is always float32 (lse, delta, gradients of copies) or int32 (ids).
_FLOAT32 = 4
_INT32 = 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of query, key and value: of the whole arrays, or of the share of one device.

    The query is [batch, query_tokens, heads, head_dim], the key is [batch, key_tokens, kv_heads,
    head_dim] and the value is [batch, key_tokens, kv_heads, value_head_dim]. Properties give bytes.
    """

    batch: int
    query_tokens: int
    key_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    """Name of the dtype of query, key and value: one of `WIDTHS`."""
    packed: bool
    """Whether each token has an int32 segment id."""
    id_arrays: int = 1
    """How many int32 numbers a token has then."""
    latent_dim: int | None = None
    """Channels of a latent with the rotated part of its key, which takes the place of keys and
    values of all heads, as one key head; None if there are keys and values."""

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        value: Any,
        *,
        packed: bool,
        id_arrays: int = 1,
        expansion: Any = None,
    ) -> Sizes:
        """The sizes of three arrays, or of anything else with `shape` and `dtype`. With an
        `expansion` (`rings.latents`), the keys are latents, and there are no values."""
        return cls(
            batch=query.shape[0],
            query_tokens=query.shape[1],
            key_tokens=key.shape[1],
            heads=query.shape[2],
            kv_heads=key.shape[2],
            head_dim=query.shape[3],
            value_head_dim=(value if expansion is None else expansion.values).shape[-1],
            dtype=query.dtype.name,
            packed=packed,
            id_arrays=id_arrays,
            latent_dim=None if expansion is None else key.shape[3],
        )

    def check(self, degrees: Degrees, *, mask: Mask, layout: Layout | None = None) -> None:
        """Raises unless attention of these sizes, over all devices, can be split by `degrees`.
        Without a layout, the sequence degree must divide the lengths."""
        _check_positive("batch", self.batch)
        _check_positive("seq_len", self.query_tokens)
        _check_positive("key seq_len", self.key_tokens)
        _check_positive("head_dim", self.head_dim)
        _check_positive("value_head_dim", self.value_head_dim)
        if self.batch % degrees.data:
            raise InputError(
                f"batch must be divisible by the data degree; got batch={self.batch}, "
                f"data={degrees.data}. Pad the batch to "
                f"{-(-self.batch // degrees.data) * degrees.data}, or lower data."
            )
        if not isinstance(mask, Full) and self.query_tokens != self.key_tokens:
            kind = "Causal attention" if isinstance(mask, Causal) else f"An attention with {mask}"
            raise InputError(
                f"{kind} needs queries and keys of one length; got "
                f"{self.query_tokens} queries and {self.key_tokens} keys. Use causal=False for "
                "cross-attention, Attention.decode for new tokens beside a cache, or pad with "
                "segment id -1."
            )
        mask.check(self.query_tokens)
        layout = layout or Layout("contiguous", degrees.sequence)
        layout.check_length(self.query_tokens)
        layout.check_length(self.key_tokens, "key seq_len")
        check_heads(degrees, self.heads, self.kv_heads)

    def share(self, degrees: Degrees) -> Sizes:
        """What one device holds after the head exchange and before any gather.

        It has the tokens of `head` shards, and 1 / (head * tensor) of the heads; where there are
        fewer key heads than parts, a copy of one of them. The sizes must have passed `check`.
        """
        parts, shards = degrees.head * degrees.tensor, degrees.sequence // degrees.head
        return replace(
            self,
            batch=self.batch // degrees.data,
            query_tokens=self.query_tokens // shards,
            key_tokens=self.key_tokens // shards,
            heads=self.heads // parts,
            kv_heads=max(self.kv_heads // parts, 1),
        )

    @property
    def width(self) -> int:
        """Bytes of one element of query, key and value."""
        return WIDTHS[self.dtype]

    @property
    def query_bytes(self) -> int:
        """Bytes of the query."""
        return self.batch * self.query_tokens * self.heads * self.head_dim * self.width

    def in_dtype(self, size: int, dtype: str) -> int:
        """Bytes in another dtype of arrays that have `size` bytes in that of the query."""
        return size // self.width * WIDTHS[dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of the output, or of its gradient."""
        return self.batch * self.query_tokens * self.heads * self.value_head_dim * self.width

    @property
    def lse_bytes(self) -> int:
        """Bytes of the log-sum-exp of each query and head, or of delta, in float32."""
        return self.batch * self.query_tokens * self.heads * _FLOAT32

    @property
    def key_value_bytes(self) -> int:
        """Bytes of key and value together, or of the latents."""
        channels = sum(self.key_channels)
        return self.batch * self.key_tokens * self.kv_heads * channels * self.width

    @property
    def key_channels(self) -> tuple[int, ...]:
        """Channels of the arrays that a key head has: key and value, or latents."""
        if self.latent_dim is not None:
            return (self.latent_dim,)
        return self.head_dim, self.value_head_dim

    @property
    def query_id_bytes(self) -> int:
        """Bytes of the segment ids of the queries; 0 if there are none."""
        return self.batch * self.query_tokens * _INT32 * self.packed * self.id_arrays

    @property
    def key_id_bytes(self) -> int:
        """Bytes of the segment ids of the keys; 0 if there are none."""
        return self.batch * self.key_tokens * _INT32 * self.packed * self.id_arrays


def heads_at_once(heads: int, tokens: int, head_dims: int, width: int) -> int:
    """How many of the heads of a device are expanded at a time: a divisor of them.

    Args:
        heads: heads of the device.
        tokens: tokens of a key unit, in all rows.
        head_dims: channels of a key and of a value together.
        width: bytes of a number.
    """
    most = max(EXPANDED_BYTES // (tokens * head_dims * width), 1)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)


def traveller(options: Options, share: Sizes, *, team: int, group: int) -> Side:
    """Which side goes round the ring in the backward pass; "auto" is the side of fewer bytes a hop.

    A hop moves a gathered unit: `team` shares of the query side, which are query, dout and ids with
    lse and delta in float32 and dq in `gradient_dtype`; or `group` shares of the key side, which
    are key, value and ids with dk and dv in `gradient_dtype`. A tie, and what is published, go to
    "query", the choice of the paper.
    """
    if options.backward != "auto":
        return options.backward
    # The batch favours neither side, and may be symbolic.
    row = replace(share, batch=1)
    query = row.query_bytes + row.out_bytes + 2 * row.lse_bytes + row.query_id_bytes
    key = row.key_value_bytes + row.key_id_bytes
    query_hop = team * (query + row.in_dtype(row.query_bytes, options.gradient_dtype))
    key_hop = group * (key + row.in_dtype(row.key_value_bytes, options.gradient_dtype))
    return "query" if options.published or query_hop <= key_hop else "kv"


def check_heads(degrees: Degrees, heads: int, kv_heads: int) -> None:
    """Raises unless the heads can be grouped, and split over `head` and `tensor`."""
    _check_positive("heads", heads)
    _check_positive("kv_heads", kv_heads)
    parts = degrees.head * degrees.tensor
    given = f"heads={heads}, kv_heads={kv_heads}, head={degrees.head}, tensor={degrees.tensor}"
    if heads % parts:
        raise InputError(
            f"heads must be divisible by head * tensor; got {given}. "
            f"Use a multiple of {parts} heads, or lower degrees."
        )
    if heads % kv_heads:
        raise InputError(
            f"heads must be a multiple of kv_heads; got {given}. "
            f"Use {-(-heads // kv_heads) * kv_heads} heads, or a divisor of {heads} as kv_heads."
        )
    if kv_heads % parts and parts % kv_heads:
        raise InputError(
            f"kv_heads and head * tensor must divide one another; got {given}. "
            f"Choose degrees whose product divides {kv_heads} or is a multiple of it."
        )


def sizes_of_heads(
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    value_head_dim: int | None,
    latent_dim: int | None,
) -> dict[str, Any]:
    """What `explain` and `communication` are given of heads, as fields of `Sizes`."""
    if latent_dim is not None:
        _check_positive("latent_dim", latent_dim)
        if kv_heads not in (None, 1):
            raise InputError(
                "A latent serves all heads, as one key head does; got "
                f"latent_dim={latent_dim}, kv_heads={kv_heads}. Use kv_heads=1, or leave "
                "latent_dim out."
            )
        kv_heads = 1
    return dict(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
        latent_dim=latent_dim,
    )


def dtype_name(dtype: Any) -> str:
    """The name of a dtype that attention serves, given as a name or as a NumPy or JAX dtype."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in WIDTHS:
        raise InputError(
            f"dtype must be one of {', '.join(WIDTHS)}; got dtype={name!r}. "
            "Name the dtype that query, key and value have when they enter the attention."
        )
    return name


def _check_positive(name: str, size: Any) -> None:
    # A size need not be an int: under `jax.export`, the batch may be symbolic.
    if isinstance(size, (bool, float)) or size < 1:
        raise InputError(
            f"{name} must be a positive integer; got {name}={size!r}. "
            "Pass the size over all devices."
        )
