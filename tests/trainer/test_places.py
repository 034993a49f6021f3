"""What is shown of a URL, and where secrets in one are taken to end."""

import pytest

from trainer.places import short, without_secret

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("OSError: http://me:sec/ret@host/x: no", "OSError: http://***@host/x: no"),
        ("http://me:sec@ret@host/api", "http://***@host/api"),
        ("http://me:sec?ret@host/api", "http://***@host/api"),
        ("http://me:sec#ret@host/api", "http://***@host/api"),
        ("http://me:sec//ret@host/api", "http://***@host/api"),
        ("http://me.x:8/sec@host", "http://***@host"),
        ("http://sec.ret@host", "http://***@host"),
        ("http://sec.ret@a.b/x/@scope", "http://***@scope"),
        ("http://sec/ret@host", "http://***@host"),
        ("s3:/key:secret@bucket/x", "s3:/***@bucket/x"),
        ("netloc 'me:secret@host' is none", "netloc ***@host' is none"),
        ("me:secret@host,http://other/x", "***@host,http://other/x"),
        ("s3://key:secret@bucket/x and s3://b/y", "s3://***@bucket/x and s3://b/y"),
        ("get 'https://host/x?sig=secret' now", "get 'https://host/x?***' now"),
        ("https://host/x#token=secret", "https://host/x#***"),
        ("https://host/x?a=sec?ret#secret", "https://host/x?***"),
        ("https://me:sec/ret@host/x?sig=secret", "https://***@host/x?***"),
        ("exceeded with url: /api/x?sig=secret", "exceeded with url: /api/x?***"),
        ("hf://me:secret@host", "hf://***@host"),
        ("shf://secret@host", "shf://***@host"),
    ],
)
def test_secrets_of_urls_are_hidden(text, shown):
    assert without_secret(text) == shown
    assert short(ConnectionError(text)) == f"ConnectionError: {shown}"
    assert without_secret(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "gs://bucket/runs/mine has no answer: 503?",
        "is https://a.b/x there?",
        "hf://datasets/me/books/train.txt",
        "look at x=1; is it #24?",
        "",
        "two\n  lines\twith  their white space ",
    ],
)
def test_text_without_secrets_stays(text):
    assert without_secret(text) == text
