"""The copy of a run in a store: whole at any moment, fetched as it was, and of one program."""

import builtins
import errno
import hashlib
import json
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import jax.numpy as jnp
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

import train
from configs.gpt import gpt_tiny
from programs import interrupt_after, shared_programs
from refusals import refused
from startrail_jax.errors import InputError
from trainer.checkpoints import checksums
from trainer.checkpoints.background import Copier
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.command_line import parse
from trainer.errors import MissingPackageError, RunError, StorageError
from trainer.mirror import contents, copying, fetch
from trainer.mirror.contents import DamagedCopyError, read_manifest
from trainer.mirror.copying import Mirror, TakenError
from trainer.mirror.fetch import fetch_newer
from trainer.mirror.store import Store
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


def mirror(folder, url=URL, *, keep=2, note=print, patience=5.0):
    return Mirror(url, folder, keep=keep, note=note, patience=patience, first_pause=0.01)


def copy(folder, step, url=URL, **options):
    """Saves a checkpoint, and has a program of its own copy it."""
    save(folder, step)
    with mirror(folder, url, **options) as copier:
        copier.begin()


def files_in(folder):
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name): (folder / name).read_bytes() for name in names}


def fetched(tmp_path, url=URL):
    """The files of a run folder that is made from the store."""
    folder = tmp_path / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    fetch.main([url, str(folder)])
    return files_in(folder)


def objects(kind):
    return sorted(x for x in MemoryFileSystem.store if f"/runs/mine/{kind}" in x)


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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
    # Two checkpoints are kept, and what never changes is there once, although three programs
    # copied.
    fs, root = fsspec.core.url_to_fs(url)
    names = [path.removeprefix(f"{root}/") for path in fs.find(root)]
    assert [x.split("_")[1] for x in names if x.startswith("manifests/")] == ["4", "6"]
    assert sum(name.endswith("frozen/0/weights") for name in names) == 1
    assert len([x for x in names if "/checkpoints/" in x]) == 4
    assert not [x for x in names if "secret" in x or "lock" in x]
    assert json.loads(fs.cat_file(f"{root}/owner.json"))["ended"]

    # An older one, by its step; and no folder is overwritten.
    fetch.main([url, str(tmp_path / "older"), "--step", "4"])
    assert files_in(tmp_path / "older")["versions.json"] == b"4"
    with refused(InputError, "empty"):
        fetch.main([url, str(tmp_path / "older")])
    with refused(InputError, "step 5"):
        fetch.main([url, str(tmp_path / "new"), "--step", "5"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_kill_between_any_two_writes_leaves_a_whole_copy(tmp_path, monkeypatch):
    """With one checkpoint kept, the old copy stays until the new one is whole."""
    copy(tmp_path / "run", 2, keep=1)
    before = dict(MemoryFileSystem.store)
    ids = (tmp_path / "run/mirror.json").read_bytes()
    save(tmp_path / "run", 4)
    writes = [0, 0]

    def counting(method):
        def write(*args, **kwargs):
            writes[0] += 1
            if writes[0] > writes[1]:
                raise SystemExit  # Ends the thread without a word.
            return method(*args, **kwargs)

        return write

    newest = []
    for last in range(100):
        reset(before)
        copier = mirror(tmp_path / "run", keep=1).__enter__()
        writes[:] = 0, last
        with monkeypatch.context() as patch:
            for name in ("put_file", "pipe_file", "rm"):
                method = getattr(MemoryFileSystem, name)
                patch.setattr(MemoryFileSystem, name, counting(method))
            copier.begin()
            wait_until(lambda: not copier.thread.is_alive() or not copier.holds(4))  # noqa: B023
        was_killed = not copier.thread.is_alive()
        store = Store(URL)
        for whole in store.copies():  # Old ones too, as long as they have a manifest.
            store.require_complete(store.manifest(whole))
        files = fetched(tmp_path)
        step = int(files["versions.json"])
        newest.append(step)
        assert files[f"checkpoints/{step}/ocdbt.process_0/d/{step}"] == bytes([step]) * 3001
        assert files["frozen/0/weights"] == b"frozen" * 501
        assert files["mirror.json"] == ids
        # The next program completes it, and leaves nothing of what the killed one wrote.
        if was_killed and last % 5 == 0:
            copy(tmp_path / "run", 4, keep=1)
            assert fetched(tmp_path)["versions.json"] == b"4"
            assert len(objects("manifests")) == 1
            assert len(objects("files")) == len(files)
        if not was_killed:
            copier.__exit__(None, None, None)
            break
    # Files, texts, the manifest, and what is removed after that.
    assert newest == sorted(newest)
    assert newest.count(2) == 7
    assert newest.count(4) == 3


def damage(kind):
    """Harms the newest copy."""
    (*_, manifest), store = objects("manifests"), MemoryFileSystem.store
    name = next(x for x in objects("files/000002") if "/checkpoints/" in x and "ocdbt" in x)
    data = store[name].getvalue()
    fs = MemoryFileSystem()
    if kind == "gone":
        fs.rm(name)
    elif kind == "short":
        fs.pipe_file(name, data[:-1])
    elif kind == "flipped":
        fs.pipe_file(name, data[:-1] + bytes([data[-1] ^ 1]))
    elif kind == "manifest":
        fs.pipe_file(manifest, store[manifest].getvalue()[:-9])
    else:
        text = store[manifest].getvalue().decode()
        fs.pipe_file(manifest, text.replace('"config.json"', f'"{kind}"').encode())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gone", "checkpoints/4/ocdbt.process_0/d/4 is gone"),
        ("short", "has another size"),
        ("flipped", "the checksum of checkpoints/4/ocdbt.process_0/d/4 is another"),
        ("manifest", "its manifest cannot be read"),
        # Whoever can write to the store must not reach other folders.
        ("../evil", "names '../evil', which is no file of a run"),
        ("checkpoints/4/../../../evil", "which is no file of a run"),
        ("/tmp/evil", "which is no file of a run"),
        ("secret", "which is no file of a run"),
    ],
)
def test_damaged_copy_is_said_and_the_one_before_is_used(tmp_path, capsys, kind, why):
    run = tmp_path / "run"
    copy(run, 2)
    copy(run, 4)
    damage(kind)
    shutil.rmtree(run)
    fetch_newer(URL, run)
    out = capsys.readouterr().out
    assert f"WARNING: the copy of step 4 in {URL} is damaged: " in out
    assert why in out
    assert files_in(run)["versions.json"] == b"2"
    assert sorted(x.name for x in (run / "checkpoints").iterdir()) == ["2"]
    # The run goes on: its next copy is the newest, with one checkpoint kept too.
    copy(run, 3, keep=1)
    shutil.rmtree(run)
    fetch_newer(URL, run)
    assert files_in(run)["versions.json"] == b"3"
    assert not (tmp_path / "evil").exists()


