# /// script
# dependencies = ["flax==0.12.8"]
# ///
"""`flax.nnx.MultiHeadAttention`: the attention is an argument of the module."""

import functools

from compare import Result, compare, packed_features, simulated_mesh, squared_error, visible
from flax import nnx

mesh = simulated_mesh()
x, y, ids = packed_features()


def run(attention, dtype, x, y, ids):
    layer = nnx.MultiHeadAttention(8, 64, decode=False, dtype=dtype, rngs=nnx.Rngs(0))
    mask = None
    if attention is None:
        mask = visible(ids)[:, None]
    else:
        # The change:
        layer.attention_fn = functools.partial(attention, segment_ids=ids, padding_id=0)
        # Its end.

    def loss_of(layer, mask, x, y, ids):
        out = layer(x, mask=mask)
        return squared_error(out, y, ids), out

    (loss, out), gradients = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(
        layer, mask, x, y, ids
    )
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, valid=ids > 0)
