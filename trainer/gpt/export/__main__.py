"""Exports a run of a GPT as a model that the library transformers loads.

    python -m trainer.gpt.export runs/gpt_tiny exported
    python -m trainer.gpt.export runs/Qwen3-8B exported --step 1000 --dtype bfloat16
    python -m trainer.gpt.export runs/adapted exported --merge   # without it, adapters for PEFT

RUN_DIR is the folder of a run, which may still be training. OUT is a new folder with config.json,
the weights in *.safetensors and the files of the tokenizer; it appears only when it is whole.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainer.gpt.config import GPTTrainConfig
from trainer.printable import say
from trainer.run.settings import config_of, load_config


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Run to export, and folder to write."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a run of a GPT."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the model, which must not exist yet."""
    step: int | None = None
    """Step of the checkpoint. The default is the newest one that is whole."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights. By default, each tensor has the type that it had in the pretrained
    model; weights of a run without one, and adapters, are float32. Tensors that the pretrained
    model had in float32 among others of 16 bits, such as the A_log of a Qwen3.5, stay float32."""
    merge: bool = False
    """Adds the adapters of a run with LoRA to the weights, for a model that needs no PEFT.
    Otherwise they are exported by themselves, in PEFT's format. If the run keeps the weights in
    fewer bits than the files of --init-from, those files are read again."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    options = tyro.cli(
        ExportOptions,
        prog="python -m trainer.gpt.export",
        description=__doc__,
        args=arguments,
    )
    config = load_config(GPTTrainConfig, config_of(options.run_dir, "RUN_DIR"))
    # Imported here, as it imports jax: `--help` and a mistyped flag must be fast.
    from trainer.gpt.export.writing import export_run

    done = export_run(config=config, note=say, **vars(options))
    files = "1 file" if done.files == 1 else f"{done.files} files"
    what, loads = "the model", "transformers.AutoModelForCausalLM"
    if config.model.scores:
        what, loads = "the reward model", "transformers.AutoModelForSequenceClassification"
    if config.has_adapters and not options.merge:
        what, loads = "the adapters", "peft.AutoPeftModelForCausalLM"
    say(f"{options.out}: {what} after step {done.step}, in {done.dtype}, in {files}")
    say(f"next: {loads}.from_pretrained({str(options.out)!r})")


if __name__ == "__main__":
    import jax

    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        # Weights are read to the memory of the host.
        jax.config.update("jax_platforms", "cpu")
        main()
