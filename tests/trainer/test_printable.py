"""Control characters never reach a terminal: each place that prints escapes them."""

import io
import sys

import pytest

from programs import session_of_one
from startrail_jax.errors import InputError
from trainer.command_line import exit_with_usage_error
from trainer.printable import printable, say
from trainer.run import exit as program_exit
from trainer.run.metrics import Reporter

pytestmark = pytest.mark.quick

# Clears the screen, sets the title of the window, and shows text in the other direction.
HOSTILE = "a\x1b[2J\x9b2J\x07b\u202ec\r"
ESCAPED = "a\\x1b[2J\\x9b2J\\x07b\\u202ec\\r"


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def test_commands_for_a_terminal_are_escaped_in_any_parts():
    assert printable(HOSTILE) == ESCAPED
    assert "".join(map(printable, HOSTILE)) == ESCAPED
    assert printable("\x00\x7f\udcff\u2066") == "\\x00\\x7f\\udcff\\u2066"
    controls = [chr(x) for x in [*range(32), *range(127, 160)] if chr(x) not in "\n\t"]
    assert not set(controls) & set(printable("".join(controls)))
    for text in ("", "plain", "two\n\tlines", "é 漢字 🙂\u00a0", "\u200d\u0301"):
        assert printable(text) == text
    reporter = Reporter(steps=1, tokens_per_step=1)
    with reporter.phase(HOSTILE):  # Beside the bar.
        assert reporter._bar.tasks[0].description == ESCAPED


def print_error(kind):
    with program_exit.exit_on_user_errors():
        raise kind(HOSTILE)


@pytest.mark.parametrize(
    "show",
    [
        lambda: Reporter(steps=1, tokens_per_step=1).line(HOSTILE),
        lambda: say(HOSTILE),
        lambda: session_of_one().note(HOSTILE),
        lambda: program_exit.end_now(HOSTILE),
        lambda: exit_with_usage_error(HOSTILE),
        lambda: print_error(InputError),
    ],
    ids=["line", "say", "note", "end", "usage", "error"],
)
def test_what_is_shown_is_escaped(show, capsys, monkeypatch):
    monkeypatch.setattr("os._exit", sys.exit)
    code = None
    try:
        show()
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    # Python prints what `sys.exit` is given, unless it is a number.
    text = captured.out + captured.err + (code if isinstance(code, str) else "")
    assert ESCAPED in text
    assert not set("\x1b\x9b\x07\r\u202e") & set(text)


def test_sample_is_escaped_on_a_terminal_and_exact_in_a_file(monkeypatch):
    for stream, expected in [(FakeTerminal(), f"\n\t{ESCAPED}"), (io.StringIO(), f"\n\t{HOSTILE}")]:
        monkeypatch.setattr(sys, "stdout", stream)
        for character in f"\n\t{HOSTILE}":
            session_of_one().print(character, end="")
        assert stream.getvalue() == expected
