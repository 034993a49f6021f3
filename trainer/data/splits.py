"""The splits of a folder of tables, by the names that the Hub and the package datasets give."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from startrail_jax.errors import InputError

# Files that lie beside the tables of a dataset, and are not data.
COMPANIONS = re.compile(
    r"(README|LICENSE|NOTICE)(\.\w+)?|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|features\.json|metadata\.json",
    re.IGNORECASE,
)
# What follows the name of a split: -00000-of-00004, -00000-of-00004-0123456789abcdef, _1, .3.
NUMBER = re.compile(r"([-_.]\d+(-of-\d+)?(-[0-9a-f]{8,})?)+$")
# Names of files that say nothing about their split; then the folder does.
ANONYMOUS = re.compile(r"(data|part|shard|file|chunk|records|\d+)?", re.IGNORECASE)
# Folders that hold what their parent holds: all of a dataset, or a numbered part of it.
FOLDERS_OF_ALL = re.compile(r"|data|default|(part|shard|chunk|batch)[-_.]?\d+", re.IGNORECASE)
TRAIN = "train"
HELD_OUT = ("validation", "valid", "val", "dev", "test")
"""Names of what is held out; the first one that there is counts."""


def parts_of_tables(
    tables: list[str], keys: list[str], folder: Path
) -> tuple[list[str], list[str]]:
    """The files to train on, and those to hold out.

    If there is a split `train`, it is trained on, the first one of `HELD_OUT` that exists is held
    out, and the others are left out. If all files are of one split, nothing is held out by name.

    Args:
        tables: paths of the tables, relative to the folder.
        keys: those of all files.
        folder: the folder, for errors.

    Raises:
        ValueError: if there are several splits, of which none is `train`, or several configs.
    """
    # Other files are refused where kinds are compared.
    others = [
        key
        for key in keys
        if key not in tables and not COMPANIONS.fullmatch(PurePosixPath(key).name)
    ]
    splits: dict[str, list[str]] = {}
    for key in tables:
        splits.setdefault(split_of(key), []).append(key)
    _require_one_config(splits, folder)
    if TRAIN in splits:
        held_out = next((splits[name] for name in HELD_OUT if name in splits), [])
        return splits[TRAIN] + others, held_out
    if len(splits) > 1:
        raise InputError(
            "A folder of tables must have a split 'train', or one split alone; got the splits "
            f"{', '.join(map(repr, sorted(splits)))} in {str(folder)!r}. Give the files of one "
            "split, in a folder of their own (links will do), and those of another as "
            "--data.validation-path."
        )
    return tables + others, []


def _require_one_config(splits: dict[str, list[str]], folder: Path) -> None:
    """Raises if the splits of several datasets lie beside each other, as configs on the Hub do."""
    known = [key for name in (TRAIN, *HELD_OUT) for key in splits.get(name, [])]
    configs: dict[tuple[str, ...], str] = {}
    for key in known:
        above = _split_and_folder(key)[1]
        name = tuple(x for x in above.parts if not FOLDERS_OF_ALL.fullmatch(x))
        configs.setdefault(name, str(above))
    if len(configs) > 1:
        raise InputError(
            "A folder of tables must hold the splits of one config of a dataset; got the configs "
            f"{', '.join(map(repr, sorted(configs.values())))} in {str(folder)!r}. Give one: "
            f"--data.path {folder / configs[max(configs)]}. For several, give a folder with the "
            "files (or links to them) in the folders 'train' and 'validation'."
        )


def split_of(key: str) -> str:
    """The name of the split of a file, from its name or those of its folders; empty without one."""
    return _split_and_folder(key)[0]


def _split_and_folder(key: str) -> tuple[str, PurePosixPath]:
    """The split of a file, and the folder of the file or folder that is named so."""
    path = PurePosixPath(key)
    for place, stem in ((path, path.stem), *((x, x.name) for x in path.parents)):
        name = NUMBER.sub("", stem)
        # As in mnist-train.array_record-00000-of-00004 of TFDS.
        *_, last = name.split("-")
        if last in (TRAIN, *HELD_OUT):
            return last, place.parent
        if not ANONYMOUS.fullmatch(name) and not FOLDERS_OF_ALL.fullmatch(name):
            return name, place.parent
    return "", PurePosixPath()
