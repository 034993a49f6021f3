"""How Sphinx builds these pages: `sphinx-build -W --keep-going docs build/docs`."""

import inspect
import itertools
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# The notebooks run in processes of their own, which must find the checkout as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path
)

project = "startrail_jax"
author = "The startrail_jax authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["build"]

html_theme = "furo"
html_title = "startrail_jax"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# The notebooks hold no outputs: every build runs them, and an exception fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

# `x` in a docstring links to the documentation of x where there is any, and is code elsewhere.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False


NAMES = re.compile(r"^ +(?:\w[\w, ]*,\n +)+\w[\w, ]*: ", re.MULTILINE)
"""Names of arguments that fill more than a line; Napoleon wants them on one."""


def _list_table(rows: list[str]) -> list[str]:
    """A table of Markdown in reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for number, row in enumerate(rows):
        if number == 1:  # The rule below the header.
            continue
        for cell, text in enumerate(row.strip().strip("|").split("|")):
            lines.append(f"   {'*' if cell == 0 else ' '} - {text.strip()}")
    return [*lines, ""]


def _escape(line: str) -> str:
    """Asterisks are bullets at the start of a line and no markup elsewhere; `x`s is a plural."""
    bullet, rest = re.match(r"(\s*(?:\* )?)(.*)", line).groups()
    rest = re.sub(r"(`[^`]*`)|\*", lambda match: match[1] or r"\*", rest)
    return bullet + re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", rest)


def _to_restructured_text(app, what, name, obj, options, lines: list[str]) -> None:
    """Turns what differs in Markdown, as docstrings have it, into reStructuredText: tables, blocks
    of code that only an indent marks, and asterisks."""
    text = NAMES.sub(lambda match: re.sub(r",\s+", ", ", match[0]), "\n".join(lines))
    lines[:] = text.split("\n")
    result: list[str] = []
    is_code = False
    for is_table, group in itertools.groupby(list(lines), lambda line: line.startswith("|")):
        block = list(group)
        if is_table:
            result += _list_table(block)
            continue
        for line in block:
            text_before = next((x for x in reversed(result) if x.strip()), "")
            if not line.startswith("    "):
                is_code = is_code and not line.strip()
            elif not is_code and result and not result[-1].strip() and _is_prose(text_before):
                result += ["::", ""]
                is_code = True
            result.append(line if is_code else _escape(line))
    # Of an attribute, Napoleon takes words before a colon for a type, in its first line alone.
    is_attribute = what in ("attribute", "data", "property")
    lines[:] = ["..", "", *result] if is_attribute else result


def _is_prose(line: str) -> bool:
    return not re.match(r"\s|\* |- |:|\.\.", line)


class _Verbatim(str):
    """Printed in a signature as it is."""

    __repr__ = str.__str__


def _as_in_source(app, what, name, obj, options, signature, returns) -> tuple[str, str] | None:
    """Signatures with the annotations of the source, such as `Float[Array, "B T width"]`."""
    if what not in ("class", "function", "method"):
        return None
    try:
        found = inspect.signature(obj.__init__ if what == "class" else obj)
    except (TypeError, ValueError):
        return None
    parameters = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        default = parameter.default
        if default is not parameter.empty and repr(default).startswith("<"):
            default = _Verbatim(getattr(default, "__name__", "..."))
        annotation = parameter.annotation
        if isinstance(annotation, str):
            annotation = _Verbatim(annotation)
        parameters.append(parameter.replace(default=default, annotation=annotation))
    returned = found.return_annotation
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text, None if what == "class" or returned is found.empty else returned


def setup(app) -> None:
    # Napoleon, which reads sections such as "Args:", has priority 500.
    app.connect("autodoc-process-docstring", _to_restructured_text, priority=300)
    app.connect("autodoc-process-signature", _as_in_source)
