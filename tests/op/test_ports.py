"""Who sends what to whom, and what of it goes through the ports of the nodes."""

import itertools

import numpy as np
import pytest

import startrail_jax as st
from refusals import refused
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.analysis.messages import read_messages
from startrail_jax.devices.degrees import ROLES
from startrail_jax.devices.nodes import ORDERS, node_grid, nodes_of
from startrail_jax.errors import InputError
from startrail_jax.traffic.algorithms import GLOO, NCCL, halving
from startrail_jax.traffic.cost import default_order
from startrail_jax.traffic.ports import Messages, messages, orders_to_try

pytestmark = pytest.mark.quick

D = st.Degrees
PAPER = {"published": True}
SCHEMES = {
    "Ring Attention": (D.ring_attention(16), {}),
    "all-gather": (D.all_gather(16), {}),
    "Ulysses": (D.ulysses(16), {}),
    **{f"head {u}": (D.loongtrain(16, head=u), {}) for u in (2, 4, 8)},
    **{f"StarTrail, C = {c}": (D.startrail(16, c=c), {}) for c in (2, 4)},
    **{f"as published, C = {c}": (D.startrail(16, c=c), PAPER) for c in (2, 4)},
    **{f"team {a}": (D(team=a, ring=16 // a), {}) for a in (2, 4)},
    **{f"tiles, team {a}": (D(team=a, group=16 // a), {}) for a in (2, 4)},
    **{f"StarTrail x head {u}": (D.startrail(16, c=2, head=u), {}) for u in (2, 4)},
}
TOPOLOGIES = (1, 2, 4, 8)
"""Devices in a node, of 16."""
MODELS = [
    dict(heads=16, kv_heads=kv_heads, causal=causal)
    for kv_heads, causal in itertools.product((16, 4), (True, False))
]
SIZES = dict(batch=1, seq_len=512, head_dim=64, dtype="bfloat16")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SCHEMES)
def test_default_order_has_the_fewest_bytes_of_all_orders(name):
    """On all topologies, with and without grouped queries, causal and not."""
    degrees, options = SCHEMES[name]
    for model, devices_per_node in itertools.product(MODELS, TOPOLOGIES):
        nodes = nodes_of(range(16), devices_per_node)
        # A mesh is built before the sizes of a batch are known.
        chosen = default_order(degrees, nodes, model | options)
        total = st.communication(degrees, **SIZES, **model, **options).total
        sent = messages(degrees, total.transfers)
        every = {
            order: sent.through(node_grid(degrees, order, nodes).ravel()).port_bytes
            for order in orders_to_try(degrees)
        }
        assert every[chosen] <= 1.05 * min(every.values())
        assert chosen == ROLES or every[chosen] < every[ROLES]


def test_communication_takes_the_best_order_for_its_own_sizes():
    degrees, call = D(team=2, ring=8), SIZES | MODELS[0]
    best = st.communication(degrees, **call, devices_per_node=8)
    named = [st.communication(degrees, **call, devices_per_node=8, order=x) for x in ORDERS]
    assert best.total.nodes.port_bytes == min(x.total.nodes.port_bytes for x in named)
    assert best.order == ("data", "team", "group", "ring", "head", "tensor")


def test_order_matters():
    """Otherwise the test above would show nothing: the worst order of head 4 x ring 4 takes 3 x."""
    for name, ratio in (("head 4", 3.0), ("StarTrail, C = 2", 2.0), ("team 2", 1.3)):
        degrees, _ = SCHEMES[name]
        sent = [
            st.communication(
                degrees, **SIZES, **MODELS[0], order=order, devices_per_node=4
            ).total.nodes.port_bytes
            for order in ORDERS
        ]
        assert max(sent) > ratio * min(sent)


def test_ring_crosses_each_port_once():
    """Each key unit leaves every node once a round, by one of its devices."""
    call = dict(SIZES, heads=16, kv_heads=16, causal=False)
    degrees = D.ring_attention(16)
    report = st.communication(degrees, **call, devices_per_node=4)
    received, nodes = report.forward.received_bytes, report.forward.nodes
    assert nodes.sent == nodes.received == (received,) * 4
    assert nodes.inside == (3 * received,) * 4
    assert nodes.sent_by_device == (0, 0, 0, received) * 4
    assert nodes.received_by_device == (received, 0, 0, 0) * 4
    assert (nodes.port_sent_bytes, nodes.port_received_bytes) == (received, received)
    assert (nodes.port_bytes, nodes.inside_bytes) == (2 * received, 3 * received)
    assert report.order == ROLES


def test_devices_send_what_others_receive_and_the_busiest_receives_what_the_closed_form_says():
    for degrees, options in SCHEMES.values():
        total = st.communication(degrees, **SIZES, **MODELS[0], **options).total
        assert total.nodes is None
        matrix = messages(degrees, total.transfers).matrix
        assert matrix.sum(axis=0).max() == total.received_bytes
        assert (matrix.sum(axis=0) == matrix.sum(axis=1)).all()
        assert not np.diag(matrix).any()


@pytest.mark.parametrize(("members", "ratio"), [(2, 1), (4, 4 / 3), (8, 8 / 7)])
def test_gloo_sends_more_than_it_must_in_a_reduce_scatter(members, ratio):
    """Parts that lie in bit-reversed order go home in a message of their own."""
    text = f"""\
HloModule m, num_partitions={members}
add {{
  a = f32[] parameter(0)
  ROOT b = f32[] add(a, a)
}}
ENTRY main {{
  p = f32[{members},3]{{1,0}} parameter(0)
  ROOT s = f32[1,3]{{1,0}} reduce-scatter(p), replica_groups=[1,{members}]<=[{members}], \
dimensions={{0}}, use_global_device_ids=true, to_apply=add
}}
"""
    least = read_traffic(text).received_bytes
    assert least == (members - 1) * 12
    for algorithms, factor in ((NCCL, 1), (GLOO, ratio)):
        counted = read_messages(text, algorithms).matrix
        assert counted.sum(axis=0).max() == pytest.approx(factor * least)
        degrees = D(team=members)
        report = st.communication(degrees, **SIZES, heads=8, kv_heads=8, causal=False)
        steps = [x for x in report.total.transfers if x.collective == "reduce_scatter"]
        sent = messages(degrees, steps, algorithms).matrix.sum(axis=0).max()
        assert sent == pytest.approx(factor * sum(x.received_bytes for x in steps))


def test_gloo_halves_among_three_members():
    """Members 0 and 1 exchange halves, member 2 gives each of them one, and thirds go home."""
    sent = np.zeros((3, 3))
    for targets, share in halving(3):
        sent[range(3), targets] += float(share) * 2 / 3
    np.fill_diagonal(sent, 0)
    np.testing.assert_allclose(sent, [[0, 2 / 3, 0], [1 / 2, 0, 1 / 3], [1 / 2, 1 / 2, 0]])


def test_messages_know_how_many_devices_there_are():
    sent = Messages.of(3, {(0, 1): 5, (2, 0): 7})
    assert sent.through([0, 0, 1]).port_bytes == 7
    assert sent.through([0, 0, 1]).inside == (5, 0)
    with refused(InputError, "3 devices"):
        sent.through([0, 1])
