"""Linear attention over trees: a node begins with the state at the end of its parent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_attention import RULES, TOLERANCE, attention_on, close, inputs
from test_trees import draw, drawn, ends_of, group

import linear_oracle as oracle
import startrail_jax as st
from startrail_jax.analysis.messages import read_messages
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.linear.rules import GatedDelta
from startrail_jax.testing import assert_exact
from startrail_jax.tokens.trees import branch_slots
from startrail_jax.traffic.ports import messages


def parents_of(node, parent):
    """The token that each one continues, -1 if there is none, and -2 for padding."""
    last, found = {-1: -1}, []
    for place, own in enumerate(node.tolist()):
        found.append(last[own] if own in last else last[parent[own]])
        if own < 0:
            found[-1] = -2
        else:
            last[own] = place
    return np.array(found)


def trees(seed, length, depth=5, rows=2):
    """`visible_until` of drawn trees, and `parents_of` them."""
    found = drawn(seed, rows, length, depth)
    return np.stack([ends_of(*x) for x in found]), np.stack([parents_of(*x) for x in found])


def check_forks(attention, until, parents, *, levels=None, seed=0, tolerance=TOLERANCE):
    """Outputs and all gradients against the recurrence with forks."""
    rule, levels = attention.rule.name, levels or st.branch_levels(until)
    *tokens, _, dout, _ = inputs(rule, until.shape[1], seed=seed, batch=len(until))
    scale = tokens[0].shape[-1] ** -0.5 if rule != "ssd" else 1.0
    options = dict(delta=rule != "ssd", scale=scale, parents=parents)
    wanted, _ = oracle.tree_attention(*tokens, **options)
    gradients = oracle.tree_gradients(*tokens, dout, **options)

    @jax.jit
    def program(until, dout, *tokens):
        attend = functools.partial(attention, visible_until=until, levels=levels)
        out, pull = jax.vjp(attend, *tokens)
        return out, pull(dout)

    *sharded, dout = attention.shard(*tokens, dout)
    out, found = program(attention.shard(until), dout, *sharded)
    out = attention.unshard(out)
    close(out, np.where((parents > -2)[:, :, None, None], wanted, 0), tolerance, "out")
    names = "query", "key", "value", "decay", "beta"
    for name, x, y in zip(names, found, gradients, strict=True):
        close(attention.unshard(x), y, tolerance, name)


MESHES = [
    (st.Degrees(), "contiguous", 150),
    (st.Degrees(ring=3, data=2), "contiguous", 210),
    (st.Degrees(ring=2), "zigzag", 300),
    (st.Degrees.startrail(8, c=2), "contiguous", 96),
    (st.Degrees(ring=2, head=2, tensor=2), "zigzag", 64),
    (st.Degrees(ring=16), "contiguous", 64),
    (st.Degrees(ring=4, head=2), "zigzag", 32),
]


@pytest.mark.slow_except_every(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("degrees", "layout", "length"), MESHES)
def test_forks_are_exact(degrees, layout, length, rule, seed):
    """Against float64, token by token: 84 trees of depth 1 to 5, in 42 settings."""
    attention = attention_on(degrees, rule, layout=layout)
    number = seed * len(MESHES) + [x[2] for x in MESHES].index(length)
    check_forks(attention, *trees(100 + number, length), seed=number)


@pytest.mark.parametrize("rule", RULES)
def test_many_groups_and_more_levels_than_needed(rule):
    """Documents, groups with answers of one token, and beginnings of one token, in chunks of a
    loop; two groups a row begin in the middle of a device."""
    sizes = [(1, [1, 1, 1]), (30, [1, 40, 2, 7]), (13, []), (90, [1, 1]), (2, [60, 30])] * 2
    row, parents = np.zeros(0, np.int64), []
    for beginning, answers in sizes:
        start = len(row)
        row = np.r_[row, group(beginning, answers or [0], start)]
        parents += [-1, *range(start, start + beginning - 1)]
        at = start + beginning
        for answer in answers:
            parents += [start + beginning - 1, *range(at, at + answer - 1)]
            at += answer
    length = -(-len(row) // 8) * 8
    row = np.r_[row, [-1] * (length - len(row))]
    parents = np.r_[parents, [-2] * (length - len(parents))].astype(int)
    assert st.branch_levels(row[None]) == 2
    attention = attention_on(st.Degrees(ring=4), rule, layout="zigzag")
    check_forks(attention, row[None], parents[None], levels=3)


@pytest.mark.parametrize("rule", RULES)
def test_decays_that_forget_everything(rule):
    """Of a branch alone: what its siblings see does not change."""
    attention = attention_on(st.Degrees(ring=2), rule)
    until, parents = trees(7, 64)
    *tokens, _, _, _ = inputs(rule, 64)
    tokens[3] = tokens[3].copy()
    tokens[3][:, 5::9] = -np.inf
    options = dict(delta=rule != "ssd", scale=6**-0.5 if rule != "ssd" else 1.0, parents=parents)
    wanted, _ = oracle.tree_attention(*tokens, **options)
    levels = st.branch_levels(until)
    out = attention(*attention.shard(*tokens), visible_until=attention.shard(until), levels=levels)
    wanted = np.where((parents > -2)[:, :, None, None], wanted, 0)
    close(attention.unshard(out), wanted, TOLERANCE, "out")


@pytest.mark.parametrize("rule", RULES)
def test_forks_in_16_bits_and_by_the_public_check(rule):
    for dtype, layout in (("bfloat16", "contiguous"), ("float32", "zigzag")):
        attention = attention_on(st.Degrees(ring=2, team=2), rule, layout=layout)
        until, _ = trees(11, 128)
        assert_exact(attention, seq_len=128, heads=4, kv_heads=2, dtype=dtype, visible_until=until)


@pytest.mark.parametrize("rule", RULES)
def test_documents_are_trees_of_one_level(rule):
    attention = attention_on(st.Degrees(ring=4), rule)
    lengths = (13, 1, 70, 36)
    ids = np.repeat([0, 1, 2, 3, -1], (*lengths, 8))[None].repeat(2, 0)
    until = np.repeat([*np.cumsum(lengths), -1], (*lengths, 8))[None].repeat(2, 0)
    *tokens, _, _, _ = inputs(rule, 128)
    tokens = attention.shard(*tokens)
    by_ids = attention(*tokens, segment_ids=attention.shard(ids))
    by_ends = attention(*tokens, visible_until=attention.shard(until), levels=1)
    np.testing.assert_allclose(by_ends, by_ids, rtol=2e-6, atol=2e-6)


def test_local_takes_them_too():
    attention = attention_on(st.Degrees(ring=4), "gated_delta")
    until, _ = trees(3, 64)
    *tokens, _, _, _ = inputs("gated_delta", 64)
    *tokens, ends = attention.shard(*tokens, until)
    specs = (*(attention.heads_spec(x.shape[2], x.ndim) for x in tokens), attention.sequence_spec)
    levels = st.branch_levels(until)

    @functools.partial(jax.shard_map, mesh=attention.mesh, in_specs=specs, out_specs=specs[2])
    def local(*args):
        return attention.local(*args[:-1], visible_until=args[-1], levels=levels)

    wanted = attention(*tokens, visible_until=ends, levels=levels)
    np.testing.assert_allclose(local(*tokens, ends), wanted, atol=1e-7)


# Slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_slot_holds_the_state_that_a_token_continues(seed):
    """Slots token by token: what is found in one is what the parent wrote."""
    rng = np.random.default_rng(seed)
    node, parent = draw(rng, 60, 5)
    until, parents = ends_of(node, parent), parents_of(node, parent)
    slots, fresh = branch_slots(until[None])
    held = {}
    for place in np.flatnonzero(parents > -2):
        slot = slots[0, place] - fresh[0, place]
        assert held.get(slot, -1) == parents[place]
        held[slots[0, place]] = place
    assert st.branch_levels(until[None]) == len({*held})


def test_levels_are_the_ends_that_are_seen_at_once():
    assert st.branch_levels(group(20, [5, 6, 7])[None]) == 2
    assert st.branch_levels(np.arange(1, 9)[None]) == 1
    assert st.branch_levels(np.array([[-1, -1]])) == 1
    # The last answer takes the place of its beginning.
    assert st.branch_levels(group(20, [5])[None]) == 1
    with pytest.raises(InputError, match="nested"):
        st.branch_levels(np.array([[4, 4, 6, 4, 5, 6]]))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_trees_that_are_too_deep_give_nan_in_a_program(layout):
    attention = attention_on(st.Degrees(ring=4), "ssd", layout=layout)
    until, _ = trees(5, 64)
    levels = st.branch_levels(until)
    assert levels > 2
    *tokens, _, _, _ = inputs("ssd", 64)
    *tokens, ends = attention.shard(*tokens, until)
    x, kernel = tokens[2], jnp.ones((3, *tokens[2].shape[2:]))
    for short in (levels, levels - 1, 1):
        run = functools.partial(attention, levels=short)
        out = jax.jit(lambda ends, *tokens, run=run: run(*tokens, visible_until=ends))(
            ends, *tokens
        )
        conv = functools.partial(attention.causal_conv, levels=short)
        convolved = jax.jit(lambda ends, x, conv=conv: conv(x, kernel, visible_until=ends))(ends, x)
        for found in (out, convolved):
            found = attention.unshard(found)
            assert np.isnan(found[until >= 0]).all() == (short < levels)
            assert not found[until < 0].any()


# Convolutions ------------------------------------------------------------------------------------


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("degrees", "layout", "length"), MESHES)
def test_convolutions_follow_branches(degrees, layout, length, width):
    """Also where a slice has fewer tokens than the kernel sees."""
    attention = attention_on(degrees, "ssd", layout=layout)
    until, parents = trees(width + length, length)
    rng, channels = np.random.default_rng(width), (2, 3) if width == 2 else (6,)
    x, dout = (rng.normal(size=(2, length, *channels)).astype(np.float32) for _ in range(2))
    kernel = rng.normal(size=(width, *channels)).astype(np.float32)
    levels = st.branch_levels(until)

    @jax.jit
    def program(until, dout, x, kernel):
        run = functools.partial(attention.causal_conv, visible_until=until, levels=levels)
        out, pull = jax.vjp(run, x, kernel)
        return out, pull(dout)

    ends, there, here = attention.shard(until), attention.shard(dout), attention.shard(x)
    out, (dx, dkernel) = program(ends, there, here, kernel)
    close(attention.unshard(out), oracle.tree_conv(x, kernel, parents=parents), TOLERANCE, "out")
    # It is linear in x and in the kernel.
    back = np.zeros(x.shape)
    of_kernel = np.zeros(kernel.shape)
    for row, t in np.argwhere(parents > -2):
        token = t
        for i in reversed(range(width)):
            if token >= 0:
                back[row, token] += kernel[i] * dout[row, t]
                of_kernel[i] += x[row, token] * dout[row, t]
                token = parents[row, token]
    close(attention.unshard(dx), back, TOLERANCE, "x")
    close(dkernel, of_kernel, TOLERANCE, "kernel")


# Messages ----------------------------------------------------------------------------------------


@pytest.mark.slow_except_every(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("devices", "levels"), [(2, 2), (8, 2), (5, 4)])
def test_bytes_of_forks_are_those_of_compiled_programs(rule, layout, devices, levels):
    """For any number of tokens, of nodes, and of forks."""
    attention = attention_on(st.Degrees(ring=devices), rule, layout=layout)
    cost = attention.communication(batch=2, heads=4, key_dim=6, value_dim=5, levels=levels)
    for tokens in (1, 3):
        *given, _, dout, _ = map(jnp.asarray, inputs(rule, tokens * 2 * devices))
        until = jnp.zeros(dout.shape[:2], jnp.int32)

        def loss(*args, dout=dout):
            *given, until = args
            out = attention(*given, visible_until=until, levels=levels)
            return (out * dout).sum(), out

        grad = jax.grad(loss, tuple(range(5)), has_aux=True)
        sharding = jax.NamedSharding(attention.mesh, attention.sequence_spec)
        put = [jax.device_put(x, sharding) for x in (*given, until)]

        def forward(*args):
            return attention(*args[:-1], visible_until=args[-1], levels=levels)

        for function, traffic in ((forward, cost.forward), (grad, cost.total)):
            found = read_messages(jax.jit(function).lower(*put).compile().as_text())
            wanted = messages(attention.degrees, traffic.transfers)
            np.testing.assert_array_equal(found.matrix, wanted.matrix)
            assert traffic.received_bytes == found.matrix.sum(0).max()


# Mistakes ----------------------------------------------------------------------------------------

DEEP = np.array([[8, 8, 7, 5, 5, 7, 7, 8]])
GOOD = np.array([[8, 8, 4, 4, 8, 6, 8, 8]])


class Own(GatedDelta):
    """A rule of a user's."""


