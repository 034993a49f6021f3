"""pyproject.toml against what the code imports. `.ci/run` builds and installs the wheel."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"startrail_jax", "trainer", "models", "configs", "train", "sample", "score"}
# Distributions whose module has another name.
MODULES = {
    "docstring-parser": "docstring_parser",
    "fa4-jax": "fa4_jax",
    "jax-linear-attention": "jla",
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
}


def required(*extras):
    """Modules that the core and the extras bring, as pyproject.toml names them."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    names = {re.match(r"[\w-]+", line).group() for line in lines}
    return {MODULES.get(name, name) for name in names}


def imported(*paths):
    """Third-party modules that the files import, anywhere in them."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - OURS


def test_core_requires_what_the_wheel_imports_and_no_more():
    files = set((ROOT / "startrail_jax").rglob("*.py")) - {ROOT / "startrail_jax" / "testing.py"}
    assert imported(*files) == required() | {"fa4_jax", "jla"}


@pytest.mark.parametrize(
    ("extra", "file", "module"),
    [
        ("fa4", "blocks/fa4", "fa4_jax"),
        ("jla", "linear/jla", "jla"),
        ("testing", "testing", "chex"),
    ],
)
def test_what_needs_another_package_is_an_extra(extra, file, module):
    assert imported(ROOT / "startrail_jax" / f"{file}.py") - required() == {module}
    assert required(extra) - required() == {module}


def test_program_requires_what_it_imports_and_no_more():
    folders = ("trainer", "models", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / name for name in ("train.py", "sample.py", "score.py", "plan.py")]
    # fsspec imports the packages of the stores by itself, and diffusers ftfy and accelerate.
    extras = ("train", "hf", "images", "stores", "video")
    wanted = required(*extras) - {"gcsfs", "s3fs", "ftfy", "accelerate", "startrail-jax"}
    assert imported(*files) | required() == wanted