def test_store_without_a_whole_copy_begins_no_new_run(tmp_path, capsys):
    run = tmp_path / "run"
    copy(run, 2)
    damage_all = [x for x in objects("files") if "checksums" in x]
    MemoryFileSystem().rm(damage_all[0])
    shutil.rmtree(run)
    with refused(StorageError, "steps 2"):
        fetch_newer(URL, run)
    assert "checkpoints/2/checksums.json is gone" in capsys.readouterr().out
    # Nor does one begin whose first copy was cut off, without a word.
    MemoryFileSystem().rm(objects("manifests")[0])
    fetch_newer(URL, run)
    assert "WARNING: " + URL + " has no whole checkpoint, only parts" in capsys.readouterr().out
    with refused(InputError, "checkpoint"):
        fetch.main([URL, str(tmp_path / "new")])


@pytest.mark.parametrize("call", ["scandir", "stat", "open"])
def test_disk_that_fails_for_a_moment_has_no_damaged_copy(tmp_path, monkeypatch, call):
    """An older copy would be fetched, and the newest would not count any more."""
    url = f"file://{tmp_path}/store"
    for step in (1, 2):
        save(tmp_path / "run", step)
        copy(tmp_path / "run", step, url)
    (newest,) = Store(url).copies()[-1:]
    function = getattr(builtins if call == "open" else os, call)

    def fail(path, *arguments, **options):
        # Not at the folder of the copy, but below it.
        if f"/{newest.name}/" in str(path):
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
    # The folder is newer: the store gets what it lacks, and nothing else.
    copy(run, 4)
    wrote = objects("files")
    with mirror(run) as copier:
        copier.begin()
    assert objects("files") == wrote
    # The store is newer: the folder gets a checkpoint more, and loses none.
    fetch_newer(URL, other)
    assert f"fetching step 4 from {URL}: 6 files" in capsys.readouterr().out
    assert sorted(x.name for x in (other / "checkpoints").iterdir()) == ["2", "4"]
    assert files_in(other)["versions.json"] == b"4"
    fetch_newer(URL, other)
    assert "fetching" not in capsys.readouterr().out
    # A run that went back: its new copies are the newest, whatever their steps.
    shutil.rmtree(run / "checkpoints/4")
    lines = []
    with mirror(run, note=lines.append) as copier:
        copier.begin()
    assert "has the newer step 4, while this run goes on from step 2" in lines[0]
    save(run, 3)
    copy(run, 3)
    assert fetched(tmp_path)["versions.json"] == b"3"


