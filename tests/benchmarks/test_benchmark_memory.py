"""`drawn.py` and `longest.py` of `benchmarks/compiled/`, without a compiler for GPUs."""

import pytest

from benchmarks.compiled import drawn as drawn_runs
from benchmarks.compiled import longest
from benchmarks.compiled.drawn import LEAST_GIB, MOST_GIB, drawn, name_of
from benchmarks.compiled.step import formula_of
from startrail_jax.planner.quantities import GIB


@pytest.mark.slow
def test_drawn_runs_are_legal_and_the_same_for_a_seed(monkeypatch, capsys):
    runs = list(drawn(2, seed=3))
    assert [(name_of(config), degrees) for config, degrees in drawn(2, seed=3)] == [
        (name_of(config), degrees) for config, degrees in runs
    ]
    for config, degrees in runs:
        size = formula_of(config, degrees).device_bytes
        assert LEAST_GIB <= size / GIB <= MOST_GIB
    peak = lambda config, degrees, target: formula_of(config, degrees).device_bytes  # noqa: E731
    monkeypatch.setattr(drawn_runs, "peak_bytes", peak)
    drawn_runs.main(["--count", "2", "--seed", "3"])
    printed = capsys.readouterr().out
    assert all(name_of(config) in printed for config, _ in runs)
    assert "2 of 2 within 10 %, the furthest 0.0% apart" in printed


@pytest.mark.parametrize("border", [1, 19, 20, 37])
@pytest.mark.parametrize("guess", [1, 20, 40])
def test_search_ends_where_a_length_fits_and_the_next_does_not(border, guess):
    asked = []

    def size(multiple):
        asked.append(multiple)
        return longest.LIMIT + multiple - border

    assert longest.last_that_fits(size, guess) == border
    assert {border, border + 1} <= {*asked, 0}
    if guess in (border, border + 1):
        assert len(asked) == 2


def test_search_finds_that_nothing_fits():
    assert longest.last_that_fits(lambda multiple: longest.LIMIT + 1, 8) == 0


@pytest.mark.slow
def test_longest_sequence_is_a_multiple_of_a_fine_step(monkeypatch):
    """Peaks of the formula itself: two lengths are compiled, and the row has both."""
    compiled = []

    def peak_bytes(config, degrees, target):
        compiled.append(config.seq_len)
        return formula_of(config, degrees).device_bytes

    monkeypatch.setattr(longest, "peak_bytes", peak_bytes)
    config, degrees = longest.models()["3b"], longest.schemes(8)["StarTrail, C = 2"]
    tokens, here, _, following, there, _ = longest.search_row(config, degrees).split()
    assert compiled == [int(tokens), int(following)]
    assert float(here) <= longest.LIMIT / GIB < float(there)
    step = int(following) - int(tokens)
    assert step & (step - 1) == 0
    assert 1 / 40 < step / int(tokens) <= 1 / 19
    alone = longest.schemes(1)["one device"]
    assert "none" in longest.search_row(longest.models()["7b"], alone)
