"""What the planner's page draws and packs, without a browser; `.ci/run page` tests it in one."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from startrail_jax.planner.planning import plan
from startrail_jax.planner.search import Search

PAGE = Path(__file__).parents[2] / "docs" / "planner_page"
sys.path.insert(0, str(PAGE))
import answers  # noqa: E402
import make_page  # noqa: E402

CLUSTER = dict(nodes=4, gpus_per_node=4, gpu="h100", port="100Gb/s", model="gpt_7b", seq_len="64K")


def pass_of(**degrees):
    found = plan(**CLUSTER, options=Search(degrees={**dict(data=1, tensor=1), **degrees}))
    return found, answers.forward_pass(found, found.winner)


def meetings(drawn):
    """How many GPUs attend each query to each key, if messages go as they are drawn."""
    queries = {device[0]: {device[0]} for device in drawn["devices"]}
    keys = {device: set(mine) for device, mine in queries.items()}
    met, of_cycle = Counter(), keys
    for stage in drawn["stages"]:
        is_round = stage["text"].startswith(("Round", "Each"))
        if is_round:
            for device in queries:
                met.update(itertools.product(queries[device], keys[device]))
        if stage["move"] is None or stage["kind"] == "outputs":
            continue
        flat = drawn["moves"][stage["move"]]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        if is_round or "where the rings" in stage["text"]:
            # What goes to the next cycle was there when this one began.
            outer = "inner cycle" in stage["text"]
            sent = of_cycle if outer else keys
            keys = {**keys, **{receiver: sent[sender] for sender, receiver in pairs}}
            of_cycle = keys if outer or not is_round else of_cycle
            continue
        before = {"queries": dict(queries), "keys": dict(keys)}
        for kind, units in (("queries", queries), ("keys", keys)):
            if stage["kind"] in (kind, "tokens"):
                for sender, receiver in pairs:
                    units[receiver] = units[receiver] | before[kind][sender]
        of_cycle = keys
    return met


@pytest.mark.parametrize(
    "degrees",
    [
        dict(ring=16),
        dict(group=16),
        dict(head=16),
        dict(group=2, ring=4, team=2),
        dict(group=4, ring=1, team=4),
        dict(head=4, team=2, ring=2),
        dict(head=2, team=4, group=2, ring=1),
    ],
    ids=str,
)
def test_drawn_messages_bring_every_key_to_every_query_once(degrees):
    found, drawn = pass_of(**degrees)
    assert sorted(device[0] for device in drawn["devices"]) == list(range(16))
    met = meetings(drawn)
    # Each of the GPUs that trade tokens for heads attends some of the heads.
    assert set(met.values()) == {found.winner.degrees.head}
    assert len(met) == 16**2


def test_drawn_messages_are_right_for_double_rings_and_the_paper():
    found, _ = pass_of(group=2, ring=4, team=2)
    published = found.baselines["StarTrail as published"]
    assert set(meetings(answers.forward_pass(found, published)).values()) == {1}
    found = plan(**CLUSTER, options=Search(degrees=dict(data=1, ring=16)))
    doubles = [x for x in (*found.ranked, *found.baselines.values()) if x.inner > 1]
    assert doubles
    for choice in doubles:
        assert set(meetings(answers.forward_pass(found, choice)).values()) == {1}


def test_packed_planner_needs_no_jax_and_plans_as_the_package(tmp_path):
    make_page.write_planner(tmp_path / "planner.zip")
    code = (
        "import sys; sys.modules['jax'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import answers; print(answers.__file__); print(answers.answer(sys.argv[2]))"
    )
    words = [sys.executable, "-P", "-c", code, tmp_path / "planner.zip", json.dumps(CLUSTER)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    place, answer = done.stdout.splitlines()
    assert "planner.zip" in place
    wanted = json.loads(json.dumps(plan(**CLUSTER).as_dict()))
    assert json.loads(answer)["plan"] == wanted
