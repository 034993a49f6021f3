"""What was written is there after a power failure, which `tests.faults.power` emulates."""

import errno
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from refusals import refused
from startrail_jax.errors import InputError
from tests.faults import power
from trainer import durable, sums
from trainer.data.cache import filled_folder
from trainer.errors import StorageError
from trainer.run import folder
from trainer.run.folder import drop_after
from trainer.run.metrics import Reporter
from trainer.sums import SUMS_FILE, check_sums, sums_of, write_sums

pytestmark = pytest.mark.quick


@pytest.fixture
def after_power_failure(tmp_path, monkeypatch):
    """What is left of the folder `live` if nothing is kept but what was flushed."""
    live, flushed = tmp_path / "live", tmp_path / "flushed"
    live.mkdir()
    monkeypatch.setattr(os, "fsync", os.fsync)
    power.record(flushed)
    durable.flush(live)

    def left():
        out = Path(tempfile.mkdtemp(dir=tmp_path)) / "left"
        power.after_power_failure(live, flushed, out, np.random.default_rng(0), 0.0)
        return {str(x.relative_to(out)): x.read_text() for x in out.rglob("*") if x.is_file()}

    return SimpleNamespace(live=live, left=left)


def test_text_and_its_name_are_on_the_disk(after_power_failure):
    folder.save_degrees(after_power_failure.live, {"ring": 2})
    assert after_power_failure.left() == {"mesh.json": '{"degrees": {"ring": 2}}\n'}


def test_tokens_are_on_the_disk_with_their_folder(after_power_failure):
    live = after_power_failure.live
    with filled_folder(live, "key", lambda part: (part / "a").write_text("b")):
        pass
    assert {"key/a", f"key/{SUMS_FILE}"} <= after_power_failure.left().keys()


def test_metrics_of_a_checkpoint_are_on_the_disk(after_power_failure):
    path = after_power_failure.live / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    with Reporter(steps=9, tokens_per_step=64) as reporter:
        reporter.open(after_power_failure.live, first_step=1, tensorboard=False)
        assert after_power_failure.left() == {path.name: '{"step": 1}\n'}
        reporter.advance(2, {"train_loss": 1.0})
        reporter.flush()
        reporter.advance(3, {"train_loss": 1.0})
    lines = after_power_failure.left()[path.name].splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    "text",
    ["", "\0\0\0", "{", "[1]", '[{"versions": 3}]', '{"a": 1}', "[" * 9999],
    ids=["empty", "NULs", "cut", "numbers", "number", "object", "nested"],
)
def test_damaged_versions_stop_no_run(text, tmp_path, capsys):
    path = tmp_path / folder.VERSIONS_FILE
    path.write_text(text)
    assert folder.record_versions(tmp_path, 3) is None
    assert f"WARNING: {path} is damaged (" in capsys.readouterr().err
    (entry,) = json.loads(path.read_text())
    assert entry == {"after_step": 3, "versions": folder.current_versions()}
    assert folder.record_versions(tmp_path, 4) is None
    assert capsys.readouterr().err == ""


def test_metrics_that_end_in_nuls_lose_those_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n\0\0\0\0')
    assert drop_after(path, 9) == 1
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_text('{"step": 1}\n{"st')  # A kill cuts the last line short.
    assert drop_after(path, 9) == 0


@pytest.mark.parametrize("content", ["", "{", '{"a": 1', '["a"]', "3", '{"a": null}', "[" * 10_000])
def test_torn_checksums_are_no_checksums_of_earlier_versions(content, tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / SUMS_FILE).write_text(content)
    file = "a" if "null" in content else SUMS_FILE
    with refused(InputError, "Files with checksums must", f"/{file}': "):
        check_sums(tmp_path, "Copy it.")


def test_checksums_appear_whole(tmp_path, monkeypatch):
    """A kill while they are written must not leave a part of them, which stops every later run."""
    (tmp_path / "a").write_text("one")

    def killed(part, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write_sums(tmp_path)
    assert not (tmp_path / SUMS_FILE).exists()
    write_sums(tmp_path)
    assert check_sums(tmp_path, "Copy it.") == sums_of(tmp_path)
    assert check_sums(tmp_path, "Copy it.").keys() == {"a"}


def test_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("one")
    write_sums(tmp_path)

    def fail(file, advance=None):
        raise OSError(errno.EIO, "Input/output error", str(file))

    monkeypatch.setattr(sums, "sha256_of", fail)
    with refused(StorageError, "Input/output error"):
        check_sums(tmp_path, "Copy it.")
    (tmp_path / "a").unlink()
    monkeypatch.undo()
    with refused(InputError, "gone"):
        check_sums(tmp_path, "Copy it.")
