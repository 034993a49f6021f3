"""What goes wrong in training: a message that helps, and no work that is lost."""

import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train
from programs import TINY, interrupt_after, logged_steps, records_of, saved_steps, shared_programs
from refusals import usage_error
from tests.faults.run_folders import REPOSITORY
from trainer import loop
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.data.order import TrainingBatches
from trainer.gpt.batches import Sequences
from trainer.gpt.corpus import CHECKED_TOKENS, Stream
from trainer.run import exit as program_exit
from trainer.run import metrics
from trainer.run.exit import exit_on_user_errors
from trainer.run.folder import open_run

pytestmark = pytest.mark.usefixtures("shared")

SEQ_LEN = 32
STEPS = 8


@pytest.fixture
def data(tmp_path):
    return write_tokens(tmp_path / "data.bin", 10_000)


def write_tokens(path, count):
    """Random tokens below 200."""
    np.random.default_rng(0).integers(0, 200, count).astype("<u2").tofile(path)
    return path


def flags_of(data, run_dir, flags=""):
    """A later flag overrides an earlier one."""
    return [
        *f"{TINY} --checkpoint.keep 100 --devices 2 --mesh.data 2 --steps {STEPS}".split(),
        *("--data.path", str(data), "--run-dir", str(run_dir)),
        *flags.split(),
    ]


def run(data, run_dir, flags=""):
    """The program, as `python train.py` runs it; one that ends at once raises its message."""
    with pytest.MonkeyPatch.context() as patch, exit_on_user_errors():
        patch.setattr(program_exit, "end_now", sys.exit)
        return train.train(train.read_command_line(flags_of(data, run_dir, flags)).settings)


def message_of(data, run_dir, flags=""):
    with pytest.raises(SystemExit) as caught:
        run(data, run_dir, flags)
    # Python prints a string and exits with status 1.
    assert isinstance(caught.value.code, str)
    return caught.value.code


