"""Makes a run folder from the copy of the run in a store.

    python -m trainer.mirror.fetch gs://bucket/runs/mine runs/mine
    python -m trainer.mirror.fetch gs://bucket/runs/mine runs/mine --step 400

URL is the --mirror of the run, which may still be training. FOLDER is a new folder, which sample.py
and trainer.gpt.export take. train.py fetches by itself, with --mirror.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from startrail_jax.errors import InputError
from trainer import durable
from trainer.config import TrainConfig
from trainer.errors import RunError, StorageError
from trainer.mirror.contents import (
    CONSTANT_FOLDERS,
    TEXTS,
    DamagedCopyError,
    Manifest,
    digest,
    local_steps,
    read_id,
)
from trainer.mirror.store import Store, StoredCopy, reading
from trainer.places import check_folder, check_mirror, is_inside, text_of
from trainer.printable import printable
from trainer.run.commands import command
from trainer.run.folder import locked, require_writable
from trainer.run.settings import CHECKPOINTS_FOLDER, CONFIG_FILE

FETCHED = "fetched.part"
"""Folder of a run for what is being fetched, of which nothing counts yet."""


def say(line: str) -> None:
    """Prints a line."""
    print(printable(line), flush=True)


def preparation(config: TrainConfig) -> Callable[[], None] | None:
    """What brings the checkpoints of a run into its folder before it begins; None if nothing does.

    Raises:
        ValueError: if the run has a mirror and no steps.
    """
    if config.mirror is None or config.plan == "show":
        return None
    if not config.steps:
        raise InputError(
            f"mirror copies the checkpoints of a run that trains; got mirror={config.mirror}, "
            "steps=0. Leave it out: the run that trains copies what was imported."
        )
    data = getattr(config, "data", None)
    for name in ("path", "validation_path"):
        path: Path | None = getattr(data, name, None)
        if path is not None and is_inside(path, config.mirror):
            raise InputError(
                "mirror must not lie in the data of the run, which it would change; got "
                f"mirror={config.mirror}, {name}={text_of(path)}. Use another."
            )
    return partial(fetch_newer, config.mirror, config.run_dir)


def fetch_newer(url: str, run_dir: Path) -> None:
    """Fetches the newest whole checkpoint of a store if the run folder has an older one or none.

    Nothing of the folder is lost: a checkpoint is added.

    Raises:
        ValueError: if the store holds anything but a mirror.
        RuntimeError: if the folder has checkpoints of another run than the store, or another
            program trains there.
        OSError: if the store cannot be read, the folder cannot be written, or the store has
            copies of which none is whole.
    """
    with reading(url):
        store = Store(url)
        store.require_mirror()
        copies = store.copies()
        local = max(local_steps(run_dir), default=None)
        if not copies:
            if local is None and store.folders():
                say(f"WARNING: {url} has no whole checkpoint, only parts: the run begins anew")
            return
        if local is not None:
            require_same_run(store, copies, run_dir)

        def newer() -> Sequence[StoredCopy]:
            return after(local, store.copies())

        if newer():
            require_writable(run_dir)
            with locked(run_dir):
                _fetch_newest(store, newer, run_dir, may_stay=local is not None)


def require_same_run(store: Store, copies: Sequence[StoredCopy], run_dir: Path) -> None:
    """Raises RuntimeError if a folder with checkpoints and a store hold different runs."""
    for copy in reversed(copies):
        try:
            run = store.manifest(copy).run
        except DamagedCopyError:
            continue
        if run != read_id(run_dir):
            raise RunError(
                f"A run and its --mirror must be the same run; got {run_dir} with checkpoints of "
                f"its own, and {store.url} with another run, of step {copy.step}. Use another "
                "--mirror for this run, or another --run-dir for that one."
            )
        return


def after(local: int | None, copies: Sequence[StoredCopy]) -> Sequence[StoredCopy]:
    """The copies that are newer than the newest checkpoint of a folder."""
    known = [i for i, copy in enumerate(copies) if local is not None and copy.step <= local]
    return copies[max(known, default=-1) + 1 :]


def _fetch_newest(
    store: Store,
    wanted: Callable[[], Sequence[StoredCopy]],
    run_dir: Path,
    *,
    may_stay: bool = False,
) -> None:
    """Fetches the newest whole one of some copies; there may be none if `may_stay`.

    They are listed again after each that is not whole, since a run that trains adds and removes.
    """
    bad: list[StoredCopy] = []
    while left := [copy for copy in wanted() if copy not in bad]:
        copy = left[-1]
        try:
            manifest = store.manifest(copy)
            store.require_complete(manifest)
            _fetch(store, manifest, run_dir)
            return
        except (DamagedCopyError, FileNotFoundError) as error:
            bad.append(copy)
            say(
                f"WARNING: the copy of step {copy.step} in {store.url} is damaged: {error}. The "
                "one before it is used, if there is one."
            )
    if may_stay:
        return
    raise StorageError(
        f"A store with copies must have a whole one; got none in {store.url}, of steps "
        f"{', '.join(str(copy.step) for copy in bad)}. Use another --mirror to begin anew, or a "
        "--run-dir that has checkpoints."
    )


def _fetch(store: Store, manifest: Manifest, run_dir: Path) -> None:
    """Copies the files of a manifest to a run folder. The checkpoint appears last, and whole.

    Raises:
        DamagedCopyError: if a file is not what was copied.
        OSError: if the disk has too little space.
    """
    begun = run_dir / FETCHED
    shutil.rmtree(begun, ignore_errors=True)
    # The weights that never change may be here already, and large.
    there = {x for x in CONSTANT_FOLDERS if local_steps(run_dir) and (run_dir / x).is_dir()}
    files = {path: x for path, x in manifest.files.items() if path.split("/")[0] not in there}
    size = sum(x.bytes for x in files.values())
    if shutil.disk_usage(run_dir).free < size:
        raise StorageError(
            f"There must be space for {size / 1e9:.3g} GB in {run_dir}, to fetch step "
            f"{manifest.step} of {store.url}; got {shutil.disk_usage(run_dir).free / 1e9:.3g} GB. "
            "Free some, or use a --run-dir on another disk."
        )
    say(
        f"fetching step {manifest.step} from {store.url}: {len(files)} files, "
        f"{size / 1e9:.3g} GB, for {run_dir}"
    )
    try:
        store.get_files([(x.object, begun / path) for path, x in files.items()])
        for path, x in files.items():
            if digest(begun / path) != (x.bytes, x.sha256):
                raise DamagedCopyError(f"the checksum of {path} is another")
        for path in [begun, *begun.rglob("*")]:
            durable.flush(path)
        _move(begun, run_dir, manifest.step)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _move(begun: Path, run_dir: Path, step: int) -> None:
    for name in (*CONSTANT_FOLDERS, *TEXTS):
        if not (begun / name).exists():
            continue
        if (run_dir / name).is_dir():  # Of a run that was stopped before its first checkpoint.
            durable.remove(run_dir / name)
        (begun / name).replace(run_dir / name)
    durable.flush(run_dir)
    (run_dir / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
    durable.flush(run_dir)
    checkpoint = Path(CHECKPOINTS_FOLDER, str(step))
    (begun / checkpoint).replace(run_dir / checkpoint)
    durable.flush(run_dir / CHECKPOINTS_FOLDER)


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What to fetch, and where to."""

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """The --mirror of a run."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder for the run, which must not exist or be empty."""
    step: int | None = None
    """Step of the checkpoint. The default is the newest one that is whole."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, exits with status 1 or 2."""
    prog = "python -m trainer.mirror.fetch"
    options = tyro.cli(FetchOptions, prog=prog, description=__doc__, args=arguments)
    url, folder = options.url, options.folder
    check_mirror(url)
    check_folder("FOLDER", folder)
    if folder.exists() and (not folder.is_dir() or {x.name for x in folder.iterdir()} - {FETCHED}):
        raise InputError(
            f"FOLDER must not exist or be empty; got {str(folder)!r}. Use another. train.py with "
            "--mirror fetches into the folder of a run."
        )
    with reading(url):
        store = Store(url)

        def chosen() -> Sequence[StoredCopy]:
            return [copy for copy in store.copies() if options.step in (None, copy.step)]

        if not chosen():
            there = ", ".join(str(copy.step) for copy in store.copies()) or "none"
            what = "a checkpoint" if options.step is None else f"step {options.step}"
            raise InputError(
                f"URL must be a mirror with {what}; got {url}, with {there}. Use the --mirror of a "
                "run, and one of its steps."
            )
        require_writable(folder)
        _fetch_newest(store, chosen, folder)
    say(f"next: {command('sample.py', folder)}")
    say(f"next: {command('train.py', folder / CONFIG_FILE)} --run-dir {folder}")


if __name__ == "__main__":
    from trainer.run.exit import exit_on_ctrl_c, exit_on_user_errors

    with exit_on_user_errors(), exit_on_ctrl_c():
        main()
