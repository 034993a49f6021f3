"""Every setting of the degrees that a number of devices and the sizes of a call allow.

This is arithmetic: it needs no devices. `startrail_jax.communication` says what a setting costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from startrail_jax.devices.degrees import ROLES, SEQUENCE_ROLES, Degrees
from startrail_jax.errors import InputError
from startrail_jax.masks import Mask, resolve
from startrail_jax.rings.sizes import Sizes
from startrail_jax.tokens.layout import Layout


def all_degrees(
    num_devices: int,
    *,
    roles: Sequence[str] = SEQUENCE_ROLES,
    given: Mapping[str, int] | None = None,
) -> Iterator[Degrees]:
    """Every setting of the degrees whose product is the number of devices.

    Args:
        num_devices: number of devices of the whole mesh.
        roles: the degrees that vary; by default those that share a sequence.
        given: degrees that do not vary, such as {"tensor": 2}, also if they are in `roles`. A
            degree that neither varies nor is given is 1.

    Raises:
        ValueError: if a name is not one of `ROLES`, or a given degree is not a positive integer.
    """
    given = dict(given or {})
    unknown = [name for name in (*roles, *given) if name not in ROLES]
    if unknown:
        raise InputError(
            f"roles and given must name degrees of {ROLES}; got {unknown[0]!r}. Correct the name."
        )
    left, rest = divmod(num_devices, Degrees(**given).num_devices)
    varying = [role for role in ROLES if role in roles and role not in given]
    if rest == 0:
        for sizes in _factorisations(left, len(varying)):
            yield Degrees(**given, **dict(zip(varying, sizes, strict=True)))


def legal_degrees(
    num_devices: int,
    *,
    roles: Sequence[str] = SEQUENCE_ROLES,
    given: Mapping[str, int] | None = None,
    **call: Any,
) -> list[Degrees]:
    """The settings of `all_degrees` that support an attention call.

    Args:
        num_devices: number of devices of the whole mesh.
        roles: as in `all_degrees`.
        given: as in `all_degrees`.
        **call: sizes and options of the call: the keyword arguments of `refusal`.

    Raises:
        ValueError: as `all_degrees` and `refusal`.
    """
    settings = all_degrees(num_devices, roles=roles, given=given)
    return [degrees for degrees in settings if refusal(degrees, **call) is None]


def refusal(
    degrees: Degrees,
    *,
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    causal: bool | None = None,
    mask: Mask | None = None,
    key_len: int | None = None,
    layout: str | None = None,
) -> str | None:
    """The reason why `startrail_jax.Attention` refuses a call on these degrees; None if it does
    not.

    Args:
        degrees: the setting.
        batch: number of sequences. This and all other sizes are those of the whole arrays.
        seq_len: number of query tokens of a sequence.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        causal, mask: as for `Attention`.
        key_len: number of key tokens of a sequence in cross-attention; None for `seq_len`.
        layout: kind of the layout; None for the one that `Attention` takes by default.

    Raises:
        ValueError: if there is no such layout, or if `causal` and `mask` contradict each other.
    """
    mask = resolve(mask, causal=causal, default=True)
    placed = Layout.of(layout, degrees.sequence)
    sizes = Sizes(
        batch=batch,
        query_tokens=seq_len,
        key_tokens=seq_len if key_len is None else key_len,
        heads=heads,
        kv_heads=kv_heads,
        # No degree splits the channels.
        head_dim=1,
        value_head_dim=1,
        dtype="float32",
        packed=False,
    )
    try:
        sizes.check(degrees, mask=mask, layout=placed)
    except InputError as error:
        return str(error)
    return None


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `count` positive integers whose product is `number`."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for others in _factorisations(number // first, count - 1):
                yield (first, *others)
