"""Opens object stores by their URLs, with errors that say what to do. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from startrail_jax.errors import InputError, UserError
from trainer.errors import MissingPackageError, StorageError
from trainer.places import is_of_disk, without_secret

FILES_AT_A_TIME = 8
"""Files that are copied at once. Packages take all that they are given, with a buffer for each."""


def open_url(url: str, flag: str) -> tuple[Any, str]:
    """The file system of a URL, as fsspec has it, and the path in it.

    Args:
        url: the URL.
        flag: the flag that gives it, for errors: "--mirror".

    Raises:
        ImportError: if a package is missing.
        ValueError: if fsspec does not know the kind of store.
    """
    try:
        import fsspec
    except ImportError as error:
        raise _missing("fsspec", url, flag) from error
    options: dict[str, Any] = {"auto_mkdir": True} if is_of_disk(url) else {}
    try:
        # What another program has written must be seen.
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise _missing(str(error), url, flag) from error
    except ValueError as error:
        raise InputError(
            f"{flag} must be a URL of a store that fsspec knows; got {url}: {error}. Use for "
            "example gs:// or s3://."
        ) from error
    return fs, root.rstrip("/")


@contextmanager
def reading_store(url: str, flag: str) -> Iterator[None]:
    """Turns whatever a store raises into an error for the user.

    Raises:
        OSError: if its body raises an error that is not for the user yet.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Each package has errors of its own.
        raise StorageError(
            f"The store of {flag} must be there, and be open to this program; got {url}: "
            f"{short(error)}. Correct the URL, the credentials, the network or the disk; then the "
            "same command goes on."
        ) from error


def short(error: Exception) -> str:
    """The type and the message of an error, without what may be a secret in a URL."""
    return without_secret(f"{type(error).__name__}: {error}").rstrip(".")[:500]


def batches(files: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """What is copied at once."""
    for first in range(0, len(files), FILES_AT_A_TIME):
        yield files[first : first + FILES_AT_A_TIME]


def _missing(what: str, url: str, flag: str) -> MissingPackageError:
    return MissingPackageError(
        f"{flag} {url} must have the packages of its store; got none ({what.rstrip('.')}). "
        "Install them; those of gs:// and s3:// are an extra: pip install -e '.[stores]'. Or leave "
        "the flag out."
    )
