"""Errors: a test asserts the type and what was given, and the texts stand in one table.

    with refused(InputError, window=0):
        st.Attention(mesh, causal=True, window=0)

passes if an InputError is raised that names `window=0`, and if `tests/messages.md` has its text for
this test. After a change of words, `pytest --write-messages tests/op/test_mesh.py` writes what the
tests of that file found; read the difference as a user would read the messages.
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("messages.md")
HEAD = """# What errors say

`pytest --write-messages FILE` writes this page, and the tests compare. `window=...` stands for any
value of `window`, FOLDER for the folder of a test, TEMPORARY for that of all tests, CHECKOUT for
that of this repository, PYTHON for the interpreter, and 0x... for an address.
"""
FOUND = pytest.StashKey[dict[str, set[str]]]()
"""With --write-messages: the texts of all tests that ran."""


def read(page=TABLE):
    """The texts of each test, which is named by its file and its function."""
    texts, name = {}, ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
        elif line.startswith("* "):
            texts.setdefault(name, set()).add(line.removeprefix("* "))
    return texts


def write(texts, page=TABLE):
    sections = [
        f"\n## {name}\n\n" + "".join(f"* {text}\n" for text in sorted(texts[name]))
        for name in sorted(texts)
    ]
    page.write_text(HEAD + "".join(sections))


def refuser(name, texts, *, is_written, folders=()):
    """`refused` of a test.

    Args:
        name: the file and the function of the test.
        texts: of each test, those that are right.
        is_written: whether what is found is right, and joins them.
        folders: what has another path in each run or checkout, and the word for it.
    """

    @contextmanager
    def refused(error, *named, **given):
        with pytest.raises(error) as raised:
            yield raised
        assert raised.type is error
        text = " ".join(str(raised.value).split())
        text = text.replace("PartitionSpec(", "P(")  # As jax before 0.10 writes it.
        values = {f"{key}={value!r}": f"{key}=..." for key, value in given.items()}
        assert [x for x in (*named, *values) if x not in text] == [], text
        for value, dots in values.items():
            text = text.replace(value, dots)
        for folder, word in folders:
            text = text.replace(str(folder), word)
        text = re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text)
        if is_written:
            texts.setdefault(name, set()).add(text)
        assert text in texts.get(name, ()), "if this text is right: pytest --write-messages"

    return refused


@pytest.fixture
def refused(request):
    """An error of this type that names these words and values, with a text of the table."""
    name = request.node.nodeid.removeprefix("tests/").partition("[")[0]
    found = request.config.stash.get(FOUND, None)
    folders = [
        (sys.executable, "PYTHON"),
        (request.getfixturevalue("tmp_path_factory").getbasetemp(), "TEMPORARY"),
        (TABLE.parent.parent, "CHECKOUT"),
    ]
    if "tmp_path" in request.fixturenames:
        folders.insert(0, (request.getfixturevalue("tmp_path"), "FOLDER"))
    texts = read() if found is None else found
    return refuser(name, texts, is_written=found is not None, folders=folders)


def start(config):
    if config.getoption("--write-messages"):
        if hasattr(config, "workerinput") or config.getoption("numprocesses", None):
            raise pytest.UsageError("--write-messages needs one process: leave out -n.")
        config.stash[FOUND] = {}


def finish(config):
    if found := config.stash.get(FOUND, None):
        write(read() | found)
