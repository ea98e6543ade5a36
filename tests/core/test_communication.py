"""What a step communicates, in comm.lock files and after changes of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import board, call, collective
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.comparison.communication import (
    ChangeKind,
    Group,
    Lock,
    Meshes,
    Operation,
    Role,
    bytes_of,
    changes,
    folded,
    recorded_steps,
    role_of,
    roles,
    steady_step,
)
from nsa_harness.core.evidence.evidence import Collective
from nsa_harness.core.evidence.flight import FlightDump
from nsa_harness.core.report import Place
from nsa_harness.errors import ScenarioError
from nsa_harness.supervisor.storage.comm_lock import lock_text, parse_lock

WORLD = Group(names=("world",), size=2)
DP = Group(names=("dp", "world"), size=2)
TP = Group(names=("tp",), size=2)


def operation(op: str = "all_reduce", elements: int | None = 16576, **changes: object) -> Operation:
    return replace(Operation(group=WORLD, op=op, dtype="float32", elements=elements, site=""), **changes)  # type: ignore[arg-type]


# As recorded under torchrun with gloo and two ranks, by tests/programs/communicates.py.
LOSS = operation(elements=1, op="reduce", site="train.py metrics", line=58)
COUNT = operation(elements=3, site="train.py metrics", line=59)
DDP = (LOSS, COUNT, operation(), operation())
GATHER = operation("all_gather", 8288, group=DP, site="train.py main", line=72)
SCATTER = operation("reduce_scatter", 16576, group=DP, site="train.py main", line=74)
FSDP = (replace(LOSS, group=DP), replace(COUNT, group=DP), *[GATHER] * 4, *[SCATTER] * 2)
IN_BLOCK = operation(elements=512, group=TP, site="train.py forward", line=28)
TENSOR = (LOSS, COUNT, *[IN_BLOCK] * 2, replace(IN_BLOCK, site="train.py main", line=74))
SCHEDULES = {"ddp": DDP, "fsdp": FSDP, "tensor": TENSOR}


def kinds(before: Sequence[Operation], after: Sequence[Operation]) -> dict[str, int]:
    found = changes(before, after)
    counts = {kind.value: sum(one.count for one in found if one.kind is kind) for kind in ChangeKind}
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_moved_line_is_no_difference_and_another_function_is_one(kind: str) -> None:
    before = SCHEDULES[kind]
    assert kinds(before, [replace(one, line=999) for one in before]) == {}
    assert kinds(before, [replace(before[0], site="train.py evaluate"), *before[1:]]) == {"changed": 1}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_harmful_change_is_told(kind: str) -> None:
    before = SCHEDULES[kind]
    first, second, third, *rest = before
    assert kinds(before, [first, second, replace(third, elements=(third.elements or 0) * 2), *rest]) == {"changed": 1}
    assert kinds(before, [first, operation(elements=1, site="train.py metrics"), second, third, *rest]) == {"added": 1}
    assert kinds(before, [first, second, *(replace(one, dtype="bfloat16") for one in (third, *rest))]) == {
        "changed": len(rest) + 1
    }
    assert kinds(before, [second, first, third, *rest]) == {"in another order": 1}
    assert kinds(before, [replace(first, op="gather"), second, third, *rest]) == {"changed": 1}
    assert kinds(before, [first, *before[2:]]) == {"removed": 1}


def test_merged_buckets_are_a_larger_one_and_one_less() -> None:
    assert kinds(DDP, [LOSS, COUNT, operation(elements=2 * 16576)]) == {"changed": 1, "removed": 1}


def test_one_more_call_among_equal_layers_is_one_difference() -> None:
    layers = [IN_BLOCK, replace(IN_BLOCK, site="train.py attend")] * 100
    assert kinds(layers, [*layers[:70], LOSS, *layers[70:150], COUNT, *layers[150:]]) == {"added": 2}
    assert kinds(layers, [*layers[:70], *layers[74:]]) == {"removed": 4}
    assert kinds(layers * 4, [replace(one, dtype="bfloat16") for one in layers * 4]) == {"changed": 800}


SENT = operation("isend", 8, site="train.py main", peer=("next", "last"))


@given(*[st.lists(st.sampled_from([LOSS, COUNT, GATHER, IN_BLOCK, SENT]), max_size=12)] * 2)
def test_the_changes_lead_from_one_schedule_to_the_other(before: list[Operation], after: list[Operation]) -> None:
    result = Counter(before)
    for change in changes(before, after):
        result[change.before] -= change.count
        result[change.after] += change.count
    del result[None]
    assert {one: count for one, count in result.items() if count} == Counter(after)
    assert (changes(before, after) == ()) == (before == after)


def test_shards_follow_the_number_of_ranks_and_nothing_else_does() -> None:
    larger = Group(names=("dp", "world"), size=4)
    scaled = [
        replace(one, group=larger, elements=(one.elements or 0) // 2 if one.op == "all_gather" else one.elements)
        for one in FSDP
    ]
    assert kinds(FSDP, scaled) == {}
    assert kinds(
        FSDP, [replace(one, group=larger, elements=8288 * 2) if one.op == "all_gather" else one for one in scaled]
    ) == {"changed": 4}
    assert kinds(FSDP, [replace(one, elements=8288 + 1) if one.op == "all_gather" else one for one in FSDP]) == {
        "changed": 4
    }
    buckets = [replace(one, group=replace(WORLD, size=4)) for one in DDP]
    assert kinds(DDP, buckets) == {}
    assert kinds(DDP, [replace(one, elements=(one.elements or 0) + 1) for one in buckets]) == {"changed": 4}


def test_another_group_is_a_difference_unless_both_have_a_name_in_common() -> None:
    both = Group(names=("tp", "world"), size=2)
    assert kinds([replace(COUNT, group=both)], [COUNT]) == {}
    assert kinds([replace(COUNT, group=both)], [replace(COUNT, group=TP)]) == {}
    assert kinds([COUNT], [replace(COUNT, group=TP)]) == {"added": 1, "removed": 1}


def recorded(entered: Sequence[Collective]) -> FlightDump:
    return FlightDump(collectives=tuple(entered), transfers=(), groups={})


def one(seq: int, at_s: float, **changes: object) -> Collective:
    return collective(seq, created_ns=int(at_s * 1e9), retired=True, **changes)


def test_steps_are_cut_where_the_optimizer_ended_and_calls_from_python_have_a_site() -> None:
    status = board(
        steps_s=((1, 1.0), (2, 2.0), (3, 3.0)), zero_ns=0, groups={"0": (0, 1)},
        calls=(call(1, entered_s=2.4, left_s=2.6, place=Place(file="/a/train.py", line=9, function="main")),),
    )  # fmt: skip
    flight = recorded([one(1, 0.5), one(2, 1.5, sizes=((2, 3), (4,))), one(3, 2.5), one(4, 3.5)])
    steps = recorded_steps(status, flight, {})
    assert sorted(steps) == [1, 2, 3]
    assert steps[2] == (operation(elements=10),)
    assert steps[3] == (operation(elements=4, site="train.py main"),)
    assert steps[3][0].line == 9


def test_the_steady_step_is_the_last_that_every_rank_repeats() -> None:
    usual, other = (LOSS,), (LOSS, COUNT)
    assert steady_step([{1: other, 2: usual, 3: usual, 4: other}]) == (3, True)
    assert steady_step([{2: usual, 3: usual, 4: usual}, {2: usual, 3: usual, 4: other}]) == (3, True)
    assert steady_step([{2: usual, 3: other, 4: usual}]) == (4, False)
    assert steady_step([{}, {2: usual}]) == (None, False)


@pytest.mark.parametrize(
    ("members", "mesh", "names"),
    [
        ((0, 1), {}, ("blocks-of-2",)),
        ((0, 2), {}, ("every-2",)),
        ((0, 1, 3), {}, ("ranks-0.1.3",)),
        ((0, 1, 2, 3), {}, ("world",)),
        ((0, 1), {"dp": 2, "tp": 2}, ("tp",)),
        ((0, 2), {"dp": 2, "tp": 2}, ("dp",)),
        ((0, 1, 2, 3), {"dp": 2, "tp": 2}, ("dp+tp", "world")),
        ((0, 1, 2, 3), {"dp": 1, "tp": 4}, ("tp", "world")),
        ((0,), {"dp": 1, "tp": 4}, ("dp",)),
        ((0, 1), {"dp": 1, "tp": 4}, ("blocks-of-2",)),
    ],
)
def test_a_group_is_named_by_its_axes_or_its_shape(
    members: tuple[int, ...], mesh: dict[str, int], names: tuple[str, ...]
) -> None:
    sizes = list(mesh.values())
    meshes = {rank: dict(zip(mesh, divmod(rank, sizes[1]), strict=True)) for rank in range(4)} if mesh else {}
    status = board(steps_s=((1, 1.0),), zero_ns=0, groups={"7": members}, world_size=4)
    (entered,) = recorded_steps(status, recorded([one(1, 0.5, group="7")]), meshes)[1]
    assert entered.group == Group(names=names, size=len(members))


def test_an_object_may_have_any_size_and_names_do_not_depend_on_torch() -> None:
    status = board(
        steps_s=((1, 1.0),), zero_ns=0, groups={"0": (0, 1)},
        calls=(
            call(1, "broadcast_object_list", entered_s=0.1, left_s=0.2),
            call(2, "all_gather_into_tensor_coalesced", entered_s=0.3, left_s=0.4),
        ),
    )  # fmt: skip
    flight = recorded(
        [one(1, 0.15, op="broadcast"), one(2, 0.35, op="_allgather_base"), one(3, 0.5, op="_reduce_scatter_base")]
    )
    assert [(entered.op, entered.elements) for entered in recorded_steps(status, flight, {})[1]] == [
        ("broadcast_object_list", None), ("all_gather", 4), ("reduce_scatter", 4),
    ]  # fmt: skip


def test_ranks_that_communicate_alike_share_a_role() -> None:
    pipeline = {rank: {"pp": rank // 2, "dp": rank % 2} for rank in range(4)}
    assert [role.who for role in roles(dict.fromkeys(range(4), DDP), {})] == ["all"]
    assert [role.who for role in roles({0: FSDP, 1: DDP, 2: DDP}, {})] == ["0", "1-"]
    assert [role.who for role in roles({0: DDP, 1: FSDP, 2: DDP}, {})] == ["0,2-", "1"]
    staged = roles({0: FSDP, 1: FSDP, 2: DDP, 3: DDP}, pipeline)
    assert [role.who for role in staged] == ["pp=0", "pp=1"]
    assert role_of(5, staged, {5: {"pp": 1}}).operations == DDP
    assert role_of(6, roles({0: FSDP, 1: DDP}, {}), {}).operations == DDP


Transfer = tuple[str, int | None]


def transfers(
    rank: int, size: int, *made: Transfer, batch: str = "", meshes: Meshes | None = None, line: int = 12
) -> tuple[Operation, ...]:
    """Return what a rank is recorded to have transferred in a step: calls with their peer, and the text of a batch."""
    place = Place(file="/a/train.py", line=line, function="main")
    times = [0.1 * number for number in range(1, len(made) + 2)]
    calls = [
        call(number, op, peer=peer, dtype="float32", entered_s=at_s, left_s=at_s + 0.01, place=place)
        for number, ((op, peer), at_s) in enumerate(zip(made, times, strict=False), 1)
    ]
    if batch:
        batched = {"op": "batch_isend_irecv", "entered_s": times[-1], "transfers": batch}
        calls.append(replace(call(len(made) + 1, peer=None, left_s=None, place=place), **batched))
    status = board(
        rank=rank, world_size=size, steps_s=((1, 1.0),), zero_ns=0, groups={"0": tuple(range(size))}, calls=tuple(calls)
    )
    return recorded_steps(status, recorded([one(1, 0.05)]), meshes or {})[1][1:]


def stage(rank: int, size: int, *, ahead: int = 1, sends: bool = True, line: int = 12) -> tuple[Operation, ...]:
    """Return what a stage of a pipeline transfers, and the batch in which it exchanges a tensor with its neighbours."""
    received: list[Transfer] = [("recv", rank - 1)] if rank else []
    sent: list[Transfer] = [("isend", rank + 1)] if rank < size - 1 and sends else []
    batch = f"isend {(rank + ahead) % size} 3 float32;irecv {(rank - ahead) % size} 3 float32"
    return transfers(rank, size, *received, *sent, batch=batch, line=line)


def test_a_transfer_is_recorded_with_its_peer_and_a_batch_as_its_transfers() -> None:
    assert [(one.label, one.elements, one.dtype, one.site) for one in stage(1, 3)] == [
        ("recv from previous = rank 0", 4, "float32", "train.py main"),
        ("isend to next = last", 4, "float32", "train.py main"),
        ("isend to next = last", 3, "float32", "train.py main"),
        ("irecv from previous = rank 0", 3, "float32", "train.py main"),
    ]
    assert [one.label for one in transfers(0, 5, ("recv", None), ("send_object_list", 2), ("send", 3))] == [
        "recv from any", "send_object_list to +2", "send to -2",
    ]  # fmt: skip
    (unknown,) = transfers(0, 3, ("batch_isend_irecv", None))
    assert unknown.label == "batch_isend_irecv"


@pytest.mark.parametrize("rank", range(3))
def test_another_peer_or_direction_and_a_dropped_send_are_told_and_a_moved_line_is_not(rank: int) -> None:
    before = stage(rank, 3)
    assert kinds(before, stage(rank, 3, line=99)) == {}
    assert kinds(before, stage(rank, 3, ahead=2)) == {"changed": 2}
    *rest, last = before
    assert kinds(before, [*rest, replace(last, op="isend")]) == {"changed": 1}
    assert kinds(before, stage(rank, 3, sends=False)) == ({"removed": 1} if rank < 2 else {})


def ring(size: int, ahead: int = 1) -> dict[int, tuple[Operation, ...]]:
    return {
        rank: transfers(rank, size, ("isend", (rank + ahead) % size), ("recv", (rank - ahead) % size))
        for rank in range(size)
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_holds_for_another_number_of_ranks_and_another_peer_does_not(size: int) -> None:
    (role,) = roles(ring(size), {})
    assert role.operations[0].label == ("isend to next = previous" if size == 2 else "isend to next")
    assert all(kinds(role.operations, own) == {} for own in ring(5).values())
    assert all(kinds(role.operations, own) == {"changed": 2} for own in ring(5, ahead=2).values())


@pytest.mark.parametrize("size", [3, 5])
def test_a_transfer_of_every_rank_with_the_first_holds_for_another_number_of_ranks(size: int) -> None:
    to_root = {rank: transfers(rank, size, ("send", 0)) for rank in range(1, size)}
    first, others = roles({0: (), **to_root}, {})
    assert (first.who, others.who, others.operations[0].label) == ("0", "1-", "send to rank 0")
    assert kinds(others.operations, transfers(6, 7, ("send", 0))) == {}
    assert kinds(others.operations, transfers(6, 7, ("send", 5))) == {"changed": 1}


def test_a_peer_on_an_axis_of_the_mesh_holds_for_another_size_of_the_other_axis() -> None:
    def sent(rank: int, width: int, peer: int) -> tuple[Operation, ...]:
        size = 3 * width
        meshes = {rank: {"pp": rank // width, "dp": rank % width} for rank in range(size)}
        return transfers(rank, size, ("isend", peer), meshes=meshes)

    before = sent(0, 2, 2)
    assert before[0].label == "isend to next in pp"
    assert kinds(before, sent(3, 4, 7)) == {}
    assert kinds(before, sent(3, 4, 2)) == {"changed": 1}


def test_a_file_of_an_earlier_version_is_read_and_has_no_peers() -> None:
    lock = Lock(ranks=3, roles=roles({rank: stage(rank, 3) for rank in range(3)}, {}))
    text = lock_text(lock)
    assert parse_lock(text, "a") == lock
    assert not parse_lock(text.replace(", with peers", ""), "a").has_peers


LAYERS = [IN_BLOCK, replace(IN_BLOCK, site="train.py attend")] * 24
MANY = Lock(
    ranks=4,
    roles=(
        Role(who="0", operations=(LOSS, *LAYERS, operation("send_object_list", None))),
        Role(who="1-", operations=(*DDP, replace(GATHER, line=None), replace(SCATTER, dtype="bfloat16"))),
    ),
)


def test_a_file_is_read_as_it_was_written_and_repeated_layers_are_written_once() -> None:
    text = lock_text(MANY)
    assert parse_lock(text, "a") == MANY
    assert parse_lock(text.replace("# line 58", "").replace("\n\nrole", "\n# a remark\nrole"), "a") == MANY
    assert text.count("train.py attend") == 1
    assert "    repeat 24 x\n" in text
    assert max(map(len, text.splitlines())) <= 120


FROM_ROOT = operation("recv_object_list", None, dtype="none", peer=("rank 0 in pp",))


@given(st.lists(st.sampled_from([LOSS, COUNT, GATHER, IN_BLOCK, SENT, FROM_ROOT]), max_size=60))
def test_folding_loses_nothing(operations: list[Operation]) -> None:
    assert [one for times, block in folded(operations) for one in block * times] == operations
    lock = Lock(ranks=2, roles=(Role(who="all", operations=tuple(operations)),))
    assert parse_lock(lock_text(lock), "a") == lock


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("comm.lock 1", "comm.lock 2", "train.comm.lock:1: expected the line `comm.lock 1`, got 'comm.lock 2'"),
        ("16,576  (below", "33,152  (below", "train.comm.lock:6: 4 calls, 132,624 bytes"),
        ("  2 x world", "  two x world", "train.comm.lock:11: this line does not belong in a comm.lock file"),
        ("2 x world", "2 x moon ", "train.comm.lock:11: the role has no group moon"),
        ("ranks 2, with peers", "", "train.comm.lock:11: the file ends before a role"),
    ],
)  # fmt: skip
def test_a_damaged_or_edited_file_is_refused_with_the_line(old: str, new: str, mistake: str) -> None:
    text = lock_text(Lock(ranks=2, roles=(Role(who="all", operations=DDP),)))
    assert old in text
    with pytest.raises(ScenarioError) as refused:
        parse_lock(text.replace(old, new, 1), "train.comm.lock")
    assert refused.value.mistakes[0].startswith(mistake)


def test_bytes_follow_from_the_dtype() -> None:
    sizes = {"float32": 40, "bfloat16": 20, "int64": 80, "bool": 10, "float8_e4m3fn": 10, "complex64": 80}
    assert {dtype: bytes_of([operation(elements=10, dtype=dtype)]) for dtype in sizes} == sizes
    assert bytes_of([operation(elements=None)]) == 0
