"""Part 3 of `run.py`: the time of a training step, and its model FLOPs utilisation."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import jax

from benchmarks.cluster.training import random_batch, random_state
from benchmarks.gpu.report import Report, first_line
from benchmarks.gpu.speed import Problem
from configs.gpt import gpt_tiny, llama3_8b
from trainer.data.batches import place
from trainer.gpt.config import GPTTrainConfig
from trainer.parallel.checks import make_attention
from trainer.parallel.flops import peak_flops
from trainer.parallel.step import Program
from trainer.tasks import TASKS

STEPS, TINY_STEPS = 8, 2

SHAPES = ((1, 32_768, 0), (8, 4096, 0), (8, 4096, 1000))
"""Rows, tokens of a row, and the mean length of the documents packed into it; 0 for one a row."""


def config_of(rows: int, tokens: int, *, tiny: bool) -> GPTTrainConfig:
    """Four layers of Llama 3 8B on 32K tokens, which take 20 to 30 GiB; or a tiny GPT."""
    if tiny:
        return replace(gpt_tiny(), seq_len=64, batch_size=1, sample_length=0)
    config = llama3_8b()
    model = replace(config.model, layers=4, vocab_size=32_000)
    return replace(config, model=model, batch_size=rows, seq_len=tokens, zero=0)


def measure(report: Report) -> None:
    """Times steps of train.py on random data and random weights, and prints the MFU."""
    print()
    for rows, tokens, documents in SHAPES[:1] if report.tiny else SHAPES:
        config = config_of(rows, tokens, tiny=report.tiny)
        model = f"{config.model.layers} layers of {config.model.width}"
        packed = f" in documents of {documents}" if documents else ""
        name = f"step: {model}, {config.batch_size} x {config.num_tokens} tokens{packed}"
        try:
            seconds, flops = time_steps(report, config, documents)
        except Exception as error:
            print(f"{name}: {first_line(error)}")
            continue
        peak, rate = peak_flops(jax.devices()[0].device_kind), flops / seconds
        mfu = f"{rate / peak:.1%}" if peak else "-"
        print(f"{name}: {seconds:.3f} s, {rate / 1e12:.4g} TFLOP/s, MFU {mfu}", flush=True)


def time_steps(report: Report, config: GPTTrainConfig, documents: int = 0) -> tuple[float, float]:
    """Median seconds of the steps after the first two, and the model's FLOPs in one step."""
    objective: Any = TASKS[config.kind].make_objective(config)
    attention = make_attention(report.mesh, config, objective)
    program = Program(config, attention, objective)
    batch = random_batch(config, attention.layout)
    if documents:
        problem = Problem(config.seq_len, rows=config.batch_size, documents=documents)
        batch = batch._replace(segment_ids=attention.layout.permute(problem.ids))
    batch = place(batch, program.batch_sharding)
    state, seconds = random_state(program), []
    for _ in range(2 + (TINY_STEPS if report.tiny else STEPS)):
        start = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        float(metrics.loss)
        seconds.append(time.perf_counter() - start)
    flops = objective.flops_per_token * config.batch_size * config.num_tokens
    return statistics.median(seconds[2:]), flops
