"""Tiny random models of the library transformers, and what PyTorch computes with them.

pip install -e '.[parity]'
python tests/parity/make_references.py            # writes tests/parity/references, 2 MB
python tests/parity/make_references.py --check    # compares with models that it makes anew
"""

import argparse
import contextlib
import copy
import sys
import tempfile
import unittest.mock
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[2]
REFERENCES = Path(__file__).parent / "references"
SIZES = dict(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LENGTH = 32
ROPE_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
ROPE_YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8)
ROPE_LINEAR = dict(rope_type="linear", rope_theta=10_000.0, factor=2.0)
ROPE_GEMMA3 = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
OF_STATES = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=3,
)
FULL = "full_attention"
OF_MAMBA = dict(
    mamba_num_heads=4,
    mamba_head_dim=6,
    n_groups=2,
    ssm_state_size=5,
    conv_kernel=3,
    time_step_min=0.25,
    layer_norm_epsilon=1e-5,
)
OF_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
OF_GLM4_MOE = dict(
    num_hidden_layers=3,
    attention_bias=True,
    moe_intermediate_size=12,
    num_experts_per_tok=3,
    n_routed_experts=9,
    n_shared_experts=2,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
)
OF_LATENTS = dict(
    attention_bias=False,
    num_key_value_heads=4,
    head_dim=4,
    kv_lora_rank=6,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=7,
    num_nextn_predict_layers=0,
)
OF_OTHERS = ("n_routed_experts", "first_k_dense_replace")
OF_V3 = ("num_nextn_predict_layers", "n_group", "topk_group")
OF_KIMI = dict(
    num_local_experts=9,
    q_lora_rank=None,
    rms_norm_eps=1e-3,  # The first tokens have small outputs, and norms make rounding errors grow.
    linear_num_heads=4,
    linear_head_dim=5,
    linear_conv_kernel_dim=3,
)
KDA_FIRST = ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"]
DENSE_FIRST = ["dense", *["sparse"] * 4]
ROPE_GLM4V = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
SMALLER = dict(intermediate_size=12, num_key_value_heads=1, head_dim=4)
GEMMA3 = SMALLER | dict(
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=6,
    rope_parameters=ROPE_GEMMA3,
    tie_word_embeddings=True,
)

OF_GRANITE = dict(
    num_hidden_layers=5,
    layer_types=["mamba", "attention", "mamba", "mamba", "attention"],
    mamba_n_heads=8,
    mamba_n_groups=2,
    mamba_d_state=5,
    mamba_d_conv=3,
    mamba_expand=3,
    embedding_multiplier=2.5,
    residual_multiplier=0.4,
    logits_scaling=1.7,
)
GEMMA4 = dict(
    num_hidden_layers=5,
    layer_types=["sliding_attention", *["sliding_attention", "full_attention"] * 2],
    sliding_window=5,
    num_key_value_heads=4,
    head_dim=4,
    global_head_dim=12,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=2.0,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.5),
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
    ),
)

