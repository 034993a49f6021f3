"""Evaluates a traced float32 program in float64.

Whatever depends on a float64 input is float64. What does not, such as the sines of positions, is
computed as the program says: its rounding is part of the input. Functions with derivatives of their
own are evaluated as they are written, so that jax differentiates them by its own rules. The program
must be that of one device: there is no rule for collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

_INLINED = (
    *("jit", "pjit", "closed_call", "core_call", "shard_map"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
_REMAT = ("remat", "checkpoint", "remat2")
_TYPES = ("new_dtype", "dtype", "preferred_element_type")
_SCATTERS: dict[str, Any] = {
    "scatter-add": lax.scatter_add,
    "scatter": lax.scatter,
    "scatter-mul": lax.scatter_mul,
}


def in_float64(program: Any) -> Callable[..., list[Any]]:
    """A function of the flat inputs of a `jax.make_jaxpr`, for `jax.enable_x64(True)`."""
    return functools.partial(_evaluate, program.jaxpr, program.consts)


def _widened(x: Any) -> Any:
    """An array in float64, if it holds floats."""
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _evaluate(jaxpr: Any, consts: Sequence[Any], *arguments: Any) -> list[Any]:
    values: dict[Any, Any] = {}

    def read(x: Any) -> Any:
        if not isinstance(x, core.Literal):
            return values[x]
        aval: Any = x.aval
        return jnp.asarray(x.val, aval.dtype)

    values |= zip(jaxpr.constvars, consts, strict=True)
    values |= zip(jaxpr.invars, arguments, strict=True)
    for equation in jaxpr.eqns:
        results = _apply(equation, [read(x) for x in equation.invars])
        values |= zip(equation.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars]


def _closed(program: Any) -> Callable[..., list[Any]]:
    if hasattr(program, "consts"):
        return in_float64(program)
    return functools.partial(_evaluate, program, [])


def _apply(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    """The results of an equation."""
    name, params = equation.primitive.name, dict(equation.params)
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    if name in _INLINED:
        return _closed(inner)(*inputs)
    if name in _REMAT:
        return jax.checkpoint(_closed(inner))(*inputs)
    is_wide = any(x.dtype == jnp.float64 for x in inputs)
    if not is_wide:
        found = equation.primitive.bind(*inputs, **params)
        return found if equation.primitive.multiple_results else [found]
    inputs = list(map(_widened, inputs))
    if name == "scan":
        return _scan(params, inputs)
    if name == "cond":
        return lax.switch(inputs[0], [*map(_closed, params["branches"])], *inputs[1:])
    if name in _SCATTERS:
        options = {x: params[x] for x in ("indices_are_sorted", "unique_indices", "mode")}
        return [_SCATTERS[name](*inputs, params["dimension_numbers"], **options)]
    params |= {x: _wide_type(params[x]) for x in _TYPES if params.get(x) is not None}
    params |= {x: None for x in ("sharding", "out_sharding") if x in params}
    if name == "dot_general":
        params["precision"] = lax.Precision.HIGHEST
    if name in ("pvary", "pbroadcast", "pcast", "reduce_precision"):
        return inputs
    found = equation.primitive.bind(*inputs, **params)
    return found if equation.primitive.multiple_results else [found]


def _scan(params: dict[str, Any], inputs: list[Any]) -> Sequence[Any]:
    consts, carry = params["num_consts"], params["num_consts"] + params["num_carry"]
    run = _closed(params["jaxpr"])

    def turn(state: Any, x: Any) -> tuple[Any, Any]:
        results = run(*inputs[:consts], *state, *x)
        return tuple(results[: carry - consts]), tuple(results[carry - consts :])

    options = {name: params[name] for name in ("length", "reverse")}
    state, results = lax.scan(turn, tuple(inputs[consts:carry]), tuple(inputs[carry:]), **options)
    return [*state, *results]


def _wide_type(dtype: Any) -> Any:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype
