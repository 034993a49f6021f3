"""Data in an object store: what is copied, when, and what is said."""

import dataclasses
import io
import json
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
from trainer.data.remote import holds_tokens, with_copies
from trainer.dit.config import ImageConfig
from trainer.dit.task import DiTTask
from trainer.errors import StorageError
from trainer.gpt.config import DataConfig
from trainer.gpt.task import GPTTask
from trainer.gpt.tokenize import main as tokenize
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
    for name, content in files.items():
        store.pipe_file(f"{ROOT}/{name}", content)
    return files


@pytest.fixture
def gets(monkeypatch):
    """The files that were copied."""
    found = []
    get = MemoryFileSystem.get

    def watched(self, paths, *args, **kwargs):
        found.extend(paths)
        return get(self, paths, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get", watched)
    return found


def stored(**settings):
    return DataConfig(**{"path": Path(URL)} | settings)


def copied(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run_config(tmp_path, data):
    return dataclasses.replace(
        gpt_tiny(), seq_len=64, sample_length=8, run_dir=tmp_path / "runs/mine", data=data
    )


def test_data_of_a_store_are_those_of_a_folder(texts, tmp_path, gets):
    for name, content in texts.items():
        (tmp_path / "wiki" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wiki" / name).write_bytes(content)
    here, of_store = (
        DataConfig(path=tmp_path / "wiki", validation_fraction=0.2),
        stored(validation_fraction=0.2),
    )
    one, two, again = (
        GPTTask().open_data(run_config(tmp_path, data), LAYOUT)
        for data in (here, of_store, of_store)
    )
    assert one.digest == two.digest == again.digest
    for i in (0, 3):
        assert np.array_equal(two.train[i], one.train[i])
        assert np.array_equal(two.held_out[i], one.held_out[i])
    assert two.description.endswith(f"; copied from {URL}")
    # Beside the runs, once.
    (folder,) = (x for x in (tmp_path / "runs/copies").iterdir() if x.is_dir())
    assert copied(folder / "wiki") == texts
    assert sorted(gets) == sorted(f"{ROOT}/{name}" for name in texts)


def test_config_keeps_the_url(tmp_path):
    config = dataclasses.replace(gpt_tiny(), data=stored(validation_path=Path("gs://b/val")))
    save_config(config, tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())["data"]
    assert (values["path"], values["validation_path"]) == (URL, "gs://b/val")
    assert load_config(type(config), tmp_path / "config.json") == config
    assert flag_text("data.path", config.data.path) == f"--data.path {URL}"


def test_one_of_several_processes_copies_and_data_that_change_again(texts, store, tmp_path, gets):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(with_copies(stored(), tmp_path).path))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = set(found)
    assert len(gets) == len(texts)
    # As long as before.
    store.pipe_file(f"{ROOT}/3.txt", texts["3.txt"].replace(b"3", b"x"))
    second = with_copies(stored(), tmp_path).path
    assert second != first
    assert b"x" in (second / "3.txt").read_bytes()
    assert copied(first) == texts


def test_store_that_changes_or_fails_while_it_is_copied(texts, store, tmp_path, monkeypatch):
    """No mixture of two versions is left, of files that are as long as before."""
    get = MemoryFileSystem.get

    def interrupted(self, paths, places, **_):
        Path(places[0]).write_bytes(b"half")
        raise KeyboardInterrupt

    def changed(self, paths, *args, **kwargs):
        get(self, paths, *args, **kwargs)
        store.pipe_file(f"{ROOT}/0.txt", texts["0.txt"].replace(b"0", b"x"))

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with_copies(stored(), tmp_path / "interrupted")
        patch.setattr(MemoryFileSystem, "get", get)
        assert copied(with_copies(stored(), tmp_path / "interrupted").path) == texts
        patch.setattr(MemoryFileSystem, "get", changed)
        with refused(StorageError, URL):
            with_copies(stored(), tmp_path / "changed")
    assert not list((tmp_path / "changed").rglob("*.txt"))
    copy = with_copies(stored(), tmp_path / "changed").path
    assert copied(copy) == texts | {"0.txt": texts["0.txt"].replace(b"0", b"x")}


@pytest.mark.parametrize("inner", ["sub", "sub/10.txt", "."])
def test_what_is_held_out_of_the_same_store_is_not_trained_on(texts, tmp_path, inner):
    config = run_config(tmp_path, stored(validation_path=Path(URL) / inner))
    if inner == ".":
        with refused(InputError, "besides those of data.validation_path"):
            GPTTask().open_data(config, LAYOUT)
        return
    data = GPTTask().open_data(config, LAYOUT)
    trained = "".join(data.corpus.decode(part.tokens) for part in data.corpus.train)
    assert "document 9 " in trained
    assert "document 10 " not in trained
    assert ("document 11 " in trained) == (inner != "sub")


def test_tokens_in_a_store(store, tmp_path, gets):
    """A folder for copies has an effect on tokens too, and their names tell what they are."""
    for seed, name in enumerate(("train.npy", "val.npy", ".hidden")):
        file = io.BytesIO()
        np.save(file, np.random.default_rng(seed).integers(0, 256, 600).astype(np.uint16))
        store.pipe_file(f"{ROOT}/{name}", file.getvalue())
    opened = GPTTask().open_data(run_config(tmp_path, stored(cache=tmp_path / "cache")), LAYOUT)
    assert (len(opened.train), len(opened.held_out)) == (9, 9)
    assert sorted(gets) == [f"{ROOT}/train.npy", f"{ROOT}/val.npy"]
    assert not (tmp_path / "runs").exists()
    assert holds_tokens(Path(URL), "data.path")
    assert holds_tokens(Path("s3://bucket/gone.bin"), "data.path")
    assert not holds_tokens(Path("s3://bucket/gone.txt"), "data.path")
    # One file, by its name.
    one = with_copies(stored(path=Path(f"{URL}/val.npy")), tmp_path)
    assert one.path.name == "val.npy"
    assert one.path.is_file()


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
    tokenize(
        [URL, str(tmp_path / "out"), "--validation-fraction", "0.2", "--cache", str(tmp_path / "c")]
    )
    assert "next: python train.py --data.path" in capsys.readouterr().out
    assert len(list((tmp_path / "c/copies").rglob("*.txt"))) == len(texts)
    with pytest.raises(SystemExit, match=r"cache holds copies .*got cache='c' for 'books'. Leave"):
        tokenize(["books", str(tmp_path / "new"), "--cache", "c"])


def test_store_without_the_data_raises(store, texts, tmp_path, monkeypatch):
    with refused(InputError, "'memory://bucket/none'"):
        with_copies(stored(path=Path("memory://bucket/none")), tmp_path)
    (tmp_path / "file").write_text("no folder")
    with refused(StorageError, "--data.cache"):
        with_copies(stored(), tmp_path / "file")

    def refuse(*_, **__):
        raise PermissionError("you may not")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    with refused(StorageError, "--data.path", URL, "you may not"):
        with_copies(stored(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": "s3://key:token@bucket/x"}, "data.path"),
        ({"validation_path": "s3://b/x?sig=token"}, "data.validation_path"),
        ({"path": "simplecache::s3://b/x"}, "data.path"),
        ({"path": "file:///data/x"}, "be a path if it is on this"),
        ({"tokenizer": "gs://b/tokenizer.json"}, "data.tokenizer"),
        ({"chat_template": "s3://k:token@b/x"}, "data.chat_template"),
    ],
)
def test_url_of_data_that_cannot_be_raises(settings, named):
    with refused(InputError, named) as caught:
        DataConfig(**{name: Path(value) for name, value in settings.items()})
    assert "token@" not in str(caught.value)
    assert "sig=" not in str(caught.value)
    # A revision of a hub may be named.
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

    with refused(InputError, f"copies {url} {here}"):
        sample.read_command_line([url])
    here.mkdir(parents=True)
    (here / "config.json").touch()
    with refused(InputError, f"Give {here}, the folder of that"):
        sample.read_command_line([url])
    with refused(InputError, "password") as caught:
        sample.read_command_line(["s3://key:token@bucket/mine"])
    assert "token@" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("gs://bucket/x --mirror s3://k:token@b/x", "--run-dir"),
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


def test_mirror_in_the_data_raises():
    config = dataclasses.replace(gpt_tiny(), data=stored(), mirror=f"{URL}/runs/mine")
    with refused(InputError, "path=memory://bucket/wiki"):
        preparation(config)
    assert preparation(dataclasses.replace(config, mirror="memory://bucket/wiki2")) is not None