# Name -> family, options, and type of the saved weights.
CASES = {
    "llama": ("Llama", {}, "float32"),
    "llama3": ("Llama", dict(rope_parameters=ROPE_LLAMA3, tie_word_embeddings=True), "bfloat16"),
    "llama_linear": ("Llama", dict(rope_parameters=ROPE_LINEAR), "float16"),
    "mistral": ("Mistral", dict(sliding_window=5), "float32"),
    # The second layer alone has the window.
    "qwen2": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "float32",
    ),
    "qwen2_yarn": ("Qwen2", dict(rope_parameters=ROPE_YARN), "bfloat16"),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True), "float32"),
    "seed_oss": ("SeedOss", dict(attention_dropout=0.0, residual_dropout=0.0), "float32"),
    # The layer without rotary positions has the window.
    "smollm3": (
        "SmolLM3",
        dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5),
        "float32",
    ),
    "gemma2": (
        "Gemma2",
        SMALLER
        | dict(
            sliding_window=5,
            query_pre_attn_scalar=6,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
        ),
        "bfloat16",
    ),
    "gemma3": ("Gemma3", GEMMA3, "bfloat16"),
    # Half of the channels turn, and key heads are shared. A slice of 8 devices has two tokens.
    "qwen3_5": (
        "Qwen3_5",
        OF_STATES
        | dict(
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
            tie_word_embeddings=True,
        ),
        "float32",
    ),
    "olmo2": ("Olmo2", dict(rope_parameters=ROPE_YARN), "float32"),
    # The layer without a window alone is stretched.
    "olmo3": (
        "Olmo3",
        dict(
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=ROPE_YARN,
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
        "float32",
    ),
    # Without rotary positions, and with norms over all heads, of which devices may have a half.
    "olmo_hybrid": (
        "OlmoHybrid",
        OF_STATES | dict(rope_parameters=dict(rope_type="default", rope_theta=None)),
        "float32",
    ),
    "qwen3_next": (
        "Qwen3Next",
        OF_STATES
        | OF_EXPERTS
        | dict(
            shared_expert_intermediate_size=12,
            norm_topk_prob=False,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        ),
        "float32",
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        OF_STATES
        | OF_EXPERTS
        | dict(
            shared_expert_intermediate_size=12,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        ),
        "float32",
    ),
    # A dense layer among those of experts.
    "qwen3_moe": (
        "Qwen3Moe",
        OF_EXPERTS | dict(num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True),
        "float32",
    ),
    "mixtral": (
        "Mixtral",
        dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=5, intermediate_size=12),
        "bfloat16",
    ),
    "gpt_oss": (
        "GptOss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=12,
            sliding_window=5,
            rope_parameters=ROPE_YARN | dict(truncate=False),
        ),
        "float32",
    ),
    # Heads are as wide as the model together.
    "olmoe": (
        "Olmoe",
        dict(num_experts=4, num_experts_per_tok=3, intermediate_size=12, head_dim=4),
        "float32",
    ),
    # Models of images and text, of which all is computed for text.
    "qwen3_vl": (
        "Qwen3VL",
        dict(
            rope_parameters=dict(
                rope_type="default",
                rope_theta=100.0,
                mrope_section=[2, 1, 1],
                mrope_interleaved=True,
            ),
            tie_word_embeddings=True,
        ),
        "bfloat16",
    ),
    "gemma3_images": ("Gemma3", GEMMA3, "bfloat16"),
    "mistral3": ("Mistral3", dict(model_type="mistral", sliding_window=5), "float32"),
    # Half of the channels turn, neighbours together.
    "glm4": ("Glm4", dict(partial_rotary_factor=0.5, num_hidden_layers=3), "float32"),
    # A dense layer, two groups of experts, and biases in their choice.
    "glm4_moe": (
        "Glm4Moe",
        dict(
            **OF_GLM4_MOE,
            use_qk_norm=True,
            num_nextn_predict_layers=0,
        ),
        "float32",
    ),
    # Layers of one part each; a kernel of three tokens, and states of five rows.
    "nemotron_h": (
        "NemotronH",
        OF_MAMBA
        | dict(
            layers_block_type=["linear_attention", "mlp", "linear_attention", FULL, "mlp"],
            mlp_hidden_act="relu2",
        ),
        "bfloat16",
    ),
    # Experts without gates, in channels of their own.
    "nemotron3": (
        "NemotronH",
        OF_MAMBA
        | dict(
            layers_block_type=["linear_attention", "moe", FULL, "linear_attention", "moe"],
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=12,
            moe_shared_expert_intermediate_size=20,
            moe_latent_size=10,
            routed_scaling_factor=2.5,
        ),
        "float32",
    ),
    # Layers of two sizes, of which the larger ones have keys as values.
    "gemma4": ("Gemma4", GEMMA4, "float32"),
    "gemma4_values": (
        "Gemma4",
        GEMMA4 | dict(attention_k_eq_v=False, tie_word_embeddings=False),
        "bfloat16",
    ),
    "gemma4_images": (
        "Gemma4",
        GEMMA4
        | dict(use_bidirectional_attention="vision", tie_word_embeddings=True, pad_token_id=0),
        "bfloat16",
    ),
    "qwen3_vl_moe": ("Qwen3VLMoe", OF_EXPERTS | dict(mlp_only_layers=[0]), "float32"),
    # Always with biases; half of the channels turn, shared by time, height and width.
    "glm4v": (
        "Glm4v",
        dict(head_dim=4, rope_parameters=ROPE_GLM4V | dict(mrope_section=[1, 0, 0])),
        "float32",
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        OF_GLM4_MOE | dict(rope_parameters=ROPE_GLM4V | dict(mrope_section=[1, 1, 0])),
        "bfloat16",
    ),
    # A kernel of three tokens, states of five rows, heads of six channels, and no positions.
    "granite": (
        "GraniteMoeHybrid",
        OF_GRANITE
        | dict(num_local_experts=0, shared_intermediate_size=20, attention_multiplier=0.25),
        "float32",
    ),
    # Experts beside an MLP, rotary positions, and one key head.
    "granite_moe": (
        "GraniteMoeHybrid",
        OF_GRANITE
        | dict(
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=5,
            num_experts_per_tok=2,
            intermediate_size=12,
            shared_intermediate_size=20,
            num_key_value_heads=1,
            attention_multiplier=128**-0.5,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
        "bfloat16",
    ),
    # Latents of odd sizes, for queries too; groups of experts; YaRN sharpens the logits.
    "deepseek_v3": (
        "DeepseekV3",
        OF_GLM4_MOE
        | OF_LATENTS
        | dict(q_lora_rank=10, rope_parameters=ROPE_YARN | dict(mscale=0.7, mscale_all_dim=1.3)),
        "float32",
    ),
    # As Moonlight: queries from the input, one group, halves of the channels turn together.
    "moonlight": (
        "DeepseekV3",
        OF_GLM4_MOE
        | OF_LATENTS
        | dict(
            num_hidden_layers=5,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            rope_interleave=False,
            norm_topk_prob=False,
        ),
        "bfloat16",
    ),
    # Kimi Delta Attention with a kernel of 3, latents without positions, groups of experts.
    "kimi_linear": (
        "KimiLinear",
        {key: x for key, x in (OF_GLM4_MOE | OF_LATENTS).items() if key not in OF_OTHERS}
        | OF_KIMI
        | dict(num_hidden_layers=5, layer_types=KDA_FIRST, mlp_layer_types=DENSE_FIRST),
        "float32",
    ),
    # As published: experts of one group, and shares that are not normalised; narrow queries.
    "kimi_linear_rank": (
        "KimiLinear",
        {key: x for key, x in (OF_GLM4_MOE | OF_LATENTS).items() if key not in OF_OTHERS}
        | OF_KIMI
        | dict(
            layer_types=KDA_FIRST[-3:],
            mlp_layer_types=DENSE_FIRST[:3],
            q_lora_rank=10,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
        ),
        "bfloat16",
    ),
    # As DeepSeek V2 Lite: shares of a softmax, and YaRN.
    "deepseek_v2": (
        "DeepseekV2",
        {key: x for key, x in (OF_GLM4_MOE | OF_LATENTS).items() if key not in OF_V3}
        # transformers cannot turn channels behind an odd number of others.
        | dict(q_lora_rank=None, qk_nope_head_dim=6, kv_lora_rank=8)
        | dict(rope_parameters=ROPE_YARN | dict(mscale=0.7, mscale_all_dim=0.7)),
        "bfloat16",
    ),
}
TOWER = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8,
    patch_size=2,
)  # fmt: skip
LIKE_GLM = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16, patch_size=2,
    image_size=8,
)  # fmt: skip
LIKE_QWEN = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16, patch_size=2,
    deepstack_visual_indexes=[0], num_position_embeddings=4,
)  # fmt: skip
# What the models of images and text have for images.
OF_IMAGES = {
    **{key: dict(vision_config=LIKE_QWEN) for key in ("qwen3_vl", "qwen3_vl_moe")},
    **{key: dict(vision_config=LIKE_GLM) for key in ("glm4v", "glm4v_moe")},
    "gemma3_images": dict(vision_config=TOWER, mm_tokens_per_image=4),
    "gemma4_images": dict(
        vision_config=dict(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8, patch_size=2, position_embedding_size=4,
        ),
        audio_config=None,
    ),
    "mistral3": dict(vision_config=TOWER | dict(model_type="pixtral", head_dim=8)),
}  # fmt: skip
OF_TEXT = "model.language_model."
OTHERS = (
    *("model.visual.", "model.vision_tower.", "model.multi_modal_projector."),
    "model.embed_vision.",
)
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}
CONFIGS |= {x: f"{x}TextConfig" for x in ("Qwen3_5", "Qwen3_5Moe")}


