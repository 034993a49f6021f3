# /// script
# requires-python = ">=3.12"
# dependencies = [
#     "maxtext==0.2.5", "jax==0.12.0.1", "flax==0.12.12", "aqtp==0.9.0", "drjax==0.2.1",
#     "google-cloud-storage", "grain", "jinja2", "ml-collections", "omegaconf", "optax",
#     "orbax-checkpoint", "packaging", "pathwaysutils", "pillow", "pydantic", "qwix",
#     "sentencepiece", "sympy", "tiktoken", "tokamax", "transformers",
# ]
# ///
"""MaxText's decoder with scan and remat on its own mesh, whose axis `context` has all devices.

The other packages are those of its extras that it needs here: the extras are for GPUs and TPUs.
"""

import dataclasses
import os

import jax
import maxtext
from compare import Result, compare, cross_entropy, packed_rows, simulated_mesh
from flax import nnx
from maxtext.common.common_types import AttentionType
from maxtext.configs import pyconfig
from maxtext.layers.attention_op import AttentionOp
from maxtext.utils import model_creation_utils

simulated_mesh()
dense = AttentionOp.apply_attention
batch = packed_rows(128)
ids = batch[3]


def config_of(dtype):
    options = {
        "decoder_block": "llama2",
        "base_emb_dim": 64,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 2,
        "head_dim": 16,
        "base_mlp_dim": 96,
        "base_num_decoder_layers": 2,
        "vocab_size": 128,
        "max_target_length": ids.shape[1],
        "max_prefill_predict_length": ids.shape[1],
        "per_device_batch_size": len(ids),
        "scan_layers": True,
        "remat_policy": "full",
        "attention": "dot_product",
        "matmul_precision": "highest",
        "weight_dtype": "float32",
        "dtype": dtype,
        "run_name": "compare",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
    }
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(["compare", base], **options)


config = config_of("float32")
sizes = {name: 8 if name == "context" else 1 for name in config.mesh_axes}
auto = (jax.sharding.AxisType.Auto,) * len(sizes)
mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
alone = jax.sharding.Mesh(mesh.devices.flat[:1].reshape(mesh.devices.ndim * (1,)), mesh.axis_names)


def adapted(attention):
    # The change:
    def apply_attention(self, query, key, value, decoder_segment_ids, *, model_mode, **options):
        slides = self.attention_type == AttentionType.LOCAL_SLIDING
        masks = ("previous_chunk", "bidirectional_mask", "indexer_mask", "compressed_mask")
        if model_mode != "train":
            options |= {"decoder_segment_ids": decoder_segment_ids, "model_mode": model_mode}
            return dense(self, query, key, value, **options)
        if any(options[mask] is not None for mask in masks) or not (
            slides or self.attention_type == AttentionType.GLOBAL
        ):
            raise NotImplementedError(f"{self.attention_type} and {masks}")
        out = dataclasses.replace(
            attention,
            window=self.sliding_window_size if slides else None,
            softcap=self.attn_logits_soft_cap,
            scale=1.0,  # MaxText has scaled the queries.
        )(query, key, value, segment_ids=decoder_segment_ids, padding_id=0, sinks=options["sinks"])
        return out, None, None

    AttentionOp.apply_attention = apply_attention
    # Its end.


def run(attention, dtype, tokens, targets, positions, ids):
    AttentionOp.apply_attention = dense
    if attention is not None:
        adapted(attention)
    where = alone if attention is None else mesh
    with jax.set_mesh(where):
        model = model_creation_utils.create_model(
            config_of(dtype), where, rngs=nnx.Rngs(params=0, dropout=1)
        )

        def loss_of(model):
            logits = model(
                decoder_input_tokens=tokens,
                decoder_positions=positions,
                decoder_segment_ids=ids,
                enable_dropout=False,
            )
            return cross_entropy(logits, targets, ids > 0), logits

        (loss, logits), gradients = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(model)
    return Result(loss, logits, gradients)


if __name__ == "__main__":
    compare(run, batch, mesh=mesh, valid=ids > 0)
