"""Text as it may be shown on a terminal, whatever file, model or process it comes from."""

from __future__ import annotations

import sys
import unicodedata

# Control characters (ESC, which begins the commands of a terminal, among them), characters that
# change the order in which others are shown, and halves of characters, which cannot be written.
ESCAPED_CATEGORIES = ("Cc", "Cs")
ORDER_OF_TEXT = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
KEPT = "\n\t"


def printable(text: str) -> str:
    r"""The text with escapes for characters that would command a terminal: ESC becomes \x1b.

    New lines and tabs stay, so the text of a stream may be given in any parts.
    """
    if text.isprintable():
        return text

    def shown(x: str) -> str:
        commands = x in ORDER_OF_TEXT or unicodedata.category(x) in ESCAPED_CATEGORIES
        return x.encode("unicode_escape").decode() if commands and x not in KEPT else x

    return "".join(map(shown, text))


def say(line: str) -> None:
    """Prints a line to standard error, about work that takes long."""
    print(printable(line), file=sys.stderr, flush=True)
