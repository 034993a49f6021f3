"""The splits of a folder of tables, by the names that the Hub and the package datasets give."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from startrail_jax.errors import InputError

# Files that lie beside the tables of a dataset, and are not data.
COMPANIONS = re.compile(
    r"(README|LICENSE|NOTICE)(\.\w+)?|dataset_infos?\.json|dataset_dict\.json|state\.json"
    r"|features\.json|metadata\.json|_SUCCESS|_(common_)?metadata",
    re.IGNORECASE,
)
# What follows the name of a split: -00000-of-00004, -00000-of-00004-0123456789abcdef, _1, 0, and
# -00000-(a UUID)-c000.snappy as Spark writes it.
COUNT = r"\d+(-of-\d+)?"
HASH = r"(?=\d*[a-f])[0-9a-f]{8,}"
SPARK = r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}([-.]c\d+)?"
PACKED = r"\.(snappy|gz|zstd|lz4|lz4raw|br)"
NUMBER = re.compile(rf"[-_.]?{COUNT}([-_.]({COUNT}|{HASH}))*({SPARK})?({PACKED})?$")
# Words of names that say that there are splits. Other names say nothing of any.
SPLIT_WORD = re.compile(
    r"(?<![a-z])(train(ing)?|val(id|idation)?|dev(elopment)?|eval(uation)?|test(ing)?)"
    r"(set|data|split)?(?![a-z])",
    re.IGNORECASE,
)
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
    out, and the others are left out. If all files are of one split, or no name has a word for a
    split, nothing is held out by name.

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
        unnamed = splits.pop("", [])
        named = ", ".join([*map(repr, sorted(splits)), *(f"none ({x!r})" for x in unnamed[:1])])
        raise InputError(
            "A folder of tables must have a split 'train', or one split alone; got the splits "
            f"{named} in {str(folder)!r}. Give the files of one "
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
    """The split of a file, and the folder of the file or folder whose name says it."""
    path = PurePosixPath(key)
    for place, stem in ((path, path.stem), *((x, x.name) for x in path.parents)):
        name = NUMBER.sub("", stem)
        # As in mnist-train.array_record-00000-of-00004 of TFDS.
        *_, last = name.split("-")
        if last in (TRAIN, *HELD_OUT):
            return last, place.parent
        if SPLIT_WORD.search(name):
            return name, place.parent
    return "", PurePosixPath()
