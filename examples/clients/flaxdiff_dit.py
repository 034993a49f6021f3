# /// script
# dependencies = ["flaxdiff==0.2.11", "matplotlib"]
# ///
"""flaxdiff's `SimpleDiT`, which makes its tokens itself; they also attend to 77 tokens of text."""

import flax.linen
import jax
import numpy as np
from compare import Result, compare, simulated_mesh
from flaxdiff.models.simple_dit import SimpleDiT

mesh = simulated_mesh("context")
dense = flax.linen.dot_product_attention
rng = np.random.default_rng(0)
image, target = rng.standard_normal((2, 2, 16, 16, 3), np.float32)
time, text = np.array([0.1, 0.7], np.float32), rng.standard_normal((2, 77, 16), np.float32)


def model(dtype):
    return SimpleDiT(
        output_channels=3, patch_size=2, emb_features=32, num_layers=2, num_heads=4, dtype=dtype
    )


variables = model("float32").init(jax.random.key(0), image, time, text)
variables = jax.tree.map(  # Its last layer is 0 at first.
    lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), variables
)


def run(attention, dtype, image):
    if attention is None:
        flax.linen.dot_product_attention = dense
    else:
        # The change:
        flax.linen.dot_product_attention = attention
        # Its end.

    def loss_of(variables):
        out = model(dtype).apply(variables, image, time, text)
        return ((out - target) ** 2).mean(), out

    (loss, out), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(variables)
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (image,), mesh=mesh, axis="context", layouts=("contiguous",), causal=False)
