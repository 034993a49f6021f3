"""What the processes of a program must have alike."""

import pytest

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from trainer.dit.config import ImageOptions
from trainer.gpt.config import TextOptions
from trainer.session import _names_of_paths


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            gpt_tiny(),
            {"data.path", "data.tokenizer", "data.validation_path", "data.cache", "run_dir"},
        ),
        (dit_digits(), {"data.path", "run_dir"}),
        (TextOptions(), {"prompt_file", "tokenizer"}),
        (ImageOptions(), {"out"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_paths_may_differ_between_machines(settings, names):
    assert _names_of_paths(settings) == names
