"""Errors of a program that are for the user, beside `InputError` and `UnsupportedError`."""

from startrail_jax.errors import UserError


class MissingPackageError(UserError, ImportError):
    """A package is not installed that what was asked for needs."""


class NonFiniteError(UserError, FloatingPointError):
    """A loss or a gradient is infinite or not a number."""


class RunError(UserError, RuntimeError):
    """A run cannot start or go on, because of another program or another process."""


class StorageError(UserError, OSError):
    """A folder or a file cannot be written."""