MISTAKES = {
    "both": (dict(segment_ids=np.zeros((1, 8), int)), InputError, "place of segment_ids"),
    "a state": (dict(initial_state=np.zeros((1, 1, 2, 2))), UnsupportedError, "initial_state"),
    "the last": (dict(return_state=True), UnsupportedError, "go with return_state"),
    "too deep": (dict(visible_until=DEEP), InputError, r"branch_levels\(visible_until\) = 3"),
    "no levels": (dict(levels=0), InputError, "levels must be a positive integer; got levels=0"),
    "floats": (dict(visible_until=np.ones((1, 8))), InputError, "got float64"),
    "no tree": (dict(visible_until=GOOD - 4), InputError, "larger than the place"),
    "a short row": (dict(visible_until=GOOD[:, :4]), InputError, r"\[1, 4\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_go_with_forks_raises(name):
    given, error, message = MISTAKES[name]
    attention = attention_on(st.Degrees(), "gated_delta")
    x = np.zeros((1, 8, 1, 2), np.float32)
    with pytest.raises(error, match=message):
        attention(x, x, x, **{"visible_until": GOOD, **given})
    if name not in ("a state", "the last"):
        with pytest.raises(error, match=message):
            attention.causal_conv(x, x[0, :2], **{"visible_until": GOOD, **given})


def test_levels_are_checked_in_local_calls_too():
    """Without levels, ends would be taken for ids of documents."""
    attention = attention_on(st.Degrees(), "gated_delta")
    x = jnp.zeros((1, 8, 1, 2))
    with pytest.raises(InputError, match="levels must be a positive integer"):
        attention.local(x, x, x, visible_until=jnp.asarray(GOOD), levels=0)
    with pytest.raises(InputError, match="levels must be a positive integer"):
        attention.conv_local(x, x[0, :2], visible_until=jnp.asarray(GOOD), levels=0)


@pytest.mark.parametrize(("rule", "groups"), [("gated_delta", 4), ("kda", 16)])
def test_what_explain_says_of_memory_counts_levels(rule, groups):
    """A group keeps two states, their factors and origins; groups over trees are shorter if each
    channel has its decay."""
    attention = attention_on(st.Degrees(), rule)
    found = attention.explain(seq_len=8192, heads=2, key_dim=8, value_dim=8, levels=2)
    assert found.sizes.kept_bytes == groups * 2 * 4 * (2 * 8 * 8 + 2 * 8 * 8 + 2 * 2)


def test_forks_need_a_rule_and_kernels_that_know_them():
    x = np.zeros((1, 8, 1, 2), np.float32)
    with pytest.raises(UnsupportedError, match="goes with the rules"):
        attention_on(st.Degrees(), Own())(x, x, x, visible_until=GOOD)
    with pytest.raises(UnsupportedError, match=r"jla.*Use backend='xla'"):
        attention_on(st.Degrees(), "gated_delta", backend="jla")(x, x, x, visible_until=GOOD)
