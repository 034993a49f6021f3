"""Runs whose loss is lost: what is skipped, and what is saved."""

import math
from dataclasses import replace

import numpy as np
import pytest

import train
from configs.gpt import gpt_tiny
from programs import TINY, saved_steps
from refusals import refused
from trainer import loop as training_loop
from trainer.errors import NonFiniteError
from trainer.run.divergence import Watch
from trainer.run.settings import FREE_SETTINGS

FLAGS = f"{TINY} --devices 2 --checkpoint.every 100 --steps 4"


def watch(**changes):
    return Watch(replace(gpt_tiny(), **changes))


def judge(watch, step, loss, saved=None):
    return watch.judge(step, loss, 1.0, finite=math.isfinite(loss), saved=saved)


@pytest.mark.quick
def test_skipping_ends_after_so_many_steps_in_a_row():
    skipping = watch(non_finite="skip", non_finite_limit=3)
    for start in (0, 10):
        assert judge(skipping, start + 1, math.nan) is False
        assert judge(skipping, start + 2, math.inf) is False
        if not start:
            assert judge(skipping, start + 3, 5.0) is True
    with refused(NonFiniteError, "--optimizer.learning-rate"):
        judge(skipping, 13, math.nan, saved=8)
    with refused(NonFiniteError, "step 1"):
        judge(watch(), 1, math.nan)


def test_limits_may_change_when_a_run_goes_on():
    assert {"non_finite", "non_finite_limit"} <= set(FREE_SETTINGS)


@pytest.mark.slow
def test_evaluation_that_is_not_finite_ends_the_run_after_it_is_saved(tmp_path, monkeypatch):
    require = training_loop.Loop._require_finite_evaluation

    def diverged(self, step):
        self._validation_loss = math.nan
        require(self, step)

    monkeypatch.setattr(training_loop.Loop, "_require_finite_evaluation", diverged)
    data = tmp_path / "data.bin"
    np.random.default_rng(0).integers(0, 200, 10_000).astype("<u2").tofile(data)
    flags = [*FLAGS.split(), "--data.path", str(data), "--run-dir", str(tmp_path / "run")]
    with refused(NonFiniteError, "step 4"):
        train.train(train.read_command_line(flags).settings)
    assert saved_steps(tmp_path / "run") == [4]
