"""Which versions of the code and of jax a run was trained with. Imports no jax."""

from __future__ import annotations

import functools
import json
import subprocess
from importlib import metadata
from pathlib import Path

from trainer.durable import replace_text
from trainer.printable import say
from trainer.run.commands import CHECKOUT

VERSIONS_FILE = "versions.json"
PACKAGES = ("startrail-jax", "jax", "jaxlib", "flax", "optax")
COMMIT = "commit"


@functools.cache
def current_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, and the commit of the checkout.

    What is not known is left out: the commit where there is no git, and the version of a checkout
    that is not installed.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if commit := _commit(CHECKOUT):
        versions[COMMIT] = commit
    return versions


def record_versions(run_dir: Path, step: int) -> str | None:
    """Notes in the folder of a run which versions train it from a step on.

    The file is a list, with one entry for each time that the versions have changed.

    Args:
        run_dir: folder of the run.
        step: number of steps that are done.

    Returns:
        A line for the log if the steps before were done with other versions.
    """
    path = run_dir / VERSIONS_FILE
    now, before, entries = current_versions(), None, []
    try:
        if step and path.exists():
            entries = list(json.loads(path.read_text()))
            before = dict(entries[-1]["versions"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        entries = []
        say(f"WARNING: {path} is damaged ({type(error).__name__}: {error}): it is begun anew")
    if before == now:
        return None
    entries.append({"after_step": step, "versions": now})
    replace_text(path, json.dumps(entries, indent=2))
    if before is None:
        return None
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = (f"{x} {before.get(x, 'unknown')} there, {now.get(x, 'unknown')} now" for x in names)
    return f"NOTE: other versions than those that the run began with: {'; '.join(changes)}"


def _commit(folder: Path) -> str | None:
    """The commit of a checkout, with "-dirty" if files are changed; None if it is not one."""
    if not (folder / ".git").exists():  # git would find a repository around the folder.
        return None
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
