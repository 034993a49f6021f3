"""`examples/train_gpt.py`, a file to copy: right gradients, a resume to the bit, either order."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st

FILE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
FEW = "--seq-len 256 --batch-size 2"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path):
    """Documents of which most rows hold several."""
    rng, folder = np.random.default_rng(0), tmp_path / "texts"
    folder.mkdir()
    for number, length in enumerate([70, 400, 9, 130, 90, 600, 211, 50]):
        (folder / f"{number}.py").write_bytes(rng.integers(97, 123, length).astype("u1").tobytes())
    return folder


def test_example_is_short_and_needs_the_wheel_alone():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 128
    for program in ("trainer", "models", "configs"):
        assert not [x for x in lines if x.startswith((f"import {program}", f"from {program}"))]


def dense(query, key, value, segment_ids):
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_loss_and_gradients_are_those_of_dense_attention(example, texts, layout):
    devices = jax.devices()[:8]
    mesh = st.make_mesh(st.Degrees.startrail(8, c=2), devices=devices)
    attention = st.Attention(mesh, causal=True, layout=layout)
    batch = example.batches(texts, 256, 2)(1)
    assert batch[3].max() > 1  # Several documents.
    sizes = dict(width=32, layers=2, heads=4, kv_heads=2)

    def solved(attention_fn, *batch):
        graph, state = nnx.split(example.GPT(attention_fn, **sizes))
        state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
        return jax.jit(jax.value_and_grad(lambda x: nnx.merge(graph, x).loss(*batch)))(state)

    ours, theirs = solved(attention, *attention.shard(*batch)), solved(dense, *batch)
    for found, wanted in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.fixture
def run(example, texts, monkeypatch):
    """Runs the program on 8 devices, with its folder among the texts; returns its losses."""
    devices = jax.devices()[:8]
    monkeypatch.setattr(jax, "devices", lambda: devices)

    def run(folder, more):
        flags = f"{FEW} --data {texts} --run-dir {texts / folder} {more}"
        return example.main(flags.split())

    return run


@pytest.mark.slow
@pytest.mark.parametrize("done", [3, 24])  # In the warm-up, and where the rate falls.
def test_the_same_command_resumes_an_interrupted_run_to_the_bit(run, texts, done):
    command = f"--steps {done + 3} --save-every {done}"
    losses = run("whole", command)
    assert len(losses) == done + 3
    shutil.rmtree(texts / "whole" / str(done + 3))  # As if killed after the step `done`.
    assert run("whole", command) == losses[done:]
    assert run("whole", command) == []


@pytest.mark.slow
def test_losses_are_the_same_in_either_order_and_scheme(run):
    natural = run("../natural", "--steps 6 --layout contiguous")
    zigzag = run("../zigzag", "--steps 6 --layout zigzag --c 2")
    np.testing.assert_allclose(zigzag, natural, rtol=1e-5)


def test_documents_are_all_files_of_a_folder_and_too_few_are_an_error(example, tmp_path):
    with pytest.raises(SystemExit, match=r"at least 513 bytes.*got 0"):
        example.batches(tmp_path, 256, 2)
    (tmp_path / "a.txt").write_bytes(b"a" * 400)
    for hidden in (".git", "__pycache__"):
        (tmp_path / "sub" / hidden).mkdir(parents=True)
        (tmp_path / "sub" / hidden / "c").write_bytes(b"c" * 200)
    (tmp_path / "sub" / "b.md").write_bytes(b"b" * 200)
    runs = tmp_path / "sub" / "runs"
    runs.mkdir()
    (runs / "checkpoint").write_bytes(b"c" * 200)
    tokens, _, positions, ids, weights = example.batches(tmp_path, 256, 2, runs)(0)
    assert set(tokens.flat) == {0, *b"ab"}
    assert positions.max() == 255
    assert ids.max() == 1
    assert weights.sum() == 2 * 256 - 1


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    ("flags", "words"),
    [("--c 3", "c=3"), ("--data nowhere", "nowhere must hold at least"), ("--head 7", "7")],
)
def test_mistakes_of_a_user_have_no_traceback(flags, words, tmp_path):
    command = [sys.executable, FILE, "--run-dir", tmp_path, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert words in done.stderr
