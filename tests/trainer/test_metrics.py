"""What a run reports: lines, a bar, metrics.jsonl and TensorBoard, also when it was killed."""

import io
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from programs import records_of as records
from refusals import refused
from trainer.errors import StorageError
from trainer.run import curve, metrics
from trainer.run.folder import read_records
from trainer.run.metrics import Reporter

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(
        metrics,
        "time",
        SimpleNamespace(perf_counter=lambda: clock.seconds, time=lambda: 1e9 + clock.seconds),
    )
    return clock


def make_reporter(folder, steps=9, **options):
    reporter = Reporter(steps=steps, tokens_per_step=64)
    reporter.open(folder, **options)
    return reporter


def run(clock, reporter, steps, seconds=2.0, report_every=2):
    """Reports steps that take `seconds` each, after a compilation of 50 s."""
    clock.seconds += 50
    with reporter:
        for step in steps:
            clock.seconds += seconds
            measured = {"train_loss": 1 / step, "learning_rate": 0.5}
            reporter.advance(step, measured if step % report_every == 0 else None)


def test_reports_go_to_lines_and_json(tmp_path, clock, capsys):
    reporter = Reporter(steps=1000, tokens_per_step=64)
    reporter.line("model: [bold]a line as it is[/bold], however long it gets to be in the end" * 3)
    reporter.open(tmp_path, flops_per_token=1e6, peak_flops=1e8)
    run(clock, reporter, range(1, 5))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model: [bold]a line as it is[/bold]")
    assert lines[1:] == [
        "step 2/1000  train loss 0.5000  32 tokens/s  MFU 32.0%  33:16 left",
        "step 4/1000  train loss 0.2500  32 tokens/s  MFU 32.0%  33:12 left",
    ]
    speeds = {"tokens_per_second": 32.0, "mfu": 0.32}
    assert records(tmp_path) == [
        {"step": 2, "time": 1e9 + 154, "train_loss": 0.5, "learning_rate": 0.5, **speeds},
        {"step": 4, "time": 1e9 + 158, "train_loss": 0.25, "learning_rate": 0.5, **speeds},
    ]


def test_what_has_no_number_is_left_out_or_null(tmp_path, clock, capsys):
    """The speed of the first step, the MFU where the peak is unknown, and what is not finite."""
    reporter = make_reporter(tmp_path, 20_000, tensorboard=False)
    run(clock, reporter, range(1, 3), report_every=1)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    clock.seconds += 2
    reporter.advance(3, {"train_loss": float("nan"), "gradient_norm": float("inf")})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/20000  train loss 1.0000"
    assert lines[1].endswith("32 tokens/s  11:06:36 left")
    assert "train loss nan" in lines[2]
    assert not [line for line in lines if "MFU" in line]
    found = records(tmp_path)
    assert [record["tokens_per_second"] for record in found][:2] == [None, 32.0]
    assert [record["mfu"] for record in found] == [None] * 3
    assert found[2]["train_loss"] is found[2]["gradient_norm"] is None
    assert not (tmp_path / "tensorboard").exists()


def test_pauses_count_for_nothing(tmp_path, clock):
    with make_reporter(tmp_path) as reporter:
        for step in range(1, 5):
            clock.seconds += 2
            with reporter.pause():
                clock.seconds += 1000
            reporter.advance(step, {"validation_loss": 1.0})
    assert [record["tokens_per_second"] for record in records(tmp_path)] == [None, 32, 32, 32]


def test_resume_drops_what_will_be_done_again(tmp_path, clock, capsys):
    run(clock, make_reporter(tmp_path), range(1, 8))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "tra')
    resumed = make_reporter(tmp_path, first_step=4, tensorboard=False)
    assert [record["step"] for record in records(tmp_path)] == [2, 4]
    capsys.readouterr()
    run(clock, resumed, range(5, 10))
    assert [record["step"] for record in records(tmp_path)] == [2, 4, 6, 8]
    # Speed is measured from the first step that this program did.
    assert capsys.readouterr().out.splitlines() == [
        "step 6/9  train loss 0.1667  32 tokens/s  0:06 left",
        "step 8/9  train loss 0.1250  32 tokens/s  0:02 left",
    ]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_resume_leaves_broken_lines_out_and_says_so(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "train_loss": 1.0}}\n' for step in range(1, 6)]
    lines[1:1] = ["\0\0\0\n", '{"step": 2, "tr{"step": 3}\n', "[]\n", '{"step": "4"}\n']
    path.write_bytes("".join(lines).encode() + b'{"step": 6, "\xff')
    Reporter(steps=9, tokens_per_step=64).open(tmp_path, first_step=4, tensorboard=False)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    line = capsys.readouterr().out
    assert line == f"WARNING: 4 lines of {path} could not be read: they are left out\n"
    path.write_text("\n" + path.read_text())
    assert curve.losses_of(read_records(tmp_path))["train_loss"] == [
        (step, 1.0) for step in range(1, 5)
    ]