def make_model(name, seed):
    """A model of a case, with random biases and norms too, in float32 with values of its type."""
    family, options, dtype = CASES[name]
    of_what, kind, values = "CausalLM", CONFIGS.get(family, f"{family}Config"), SIZES | options
    if "layers_block_type" in values:
        del values["rms_norm_eps"], values["num_hidden_layers"]
    if name in OF_IMAGES:
        of_what, kind = "ConditionalGeneration", f"{family}Config"
        tied = values.pop("tie_word_embeddings", False)
        values = dict(text_config=values, tie_word_embeddings=tied) | OF_IMAGES[name]
    # Other kernels leave out soft caps.
    config = getattr(transformers, kind)(**values, attn_implementation="eager")
    torch.manual_seed(seed)
    # Gemma and Qwen3.5 multiply by 1 + the scale of a norm.
    centre = 0 if family.startswith(("Gemma2", "Gemma3", "Qwen3_5", "Qwen3Next")) else 1
    model = getattr(transformers, f"{family}For{of_what}")(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            scale = centre + noise / 4 if "norm" in path else noise * weight.shape[-1] ** -0.5
            if family == "Gemma4" and "q_norm" in path:
                scale = scale / 2  # Its logits of attention have no other factor.
            if family == "KimiLinear" and "A_log" in path:
                scale = scale * weight.numel() ** -0.5  # [1, 1, heads, 1].
            weight.copy_(scale.to(getattr(torch, dtype)))
        for path, bias in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn_like(bias) / 4)
        for path, scalar in model.named_buffers():
            if path.endswith("layer_scalar"):
                scalar.copy_((1 + torch.randn_like(scalar) / 4).to(getattr(torch, dtype)))
    return model, dtype


