"""Multi-head latent attention: projections around a callable that attends to latents.

References:
    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.attention import Rotation
from models.config import GPTConfig
from models.hooks import Hooks
from models.layers import Documents, MakeNorm, give_weights, projected
from models.linear import project
from models.lora import Adapted
from models.parts import latent
from models.rope import rotate
from startrail_jax.xla.ordering import compute_first

CachedLatentFn = Callable[..., tuple[Float[Array, "B T N V"], Any]]
"""(query, latent, rotated_key, key_kernel, value_kernel) -> (out, cache): the arrays are those of
`startrail_jax.Attention.latent`."""


class LatentAttention(nnx.Module):
    """Queries, latents, and the matrices that make keys and values of latents.

    Adapters of these two widen the latent: of [latent, scale * latent A], the matrices [W, B] make
    latent W + scale (latent A) B. So the product A B is never formed, which 16 bits would round
    away.
    """

    query: nnx.LinearGeneral
    query_down: nnx.LinearGeneral | None = None
    query_norm: nnx.RMSNorm | None = None
    latent: nnx.LinearGeneral
    latent_norm: nnx.RMSNorm
    rotated: nnx.LinearGeneral | None = None
    key: nnx.LinearGeneral | Adapted
    value: nnx.LinearGeneral | Adapted
    out: nnx.LinearGeneral
    out_bias: nnx.Param | None = None
    """Bias of the output of the layer; always None."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_fn: Any,
        hooks: Hooks,
        out_gain: float,
        rngs: nnx.Rngs,
    ) -> None:
        """Takes the config of the model; `attention_fn` is for other layers."""
        del attention_fn
        own = config.latent.of_model(config)
        self.attend_latents, self.key_dim = hooks.latent_attention, own.key_dim
        self.interleaved, self.dtype = config.rope.interleaved, jnp.dtype(config.dtype)
        give_weights(
            self,
            latent.weights(config),
            latent.sizes(config) | {"width": config.width},
            make_norm=MakeNorm(own.norm_eps, config.norm_offset),
            dtype=config.dtype,
            out_gain=out_gain,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "B T width"],
        rotation: Rotation,
        window: int | None,
        attend: CachedLatentFn,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """The layer, without a window; returns its output and the cache that `attend` returned."""
        del window
        down = x
        if self.query_down is not None:
            assert self.query_norm is not None
            down = self.query_norm(projected(self.query_down(x))).astype(self.dtype)
        query = projected(self.query(down))
        if rotation is not None and self.rotated is not None:
            still, turned = query[..., : self.key_dim], query[..., self.key_dim :]
            turned = rotate(turned, rotation, interleaved=self.interleaved)
            query = jnp.concatenate([still, turned.astype(query.dtype)], axis=-1)
        query, x = compute_first(query, x)
        rotated_key = None
        if self.rotated is not None:
            rotated_key = projected(self.rotated(x))
            if rotation is not None:
                turned = rotate(rotated_key[:, :, None], rotation, interleaved=self.interleaved)
                rotated_key = turned[:, :, 0].astype(rotated_key.dtype)
        normalised = self.latent_norm(projected(self.latent(x))).astype(self.dtype)
        out, cache = attend(query, *self._widened(normalised, rotated_key))
        return self.out(out), cache

    def uncached(self, documents: Documents) -> CachedLatentFn:
        """The model's latent attention, with None in the place of a cache."""
        attend = functools.partial(self.attend_latents, **documents)
        return lambda *arrays: (attend(*arrays), None)

    def _widened(
        self, normalised: Float[Array, "B T rank"], rotated_key: Float[Array, "B T rotary"] | None
    ) -> tuple[Array, Array | None, Array, Array]:
        """Latent, rotated key and both matrices, with the adapters of the matrices."""
        latents, rows = [normalised], [[self.key.kernel[...]], [self.value.kernel[...]]]
        for i, kernel in enumerate((self.key, self.value)):
            if not isinstance(kernel, Adapted):
                continue
            added: Any = project(normalised, kernel.lora_a[...], 1, jnp.float32)
            latents.append((kernel.scale * added).astype(self.dtype))
            own = kernel.lora_b[...]
            other = rows[1 - i][0]
            rows[i].append(own)
            rows[1 - i].append(jnp.zeros((own.shape[0], *other.shape[1:]), own.dtype))
        key_kernel, value_kernel = (jnp.concatenate(x, axis=0) for x in rows)
        return jnp.concatenate(latents, axis=-1), rotated_key, key_kernel, value_kernel
