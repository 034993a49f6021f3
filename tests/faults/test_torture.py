"""The torture of runs: its table, flipped bits, and power failures that are emulated."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults import power, torture
from tests.faults.run_folders import CheckFailed
from trainer.checkpoints.checkpoint import Checkpoints

pytestmark = pytest.mark.quick

ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """A folder with two checkpoints, in place of that of a run."""
    state = {"weights": jnp.arange(31.0)}
    with Checkpoints(tmp_path / "whole" / "checkpoints", keep=9) as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, {"weights": state["weights"] + step}, {"batches": step})
    shapes = {"weights": jax.ShapeDtypeStruct((31,), jnp.float32, sharding=ON_ONE_DEVICE)}
    monkeypatch.setattr(torture, "_shapes", lambda _: shapes)
    monkeypatch.setattr(torture.Torture, "finished_run", lambda *_: tmp_path / "whole")
    return tmp_path / "whole"


def test_attacks_take_turns_until_so_many_bits_are_flipped(reference, tmp_path, monkeypatch):
    # Threads that read a damaged file complain on stderr, so nothing is damaged here.
    flipped = []

    def flip_one(self, run_dir):
        flipped.append(self.check_restored(run_dir, run_dir / "checkpoints", "unharmed"))
        return "here"

    monkeypatch.setattr(torture.Torture, "_flip_one", flip_one)
    monkeypatch.setattr(torture, "FLIPS_IN_TURN", 4)
    table = torture.torture(["flip"], folder=tmp_path, seed=0, seconds=0, flips=5)
    assert table["flip"][:2] == (8, 8)
    assert flipped == [(6, [])] * 8


def test_state_that_is_not_what_was_saved_is_found_out(reference, tmp_path):
    tortured = torture.Torture(tmp_path, 0)
    other = {"weights": jnp.ones(31)}
    with Checkpoints(tmp_path / "other", keep=9) as checkpoints:
        checkpoints.save(6, other, {"batches": 6})
    with pytest.raises(CheckFailed, match=r"here: the state of step 6 is not that which was saved"):
        tortured.check_restored(reference, tmp_path / "other", "here")


def test_table_counts_what_was_not_survived(tmp_path, monkeypatch, capsys):
    def fail(self):
        yield "first"
        (self.folder / "evidence").touch()
        raise CheckFailed("it was lost")

    def fault(self):
        yield "second"
        raise KeyError("fault")

    monkeypatch.setattr(torture.Torture, "kill", fail)
    monkeypatch.setattr(torture.Torture, "power", fault)
    monkeypatch.setattr(torture.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    assert torture.main(["--minutes", "0", "--only", "kill", "power"]) == 1
    out, err = capsys.readouterr()
    assert "kill       FAILED    it was lost\n" in out
    assert "power      FAILED    Traceback" in out
    lines = [line.split()[:3] for line in out.splitlines()[-3:]]
    assert lines == [["attack", "tried", "survived"], ["kill", "2", "1"], ["power", "2", "1"]]
    assert (tmp_path / "evidence").exists()
    assert str(tmp_path) in err


def flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_power_failure_takes_what_was_not_flushed(tmp_path, monkeypatch):
    live, flushed = tmp_path / "live", tmp_path / "flushed"
    (live / "old").mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", os.fsync)
    power.record(flushed)
    (live / "old" / "file").write_text("first")
    for path in (live / "old" / "file", live / "old", live):
        flush(path)
    (live / "old" / "file").write_text("second")
    (live / "old").rename(live / "new")
    (live / "later").write_text("later")

    def left(name, survives):
        out = tmp_path / name
        power.after_power_failure(live, flushed, out, np.random.default_rng(0), survives)
        return {str(x.relative_to(out)): x.read_text() for x in out.rglob("*") if x.is_file()}

    assert left("nothing", 0.0) == {"old/file": "first"}
    assert left("all", 1.0) == {"new/file": "second", "later": "later"}
    flush(live)  # Now the new names are on the disk, but not what is in the files.
    assert left("names", 0.0) == {"new/file": "first", "later": ""}