def assert_matches(message, pattern):
    assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def first_tokens(batch_number, num_tokens):
    """Where the windows of a batch begin in a file of so many tokens to train on."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    stream = Stream(name="", tokens=tokens, vocab_size=num_tokens)
    batches = TrainingBatches(
        Sequences([stream], SEQ_LEN),
        collate=lambda windows, numbers: [int(window[0]) for window in windows],
        batch_size=2,
        seed=0,
    )
    for _ in range(batch_number):
        batch = next(batches)
    batches.close()
    return batch


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 8 steps and its data; to be copied, not touched."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_tokens(folder / "data.bin", 10_000)
    run(data, folder / "run", "--checkpoint.every 4")
    assert saved_steps(folder / "run") == [4, 8]
    return folder


# Data.


def test_wrong_data_end_the_program_before_there_is_a_run(tmp_path):
    """What else can be wrong with data is in the tests of a corpus."""
    message = message_of(write_tokens(tmp_path / "a.bin", 12), tmp_path / "run")
    held_out = r"as many held out; got at most 1 tokens.* larger --data.validation"
    assert_matches(message, rf"^InputError: .*at least 2 tokens .* {held_out}")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_token_beyond_the_vocabulary_that_training_meets_costs_no_step(tmp_path, capsys):
    # The file is checked at its ends when it is opened, and so are windows as they are read.
    count = 1_000_000
    path = write_tokens(tmp_path / "data.bin", count)
    num_train = round(0.95 * count)
    start = first_tokens(6, num_train)[1]
    wrong = start + 5
    assert CHECKED_TOKENS <= wrong < num_train - CHECKED_TOKENS
    tokens = np.memmap(path, "<u2", "r+")
    right, tokens[wrong] = tokens[wrong], 3000
    tokens.flush()

    message = message_of(path, tmp_path / "run", "--checkpoint.every 1000")
    assert f"got id 3000 at token {wrong} of '{path}' with vocab_size=256" in message
    assert "needs --allow-changes to go on" in message
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert saved_steps(tmp_path / "run") == [5]

    tokens[wrong] = right
    tokens.flush()
    capsys.readouterr()
    losses = run(path, tmp_path / "run", "--checkpoint.every 1000 --allow-changes")
    assert "after step 5\n" in capsys.readouterr().out
    assert len(losses.train) == STEPS - 5
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


# Folders and disks.


def test_run_folder_in_use_ends_the_program(data, tmp_path):
    config = train.read_command_line(flags_of(data, tmp_path / "run")).settings
    with open_run(config):
        before = contents(tmp_path / "run")
        message = message_of(data, tmp_path / "run")
        assert contents(tmp_path / "run") == before
    assert_matches(message, rf"^RunError: One program .*/run, where process {os.getpid()} does")


def test_full_disk_is_refused_before_training(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    message = message_of(data, tmp_path / "run", "--checkpoint.keep 2")
    assert_matches(message, r"^CheckpointError: .*space for 3 more checkpoints.*1e-09 GB free")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("write", ["EventsWriter", "record_versions", "save_degrees"])
@pytest.mark.slow
def test_full_disk_at_the_start_ends_the_program(data, tmp_path, monkeypatch, write):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics if write == "EventsWriter" else loop, write, fail)
    message = message_of(data, tmp_path / "run", "--tensorboard")
    assert_matches(message, r"^StorageError: The folder of a run .*/run: No space left on device")


# Checkpoints of something else.


@pytest.mark.slow
def test_run_of_another_model_is_left_alone(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    before = contents(tmp_path / "run/checkpoints")
    flags = "--model.width 24 --optimizer.learning-rate 0.5"
    message = message_of(trained / "data.bin", tmp_path / "run", flags)
    assert_matches(message, r"^InputError: A run that goes on must keep .*/run, a run with others:")
    assert "--model.width 16 --optimizer.learning-rate 0.004 to go on with this one" in message
    # The folder still says which run it is.
    for name in ("config.json", "metrics.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (trained / "run" / name).read_text()
    # Without its config, the checkpoint tells.
    (tmp_path / "run/config.json").unlink()
    message = message_of(trained / "data.bin", tmp_path / "run", "--model.width 24")
    assert_matches(message, r"^InputError: The checkpoint must be of this model.*/checkpoints/8, ")
    assert_matches(message, r"kernel.*: float32\[1, 16, 2, 8\] in the checkpoint, .*24, 2, 8\] now")
    assert contents(tmp_path / "run/checkpoints") == before


def test_empty_config_lets_no_other_settings_in(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run/config.json").write_text("")
    message = message_of(trained / "data.bin", tmp_path / "run", "--seed 4")
    assert_matches(message, r"^InputError: .*/config.json must hold .* It is empty. Move it away")
    (tmp_path / "run/config.json").unlink()
    message = message_of(trained / "data.bin", tmp_path / "run", "--seed 4")
    assert_matches(
        message, r"^InputError: The settings must be those .*/checkpoints/8, with others"
    )
    assert "--seed 0 there, --seed 4 now" in message
    assert not (tmp_path / "run/config.json").exists()


AT_ONCE = """
import json
import sys
import train
sys.modules["wandb"] = None  # As if it were not installed.
for flags in sys.argv[2:]:
    wanted = train.read_command_line([*flags.split(), "--run-dir", sys.argv[1]])
    try:
        train.train(wanted.settings)
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {error}", "jax" in sys.modules]))
"""
MISSING = [
    (
        "--data.path docz",
        r"InputError: data.path must exist; got 'docz'. Did you mean 'docs'\?$",
    ),
    ("--data.path a/b/c", r"InputError: data.path must exist; got 'a/b/c'. Correct the path."),
    (
        "--data.validation-path docs/atention.md",
        r"data.validation_path must exist; got .* Did you mean 'docs/attention.md'\?$",
    ),
    (
        "dit_video --data.path READMEE.md --size 1 8 8",
        r"data.path must exist; got 'READMEE.md'. Did you mean 'README.md'\?$",
    ),
    ("--wandb.project p", r"MissingPackageError: --wandb.project p must have .*\[wandb\]"),
]


def test_what_is_missing_is_found_before_jax_is_imported(tmp_path):
    command = [sys.executable, "-c", AT_ONCE, tmp_path / "run", *(flags for flags, _ in MISSING)]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for (_, message), line in zip(MISSING, found.stdout.splitlines(), strict=True):
        text, has_jax = json.loads(line)
        assert_matches(text, message)
        assert not has_jax, message
    assert not (tmp_path / "run").exists()


def test_run_on_other_data_is_refused(trained, tmp_path):
    """As many tokens, one of which differs."""
    shutil.copytree(trained / "run", tmp_path / "run")
    changed = np.fromfile(trained / "data.bin", np.uint16)
    changed[5000] ^= 1
    changed.tofile(tmp_path / "data.bin")
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["data"]["path"] = str(tmp_path / "data.bin")
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    message = message_of(tmp_path / "data.bin", tmp_path / "run")
    assert_matches(message, r"got content=[0-9a-f]{16}, where the checkpoint has content=")
    assert saved_steps(tmp_path / "run") == [4, 8]


# Flags.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer.learning-rat 1", r"Unrecog.*Perhaps you meant:.* --optimizer.learning-rate "),
        ("--mesh.taem 2", r"Unrecognized options: --mesh.taem.*Perhaps you meant: --mesh.team "),
        ("--resolution 8", r"Unrecognized options: --resolution"),
        ("--data docs", r"no flag --data\. Did you mean --data.path\? .* --help"),
        ("--seed 3 --data=docs", r"no flag --data\. Did you mean --data.path\? "),
        ("--lora 8", r"no flag --lora\. Did you mean --lora.rank\? "),
        ("dit_digits --lora 8", r"Unrecognized options: --lora, 8"),
        ("--wandb me", r"no flag --wandb\. Did you mean --wandb.project\? "),
        ("--zero 4", r"invalid choice '4' for argument '--zero'. Expected one of \('0', '1', "),
        ("--steps many", r"Error parsing --steps: .*'many'"),
        ("gpt_tny --steps 3", r"got 'gpt_tny'. Did you mean gpt_tiny\? Recipes: .*llama3_8b"),
        ("runs/none/config.json", r"a recipe or a config.json; got 'runs/none/config.json'. Rec"),
    ],
)
@pytest.mark.slow_except_every(2)
def test_wrong_command_line_says_what_was_meant(flags, message, capsys):
    assert_matches(usage_error(capsys, train.read_command_line, flags.split()), message)


def test_settings_of_a_run_in_a_new_folder_are_a_new_run(trained, tmp_path, capsys):
    config = trained / "run/config.json"
    train.read_command_line([str(config), "--run-dir", str(tmp_path / "longer")])
    assert_matches(
        capsys.readouterr().err,
        rf"^NOTE: {tmp_path}/longer is a new run, from step 0, with the settings of {trained}/run",
    )
    for arguments in ([], ["--run-dir", str(trained / "run")]):
        train.read_command_line([str(config), *arguments])
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (60, 3), (1000, 50), (10_000, 50)])
@pytest.mark.slow_except_every(3)
def test_short_run_reports_twenty_times(steps, every):
    config = train.read_command_line(["gpt_tiny", "--steps", str(steps)]).settings
    assert config.steps_between_reports == every
    given = train.read_command_line(["gpt_tiny", "--steps", "60", "--log-every", "7"]).settings
    assert given.steps_between_reports == 7


@pytest.mark.parametrize(
    ("recipe", "flag", "value"),
    [("gpt_7b", "--model.mlp-width", "11008"), ("dit_digits", "--size", "1 8 8")],
)
def test_help_shows_the_values_of_the_recipe_in_lines_of_the_width(
    recipe, flag, value, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        train.read_command_line([recipe, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert flag in shown
    assert value in shown
    # A terminal has boxes round them.
    lines = [x.replace("│", " ").rstrip() for x in shown.splitlines()]
    # Every flag without a prefix is in a group: there is `--help` alone before the first.
    titles = [x.strip(" ╭─╮") for x in shown.splitlines() if x.rstrip(" ╭─╮").endswith("options")]
    assert titles[1:5] == ["run options", "memory options", "evaluation options", "guards options"]
    assert "--" not in shown.partition("run options")[0].partition("-h, --help")[2].strip("─ ")
    # Text is indented more than the flag that it describes.
    indent = " " * 8
    pairs = [x for x in itertools.pairwise(lines) if all(y.startswith(indent) for y in x)]
    assert len(pairs) > 100
    found = [x for x in pairs if len(f"{x[0]} {x[1].split()[0]}") <= 78]
    assert found == []


# Numbers.


@pytest.fixture
def poisoned(data, monkeypatch):
    """Data of which step 4 has a loss that is not finite: that of token 255, which is nowhere."""
    start = first_tokens(4, 9500)[0]
    tokens = np.memmap(data, "<u2", "r+")
    tokens[start + 3] = 255
    tokens.flush()

    cross_entropy = optax.softmax_cross_entropy_with_integer_labels

    def losses(logits, targets):
        return cross_entropy(logits, targets) * jnp.where(targets == 255, jnp.inf, 1.0)

    monkeypatch.setattr(optax, "softmax_cross_entropy_with_integer_labels", losses)
    with shared_programs():  # None with the other losses.
        yield data


@pytest.mark.slow
def test_loss_that_is_not_finite_stops_and_can_be_skipped(poisoned, tmp_path, capsys, monkeypatch):
    states = {}
    save = Checkpoints.save

    def noting(self, number, state, *rest, **options):
        states[number] = jax.tree.map(np.array, state)
        save(self, number, state, *rest, **options)

    monkeypatch.setattr(Checkpoints, "save", noting)
    flags = "--checkpoint.every 1"
    for stopped in (False, True):
        with monkeypatch.context() as patch:
            if stopped:
                interrupt_after(patch, 3)
            message = message_of(poisoned, tmp_path / "run", flags)
        assert_matches(message, r"^NonFiniteError: .*must be finite; got loss inf, .* in step 4\.")
        assert "Step 3 is saved. Go on from there with the same command and --non-fi" in message
        assert logged_steps(tmp_path / "run") == [1, 2, 3]
        assert saved_steps(tmp_path / "run") == [1, 2, 3]

    capsys.readouterr()
    losses = run(poisoned, tmp_path / "run", f"{flags} --non-finite skip")
    shown = capsys.readouterr().out
    assert "after step 3\n" in shown
    assert "step 4 skipped: loss inf, gradient norm " in shown
    assert np.isfinite(losses.train).tolist() == [False, True, True, True, True]
    assert np.isfinite(losses.validation)
    assert logged_steps(tmp_path / "run") == [1, 2, 3, 5, 6, 7, 8]
    skipped = {x["step"]: x.get("steps_skipped") for x in records_of(tmp_path / "run")}
    assert skipped == {step: 1 if step == 5 else None for step in (1, 2, 3, 5, 6, 7, 8)}
    assert saved_steps(tmp_path / "run") == list(range(1, 9))
    chex.assert_trees_all_equal(states[4], states[3])
    skipped, after = (jax.tree.leaves(states[number]) for number in (4, 5))
    assert all((x != y).any() for x, y in zip(skipped, after, strict=True))
