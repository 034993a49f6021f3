"""The function of jax-linear-attention that `startrail_jax.linear.jla` calls, token by token."""

import dataclasses
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import lax

from startrail_jax.linear import jla
from startrail_jax.xla.varying import varying_axes

MODULES = ("jla", "jla.ops", "jla.ops.mosaic_gpu", "jla.ops.mosaic_gpu.gated_delta_rule")


def gated_delta_rule(
    q, k, v, g, beta, *, scale, initial_state, output_final_state, segment_ids=None
):
    assert not any(varying_axes(x) for x in (q, k, v, g, beta, initial_state))
    assert output_final_state
    assert q.shape == k.shape
    assert g.shape == beta.shape == v.shape[:3]
    assert g.dtype == beta.dtype == initial_state.dtype == jnp.float32
    assert initial_state.shape == (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    # Like the kernels, it sums the gradients of a shared head in float32.
    q, k = (jnp.repeat(x.astype(jnp.float32), v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    same = jnp.ones(v.shape[:2], bool)
    if segment_ids is not None:
        same = same.at[:, 1:].set(segment_ids[:, 1:] == segment_ids[:, :-1])

    def step(state, x):
        q, k, v, g, beta, same = x
        state = jnp.where(same[:, None, None, None], jnp.exp(g)[..., None, None] * state, 0)
        v = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest")
        state += (beta[..., None] * k)[..., None] * v[..., None, :]
        return state, scale * jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest")

    wide = (jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, g, beta))
    last, out = lax.scan(step, initial_state, (*wide, same.swapaxes(0, 1)))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), last


def install(monkeypatch):
    """Puts the emulation in the place of the package, and lifts the limits of dtypes and sizes."""
    for name in MODULES:
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.gated_delta_rule = gated_delta_rule
        monkeypatch.setitem(sys.modules, name, module)
    usual = dict(platform="cuda", capability=(9, 0), dtype="bfloat16", key_dim=64, value_dim=64)
    real = jla.refusal
    monkeypatch.setattr(jla, "refusal", lambda x: real(dataclasses.replace(x, **usual)))
