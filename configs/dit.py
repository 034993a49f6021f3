"""DiT recipes: functions that return a `DiTTrainConfig`. Flags override its settings."""

from pathlib import Path

from trainer.config import MeshConfig, OptimizerConfig
from trainer.dit.config import DiffusionConfig, DiTConfig, DiTTrainConfig


def dit_digits() -> DiTTrainConfig:
    """Class-conditional rectified flow on the 8 x 8 handwritten digits of scikit-learn.

    Command: `python train.py dit_digits`, then `python sample.py runs/dit_digits`. Takes 9 minutes
    of CPU time on 8 simulated devices, and reaches a validation loss of 0.34.
    """
    return DiTTrainConfig(
        model=DiTConfig(channels=1, classes=10, width=96, layers=6, heads=4, mlp_width=384),
        optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=0.0),
        steps=2000,
        batch_size=64,
        size=(1, 8, 8),
        ema_decay=0.995,
        mesh=MeshConfig(default_c=2),
        validation_sequences=256,
        run_dir=Path("runs/dit_digits"),
    )


def dit_1b() -> DiTTrainConfig:
    """StarTrail's DiT-1B (arXiv 2407.00611, table 2): 24 layers, 24 heads, width 1536, 512K tokens.

    A video latent of 32 frames of 256 x 256 positions and 16 channels, in patches of 1 x 2 x 2.
    Command: `python train.py dit_1b --data.path LATENTS.npz --mesh.c 4` on 32 A100.

    On images, their folder decides about size, channels, and classes or texts. From ImageNet, with
    a folder for each class, and a folder of an AutoencoderKL (`pip install -e '.[video,images]'`):

        python -m trainer.dit.encode imagenet/train latents --vae sd-vae-ft-ema --size 256
        python train.py dit_1b --data.path latents --batch-size 256 --tile None
        python sample.py runs/dit_1b --decode sd-vae-ft-ema --classes n01440764 207

    From images with captions in a metadata.jsonl, and a folder of a text encoder:

        python -m trainer.dit.encode photos latents --vae sd-vae-ft-ema --text-encoder t5-base
        python train.py dit_1b --data.path latents --batch-size 256 --tile None
        python sample.py runs/dit_1b --text-encoder t5-base --prompt "a kite" --decode sd-vae-ft-ema
    """
    return DiTTrainConfig(
        model=DiTConfig(
            channels=16,
            classes=1000,
            width=1536,
            layers=24,
            heads=24,
            mlp_width=6144,
            dtype="bfloat16",
        ),
        diffusion=DiffusionConfig(times="logit_normal"),
        optimizer=OptimizerConfig(learning_rate=1e-4, final_share=0.1, weight_decay=0.0),
        steps=100_000,
        batch_size=1,
        size=(32, 256, 256),
        ema_decay=0.9999,
        zero=3,
        tile=2048,
        log_every=10,
        validation_every=500,
        validation_sequences=8,
        run_dir=Path("runs/dit_1b"),
    )


RECIPES = {recipe.__name__: recipe for recipe in (dit_digits, dit_1b)}
"""The recipes by name."""
