"""The view of a run while it trains: on a terminal and as a page."""

import json
from xml.etree import ElementTree

import pytest

from refusals import refused
from startrail_jax.errors import InputError
from trainer.errors import StorageError
from trainer.run import watch
from trainer.run.folder import locked

pytestmark = pytest.mark.quick

GIB = 2**30
NOW = 1_000_000


def write_run(folder, *, steps=70):
    """A run of which 30 steps are reported, one every 2 seconds, the last 5 seconds before NOW."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"steps": steps, "checkpoint": {"every": 20}}))
    for name in ("20", "7", "35.part"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    reports = {
        10: {"train_loss": 4.0, "tokens_per_second": None},
        # It was stopped for a night.
        12: {"train_loss": 3.5, "time": NOW - 40_000},
        20: {"validation_loss": 3.25, "time": NOW - 25},
        30: {"train_loss": 2.0, "tokens_per_second": 12345.6, "memory_bytes": GIB * 3 // 2},
    }
    times = {"time": NOW - 5}
    lines = [json.dumps({"step": step, **times, **values}) for step, values in reports.items()]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 31, "train_lo']))


def test_run_that_trains_shows_what_is_known(tmp_path):
    write_run(tmp_path)
    with locked(tmp_path):
        seen = watch.look(tmp_path, NOW)
    assert seen.is_training
    assert seen.facts == {
        "state": "training",
        "step": "30 of 70, reported 0:05 ago",
        "training loss": "2.0000",
        "validation loss": "3.2500",
        "tokens/s": "12,346",
        "memory of a device": "1.50 GiB",
        "checkpoint": "step 20",
        "next checkpoint": "step 40, in 0:20",
        "time left": "1:20",
    }
    assert seen.losses["validation_loss"] == [(20, 3.25)]


def test_last_checkpoint_is_that_of_the_last_step(tmp_path):
    write_run(tmp_path, steps=33)
    with locked(tmp_path):
        assert watch.look(tmp_path, NOW).facts["next checkpoint"] == "step 33, in 0:06"


def test_run_without_metrics_is_shown(tmp_path):
    with locked(tmp_path):
        seen = watch.look(tmp_path, NOW)
        assert seen.facts == {"state": "training", "step": "0", "checkpoint": "none"}
        assert "<svg" not in watch.page_of("run", seen, 5)
        assert watch.text_of("run", seen).splitlines()[0] == "run"


def test_chart_has_both_curves_between_their_ends(tmp_path):
    write_run(tmp_path)
    lines = watch.text_of("run", watch.look(tmp_path, NOW)).splitlines()
    assert lines[0] == "run"
    # Marks are at 0, 10, 20 and 30 steps, and from 2 to 4: the first report is a third of the way.
    assert lines[1].startswith("       4 |")
    assert lines[1].index("*") == 10 + round(59 / 3)
    assert lines[11] == f"       2 |{'*':>60}"
    assert [line.index("o") for line in lines[2:11] if "o" in line] == [10 + round(59 * 2 / 3)]
    assert lines[12].split() == ["0", "*", "training", "o", "validation", "step", "30"]
    assert all(line.isascii() and len(line) < 72 for line in lines)


@pytest.mark.parametrize(("steps", "state"), [(30, "finished"), (70, "stopped")])
def test_run_that_has_ended_is_shown_once(tmp_path, capsys, steps, state):
    write_run(tmp_path / "run", steps=steps)
    page = tmp_path / "page.html"
    watch.main([str(tmp_path / "run"), "--html", str(page)])
    out = capsys.readouterr().out
    assert f"state               {state}\n" in out
    assert "next checkpoint" not in out
    assert "time left" not in out
    assert "refresh" not in page.read_text()


def test_page_loads_itself_again_until_the_run_ends(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    page, pages = tmp_path / "page.html", []

    def end(seconds):
        pages.append((seconds, page.read_text()))
        lock.__exit__(None, None, None)

    monkeypatch.setattr(watch.time, "sleep", end)
    lock = locked(tmp_path / "run")
    lock.__enter__()
    watch.main([str(tmp_path / "run"), "--every", "2.5", "--html", str(page)])
    ((seconds, first),) = pages
    assert seconds == 2.5
    assert '<meta http-equiv="refresh" content="2.5">' in first
    assert "<th>tokens/s<td>12,346" in first
    picture = first[first.index("<svg") : first.index("</svg>") + len("</svg>")]
    assert ElementTree.fromstring(picture).get("viewBox")
    assert "refresh" not in page.read_text()


def test_once_looks_once_and_leaves_the_folder_as_it_was(tmp_path, capsys):
    write_run(tmp_path)
    with locked(tmp_path):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        watch.main([str(tmp_path), "--once"])
        assert "state               training\n" in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_wrong_words_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with refused(InputError, f"must be the folder of a run; got {folder}"):
            watch.main([str(folder)])
    write_run(tmp_path)
    with refused(InputError, "--every must be positive; got 0.0"):
        watch.main([str(tmp_path), "--every", "0"])
    page = tmp_path / "missing" / "page.html"
    with refused(StorageError, f"got {page}: No such file or directory"):
        watch.main([str(tmp_path), "--html", str(page)])
