"""Checks of the static arguments of `Attention` and `LinearAttention`, and of those of a call."""

from __future__ import annotations

from typing import Any

import jax

from startrail_jax import blocks, masks
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.rings.options import OPTIONS, Options
from startrail_jax.values import adopt, is_real, real, truth, whole

BackendArgument = blocks.Backend | list[str | blocks.Block]
"""What users may give as `Attention.backend`."""


def check_arguments(attention: Any) -> None:
    """Checks the fields of a new `Attention`, and gives them the form that they have from then on:
    numbers and truth values of Python, and what `causal`, `degrees` and `layout` stand for."""
    adopt(attention, whole, "window")
    adopt(attention, truth, "causal")
    adopt(attention, real, "softcap")
    attention.resolve_places()
    options = Options(**{name: getattr(attention, name) for name in OPTIONS})
    for name, value in vars(options).items():
        object.__setattr__(attention, name, value)
    check_shared(attention, scale="head_dim ** -0.5")
    options.check(attention.degrees)
    object.__setattr__(attention, "backend", blocks.check_backend(attention.backend))
    object.__setattr__(attention, "causal", attention.resolved_mask.causal)
    check_softcap(attention.softcap)


def check_shared(attention: Any, *, scale: str) -> None:
    """Does so with the fields that `LinearAttention` has too: `scale`, of which a default is named,
    and `padding_id`."""
    adopt(attention, real, "scale")
    adopt(attention, whole, "padding_id")
    if not (attention.scale is None or is_real(attention.scale)):
        raise InputError(
            f"scale must be a finite number or None; got scale={attention.scale!r}. None is "
            f"{scale}."
        )
    check_padding_id(attention.padding_id)


def options_of_call(
    attention: Any, *, scale: Any, backend: Any, window: Any, softcap: Any, padding_id: Any
) -> dict[str, Any]:
    """The options of an `Attention` that arguments of a call replace."""
    options: dict[str, Any] = {}
    if softcap is not None:
        check_softcap(softcap)
        options["softcap"] = float(softcap)
    if padding_id is not None:
        check_padding_id(padding_id)
        options["padding_id"] = padding_id
    if scale is not None:
        if isinstance(scale, jax.Array):
            raise UnsupportedError(
                "scale must be a Python number, as it is compiled into the kernels; got an array "
                f"{jax.typeof(scale)}. Multiply the query by it, and pass scale=1.0."
            )
        options["scale"] = float(scale)
    if backend is not None:
        if backend not in ("xla", "cudnn"):
            raise InputError(
                f"implementation must be 'xla' or 'cudnn'; got implementation={backend!r}. Leave "
                "it out for the backend of the attention."
            )
        options["backend"] = backend
    if window is not None:
        before, _ = window if isinstance(window, tuple) else (window, window)
        if not attention.causal or attention.mask is not None:
            raise UnsupportedError(
                "local_window_size needs a causal attention without a mask of its own; got "
                f"local_window_size={window}, causal={attention.causal}, mask={attention.mask}. "
                "Build Attention(mesh, causal=True), or Attention(mesh, mask=masks.Window(...))."
            )
        # jax counts the keys before a query, and `window` counts the query's own key too.
        options["window"] = before + 1
        masks.resolve(None, causal=True, window=options["window"])
    for name, value in options.items():
        own = getattr(attention, name)
        if own not in (None, "auto", value):
            raise InputError(
                f"A call may set an option that its attention leaves open; got {name}={value!r} "
                f"for an attention with {name}={own!r}. Leave one of them out."
            )
    return options


def check_softcap(softcap: Any) -> None:
    """Raises a ValueError unless a soft cap is None or a positive number."""
    if softcap is not None and not (is_real(real(softcap)) and softcap > 0):
        raise InputError(f"softcap must be a positive number or None; got softcap={softcap!r}.")


def check_padding_id(padding_id: Any) -> None:
    """Raises a ValueError unless the segment id of padding is None or an integer."""
    if padding_id is not None and not (type(whole(padding_id)) is int and abs(padding_id) < 2**31):
        raise InputError(
            "padding_id must be the int32 that marks padding among segment_ids, or None; got "
            f"padding_id={padding_id!r}. Negative ids are always padding."
        )
