"""Errors: a test asserts the type, and the names and values that the message must contain."""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(error, *words, **given):
    """Passes if an error of just this type is raised that names these words and `key=value`."""
    with pytest.raises(error) as raised:
        yield raised
    assert raised.type is error
    text = " ".join(str(raised.value).split())
    named = [*words, *(f"{key}={value!r}" for key, value in given.items())]
    assert [name for name in named if name not in text] == [], text


def message_of_sample(*arguments):
    """What sample.py says when it ends with status 1."""
    # Imported here, since tests of the op need nothing of the programs.
    import sample
    from trainer.run.exit import exit_on_user_errors

    with pytest.raises(SystemExit) as caught, exit_on_user_errors():
        sample.sample([*map(str, arguments)])
    # Python prints a string and exits with status 1.
    assert isinstance(caught.value.code, str)
    return caught.value.code


def usage_error(capsys, read, arguments):
    """What a command line says that cannot be read, without the lines and boxes of a terminal."""
    with pytest.raises(SystemExit) as caught:
        read([*map(str, arguments)])
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())
