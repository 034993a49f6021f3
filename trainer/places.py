"""Where a run may read and write: folders of a file system, and stores by their URL."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from startrail_jax.errors import InputError

_HOST = re.compile(r"[^:]*(:\d*)?")
"""A bucket or a host, with a port or none."""
COPIES = "copies"
"""Folder of a cache, or beside the runs, for copies of data that are in a store."""
TOKENS = "tokens"
"""Folder beside the runs for the tokens of text."""
_OF_DISK = ("file", "local")
_WITH_REVISION = "hf://"
"""Stores whose URLs may name a revision after an @."""
_BEGIN_OF_HOST = re.compile(":/+|//")
"""What is in front of a user or a host. Of //, pathlib makes a single /."""
_BEGIN_OF_REVISED = re.compile(rf"(?<![\w+.-]){_WITH_REVISION.rstrip('/')}/+$")
_HOST_WITH_PATH = re.compile(r"[^/@?#]+\.[^/@?#.]+/")
_QUERY = re.compile("[?#]")
_COPYING = "rclone copy, gcloud storage rsync or aws s3 sync"
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


def folder_here(url: str) -> Path:
    """The folder on this machine for a run in a store: runs/gs/bucket/mine for gs://bucket/mine.

    Raises:
        ValueError: if the URL is that of no store, or has the name of another folder of runs.
    """
    _check_not_of_disk("run_dir", url)
    protocol, _, rest = url.partition("://")
    folder = Path("runs", protocol, rest)
    if folder.name in (COPIES, TOKENS):
        raise InputError(
            f"run_dir must not be called {folder.name}, as a folder beside the runs is; got "
            f"{url!r}. Use another."
        )
    return folder


def is_copy(path: Path | None, cache: Path) -> bool:
    """Whether a path is that of a copy of data in a store, in a cache."""
    return path is not None and path.is_relative_to(cache / COPIES)


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


def check_on_disk(name: str, path: Path | None) -> None:
    """Raises ValueError if a file or a folder to read, of which no copy is made, is in a store."""
    if path is not None and is_in_store(path):
        raise InputError(
            f"{name} must be on a disk; got {without_secret(text_of(path))!r}. Copy it to one "
            f"first: {_COPYING}."
        )


def check_input(name: str, path: Path | None) -> None:
    """Raises ValueError if data are in a store and their URL cannot be used."""
    if path is None or not is_in_store(path):
        return
    url = text_of(path)
    check_url(name, url, hint="Use for example gs://bucket/data.")
    _check_not_of_disk(name, url)


def is_of_disk(url: str) -> bool:
    """Whether a URL is that of a folder of this machine."""
    return url.partition("://")[0] in _OF_DISK


def _check_not_of_disk(name: str, url: str) -> None:
    if is_of_disk(url):
        raise InputError(
            f"{name} must be a path if it is on this machine; got {url!r}. Use "
            f"{urlsplit(url).path}."
        )


def is_inside(path: Path, folder: str) -> bool:
    """Whether a folder in a store lies in data, or is the same."""
    return is_in_store(path) and f"{folder}/".startswith(f"{text_of(path)}/")


def without_secret(text: str) -> str:
    """A text to show, without what may be a secret in a URL or in a part of one.

    Hidden are, in each word, users and passwords, which end at the last @ because a password may
    hold a / or another @, and queries and fragments, which may hold keys. Too much is hidden rather
    than too little, but for names that are no secret: a revision in a URL of Hugging Face, and an @
    in a path below a host that has a dot, and neither user nor port, in its name.
    """
    return re.sub(r"\S+", lambda match: _word_without_secret(match[0]), text)


def _word_without_secret(word: str) -> str:
    before, _, rest = word.rpartition("@")
    begin = _BEGIN_OF_HOST.search(before)
    start = begin.end() if begin else 0
    shown, user = before[:start], before[start:]
    is_name = ":" not in user and (
        begin is None or _BEGIN_OF_REVISED.search(shown) or _HOST_WITH_PATH.match(user)
    )
    if not is_name:
        word = f"{'' if '@' in shown else shown}***@{rest}"
    found = _QUERY.search(word)
    if found is None or found.end() == len(word):
        return word
    place, query = word[: found.start()], word[found.end() :]
    holds_key = _BEGIN_OF_HOST.search(place) is not None or "=" in query
    # The quotation mark or bracket behind a URL is no part of it.
    closing = query[len(query.rstrip("'\")>],.;:")) :]
    return f"{place}{found[0]}***{closing}" if holds_key else word


def check_mirror(url: str) -> None:
    """Raises ValueError unless a text is the URL of a folder in a store, without secrets."""
    hint = "Use for example --mirror gs://bucket/runs/mine."
    check_url("mirror", url, hint=hint)
    if not urlsplit(url).path.strip("/"):
        raise InputError(
            f"mirror must name a folder below the bucket or the root; got mirror={url!r}. {hint}"
        )


def check_url(name: str, url: str, *, hint: str) -> None:
    """Raises ValueError unless a text is a URL without secrets.

    Args:
        name: the setting that gives it, for errors.
        url: the text.
        hint: a sentence with an example.
    """
    try:
        parts = urlsplit(url)
        has_secret = bool(parts.query or parts.fragment or not _HOST.fullmatch(parts.netloc))
    except ValueError as error:
        if "@" not in url:
            raise InputError(
                f"{name} must be the URL of a store; got one whose bucket or host cannot be read, "
                f"as with a [ in it. {hint}"
            ) from error
        has_secret = True
    # A secret may have a / in it, so that the @ comes after what looks like the host.
    if has_secret or ("@" in url and not url.startswith(_WITH_REVISION)):
        # The message must not show them either.
        raise InputError(
            f"{name} must hold no password, key or token, as config.json keeps it; got a URL with "
            "an @, ? or # in it, or with a : before its path that begins no port. Give secrets as "
            "the package of the store takes them: by its environment variables, or by files in "
            "the home folder."
        )
    is_plain = "://" in url and "::" not in url and not {".", ".."} & set(url.split("/"))
    if not parts.scheme or not is_plain:
        raise InputError(f"{name} must be the URL of a store; got {name}={url!r}. {hint}")
