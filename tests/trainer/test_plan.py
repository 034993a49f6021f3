"""`python plan.py`: from the question to flags that train.py takes."""

import dataclasses
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers
import transformers

import startrail_jax as st
from configs import RECIPES
from models.parts.attention import keys_of
from plan import find_run, main
from plans import MODELS, OF_RECIPES, plan
from programs import check_first_step
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from train import read_command_line
from trainer.config import LoraConfig
from trainer.errors import MissingPackageError
from trainer.gpt.pretrained.config_json import read_description
from trainer.gpt.pretrained.families.table import FAMILIES, MULTIMODAL
from trainer.gpt.pretrained.plan_model import (
    FURTHER,
    IF_NORMALISED,
    NORMALISED,
    WITHOUT_GATE,
    find_model,
)
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.degrees import default_degrees
from trainer.parallel.flops import PEAK_FLOPS
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.hardware import GPUS
from trainer.planner.search import Search
from trainer.run.settings import save_config
from trainer.tasks import TASKS

TIED = "tie_word_embeddings"
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
CLUSTER = "--nodes 8 --gpus-per-node 8 --gpu h100 --port 50GB/s"
QWEN = {
    **{"model_type": "granite", "hidden_size": 4096, "num_hidden_layers": 36},
    "num_attention_heads": 32,
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288},
    **{"vocab_size": 151936, "tie_word_embeddings": False},
}


def asked(arguments, capsys):
    status = main(shlex.split(f"{arguments} --json --top 2"))
    return status, json.loads(capsys.readouterr().out)


def sizes_of(path, **options):
    """The sizes of a model of Hugging Face."""
    return find_model(str(path), **options).sizes


def save_tokenizer(folder):
    words = tokenizers.models.BPE({"<unk>": 0, "a": 1}, [])  # Gemma needs an unknown one.
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def trained(command):
    """What train.py understands of a command that was printed, with data in place of YOUR_DATA."""
    words = shlex.split(command.replace("YOUR_DATA", __file__))
    return read_command_line(words[words.index("train.py") + 1 :]).settings


def test_readme_question_is_answered(capsys):
    assert main(shlex.split(f"gpt_7b {CLUSTER} --seq-len 512K")) == 0
    text = capsys.readouterr().out
    assert text.startswith("8 nodes x 8 h100, 8 ports of 50 GB/s (400 Gbit/s) a node, ")
    for scheme in ("Ring Attention", "all-gather", "Ulysses", "LoongTrain / USP", "as published"):
        assert scheme in text
    # 32 heads cannot be split over 64 GPUs.
    assert re.search(r"no legal setting +Ulysses: it needs heads that all GPUs", text)
    assert " wins, since " in text
    assert re.search(r"slower: it .* Of its [\d.]+ s: ", text)
    assert "python train.py gpt_7b --data.path YOUR_DATA " in text
    assert " --seq-len 524288 " in text


def test_flags_of_whole_documents_give_their_mesh(tmp_path):
    (tmp_path / "lengths.txt").write_text("65536\n" * 40)
    options = Search(degrees=dict(data=1, tensor=1, team=4, ring=4))
    cluster = dict(nodes=16, gpus_per_node=1, gpu="h100", port="1GB/s")
    asked = dict(model="qwen3_8b", seq_len="64K", batch=1, options=options)
    found = plan(**cluster, **asked, lengths=str(tmp_path / "lengths.txt")).documents
    flags = re.search(r"--data\.batches [^)]*", found.comparison)[0]
    config = trained(f"python train.py {flags}")
    degrees = default_degrees(config.mesh, 16, config.attention_call)
    assert degrees == found.mesh.degrees


def test_schemes_on_one_gpu_need_several(capsys):
    cluster = "--nodes 1 --gpus-per-node 1 --gpu h200"
    assert main(shlex.split(f"gpt_3b {cluster} --seq-len 8K")) == 0
    text = capsys.readouterr().out
    reasons = re.findall(r"no legal setting +([^:]+): it needs several GPUs for a sequence\n", text)
    assert {"Ulysses", "LoongTrain / USP", "StarTrail as published"} <= set(reasons)


def word_of(kind, folder):
    """The first word for a recipe, or for a file of Hugging Face."""
    if kind in RECIPES:
        return kind
    more = {} if kind == "hugging face" else {"model_type": kind, "sliding_window": 4096}
    (folder / "config.json").write_text(json.dumps(QWEN | more))
    return str(folder / "config.json")


def test_sizes_of_a_plan_are_those_of_a_run():
    """Without jax, and with it."""
    for name in OF_RECIPES.values():
        config = RECIPES[name]()
        task = TASKS[config.kind]
        assert task.sizes(config) == task.make_objective(config).sizes


FEW = "--zero 3 --remat attention_saved --no-offload --no-tile --top 1"


