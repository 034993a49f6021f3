"""Errors that are for the user: their message alone says what to change.

A message states what must hold, what was given, and what to do, so a program may show it without a
traceback. Any other error is a fault of the program itself, and should keep its traceback. Every
class here is also a built-in type, which is what callers catch.
"""


class UserError(Exception):
    """Base class of all errors that are for the user. Only subclasses of it are raised."""


class InputError(UserError, ValueError):
    """An argument, a setting or the content of a file is not what it must be."""


class UnsupportedError(UserError, NotImplementedError):
    """What was asked for is sensible, but does not exist here."""


class BalanceWarning(UserWarning):
    """Some devices have much more attention to compute than others, and another layout helps."""


class ShapeWarning(UserWarning):
    """Queries and keys have more heads than tokens: the two dimensions are probably swapped."""