def test_copy_of_what_is_damaged_here_is_used(tmp_path):
    """A restore sets the newest checkpoint aside, and the store has it whole."""
    run, lines = tmp_path / "run", []
    copy(run, 3, keep=1)
    copy(run, 4, keep=1)
    newest = run / "checkpoints/4"
    data = newest / "ocdbt.process_0/d/4"
    data.write_bytes(data.read_bytes()[::-1][1:])

    def begin(kept):
        with mirror(run, keep=1, note=lines.append) as copier:
            newest.rename(newest.with_name(kept))
            copier.begin()

    message = r"newest whole checkpoint; got step 3 in .*and step 4 in .*Start the same command"
    with pytest.raises(RunError, match=message):
        begin("4.damaged")
    fetch_newer(URL, run)
    assert (newest / "ocdbt.process_0/d/4").read_bytes() == bytes([4]) * 3001
    # The copy turns out to be damaged like that: the run goes on from the one before.
    begin("4.damaged.damaged")
    assert "has the newer step 4, while this run goes on from step 3, whose copy becom" in lines[0]
    assert [x.split("_")[1] for x in objects("manifests")] == ["3"]


def test_checkpoint_whose_files_are_gone_replaces_no_copy(tmp_path, monkeypatch):
    assert contents.CHECKSUMS_FILE == checksums.CHECKSUMS_FILE
    run, lines = tmp_path / "run", []
    copy(run, 2, keep=1)

    def lose(copier, step, what):
        save(run, step)
        with monkeypatch.context() as patch:
            put = Store.put_files

            def late(*arguments):
                put(*arguments)
                (run / what).unlink()

            patch.setattr(Store, "put_files", late)
            copier.add(step)
            wait_until(lambda: not copier.holds(step))

    def train():
        with mirror(run, note=lines.append) as copier:
            for step, what in ((3, "ocdbt.process_0/d/3"), (4, "checksums.json")):
                lose(copier, step, f"checkpoints/{step}/{what}")
            # All are gone before the copy begins.
            save(run, 6)
            shutil.rmtree(run / "checkpoints/6")
            copier.add(6)
            wait_until(lambda: not copier.holds(6))

    with refused(StorageError, "step 6"):
        train()
    warnings = [line for line in lines if "are gone, or have changed" in line]
    assert [line.split("step ")[1][0] for line in warnings] == ["3", "4", "6"]
    assert [x.split("_")[1] for x in objects("manifests")] == ["2"]
    assert fetched(tmp_path)["versions.json"] == b"2"
    # Nor does a manifest count that names none of its files.
    text = json.loads(MemoryFileSystem().cat_file(objects("manifests")[0]))
    text["files"] = {x: y for x, y in text["files"].items() if "checkpoints" not in x}
    with refused(DamagedCopyError, "its manifest names no file of its"):
        read_manifest(json.dumps(text).encode())


def test_store_that_lets_nothing_be_removed_takes_copies(tmp_path, monkeypatch):
    run, lines = tmp_path / "run", []

    def refuse(*_):
        raise PermissionError("s3:DeleteObject")

    monkeypatch.setattr(Store, "remove_manifest", refuse)
    copy(run, 2, keep=1)
    with mirror(run, keep=1, note=lines.append) as copier:
        for step in (3, 4):
            save(run, step)
            copier.add(step)
            wait_until(lambda: not copier.holds(step))  # noqa: B023
        assert not copier.is_failing
    assert [line for line in lines if "waiting" not in line] == [
        f"WARNING: old copies in {URL} could not be removed: PermissionError: s3:DeleteObject. "
        "That is tried again after each copy"
    ]
    assert fetched(tmp_path)["versions.json"] == b"4"


