"""Post-training that learns, on two CPU cores: a small model that sorts letters, by GRPO and DPO.

    python examples/rl/run.py runs/rl                               # draws runs/rl/learning.svg
    python examples/rl/run.py runs/rl8 --devices 8 --mesh.c 2       # every mesh learns the same

Other flags are those of train.py and score.py. Lines that begin with a $ are commands to type. If
it is stopped, the same command goes on.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = "--seq-len 128 --sample.length 0 --no-tensorboard"
MODEL = "--model.layers 2 --model.width 64 --model.mlp-width 192 --model.head-dim 16"
SCORE = "--seq-len 128 --batch-size 64"
RATE = "--optimizer.schedule linear --optimizer.warmup-steps 0 --optimizer.weight-decay 0"


def supervised(folder, steps):
    """Learns from completions of which 2 in 5 are right."""
    return f"""{ROOT}/train.py gpt_tiny {MODEL} {FLAGS} --batch-size 32 --steps {steps}
        --data.path {folder}/start.jsonl --data.loss answers --run-dir {folder}/start"""


def grpo(folder, steps):
    """Trainer and engine, which wait for each other's files."""
    trainer = f"""{ROOT}/train.py --init-from {folder}/model {FLAGS} --batch-size 104
        --objective policy --policy.old current --policy.mean sequence --steps {steps}
        {RATE} --optimizer.learning-rate 1e-3 --log-every 5 --checkpoint.every 10
        --data.follow --data.path {folder}/rollouts
        --export.every 1 --export.dir {folder}/weights --run-dir {folder}/grpo"""
    return trainer, f"{HERE}/engine.py {folder}/weights {folder}/rollouts --steps {steps}"


def dpo(folder, steps):
    """Learns from pairs of answers that the model of the start has drawn."""
    return f"""{ROOT}/train.py --init-from {folder}/model {FLAGS} --batch-size 32 --steps {steps}
        --objective preference --preference.beta 0.5 --preference.sft-weight 1
        {RATE} --optimizer.learning-rate 1e-3 --data.path {folder}/pairs_and_reference.jsonl
        --export.every 5 --export.dir {folder}/dpo_weights --run-dir {folder}/dpo"""


def run(*commands):
    """Runs commands at the same time; if one of them fails, the others are stopped."""
    started = []
    try:
        for command in commands:
            print("\n$ python", " ".join(command.split()), flush=True)
            started.append(subprocess.Popen([sys.executable, *shlex.split(command)]))
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in started:
            process.terminate()
            process.wait()
    if any(codes):
        sys.exit("a command failed: the same command as before goes on")


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start-steps", type=int, default=600)
    parser.add_argument("--grpo-steps", type=int, default=60)
    parser.add_argument("--dpo-steps", type=int, default=100)
    options, others = parser.parse_known_args()
    folder, flags = options.folder, " ".join(["", *(others or ["--devices", "1"])])
    for name in ("rollouts", "weights", "dpo_weights"):
        (folder / name).mkdir(parents=True, exist_ok=True)

    # What is there already was whole when it appeared.
    if not (folder / "start.jsonl").exists():
        run(f"{HERE}/sorting.py {folder}/start.jsonl")
    if not (folder / "model").exists():
        run(supervised(folder, options.start_steps) + flags)
        run(f"-m trainer.gpt.export {folder}/start {folder}/model")

    trainer, engine = grpo(folder, options.grpo_steps)
    run(trainer + flags, engine)

    if not (folder / "pairs.jsonl").exists():
        run(f"{HERE}/pairs.py {folder}/model {folder}/pairs.jsonl")
    scored = folder / "pairs_and_reference.jsonl"
    if not scored.exists():
        run(f"{ROOT}/score.py {folder}/model {folder}/pairs.jsonl {scored} {SCORE}{flags}")
    run(dpo(folder, options.dpo_steps) + flags)

    curves = f"GRPO={folder}/weights DPO={folder}/dpo_weights"
    run(f"{HERE}/measure.py {folder}/learning.svg {curves}")


if __name__ == "__main__":
    main()
