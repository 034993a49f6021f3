# /// script
# dependencies = ["equinox==0.13.8"]
# ///
"""`equinox.nn.MultiheadAttention`: its projections, as it has no argument for a kernel."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
from compare import Result, compare, packed_rows, simulated_mesh

HEADS = 8
mesh = simulated_mesh("context")
ids = packed_rows(2)[3]
x, y = np.random.default_rng(0).standard_normal((2, *ids.shape, 64), np.float32)
layer = equinox.nn.MultiheadAttention(HEADS, 64, key=jax.random.key(0))


# The change, a batch at a time where Equinox has a vmap over sequences:
def attend(layer, attention, x, ids):
    def projected(linear):
        return (x @ linear.weight.T).reshape(*x.shape[:2], HEADS, -1)

    query, key, value = map(projected, (layer.query_proj, layer.key_proj, layer.value_proj))
    out = attention(query, key, value, segment_ids=ids, padding_id=0)
    return out.reshape(*x.shape[:2], -1) @ layer.output_proj.weight.T


# Its end.


def run(attention, dtype, x, y, ids):
    def loss_of(layer):
        layer, x_ = jax.tree.map(
            lambda z: z.astype(dtype) if equinox.is_array(z) else z, (layer, x)
        )
        if attention is None:
            same = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
            out = jax.vmap(layer)(x_, x_, x_, same & jnp.tri(ids.shape[1], dtype=bool))
        else:
            out = attend(layer, attention, x_, ids)
        return (((out - y) * (ids > 0)[..., None]) ** 2).mean(), out

    (loss, out), gradients = equinox.filter_jit(
        equinox.filter_value_and_grad(loss_of, has_aux=True)
    )(layer)
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, axis="context", valid=ids > 0, causal=True)