@pytest.mark.slow
def test_what_is_tried_again_is_no_arrival_and_hashing_is(tmp_path, monkeypatch):
    run = tmp_path / "run"
    save(run, 2)
    sha256 = hashlib.sha256
    seconds = [0.0]

    class Slow:
        """Takes a tenth of a second for a part, by the clock of the copies too."""

        def __init__(self):
            self.real = sha256()
            self.hexdigest = self.real.hexdigest

        def update(self, data):
            time.sleep(0.1)
            seconds[0] += 0.1
            self.real.update(data)

    with monkeypatch.context() as patch:
        patch.setattr(contents, "PART_BYTES", 500)
        patch.setattr(contents, "hashlib", SimpleNamespace(sha256=Slow))
        patch.setattr(
            copying, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: seconds[0]})
        )
        # It waits longer than for a part, and shorter than for a file.
        with mirror(run, patience=0.5) as copier:
            copier.begin()
    assert fetched(tmp_path)["versions.json"] == b"2"
    may_write, put = threading.Event(), Store.put_manifest

    def refuse(*arguments):
        if not may_write.is_set():
            raise PermissionError("no manifests")
        put(*arguments)

    monkeypatch.setattr(Store, "put_manifest", refuse)
    monkeypatch.setattr(copying, "LONGEST_PAUSE", 0.05)
    save(run, 3)
    with refused(StorageError, "step 3"), mirror(run, patience=0.3) as copier:
        copier.begin()
    may_write.set()
    copier.thread.join(300)


def test_new_run_in_a_folder_that_was_emptied_is_another_run(tmp_path):
    copy(tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with mirror(tmp_path / "run", f"{URL}2") as copier:
        save(tmp_path / "run", 2)
        copier.add(2)
    with refused(RunError, "A run and its --mirror must"):
        fetch_newer(URL, tmp_path / "run")


def test_another_run_or_another_folder_is_not_touched(tmp_path):
    copy(tmp_path / "run", 2)
    before = dict(MemoryFileSystem.store)
    save(tmp_path / "other", 4)
    message = r"must be the same run; got .*other with .*, and memory.* with another run, of step 2"
    with pytest.raises(RunError, match=message):
        fetch_newer(URL, tmp_path / "other")
    with pytest.raises(RunError, match=message):
        copy(tmp_path / "other", 4)
    with refused(RunError, "step 2"):
        mirror(tmp_path / "new").__enter__()
    assert MemoryFileSystem.store == before
    with refused(InputError, "'mine'"):
        fetch_newer("memory://bucket/runs", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_program_whose_store_is_taken_ends(tmp_path):
    first_run, second_run, lines = tmp_path / "run", tmp_path / "second", []
    save(first_run, 2)
    first = mirror(first_run).__enter__()
    first.begin()
    wait_until(lambda: not first.holds(2))
    fetch_newer(URL, second_run)
    with mirror(second_run, note=lines.append) as second:
        assert lines[0].startswith("NOTE: process ")
        assert "has not said that it ended there. This program takes the store" in lines[0]
        second.begin()
        save(second_run, 4)
        second.add(4)
        wait_until(lambda: not second.holds(4))
        # The other one still trains.
        save(first_run, 3)
        first.add(3)
        wait_until(lambda: not first.thread.is_alive())
        message = r"One program at a time may copy to a --mirror; got .*, which process .* has take"
        with pytest.raises(TakenError, match=message):
            first.check()
        with pytest.raises(TakenError, match=message):
            first.__exit__(None, None, None)
        first.__exit__(TakenError, TakenError(), None)
    assert [x.split("_")[1] for x in objects("manifests")] == ["2", "4"]
    assert fetched(tmp_path)["versions.json"] == b"4"
    # It has said that it ended.
    with mirror(second_run, note=lines.append):
        assert len(lines) == 1
        # Whoever removes the owner ends nobody.
        MemoryFileSystem().rm("/bucket/runs/mine/owner.json")
        copy_of = mirror(second_run)
        copy_of.check()


def test_failing_store_stops_nothing_and_catches_up(tmp_path, monkeypatch):
    run, lines, is_down = tmp_path / "run", [], threading.Event()
    put_file = MemoryFileSystem.put_file

    def note(line):
        lines.append(line)
        if line.startswith("waiting until"):
            is_down.clear()

    def failing(self, *args, **kwargs):
        if is_down.is_set():
            raise ConnectionError("https://me:secret@host/b?sig=secret has no answer")
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", failing)
    save(run, 2)
    with mirror(run, note=note) as copier:
        copier.begin()
        wait_until(lambda: not copier.holds(2))
        is_down.set()
        for step in (4, 6):
            save(run, step)
            copier.add(step)
            # It is kept as long as it is not copied.
            assert copier.holds(step)
            wait_until(lambda: copier.is_failing)
            time.sleep(0.05)
            copier.check()
        assert len(lines) == 1
        assert lines[0].startswith(
            f"WARNING: the upload of the checkpoint of step 4 to {URL} failed: Connec"
        )
        assert "secret" not in lines[0]
        assert not copier.holds(4)
        is_down.clear()
        wait_until(lambda: not copier.holds(6))
        copier.check()
        assert lines[1:] == [f"{URL} has caught up, with step 6"]
        is_down.set()
        save(run, 8)
        copier.add(8)
        # The end waits for it, and says so; then the store is back.
    assert f"waiting until {URL} has the checkpoint of step 8" in "".join(lines)
    assert fetched(tmp_path)["versions.json"] == b"8"

    # It never comes back: the program says so, and so does its status.
    save(run, 10)
    is_down.set()
    message = r"must have the newest.*without that of step 10, which .*run has\. Keep that folder"
    with pytest.raises(StorageError, match=message), mirror(run, patience=0.2) as copier:
        copier.begin()
    failed = copier
    lines.clear()
    with suppress(ZeroDivisionError), mirror(run, note=lines.append, patience=0.0) as copier:
        copier.begin()
        raise ZeroDivisionError
    assert any("WARNING: The mirror must have the newest" in line for line in lines)
    is_down.clear()
    for ended in (failed, copier):
        ended.thread.join(300)
    copy(run, 10)
    assert fetched(tmp_path)["versions.json"] == b"10"


class Holding(Copier):
    held = 1

    def holds(self, step):
        return step == self.held


def test_checkpoint_that_is_being_copied_stays(tmp_path):
    copier, state = Holding(), {"a": jnp.arange(4)}
    with Checkpoints(tmp_path / "checkpoints", keep=1, copier=copier) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
            checkpoints.wait()
        assert checkpoints.steps == [1, 3]
        copier.held = None
        checkpoints.save(4, state, {})
        checkpoints.wait()
        assert checkpoints.steps == [4]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("runs/mine", "mirror='runs/mine'"),
        ("simplecache::s3://b/run", "must be the URL of a store; got"),
        ("gs://bucket", "name a folder below the bucket or the root; got"),
        ("s3://key:token@bucket/run", "must hold no password, key or token"),
        ("s3://key:to/token@bucket/run", "must hold no password, key or token"),
        ("s3:/key:token@bucket/run", "must hold no password, key or token"),
        ("s3://[key:token@bucket/run", "must hold no password, key or token"),
        (
            "s3://key:token/run",
            "with a : before its path",
        ),
        ("az://c/run?sig=token", "must hold no password, key or token"),
        ("s3://[bad/run", "be the URL of a store; got one whose bucket or host cannot be"),
    ],
)
def test_url_that_cannot_be_raises(tmp_path, url, named):
    with refused(InputError, named):
        fetch.main([url, str(tmp_path / "new")])
    with refused(InputError, "must be a folder of a file"):
        fetch.main([URL, "gs://bucket/mine"])
    with refused(InputError, named) as caught:
        replace(gpt_tiny(), mirror=url)
    assert "token@" not in str(caught.value)
    assert "key:" not in str(caught.value)
    assert "sig=" not in str(caught.value)


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
        fetch.preparation(config)


