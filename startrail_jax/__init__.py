"""Exact sequence-parallel attention for JAX that communicates little.

On 8 devices, StarTrail in teams of 2:

    import startrail_jax as st

    mesh = st.make_mesh(st.Degrees.startrail(8, c=2))
    attention = st.Attention(mesh, causal=True)
    query, key, value = attention.shard(query, key, value)
    out = attention(query, key, value)

References:
    StarTrail, https://arxiv.org/abs/2407.00611
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from startrail_jax import masks
    from startrail_jax.attention import CHECKPOINT_NAMES, Attention
    from startrail_jax.calls.logprobs import TokenLogprobs, token_logprobs
    from startrail_jax.device_mesh import make_mesh
    from startrail_jax.devices.axes import AxisNames
    from startrail_jax.devices.degrees import Degrees
    from startrail_jax.linear.attention import LinearAttention
    from startrail_jax.tokens.documents import parts
    from startrail_jax.tokens.layout import Layout
    from startrail_jax.tokens.trees import branch_levels, branch_positions
    from startrail_jax.traffic.cost import communication
    from startrail_jax.xla.compiler import compiler_options

__all__ = [
    "CHECKPOINT_NAMES",
    "Attention",
    "AxisNames",
    "Degrees",
    "Layout",
    "LinearAttention",
    "TokenLogprobs",
    "branch_levels",
    "branch_positions",
    "communication",
    "compiler_options",
    "make_mesh",
    "masks",
    "parts",
    "token_logprobs",
]

# The module of each name, or None if the name is a module. It is imported when the name is first
# used, so that a program that only prints its help need not wait for jax.
_MODULES = {
    "CHECKPOINT_NAMES": "attention",
    "Attention": "attention",
    "AxisNames": "devices.axes",
    "Degrees": "devices.degrees",
    "Layout": "tokens.layout",
    "LinearAttention": "linear.attention",
    "TokenLogprobs": "calls.logprobs",
    "branch_levels": "tokens.trees",
    "branch_positions": "tokens.trees",
    "communication": "traffic.cost",
    "compiler_options": "xla.compiler",
    "make_mesh": "device_mesh",
    "masks": None,
    "parts": "tokens.documents",
    "token_logprobs": "calls.logprobs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name] or name}")
    value = getattr(module, name) if _MODULES[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
