"""What the processes of a program must have alike."""

import pytest

from configs.dit import dit_digits
from configs.gpt import gpt_tiny
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import Distributed, MeshConfig
from trainer.dit.config import ImageOptions
from trainer.gpt.config import TextOptions
from trainer.run.settings import names_of_paths
from trainer.session import joined
from trainer.task import SampleOptions

PATHS_OF_DATA = ("path", "tokenizer", "chat_template", "validation_path", "cache")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (gpt_tiny(), {"init_from", "run_dir", *(f"data.{x}" for x in PATHS_OF_DATA)}),
        (dit_digits(), {"data.path", "run_dir"}),
        (TextOptions(), {"prompt_file", "tokenizer"}),
        (ImageOptions(), {"out"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_paths_may_differ_between_machines(settings, names):
    assert names_of_paths(settings) == names


def join(folder=None, **mesh):
    """The mesh and the log of a program on four devices."""
    options = SampleOptions(devices=4, mesh=MeshConfig(**mesh))
    call = gpt_tiny().attention_call
    with joined(Distributed(), options, kind="a test", call=call, folder=folder) as session:
        return session.mesh, session.description


def test_a_run_that_lost_its_degrees_says_so(tmp_path):
    _, description = join(tmp_path)
    assert not any("mesh.json" in line for line in description)
    (tmp_path / "config.json").touch()
    _, description = join(tmp_path)
    assert description[0].startswith(f"WARNING: {tmp_path} holds a run without mesh.json: ")


def test_order_and_nodes_of_the_flags_place_the_devices():
    flags = dict(team=2, group=1, devices_per_node=2)
    for order, ids, across in (
        (("rings_inside",), [0, 2, 1, 3], "team; inside: ring"),
        (("data", "group", "ring", "team", "head", "tensor"), [0, 1, 2, 3], "ring; inside: team"),
        (None, [0, 1, 2, 3], "ring; inside: team"),
    ):
        mesh, description = join(order=order, **flags)
        assert [device.id for device in mesh.devices.flat] == ids
        assert description[-1].startswith("nodes: 2 of 2 devices; axes from slow to fast: ")
        assert description[-1].endswith(f"across nodes: {across}")
    with refused(InputError, devices_per_node=3):
        join(devices_per_node=3)