def save_checkpoint(model, dtype, folder, **options):
    """Saves as a user does; returns what is loaded, as rotary frequencies are rounded with it."""
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return load(type(model), folder, torch.float32).eval()


def load(kind, folder, dtype):
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return kind.from_pretrained(folder, dtype=dtype, **eager)


def compute(model, seed):
    """Tokens, logits, loss and all gradients, computed in float64."""
    model = copy.deepcopy(model).double()
    # Else no gradient reaches the embedding of padding, which some models cannot do without.
    model.get_input_embeddings().padding_idx = None
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, SIZES["vocab_size"], (2, LENGTH + 1))
    ids = torch.tensor(tokens)
    with in_float64(model):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    weights = of_text(dict(model.named_parameters()))
    gradients = {name: x.grad.numpy().astype("f4") for name, x in weights.items()}
    if model.config.model_type == "olmo_hybrid":
        gradients = as_in_files(gradients, model.config)
    if model.config.model_type == "nemotron_h":
        gradients = {x.replace("model.", "backbone.", 1): y for x, y in gradients.items()}
    if model.config.model_type == "granitemoehybrid":
        gradients = {of_granite(name): x for name, x in gradients.items()}
    elif model.config.model_type == "kimi_linear":
        gradients = of_kimi(gradients, model.config)
    elif model.config.model_type != "gpt_oss":
        gradients = by_expert(gradients, model.config.model_type)
    return {
        **balance(model, ids[:, :-1]),
        "tokens": tokens.astype(np.int32),
        "logits": out.logits[:, :-1].detach().numpy().astype("f4"),
        "loss": np.float32(out.loss.item()),
        **{f"gradient {name}": x for name, x in gradients.items()},
    }


