"""`examples/train_gpt.py`, a file to copy: right gradients, a resume to the bit, either order."""

import importlib.util
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
    rng = np.random.default_rng(0)
    for number, length in enumerate([70, 400, 9, 130, 90, 600, 211, 50]):
        (tmp_path / f"{number}.py").write_bytes(
            rng.integers(97, 123, length).astype("u1").tobytes()
        )
    return tmp_path


def test_example_is_short_and_needs_the_wheel_alone():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 120
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


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_so_is_either_order(example, texts, tmp_path, monkeypatch):
    devices = jax.devices()[:8]
    monkeypatch.setattr(jax, "devices", lambda: devices)

    def run(folder, more):
        flags = f"{FEW} --data {texts} --run-dir {tmp_path / folder} {more}"
        return example.main(flags.split())

    whole = run("whole", "--steps 4")
    assert [*run("parts", "--steps 2"), *run("parts", "--steps 4")] == whole
    assert run("parts", "--steps 4") == []
    natural = run("natural", "--steps 4 --layout contiguous --c 2")
    np.testing.assert_allclose(natural, whole, rtol=1e-5)
