"""Several paths, mixed by weights: to the row, the same on every mesh and in a resumed run."""

import dataclasses
import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hst

from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import PartStream
from startrail_jax.tokens.layout import Layout
from trainer.data.mixture import Mixture, drawn, fractions_of, mixed_epochs
from trainer.data.order import TrainingBatches, validation_batches
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.gpt.dataset import open_dataset

pytestmark = pytest.mark.quick

NATURAL = Layout("contiguous", 1)
LENGTH = 8
SIZES = {"a": 40, "b": 300, "c": 7}
"""Rows of each folder."""


@pytest.fixture
def folders(tmp_path):
    """Three folders of tokens, all of a row being 1 + its number in all folders together."""
    numbers, paths = itertools.count(1), []
    for name, rows in SIZES.items():
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name)
        for part, count in (("train", rows), ("val", 5)):
            values = np.repeat([next(numbers) for _ in range(count)], LENGTH)
            np.save(tmp_path / name / f"{part}.npy", np.append(values, 0).astype(np.uint16))
    return tuple(paths)


def opened(paths, **options):
    data = DataConfig(path=paths, **options)
    model = dataclasses.replace(gpt_tiny().model, vocab_size=1000)
    config = dataclasses.replace(
        gpt_tiny(), model=model, data=data, seq_len=LENGTH, sample=TextSampleConfig()
    )
    return open_dataset(config, NATURAL)


def source_of(number):
    """The folder of a row by its number, and whether it is held out."""
    for name, rows in SIZES.items():
        for is_held_out, count in ((False, rows), (True, 5)):
            if (number := number - count) <= 0:
                return name, is_held_out
    raise AssertionError


def batches_of(data, *, batch_size=8, rows=None, seed=3):
    return TrainingBatches(
        data.train,
        collate=data.collate,
        batch_size=batch_size,
        seed=seed,
        rows=rows,
        digest=data.digest,
    )


def numbers_of(batches, count):
    return [number for _ in range(count) for number in next(batches).tokens[:, 0].tolist()]


@given(hst.lists(hst.integers(1, 10**6), min_size=1, max_size=3), hst.integers(0, 10**9))
def test_each_of_three_sources_is_less_than_a_row_from_its_share(weights, rows):
    weights = [Fraction(x, 1000) for x in weights]
    counts = drawn(rows, weights)
    assert sum(counts) == rows
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - rows * weight / sum(weights)) < 1
    grown = np.subtract(drawn(rows + 1, weights), counts)
    assert sorted(grown) == [0] * (len(weights) - 1) + [1]


def test_shares_of_a_thousand_rows_are_those_of_the_weights_to_the_row(folders):
    for weights, expected in (
        ((0.5, 0.3, 0.2), (500, 300, 200)),
        ((5.0, 3.0, 2.0), (500, 300, 200)),
        ((0.1, 0.897, 0.003), (100, 897, 3)),
        ((), (333, 333, 334)),
    ):
        data = opened(folders, weights=weights)
        numbers = numbers_of(batches_of(data), 125)
        found = Counter(source_of(number) for number in numbers)
        assert found == {(x, False): n for x, n in zip("abc", expected, strict=True)}
        # Every row of a path comes once before any comes again.
        for name, size in SIZES.items():
            own = [number for number in numbers if source_of(number)[0] == name]
            rounds = [own[i : i + size] for i in range(0, len(own), size)]
            assert all(len({*x}) == len(x) for x in rounds)
            assert len(rounds) < 2 or len({tuple(x) for x in rounds}) > 1


def test_rows_of_a_mixture_depend_on_no_mesh_and_no_stop(folders):
    data = opened(folders, weights=(0.5, 0.3, 0.2))
    whole = numbers_of(batches_of(data), 40)
    # What processes of another mesh read, together.
    halves = [numbers_of(batches_of(data, rows=rows), 40) for rows in (range(4), range(4, 8))]
    joined = np.concatenate([np.reshape(x, (40, 4)) for x in halves], axis=1)
    assert joined.ravel().tolist() == whole
    before = batches_of(data)
    first = numbers_of(before, 13)
    after = batches_of(opened(folders, weights=(0.5, 0.3, 0.2)))
    after.set_state(before.get_state())
    assert first + numbers_of(after, 27) == whole
    for paths, weights in ((folders, (0.5, 0.2, 0.3)), (folders[::-1], (0.5, 0.3, 0.2))):
        with refused(InputError, "go on with the data with which it began"):
            batches_of(opened(paths, weights=weights)).set_state(before.get_state())


