# /// script
# dependencies = ["flax==0.12.8"]
# ///
"""`flax.nnx.MultiHeadAttention`: the attention is an argument of the module."""

import functools

import numpy as np
from compare import Result, compare, packed_rows, simulated_mesh
from flax import nnx

mesh = simulated_mesh("context")
ids = packed_rows(2)[3]
x, y = np.random.default_rng(0).standard_normal((2, *ids.shape, 64), np.float32)


def run(attention, dtype, x, y, ids):
    layer = nnx.MultiHeadAttention(8, 64, decode=False, dtype=dtype, rngs=nnx.Rngs(0))
    mask = None
    if attention is None:
        same = nnx.make_attention_mask(ids, ids, lambda a, b: (a == b) & (a > 0), dtype=bool)
        mask = nnx.combine_masks(nnx.make_causal_mask(ids, dtype=bool), same)
    else:
        # The change:
        layer.attention_fn = functools.partial(attention, segment_ids=ids, padding_id=0)
        # Its end.

    def loss_of(layer, mask, x, y, ids):
        out = layer(x, mask=mask)
        return (((out - y) * (ids > 0)[..., None]) ** 2).mean(), out

    (loss, out), gradients = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(
        layer, mask, x, y, ids
    )
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, axis="context", valid=ids > 0, causal=True)
