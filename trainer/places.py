"""Where a run may read and write: folders of a file system, and stores by their URL."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from startrail_jax.errors import InputError

_OF_DISK = ("file", "local")
_COPYING = "hf download, gcloud storage rsync, aws s3 sync or rclone copy"
"""Commands that copy a folder to a store or from it."""


def is_in_store(path: Path) -> bool:
    """Whether a path was given as a URL, of which pathlib makes gs:/bucket/folder."""
    return bool(path.parts) and path.parts[0].endswith(":")


def text_of(path: Path) -> str:
    """A path, or a URL, as it was given on the command line."""
    if not is_in_store(path):
        return str(path)
    protocol, _, rest = str(path).partition(":/")
    return f"{protocol}:///{rest}" if protocol in _OF_DISK else f"{protocol}://{rest}"


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError if a folder to write to is in an object store."""
    if not is_in_store(path):
        return
    url = without_secret(text_of(path))
    way_out = f"then: {_COPYING}"
    if name == "run_dir":
        way_out = f"with --mirror {url}, to which every checkpoint is then copied"
    raise InputError(
        f"{name} must be a folder of a file system; got {url!r}, which is in an object store, "
        "without the locks, fsync and rename that keep it whole. Use a disk, local or shared (NFS, "
        f"Lustre), {way_out}."
    )


def require_there(name: str, path: Path | None) -> None:
    """Raises unless there is a file or a folder, if a path is given."""
    if path is not None and not os.path.lexists(path):
        raise InputError(f"{name} must exist; got {str(path)!r}. {way_to(path)}")


def way_to(path: Path, otherwise: str = "Correct the path.") -> str:
    """What to do about a path that does not exist: something beside it may have nearly its name."""
    is_lost = path.parent.is_dir() and not os.path.lexists(path)
    near = difflib.get_close_matches(path.name, os.listdir(path.parent) if is_lost else [], n=1)
    return f"Did you mean {str(path.parent / near[0])!r}?" if near else otherwise


def check_on_disk(name: str, path: Path | None) -> None:
    """Raises ValueError if a file or a folder to read is in a store."""
    if path is not None and is_in_store(path):
        raise InputError(
            f"{name} must be on a disk; got {without_secret(text_of(path))!r}. Copy it to one "
            f"first: {_COPYING}."
        )


def is_of_disk(url: str) -> bool:
    """Whether a URL is that of a folder of this machine."""
    return url.partition("://")[0] in _OF_DISK


def without_secret(text: str) -> str:
    """A text to show, without what may be a secret in a URL: all before an @, and queries. Too much
    is hidden rather than too little, as a password may hold a / or an @."""
    text = re.sub(r"(\w+:/+)?\S*@", r"\1***@", text)
    return re.sub(r"(/\S*?[?#])[^\s'\")>]+", r"\1***", text)


def short(error: Exception) -> str:
    """The type and the message of an error, without what may be a secret in a URL."""
    return without_secret(f"{type(error).__name__}: {error}").rstrip(".")[:500]


def check_mirror(url: str) -> None:
    """Raises ValueError unless a text is the URL of a folder in a store, without secrets."""
    host, _, folder = url.partition("://")[2].partition("/")
    # Of Hugging Face, what follows an @ is a revision.
    signs = "[?#]" if url.startswith("hf://") and ":" not in host else "[@?#]"
    if re.search(signs, url) or not re.fullmatch(r"[^:]*(:\d*)?", host):
        # The message must not show them.
        raise InputError(
            "mirror must hold no password, key or token, as config.json keeps it; got a URL with "
            "an @, ? or # in it, or a : that begins no port. Give secrets as the package of the "
            "store takes them: by its environment variables, or by files in the home folder."
        )
    is_plain = "://" in url and "::" not in url and not {".", ".."} & set(url.split("/"))
    is_whole = folder.strip("/") and "[" not in host and (host or is_of_disk(url))
    if not is_plain or not is_whole:
        raise InputError(
            "mirror must be the URL of a folder in a store, below the bucket or the root; got "
            f"mirror={url!r}. Use for example --mirror gs://bucket/runs/mine."
        )
