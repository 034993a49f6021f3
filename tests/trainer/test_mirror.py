"""Copies of a run in a store: what is copied, what a kill leaves, and what is fetched."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

import train
from configs.gpt import gpt_tiny
from programs import TINY, logged_steps, shared_programs
from refusals import refused
from startrail_jax.errors import InputError
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.command_line import parse
from trainer.errors import RunError, StorageError
from trainer.mirror import Mirror
from trainer.places import check_mirror

URL = "memory://bucket/runs/mine"


def reset(contents=()):
    MemoryFileSystem.store.clear()
    MemoryFileSystem.store.update(contents)
    MemoryFileSystem.pseudo_dirs[:] = [""]  # Stores have no folders that are empty.


@pytest.fixture(autouse=True)
def empty_store():
    reset()
    yield
    reset()


def save(folder, step, *, run="settings"):
    """What a run leaves when it saves, in little."""
    files = {
        f"checkpoints/{step}/ocdbt.process_0/d/{step}": bytes([step % 251]) * 3001,
        f"checkpoints/{step}/checksums.json": b"{}",
        "frozen/0/weights": b"frozen" * 501,
        "config.json": run.encode(),
        "versions.json": str(step).encode(),
        "metrics.jsonl": b'{"step": 1}\n{"st',
        "config.json.part": b"being written",
        "lock": b"",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def copy(folder, step, url=URL, *, keep=2):
    """Saves a checkpoint, and has a program of its own copy it."""
    save(folder, step)
    with Mirror(url, folder, keep=keep) as mirror:
        mirror.begin(0)
        mirror.add(step)


def fetch(folder, url=URL):
    Mirror(url, folder, keep=2).fetch()


def files_in(folder):
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name): (folder / name).read_bytes() for name in names}


def fetched(tmp_path, url=URL):
    folder = tmp_path / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    fetch(folder, url)
    return files_in(folder)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_run_is_fetched_as_it_was(tmp_path, kind):
    url = URL if kind == "memory" else f"file://{tmp_path}/store"
    run = tmp_path / "run"
    for step in (2, 4, 6):
        copy(run, step, url)
    left_out = "config.json.part", "lock", "checkpoints/2/", "checkpoints/4/"
    there = files_in(run).items()
    expected = {name: data for name, data in there if not name.startswith(left_out)}
    assert fetched(tmp_path, url) == expected | {"lock": str(os.getpid()).encode()}
    # Two checkpoints are kept, and what never changes is there once.
    fs, root = fsspec.core.url_to_fs(url)
    names = [path.removeprefix(f"{root}/") for path in fs.find(root)]
    assert sorted(x for x in names if "/" not in x) == ["4.json", "6.json", "mirror.json"]
    assert [x for x in names if "frozen" in x] == ["constant/frozen/0/weights"]
    assert {x.split("/")[0] for x in names if "/" in x} == {"4", "6", "constant"}


def test_kill_between_any_two_writes_leaves_a_whole_copy(tmp_path, monkeypatch):
    """With one checkpoint kept, the old copy stays until the new one is whole."""
    run = tmp_path / "run"
    copy(run, 2, keep=1)
    before = dict(MemoryFileSystem.store)
    save(run, 4)
    writes, allowed = 0, 0

    def counting(method):
        def write(*args, **kwargs):
            nonlocal writes
            writes += 1
            if writes > allowed:
                raise KeyboardInterrupt
            return method(*args, **kwargs)

        return write

    newest = []
    for last in range(100):
        reset(before)
        writes, allowed = 0, last
        mirror = Mirror(URL, run, keep=1)
        mirror._newest = 4
        was_killed = False
        with monkeypatch.context() as patch:
            for name in ("put_file", "pipe_file", "rm_file", "rm"):
                patch.setattr(MemoryFileSystem, name, counting(getattr(MemoryFileSystem, name)))
            try:
                mirror._copy(4)
            except KeyboardInterrupt:
                was_killed = True
        files = fetched(tmp_path)
        step = int(files["versions.json"])
        newest.append(step)
        assert files[f"checkpoints/{step}/ocdbt.process_0/d/{step}"] == bytes([step]) * 3001
        assert files["frozen/0/weights"] == b"frozen" * 501
        if not was_killed:
            break
        if last % 4 == 0:  # The next program completes it, and leaves nothing else.
            with Mirror(URL, run, keep=1) as again:
                again.begin(4)
            if step == 4:
                copy(run, 4, keep=1)
            assert fetched(tmp_path)["versions.json"] == b"4"
            assert not [x for x in MemoryFileSystem.store if "/mine/2" in x]
    assert newest == sorted(newest)
    assert set(newest) == {2, 4}


def damage(kind):
    name, marker = (
        f"/bucket/runs/mine/{x}" for x in ("4/checkpoints/4/ocdbt.process_0/d/4", "4.json")
    )
    fs, data = MemoryFileSystem(), MemoryFileSystem.store[name].getvalue()
    text = MemoryFileSystem.store[marker].getvalue()
    if kind == "gone":
        fs.rm(name)
    elif kind == "short":
        fs.pipe_file(name, data[:-1])
    elif kind == "marker":
        fs.pipe_file(marker, text[:-9])
    else:
        fs.pipe_file(marker, text.decode().replace('"config.json"', f'"{kind}"').encode())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gone", "FileNotFoundError"),
        ("short", r"its 4\.json lists"),
        ("marker", "JSONDecodeError"),
        # Who can write to the store must not reach other folders.
        *[
            (name, r"its 4\.json lists")
            for name in ("../evil", "checkpoints/4/../../../evil", "/tmp/evil")
        ],
    ],
)
def test_damaged_copy_is_refused(tmp_path, kind, message):
    run, new = tmp_path / "run", tmp_path / "new"
    copy(run, 2)
    copy(run, 4)
    damage(kind)
    with pytest.raises(StorageError, match=message):
        fetch(new)
    assert not (new / "checkpoints/4").exists()
    assert not (tmp_path / "evil").exists()
    # Without it, the copy before is used.
    MemoryFileSystem().rm("/bucket/runs/mine/4.json")
    fetch(new)
    assert files_in(new)["versions.json"] == b"2"


def test_folder_and_store_are_brought_together(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    copy(run, 2)
    shutil.copytree(run, other)
    # The folder is newer: the store gets what it lacks.
    save(run, 4)
    with Mirror(URL, run, keep=2) as mirror:
        mirror.begin(4)
    assert fetched(tmp_path)["versions.json"] == b"4"
    # The store is newer: the folder gets a checkpoint more, and loses none.
    capsys.readouterr()
    fetch(other)
    assert f"fetching step 4 from {URL}: 7 files" in capsys.readouterr().err
    assert sorted(x.name for x in (other / "checkpoints").iterdir()) == ["2", "4"]
    assert files_in(other)["versions.json"] == b"4"
    fetch(other)
    assert "fetching" not in capsys.readouterr().err
    # A run that goes on from an earlier step: its next copy is the newest.
    copy(other, 3, keep=1)
    assert fetched(tmp_path)["versions.json"] == b"3"


def test_files_that_never_change_are_copied_once_by_all_programs(tmp_path, monkeypatch):
    put, put_file = [], MemoryFileSystem.put_file

    def noting(self, local, remote, *args, **kwargs):
        put.append(remote)
        return put_file(self, local, remote, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noting)
    for step in (2, 4):
        copy(tmp_path / "run", step)
    assert [x for x in put if "frozen" in x] == ["/bucket/runs/mine/constant/frozen/0/weights"]


def test_another_run_or_another_folder_is_not_touched(tmp_path):
    copy(tmp_path / "run", 2)
    before = dict(MemoryFileSystem.store)
    save(tmp_path / "other", 4)
    with refused(RunError, "A run and its --mirror must be the same run", "other"):
        Mirror(URL, tmp_path / "other", keep=2)
    (tmp_path / "other/mirror.json").write_text('{"run": "0"}')
    with refused(RunError, "A run and its --mirror must be the same run", "other"):
        Mirror(URL, tmp_path / "other", keep=2)
    MemoryFileSystem().pipe_file("/bucket/years/2024/data", b"")
    for url, name in (("memory://bucket/runs", "'mine'"), ("memory://bucket/years", "'2024'")):
        with refused(InputError, name):
            Mirror(url, tmp_path / "new", keep=2)
    MemoryFileSystem().rm("/bucket/years/2024/data")
    assert MemoryFileSystem.store == before
    assert not (tmp_path / "new").exists()


def test_failing_store_stops_nothing_and_catches_up(tmp_path, monkeypatch, capsys):
    run, is_down = tmp_path / "run", threading.Event()
    put_file = MemoryFileSystem.put_file

    def failing(self, *args, **kwargs):
        if is_down.is_set():
            raise ConnectionError("https://me:secret@host/b?sig=secret has no answer")
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", failing)
    run.mkdir()
    with Mirror(URL, run, keep=2) as mirror:
        mirror.begin(0)
        save(run, 2)
        is_down.set()
        mirror.add(2)
        mirror._last.result()
        warned = capsys.readouterr().err
        assert f"WARNING: copying the checkpoint of step 2 to {URL} failed: Connection" in warned
        assert "secret" not in warned
        is_down.clear()
        save(run, 4)
        mirror.add(4)
        mirror._last.result()
        assert fetched(tmp_path)["versions.json"] == b"4"

    # At the end it is an error, unless there is one; the next program copies what is missing.
    is_down.set()
    save(run, 8)
    message = r"must have the newest.*without that of step 8\. Keep "
    with pytest.raises(StorageError, match=message), Mirror(URL, run, keep=2) as mirror:
        mirror.begin(8)
    with suppress(ZeroDivisionError), Mirror(URL, run, keep=2) as mirror:
        mirror.begin(8)
        raise ZeroDivisionError
    assert "copying the checkpoint of step 8" in capsys.readouterr().err
    is_down.clear()
    with Mirror(URL, run, keep=2) as mirror:
        mirror.begin(8)
    assert fetched(tmp_path)["versions.json"] == b"8"


def test_checkpoint_that_is_being_copied_stays(tmp_path):
    held, told, state = {1}, [], {"a": jnp.arange(4)}
    with Checkpoints(
        tmp_path / "checkpoints", keep=1, when_whole=told.append, is_held=held.__contains__
    ) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
            checkpoints.wait()
        assert checkpoints.steps == [1, 3]
        held.clear()
        checkpoints.save(4, state, {})
        checkpoints.wait()
        assert checkpoints.steps == [4]
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("runs/mine", "mirror='runs/mine'"),
        ("simplecache::s3://b/run", "must be the URL of a folder in a store, below"),
        ("gs://bucket", "below the bucket or the root; got"),
        ("s3://[bad/run", "must be the URL of a folder in a store, below"),
        *[
            (url, "must hold no password, key or token")
            for url in (
                *("s3://key:token@bucket/run", "s3://key:to/token@bucket/run"),
                *("s3:/key:token@bucket/run", "s3://[key:token@bucket/run"),
                *("s3://key:token/run", "az://c/run?sig=token"),
            )
        ],
    ],
)
def test_url_that_cannot_be_raises(url, named):
    with refused(InputError, named) as caught:
        replace(gpt_tiny(), mirror=url)
    assert [x for x in ("token@", "key:", "sig=") if x in str(caught.value)] == []
    check_mirror("hdfs://name:9000/runs")


def test_store_that_cannot_be_opened_raises(tmp_path, monkeypatch):
    with refused(StorageError, "floppy://a/b"):
        fetch(tmp_path / "run", "floppy://a/b")
    known = {"protocol": "none", "class": "no_such_package.Files", "err": "Please install nosuch"}
    monkeypatch.setitem(known_implementations, "none", known)
    with refused(StorageError, "Please install nosuch", "pip install"):
        fetch(tmp_path / "run", "none://a/b")

    def refuse(*_, **__):
        raise PermissionError("you may not")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(StorageError, match=rf"must be open.*; got {URL}: PermissionError: you m"):
        fetch(tmp_path / "run")
    with refused(StorageError, "Mount the disk"):
        fetch(tmp_path / "run", f"file://{tmp_path}/disk/mine")
    assert not list(tmp_path.iterdir())
    with refused(InputError, steps=0):
        replace(gpt_tiny(), mirror=URL, init_from=tmp_path, steps=0)


FLAGS = f"{TINY} --checkpoint.every 2 --steps 6 --devices 2"
MESH = "--mesh.team", "2", "--mesh.group", "1"


KILLED_IN_A_COPY = """
import os, signal, sys
from fsspec.implementations.local import LocalFileSystem
import train

