"""`benchmarks/paper.py`: the case study of StarTrail's paper."""

import re

from benchmarks.paper import main


def test_case_study_of_30b_gives_the_numbers_of_the_paper(capsys):
    main()
    _, ring, published, ours, *_ = capsys.readouterr().out.splitlines()
    assert re.findall(r"[\d.]+", ring) == ["1.625", "0.000", "1.625", "1.600"]
    # Equal: a hop that sends nothing is counted, and the permute of keys is left out. What is sent
    # has the log-sum-exp too.
    assert re.findall(r"\d\.\d+", published) == ["0.406", "0.152", "0.559", "0.561"]
    assert float(ours.split()[-1]) < 0.49
