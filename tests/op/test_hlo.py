"""The reader of compiled programs, on hand-written texts and on small real programs."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hlo_texts import NEVER, computation, loop, module
from refusals import refused
from startrail_jax.analysis.hlo import COLLECTIVES, device_groups, parse_module, read_traffic
from startrail_jax.errors import InputError, UnsupportedError

pytestmark = pytest.mark.quick


def permute(name, pairs):
    return f"%{name} = f32[4,6] collective-permute(%x), source_target_pairs={pairs}"


def only(kind, size):
    return dict.fromkeys(COLLECTIVES, 0) | {kind: size}


PAIRS_OF_8 = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
IDS = "use_global_device_ids=true"
SHIFT = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        (f"all-gather(%x), channel_id=1, {PAIRS_OF_8}, {IDS}, dimensions={{0}}", "all_gather", 96),
        (f"all-reduce(%x), {PAIRS_OF_8}, {IDS}, to_apply=%sum", "all_reduce", 96),
        (f"reduce-scatter(%x), {PAIRS_OF_8}, {IDS}, to_apply=%sum", "reduce_scatter", 48),
        (f"all-to-all(%x), {PAIRS_OF_8}, dimensions={{0}}", "all_to_all", 48),
        (f"collective-permute(%x), source_target_pairs={SHIFT}", "collective_permute", 96),
    ],
    ids=["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute"],
)
def test_each_kind_receives_its_share(line, kind, size):
    traffic = read_traffic(module([f"%y = f32[4,6]{{1,0}} {line}"]))
    assert traffic.by_collective == only(kind, size)
    assert traffic.received_bytes == size
    assert traffic.counts == only(kind, 1)
    assert len(traffic.received_by_device) == 8


PAIRS, FOURS = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
NEIGHBOURS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", FOURS),
        ("{}", [[*range(8)]]),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", [[i] for i in range(8)]),
        ("[2,4]<=[8]", FOURS),
        ("[4,2]<=[8]", NEIGHBOURS),
        ("[4,2]<=[2,4]T(1,0)", PAIRS),
        ("mesh['x'=2,'y'=4] {'x'}", PAIRS),
        ("mesh['x'=2,'y'=4] {'y'}", FOURS),
        ("mesh['x'=2,'y'=4] {'x','y'}", [[*range(8)]]),
        ("mesh[x=8] {x:(1)2}", PAIRS),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['x'=8] {'x':(4)2}", NEIGHBOURS),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'x'}", NEIGHBOURS),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", NEIGHBOURS),
    ],
)
def test_group_notations_join_the_right_devices(notation, groups):
    line = f"%y = f32[4,6] all-gather(%x), replica_groups={notation}, {IDS}"
    program = parse_module(module([line]))
    (instruction,) = program.computations["main"][1:]
    assert sorted(map(sorted, device_groups(program, instruction))) == groups
    received = 96 * (len(groups[0]) - 1)
    assert read_traffic(module([line])).by_collective == only("all_gather", received)


def test_permute_costs_nothing_to_oneself():
    text = module([permute("y", "{{0,0},{1,4},{2,1},{3,5},{4,2},{5,6},{6,3},{7,7}}")])
    received = [sum(device.values()) for device in read_traffic(text).received_by_device]
    assert received == [0, 96, 96, 96, 96, 96, 96, 0]


def test_busiest_device_is_one_device():
    """Two permutes to different devices do not add up."""
    traffic = read_traffic(module([permute("y", "{{0,1}}"), permute("z", "{{1,0},{2,3}}")]))
    assert traffic.received_bytes == 96
    assert traffic.counts["collective_permute"] == 2


def test_combined_and_tuple_shaped_collectives_add_their_operands():
    text = module(
        [
            "%i = s32[2,3]{1,0:T(8,128)} parameter(1)",
            "%h = bf16[5]{0} parameter(2)",
            f"%g = (f32[8,6], s32[4,3], /*index=2*/bf16[10]) all-gather(%x, %i, /*index=2*/%h), "
            f"{PAIRS_OF_8}, {IDS}, dimensions={{0}}",
            f"%t = (f32[4,6], f32[4,6]) all-to-all(f32[4,6]{{1,0}} %x, f32[4,6]{{1,0}} %x), "
            f"{PAIRS_OF_8}",
            f"%r = (f32[4,6], bf16[5]) all-reduce(%x, %h), {PAIRS_OF_8}, {IDS}, to_apply=%sum",
        ]
    )
    traffic = read_traffic(text)
    assert traffic.by_collective["all_gather"] == 96 + 24 + 10
    assert traffic.by_collective["all_to_all"] == 96
    assert traffic.by_collective["all_reduce"] == 96 + 10
    assert traffic.counts["all_gather"] == 1


def test_tuple_all_to_all_splits_the_sum_of_its_operands():
    """Three parts of 4 bytes: 8 arrive, though no part divides by three."""
    line = "%y = (f32[1], f32[1], f32[1]) all-to-all(%s, %s, %s), replica_groups={{0,1,2}}"
    text = module(["%s = f32[1] parameter(1)", line], header="num_partitions=3")
    assert read_traffic(text).by_collective == only("all_to_all", 8)


def test_asynchronous_pairs_count_once():
    """Forms of XLA's GPU compiler: -start and -done, wrapped, inside an asynchronous fusion."""
    fused = computation(
        "fused", f"%r = f32[4,6] all-reduce(%x), {PAIRS_OF_8}, {IDS}, to_apply=%sum"
    )
    wrapped = computation("wrapped", f"ROOT %t = f32[4,6] all-to-all(%x), {PAIRS_OF_8}")
    both = "((f32[4,6], f32[4,6]), (f32[8,6], f32[8,6]))"
    text = module(
        [
            f"%g = {both} all-gather-start(%x, %x), {PAIRS_OF_8}, {IDS}, dimensions={{0}}",
            "%gd = (f32[8,6], f32[8,6]) all-gather-done(%g)",
            f"%s = ((f32[4,6]), f32[2,6]) reduce-scatter-start(%x), {PAIRS_OF_8}, {IDS}, "
            "to_apply=%sum",
            "%sd = f32[2,6] reduce-scatter-done(%s)",
            f"%p = (f32[4,6], f32[4,6], u32[], u32[]) collective-permute-start(%x), "
            f"source_target_pairs={SHIFT}",
            "%pd = f32[4,6] collective-permute-done(%p)",
            "%f = ((f32[4,6]), f32[4,6]) fusion-start(%x), kind=kCustom, calls=%fused",
            "%fd = f32[4,6] fusion-done(%f)",
            "%a = ((f32[4,6]), f32[4,6], s32[]) async-start(%x), calls=%wrapped",
            "%au = ((f32[4,6]), f32[4,6], s32[]) async-update(%a), calls=%wrapped",
            "%ad = f32[4,6] async-done(%au), calls=%wrapped",
        ],
        fused,
        wrapped,
    )
    traffic = read_traffic(text)
    assert traffic.counts == dict.fromkeys(COLLECTIVES, 1)
    assert traffic.by_collective == {
        "all_gather": 192,
        "all_reduce": 96,
        "all_to_all": 48,
        "collective_permute": 96,
        "reduce_scatter": 48,
    }


