"""Copies of a run in a store: what is copied, what a kill leaves, and what is fetched."""

import builtins
import errno
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import fsspec
import jax.numpy as jnp
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

import train
from configs.gpt import gpt_tiny
from programs import TINY, interrupt_after, logged_steps, shared_programs
from refusals import refused
from startrail_jax.errors import InputError
from trainer import copies
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.command_line import parse
from trainer.copies import Copies, Store, fetch_newer
from trainer.errors import MissingPackageError, RunError, StorageError
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
        "secret": b"of the processes",
        "lock": b"",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def copy(folder, step, url=URL, *, keep=2):
    """Saves a checkpoint, and has a program of its own copy it."""
    save(folder, step)
    with Copies(url, folder, keep=keep) as copier:
        copier.add(step)


def files_in(folder):
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name): (folder / name).read_bytes() for name in names}


def fetched(tmp_path, url=URL):
    """The files of a run folder that is made from the store."""
    folder = tmp_path / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    copies.main([url, str(folder)])
    return files_in(folder)


def objects(part):
    return sorted(x for x in MemoryFileSystem.store if f"/runs/mine/{part}" in x)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_run_is_fetched_as_it_was(tmp_path, kind):
    url = URL if kind == "memory" else f"file://{tmp_path}/store"
    run = tmp_path / "run"
    for step in (2, 4, 6):
        copy(run, step, url)
    there = files_in(run)
    left_out = "secret", "lock", "checkpoints/2/", "checkpoints/4/"
    expected = {name: data for name, data in there.items() if not name.startswith(left_out)}
    # A line that was being written is left out.
    expected["metrics.jsonl"] = b'{"step": 1}\n'
    assert fetched(tmp_path, url) == expected
    # Two checkpoints are kept, and what never changes is there once.
    fs, root = fsspec.core.url_to_fs(url)
    names = [path.removeprefix(f"{root}/") for path in fs.find(root)]
    assert [x for x in names if x.endswith("files.json")] == ["4/files.json", "6/files.json"]
    assert [x for x in names if "frozen" in x] == ["constant/frozen/0/weights"]
    assert not [x for x in names if "secret" in x or "lock" in x]

    # An older one, by its step; and no folder is overwritten.
    copies.main([url, str(tmp_path / "older"), "--step", "4"])
    assert files_in(tmp_path / "older")["versions.json"] == b"4"
    with refused(InputError, "empty"):
        copies.main([url, str(tmp_path / "older")])
    with refused(InputError, "step 5"):
        copies.main([url, str(tmp_path / "new"), "--step", "5"])


class KilledError(BaseException):
    """The program is killed here."""


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
                raise KilledError
            return method(*args, **kwargs)

        return write

    newest = []
    for last in range(100):
        reset(before)
        writes, allowed = 0, last
        copier = Copies(None, run, keep=1)
        copier._store, copier._run, copier._url = Store(URL), copies._read_id(run), URL
        copier._newest = 4
        was_killed = False
        with monkeypatch.context() as patch:
            for name in ("put_file", "pipe_file", "rm_file", "rm"):
                patch.setattr(MemoryFileSystem, name, counting(getattr(MemoryFileSystem, name)))
            try:
                copier._copy(4)
            except KilledError:
                was_killed = True
        files = fetched(tmp_path)
        step = int(files["versions.json"])
        newest.append(step)
        assert files[f"checkpoints/{step}/ocdbt.process_0/d/{step}"] == bytes([step]) * 3001
        assert files["frozen/0/weights"] == b"frozen" * 501
        if not was_killed:
            break
        if last % 4 == 0:  # The next program completes it, and leaves nothing else.
            with Copies(URL, run, keep=1) as again:
                again.begin(4)
            if step == 4:
                copy(run, 4, keep=1)
            assert fetched(tmp_path)["versions.json"] == b"4"
            assert not objects("2/")
    assert newest == sorted(newest)
    assert set(newest) == {2, 4}


def damage(kind):
    """Harms the newest copy."""
    store, manifest = MemoryFileSystem.store, "/bucket/runs/mine/4/files.json"
    name = "/bucket/runs/mine/4/checkpoints/4/ocdbt.process_0/d/4"
    data, text, fs = store[name].getvalue(), store[manifest].getvalue(), MemoryFileSystem()
    if kind == "gone":
        fs.rm(name)
    elif kind == "short":
        fs.pipe_file(name, data[:-1])
    elif kind == "flipped":
        fs.pipe_file(name, data[:-1] + bytes([data[-1] ^ 1]))
    elif kind == "manifest":
        fs.pipe_file(manifest, text[:-9])
    else:
        fs.pipe_file(manifest, text.decode().replace('"config.json"', f'"{kind}"').encode())


