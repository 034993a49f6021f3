"""Training that is killed: it goes on from a whole checkpoint, and loses and repeats nothing."""

import os

import numpy as np
import pytest

from tests.faults import crash, power, run_folders
from trainer import durable


def kill(last_step, whole, began_after=0):
    return crash.Kill(
        moment="step", began_after=began_after, last_step=last_step, whole=whole, unfinished=()
    )


@pytest.mark.slow
def test_killed_training_ends_as_if_undisturbed(tmp_path, capsys):
    moments = ("save", "step", "power")
    first, second, third = crash.crash(3, seed=0, folder=tmp_path, moments=moments)
    assert (first.moment, second.moment, third.moment) == moments
    assert first.unfinished
    assert first.began_after == 0
    assert second.began_after == first.whole
    assert second.last_step > first.last_step
    assert second.whole >= crash.EVERY
    assert third.began_after == second.whole
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("3 kills, ")
    assert last.endswith("all 78 losses are those of the undisturbed run")


@pytest.mark.quick
def test_lost_checkpoint_is_found_out():
    crash.check_kill(kill(last_step=10, whole=6))
    crash.check_kill(kill(last_step=1, whole=0))
    with pytest.raises(run_folders.CheckFailed, match=r"step 6 must be whole; got that of step 3"):
        crash.check_kill(kill(last_step=10, whole=3))


def test_wrong_beginning_is_found_out():
    kills = [kill(last_step=5, whole=3), kill(last_step=10, whole=9)]
    crash.check_beginning(9, kills)
    crash.check_beginning(None, kills)
    crash.check_beginning(0, [])
    for step, kept in ((0, kills), (6, kills), (12, kills), (3, [])):
        with pytest.raises(
            run_folders.CheckFailed, match=rf"newest whole.*; got step {step}, where that of"
        ):
            crash.check_beginning(step, kept)


@pytest.mark.parametrize("found", [[1, 2, 2, 3], [1, 3], [1, 3, 2], []])
def test_steps_that_are_not_there_once_are_found_out(found):
    crash.check_steps([(step, 0.5) for step in (1, 2, 3)], 3)
    with pytest.raises(run_folders.CheckFailed, match=r"steps 1 to 3 once, in order; got"):
        crash.check_steps([(step, 0.5) for step in found], 3)


def test_losses_leave_out_evaluations_and_lines_cut_short(tmp_path):
    assert crash.losses(tmp_path) == []
    lines = ('{"step": 1, "train_loss": 5.5}\n', '{"step": 1, "validation_loss": 5.0}\n')
    text = "".join(lines) + '{"step": 2, "train_loss": 4'
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert crash.losses(tmp_path) == [(1, 5.5)]
    assert crash.last_step(tmp_path) == 1


def test_power_failure_takes_what_was_not_flushed(tmp_path, monkeypatch):
    live, flushed = tmp_path / "live", tmp_path / "flushed"
    (live / "old").mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", os.fsync)
    power.record(flushed)
    (live / "old" / "file").write_text("first", encoding="utf-8")
    for path in (live / "old" / "file", live / "old", live):
        durable.flush(path)
    (live / "old" / "file").write_text("second", encoding="utf-8")
    (live / "old").rename(live / "new")
    (live / "later").write_text("later", encoding="utf-8")

    def left(name, survives):
        out = tmp_path / name
        power.after_power_failure(live, flushed, out, np.random.default_rng(0), survives)
        files = [x for x in out.rglob("*") if x.is_file()]
        return {str(x.relative_to(out)): x.read_text(encoding="utf-8") for x in files}

    assert left("nothing", 0.0) == {"old/file": "first"}
    assert left("all", 1.0) == {"new/file": "second", "later": "later"}
    durable.flush(live)  # Now the new names are on the disk, but not what is in the files.
    assert left("names", 0.0) == {"new/file": "first", "later": ""}
