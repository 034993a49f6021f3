"""The Python of the README runs as it stands, top to bottom."""

import re
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"


def test_readme_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    names = {}
    # README asks for eight devices and knows of no stricter checks.
    with jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    assert names["out"].shape == names["query"].shape
    assert names["y"].shape == names["x"].shape