@pytest.mark.parametrize(
    "kind",
    [
        *("gone", "short", "flipped", "manifest"),
        # Who can write to the store must not reach other folders.
        *("../evil", "checkpoints/4/../../../evil", "/tmp/evil", "secret"),
    ],
)
def test_damaged_copy_is_said_and_the_one_before_is_used(tmp_path, capsys, kind):
    run = tmp_path / "run"
    copy(run, 2)
    copy(run, 4)
    damage(kind)
    shutil.rmtree(run)
    fetch_newer(URL, run)
    assert f"WARNING: the copy of step 4 in {URL} is damaged: " in capsys.readouterr().err
    assert files_in(run)["versions.json"] == b"2"
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2"]
    # The run goes on: its next copy is the newest, whatever was there of later steps.
    copy(run, 3, keep=1)
    shutil.rmtree(run)
    fetch_newer(URL, run)
    assert files_in(run)["versions.json"] == b"3"
    assert not (tmp_path / "evil").exists()
    # Without a whole copy, no new run begins.
    MemoryFileSystem().rm("/bucket/runs/mine/3/checkpoints/3/checksums.json")
    shutil.rmtree(run)
    for fetch in (lambda: fetch_newer(URL, run), lambda: copies.main([URL, str(tmp_path / "new")])):
        with refused(StorageError, "steps 3"):
            fetch()


@pytest.mark.parametrize("call", ["scandir", "stat", "open"])
def test_disk_that_fails_for_a_moment_has_no_damaged_copy(tmp_path, monkeypatch, call):
    """An older copy would be fetched, and the newest would not count any more."""
    url = f"file://{tmp_path}/store"
    for step in (1, 2):
        copy(tmp_path / "run", step, url)
    function = getattr(builtins if call == "open" else os, call)

    def fail(path, *arguments, **options):
        if "/store/2" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return function(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins if call == "open" else os, call, fail)
        with pytest.raises(StorageError, match=r"store of --mirror must be there.*Input/output"):
            fetch_newer(url, tmp_path / "new")
    fetch_newer(url, tmp_path / "new")
    assert (tmp_path / "new" / "versions.json").read_text() == "2"


