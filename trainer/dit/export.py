"""Exports a run of a Wan as a model or as adapters that the library diffusers loads.

    python -m trainer.dit.export runs/wan_1_3b exported
    python -m trainer.dit.export runs/adapted exported --merge   # without it, adapters alone

RUN_DIR is the folder of a run, which may still be training. OUT is a new folder; it appears only
when it is whole.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainer.dit.wan.config import WanTrainConfig
from trainer.printable import say
from trainer.run.settings import config_of, load_config


@dataclass(frozen=True, kw_only=True)
class WanExportOptions:
    """What to export, and where to."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a run of a Wan."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the model, which must not exist yet."""
    step: int | None = None
    """Step of the checkpoint. The default is the newest one that is whole."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights. By default, each tensor has the type that it had in the pretrained
    model; weights of a run without one, and adapters, are float32. Tensors that the pretrained
    model had in float32 among others of 16 bits, such as tables and norms, stay float32."""
    merge: bool = False
    """Whether to add the adapters of a run with LoRA to the weights. Otherwise they are exported by
    themselves. If the run keeps the weights in fewer bits than the files of --init-from, those
    files are read again."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    options = tyro.cli(
        WanExportOptions,
        prog="python -m trainer.dit.export",
        description=__doc__,
        args=arguments,
    )
    config = load_config(WanTrainConfig, config_of(options.run_dir, "RUN_DIR"))
    # Imported here, as it imports jax: `--help` and a mistyped flag must be fast.
    from trainer.dit.wan.export import export_wan

    step = export_wan(config=config, note=say, **vars(options))
    apart = config.has_adapters and not options.merge
    what = "the adapters" if apart else "the model"
    loads = "WanPipeline.load_lora_weights" if apart else "WanTransformer3DModel.from_pretrained"
    say(f"{options.out}: {what} after step {step}")
    say(f"next: diffusers.{loads}({str(options.out)!r})")


if __name__ == "__main__":
    import jax

    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        # Weights are read to the memory of the host.
        jax.config.update("jax_platforms", "cpu")
        main()
