"""The flags that say which of several processes this is, and flags of other programs."""

import dataclasses
from pathlib import Path

import pytest

import train
from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from trainer.command_line import OTHER_NAMES
from trainer.data.files import find_files
from trainer.dit.config import ImageOptions
from trainer.gpt.config import TextOptions
from trainer.network.options import Distributed
from trainer.run.settings import settings_of

pytestmark = pytest.mark.quick


def given(**changes):
    return Distributed(**{"coordinator": "localhost:7777", "processes": 2, "index": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": None}, r"must be given together; got coordinator=.*, processes=2, index=None"),
        ({"coordinator": None}, r"must be given together; got coordinator=None.*Give the missing"),
        ({"index": 2}, r"index must be at least 0 and below .*; got index=2, processes=2"),
        ({"index": -1}, r"index must be at least 0.*; got index=-1, processes=2"),
        ({"processes": 0, "index": 0}, r"index must be .* below .*; got index=0, processes=0"),
        ({"coordinator": "localhost"}, r"must be a host and a port; got coordinator='localhost'"),
        ({"coordinator": ":7777"}, r"must be a host and a port; got coordinator=':7777'"),
        ({"coordinator": "localhost:http"}, r"a host and a port; got .*free there, such as"),
        ({"coordinator": "localhost:70000"}, r"a host and a port; got coordinator='localhost:7000"),
        ({"timeout": 0.0}, r"distributed.timeout must be above 0; got timeout=0.0"),
        ({"start_timeout": -1.0}, r"distributed.start_timeout must be above 0; got start_timeout="),
    ],
)
def test_processes_that_cannot_be_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        given(**changes)


def test_flags_say_which_process_this_is():
    flags = ["--distributed.coordinator", "[::1]:7777", "--distributed.processes", "2"]
    command = train.read_command_line([*flags, "--distributed.index", "0", "--mesh.team", "1"])
    assert command.distributed == given(coordinator="[::1]:7777", index=0)
    assert command.distributed.several
    assert command.distributed.coordinator_host == "::1"
    assert command.settings.mesh.team == 1
    assert train.read_command_line(["--distributed"]).distributed == Distributed(on=True)
    assert not train.read_command_line([]).distributed.several
    # It does not change what the run is.
    assert "distributed" not in vars(command.settings)


def test_other_names_lead_to_one_flag_that_there_is():
    programs = [
        [name.replace("_", "-") for name in settings_of(settings)]
        for settings in (gpt_tiny(), dit_digits(), TextOptions(), ImageOptions())
    ]
    assert set(OTHER_NAMES) <= {name for names in programs for name in names}
    for names in programs:
        others = [x for name in names for x in OTHER_NAMES.get(name, "").split()]
        assert len(others) == len(set(others))
        assert not set(others) & set(names)


def test_object_stores_are_refused_with_a_way_out():
    match = r"folder of a file system; got 'gs://bucket/run', .*fsync and rename.*--mirror gs://bucket/run"
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(gpt_tiny(), run_dir=Path("gs://bucket/run"))
    with pytest.raises(ValueError, match=r"got 's3:/bucket/a'. URLs are not read here: copy"):
        find_files(Path("s3://bucket/a"), "data.path")