TINY = (
    "--model.width 16 --model.layers 1 --model.heads 2 --model.kv-heads 2 --model.head-dim 8 "
    "--model.mlp-width 16 --seq-len 32 --batch-size 2 --validation-sequences 2 --log-every 1 "
    "--sample-length 0 --no-tensorboard --checkpoint.every 2 --steps 6 --devices 2"
)
MESH = "--mesh.team", "2", "--mesh.group", "1"


def run(folder, *flags):
    text = folder.with_name("text.txt")
    text.write_text("\n".join(f"{i} * {i} = {i * i}" for i in range(2000)))
    arguments = [*TINY.split(), "--data.path", str(text), "--run-dir", str(folder), *flags]
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
        out = capsys.readouterr().out
        assert f"fetching step 3 from {URL}" in out
        assert "after step 3" in out
        # It goes on with the mesh that it had.
        assert out.count("ring 1, team 2") == 3
    assert len(second.train) == 3
    fetch.main([URL, str(tmp_path / "fetched")])
    lines = (tmp_path / "fetched/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))
    # A copy that was still waiting when the next one came was left out.
    assert [x.split("_")[1] for x in objects("manifests")] in (["4", "6"], ["3", "6"])
    assert first.train + second.train == undisturbed.train
    assert second.validation == undisturbed.validation