def checked(command, num_gpus):
    """What train.py makes of a command, after the checks of its first step."""
    config = trained(command)
    sizes = {role: size for role, size in config.mesh.degrees.items() if size is not None}
    degrees = st.Degrees(**sizes)
    assert math.prod(sizes.values()) == num_gpus
    check_first_step(config, degrees)
    return config


WIDE = (
    "--model.width 2048 --model.layers 8 --model.heads 16 --model.kv-heads 16 --model.head-dim 128 "
    "--model.mlp-width 8192 --model.vocab-size 32000"
)
OTHERS = "--model.qk-norm --model.kv-heads 8"
TWO_NODES = "--nodes 2 --gpus-per-node 2 --gpu h200 --port 50GB/s"


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize(
    ("cluster", "kind", "more"),
    [
        (CLUSTER, "gpt_7b", "--attention.gradient-dtype bfloat16 --zero 2 3 --seq-len 128K"),
        (CLUSTER, "dit_1b", ""),
        (CLUSTER, "dit_1b", "--size 4 256 256 --remat full"),
        (CLUSTER, "wan_14b", "--batch-size 8"),
        (CLUSTER, "llama3_8b", "--batch-size 2 --mesh.data 2 --offload --tile --seq-len 128K"),
        (CLUSTER, "hugging face", "--half-duplex --latency 20us --seq-len 128K"),
        (CLUSTER, "gpt_tiny", f"{WIDE} --inside 100GB/s --zero 0 --remat none --seq-len 128K"),
        (TWO_NODES, "mistral", "--seq-len 64K"),
        (TWO_NODES, "qwen3_5_9b_1m", "--seq-len 256K --mesh.head 4"),
        (CLUSTER, "qwen3_5_9b_1m", ""),
        (CLUSTER, "llama3_70b", "--seq-len 128K --lora.rank 8 --lora.targets query value"),
        (TWO_NODES, "gpt_3b", f"--model.windows 1024 none {OTHERS} --model.vocab-size 65536"),
        ("--nodes 1 --gpus-per-node 2 --gpu h200", "gpt_7b", "--model.layers 2 --seq-len 64K"),
    ],
)
def test_pasted_commands_give_the_setting_and_pass_the_checks_of_a_step(
    cluster, kind, more, tmp_path, capsys
):
    """A recipe with such sizes takes the place of YOUR_RECIPE."""
    save_tokenizer(tmp_path)
    _, plan = asked(f"{word_of(kind, tmp_path)} {cluster} {FEW} {more}", capsys)
    model, choice, nodes = plan["model"], plan["frugal"], plan["cluster"]["nodes"]
    names = ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width")
    sizes = " ".join(f"--model.{x.replace('_', '-')} {model[x]}" for x in names)
    mine = f"gpt_7b {sizes} --model.vocab-size {model['outputs']}"
    assert ("YOUR_RECIPE" in plan["command"]) == (kind == "hugging face")
    if kind in RECIPES:
        assert plan["seq_len"] == RECIPES[kind]().num_tokens or "--s" in more
    command = plan["command"].replace("YOUR_RECIPE", mine)
    config = checked(command, nodes * plan["cluster"]["gpus_per_node"])
    assert config.mesh.degrees == choice["degrees"]
    assert nodes == 1 or config.mesh.order == tuple(choice["order"])
    savings = {name: getattr(config, name) for name in ("zero", "remat", "offload")}
    assert savings == {name: choice["savings"][name] for name in savings}
    assert config.tile == choice["tile"]
    assert (config.attention.inner, config.attention.head_chunks) == (choice["inner"], 1)
    assert config.attention.gradient_dtype == choice["gradient_dtype"]
    assert config.batch_size == plan["batch"]
    assert (config.num_tokens, config.kind) == (plan["seq_len"], plan["model"]["kind"])
    if kind == "mistral":
        assert config.model.windows == (4096,)
    assert plan["command"].endswith(" --distributed") == (nodes > 1)


def test_a_command_says_what_jax_may_take_of_the_memory():
    few = Search(zero=(3,), remat=("full",), offload=(False,), memory_fraction=0.85)
    found = plan(nodes=1, gpus_per_node=4, gpu="h100", model="gpt_7b", options=few)
    choice = dataclasses.replace(found.frugal, memory_bytes=70 * 2**30)
    full = dataclasses.replace(found, frugal=choice)
    assert full.command.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.85 python train.py gpt_7b ")


def test_any_number_of_tokens_is_planned(capsys):
    """train.py fills rows up for the mesh; so does the forecast."""
    few = f"gpt_7b {CLUSTER} --mesh.tensor 1 {FEW} --seq-len"
    odd, even = (asked(f"{few} {length}", capsys)[1] for length in (99_990, 100_096))
    assert (odd["seq_len"], even["seq_len"]) == (99_990, 100_096)
    assert "--seq-len 99990" in odd["command"]
    assert odd["ranked"][0]["degrees"] == even["ranked"][0]["degrees"]
    assert odd["ranked"][0]["seconds"] == pytest.approx(even["ranked"][0]["seconds"])


