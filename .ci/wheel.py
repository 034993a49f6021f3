"""Checks the installed wheel: imports every module of it and runs README's example.

The Python that runs `python -I .ci/wheel.py README.md` must have nothing but the wheel and its
dependencies, so that an import of anything else fails.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path

import startrail_jax

# What the checkout and its environment have, and users of the wheel need not have.
NOT_INSTALLED = ("trainer", "models", "configs", "flax", "optax", "chex")


def import_every_module() -> list[str]:
    """Imports all modules of the package, and returns their names."""
    folder = Path(startrail_jax.__file__).parent
    names = [module.name for module in pkgutil.walk_packages([str(folder)], "startrail_jax.")]
    files = [
        path for path in folder.rglob("*.py") if path.parent != folder or path.stem != "__init__"
    ]
    assert len(names) == len(files), "a folder of the package has no __init__.py"
    for name in names:
        importlib.import_module(name)
    for name in startrail_jax.__all__:
        getattr(startrail_jax, name)
    assert (folder / "py.typed").exists(), "the wheel does not say that it is typed"
    return names


def check_message_without_chex() -> None:
    """`startrail_jax.testing` can be imported without chex, and says at use what to install."""
    try:
        sys.modules["startrail_jax.testing"].assert_exact(None, seq_len=8, heads=1)
    except ModuleNotFoundError as error:
        message = str(error)
    else:
        message = "none"
    assert "pip install 'startrail-jax[testing]'" in message, f"message without chex: {message}"


def run_example(readme: Path) -> None:
    """Runs the first Python block of README that imports the package."""
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    example = next(block for block in blocks if "import startrail_jax" in block)
    exec(compile(example, str(readme), "exec"), {"__name__": "example"})


if __name__ == "__main__":
    present = [name for name in NOT_INSTALLED if importlib.util.find_spec(name)]
    assert not present, f"this environment has more than the wheel: {present}"
    modules = import_every_module()
    check_message_without_chex()
    run_example(Path(sys.argv[1]))
    print(f"{len(modules)} modules imported, and README's example run")
