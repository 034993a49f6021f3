"""Imports of models with odd settings, compared with the library transformers.

pip install -e '.[parity]'
python tests/parity/check_settings.py              # some minutes
python tests/parity/check_settings.py qwen3_moe    # one family
"""

import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from startrail_jax.errors import InputError, UnsupportedError  # noqa: E402
from trainer.gpt.pretrained.config_json import ONLY, READ, read_description  # noqa: E402
from trainer.gpt.pretrained.families.table import FAMILIES  # noqa: E402

SIZES = dict(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    pad_token_id=None,
)
LENGTH = 32
BUFFERS = ("e_score_correction_bias", "layer_scalar")
LARGEST_ERROR = 1e-4
"""Of logits, relative to the largest, beside float64; or four times that of PyTorch in float32."""
EAGER = dict(attn_implementation="eager", experts_implementation="eager")
FULL, SLIDING = "full_attention", "sliding_attention"
OF_STATES = "linear_attention"
BLOCKS = [OF_STATES, "moe", FULL, "mlp", OF_STATES]
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
LINEAR = dict(rope_type="linear", factor=4.0)
NESTED = {FULL: dict(LINEAR, rope_theta=1000.0), SLIDING: dict(rope_type="default", rope_theta=9.0)}
PROPORTIONAL = {
    FULL: dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.5),
    SLIDING: dict(rope_type="default", rope_theta=9.0),
}
# Changes of the positions of layers without a window, and with one.
OF_FULL = [
    dict(partial_rotary_factor=1.0),
    dict(partial_rotary_factor=0.3),
    dict(partial_rotary_factor=0.01),
    dict(partial_rotary_factor=0),
    dict(partial_rotary_factor=2.0),
    dict(partial_rotary_factor=None),
    dict(partial_rotary_factor="a"),
    dict(factor=4.0),
    dict(factor=0.5),
    dict(factor=1),
    dict(factor=None),
    dict(rope_theta=None),
    dict(rope_type="default"),
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="linear", factor=4.0, partial_rotary_factor=1.0),
    dict(YARN, partial_rotary_factor=1.0),
    dict(truncate=False),
    dict(mscale=2.0),
    dict(original_max_position_embeddings=8),
]
OF_SLIDING = [
    dict(rope_type="proportional"),
    dict(rope_type="proportional", partial_rotary_factor=0.5),
    dict(partial_rotary_factor=0.5),
    dict(LINEAR),
]
# Settings beside null, nothing and the other values of a flag, for every family.
ODD = [
    dict(rope_parameters=dict(rope_type="default", rope_theta=50.0), rope_scaling=LINEAR),
    dict(rope_parameters=dict(LINEAR, rope_theta=50.0), rope_scaling=dict(YARN, rope_theta=9.0)),
    dict(rope_parameters=dict(rope_type="default", rope_theta=50.0), rope_theta=9.0),
    dict(rope_scaling=LINEAR, rope_theta=50.0),
    dict(rope_scaling=YARN, original_max_position_embeddings=16),
    dict(rope_parameters=NESTED),
    dict(rope_parameters=NESTED, rope_scaling=LINEAR),
    dict(rope_parameters={FULL: NESTED[FULL]}),
    dict(rope_theta=50.0, rope_local_base_freq=9.0),
    dict(partial_rotary_factor=0.5),
    dict(rope_parameters=dict(rope_theta=50.0, partial_rotary_factor=0.5, rope_type="default")),
    dict(is_causal=False),
    dict(hidden_act="swish"),
    dict(hidden_act="gelu"),
    dict(hidden_activation="gelu"),
    dict(sliding_window=5),
    dict(sliding_window=5, use_sliding_window=True),
    dict(sliding_window=5, use_sliding_window=True, max_window_layers=1),
    dict(sliding_window=5, sliding_window_pattern=3),
    dict(sliding_window=5, layer_types=[FULL] * 3),
    dict(sliding_window=5, layer_types=[SLIDING] * 3),
    dict(sliding_window=5, layer_types=[SLIDING, FULL, SLIDING], use_sliding_window=True),
    dict(sliding_window=5, layer_types=[SLIDING] * 3, use_sliding_window=False),
    dict(layer_types=[SLIDING, FULL]),
    dict(layer_types=[SLIDING, FULL, "chunked_attention"]),
    dict(no_rope_layers=[0, 1, 1]),
    dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5),
    dict(attn_logit_softcapping=2.0),
    dict(final_logit_softcapping=2.0),
    dict(query_pre_attn_scalar=3),
    dict(use_bidirectional_attention=True),
    dict(rms_norm_eps=0.1),
    dict(num_hidden_layers=10**6),
    dict(no_such_key=2.0),
    dict(layer_types=[FULL, OF_STATES, OF_STATES]),
    dict(layer_types=[OF_STATES] * 3),
    dict(full_attention_interval=3),
    dict(full_attention_interval=7),
    dict(linear_num_key_heads=3),
    dict(attn_output_gate=False),
    dict(linear_allow_neg_eigval=False),
    dict(linear_dt_min=0.5, linear_a_log_max=2.0),
    dict(rope_theta=None),
    dict(rope_parameters=dict(rope_type="default", rope_theta=None)),
    dict(rope_parameters=dict(YARN, rope_theta=None)),
    dict(rope_parameters=dict(YARN, rope_theta=50.0, partial_rotary_factor=0.5)),
    dict(rope_parameters=dict(rope_type="default", rope_theta=9.0, mrope_section=[1, 1, 0])),
    dict(rope_parameters=dict(YARN, rope_theta=50.0, truncate=False)),
    dict(num_experts_per_tok=3),
    dict(num_experts_per_tok=9),
    dict(num_experts=3),
    dict(num_local_experts=3),
    dict(num_experts=0),
    dict(moe_intermediate_size=20),
    dict(mlp_only_layers=[0, 2]),
    dict(mlp_only_layers=[0, 1, 2]),
    dict(mlp_only_layers=["a"]),
    dict(decoder_sparse_step=2),
    dict(decoder_sparse_step=5),
    dict(router_jitter_noise=0.5),
    dict(swiglu_limit=0.5),
    dict(swiglu_alpha=3.0),
    dict(clip_qkv=0.1),
    dict(output_router_logits=True, router_aux_loss_coef=0.5),
    dict(shared_expert_intermediate_size=0),
    dict(n_shared_experts=0),
    dict(n_shared_experts=2),
    dict(routed_scaling_factor=2.5),
    dict(n_group=2),
    dict(n_group=2, topk_group=2, num_experts_per_tok=4),
    dict(n_group=3),
    dict(n_group=4, topk_group=2),
    dict(n_group=2, num_experts_per_tok=3),
    dict(n_group=2, topk_group=3),
    dict(first_k_dense_replace=0),
    dict(first_k_dense_replace=2),
    dict(first_k_dense_replace=3),
    dict(num_nextn_predict_layers=2),
    dict(layers_block_type=[OF_STATES, "mlp", FULL]),
    dict(layers_block_type=["mamba", "moe", "attention"]),
    dict(layers_block_type=[OF_STATES, "moe"]),
    dict(layers_block_type=[FULL, "moe"], num_hidden_layers=7),
    dict(layers_block_type=None, hybrid_override_pattern="ME*-M"),
    dict(hybrid_override_pattern="M*-"),
    dict(mamba_num_heads=6, n_groups=3),
    dict(mamba_num_heads=6, n_groups=4),
    dict(mamba_n_groups=1),
    dict(time_step_min=1.0),
    dict(time_step_max=0.5, time_step_floor=0.2),
    dict(time_step_limit=[0.5, 1.0]),
    dict(moe_latent_size=6),
    dict(expand=3, chunk_size=7, num_logits_to_keep=3),
    dict(mamba_hidden_act="gelu"),
    dict(mlp_hidden_act="silu"),
    dict(layer_norm_epsilon=0.1),
    dict(norm_eps=0.1),
    dict(n_routed_experts=6, num_local_experts=8),
    dict(global_head_dim=8),
    dict(global_head_dim=9),
    dict(global_head_dim=8, num_global_key_value_heads=2, rope_parameters=PROPORTIONAL),
    dict(num_global_key_value_heads=4),
    dict(num_global_key_value_heads=3),
    dict(attention_k_eq_v=False, num_global_key_value_heads=4),
    dict(attention_k_eq_v=False, global_head_dim=8, rope_parameters=PROPORTIONAL),
    dict(layer_types=[FULL, SLIDING, FULL]),
    dict(layer_types=[SLIDING, SLIDING, SLIDING]),
    dict(per_layer_config={}),
    dict(per_layer_config={"2": dict(head_dim=12)}),
    dict(per_layer_config={"2": dict(head_dim=12, num_key_value_heads=4)}),
    dict(per_layer_config={"1": dict(head_dim=12)}),
    dict(per_layer_config={"1": dict(head_dim=4), "2": dict(head_dim=12)}),
    dict(per_layer_config={"2": dict(head_dim=12, intermediate_size=12)}),
    dict(per_layer_config={"2": dict(head_dim=12, sliding_window=3)}),
    dict(per_layer_config={"2": dict(skip=["mlp"])}),
    dict(per_layer_config={"7": dict(head_dim=12)}),
    dict(per_layer_config={"0": dict(head_dim=12)}, layer_types=[FULL, SLIDING, FULL]),
    dict(hidden_size_per_layer_input=4, vocab_size_per_layer_input=48),
    dict(num_kv_shared_layers=1),
    dict(num_kv_shared_layers=1, layer_types=[SLIDING, FULL, FULL]),
    dict(use_double_wide_mlp=True, num_kv_shared_layers=1, layer_types=[SLIDING, FULL, FULL]),
    dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=12),
    dict(num_experts=4, top_k_experts=2, moe_intermediate_size=12),
    dict(use_bidirectional_attention="all"),
    dict(use_bidirectional_attention="vision"),
    dict(attention_bias=True, attention_k_eq_v=False),
    dict(rope_parameters=PROPORTIONAL),
    *(dict(rope_parameters={**PROPORTIONAL, FULL: {**PROPORTIONAL[FULL], **x}}) for x in OF_FULL),
    *(
        dict(rope_parameters={**PROPORTIONAL, SLIDING: {**PROPORTIONAL[SLIDING], **x}})
        for x in OF_SLIDING
    ),
    dict(rope_parameters={FULL: PROPORTIONAL[FULL]}),
    *(
        {key: x}
        for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        for x in (0.3, 7, 0, -2.0, "a", True)
    ),
    *(dict(attention_multiplier=x) for x in (0.0078125, 0.1, 0.3, 2, 0, -0.5, 1e-300, True)),
    *(dict(position_embedding_type=x) for x in ("rope", "nope", "alibi", 7)),
    dict(position_embedding_type="rope", rope_parameters=dict(YARN, rope_theta=9.0)),
    dict(position_embedding_type="rope", rope_theta=9.0, head_dim=4),
    dict(position_embedding_type="rope", partial_rotary_factor=0.5),
    dict(num_local_experts=0),
    dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=12),
    dict(num_local_experts=0, output_router_logits=True),
    dict(num_local_experts=-1),
    dict(shared_intermediate_size=0),
    dict(layer_types=["mamba", "attention", "mamba"]),
    dict(layer_types=["mamba", "attention", "moe"]),
    dict(layer_types=[FULL] * 3),
    dict(mamba_expand=3, mamba_n_heads=6, mamba_n_groups=3),
    dict(mamba_expand=3),
    dict(mamba_n_heads=5),
    dict(mamba_n_groups=3),
    dict(mamba_d_head=16, mamba_n_heads=2),
    dict(mamba_d_head=16),
    dict(mamba_chunk_size=7),
    dict(mamba_proj_bias=True),
    dict(init_method="mup", normalization_function="rmsnorm"),
    *({"rope_interleave": x} for x in (False, True)),
    dict(q_lora_rank=0),
    dict(qk_rope_head_dim=0),
    dict(qk_rope_head_dim=6),
    dict(qk_nope_head_dim=8, v_head_dim=8),
    dict(num_key_value_heads=4),
    dict(num_key_value_heads=1),
    *(
        dict(rope_parameters=dict(YARN, rope_theta=9.0, **x))
        for x in (
            dict(mscale=1.0, mscale_all_dim=1.0),
            dict(mscale=0.7, mscale_all_dim=1.3),
            dict(mscale_all_dim=1.3),
            dict(mscale_all_dim=0),
            dict(mscale=0.7),
            dict(attention_factor=1.7, mscale_all_dim=0.5),
        )
    ),
    dict(rope_parameters=dict(LINEAR, rope_theta=9.0, mscale_all_dim=1.3)),
    dict(rope_parameters=dict(rope_type="default", rope_theta=9.0, mscale_all_dim=1.3)),
    dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, seq_aux=True),
    dict(topk_method="greedy"),
    dict(ep_size=4, aux_loss_alpha=0.5),
    dict(rope_parameters={SLIDING: PROPORTIONAL[SLIDING]}),
    dict(rope_parameters=PROPORTIONAL[FULL]),
    dict(rope_parameters=dict(PROPORTIONAL, full_attention=None)),
]


