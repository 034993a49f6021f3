"""`memory.py` and `longest.py` of `benchmarks/compiled/`, without a compiler for GPUs."""

import pytest

from benchmarks.compiled import longest, memory
from benchmarks.compiled.drawn import LEAST_GIB, MOST_GIB, drawn
from benchmarks.compiled.step import Reading, formula_of
from startrail_jax.planner.memory import GIB


@pytest.mark.slow
def test_drawn_runs_are_legal_and_the_same_for_a_seed(capsys):
    runs = list(drawn(2, seed=3))
    assert [(row.name, degrees) for row, degrees in drawn(2, seed=3)] == [
        (row.name, degrees) for row, degrees in runs
    ]
    for row, degrees in runs:
        size = formula_of(row.config, degrees).device_bytes
        assert LEAST_GIB <= size / GIB <= MOST_GIB
    memory.main(["--random", "2", "--seed", "3", "--arithmetic"])
    printed = capsys.readouterr().out
    assert all(row.name in printed for row, _ in runs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--random 2 --recipes gpt_7b --mesh.team 4",
            "got --random 2 with --recipes, --mesh.team.",
        ),
        ("--random 2 --target h100 --devices 8", "got --random 2 with --target, --devices."),
        ("--random 2 --seq-len 512 --rows zero", "got --random 2 with --rows, --seq-len."),
        ("--random 0", "--random must be at least 1; got 0."),
        ("--random -3", "--random must be at least 1; got -3."),
        ("--devices 0", "--devices must be at least 1; got 0."),
        ("--seed 3", "got --seed 3 without --random. Add --random"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        memory.parse_args(flags.split())
    assert message in capsys.readouterr().err


def test_flags_of_recipes_have_defaults():
    args = memory.parse_args(["--mesh.team", "4"])
    assert (args.recipes, args.rows, args.mesh) == (list(memory.HARDWARE), "", {"team": 4})
    assert memory.parse_args(["--random", "2"]).seed == 0


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

    def read(row, degrees, target):
        compiled.append(row.config.seq_len)
        peak = formula_of(row.config, degrees).device_bytes
        return Reading(arguments=0, temporary=0, host=0, peak=peak, seconds=0.0)

    monkeypatch.setattr(longest, "read", read)
    config, degrees = longest.models()["3b"], longest.schemes(8)["StarTrail, C = 2"]
    tokens, here, _, following, there, _ = longest.search_row(
        config, degrees, compiles=True
    ).split()
    assert compiled == [int(tokens), int(following)]
    assert float(here) <= longest.LIMIT / GIB < float(there)
    step = int(following) - int(tokens)
    assert step & (step - 1) == 0
    assert 1 / 40 < step / int(tokens) <= 1 / 19
    alone = longest.schemes(1)["one device"]
    assert "none" in longest.search_row(longest.models()["7b"], alone, compiles=True)
