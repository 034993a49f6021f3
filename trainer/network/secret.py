"""The secret that the processes of a run share, and how each proves that it knows it.

Process 0 sends a random challenge. Whoever connects answers with a challenge of its own and a proof
(HMAC-SHA256 of both, keyed with the secret), and process 0 answers with its own proof. The secret
itself is never sent. All three lines have a fixed length, so that nobody can send more than one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from startrail_jax.errors import InputError
from trainer.errors import RunError, StorageError
from trainer.network.options import Distributed

VARIABLE = "STARTRAIL_SECRET"
SECRET_FILE = "secret"
"""The file of a run folder with the secret that process 0 made up."""
SHORTEST_SECRET = 16
LOOK_AGAIN_SECONDS = 0.2

CHALLENGE_LENGTH = 33
"""Of a challenge, in bytes: 128 random bits in hexadecimal digits, and the end of the line."""
PROOF_LENGTH = 65
ANSWER_LENGTH = CHALLENGE_LENGTH + PROOF_LENGTH
"""Of a challenge and the proof behind it."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What only the processes of a run know."""

    value: str = field(repr=False)
    """The secret. It must appear in no message."""
    place: str
    """Where it comes from, for messages."""

    def proof(self, role: str, theirs: bytes, own: bytes) -> bytes:
        """What only one who knows the secret can say to two challenges, as a line.

        Args:
            role: who proves, so that nobody can send a proof back to the one that it comes from.
            theirs: the challenge of process 0, as a line.
            own: the challenge of the other process, as a line.
        """
        text = role.encode() + b"\n" + theirs + own
        return hmac.new(self.value.encode(), text, "sha256").hexdigest().encode() + b"\n"


def make_challenge() -> bytes:
    """A random line."""
    return secrets.token_hex(16).encode() + b"\n"


def find_secret(options: Distributed, folder: Path | None, deadline: float) -> Secret:
    """The secret of the processes that share a run.

    It comes from the file of `--distributed.secret-file`, else from the environment, else from a
    file in the run folder. Process 0 makes that up if there is none, and the others wait for it.

    Args:
        options: which process this is, and the file if one is given.
        folder: the run folder; None if there is none.
        deadline: when to give up waiting, in seconds of `time.monotonic`.

    Raises:
        ValueError: if there is no secret, or it is too short.
        OSError: if the file cannot be read, or process 0 cannot write it.
        RuntimeError: if process 0 has not made up a secret in time.
    """
    if options.secret_file is not None:
        try:
            _check_rights(options.secret_file)
            return _checked(options.secret_file.read_text(), str(options.secret_file))
        except (OSError, UnicodeError) as error:
            raise StorageError(
                "distributed.secret_file must be a text file with the secret of all processes; got "
                f"{options.secret_file}: {error}. Correct the path, or the rights of the file."
            ) from error
    if VARIABLE in os.environ:
        return _checked(os.environ[VARIABLE], f"the environment variable {VARIABLE}")
    if folder is None:
        raise InputError(
            "Several processes must share a secret; got none, and no run folder to make one up in. "
            f"Set the same {VARIABLE} for all of them, or give --distributed.secret-file."
        )
    path = folder / SECRET_FILE
    if options.index == 0 and not path.exists():
        _make_up(path)
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunError(
                "Every process must see the same run folder, where process 0 puts a secret that "
                f"all must know; got no {path} within {options.start_timeout:g} s. Start process "
                f"0, mount the same folder everywhere, or set the same {VARIABLE} for all."
            )
        time.sleep(LOOK_AGAIN_SECONDS)
    try:
        return _checked(path.read_text(), str(path))
    except (OSError, UnicodeError) as error:
        raise StorageError(
            f"The secret of a run must be readable for all of its processes; got {path}: {error}. "
            f"Start all as the same user, or set the same {VARIABLE} for all."
        ) from error


def _make_up(path: Path) -> None:
    """Writes a new secret, which only this user may read. Nobody ever sees a part of it."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        part.replace(path)
    except OSError as error:
        raise StorageError(
            "Process 0 must be able to put a secret for the other processes into the run folder; "
            f"got {path.parent}: {error.strerror}. Fix that, use another folder, or set the same "
            f"{VARIABLE} for all processes."
        ) from error


def _check_rights(path: Path) -> None:
    """Raises unless others than the owner and the group are kept out of a file, if it is there.

    Kubernetes gives the group of a pod the right to read what it mounts.
    """
    mode = path.stat().st_mode if path.exists() else 0
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InputError(
            "distributed.secret_file must be readable for its owner and group only; got "
            f"{path} with mode {stat.S_IMODE(mode):04o}. Run: chmod 600 {path} (of a mounted "
            "Kubernetes secret, set defaultMode: 0400), and make a new secret if others saw it."
        )


def _checked(text: str, place: str) -> Secret:
    value = text.strip()
    if len(value) < SHORTEST_SECRET:
        raise InputError(
            f"The secret of a run must have at least {SHORTEST_SECRET} characters; got "
            f"{len(value)} from {place}. Use a random one, such as that of `openssl rand -hex 32`."
        )
    return Secret(value=value, place=place)
