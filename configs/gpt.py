"""GPT recipes: functions that return a `GPTTrainConfig`. Flags override its settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from models.config import ExpertsConfig, GPTConfig, LinearConfig, RopeConfig
from models.parts.kda import KDAConfig
from models.parts.latent import LatentConfig
from models.parts.ssd import SSDConfig
from trainer.config import AttentionConfig, MeshConfig, OptimizerConfig
from trainer.gpt.config import DataConfig, GPTTrainConfig, TextSampleConfig


def gpt_tiny() -> GPTTrainConfig:
    """Byte-level GPT on the source of the Python standard library: the default of `train.py`.

    Command: `python train.py`. StarTrail (arXiv 2407.00611) with C = 2 on 8 simulated devices.
    Expected: 1.68 nats per byte on held-out files after 1.6 MB of text, in 5 to 10 minutes on 2 CPU
    cores. More steps at this batch size help more than larger batches.
    """
    return GPTTrainConfig(
        model=GPTConfig(width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=384),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        steps=800,
        batch_size=2,
        seq_len=1024,
        mesh=MeshConfig(default_c=2),
        sample=TextSampleConfig(length=256),
        run_dir=Path("runs/gpt_tiny"),
    )


def gpt_tiny_hybrid() -> GPTTrainConfig:
    """`gpt_tiny` with linear attention in three of four layers, and as many weights.

    Command: `python train.py gpt_tiny_hybrid`. Expected: 1.42 nats per byte, where `gpt_tiny` has
    1.66 (means of three seeds).
    """
    tiny = gpt_tiny()
    hybrid = replace(
        tiny.model,
        mixers=("linear", "linear", "linear", "attention"),
        linear=LinearConfig(key_heads=2),
        mlp_width=348,
    )
    return replace(tiny, model=hybrid, run_dir=Path("runs/gpt_tiny_hybrid"))


def gpt_tiny_mamba() -> GPTTrainConfig:
    """`gpt_tiny` with Mamba-2 in three of four layers, and as many weights.

    Command: `python train.py gpt_tiny_mamba`. Expected: 1.37 nats per byte, where `gpt_tiny` has
    1.68 with the same seed.
    """
    tiny = gpt_tiny()
    hybrid = replace(
        tiny.model,
        mixers=("ssd", "ssd", "attention"),
        ssd=SSDConfig(groups=2, state_dim=32),
        mlp_width=348,
    )
    return replace(tiny, model=hybrid, run_dir=Path("runs/gpt_tiny_mamba"))


def gpt_tiny_moe() -> GPTTrainConfig:
    """`gpt_tiny` with 16 experts in place of every second MLP, and as many weights for each token.

    Command: `python train.py gpt_tiny_moe`. Expected: 1.61 nats per byte, where `gpt_tiny` has 1.66
    (means of three seeds).
    """
    tiny = gpt_tiny()
    experts = ExpertsConfig(count=16, top_k=4, width=96, balance_loss=0.01)
    model = replace(tiny.model, feed_forwards=("mlp", "experts"), experts=experts)
    return replace(tiny, model=model, run_dir=Path("runs/gpt_tiny_moe"))


def gpt_3b() -> GPTTrainConfig:
    """StarTrail's GPT-3B (arXiv 2407.00611, table 2): 16 layers of width 4096, 512K tokens.

    The paper lists 12 heads, which do not divide 4096; this recipe has 32 heads of 128 channels.
    Command: `python train.py gpt_3b --data.path TOKENS.bin --mesh.c 4` on 32 A100 40 GB.
    """
    return _long_context(
        "gpt_3b",
        vocab_size=50_304,
        width=4096,
        layers=16,
        heads=32,
        kv_heads=32,
        mlp_width=16_384,
        mlp="gelu",
        tied_head=True,
    )


def gpt_7b() -> GPTTrainConfig:
    """StarTrail's GPT-7B (arXiv 2407.00611, table 2): 32 layers, 32 heads, width 4096, 512K tokens.

    The MLP is that of Llama 2 7B. Command: `python train.py gpt_7b --data.path TOKENS.bin
    --mesh.c 4` on 64 H200.
    """
    return _long_context(
        "gpt_7b",
        vocab_size=32_000,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        mlp_width=11_008,
    )


def llama3_8b() -> GPTTrainConfig:
    """The sizes of Llama 3 8B (arXiv 2407.21783): 8 key heads for 32 query heads; 512K tokens.

    Command: `python train.py llama3_8b --data.path FOLDER --data.tokenizer tokenizer.json`.
    """
    return _long_context(
        "llama3_8b", gpt_7b().model, vocab_size=128_256, kv_heads=8, mlp_width=14_336
    )


def llama3_70b() -> GPTTrainConfig:
    """The sizes of Llama 3 70B (arXiv 2407.21783), on 512K tokens.

    Command: `python train.py llama3_70b --data.path FOLDER --data.tokenizer tokenizer.json`.
    """
    sizes = dict(width=8192, layers=80, heads=64, mlp_width=28_672)
    return _long_context("llama3_70b", llama3_8b().model, **sizes)


def llama3_8b_1m() -> GPTTrainConfig:
    """Llama 3.1 8B (arXiv 2407.21783) on a million tokens, on one node of eight H100 80 GB.

    Its rotary wavelengths are stretched 8 times further than for 128K tokens. Command: `python
    train.py llama3_8b_1m --init-from Llama-3.1-8B --model.rope.factor 64 --data.path FOLDER`. The
    node needs 0.6 TB of host memory.
    """
    rope = RopeConfig(bases=(500_000.0,), scaling="llama3", factor=64.0, original_length=8192)
    return _million_tokens("llama3_8b_1m", llama3_8b().model, norm_eps=1e-5, rope=rope)


def qwen3_8b_1m() -> GPTTrainConfig:
    """Qwen3 8B (arXiv 2505.09388) with YaRN on a million tokens, on one node of eight H100 80 GB.

    Command: `python train.py qwen3_8b_1m --init-from Qwen3-8B --model.rope.scaling yarn
    --model.rope.factor 32 --model.rope.original-length 32768 --data.path FOLDER`. The node needs
    0.6 TB of host memory.
    """
    return _million_tokens(
        "qwen3_8b_1m",
        vocab_size=151_936,
        width=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        mlp_width=12_288,
        qk_norm=True,
        rope=RopeConfig(bases=(1_000_000.0,), scaling="yarn", factor=32.0, original_length=32_768),
    )


def qwen3_5_9b_1m() -> GPTTrainConfig:
    """The sizes of Qwen3.5 9B, from its config.json, on a million tokens and eight H100 80 GB.

    Three of four layers have linear attention. Command: `python train.py qwen3_5_9b_1m --init-from
    Qwen3.5-9B --data.path FOLDER`.
    """
    return _million_tokens(
        "qwen3_5_9b_1m",
        vocab_size=248_320,
        width=4096,
        layers=32,
        heads=16,
        kv_heads=4,
        head_dim=256,
        mlp_width=12_288,
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        mixers=("linear", "linear", "linear", "attention"),
        linear=LinearConfig(heads=32, key_heads=16, key_dim=128),
        rope=RopeConfig(bases=(10_000_000.0,), channels=64),
    )


def qwen3_30b_a3b_1m() -> GPTTrainConfig:
    """Qwen3 30B-A3B (arXiv 2505.09388) with YaRN on a million tokens, on eight H100 80 GB.

    Each token goes to 8 of 128 experts. Command: `python train.py qwen3_30b_a3b_1m --init-from
    Qwen3-30B-A3B --lora.rank 16 --model.rope.scaling yarn --model.rope.factor 32
    --model.rope.original-length 32768 --data.path FOLDER`.
    """
    config = _million_tokens(
        "qwen3_30b_a3b_1m",
        qwen3_8b_1m().model,
        width=2048,
        layers=48,
        kv_heads=4,
        mlp_width=768,
        feed_forwards=("experts",),
        experts=ExpertsConfig(count=128, top_k=8, width=768),
    )
    # Heads of keys are few: devices exchange them.
    return replace(config, attention=AttentionConfig())


def gpt_oss_20b_128k() -> GPTTrainConfig:
    """gpt-oss 20B (arXiv 2508.10925) on 128K tokens, for which it is made, on eight H100 80 GB.

    Every other layer has a window of 128 tokens. Command: `python train.py gpt_oss_20b_128k
    --init-from gpt-oss-20b --data.path FOLDER`.
    """
    rope = RopeConfig(
        bases=(150_000.0,), scaling="yarn", factor=32.0, original_length=4096, truncate=False
    )
    config = _long_context(
        "gpt_oss_20b_128k",
        vocab_size=201_088,
        width=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        mlp_width=2880,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        norm_eps=1e-5,
        windows=(128, "none"),
        feed_forwards=("experts",),
        experts=ExpertsConfig(count=32, top_k=4, width=2880, activation="clamped", biases=True),
        rope=rope,
    )
    return replace(config, optimizer=OptimizerConfig(learning_rate=1e-5), seq_len=131_072)


def moonlight_16b_128k() -> GPTTrainConfig:
    """Moonlight 16B-A3B (arXiv 2502.16982) on 128K tokens and eight H100 80 GB.

    Latent attention as in DeepSeek V3; each token goes to 6 of 64 experts and to two shared ones.
    Command: `python train.py moonlight_16b_128k --init-from Moonlight-16B-A3B --data.path FOLDER`.
    """
    config = _long_context(
        "moonlight_16b_128k",
        vocab_size=163_840,
        width=2048,
        layers=27,
        heads=16,
        kv_heads=16,
        head_dim=64,
        mlp_width=11_264,
        norm_eps=1e-5,
        mixers=("latent",),
        latent=LatentConfig(key_dim=128, norm_eps=1e-6),
        feed_forwards=("mlp", *["experts"] * 26),
        experts=ExpertsConfig(count=64, top_k=6, width=1408, shared_width=2816, **_OF_DEEPSEEK),
        rope=RopeConfig(bases=(50_000.0,), interleaved=True),
    )
    return replace(config, optimizer=OptimizerConfig(learning_rate=1e-5), seq_len=131_072)


def kimi_linear_48b_1m() -> GPTTrainConfig:
    """Kimi Linear 48B-A3B (arXiv 2510.26692) on a million tokens and 64 H100 80 GB.

    Kimi Delta Attention in three of four layers, and latent attention without positions; each token
    goes to 8 of 256 experts and to a shared one. Command: `python train.py kimi_linear_48b_1m
    --init-from Kimi-Linear-48B-A3B-Base --data.path FOLDER`, as in docs/cluster.md.
    """
    config = _long_context(
        "kimi_linear_48b_1m",
        vocab_size=163_840,
        width=2304,
        layers=27,
        heads=32,
        kv_heads=32,
        head_dim=64,
        mlp_width=9216,
        norm_eps=1e-5,
        mixers=(*("kda", "kda", "kda", "latent") * 6, "kda", "kda", "latent"),
        kda=KDAConfig(heads=32, head_dim=128),
        latent=LatentConfig(key_dim=128, norm_eps=1e-6),
        feed_forwards=("mlp", *["experts"] * 26),
        experts=ExpertsConfig(count=256, top_k=8, width=1024, shared_width=1024, **_OF_DEEPSEEK),
        rope=RopeConfig(bases=("none",)),
    )
    return replace(config, optimizer=OptimizerConfig(learning_rate=1e-5), seq_len=1_048_576)


_OF_DEEPSEEK: Any = dict(
    **dict(scores="sigmoid", choice_bias=True, share_scale=2.446),
    **dict(balance_loss=0.0, balance_rate=0.001),
)
"""The router of DeepSeek V3 (arXiv 2412.19437, section 2.1.2), with the factor of Moonlight and of
Kimi Linear."""


def _long_context(name: str, like: GPTConfig | None = None, **sizes: Any) -> GPTTrainConfig:
    """Common part of the large recipes: one sequence of 512K tokens, and settings that save memory.
    Documents are not masked: cuDNN's kernels know no documents on GPUs older than Hopper."""
    usual: dict[str, Any] = dict(
        head_dim=128, rope=RopeConfig(bases=(500_000.0,)), dtype="bfloat16"
    )
    return GPTTrainConfig(
        model=replace(like, **sizes) if like else GPTConfig(**usual | sizes),
        optimizer=OptimizerConfig(learning_rate=3e-4, final_share=0.1),
        data=DataConfig(mask_documents=False),
        steps=10_000,
        batch_size=1,
        seq_len=524_288,
        zero=3,
        tile=2048,
        log_every=10,
        validation_every=500,
        validation_sequences=8,
        run_dir=Path("runs") / name,
    )


def _million_tokens(name: str, like: GPTConfig | None = None, **sizes: Any) -> GPTTrainConfig:
    """Training that goes on from a pretrained model, with one sequence of 1,048,576 tokens."""
    return replace(
        _long_context(name, like, **sizes),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        attention=AttentionConfig(head_chunks=4),
        remat="attention_saved",
        seq_len=1_048_576,
        offload=True,
        validation_sequences=1,
    )


_ALL = (
    gpt_tiny,
    gpt_tiny_hybrid,
    gpt_tiny_mamba,
    gpt_tiny_moe,
    gpt_3b,
    gpt_7b,
    llama3_8b,
    llama3_70b,
    llama3_8b_1m,
    qwen3_8b_1m,
    qwen3_5_9b_1m,
    qwen3_30b_a3b_1m,
    gpt_oss_20b_128k,
    moonlight_16b_128k,
    kimi_linear_48b_1m,
)
RECIPES = {recipe.__name__: recipe for recipe in _ALL}
"""The recipes by name."""
