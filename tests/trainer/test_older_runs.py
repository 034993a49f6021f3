"""Runs of earlier commits go on: `runs/` holds folders of runs that have made two steps."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import train

RUNS = Path(__file__).parent / "runs"
# How each run began, and what its own commit trained next: loss and gradient norm of two steps.
FLAGS = """
gpt_tiny_hybrid --run-dir run --data.path text.txt --devices 4 --mesh.ring 4 --model.width 8
--model.layers 4 --model.heads 2 --model.kv-heads 1 --model.head-dim 8 --model.mlp-width 8
--model.linear.key-heads 1 --model.feed-forwards mlp experts --model.experts.count 2
--model.experts.top-k 1 --model.experts.width 8 --seq-len 64 --batch-size 2
--validation-sequences 2 --no-tensorboard --log-every 1
"""
NEXT = {"5c116108": ((6.108295, 4.516571), (6.173544, 2.949247))}


@pytest.mark.slow
@pytest.mark.parametrize("commit", NEXT)
def test_runs_of_earlier_commits_go_on(commit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(RUNS / f"{commit}.tar.xz") as archive:
        archive.extractall(filter="data")
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(3000)))
    words = [*FLAGS.split(), "--steps", "4", "--allow-changes"]
    train.train(train.read_command_line(words).settings)
    lines = [json.loads(x) for x in Path("run/metrics.jsonl").read_text().splitlines()]
    found = [(x["train_loss"], x["gradient_norm"]) for x in lines if x["step"] > 2]
    np.testing.assert_allclose(found, NEXT[commit], rtol=1e-5)
