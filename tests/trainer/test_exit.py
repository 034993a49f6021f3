"""How a program ends: a message for users, a traceback for every other error."""

import ast
import builtins
import re
import sys
import tomllib

import pytest

from programs import REPOSITORY, run_python
from startrail_jax.errors import InputError, UnsupportedError, UserError
from trainer import packages
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.errors import MissingPackageError, NonFiniteError, RunError, StorageError
from trainer.run import exit as program_exit
from trainer.run import settings
from trainer.run.exit import describe, end_now, exit_on_user_errors

BUILT_INS = {
    InputError: ValueError,
    UnsupportedError: NotImplementedError,
    MissingPackageError: ImportError,
    NonFiniteError: FloatingPointError,
    RunError: RuntimeError,
    StorageError: OSError,
    CheckpointError: RuntimeError,
}


@pytest.fixture
def said(monkeypatch):
    """The messages with which this process would end at once; in these tests it goes on."""
    said = []
    monkeypatch.setattr(program_exit, "end_now", said.append)
    return said


@pytest.mark.parametrize(("kind", "built_in"), BUILT_INS.items(), ids=lambda kind: kind.__name__)
def test_error_for_users_is_shown_without_a_traceback(kind, built_in):
    with pytest.raises(SystemExit) as caught, exit_on_user_errors():
        raise kind("devices must be 8; got devices=9. Use 8.")
    # Python prints a string and exits with status 1.
    assert caught.value.code == f"{kind.__name__}: devices must be 8; got devices=9. Use 8."
    assert issubclass(kind, built_in)
    assert issubclass(kind, UserError)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda: settings.settings_of(3), TypeError),
        (lambda: settings._decode(int | str | None, 3, ""), ValueError),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_fault_of_our_own_keeps_its_traceback(fault, kind, said):
    with pytest.raises(kind) as caught, exit_on_user_errors():
        fault()
    # One of several processes prints it itself, without waiting for the others.
    message = describe(caught.value)
    assert message.startswith("Traceback (most recent call last)")
    assert f"in {fault.__name__}" in message
    raised_in = [line for line in message.splitlines() if line.startswith("  File")][-1]
    assert "/trainer/" in raised_in
    assert message.splitlines()[-1].startswith(kind.__name__)
    assert not said
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_program_whose_save_failed_does_not_wait_for_its_threads(said):
    """Threads of orbax wait for minutes for a folder that a full disk has no room for."""
    with pytest.raises(SystemExit), exit_on_user_errors():
        raise CheckpointError("no space")
    assert not said
    with pytest.raises(SystemExit), exit_on_user_errors():
        raise CheckpointError("no space", ends_at_once=True)
    assert said == ["CheckpointError: no space"]


def test_end_now_does_not_wait():
    script = (
        "import atexit, threading; from trainer.run.exit import end_now; "
        "atexit.register(print, 'not reached'); print('so far', end=''); "
        "threading.Thread(target=end_now, args=['over']).start(); threading.Event().wait()"
    )
    result = run_python("-c", script)
    assert (result.returncode, result.stdout, result.stderr) == (1, "so far", "over\n")
    assert end_now.__annotations__["return"] == "NoReturn"


# Errors that no user sees: those of Python's protocols and of abstract methods, and those that are
# caught nearby and replaced by an error for users.
NOT_FOR_USERS = {
    "AttributeError(f'module {__name__!r} has no attribute {name!r}')",
    "TypeError(f'Attention.__call__ has no argument {name!r}. Leave it out.')",
    "NotImplementedError",
    "KeyboardInterrupt",
    "ValueError('a single array')",
    "ValueError('a stream without its end')",
    "ValueError('its checksum is another than when it was written')",
    "ValueError(f'{answers!r} for the ends {ends}')",
    "ValueError(f'{dtype} {list(shape)} for ends of the shape {list(whole)}')",
    "ValueError(f'{answer!r}, which is neither 0 nor 1,')",
}


def raised():
    """Every built-in error that the library or the program raises, as it is written."""
    names = {name for name, x in vars(builtins).items() if isinstance(x, type)}
    for name in ("startrail_jax", "models", "configs", "trainer", "train.py", "sample.py"):
        path = REPOSITORY / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file == REPOSITORY / "startrail_jax" / "testing.py":
                continue  # Its users are authors of tests, who want the traceback.
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                    if isinstance(kind, ast.Name) and kind.id in names:
                        yield f"{file.relative_to(REPOSITORY)}:{node.lineno}", ast.unparse(node.exc)


def test_errors_with_a_message_are_marked_as_for_users():
    unmarked = [place for place, error in raised() if error not in NOT_FOR_USERS]
    assert unmarked == [], "use a class of startrail_jax.errors or trainer.errors"


@pytest.mark.parametrize("program", ["train.py", "sample.py", "-m trainer.gpt.tokenize"])
def test_python_without_the_packages_says_which_one_has_them(program):
    """The `python` of a terminal in which nobody has activated .venv, say."""
    result = run_python("-S", *program.split(), "--help")
    assert result.returncode == 1
    found = " ".join(result.stderr.split())
    needs = f"MissingPackageError: This program needs packages that {sys.executable} d"
    assert found.startswith(needs)
    assert "not have: jax, flax, optax, orbax, grain, tyro" in found
    assert "pip install -e" in found or "activate" in found


def test_packages_of_the_extra_train_are_those_that_are_looked_for():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    of_train = {re.split("[<>=]", x)[0] for x in project["optional-dependencies"]["train"]}
    named = {"orbax": "orbax-checkpoint", "docstring_parser": "docstring-parser"}
    assert {named.get(x, x) for x in packages.NEEDED} == of_train | {"jax"}
    assert packages.missing() == []
