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


class OrderWarning(UserWarning):
    """Tokens are, or may be, in another order or dimension than an attention expects.

    It comes when a call is traced, and from `attention.check_positions`, and only where there is
    something to see: no function of this process has used the layout yet, or segment ids or
    positions that are known in natural order. Nothing is noticed if tokens are in natural order
    after something else was brought into that of the layout, if ids and positions are traced
    (inside `jax.jit`) or on devices of other processes, if each row is one document, or if a
    compiled call is repeated. Heads in place of tokens are noticed only if queries and keys both
    have more of them than of tokens.
    """
