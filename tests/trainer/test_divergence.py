"""Runs whose loss is lost: what is skipped, what is saved, and what a loss spike leads to."""

import math
from dataclasses import replace

import numpy as np
import pytest

import train
from configs.gpt import gpt_tiny
from programs import TINY, logged_steps, records_of, saved_steps
from refusals import refused
from trainer import loop as training_loop
from trainer.errors import LossSpikeError, NonFiniteError
from trainer.run.divergence import LEAST_LOSSES, Judgement, Watch
from trainer.run.settings import FREE_SETTINGS

FLAGS = f"{TINY} --devices 2 --checkpoint.every 4 --checkpoint.keep 9 --steps 16 --spike-factor 3"


def watch(**changes):
    return Watch(replace(gpt_tiny(), **changes))


def judge(watch, step, loss, saved=None):
    return watch.judge(step, loss, 1.0, finite=math.isfinite(loss), saved=saved)


@pytest.mark.quick
def test_skipping_ends_after_so_many_steps_in_a_row():
    skipping = watch(non_finite="skip", non_finite_limit=3)
    for start in (0, 10):
        assert judge(skipping, start + 1, math.nan) is Judgement.SKIPPED
        assert judge(skipping, start + 2, math.inf) is Judgement.SKIPPED
        if not start:
            assert judge(skipping, start + 3, 5.0) is Judgement.GOOD
    with refused(NonFiniteError, "--optimizer.learning-rate"):
        judge(skipping, 13, math.nan, saved=8)
    with refused(NonFiniteError, "step 1"):
        judge(watch(), 1, math.nan)


def test_spike_is_told_by_the_median_of_the_losses_before():
    guard = watch(spike_factor=2.0)
    for step in range(LEAST_LOSSES):
        # Too few to compare with; and one of them was high.
        assert judge(guard, step, 90.0 if step == 3 else 4.0 + step % 2) is Judgement.GOOD
    assert judge(guard, 20, 8.9) is Judgement.GOOD
    assert judge(guard, 21, 11.0) is Judgement.SPIKE
    assert 11.0 not in guard.recent
    line = guard.go_back(21, 11.0, 16)
    assert line.startswith("loss spike: loss 11.0000 in step 21, where the median of those before")
    assert line.endswith("goes back to step 16, and leaves out the batches of steps 17 to 21.")
    with refused(LossSpikeError, spike_factor=2.0):
        guard.go_back(22, 12.0, 16)
    guard.go_back(23, 12.0, 20)
    assert judge(watch(), 1, 1e9) is Judgement.GOOD  # Off by default.


def test_limits_may_change_when_a_run_goes_on():
    assert {"non_finite", "non_finite_limit", "spike_factor"} <= set(FREE_SETTINGS)


def plant(monkeypatch, is_high, factor=10.0):
    """Has the losses of some batches, by their number, be higher than they are."""
    step = training_loop.Loop.step

    def planting(self, number):
        step(self, number)
        done = self._unread[-1]
        if is_high(done.position["batches"]):
            high = done.metrics._replace(loss=done.metrics.loss * factor)
            self._unread[-1] = done._replace(metrics=high)

    monkeypatch.setattr(training_loop.Loop, "step", planting)


def run(folder, *more):
    data = folder / "data.bin"
    np.random.default_rng(0).integers(0, 200, 10_000).astype("<u2").tofile(data)
    flags = [*FLAGS.split(), "--data.path", str(data), "--run-dir", str(folder / "run"), *more]
    return train.train(train.read_command_line(flags).settings)


@pytest.mark.slow
def test_loss_spike_leads_back_once_and_its_data_are_left_out(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        plant(patch, lambda batch: batch >= 13)
        with refused(LossSpikeError, "step 11"):
            run(tmp_path)
    assert "in step 13, where the median" in capsys.readouterr().out
    # The state after step 12 led to the spike: it is removed.
    assert saved_steps(tmp_path / "run") == [4, 8]

    positions = []
    save = training_loop.Checkpoints.save

    def noting(self, step, state, position, *rest, **options):
        positions.append((step, position["batches"]))
        save(self, step, state, position, *rest, **options)

    with monkeypatch.context() as patch:
        plant(patch, lambda batch: batch == 13)
        patch.setattr(training_loop.Checkpoints, "save", noting)
        losses = run(tmp_path)
    shown = capsys.readouterr().out
    assert "after step 8\n" in shown
    # The losses to compare with are those of the checkpoint: there are no ten since.
    assert "The run goes back to step 8, and leaves out the batches of steps 9 to 13." in shown
    assert positions == [(12, 12), (12, 17), (16, 21)]
    assert saved_steps(tmp_path / "run") == [4, 8, 12, 16]
    assert len(losses.train) == 8
    records = records_of(tmp_path / "run")
    assert logged_steps(tmp_path / "run") == list(range(1, 17))
    assert {x["step"]: x["batches_left_out"] for x in records if "batches_left_out" in x} == {9: 5}


@pytest.mark.slow
def test_spike_before_the_first_checkpoint_leads_back_to_the_beginning(tmp_path, monkeypatch):
    plant(monkeypatch, lambda batch: batch == 11)
    begun = []
    require = training_loop.Loop.require_finite_evaluation

    def diverged(self, step):
        begun.append(len(self.losses))
        self.validation_loss = math.nan
        require(self, step)

    monkeypatch.setattr(training_loop.Loop, "require_finite_evaluation", diverged)
    with refused(NonFiniteError, "step 16"):
        run(tmp_path, "--checkpoint.every", "100")
    assert begun == [16]
    assert saved_steps(tmp_path / "run") == [16]
