"""The corpus, its split and its batches: the same every time, whatever the mesh."""

import numpy as np
import pytest

from startrail_jax.layout import Layout
from startrail_jax.training import data


@pytest.fixture
def library(tmp_path):
    """A folder of 97 source files, and files of all the kinds that are to be left out."""
    for index in range(97):
        (tmp_path / f"module_{index}.py").write_bytes(b"# %d\n" % index)
    for name in ["test/a.py", "site-packages/b.py", "c/tests/d.py", "encodings/e.py", "f.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"left out")
    return tmp_path


def _files(text):
    return text.tobytes().split(data.END_OF_FILE)[:-1]


def test_standard_library_splits_all_source_files(library):
    corpus = data.standard_library(library)
    train, held_out = _files(corpus.train), _files(corpus.held_out)
    assert sorted(train + held_out) == sorted(b"# %d\n" % index for index in range(97))
    assert 0 < len(held_out) < len(train)
    assert corpus.num_files == 97


def test_standard_library_split_does_not_depend_on_other_files(library):
    before = _files(data.standard_library(library).held_out)
    for index in range(0, 97, 2):
        (library / f"module_{index}.py").unlink()
    after = _files(data.standard_library(library).held_out)
    assert after == [text for text in before if int(text[2:]) % 2]


def test_standard_library_of_this_interpreter_is_large_and_stable():
    first, second = data.standard_library(), data.standard_library()
    assert len(first.train) > 1_000_000
    assert 0.01 < len(first.held_out) / len(first.train) < 0.2
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)


def test_standard_library_without_source_raises(tmp_path):
    with pytest.raises(ValueError, match=r"must have source files.*got 0 and 0.*library as files"):
        data.standard_library(tmp_path)


def test_random_windows_depend_on_seed_and_step_alone():
    text = np.arange(251, dtype=np.uint8)
    options = {"length": 7, "count": 5}
    windows = data.random_windows(text, seed=0, step=3, **options)
    np.testing.assert_array_equal(windows, data.random_windows(text, seed=0, step=3, **options))
    assert (windows != data.random_windows(text, seed=0, step=4, **options)).any()
    assert (windows != data.random_windows(text, seed=1, step=3, **options)).any()
    np.testing.assert_array_equal(windows - windows[:, :1], np.tile(np.arange(7), (5, 1)))


def test_random_windows_reach_both_ends():
    windows = data.random_windows(
        np.arange(11, dtype=np.uint8), length=7, count=100, seed=0, step=0
    )
    assert windows.min() == 0
    assert windows.max() == 10


def test_spaced_windows_cover_the_text_evenly():
    windows = data.spaced_windows(np.arange(23, dtype=np.uint8), length=5, count=4)
    np.testing.assert_array_equal(windows[:, 0], [0, 6, 12, 18])


@pytest.mark.parametrize("windows", [data.random_windows, data.spaced_windows])
def test_windows_of_short_text_raise(windows):
    options = {"seed": 0, "step": 0} if windows is data.random_windows else {}
    with pytest.raises(ValueError, match=r"at least seq_len \+ 1 bytes; got 7 bytes for seq_len=7"):
        windows(np.zeros(7, np.uint8), length=8, count=1, **options)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_next_token_batch_is_a_permutation_of_the_text(kind):
    layout = Layout(kind, 3)
    windows = np.random.default_rng(0).integers(256, size=(5, 43)).astype(np.uint8)
    batch = data.next_token_batch(windows, layout)
    np.testing.assert_array_equal(layout.unpermute(batch.tokens), windows[:, :-1])
    np.testing.assert_array_equal(layout.unpermute(batch.targets), windows[:, 1:])
    np.testing.assert_array_equal(layout.unpermute(batch.positions), np.tile(np.arange(42), (5, 1)))


def test_next_token_batch_of_indivisible_length_raises():
    with pytest.raises(ValueError, match=r"divisible by 2 \* sequence degree.*degree=4"):
        data.next_token_batch(np.zeros((2, 43), np.uint8), Layout("zigzag", 4))


def test_as_text_shows_any_bytes():
    assert data.as_text(np.frombuffer(b"a\xff\0b", np.uint8)) == "a\ufffd\nb"
