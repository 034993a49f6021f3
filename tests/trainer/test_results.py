"""What a run leaves for its user: a loss curve, its versions, and the next command."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from programs import REPOSITORY
from refusals import refused
from startrail_jax.errors import InputError
from trainer import session
from trainer.run import commands, curve, folder
from trainer.run.commands import command
from trainer.run.curve import describe_curve, draw_curve, show_results
from trainer.run.folder import current_versions, record_versions

pytestmark = pytest.mark.quick


def write_metrics(run_dir, losses):
    lines = [json.dumps({"step": step, **values}) for step, values in losses.items()]
    # A run that trains is writing the last line.
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))


# The loss curve.


def curves_of(picture):
    """The points of each curve of an SVG picture, by its metric."""
    groups = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}g")
    paths = {x.get("id"): x[0].get("d") for x in groups if x.get("id") in curve.CURVES}
    pairs = {name: re.findall(r"[ML] (\S+) (\S+)", path) for name, path in paths.items()}
    return {name: [tuple(map(float, x)) for x in found] for name, found in pairs.items()}


def test_curve_is_drawn_from_what_the_run_has_reported(tmp_path, capsys):
    losses = {
        2: {"train_loss": 2.0, "mfu": None},
        4: {"train_loss": None},
        6: {"train_loss": 1.0, "validation_loss": 1.5},
    }
    write_metrics(tmp_path, losses)
    show_results(tmp_path)
    path = tmp_path / "losses.svg"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"loss curve: {path}", f"next: {command('sample.py', tmp_path)}"]
    curves = curves_of(path.read_text())
    assert set(curves) == set(curve.CURVES)
    # Lower on the page is a larger number.
    (x2, y2), (x6, y1) = curves["train_loss"]
    assert x2 < x6
    assert y2 < y1


def test_long_curve_has_few_points_and_its_last_one():
    losses = {"train_loss": [(step, 5.0) for step in range(1, 100_000)], "validation_loss": []}
    (points,) = curves_of(curve.svg_of(losses, "long")).values()
    assert len(points) < 1000


def test_title_of_a_curve_may_be_any_text():
    picture = curve.svg_of({"train_loss": [(1, 2.0)], "validation_loss": []}, 'a<b>&"\x1b[2J')
    texts = [x.text for x in ElementTree.fromstring(picture).iter()]
    assert 'loss of a<b>&"\\x1b[2J' in texts


def test_run_without_losses_has_no_curve(tmp_path):
    with refused(InputError, "metrics.jsonl"):
        draw_curve(tmp_path)
    write_metrics(tmp_path, {2: {"train_loss": None}})
    # A run ends well all the same.
    assert "could not be drawn (A run must have reported a loss" in describe_curve(tmp_path)


# Versions.


def test_versions_are_noted_and_others_are_said(tmp_path, monkeypatch):
    assert record_versions(tmp_path, 3) is None  # A run that knows none goes on.
    (entry,) = json.loads((tmp_path / "versions.json").read_text())
    assert entry == {"after_step": 3, "versions": current_versions()}
    assert {"jax", "jaxlib", "flax"} <= set(current_versions())
    now = {"jax": "0.10.2", "flax": "0.12.8", "commit": "abc"}
    monkeypatch.setattr(folder, "current_versions", lambda: now)
    # A new run in a folder whose run was removed but for this file.
    assert record_versions(tmp_path, 0) is None
    assert record_versions(tmp_path, 5) is None
    now = {"jax": "0.11.0", "flax": "0.12.8"}
    assert record_versions(tmp_path, 7) == (
        "NOTE: other versions than those that the run began with: jax 0.10.2 there, 0.11.0 now; "
        "commit abc there, unknown now"
    )
    assert record_versions(tmp_path, 9) is None
    entries = json.loads((tmp_path / "versions.json").read_text())
    assert [x["after_step"] for x in entries] == [0, 7]
    assert entries[0]["versions"] == {"jax": "0.10.2", "flax": "0.12.8", "commit": "abc"}
    assert [x.name for x in tmp_path.iterdir()] == ["versions.json"]


def test_commit_is_that_of_the_checkout(tmp_path):
    assert folder._commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = folder._commit(tmp_path)
    assert len(str(commit)) == 40
    (tmp_path / "file").write_text("changed")
    assert folder._commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "below").mkdir()
    assert folder._commit(tmp_path / "below") is None


# Commands.


def test_commands_can_be_typed_where_the_program_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(commands.sys, "executable", str(REPOSITORY / ".venv/bin/python"))
    assert command("sample.py", "runs/my run") == ".venv/bin/python sample.py 'runs/my run'"
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(commands.sys, "executable", "/usr/bin/python3")
    assert command("trainer.run.curve", Path("runs/a")) == "python3 -m trainer.run.curve runs/a"
    monkeypatch.chdir(tmp_path)
    assert command("sample.py") == f"python3 {REPOSITORY}/sample.py"


# train.py as a program.


def test_ctrl_c_ends_train_without_a_traceback_wherever_it_comes(monkeypatch, capsys, tmp_path):
    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(session, "joined", interrupted)
    monkeypatch.setattr(sys, "argv", ["train.py", "--run-dir", str(tmp_path)])
    try:
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
        # One more Ctrl-C, while Python waits for threads, ends the program at once.
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, handler)
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "\n")
