# /// script
# dependencies = ["easydel==0.3.0", "pillow", "torch"]
# ///
"""EasyDeL's Llama on its own mesh, whose axis `sp` has all devices, by a registered operation."""

import dataclasses

import easydel
import jax
import jax.numpy as jnp
import numpy as np
from compare import Result, compare, cross_entropy, packed_rows, simulated_mesh
from easydel.operations import OperationRegistry
from easydel.operations._attention_outputs import AttentionOutput
from easydel.operations.kernels.vanilla_attention import VanillaAttn
from flax import nnx

simulated_mesh("sp")
tokens, targets, _, ids = packed_rows(97)
# Padding alone: the model takes no documents.
positions, valid = np.broadcast_to(np.arange(len(ids[0])), ids.shape), ids > 0
current = None


# The change:
@OperationRegistry.register
class StarTrail(VanillaAttn):
    @classmethod
    def get_impl_name(cls):
        return "startrail"

    def forward_native(self, query, key, value, mask_info=None, bias=None, causal=False, **options):
        if bias is not None or not causal:
            raise NotImplementedError("causal attention without a bias")
        window, ids = options.get("sliding_window"), None
        if mask_info is not None:
            ids = mask_info.get_or_compute_segment_ids()
            ids = None if ids[0] is None else tuple(x.astype(int) for x in ids)
        out = dataclasses.replace(
            current,
            window=window[0] + 1 if isinstance(window, tuple) else window,
            softcap=options.get("logits_soft_cap"),
            scale=options.get("softmax_scale"),
        )(query, key, value, segment_ids=ids, sinks=options.get("softmax_aux"))
        return AttentionOutput(attention_weights=None, attention_outputs=out)


# Its end.


def model_of(attention, dtype):
    config = easydel.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=len(ids[0]),
        attn_mechanism="vanilla" if attention is None else "startrail",
        attn_dtype=jnp.dtype(dtype),
        sharding_axis_dims=(1, 1, 1, 1, -1),
    )
    with config.mesh:
        return config, easydel.LlamaForCausalLM(
            config,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            rngs=nnx.Rngs(0),
        )


def run(attention, dtype, tokens, targets, positions, valid):
    global current
    current = attention
    config, model = model_of(attention, dtype)

    def loss_of(model):
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=valid).logits
        return cross_entropy(logits, targets, valid), logits

    with config.mesh:
        (loss, logits), gradients = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(model)
    return Result(loss, logits, nnx.to_pure_dict(gradients))


if __name__ == "__main__":
    mesh = model_of(None, "float32")[0].mesh
    batch = tokens, targets, positions, valid
    compare(run, batch, mesh=mesh, axis="sp", valid=valid, causal=True)
