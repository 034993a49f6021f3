"""Text as it may be shown on a terminal, whatever it comes from; times and sizes as text."""

from __future__ import annotations

import sys
import unicodedata

# Control characters (ESC, which begins the commands of a terminal, among them), characters that
# change the order in which others are shown, and halves of characters, which cannot be written.
ESCAPED_CATEGORIES = ("Cc", "Cs")
ORDER_OF_TEXT = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
KEPT = "\n\t"


def printable(text: str) -> str:
    r"""The text with escapes for characters that would command a terminal: ESC becomes \x1b. New
    lines and tabs stay, so the text of a stream may be given in any parts."""
    if text.isprintable():
        return text

    def shown(x: str) -> str:
        commands = x in ORDER_OF_TEXT or unicodedata.category(x) in ESCAPED_CATEGORIES
        return x.encode("unicode_escape").decode() if commands and x not in KEPT else x

    return "".join(map(shown, text))


def shortened(value: object, most: int = 200) -> str:
    """A value as Python writes it, up to some number of characters."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def duration(seconds: float) -> str:
    """A time as "1:23" (minutes and seconds) or "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def size_of(size: int) -> str:
    """A number of bytes as "1.50 GiB", or "3.0 MiB" below half a GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def say(line: str) -> None:
    """Prints a line to standard error, about work that takes long."""
    print(printable(line), file=sys.stderr, flush=True)
