"""Where a run may write to: folders of a file system, and stores by their URL."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from startrail_jax.errors import InputError

_HOST = re.compile(r"[^:]*(:\d*)?")
"""A bucket or a host, with a port or none."""


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError if a folder to write to is in an object store."""
    # pathlib has made gs:/bucket of gs://bucket.
    if not path.parts[:1] or not path.parts[0].endswith(":"):
        return
    way_out = "then: rclone copy, gcloud storage rsync or aws s3 sync"
    if name == "run_dir":
        url = str(path).replace(":/", "://", 1)
        way_out = f"with --mirror {url}, to which every checkpoint is then copied"
    raise InputError(
        f"{name} must be a folder of a file system; got {str(path)!r}, which is in an object "
        "store, without the locks, fsync and rename that keep it whole. Use a disk, local or "
        f"shared (NFS, Lustre), {way_out}."
    )


def check_mirror(url: str) -> None:
    """Raises ValueError unless a text is the URL of a folder in a store, without secrets."""
    hint = "Use for example --mirror gs://bucket/runs/mine."
    try:
        parts = urlsplit(url)
        has_secret = bool(parts.query or parts.fragment or not _HOST.fullmatch(parts.netloc))
    except ValueError as error:
        if "@" not in url:
            raise InputError(
                "mirror must be the URL of a store; got one whose bucket or host cannot be read, "
                f"as with a [ in it. {hint}"
            ) from error
        has_secret = True
    # A secret may have a / in it, so that the @ comes after what looks like the host.
    if has_secret or "@" in url:
        # The message must not show them either.
        raise InputError(
            "mirror must hold no password, key or token, as config.json keeps it; got a URL with "
            "an @, ? or # in it, or with a : before its path that begins no port. Give secrets as "
            "the package of the store takes them: by its environment variables, or by files in "
            "the home folder."
        )
    if not parts.scheme or "://" not in url or "::" in url:
        raise InputError(f"mirror must be the URL of a store; got mirror={url!r}. {hint}")
    if not parts.path.strip("/"):
        raise InputError(
            f"mirror must name a folder below the bucket or the root; got mirror={url!r}. {hint}"
        )