def test_loops_multiply_and_nest():
    inner = computation("inner", permute("p", SHIFT))
    outer = computation("outer", permute("q", SHIFT), loop("w", "inner", 3))
    text = module([loop("v", "outer", 5), permute("r", SHIFT)], NEVER, inner, outer)
    traffic = read_traffic(text)
    assert traffic.counts["collective_permute"] == 1 + 5 * (1 + 3)
    assert traffic.received_bytes == 96 * (1 + 5 * (1 + 3))


def test_loop_condition_runs_once_more_than_the_body():
    checks = computation("checks", permute("p", SHIFT))
    idle = computation("idle", "ROOT %y = f32[4,6] copy(%x)")
    text = module([loop("w", "idle", 4, condition="checks")], checks, idle)
    assert read_traffic(text).counts["collective_permute"] == 5


def test_loop_of_unknown_length_raises_only_with_collectives():
    idle = computation("idle", "ROOT %y = f32[4,6] copy(%x)")
    assert read_traffic(module([loop("w", "idle")], NEVER, idle)).received_bytes == 0
    body = computation("busy", permute("p", SHIFT))
    outer = computation("outer", "ROOT %c = f32[4,6] call(%x), to_apply=%busy")
    with refused(InputError, "A loop with collectives must"):
        read_traffic(module([loop("w", "outer")], NEVER, body, outer))


def test_calls_and_fusions_are_followed():
    callee = computation("callee", permute("p", SHIFT))
    text = module(
        [
            "%c = f32[4,6] call(%x), to_apply=%callee",
            "%f = f32[4,6] fusion(%x), kind=kLoop, calls=%callee",
            "%d = f32[4,6] custom-call(%x), called_computations={%callee, %callee}",
        ],
        callee,
    )
    assert read_traffic(text).counts["collective_permute"] == 4


