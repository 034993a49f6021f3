"""What a run leaves for its user: its versions, and the next command."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from trainer import session
from trainer.run import commands, versions
from trainer.run.commands import command
from trainer.run.versions import current_versions, record_versions

pytestmark = pytest.mark.quick

REPOSITORY = Path(train.__file__).parent


# Versions.


def test_versions_are_noted_and_others_are_said(tmp_path, monkeypatch):
    now = {"jax": "0.10.2", "flax": "0.12.8", "commit": "abc"}
    monkeypatch.setattr(versions, "current_versions", lambda: now)
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
    # A new run in a folder whose run was removed but for this file.
    assert record_versions(tmp_path, 0) is None
    assert len(json.loads((tmp_path / "versions.json").read_text())) == 1


def test_run_that_knows_no_versions_goes_on(tmp_path):
    assert record_versions(tmp_path, 3) is None
    (entry,) = json.loads((tmp_path / "versions.json").read_text())
    assert entry == {"after_step": 3, "versions": current_versions()}
    assert {"jax", "jaxlib", "flax"} <= set(current_versions())


def test_commit_is_that_of_the_checkout(tmp_path):
    assert versions._commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = versions._commit(tmp_path)
    assert len(str(commit)) == 40
    (tmp_path / "file").write_text("changed")
    assert versions._commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "below").mkdir()
    assert versions._commit(tmp_path / "below") is None


# Commands.


def test_commands_can_be_typed_where_the_program_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(commands.sys, "executable", str(REPOSITORY / ".venv/bin/python"))
    assert command("sample.py", "runs/my run") == ".venv/bin/python sample.py 'runs/my run'"
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(commands.sys, "executable", "/usr/bin/python3")
    assert command("trainer.gpt.export", Path("runs/a")) == "python3 -m trainer.gpt.export runs/a"
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
