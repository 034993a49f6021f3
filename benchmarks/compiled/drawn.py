"""Compares the closed form of memory with compiled steps whose settings are drawn at random.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/drawn.py --count 20 --seed 0

Models are small to middle, on 8 to 32 H100; sizes are those of one device.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.compiled.step import describe, formula_of, peak_bytes
from startrail_jax.analysis.settings import all_degrees
from startrail_jax.devices.degrees import ROLES, Degrees
from startrail_jax.errors import UserError
from startrail_jax.planner.quantities import GIB
from trainer.config import AttentionConfig, OptimizerConfig, TrainConfig
from trainer.dit.config import DiTConfig, DiTTrainConfig
from trainer.gpt.config import DataConfig, GPTConfig, GPTTrainConfig
from trainer.run.exit import exit_on_user_errors

LEAST_GIB, MOST_GIB = 0.5, 80
"""Smaller steps are about sizes that the formula leaves out, and larger ones fit on no GPU."""


def drawn(count: int, seed: int) -> Iterator[tuple[TrainConfig, Degrees]]:
    """So many runs that train.py takes, each with its degrees.

    Every factor is drawn by itself and evenly; runs that train.py refuses are drawn again.
    """
    choose = random.Random(seed)
    while count:
        num_devices = choose.choice((8, 16, 32))
        degrees = choose.choice(list(all_degrees(num_devices, roles=ROLES)))
        try:
            config = _run(choose, degrees)
            size = formula_of(config, degrees).device_bytes / GIB
        except UserError:
            continue
        if LEAST_GIB <= size <= MOST_GIB:
            yield config, degrees
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


def name_of(config: TrainConfig) -> str:
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20, help="number of runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"{'':>4}{'peak':>8}{'formula':>9}{'apart':>8}  mesh; model and settings")
    errors = []
    for number, (config, degrees) in enumerate(drawn(args.count, args.seed), 1):
        estimate = formula_of(config, degrees).device_bytes
        peak = peak_bytes(config, degrees, "h100")
        errors.append(abs(estimate / peak - 1))
        columns = f"{peak / GIB:>8.2f}{estimate / GIB:>9.2f}{estimate / peak - 1:>+8.1%}"
        print(f"{number:>4}{columns}  {describe(degrees)}; {name_of(config)}", flush=True)
    near = sum(error <= 0.1 for error in errors)
    print(f"{near} of {args.count} within 10 %, the furthest {max(errors):.1%} apart")


if __name__ == "__main__":
    with exit_on_user_errors():
        main()
