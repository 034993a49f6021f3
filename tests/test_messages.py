"""The table of messages, and the fixture that compares errors with it."""

import pytest

import messages
from startrail_jax.errors import InputError, UnsupportedError

pytestmark = pytest.mark.quick

RIGHT = "window must be at least 1; got window=..., causal=True."


def check(refusal, *named, error=InputError, **given):
    texts = {"op/test_it.py::test_it": {RIGHT}}
    with messages.refuser("op/test_it.py::test_it", texts, is_written=False)(
        error, *named, **given
    ):
        raise refusal


def test_error_of_the_table_passes():
    for window in (0, -1):
        refusal = InputError(f"window must be at least 1;\n got window={window}, causal=True.")
        check(refusal, "causal=True", window=window)


@pytest.mark.parametrize(
    ("refusal", "given"),
    [
        (UnsupportedError("window must be at least 1; got window=0, causal=True."), {}),
        (ValueError("window must be at least 1; got window=0, causal=True."), {}),
        (InputError("window must be at least 1; got window=1, causal=True."), {}),
        (InputError("window must be at least 2; got window=0, causal=True."), {}),
        (
            InputError("window must be at least 1; got window=0, causal=True."),
            {"error": ValueError},
        ),
    ],
    ids=["type", "base type", "value", "text", "base type expected"],
)
def test_any_other_error_fails(refusal, given):
    with pytest.raises((AssertionError, UnsupportedError, ValueError)):
        check(refusal, window=0, **given)


def test_table_holds_what_was_written(tmp_path):
    texts = {"op/test_b.py::test_b": {"Two.", "One."}, "op/test_a.py::test_a": {"* `x` must be."}}
    page = tmp_path / "messages.md"
    messages.write(texts, page)
    assert messages.read(page) == texts
    assert page.read_text().index("One.") < page.read_text().index("Two.")


def test_table_names_tests_that_exist():
    for name in messages.read():
        file, _, test = name.partition("::")
        text = (messages.TABLE.parent / file).read_text()
        assert f"\ndef {test}(" in text, f"{name}: remove its section from {messages.TABLE.name}"
