"""Exact, communication-efficient sequence-parallel attention for JAX.

import startrail_jax as st

mesh = st.make_mesh(st.Degrees.startrail(8, c=2))
attention = st.Attention(mesh, causal=True)
out = attention(query, key, value)
"""

from startrail_jax.attention import Attention
from startrail_jax.compiler import compiler_options
from startrail_jax.cost import communication
from startrail_jax.layout import Layout
from startrail_jax.mesh import AxisNames, Degrees, make_mesh
from startrail_jax.rings import CHECKPOINT_NAMES

__all__ = [
    "CHECKPOINT_NAMES",
    "Attention",
    "AxisNames",
    "Degrees",
    "Layout",
    "communication",
    "compiler_options",
    "make_mesh",
]
