"""The figures of the first page are those that the code draws today."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import figures

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn():
    return figures.figures()


@pytest.mark.parametrize("name", ["rings.svg", "schemes.svg", "bytes.svg"])
def test_figure_is_up_to_date(drawn, name):
    """If not: `python benchmarks/figures.py`."""
    assert ElementTree.fromstring(drawn[name]).tag.endswith("svg")
    assert (DOCS / name).read_text() == drawn[name]


def test_rounds_begin_at_home_and_meet_each_key_unit_once():
    found = figures.rounds()
    assert sorted(found) == [(team, key) for team in range(8) for key in range(8)]
    # No member of a team meets two units in a round.
    assert len({(team, *meeting) for (team, _), meeting in found.items()}) == 64
    # Teams 2 p and 2 p + 1 are the devices of block p, and so are the key units of round 0.
    assert {(team // 2, key // 2) for (team, key), (_, number) in found.items() if number == 0} == {
        (block, block) for block in range(4)
    }
    assert all(member == key % 2 for (_, key), (member, _) in found.items())


def test_bars_have_the_length_of_their_seconds():
    text = (figures.ROOT / "benchmarks" / "RESULTS.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| ring | "))
    seconds = float(row.split("|")[2].split()[0])
    width = round(figures.PIXELS_PER_SECOND * seconds)
    bar = f'<rect class="o" x="150" y="62" width="{width}" height="21" rx="2"/>'
    label = f'<text x="{156 + width}" y="77">{seconds:.2f}</text>'
    assert f"{bar}\n{label}" in figures.schemes_svg(text)