def test_folder_and_store_are_brought_together(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    copy(run, 2)
    shutil.copytree(run, other)
    # The folder is newer: the store gets what it lacks.
    save(run, 4)
    with Copies(URL, run, keep=2) as copier:
        copier.begin(4)
    assert fetched(tmp_path)["versions.json"] == b"4"
    # The store is newer: the folder gets a checkpoint more, and loses none.
    capsys.readouterr()
    fetch_newer(URL, other)
    assert f"fetching step 4 from {URL}: 6 files" in capsys.readouterr().err
    assert sorted(x.name for x in (other / "checkpoints").iterdir()) == ["2", "4"]
    assert files_in(other)["versions.json"] == b"4"
    fetch_newer(URL, other)
    assert "fetching" not in capsys.readouterr().err


def test_files_that_never_change_are_copied_once_by_all_programs(tmp_path, monkeypatch):
    put, put_file = [], MemoryFileSystem.put_file

    def noting(self, local, remote, *args, **kwargs):
        put.append(remote)
        return put_file(self, local, remote, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noting)
    for step in (2, 4):
        copy(tmp_path / "run", step)
    assert [x for x in put if "frozen" in x] == ["/bucket/runs/mine/constant/frozen/0/weights"]
    # Others of the same name are copied.
    save(tmp_path / "run", 6)
    (tmp_path / "run/frozen/0/weights").write_bytes(b"others")
    with Copies(URL, tmp_path / "run", keep=1) as copier:
        copier.add(6)
    assert fetched(tmp_path)["frozen/0/weights"] == b"others"


def test_another_run_or_another_folder_is_not_touched(tmp_path):
    copy(tmp_path / "run", 2)
    before = dict(MemoryFileSystem.store)
    save(tmp_path / "other", 4)
    message = r"must be the same run; got .*other with .*, and memory.* with another run, of step 2"
    with pytest.raises(RunError, match=message):
        fetch_newer(URL, tmp_path / "other")
    with pytest.raises(RunError, match=message):
        Copies(URL, tmp_path / "other", keep=2)
    assert MemoryFileSystem.store == before
    with refused(InputError, "'mine'"):
        fetch_newer("memory://bucket/runs", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    # A folder that was emptied begins another run.
    shutil.rmtree(tmp_path / "run/checkpoints")
    with Copies(f"{URL}2", tmp_path / "run", keep=2) as copier:
        save(tmp_path / "run", 2)
        copier.add(2)
    with refused(RunError, "A run and its --mirror must"):
        fetch_newer(URL, tmp_path / "run")


def test_failing_store_stops_nothing_and_catches_up(tmp_path, monkeypatch, capsys):
    run, is_down = tmp_path / "run", threading.Event()
    put_file = MemoryFileSystem.put_file

    def failing(self, *args, **kwargs):
        if is_down.is_set():
            raise ConnectionError("https://me:secret@host/b?sig=secret has no answer")
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", failing)
    run.mkdir()
    with Copies(URL, run, keep=2) as copier:
        save(run, 2)
        is_down.set()
        copier.add(2)
        copier._last.result()
        warned = capsys.readouterr().err
        assert f"WARNING: copying the checkpoint of step 2 to {URL} failed: Connection" in warned
        assert "secret" not in warned
        is_down.clear()
        save(run, 4)
        copier.add(4)
        copier._last.result()
        assert fetched(tmp_path)["versions.json"] == b"4"
        is_down.set()
        save(run, 6)
        copier.add(6)
        copier._last.result()
        is_down.clear()
    # The end tries once more.
    assert fetched(tmp_path)["versions.json"] == b"6"

    # It never comes back: the program says so, and so does its status.
    is_down.set()
    save(run, 8)
    message = r"must have the newest.*without that of step 8\. Keep "
    with pytest.raises(StorageError, match=message), Copies(URL, run, keep=2) as copier:
        copier.begin(8)
    with suppress(ZeroDivisionError), Copies(URL, run, keep=2) as copier:
        copier.begin(8)
        raise ZeroDivisionError
    assert "WARNING: The mirror must have the newest" in capsys.readouterr().err
    is_down.clear()
    with Copies(URL, run, keep=2) as copier:
        copier.begin(8)
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
        ("simplecache::s3://b/run", "must be the URL of a store; got"),
        ("gs://bucket", "name a folder below the bucket or the root; got"),
        ("s3://[bad/run", "must be the URL of a store; got"),
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
def test_url_that_cannot_be_raises(tmp_path, url, named):
    with refused(InputError, named):
        copies.main([url, str(tmp_path / "new")])
    with refused(InputError, "must be a folder of a file"):
        copies.main([URL, "gs://bucket/mine"])
    with refused(InputError, named) as caught:
        replace(gpt_tiny(), mirror=url)
    assert [x for x in ("token@", "key:", "sig=") if x in str(caught.value)] == []


def test_store_that_cannot_be_opened_raises(tmp_path, monkeypatch):
    with refused(InputError, "floppy://a/b"):
        fetch_newer("floppy://a/b", tmp_path / "run")
    known = {"protocol": "none", "class": "no_such_package.Files", "err": "Please install nosuch"}
    monkeypatch.setitem(known_implementations, "none", known)
    with refused(MissingPackageError, "nosuch"):
        fetch_newer("none://a/b", tmp_path / "run")

    def refuse(*_, **__):
        raise PermissionError("you may not")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(StorageError, match=rf"must be there.*; got {URL}: PermissionError: you m"):
        fetch_newer(URL, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with refused(StorageError, "--mirror"):
        fetch_newer(f"file://{tmp_path}/disk/mine", tmp_path / "run")
    assert not (tmp_path / "disk").exists()
    check_mirror("hdfs://name:9000/runs")
    config = replace(gpt_tiny(), mirror=URL)
    object.__setattr__(config, "steps", 0)
    with refused(InputError, steps=0):
        copies.preparation(config)


FLAGS = f"{TINY} --checkpoint.every 2 --steps 6 --devices 2"
MESH = "--mesh.team", "2", "--mesh.group", "1"


def run(folder, *flags):
    text = folder.with_name("text.txt")
    text.write_text("\n".join(f"{i} * {i} = {i * i}" for i in range(2000)))
    arguments = [*FLAGS.split(), "--data.path", str(text), "--run-dir", str(folder), *flags]
    command = parse(arguments, default=gpt_tiny(), prog="train.py", description=None)
    return train.train(command.settings)


@pytest.mark.slow
def test_run_whose_folder_is_lost_goes_on_to_the_same_bits(tmp_path, monkeypatch, capsys):
    with shared_programs():
        undisturbed = run(tmp_path / "undisturbed", *MESH)
        with monkeypatch.context() as patch:
            interrupt_after(patch, 3)
            first = run(tmp_path / "run", "--mirror", URL, *MESH)
        assert len(first.train) == 3
        shutil.rmtree(tmp_path / "run")
        second = run(tmp_path / "run", "--mirror", URL)
        out, err = capsys.readouterr()
        assert f"fetching step 3 from {URL}" in err
        assert "after step 3" in out
        # It goes on with the mesh that it had.
        assert out.count("ring 1, team 2") == 3
    copies.main([URL, str(tmp_path / "fetched")])
    assert logged_steps(tmp_path / "fetched") == list(range(1, 7))
    assert "/bucket/runs/mine/6/files.json" in objects("")
    assert first.train + second.train == undisturbed.train
    assert second.validation == undisturbed.validation
