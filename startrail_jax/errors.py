"""Errors for the user, whose messages say what to change.

A message states what must hold, what was given, and what to do, so a program may show it without a
traceback. Any other error is a bug of the program itself, and should keep its traceback. Every
class here also derives from a built-in error, which callers can catch.
"""


class UserError(Exception):
    """Base class of all errors for the user. Only its subclasses are raised."""


class InputError(UserError, ValueError):
    """An argument, a setting or the content of a file is invalid."""


class UnsupportedError(UserError, NotImplementedError):
    """The request is sensible, but not supported here."""


class BalanceWarning(UserWarning):
    """Some devices have much more attention to compute than others, and another layout helps."""


class ShapeWarning(UserWarning):
    """Queries and keys have more heads than tokens: the two dimensions are probably swapped."""