put_file = LocalFileSystem.put_file

def put_or_die(self, local, remote, **options):
    if "/store/4/" in str(remote) and "manifest" in str(remote):
        os.kill(os.getpid(), signal.SIGKILL)
    return put_file(self, local, remote, **options)

LocalFileSystem.put_file = put_or_die
train.train(train.read_command_line(sys.argv[1:]).settings)
"""


def arguments_of(folder, *flags):
    text = folder.with_name("text.txt")
    text.write_text("\n".join(f"{i} * {i} = {i * i}" for i in range(2000)))
    return [*FLAGS.split(), "--data.path", str(text), "--run-dir", str(folder), *flags]


def run(folder, *flags):
    arguments = arguments_of(folder, *flags)
    command = parse(arguments, default=gpt_tiny(), prog="train.py", description=None)
    return train.train(command.settings)


@pytest.mark.slow
def test_run_killed_in_a_copy_goes_on_elsewhere_to_the_same_bits(tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    with shared_programs():
        undisturbed = run(tmp_path / "undisturbed", *MESH)
        arguments = arguments_of(tmp_path / "run", "--mirror", url, *MESH)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_IN_A_COPY, *arguments], capture_output=True, text=True
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert (tmp_path / "store/4/checkpoints").is_dir()
        assert not (tmp_path / "store/4.json").exists()
        shutil.copytree(tmp_path / "store", tmp_path / "again")
        capsys.readouterr()
        # It goes on with the mesh that it had, and on another one with the state of that step.
        second = run(tmp_path / "new", "--mirror", url)
        out, err = capsys.readouterr()
        assert f"fetching step 2 from {url}" in err
        assert "ring 1, team 2" in out
        other = "--mesh.team", "1", "--mesh.ring", "2"
        third = run(tmp_path / "other", "--mirror", f"file://{tmp_path}/again", *other)
    assert logged_steps(tmp_path / "new") == list(range(1, 7))
    assert second.train == undisturbed.train[2:]
    assert second.validation == undisturbed.validation
    np.testing.assert_allclose(third.train, undisturbed.train[2:], rtol=1e-5)
    assert json.loads((tmp_path / "store/6.json").read_text())["config.json"] > 0
