"""Errors: a test asserts the type, and the names and values that the message must contain.

with refused(InputError, "must be at least 1", window=0):
    st.Attention(mesh, causal=True, window=0)
"""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(error, *words, **given):
    """Passes if an error of just this type is raised that names these words and `key=value`."""
    with pytest.raises(error) as raised:
        yield raised
    assert raised.type is error
    text = " ".join(str(raised.value).split())
    named = [*words, *(f"{key}={value!r}" for key, value in given.items())]
    assert [name for name in named if name not in text] == [], text