def test_windows_of_layers_are_read(tmp_path, capsys):
    path = tmp_path / "config.json"
    small = dict(QWEN, num_hidden_layers=4, sliding_window=4096)
    # Of the families of the program, see below.
    for more, windows in (
        ({"layer_types": ["full_attention"] * 4}, (None,)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (4096, None)),
        ({"sliding_window_pattern": 3}, (4096, 4096, None)),
        ({"model_type": "mistral"}, (4096,)),
    ):
        path.write_text(json.dumps(small | more))
        assert sizes_of(path).windows == windows
    arguments = f"--nodes 1 --gpus-per-node 8 --gpu h100 {FEW} --seq-len 256K --model.windows"
    seconds = []
    for windows in ("4096", "none", "4096 4096 none"):
        _, plan = asked(f"llama3_8b {arguments} {windows}", capsys)
        seconds.append(plan["ranked"][0]["seconds"])
    assert 2 * seconds[0] < seconds[1]
    assert seconds[0] < seconds[2] < seconds[1]
    assert plan["model"]["windows"] == [4096, 4096, None]


WINDOWS, OF_8 = {"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 8}
SAYINGS = [
    {},
    {"use_sliding_window": False},
    WINDOWS | {"max_window_layers": 3},
    WINDOWS | {"sliding_window": 512},
    *({"sliding_window": x} for x in (None, 512, 0)),
    {"sliding_window_pattern": 4},
    WINDOWS | {"num_hidden_layers": 30},
    {"layer_types": FULL * 8},
    {"layer_types": SLIDING * 8, "sliding_window": 512},
    WINDOWS | {"layer_types": SLIDING * 8, "sliding_window": 512},
    OF_8 | {"layer_types": (SLIDING * 3 + FULL) * 2},
    {"layer_types": (SLIDING * 3 + FULL) * 2},
    {"layer_types": 5},
    {"max_window_layers": "x"},
    {"use_sliding_window": 1},
    *(OF_8 | {"no_rope_layer_interval": x} for x in (0, 2)),
    *(OF_8 | {"no_rope_layers": x} for x in (5, [1, 0] * 4)),
]


# What files of a kind must say.
NEEDED = {kind: {"hidden_size_per_layer_input": 0} for kind in ("gemma4_text", "gemma4")}
NEEDED["granitemoehybrid"] = {"layer_types": FULL * 8}
NEEDED["kimi_linear"] = {"num_key_value_heads": 32}
OF_DEEPSEEK = {"num_key_value_heads": 32, "head_dim": 64}
NEEDED |= {"deepseek_v2": OF_DEEPSEEK | {"num_experts_per_tok": 6}, "deepseek_v3": OF_DEEPSEEK}
# What the program refuses, and changes no size.
REFUSED = {
    "rope_type": {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
    "residual_multiplier": {"residual_multiplier": 0.2},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "architectures": {"architectures": ["SomeForCausalLM"]},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_pretrained_model_is_planned_as_the_program_reads_it(kind, tmp_path):
    """A file that the program refuses is planned without a command, unless for its sizes."""
    path, of_8 = tmp_path / "config.json", QWEN | {"num_hidden_layers": 8, "model_type": kind}
    of_8 |= NEEDED.get(kind, {})
    compared = 0
    for more in SAYINGS:
        path.write_text(json.dumps(of_8 | more))
        told = None
        with suppress(InputError, UnsupportedError):
            told = read_description(tmp_path).model
        if told is None:
            with suppress(InputError, UnsupportedError):
                assert find_model(str(tmp_path)).run == ()
            continue
        found = find_model(str(tmp_path))
        assert found.sizes == sizes_of_gpt(told, name=str(path)), more
        assert found.run == ("--init-from", str(tmp_path))
        compared += 1
    assert compared >= (1 if kind == "llama" else 3)
    path.write_text(json.dumps(of_8))
    model = sizes_of(tmp_path)
    for key, more in REFUSED.items():
        # A Kimi Linear has no positions, whatever its files say.
        if key in FAMILIES[kind].keys or (kind, key) == ("kimi_linear", "rope_type"):
            continue
        path.write_text(json.dumps(of_8 | more))
        found = find_model(str(tmp_path))
        assert found.run == ()
        assert key in found.sizes.assumed
        assert dataclasses.replace(found.sizes, assumed=None) == model


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_text_models_of_images_and_text_are_planned_as_the_program_reads_them(kind, tmp_path):
    path, text = tmp_path / "config.json", UNTIED | {"num_hidden_layers": 8} | NEEDED.get(kind, {})
    path.write_text(json.dumps({"model_type": kind, "text_config": text}))
    found = find_model(str(tmp_path))
    assert found.sizes == sizes_of_gpt(read_description(tmp_path).model, name=str(path))
    assert found.run == ("--init-from", str(tmp_path), "--init-text-only")
    more = REFUSED["residual_multiplier"]
    path.write_text(json.dumps({"model_type": kind, "text_config": text | more}))
    again = find_model(str(tmp_path))
    assert again.run == ()
    assert "residual_multiplier" in again.sizes.assumed
    assert dataclasses.replace(again.sizes, assumed=None) == found.sizes


def test_a_plan_says_why_the_program_does_not_take_a_file(tmp_path, capsys):
    values = QWEN | {"model_type": "llama"} | REFUSED["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(shlex.split(f"{tmp_path} {CLUSTER} {FEW} --seq-len 64K")) == 0
    shown = capsys.readouterr().out
    assert "train.py does not take this file, whose sizes alone are planned: rope_type" in shown
    assert "train.py YOUR_RECIPE " in shown


def test_adapters_of_a_run_and_of_a_flag_are_planned(capsys):
    lora = LoraConfig(rank=8, targets=("query", "down"), base_dtype="float32")
    config = dataclasses.replace(RECIPES["gpt_tiny"](), lora=lora)
    model = TASKS["gpt"].make_objective(config).sizes
    assert (model.lora_rank, model.lora_targets, model.frozen_itemsize) == (8, lora.targets, 4)
    few = f"--nodes 1 --gpus-per-node 2 --gpu h100 {FEW}"
    _, told = asked(f"llama3_8b {few} --seq-len 8K --lora.rank 4", capsys)
    config = trained(told["command"])
    assert (config.lora, config.model) == (LoraConfig(rank=4), RECIPES["llama3_8b"]().model)
    assert config.optimizer == RECIPES["llama3_8b"]().optimizer.for_adapters()
    with refused(InputError, "lora_rank=4", "dit_1b"):
        dataclasses.replace(MODELS["dit_1b"], lora_rank=4)


def test_hugging_face_configs_of_other_shapes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": QWEN | {"model_type": "qwen3"}}))
    same = {"name": "qwen3_8b"}
    assert dataclasses.replace(sizes_of(tmp_path), **same) == MODELS["qwen3_8b"]
    hybrid = QWEN | {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    hybrid |= {"head_dim": 256, "vocab_size": 248_320, "model_type": "qwen3_5_text"}
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": hybrid}))
    model = sizes_of(tmp_path)
    same = {"name": "qwen3_5_9b"}
    assert dataclasses.replace(model, **same) == MODELS["qwen3_5_9b"]
    assert find_model(str(tmp_path)).run == ("--init-from", str(tmp_path), "--init-text-only")
    old = {key: value for key, value in QWEN.items() if "key_value" not in key}
    nulls = {"head_dim": None, "num_key_value_heads": None}
    path.write_text(json.dumps(old | {"model_type": "gpt_neox"} | nulls))
    model = sizes_of(path)
    assert (model.mlp_matrices, model.kv_heads, model.head_dim) == (2, 32, 128)
    outer = {"tie_word_embeddings": True, "text_config": {"model_type": "qwen2_5_vl_text"} | UNTIED}
    path.write_text(json.dumps(outer))
    assert sizes_of(path).head == "embedding"
    # As published: the rest is as transformers has it.
    few = {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10_240}
    text = few | {"model_type": "gemma3_text", "sliding_window": 1024}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    model = sizes_of(path)
    assert (model.heads, model.kv_heads, model.head_dim) == (8, 4, 256)
    assert model.head == "embedding"
    assert model.elements / 1e9 == pytest.approx(3.88, rel=1e-3)
    nulls |= {"num_experts": None, "moe_intermediate_size": None, "sliding_window": None}
    path.write_text(json.dumps(QWEN | {"model_type": "qwen3_moe"} | nulls))
    model = sizes_of(path)
    assert (model.experts, model.top_k, model.sizes["expert_mlp"]) == (128, 8, 768)
    assert (model.kv_heads, model.head_dim, model.windows) == (32, 128, (None,))


UNTIED = {key: value for key, value in QWEN.items() if key not in ("model_type", TIED)}
# Of published files, what the layers of these architectures have that the planner does not count.
UNCOUNTED = {
    "zamba2": {"mamba_d_state": 64, "hybrid_layer_ids": [6, 12], "adapter_rank": 128},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 2560},
    "lfm2": {"layer_types": ["conv"] * 30 + FULL * 6, "conv_L_cache": 3},
    "bamba": {"attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128},
    "falcon_h1": {"mamba_d_ssm": 3072, "mamba_chunk_size": 256},
    "jamba": {"attn_layer_period": 8, "mamba_expand": 2, "num_experts": 16},
    "mamba2": {"state_size": 128, "num_heads": 128, "expand": 2},
    "minicpm3": {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64},
    "deepseek_v32": {"kv_lora_rank": 512, "n_routed_experts": 256, "index_topk": 2048},
    "gemma3n_text": {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15},
    "llama4_text": {"interleave_moe_layer_step": 1, "layer_types": ["chunked_attention"] * 36},
    "mllama_text_model": {"cross_attention_layers": [3, 8]},
    "bert": {"type_vocab_size": 2},
    "falcon": {"multi_query": True, "ffn_hidden_size": 18176},
    None: {},
}


@pytest.mark.parametrize("kind", UNCOUNTED)
@pytest.mark.parametrize("nested", [False, True])
def test_architectures_that_are_not_counted_are_refused_by_name(kind, nested, tmp_path, capsys):
    keys, path = UNCOUNTED[kind], tmp_path / "config.json"
    values = QWEN | {"model_type": kind, "rope_theta": 1e4, "bos_token_id": 1} | keys
    values = {"text_config": values} if nested else values
    path.write_text(json.dumps(values | {"architectures": ["SomeForCausalLM"]}))
    with refused(UnsupportedError, "SomeForCausalLM", repr(kind), *keys, "--allow-unknown") as told:
        find_model(str(path))
    assert not any(word in str(told.value) for word in ("rope_theta", "bos_token", "hidden_size,"))
    command = f"{path} {CLUSTER} {FEW} --seq-len 64K --allow-unknown"
    if {"num_experts", "n_routed_experts"} & {*keys}:
        with refused(UnsupportedError, "experts"):
            find_model(str(path), allow_unknown=True)
        return
    assert main(shlex.split(command)) == 0
    shown = capsys.readouterr().out
    assert (
        f"SomeForCausalLM (model_type={kind!r}) is not known here: attention and a gated" in shown
    )
    assert all(key in shown for key in keys)
    assert "train.py YOUR_RECIPE " in shown


@pytest.mark.parametrize(
    ("kind", "sizes", "more", "billions"),
    [  # Width, layers, heads, key heads, MLP and tokens of published files, and their weights.
        ("phi3", (3072, 32, 32, 32, 8192, 32_064), {"sliding_window": 2047}, 3.821),
        ("phi", (2560, 32, 32, 32, 10_240, 51_200), {}, 2.780),
        ("glm4", (4096, 40, 32, 2, 13_696, 151_552), {"head_dim": 128}, 9.400),
        ("cohere", (8192, 40, 64, 64, 22_528, 256_000), {}, 34.981),
        ("cohere2", (4096, 32, 32, 8, 14_336, 256_000), {}, 8.028),
        ("arcee", (2560, 36, 20, 4, 18_432, 128_004), {"head_dim": 128}, 4.619),
        ("gemma", (2048, 18, 8, 1, 16_384, 256_000), {}, 2.506),
        ("olmo3", (4096, 32, 32, 32, 11_008, 100_278), {}, 7.298),
        ("starcoder2", (4608, 32, 36, 4, 18_432, 49_152), {}, 7.174),
        ("gpt_neox", (6144, 44, 64, 64, 24_576, 50_432), {}, 20.555),
    ],
)
def test_weights_of_further_architectures_are_those_of_published_models(
    kind, sizes, more, billions, tmp_path
):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = dict(zip((*names, "intermediate_size", "vocab_size"), sizes, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": kind} | more))
    model = sizes_of(tmp_path)
    assert model.elements / 1e9 == pytest.approx(billions, rel=1e-3)
    windows = {"phi3": {2047}, "olmo3": {4096, None}, "cohere2": {4096, None}}
    assert {*model.layer_windows} == windows.get(kind, {None})
    assert model.layer_windows.count(None) in (0, model.layers // 4, model.layers)


# As published, without the names of classes and ids of tokens.
NEMOTRON3_NANO = {
    **{"model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52},
    **{"hybrid_override_pattern": "MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME"},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131_072},
    **{"intermediate_size": 1856, "moe_intermediate_size": 1856, "n_routed_experts": 128},
    **{"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6, "n_groups": 8},
    **{"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4},
    **{"mlp_hidden_act": "relu2", "routed_scaling_factor": 2.5, "rope_theta": 10_000},
    **{"partial_rotary_factor": 1.0, "norm_eps": 1e-5, "sliding_window": None, "expand": 2},
}


@pytest.mark.parametrize("changes", [{}, {"quantization_config": {"bits": 4}}], ids=str)
def test_weights_of_layers_of_one_part_are_those_of_nemotron_3(changes, tmp_path):
    """31.6 billion, of which a token is multiplied with 3.2."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NEMOTRON3_NANO | changes))
    found = find_model(str(tmp_path))
    model = found.sizes
    assert model.elements == 31_577_940_288
    assert model.matrices + model.width * model.outputs == pytest.approx(3.2e9, rel=0.01)
    assert Counter(model.layer_pairs) == {
        ("ssd", "none"): 23, ("none", "experts"): 23, ("attention", "none"): 6
    }  # fmt: skip
    assert bool(found.run) != bool(changes)


def test_weights_of_a_granite_4_are_those_of_transformers(tmp_path):
    """Granite 4.0 H Tiny: 6.9 billion, of which a token is multiplied with 1.2."""
    types = (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4
    values = {
        **{"model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 40},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100_352},
        **{"layer_types": types, "intermediate_size": 512, "shared_intermediate_size": 1024},
        **{"num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48},
        **{"mamba_d_state": 128, "tie_word_embeddings": True, "attention_multiplier": 0.0078125},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = find_model(str(tmp_path))
    model = found.sizes
    assert found.run
    assert model.elements == 6_939_037_248
    assert Counter(model.layer_pairs) == {("ssd", "experts"): 36, ("attention", "experts"): 4}
    unused = 40 * 58 * 3 * 1536 * 512
    assert model.matrices + 1536 * 100_352 == pytest.approx(6_939_037_248 - unused, rel=1e-3)
    dense = values | {"num_local_experts": 0, "layer_types": ["attention"] * 40}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    assert find_model(str(tmp_path)).sizes.elements == (
        100_352 * 1536 + 1536 + 40 * (2 * 1536 + 1536 * 128 * (2 * 12 + 2 * 4) + 3 * 1536 * 1024)
    )


GEMMA4 = {  # As published, of 30.7 billion weights for text.
    "model_type": "gemma4_text", "hidden_size": 5376, "num_hidden_layers": 60, "head_dim": 256,
    "num_attention_heads": 32, "num_key_value_heads": 16, "intermediate_size": 21_504,
    "vocab_size": 262_144, "global_head_dim": 512, "num_global_key_value_heads": 4,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
}  # fmt: skip


# The second is none that train.py takes, and has the same sizes.
@pytest.mark.parametrize("more", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_heads_of_a_gemma_4_are_those_of_each_layer(more, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4 | more))
    model = sizes_of(tmp_path)
    assert model.elements / 1e9 == pytest.approx(30.7, rel=1e-3)
    heads = [(x.kv_heads, x.head_dim, len(x.layer_windows)) for x in model.attentions.values()]
    assert heads == [(16, 256, 50), (4, 512, 10)]


@pytest.mark.parametrize(
    "more",
    [dict(hidden_size_per_layer_input=256), dict(num_kv_shared_layers=20),
     dict(enable_moe_block=True)],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_a_gemma_4_whose_weights_are_not_counted_is_refused(more, nested, tmp_path):
    values = GEMMA4 | more
    values = {"model_type": "gemma4", "text_config": values} if nested else values
    (tmp_path / "config.json").write_text(json.dumps(values))
    with refused(UnsupportedError, *more, "which is not supported"):
        find_model(str(tmp_path))


def test_types_of_layers_that_are_not_counted_are_refused(tmp_path):
    types = ["linear_attention"] * 27 + FULL * 9
    for kind, more in (("llama", types), ("olmo3", types), ("qwen3_next", SLIDING * 36)):
        values = QWEN | {"model_type": kind, "layer_types": more}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with refused(UnsupportedError, "layer_types", more[0]):
            find_model(str(tmp_path))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.slow_except_every(4)
def test_pasted_command_starts_from_a_pretrained_model(kind, tmp_path):
    """The command takes biases, norms of queries and rotary positions from the config.json."""
    untold = ("head_dim", "tie_word_embeddings")
    values = {key: value for key, value in QWEN.items() if key not in untold}
    values |= {"model_type": kind, "num_hidden_layers": 2, "rope_theta": 1e6} | NEEDED.get(kind, {})
    values |= {"no_rope_layers": [1, 1]} if kind == "smollm3" else {}
    is_hybrid = kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    values |= {"full_attention_interval": 2} if is_hybrid else {}
    types = {"layer_types": ["linear_attention", "full_attention"]}
    values |= types if kind in ("olmo_hybrid", "kimi_linear") else {}
    values |= {"layer_types": FULL * 2} if kind == "granitemoehybrid" else {}
    values |= {"first_k_dense_replace": 1} if kind in ("deepseek_v2", "deepseek_v3") else {}
    (tmp_path / "config.json").write_text(json.dumps(values))
    few = Search(zero=(3,), remat=("full",), offload=(False,), tiled=(True,), baselines=False)
    model = sizes_of(tmp_path)

    def planned(model, run):
        return plan(
            nodes=1, gpus_per_node=2, gpu="h200", seq_len="64K", model=model, options=few, top=1,
            run=run,
        )  # fmt: skip

    found = planned(model, find_model(str(tmp_path)).run)
    save_tokenizer(tmp_path)
    config, told = trained(found.command), read_description(tmp_path).model
    assert config.init_from == tmp_path
    assert "--data.tokenizer" not in found.command
    assert config.model == dataclasses.replace(told, dtype="bfloat16")
    assert config.mesh.degrees == vars(found.frugal.degrees)
    assert model.is_gated == told.attention_gate
    assert model.head_dim == next(iter(keys_of(told).values())).head_dim
    for name in ("head", "qk_norm", "layer_mixers"):
        assert getattr(model, name) == getattr(told, name)
    if kind == "llama":
        # Flags change the model of a folder.
        flags = ["--model.layers", "4", "--lora.rank", "8"]
        changed = find_run(str(tmp_path), flags, seq_len="64K")
        assert (changed.sizes.layers, changed.sizes.lora_rank) == (4, 8)
        config = trained(planned(changed.sizes, changed.run).command)
        assert (config.init_from, config.model.layers, config.lora.rank) == (tmp_path, 4, 8)


@pytest.mark.parametrize("kind", FURTHER)
def test_what_no_config_json_says_is_as_in_transformers(kind):
    reader = transformers.CONFIG_MAPPING[kind]
    name = reader.__module__.rpartition(".configuration_")[2]
    text = (Path(inspect.getfile(reader)).parent / f"modeling_{name}.py").read_text("utf-8")
    assert ("gate_proj" not in text and "gate_up_proj" not in text) == (kind in WITHOUT_GATE)
    norms = re.search(r"self\.(q_norm|q_layernorm|query_layernorm) = ", text)
    key = next((key for key in IF_NORMALISED if f"config.{key}" in text), None)
    assert (norms is not None and key is None) == (kind in NORMALISED)
    assert key is None or hasattr(reader(), key)


@pytest.mark.parametrize(
    ("words", "gpu"),
    [
        ("gpt_7b", "h200"),
        ("dit_1b", "a100_40"),
        ("qwen3_5_9b_1m", "h200"),
        ("llama3_8b --lora.rank 16", "h100"),
        ("gpt_7b --model.layers 14 --model.windows 1024 1024 none", "h200"),
    ],
)
@pytest.mark.slow_except_every(3)
def test_memory_is_that_of_the_program(words, gpu):
    """The planner knows no arrays, and is within 2 % of what train.py counts from their shapes."""
    few = Search(zero=(2, 3), remat=("none", "attention_saved"), baselines=False)
    name, *flags = words.split()
    sizes, run, config = find_run(name, flags)
    length = None if config.kind == "dit" else "512K"
    found = plan(
        nodes=4, gpus_per_node=8, gpu=gpu, port="25GB/s", model=sizes, run=run, top=1, options=few,
        seq_len=length,
    )  # fmt: skip
    config = trained(found.command)
    objective = TASKS[config.kind].make_objective(config)
    # This also raises what the first step would raise.
    exact = AbstractStep.of_degrees(config, objective, found.frugal.degrees).memory()
    assert found.frugal.memory_bytes == pytest.approx(exact.device_bytes, rel=0.02)
    assert found.frugal.host_bytes == exact.host_bytes


@pytest.mark.slow
def test_where_nothing_fits_the_least_memory_is_said(capsys):
    few = "--remat full --no-offload --tile --mesh.tensor 1"
    arguments = f"gpt_7b --nodes 1 --gpus-per-node 8 --gpu a100_40 --seq-len 1M --zero 3 {few}"
    assert main(shlex.split(arguments)) == 1
    text = capsys.readouterr().out
    assert "Nothing fits: the least is" in text
    assert main(shlex.split(f"{arguments} --memory 2000GiB")) == 0
    capsys.readouterr()
    one = f"gpt_7b --nodes 1 --gpus-per-node 8 --gpu h100 --seq-len 64K --zero 0 {few}"
    assert main(shlex.split(one)) == 1
    assert "leave out flags that restrict the search" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            (f"{word} {CLUSTER} {more}", message)
            for word, more, message in (
                ("gpt_7b", "--efficiency 2", "--efficiency must be above 0 and at most 1; got 2.0"),
                (
                    "gpt_7b",
                    "--latency soon",
                    "time of at least 0 with its unit; got 'soon'",
                ),
                ("gpt_7b", "--memory 0GB", "--memory must be a size from a byte .*got '0GB'"),
                (
                    "gpt_7b",
                    "--memory 80",
                    "--memory must be a size .*with its unit; got '80'",
                ),
                ("gpt_7b", "--memory 1e300GB", "with its unit; got '1e300GB'"),
                ("gpt_7b", "--seq-len 1e400", "--seq-len must be a whole number from 1 to 1099511"),
                ("gpt_7b", "--seq-len 1000000000000000", "from 1 to 1099511627776; got '10000000"),
                (
                    *("gpt_7b", "--seq-len 1e12 --batch-size 1000000000"),
                    "must be small enough to count their byte",
                ),
                ("gpt_7b", "--latency 1e400s", "with its unit; got '1e400s'"),
                ("gpt_7b", "--peak-flops x", "--peak-flops must be a finite number of FLOP/s"),
                ("gpt_7b", "--peak-flops 989", "FLOP/s above 0 with its unit; got '989'"),
                ("{}/bad.json", "", "bad.json' must be JSON"),
                ("{}/empty.json", "", "it has no 'hidden_size'"),
                (
                    *("{}/experts.json", ""),
                    "experts are planned for models of mixtral, .*=granite with num_experts=8",
                ),
                (
                    "{}/granite.json",
                    "--model.layers 3",
                    "--model.layers needs a recipe, or a model",
                ),
                ("gpt_7b", "--model.head-dim 127", "model.head_dim must be even"),
                ("gpt_7b", "--model.windows 512 0", "model.windows must be one or more numbers"),
                ("gpt_7b", "--optimizer.kind muon", "A plan needs optimizer.kind='adamw'"),
                ("gpt_7b", "--optimizer.kind lion", "got 'lion'"),
                ("gpt_7b", "--mesh.order rings_inside", "--mesh.order must be left out of a plan"),
                ("gpt_7b", "--gradient-accumulation 2", "Plan the --batch-size of a part"),
                ("gpt_7b", "--model.layer 2", "--model.layer"),
                ("gpt_8b", "", "Did you mean gpt_7b?"),
                ("dit_1b", "--seq-len 1000", "--seq-len"),
            )
        ],
        (CLUSTER, "The first word must name what is planned: a recipe"),
        (
            "dit_1b --nodes 2",
            "must be described by .*; got no --gpus-per-node and no --gpu. Write",
        ),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text('{"model_type": "llama"}')
    (tmp_path / "granite.json").write_text(json.dumps(QWEN))
    (tmp_path / "experts.json").write_text(json.dumps(QWEN | {"num_experts": 8}))
    try:
        status = main(shlex.split(arguments.format(tmp_path)))
    except SystemExit as end:  # Of the flags of train.py.
        status = end.code
    assert status == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert [words for words in message.split(".*") if words not in shown] == [], shown


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "4096"}, "'4096'"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"model_type": "llama", "num_key_value_heads": True}, "num_key_value_heads"),
        ({"text_config": "x"}, "'x'"),
    ],
)
def test_files_with_wrong_sizes_are_refused(more, named, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN | more))
    with refused(InputError, named):
        find_model(str(path))


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_a_file_needs_transformers(kind, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"model_type": kind}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(MissingPackageError, "pip install -e '.[hf]'", str(tmp_path)):
        find_model(str(tmp_path))


def test_a_reader_that_leaves_ends_the_plan_quietly(monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        status = main(shlex.split(f"gpt_7b --nodes 1 --gpus-per-node 2 --gpu h100 {FEW}"))
        monkeypatch.undo()
    assert status in (0, 1)
    assert not capfd.readouterr().err


def test_help_begins_with_a_line_of_usage(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith("usage: python plan.py RUN --nodes N --gpus-per-node N --gpu GPU ")
    assert "\n" not in usage
    assert rest.startswith("Finds the fastest mesh")


@pytest.mark.slow
def test_help_imports_no_numpy_and_a_plan_no_jax_and_takes_two_seconds():
    """Without the type checks of the tests; the machine may be busy: the best of three counts."""
    code = (
        "import sys, time, plan\n"
        "try: plan.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'numpy' not in sys.modules\n"
        "times, cluster = [], '--gpus-per-node 8 --gpu h100 --port 50GB/s'\n"
        "while not times or (min(times) > 2 and len(times) < 3):\n"
        "    start = time.process_time()\n"
        "    words = f'gpt_7b --nodes 2048 {cluster} --seq-len 4M'.split()\n"
        "    assert plan.main(words) == 0\n"
        "    times.append(time.process_time() - start)\n"
        "assert not {'jax', 'jaxtyping', 'transformers'} & {*sys.modules}\n"
        "print('times', *times)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    times = done.stdout.rpartition("times ")[2].split()
    assert min(map(float, times)) < 2
    assert int(re.search(r"(\d+) settings of degrees", done.stdout)[1]) > 10_000


def test_config_of_a_run_is_planned_as_it_is(tmp_path, capsys):
    config = dataclasses.replace(RECIPES["gpt_7b"](), batch_size=4, run_dir=tmp_path)
    save_config(config, tmp_path / "config.json")
    _, told = asked(f"{tmp_path}/config.json {CLUSTER} {FEW} --mesh.head 8", capsys)
    assert (told["batch"], told["frugal"]["degrees"]["head"]) == (4, 8)
    assert trained(told["command"]).batch_size == 4
    # A degree of 1 that a run names for team, group or ring is kept.
    mesh = dataclasses.replace(config.mesh, team=1)
    save_config(dataclasses.replace(config, mesh=mesh), tmp_path / "config.json")
    _, told = asked(f"{tmp_path}/config.json {CLUSTER} {FEW}", capsys)
    assert {x["degrees"]["team"] for x in told["ranked"]} == {1}


def test_gpus_have_the_peak_of_the_program():
    for name, gpu in GPUS.items():
        assert gpu.peak_flops == PEAK_FLOPS[name.partition("_")[0].upper()]
