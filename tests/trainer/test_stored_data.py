"""Data in an object store: what is copied, when, and what is said."""

import dataclasses
import io
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import sample
import train
from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax import Layout
from startrail_jax.errors import InputError
from trainer.copies import preparation
from trainer.data import cache
from trainer.data.dataset import Dataset
from trainer.data.stored import copies
from trainer.data.stored.copies import with_copies
from trainer.data.stored.listing import list_stored
from trainer.dit.config import ImageConfig
from trainer.dit.task import DiTTask
from trainer.errors import StorageError
from trainer.gpt.config import DataConfig
from trainer.gpt.task import GPTTask
from trainer.gpt.text import holds_tokens
from trainer.gpt.tokenize import main as tokenize
from trainer.processes import Peers, require_same_data
from trainer.run.settings import flag_text, load_config, save_config

URL = "memory://bucket/wiki"
ROOT = "/bucket/wiki"
LAYOUT = Layout("contiguous", 1)


@pytest.fixture(autouse=True)
def store():
    """An empty store, of this process."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


@pytest.fixture
def texts(store):
    """Twelve documents in a folder of the store, two of them in a folder in that."""
    files = {f"{'sub/' * (i > 9)}{i}.txt": f"document {i} ".encode() * 40 for i in range(12)}
    put(store, files)
    return files


def put(store, files, root=ROOT):
    for name, content in files.items():
        store.pipe_file(f"{root}/{name}", content)


def tokens(seed, size=600):
    file = io.BytesIO()
    np.save(file, np.random.default_rng(seed).integers(0, 256, size).astype(np.uint16))
    return file.getvalue()


def stored(**settings):
    return DataConfig(**{"path": Path(URL)} | settings)


def copied(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def gets(monkeypatch):
    """The names of the objects that were copied."""
    names = []
    get = MemoryFileSystem.get

    def noted(self, paths, *args, **kwargs):
        names.extend(paths)
        return get(self, paths, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get", noted)
    return names


def test_data_of_a_store_are_those_of_a_folder(texts, tmp_path, gets):
    for name, content in texts.items():
        (tmp_path / "wiki" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wiki" / name).write_bytes(content)
    recipe = dataclasses.replace(
        gpt_tiny(), seq_len=64, sample_length=8, run_dir=tmp_path / "runs/mine"
    )
    of_folder, of_store, again = (
        GPTTask().open_data(dataclasses.replace(recipe, data=data), LAYOUT)
        for data in (
            DataConfig(path=tmp_path / "wiki", held_out=0.2),
            stored(held_out=0.2),
            stored(held_out=0.2),
        )
    )
    assert of_store.digest == of_folder.digest == again.digest
    for i in (0, 3):
        assert np.array_equal(of_store.train[i], of_folder.train[i])
        assert np.array_equal(of_store.held_out[i], of_folder.held_out[i])
    assert of_store.description.endswith(f"; copied from {URL}")
    # Beside the runs, once.
    (folder,) = (tmp_path / "runs/copies").iterdir()
    assert copied(folder / "wiki") == texts
    assert sorted(gets) == sorted(f"{ROOT}/{name}" for name in texts)


def test_config_keeps_the_url(tmp_path):
    config = dataclasses.replace(gpt_tiny(), data=stored(validation_path=Path("gs://b/val")))
    save_config(config, tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())["data"]
    assert (values["path"], values["validation_path"]) == (URL, "gs://b/val")
    assert load_config(type(config), tmp_path / "config.json") == config
    assert flag_text("data.path", config.data.path) == f"--data.path {URL}"


def test_data_that_change_get_a_new_copy(texts, store, tmp_path, gets):
    first = with_copies(stored(), tmp_path).path
    gets.clear()
    assert with_copies(stored(), tmp_path).path == first
    assert not gets
    # As long as before.
    store.pipe_file(f"{ROOT}/3.txt", texts["3.txt"].replace(b"3", b"x"))
    second = with_copies(stored(), tmp_path).path
    assert second != first
    assert b"x" in (second / "3.txt").read_bytes()
    assert copied(first) == texts


def test_copy_goes_on_where_it_was_interrupted(texts, tmp_path, monkeypatch, gets):
    replaced = []
    replace = Path.replace

    def stop(self, target):
        if len(replaced) == 5:
            raise KeyboardInterrupt
        replaced.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        with_copies(stored(), tmp_path)
    monkeypatch.setattr(Path, "replace", replace)
    (part,) = {path.suffix for path in tmp_path.rglob(".*.part")}
    assert part == ".part"
    gets.clear()
    copy = with_copies(stored(), tmp_path).path
    assert copied(copy) == texts
    assert len(gets) == len(texts) - 5

    # A file that is damaged in its size is copied again, and a stranger is named.
    (copy / "7.txt").write_bytes(b"")
    gets.clear()
    assert copied(with_copies(stored(), tmp_path).path) == texts
    assert gets == [f"{ROOT}/7.txt"]
    (copy / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"got '.*wiki' with others, .* such as 'mine.txt'. Remo"):
        with_copies(stored(), tmp_path)


def test_one_of_several_processes_copies(texts, tmp_path, gets, capsys):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(with_copies(stored(), tmp_path).path))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(gets) == len(texts)
    assert copied(found[0]) == texts
    assert f"copying {URL} to {found[0]}" in capsys.readouterr().err


def test_without_locks_each_process_copies(texts, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(cache.NO_LOCKS[0], "no locks")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    other = tmp_path / "copies" / list_stored(Path(URL), "data.path").key / "wiki"
    other.mkdir(parents=True)
    (other / ".1.txt.1234.part").write_text("of another process, which still writes it")
    with pytest.warns(UserWarning, match=r"has no locks: each process copies memory://bucket/wik"):
        copy = with_copies(stored(), tmp_path).path
    assert copied(copy).keys() - texts.keys() == {".1.txt.1234.part"}


@pytest.mark.parametrize("inner", ["sub", "sub/10.txt", "."])
def test_what_is_held_out_of_the_same_store_is_not_trained_on(texts, tmp_path, inner):
    url = Path(URL) / inner
    config = dataclasses.replace(
        gpt_tiny(),
        seq_len=64,
        sample_length=8,
        run_dir=tmp_path / "run",
        data=stored(validation_path=url),
    )
    if inner == ".":
        with pytest.raises(ValueError, match=r"must hold files besides those of data.validation_p"):
            GPTTask().open_data(config, LAYOUT)
        return
    data = GPTTask().open_data(config, LAYOUT)
    trained = "".join(data.corpus.decode(part.tokens) for part in data.corpus.train)
    assert "document 9 " in trained
    assert "document 10 " not in trained
    assert ("document 11 " in trained) == (inner != "sub")


def test_tokens_in_a_store(store, tmp_path, gets):
    """A folder for copies has an effect on tokens too, and their names tell what they are."""
    put(store, {"train.npy": tokens(0), "val.npy": tokens(1), ".hidden": b"1"})
    data = stored(cache=tmp_path / "cache")
    config = dataclasses.replace(
        gpt_tiny(), seq_len=64, sample_length=8, run_dir=tmp_path / "run", data=data
    )
    opened = GPTTask().open_data(config, LAYOUT)
    assert (len(opened.train), len(opened.held_out)) == (9, 9)
    assert sorted(gets) == [f"{ROOT}/train.npy", f"{ROOT}/val.npy"]
    assert not (tmp_path / "copies").exists()
    gets.clear()
    assert holds_tokens(Path(URL))
    assert not gets
    assert holds_tokens(Path("s3://bucket/gone.bin"))
    # One file, by its name.
    one = with_copies(stored(path=Path(f"{URL}/val.npy")), tmp_path)
    assert one.path.name == "val.npy"
    assert one.path.read_bytes() == tokens(1)


def test_images_in_a_store(store, tmp_path):
    for i in range(20):
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(file, "PNG")
        store.pipe_file(f"{ROOT}/{'ab'[i % 2]}/{i}.png", file.getvalue())
    recipe = dit_digits()
    model = dataclasses.replace(recipe.model, classes=2)
    data = ImageConfig(path=Path(URL), cache=tmp_path / "cache")
    config = dataclasses.replace(recipe, model=model, data=data, run_dir=tmp_path / "run")
    opened = DiTTask().open_data(config, LAYOUT)
    assert len(opened.train) + len(opened.held_out) == 20
    assert opened.description.endswith(f"; copied from {URL}")
    assert len(list((tmp_path / "cache/copies").rglob("*.png"))) == 20
    with refused(InputError, cache="cache"):
        ImageConfig(cache=Path("cache"))


def test_text_of_a_store_is_tokenised(texts, tmp_path, capsys):
    tokenize([URL, str(tmp_path / "out"), "--held-out", "0.2", "--cache", str(tmp_path / "c")])
    assert "next: python train.py --data.path" in capsys.readouterr().out
    assert len(list((tmp_path / "c/copies").rglob("*.txt"))) == len(texts)
    with pytest.raises(SystemExit, match=r"cache holds copies .*got cache='c' for 'books'. Leave"):
        tokenize(["books", str(tmp_path / "new"), "--cache", "c"])


def test_store_without_the_data_raises(store, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=rf"data.path must exist; got '{URL}', where the store"):
        with_copies(stored(), tmp_path)
    put(store, {".hidden": b"1"})
    with refused(InputError, "hidden"):
        with_copies(stored(), tmp_path)
    put(store, {"a\nb.txt": b"1"})
    with refused(InputError, "'a\\nb.txt'"):
        with_copies(stored(), tmp_path)
    assert not list(tmp_path.iterdir())

    def refuse(*_, **__):
        raise PermissionError("you may not")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(StorageError, match=rf"The store of --data.path must be .*got {URL}: Perm"):
        with_copies(stored(), tmp_path)


def test_copy_that_cannot_be_made_raises(texts, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    full = usage._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(copies.shutil, "disk_usage", lambda _: full)
        with pytest.raises(OSError, match=r"space for the copy of .*GB; got 1e-07 GB|got 1e-07 GB"):
            with_copies(stored(), tmp_path)
    listing = list_stored(Path(URL), "data.path")
    listing.sizes["3.txt"] += 1
    with pytest.raises(OSError, match=r"stay as they are while they are copied; got '3.txt' of me"):
        copies.copy_of(listing, tmp_path)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=r"written to a folder with space.*give another: --data.cac"):
        with_copies(stored(), tmp_path / "file")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": "s3://key:token@bucket/x"}, "data.path"),
        ({"validation_path": "s3://b/x?sig=token"}, "data.validation_path"),
        ({"path": "simplecache::s3://b/x"}, "data.path"),
        ({"path": "file:///data/x"}, "be a path if it is on this"),
        (
            {"tokenizer": "gs://b/tokenizer.json"},
            "data.tokenizer",
        ),
        (
            {"chat_template": "s3://k:token@b/x"},
            "data.chat_template",
        ),
    ],
)
def test_url_of_data_that_cannot_be_raises(settings, named):
    with refused(InputError, named) as caught:
        DataConfig(**{name: Path(value) for name, value in settings.items()})
    assert "token@" not in str(caught.value)
    assert "sig=" not in str(caught.value)


def test_revision_of_a_hub_may_be_named():
    DataConfig(path=Path("hf://datasets/someone/books@refs%2Fconvert%2Fparquet/train"))
    with refused(InputError, "'hf://me/model'"):
        dataclasses.replace(gpt_tiny(), init_from=Path("hf://me/model"))


def test_run_in_a_store_is_a_folder_here_and_a_mirror(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = Path("runs/gs/bucket/runs/mine")
    url = "gs://bucket/runs/mine"
    for given in (["--run-dir", url], ["--run-dir", "runs/other", f"--run_dir={url}"]):
        settings = train.read_command_line(["gpt_tiny", *given]).settings
        assert (settings.run_dir, settings.mirror) == (here, url)
        assert f"NOTE: the run is in {here} on this machine; every" in capsys.readouterr().err
    last = train.read_command_line(["--run-dir", url, "--run-dir", "runs/other"]).settings
    assert (last.run_dir, last.mirror) == (Path("runs/other"), None)

    with pytest.raises(ValueError, match=rf"which is in a store\. Fetch it .*copies {url} {here}"):
        sample.read_command_line([url])
    here.mkdir(parents=True)
    (here / "config.json").touch()
    with pytest.raises(ValueError, match=rf"which is in a store\. Give {here}, the folder of that"):
        sample.read_command_line([url])
    with refused(InputError, "password") as caught:
        sample.read_command_line(["s3://key:token@bucket/mine"])
    assert "token@" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            "gs://bucket/x --mirror s3://k:token@b/x",
            "--run-dir",
        ),
        ("gs://bucket", "must name a folder below the"),
        ("gs://bucket/x/..", "must be the URL of a store;"),
        ("gs://bucket/copies", "run_dir"),
        ("file:///scratch/x", "run_dir"),
        ("s3://key:token@bucket/x", "must hold no password, key or"),
    ],
)
def test_run_in_a_store_that_cannot_be_raises(arguments, named):
    with refused(InputError, named) as caught:
        train.read_command_line(["--run-dir", *arguments.split()])
    assert "token@" not in str(caught.value)


def test_folders_that_a_store_lists_as_objects_are_left_out(texts, store, monkeypatch):
    """As S3 does, where its console has made them."""
    find = MemoryFileSystem.find

    def with_folders(self, root, **kwargs):
        empty = {"size": 0, "type": "file"}
        return find(self, root, **kwargs) | {f"{root}/": empty, f"{root}/sub/": empty}

    monkeypatch.setattr(MemoryFileSystem, "find", with_folders)
    assert list_stored(Path(URL), "data.path").sizes.keys() == texts.keys()


def test_store_that_changes_while_it_is_copied(texts, store, tmp_path, monkeypatch):
    """No mixture of two versions is left, of files that are as long as before."""
    get = MemoryFileSystem.get

    def changed(self, paths, *args, **kwargs):
        get(self, paths, *args, **kwargs)
        store.pipe_file(f"{ROOT}/0.txt", texts["0.txt"].replace(b"0", b"x"))

    monkeypatch.setattr(MemoryFileSystem, "get", changed)
    with pytest.raises(StorageError, match=rf"stay as they are .*; got {URL} with others than"):
        with_copies(stored(), tmp_path)
    assert not list(tmp_path.rglob("*.txt"))
    monkeypatch.setattr(MemoryFileSystem, "get", get)
    copy = with_copies(stored(), tmp_path).path
    assert copied(copy) == texts | {"0.txt": texts["0.txt"].replace(b"0", b"x")}


def test_two_hosts_are_two_stores(texts, tmp_path):
    """The path that fsspec has of a URL may lack the host."""
    one = list_stored(Path(URL), "data.path")
    other = dataclasses.replace(one, host="other")
    assert one.path_in(one) == ""
    assert one.path_in(other) is None


def test_revisions_of_data_that_lie_in_each_other(texts):
    whole = list_stored(Path(URL), "data.path")
    val = dataclasses.replace(
        whole, root="/bucket/wiki@main/val", path=Path("hf://bucket/wiki@main/val")
    )
    with pytest.raises(
        ValueError, match=rf"must be of one revision .*got {URL} and hf://bucket/wi"
    ):
        val.path_in(whole)
    same = dataclasses.replace(whole, root="/bucket/wiki@main")
    assert val.path_in(same) == "val"


def test_held_out_data_in_a_hidden_folder_have_a_copy(texts, store, tmp_path):
    put(store, {".val/1.txt": b"held out"})
    data = with_copies(stored(validation_path=Path(f"{URL}/.val")), tmp_path)
    assert copied(data.validation_path) == {"1.txt": b"held out"}
    assert not data.validation_path.is_relative_to(data.path)


def test_store_whose_files_cannot_be_told_apart_raises(texts, store, monkeypatch):
    def listed(self, root, **_):
        return {f"{root}/a.txt": {"size": 1, "type": "file"}}

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "find", listed)
        with refused(InputError, "'a.txt'"):
            list_stored(Path(URL), "data.path")
    files = {name: {"size": 1, "type": "file", "etag": "1"} for name in ("a", "a/b.txt", "a0")}

    def with_both(self, root, **_):
        return {f"{ROOT}/{x}": info for x, info in files.items() if f"{ROOT}/{x}".startswith(root)}

    monkeypatch.setattr(MemoryFileSystem, "find", with_both)
    put(store, {"a": b"1"})
    with refused(InputError, "'a'"):
        list_stored(Path(URL), "data.path")
    with refused(InputError, "1 files"):
        list_stored(Path(f"{URL}/a"), "data.path")


def test_mirror_in_the_data_raises():
    config = dataclasses.replace(gpt_tiny(), data=stored(), mirror=f"{URL}/runs/mine")
    with refused(InputError, "path=memory://bucket/wiki"):
        preparation(config)
    assert preparation(dataclasses.replace(config, mirror="memory://bucket/wiki2")) is not None


def test_sampling_without_the_store_names_the_tokenizer(store, monkeypatch):
    assert not holds_tokens(Path("s3://bucket/gone.txt"))
    with pytest.raises(ValueError, match=rf"'{URL}', of which the store does not .*--tokenizer"):
        holds_tokens(Path(URL))


def test_processes_with_other_data_end():
    data = Dataset(
        train=(), held_out=(), collate=None, description="books", loss_unit="nats", digest="a"
    )
    require_same_data(data, Peers())
    among = Peers(index=1, count=3, gather=lambda mine: [mine, mine, ["b", *mine[1:]]])
    with refused(InputError, "process 2"):
        require_same_data(data, among)
    require_same_data(data, Peers(count=2, gather=lambda mine: [mine, mine]))