@pytest.mark.parametrize(
    "attributes",
    ["branch_computations={%small, %large}", "true_computation=%large, false_computation=%small"],
)
def test_conditional_counts_the_branch_that_receives_most(attributes):
    small = computation("small", permute("p", SHIFT))
    line = f"%g = f32[8,6] all-gather(%x), replica_groups={{}}, {IDS}"
    large = computation("large", line)
    traffic = read_traffic(
        module([f"%c = f32[4,6] conditional(%i, %x), {attributes}"], small, large)
    )
    assert traffic.by_collective == only("all_gather", 7 * 96)


def test_replicas_are_devices_too():
    line = "%y = f32[8,6] all-gather(%x), replica_groups={{0,1}}, dimensions={0}"
    assert read_traffic(module([line], header="replica_count=2")).received_bytes == 96
    with refused(UnsupportedError, "on 2 replicas"):
        read_traffic(module([line], header="replica_count=2, num_partitions=2"))
    with refused(UnsupportedError, "on 1 replicas"):
        read_traffic(module([line]))


OTHERS = ("send", "recv", "ragged-all-to-all", "collective-broadcast")
UNREAD = f"%y = f32[8,6] all-gather(%x), replica_groups=new[8], {IDS}"


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        *(
            (module([f"%y = f32[4,6] {x}(%x)"]), UnsupportedError, f"of the kinds*got y = {x}. ")
            for x in OTHERS
        ),
        (module([UNREAD]), UnsupportedError, "The attributes of all-gather must"),
        ("", InputError, "The text must"),
        ("module @jit_f {\n}", InputError, "The text must"),
        (module([]) + module([]), InputError, "The text must"),
        (module(["%y = f32[4,6]"]), InputError, "'f32[4,6]'"),
    ],
)
def test_text_that_cannot_be_read_is_refused(text, error, named):
    with refused(error, *named.split("*")):
        read_traffic(text)


MESH_SHAPE = (2, 3)
SHARD = 7 * 6 * 5 * 4


def compiled_traffic(function):
    """`function` on shards of [7, 6, 5] floats over axes x of 2 and y of 3 devices."""
    size = math.prod(MESH_SHAPE)
    types = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=types, devices=jax.devices()[:size])
    spec = P(("x", "y"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    sharding = NamedSharding(mesh, spec)
    argument = jax.ShapeDtypeStruct((7 * size, 6, 5), jnp.float32, sharding=sharding)
    return read_traffic(jax.jit(mapped).lower(argument).compile().as_text())


def shift(x, axis="y", size=3):
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def test_compiled_scan_counts_every_hop():
    def ring(x):
        return lax.scan(lambda c, _: (jnp.sin(shift(c)), None), x, length=11)[0]

    traffic = compiled_traffic(ring)
    assert traffic.counts == only("collective_permute", 11)
    assert traffic.by_collective == only("collective_permute", 11 * SHARD)


@pytest.mark.parametrize(
    ("function", "kind", "size"),
    [
        (lambda x: lax.all_gather(x, "y", tiled=True)[:7], "all_gather", 2 * SHARD),
        (lambda x: lax.all_gather(x, ("x", "y"), tiled=True)[:7], "all_gather", 5 * SHARD),
        (lambda x: lax.all_to_all(x, "y", 1, 1, tiled=True), "all_to_all", 2 * SHARD // 3),
        (lambda x: lax.all_to_all(x, "x", 1, 1, tiled=True), "all_to_all", SHARD // 2),
        (
            lambda x: jnp.tile(
                lax.psum_scatter(x, "y", scatter_dimension=1, tiled=True), (1, 3, 1)
            ),
            "reduce_scatter",
            2 * SHARD // 3,
        ),
        (lambda x: x - lax.pmax(x, "x"), "all_reduce", SHARD),
        (lambda x: x - lax.psum(x, ("x", "y")), "all_reduce", 2 * 5 * SHARD // 6),
        (lambda x: shift(x, "x", 2), "collective_permute", SHARD),
    ],
    ids=["gather y", "gather xy", "exchange y", "exchange x", "scatter", "max", "sum", "permute"],
)
def test_compiled_collective_receives_its_share(function, kind, size):
    traffic = compiled_traffic(function)
    assert traffic.by_collective == only(kind, size)
    assert traffic.counts == only(kind, 1)