def test_full_disk_raises_where_it_is_met(tmp_path):
    reporter = make_reporter(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with refused(StorageError, f"written to {tmp_path}: No space left on device. Free"), reporter:
        reporter.advance(1, {"train_loss": 1.0})


def scalars(folder):
    """(step, name, value) of all events, and the steps from which on earlier ones are dropped."""
    found, purged = [], []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            found += [(event.step, x.tag, x.simple_value) for x in event.summary.value]
            if event.HasField("session_log"):
                purged.append(event.step)
    return found, purged


def test_tensorboard_gets_the_finite_numbers(tmp_path, clock):
    with make_reporter(tmp_path, first_step=4) as reporter:
        reporter.advance(5, {"train_loss": 0.5, "gradient_norm": float("inf")})
        clock.seconds += 4
        reporter.advance(6, {"train_loss": 0.25})
    found, purged = scalars(tmp_path / "tensorboard")
    speed = (6, "tokens_per_second", 16.0)
    assert found == [(5, "train_loss", 0.5), (6, "train_loss", 0.25), speed]
    assert purged == [5]


def test_other_processes_print_and_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    reporter = Reporter(steps=9, tokens_per_step=64)
    reporter.line("hello")
    reporter.open(tmp_path)
    with reporter:
        reporter.advance(1, {"train_loss": 1.0})
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def frames(monkeypatch):
    """A function that tells what a terminal of so many columns has shown, without colours."""
    shown = io.StringIO()

    def console(**options):
        return Console(file=shown, force_terminal=True, width=frames.columns, **options)

    def frames():
        return re.sub(r"\x1b\[[0-9;?]*\w", "", shown.getvalue())

    frames.columns = 100
    monkeypatch.setattr(metrics, "PatientConsole", console)
    return frames


def test_terminal_shows_a_bar_that_begins_at_the_resumed_step(tmp_path, clock, frames):
    with Reporter(steps=9, tokens_per_step=64) as reporter:
        assert "0/9 starting" in frames()
        reporter.open(tmp_path, first_step=4)
        refresh = reporter._bar.refresh
        with reporter.phase("compiling"):
            refresh()
        reporter.training()
        assert "4/9 compiling" in frames()
        reporter.advance(5)  # Before there are metrics.
        refresh()
        assert "5/9 training" in frames()
        clock.seconds += 2
        reporter.advance(6, {"train_loss": 0.5})
        reporter.advance(7)
        refresh()
        assert "step 6/9  train loss 0.5000" in frames()
        assert "7/9 train loss 0.5000" in frames()
        with reporter.pause("evaluating"):
            refresh()
        assert "7/9 evaluating" in frames()
        refresh()
        assert "7/9 train loss 0.5000" in frames().rpartition("evaluating")[2]


@pytest.mark.parametrize("columns", [20, 40, 100, 200])
def test_bar_takes_one_line_of_a_terminal_of_any_width(columns, clock, frames):
    frames.columns = columns
    reporter = Reporter(steps=100_000, tokens_per_step=65_536)
    bar = reporter._bar
    run(clock, reporter, range(1, 5))
    (line,) = bar.console.render_lines(bar.get_renderable(), pad=False)
    shown = "".join(segment.text for segment in line)
    assert len(shown.rstrip()) <= columns
    assert "4/100000" in shown
    assert ("left" in shown) == (columns > 60)


@pytest.mark.slow
def test_run_goes_on_when_nobody_reads_its_lines(tmp_path):
    """As under `python train.py 2>&1 | tee log`, which ends at the Ctrl-C that asks for a save."""
    script = f"""
import os, signal
from pathlib import Path
from trainer.run.interruption import interruption
from trainer.run.metrics import Reporter
reporter = Reporter(steps=9, tokens_per_step=64)
reporter.open(Path({str(tmp_path)!r}), tensorboard=False)
with interruption() as interrupted, reporter:
    print("ready", flush=True)
    input()
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupted(1)
    for step in (1, 2):
        reporter.advance(step, {{"train_loss": 1.0}})
    reporter.line("interrupted")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"ready\n" in process.stdout  # After what libraries have to say.
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(300) == 0
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
