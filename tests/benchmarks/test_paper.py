"""`benchmarks/paper.py`: the clusters of StarTrail's paper, predicted."""

import re

import pytest

from benchmarks.paper import main


@pytest.mark.slow
def test_scaling_prints_a_line_for_each_cluster(capsys):
    main(["--scaling"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 8
    assert head.split() == [
        "ring",
        "double",
        "published-2",
        "ours-2",
        "published-4",
        "ours-4",
        "GiB",
    ]
    # A single ring leaves each node of 64 H100 by one of eight ports: StarTrail and a double ring,
    # which use more of them, gain.
    (row,) = (row for row in rows if row.startswith("strong, 64"))
    double, *stars = [float(x) for x in re.findall(r"([\d.]+)x", row)]
    assert min(double, *stars) > 1.5
    published, ours = stars[::2], stars[1::2]
    assert all(a > b for a, b in zip(ours, published, strict=True))


def test_case_study_of_30b_gives_the_numbers_of_the_paper(capsys):
    main(["--case-30b"])
    _, ring, published, ours, *_ = capsys.readouterr().out.splitlines()
    assert re.findall(r"[\d.]+", ring) == ["1.625", "0.000", "1.625", "1.600"]
    # Equal: a hop that sends nothing is counted, and the permute of keys is left out. What is sent
    # has the log-sum-exp too.
    assert re.findall(r"\d\.\d+", published) == ["0.406", "0.152", "0.559", "0.561"]
    assert float(ours.split()[-1]) < 0.49
