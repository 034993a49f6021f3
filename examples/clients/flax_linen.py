# /// script
# dependencies = ["flax==0.12.8"]
# ///
"""`flax.linen.MultiHeadDotProductAttention`: the attention is an argument of the module."""

import functools

import jax
import numpy as np
from compare import Result, compare, packed_rows, simulated_mesh
from flax import linen

mesh = simulated_mesh("context")
ids = packed_rows(2)[3]
x, y = np.random.default_rng(0).standard_normal((2, *ids.shape, 64), np.float32)
variables = linen.MultiHeadDotProductAttention(8).init(jax.random.key(0), x)


def run(attention, dtype, x, y, ids):
    layer, mask = linen.MultiHeadDotProductAttention(8, dtype=dtype), None
    if attention is None:
        same = linen.make_attention_mask(ids, ids, lambda a, b: (a == b) & (a > 0), dtype=bool)
        mask = linen.combine_masks(linen.make_causal_mask(ids, dtype=bool), same)
    else:
        # The change:
        attend = functools.partial(attention, segment_ids=ids, padding_id=0)
        layer = linen.MultiHeadDotProductAttention(8, dtype=dtype, attention_fn=attend)
        # Its end.

    def loss_of(variables):
        out = layer.apply(variables, x, mask=mask)
        return (((out - y) * (ids > 0)[..., None]) ** 2).mean(), out

    (loss, out), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(variables)
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, axis="context", valid=ids > 0, causal=True)
