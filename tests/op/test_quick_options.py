"""Options by which a program that runs once is compiled in less time."""

import jax
import jax.numpy as jnp
import pytest

from startrail_jax.xla.compiler import quick_options


def test_this_compiler_knows_them():
    double = jax.jit(lambda x: 2 * x, compiler_options=quick_options())
    assert double(jnp.float32(3)) == 6


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ((0, 10, 2), {"xla_backend_optimization_level", "xla_cpu_use_fusion_emitters"}),
        ((0, 11, 0), {"xla_backend_optimization_level"}),
    ],
)
def test_newer_releases_get_no_option_that_they_lack(monkeypatch, version, names):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert quick_options().keys() == names
