"""Wan recipes: functions that return a `WanTrainConfig`. Flags override its settings."""

from pathlib import Path
from typing import Any

from trainer.config import MeshConfig, OptimizerConfig
from trainer.dit.wan.config import FlowConfig, WanConfig, WanTrainConfig


def dit_video() -> WanTrainConfig:
    """A tiny Wan that learns to draw videos of moving digits from captions such as "seven left".

    Command: `python train.py dit_video`, then `python sample.py runs/dit_video`.
    """
    return WanTrainConfig(
        model=WanConfig(
            channels=1,
            patch=(1, 2, 2),
            width=96,
            layers=4,
            heads=4,
            mlp_width=384,
            text_dim=32,
            text_tokens=2,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=0.0),
        steps=2000,
        batch_size=16,
        size=(5, 12, 12),
        ema_decay=0.995,
        mesh=MeshConfig(default_c=2),
        validation_sequences=256,
        run_dir=Path("runs/dit_video"),
    )


def wan_1_3b() -> WanTrainConfig:
    """Wan 2.1 T2V 1.3B (arXiv 2503.20314), 81 frames of 480 x 832 pixels: 32,760 tokens.

    Command: `python train.py wan_1_3b --init-from FOLDER --data.path ENCODED`.
    """
    return _wan(width=1536, layers=30, heads=12, mlp_width=8960, lines=60, shift=3.0, name="1_3b")


def wan_14b() -> WanTrainConfig:
    """Wan 2.1 T2V 14B (arXiv 2503.20314), 81 frames of 720 x 1280 pixels: 75,600 tokens.

    Command: `python train.py wan_14b --init-from FOLDER --data.path ENCODED`.
    """
    return _wan(width=5120, layers=40, heads=40, mlp_width=13_824, lines=90, shift=5.0, name="14b")


def _wan(*, lines: int, shift: float, name: str, **sizes: Any) -> WanTrainConfig:
    """Full training with the numbers of DiffSynth-Studio: 1e-5, no weight decay but AdamW's 0.01.
    The shift is that with which Wan draws videos of so many lines (diffusers, `WanPipeline`)."""
    return WanTrainConfig(
        model=WanConfig(**sizes, dtype="bfloat16"),
        diffusion=FlowConfig(shift=shift),
        optimizer=OptimizerConfig(
            learning_rate=1e-5, final_share=1.0, weight_decay=0.01, beta2=0.999
        ),
        steps=10_000,
        batch_size=8,
        size=(21, lines, {60: 104, 90: 160}[lines]),
        zero=3,
        tile=2048,
        log_every=10,
        validation_every=500,
        validation_sequences=8,
        run_dir=Path(f"runs/wan_{name}"),
    )


RECIPES = {recipe.__name__: recipe for recipe in (dit_video, wan_1_3b, wan_14b)}
"""The recipes by name."""