def settings_of(family):
    """Odd settings of a family: what is known, and what none of its files should have."""
    base = {"model_type": family, **SIZES}
    if "sliding_window" in FAMILIES[family].keys:
        base["sliding_window"] = 7
    if "linear" in FAMILIES[family].mixers:
        base |= dict(linear_num_value_heads=4, linear_num_key_heads=2)
        base |= dict(linear_key_head_dim=4, linear_value_head_dim=6)
    if family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        base["full_attention_interval"] = 2
    if FAMILIES[family].experts is not None:
        count = FAMILIES[family].experts.count
        sizes = {count: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        sizes["shared_expert_intermediate_size"] = 10
        base |= {key: value for key, value in sizes.items() if key in FAMILIES[family].keys}
    if family == "olmoe":
        base["head_dim"] = 4
    if family == "nemotron_h":
        del base["num_hidden_layers"]
        base |= dict(layers_block_type=BLOCKS, mamba_num_heads=4, mamba_head_dim=6, n_groups=2)
        base |= dict(ssm_state_size=6, conv_kernel=3, moe_shared_expert_intermediate_size=10)
    if family == "granitemoehybrid":
        base |= dict(layer_types=[OF_STATES, FULL, OF_STATES], mamba_n_heads=4, mamba_n_groups=2)
        base |= dict(mamba_d_state=6, mamba_d_conv=3, shared_intermediate_size=10)
    if family in ("deepseek_v2", "deepseek_v3"):
        base |= dict(num_key_value_heads=4, head_dim=4, n_group=1, topk_group=1)
        base |= dict(q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4)
        base |= dict(v_head_dim=7, n_shared_experts=1, first_k_dense_replace=1)
        # transformers cannot turn channels behind an odd number of others.
        base |= dict(qk_nope_head_dim=6) if family == "deepseek_v2" else {}
    if family == "kimi_linear":
        base |= dict(num_key_value_heads=4, n_group=1, topk_group=1, n_shared_experts=1)
        base |= dict(kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7)
        base |= dict(linear_attn_config=KDA, mla_use_nope=True)
        base = {FAMILIES[family].in_file(key): value for key, value in base.items()}
    if family == "gemma4_text":
        base |= dict(hidden_size_per_layer_input=0, global_head_dim=12, attention_k_eq_v=True)
        base |= dict(num_global_key_value_heads=1, layer_types=[SLIDING, SLIDING, FULL])
    if family == "olmo_hybrid":
        base["layer_types"] = [OF_STATES, FULL, OF_STATES]
    yield base
    wide = ("hidden_size", "intermediate_size", "num_hidden_layers")
    only = {**ONLY, **FAMILIES[family].only}
    flags = {*only, *FAMILIES[family].switches, "tie_word_embeddings", "use_sliding_window"}
    flags |= {*FAMILIES[family].renamed}
    flags |= {"norm_topk_prob", "attention_k_eq_v", "use_double_wide_mlp", "mamba_conv_bias"} & {
        *FAMILIES[family].keys
    }
    keys = {*READ, *FAMILIES[family].keys, *FAMILIES[family].renamed, *only}
    for key in sorted(keys - {"model_type"}):
        if key not in wide:
            yield {name: value for name, value in base.items() if name != key}
        yield base | {key: None}
        yield from (base | {key: value} for value in (False, True) if key in flags)
    for odd in (*ODD, *ODD_OF.get(family, ())):
        yield base | odd


def logits_of_torch(folder, tokens):
    """Logits, how far those in float32 are from float64, and windows; None where it is refused."""
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.num_hidden_layers > 100:
            return None
        model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
        model = model.float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn_like(weight)
                weight.copy_(1 + noise / 4 if "norm" in name else noise * weight.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith(BUFFERS):
                    centre = float(name.endswith(BUFFERS[1]))
                    buffer.copy_(centre + torch.randn_like(buffer) / 4)
            ids = torch.tensor(tokens)
            narrow = model(input_ids=ids).logits.numpy()
            logits = copy.deepcopy(model).double()(input_ids=ids).logits.numpy()
    except Exception:  # Whatever a file makes transformers raise.
        return None
    if config.model_type in (
        "olmo_hybrid",
        "mixtral",
        "granitemoehybrid",
        "kimi_linear",
    ):  # Files have other tensors than models.
        values = (folder / "config.json").read_bytes()
        model.save_pretrained(folder)
        (folder / "config.json").write_bytes(values)
    else:
        weights = {name: x.detach().contiguous() for name, x in model.named_parameters()}
        weights |= {name: x for name, x in model.named_buffers() if name.endswith(BUFFERS)}
        safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return logits, error_of(narrow, logits), windows_of(config)


def error_of(logits, wanted):
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


KDA = dict(full_attn_layers=[2], kda_layers=[1, 3], num_heads=2, head_dim=4,
           short_conv_kernel_size=3)  # fmt: skip
ODD_OF = {
    "kimi_linear": [
        *(
            dict(linear_attn_config=KDA | x)
            for x in (
                dict(full_attn_layers=[3], kda_layers=[1, 2]),
                dict(full_attn_layers=[3], kda_layers=[1]),
                dict(full_attn_layers=[2], kda_layers=[0, 1]),
                dict(full_attn_layers=[1, 2, 3], kda_layers=[]),
                dict(full_attn_layers=[], kda_layers=[1, 2, 3]),
                dict(full_attn_layers=[2, 3], kda_layers=[1, 3]),
                dict(full_attn_layers=[2, 4], kda_layers=[1, 3]),
                dict(kda_layers=None),
                dict(num_heads=3, head_dim=6, short_conv_kernel_size=2),
                dict(num_heads=0),
                dict(no_such_key=1),
            )
        ),
        dict(linear_attn_config={}),
        dict(linear_attn_config=KDA, layer_types=[FULL, OF_STATES, FULL]),
        dict(linear_attn_config=KDA, linear_head_dim=6, linear_num_heads=4),
        dict(linear_attn_config=None, layer_types=[OF_STATES, FULL, FULL], linear_head_dim=6),
        dict(mlp_layer_types=["sparse", "dense", "sparse"]),
        dict(mlp_layer_types=["dense"] * 3),
        dict(mlp_layer_types=["dense", "sparse"]),
        dict(mlp_layer_types=["sparse"] * 3, first_k_dense_replace=2),
        dict(num_experts_per_token=3),
        dict(num_experts_per_token=3, num_experts_per_tok=2),
        dict(num_shared_experts=2),
        dict(num_shared_experts=0),
        dict(num_expert_group=2, num_experts_per_token=2, topk_group=2),
        dict(num_expert_group=2, topk_group=1),
        dict(num_expert_group=3),
        dict(model_max_length=7, max_position_embeddings=9),
        dict(moe_router_activation_func="softmax"),
        dict(moe_router_activation_func="sigmoid", use_grouped_topk=True, moe_layer_freq=1),
        dict(moe_layer_freq=2),
        dict(num_local_experts=4),
        dict(moe_renormalize=False, norm_topk_prob=True),
        dict(head_dim=72, rope_theta=9.0, rope_scaling=None),
        dict(q_lora_rank=10),
    ]
}


def windows_of(config):
    """The window of each layer, as a model of transformers makes it of its config."""
    size, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None:
        types = [
            SLIDING if config.model_type in ("mistral", "mixtral", "qwen3_moe") else FULL
        ] * config.num_hidden_layers
    return tuple(size if kind == SLIDING else None for kind in types)


def logits_here(folder, tokens):
    """The logits of this program, and the windows of the layers."""
    import jax

    import pretrained
    import startrail_jax as st
    from programs import make_program, options
    from trainer.gpt.batches import next_token_batch
    from trainer.gpt.pretrained.initial import open_pretrained

    program = make_program(pretrained.make_config(folder), st.Degrees())
    batch = next_token_batch(np.pad(tokens, ((0, 0), (0, 1))), layout=program.attention.layout)
    batch = jax.tree.map(
        lambda x, shape: jax.device_put(x, shape.sharding), batch, program.batch_shapes
    )
    shapes = program.state_shapes.weights
    with open_pretrained(program.config, shapes) as initial:
        weights = initial.read(shapes)
    run = jax.jit(program.outputs).lower(weights, batch).compile(options(program))
    return np.asarray(run(weights, batch)), program.config.model.layer_windows


def check():
    """Imports every odd setting beside PyTorch; says what it finds, and whether none is silent."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, LENGTH))
    counts, silent, seen = {"equal": 0, "refused": 0}, [], set()
    for family in sys.argv[1:] or FAMILIES:
        base, before = next(settings_of(family)), counts["equal"]
        for values in settings_of(family):
            odd = {k: v for k, v in values.items() if base.get(k, "") != v}
            odd |= {k: "left out" for k in base.keys() - values}
            if (what := f"{family} {odd}") in seen:
                continue
            seen.add(what)
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                (folder / "config.json").write_text(json.dumps(values))
                theirs = logits_of_torch(folder, tokens)
                try:
                    read_description(folder)
                    if theirs is not None:
                        ours, windows = logits_here(folder, tokens)
                except (InputError, UnsupportedError) as error:
                    refused = f"refused: {str(error)[:90]}"
                    counts["refused"] += 1
                    print(f"{what}: {refused}", flush=True)
                    continue
                if theirs is None:
                    found = "imported, and transformers refuses it"
                else:
                    logits, own, theirs = theirs
                    error = error_of(ours, logits)
                    found = f"error {error:.1e}, in PyTorch {own:.1e}; windows {windows}, {theirs}"
                    # Few models make more of a rounding error.
                    if error <= max(LARGEST_ERROR, 4 * own) and windows == theirs:
                        counts["equal"] += 1
                        print(f"{what}: equal, {error:.1e}", flush=True)
                        continue
            silent.append(f"{what}: {found}")
            print(f"{what}: SILENT, {found}", flush=True)
        if counts["equal"] == before:
            silent.append(f"{family}: nothing is equal, so that nothing was compared")
            print(silent[-1], flush=True)
    print(f"{len(seen)} settings: {counts['equal']} equal, {counts['refused']} refused, "
          f"{len(silent)} silent")  # fmt: skip
    return not silent


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    sys.exit(not check())
