"""What the processes of a program must have alike."""

import pytest

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from trainer.dit.config import ImageOptions
from trainer.gpt.config import TextOptions
from trainer.run.settings import names_of_paths

PATHS_OF_DATA = ("path", "tokenizer", "chat_template", "validation_path", "cache")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (gpt_tiny(), {"init_from", "run_dir", "export.dir", *(f"data.{x}" for x in PATHS_OF_DATA)}),
        (dit_digits(), {"data.path", "run_dir"}),
        (TextOptions(), {"prompt_file", "tokenizer"}),
        (ImageOptions(), {"decode", "text_encoder", "out"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_paths_may_differ_between_machines(settings, names):
    assert names_of_paths(settings) == names