class Float64:
    """torch, with float64 under the name of float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(model):
    """Kimi Delta Attention in float64 too: its own float32 is off by 1e-5 of the logits."""
    if model.config.model_type != "kimi_linear":
        yield
        return
    code = sys.modules[type(model).__module__]
    with (
        unittest.mock.patch.object(code, "torch", Float64()),
        unittest.mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def of_text(arrays):
    """The arrays of a text model, under the names that it has alone."""
    return {
        name.replace(OF_TEXT, "model."): x
        for name, x in arrays.items()
        if not name.startswith(OTHERS)
    }


def balance(model, ids):
    """The loss that balances experts, with a factor of 1, and its gradients of the routers."""
    has_loss = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    if not has_loss or model.config.model_type == "glm4v_moe":  # Refused there.
        return {}
    if getattr(model.config, "num_local_experts", None) == 0:
        return {}
    model.zero_grad()
    loss = model(input_ids=ids, output_router_logits=True).aux_loss
    loss.backward()
    folder = "block_sparse_moe.gate" if model.config.model_type == "mixtral" else "mlp.gate"
    routers = {
        name.replace("mlp.gate", folder): x.grad.numpy().astype("f4")
        for name, x in of_text(dict(model.named_parameters())).items()
        if name.endswith(("mlp.gate.weight", ".router.weight"))
    }
    routers = {of_granite(name): x for name, x in routers.items()}
    assert routers, "layers of experts have routers"
    return {
        "balance": np.float32(loss.item()),
        **{f"gradient of the balance {name}": x for name, x in routers.items()},
    }


def of_granite(name):
    """The name in files of a tensor of a Granite, where all experts of a layer have one tensor."""
    for loaded, published in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{loaded}", f"block_sparse_moe.{published}")
    return name


def of_kimi(arrays, config):
    """The arrays of a Kimi Linear under the names in files."""
    channels = config.linear_num_heads * config.linear_head_dim
    kinds = enumerate(config.mlp_layer_types)
    dense = tuple(f"model.layers.{i}." for i, kind in kinds if kind == "dense")
    found = {}
    for name, x in arrays.items():
        name = name.replace("self_attn.forget_gate.", "self_attn.")
        if "self_attn.conv1d" in name:
            parts = dict(zip("qkv", np.split(x, [channels, 2 * channels]), strict=True))
            found |= {name.replace("conv1d", f"{letter}_conv1d"): y for letter, y in parts.items()}
        else:
            found[name] = x
    of_dense = {name: x for name, x in found.items() if name.startswith(dense)}
    others = {name: x for name, x in found.items() if name not in of_dense}
    return of_dense | by_expert(others, "mixtral")


def as_in_files(arrays, config):
    """The arrays of an Olmo Hybrid under the names in files, where convolutions are three."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    types = enumerate(config.layer_types)
    linear = tuple(f"model.layers.{i}." for i, kind in types if kind == "linear_attention")
    found = {}
    for name, x in arrays.items():
        if "linear_attn.conv1d" in name:
            parts = dict(zip("qkv", np.split(x, [keys, 2 * keys]), strict=True))
            found |= {name.replace("conv1d", f"{letter}_conv1d"): y for letter, y in parts.items()}
        elif name.startswith(linear):
            name = name.replace("input_layernorm", "attention_layer_norm")
            found[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = x
        else:
            found[name] = x
    return found


def by_expert(arrays, kind):
    """The arrays under the names in files, where each expert has tensors of its own."""
    folder, *names = ("mlp", "gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        folder, *names = ("block_sparse_moe", "w1", "w3", "w2")
    found = {}
    for name, x in arrays.items():
        if ".mlp." in name:
            name = name.replace(".mlp.", f".{folder}.")
        place, _, which = name.rpartition(".")
        if which == "up_proj":  # Of experts without gates.
            found |= {f"{place}.{i}.{which}.weight": own for i, own in enumerate(x)}
            continue
        if which not in ("gate_up_proj", "down_proj"):
            found[name] = x
            continue
        for expert, own in enumerate(x):
            parts = np.split(own, 2) if which == "gate_up_proj" else [own]
            for label, part in zip(names if parts[1:] else names[2:], parts, strict=False):
                found[f"{place}.{expert}.{label}.weight"] = part
    return found


def write_references(cases):
    for seed, name in enumerate(CASES):
        if name not in cases:
            continue
        folder = REFERENCES / name
        folder.mkdir(parents=True, exist_ok=True)
        model, dtype = make_model(name, seed)
        # One case has several files and an index.
        options = {"max_shard_size": "8KB"} if name == "qwen3" else {}
        model = save_checkpoint(model, dtype, folder, **options)
        np.savez_compressed(folder / "reference.npz", **compute(model, seed))
    size = sum(path.stat().st_size for path in REFERENCES.rglob("*") if path.is_file())
    print(f"{REFERENCES}: {size / 1e6:.2f} MB")


def check(cases):
    """Compares with models of another seed, live; exits with status 1 if anything differs."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import pretrained
    from startrail_jax.testing import simulate_devices

    simulate_devices(8)
    for seed, name in enumerate(cases, 1000):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "in")
            model, dtype = make_model(name, seed)
            model = save_checkpoint(model, dtype, folder)
            reference = compute(model, seed)
            worst = {}
            for scheme in pretrained.SCHEMES:
                found = pretrained.compute(folder, reference["tokens"], scheme)
                worst[scheme] = pretrained.compare(found, reference)
            out = Path(scratch, "out")
            pretrained.import_and_export(folder, Path(scratch, "run"), out)
            before = of_text(load(type(model), folder, getattr(torch, dtype)).state_dict())
            kind = transformers.AutoModelForCausalLM  # Of images and text, the text model is left.
            again = load(kind, out, getattr(torch, dtype)).state_dict()
            assert before.keys() == again.keys()
            assert all(torch.equal(x, again[path]) for path, x in before.items()), name
            logits = load(kind, out, torch.float32).eval()(
                input_ids=torch.tensor(reference["tokens"][:, :-1])
            ).logits.detach().numpy()  # fmt: skip
            np.testing.assert_array_equal(
                logits,
                model(input_ids=torch.tensor(reference["tokens"][:, :-1])).logits.detach().numpy(),
            )
        lines = ", ".join(f"{scheme} {value}" for scheme, value in worst.items())
        print(f"{name}: exported weights and logits equal bit for bit; {lines}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with new models")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    check(options.cases) if options.check else write_references(options.cases)