def test_held_out_rows_have_the_shares_of_the_mixture(folders, tmp_path):
    def held_out(data):
        batches = validation_batches(data.held_out, collate=data.collate, batch_size=5, count=10)
        return [number for x in batches for number in x.tokens[:, 0].tolist()]

    found = held_out(opened(folders, weights=(0.2, 0.7, 0.1)))
    # There are 5 rows of each path: two of the second count twice.
    assert Counter(map(source_of, found)) == {("a", True): 2, ("b", True): 7, ("c", True): 1}
    assert len({*found}) == 8
    np.save(tmp_path / "val.npy", np.repeat(range(900, 920), LENGTH).astype(np.uint16))
    given = opened(folders, weights=(1.0, 2.0, 3.0), validation_path=tmp_path / "val.npy")
    assert set(held_out(given)) <= set(range(900, 920))


def test_whole_documents_have_shares_of_the_tokens(tmp_path):
    rng = np.random.default_rng(0)
    for name, most in (("a", 6), ("b", 20)):
        documents = [np.append(rng.integers(1, 50, rng.integers(2, most)), 0) for _ in range(400)]
        np.save(tmp_path / f"{name}.npy", np.concatenate(documents).astype(np.uint16))
    paths = tmp_path / "a.npy", tmp_path / "b.npy"
    data = opened(paths, weights=(3.0, 1.0), end_of_document=0, batches="documents")
    documents = data.documents
    alone = [opened((path,), end_of_document=0, batches="documents").documents for path in paths]
    boundary = len(alone[0].sizes.lengths)
    np.testing.assert_array_equal(documents.sizes.lengths[boundary:], alone[1].sizes.lengths)
    np.testing.assert_array_equal(documents.read(boundary)[0], alone[1].read(0)[0])
    options = dict(share=LENGTH, parts_per_step=4, window=64, epochs=documents.epochs(5))
    stream = PartStream(documents.sizes.lengths, 4, **options)
    steps = [next(stream) for _ in range(300)]
    state = stream.get_state()
    tokens = np.zeros(2)
    for part in (part for step in steps for part in step):
        for number in (number for row in part.rows for number in row):
            tokens[int(number >= boundary)] += documents.sizes.lengths[number]
    np.testing.assert_allclose(tokens[0] / tokens.sum(), 0.75, atol=0.01)
    resumed = PartStream(documents.sizes.lengths, 4, **options)
    resumed.set_state(state)
    assert [next(resumed) for _ in range(9)] == [next(stream) for _ in range(9)]
    # Every document of a path comes once before any comes again.
    epochs = mixed_epochs([x.sizes.lengths for x in alone], fractions_of((3.0, 1.0), 2), 5)
    seen = Counter(x for number in range(8) for x in epochs(number).tolist())
    for numbers in (range(boundary), range(boundary, len(documents.sizes.lengths))):
        assert max(seen[x] for x in numbers) - min(seen[x] for x in numbers) <= 1


def test_log_names_share_and_passes_of_each_path(folders):
    lines = opened(folders, weights=(0.5, 0.3, 0.2)).description.split("\n")
    assert lines[0] == "a mixture of 3 paths"
    passes = f"{0.5 * gpt_tiny().steps * gpt_tiny().batch_size / SIZES['a']:.3g} passes"
    assert lines[1].startswith(f"  50.00% of the rows, {passes} in this run: {folders[0]}")
    assert len(lines) == 4


def test_mixtures_that_cannot_be_are_refused(folders, tmp_path):
    for weights in ((1.0,), (1.0, 2.0, 3.0, 4.0)):
        with refused(InputError, "data.weights must have one", f"{len(weights)} for 3 paths"):
            DataConfig(path=folders, weights=weights)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with refused(InputError, "data.weights must be above 0", str(wrong)):
            DataConfig(path=folders, weights=(1.0, 1.0, wrong))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text " * 99)
    with refused(InputError, "All of data.path must be tokens, or all text", "npy for", "text for"):
        opened((folders[0], tmp_path / "text"))
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "link.npy").symlink_to(folders[0] / "val.npy")
    with refused(InputError, "A file must be in one path of data.path alone", "a/val.npy"):
        opened((folders[0], tmp_path / "same"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 9)
    (tmp_path / "b.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 9)
    with refused(InputError, "All of data.path must be text, or all conversations", "b.jsonl"):
        opened((tmp_path / "a.jsonl", tmp_path / "b.jsonl"), loss="all")
    assert isinstance(opened(folders).train, Mixture)
