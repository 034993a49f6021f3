"""Names of the weights that are not trained (`--frozen`). Imports no jax."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from startrail_jax.errors import InputError


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """The names of weights that match some of the patterns of `TrainConfig.frozen`.

    Args:
        names: the paths of all weights of a model without adapters.
        patterns: as in the shell; a * also stands for slashes.

    Raises:
        InputError: if a pattern matches no weight, or if they match all.
    """
    frozen = set[str]()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(
                "frozen must hold patterns that match names of weights, such as "
                f"{', '.join(_near(pattern, [*names]))}; got {pattern!r}, which matches none. A * "
                "stands for any characters: '*norm*' matches all norms."
            )
        frozen.update(matched)
    if patterns and len(frozen) == len(names):
        raise InputError(
            "frozen must leave some weights to train; got "
            f"{' '.join(map(repr, patterns))}, which match all {len(names)}. Leave one out."
        )
    return frozen


def _near(pattern: str, names: Sequence[str]) -> Sequence[str]:
    """A few names with a component like one of the pattern's; else the first names."""
    parts = [x.strip("*").lower() for x in pattern.split("/")]

    def is_near(name: str) -> bool:
        return any(
            difflib.get_close_matches(component, name.split("/"))
            for component in parts
            if component
        )

    return list(filter(is_near, names))[:3] or names[:3]
