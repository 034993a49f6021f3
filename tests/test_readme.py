"""The Python of README runs as it stands, one block after another."""

import re
from pathlib import Path

import jax
import numpy as np

import oracle

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_python_runs_and_is_right():
    code = "".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    unpermute = names["attention"].layout.unpermute
    query, key, value, out = (
        unpermute(jax.device_get(names[name])) for name in ("query", "key", "value", "out")
    )
    expected, _ = oracle.attention(query, key, value, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert names["y"].shape == names["x"].shape
    assert names["y"].sharding.is_equivalent_to(names["x"].sharding, 3)
