"""Training steps with settings that are drawn at random, to compare the formula of memory with.

Small to middle models, on 8 to 32 GPUs: settings that are drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compiled.step import Row, formula_of
from startrail_jax.analysis.settings import all_degrees
from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import UserError
from startrail_jax.planner.memory import GIB
from trainer.config import AttentionConfig, OptimizerConfig, TrainConfig
from trainer.dit.config import DiTConfig, DiTTrainConfig
from trainer.gpt.config import DataConfig, GPTConfig, GPTTrainConfig

LEAST_GIB, MOST_GIB = 0.5, 80
"""Smaller steps are about sizes that the formula leaves out, and larger ones fit on no GPU."""


def drawn(count: int, seed: int) -> Iterator[tuple[Row, Degrees]]:
    """So many runs that train.py takes, each with its degrees.

    Every factor is drawn by itself and evenly; runs that train.py refuses are drawn again.
    """
    choose = random.Random(seed)
    while count:
        num_devices = choose.choice((8, 16, 32))
        degrees = choose.choice(list(all_degrees(num_devices, roles=ROLES)))
        try:
            row = Row("", _run(choose, degrees))
            size = formula_of(row.config, degrees).device_bytes / GIB
        except UserError:
            continue
        if LEAST_GIB <= size <= MOST_GIB:
            yield replace(row, name=_name(row.config)), degrees
            count -= 1


def _run(choose: random.Random, degrees: Degrees) -> TrainConfig:
    """A run on a mesh of these degrees; its sizes may not fit the mesh."""
    remat: Any = choose.choice(("none", "attention_saved", "full"))
    accumulation = choose.choice((1, 1, 2))
    common: dict[str, Any] = dict(
        optimizer=OptimizerConfig(learning_rate=1e-4),
        attention=AttentionConfig(head_chunks=choose.choice((1, 1, 2, 4))),
        zero=choose.choice((0, 1, 2, 3)),
        remat=remat,
        offload=remat != "none" and choose.random() < 0.5,
        tile=choose.choice((None, 1024, 2048)),
        accumulation=accumulation,
        steps=10,
        batch_size=degrees.data * accumulation * choose.choice((1, 2)),
        run_dir=Path("unused"),
    )
    width = choose.choice((1024, 2048, 3072))
    head_dim = choose.choice((64, 128))
    sizes: dict[str, Any] = dict(
        width=width,
        layers=choose.choice((8, 16, 24)),
        heads=width // head_dim,
        mlp_width=choose.choice((2, 3, 4)) * width,
        dtype=choose.choice(("bfloat16", "bfloat16", "float32")),
    )
    tokens = choose.choice((4096, 8192, 16_384))
    if choose.random() < 0.25:
        # As many positions as 4 for each token, in patches of 1 x 2 x 2.
        frames = degrees.sequence * tokens // 1024
        model = DiTConfig(channels=16, classes=1000, **sizes)
        return DiTTrainConfig(model=model, size=(frames, 64, 64), **common)
    model = GPTConfig(
        vocab_size=choose.choice((8192, 32_000, 128_256)),
        kv_heads=sizes["heads"] // choose.choice((1, 1, 4)),
        head_dim=head_dim,
        mlp=choose.choice(("swiglu", "gelu")),
        tied_head=choose.random() < 0.5,
        **sizes,
    )
    data = DataConfig(mask_documents=choose.random() < 0.25)
    return GPTTrainConfig(model=model, data=data, seq_len=degrees.sequence * tokens, **common)


def _name(config: TrainConfig) -> str:
    """What was drawn, in words."""
    model = config.model
    saved = f"{config.remat}{' offload' if config.offload else ''}"
    mask = "causal" if config.causal else "full"
    if getattr(config.data, "mask_documents", False):
        mask = "documents"
    tile = f"tile {config.tile}".lower()
    parts = [
        f"{config.kind} {model.width}x{model.layers}",
        f"{model.heads}/{model.kv_heads} heads of {model.head_dim}",
        f"mlp {model.mlp_width}",
        model.dtype,
        mask,
        f"zero {config.zero}",
        saved,
        tile,
        f"chunks {config.attention.head_chunks}",
        f"batch {config.batch_size}/{config.accumulation}",
    ]
    return ", ".join(parts)
