"""What a rank tells beside its marks: members of groups, its place in a mesh, partners, keys, gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import PROGRAMS, Boards, ended, fork_ranks, run_forks, wait_for

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Call
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.core.verdict.group_waits import TRANSFERS
from nsa_harness.probe import waits as waits_module
from nsa_harness.probe.groups import Groups, MeshCoordinates, fits, ranges
from nsa_harness.probe.hooks import _await_optimizer
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.status_file import StatusFileWriter
from nsa_harness.probe.waits import Handle, OngoingWait, Waits, key_text

FACTS = str(PROGRAMS / "guest_facts.py")
WAITS = str(PROGRAMS / "guest_waits.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.board"


def test_whether_an_optimizer_was_made_is_told_and_its_constructor_is_its_own_again(path: Path) -> None:
    original = torch.optim.Optimizer.__init__
    _await_optimizer(StatusFileWriter(str(path), rank=0, world_size=1), TroubleLog(str(path.parent)))
    assert not parse(path.read_bytes(), 0).has_optimizer
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert parse(path.read_bytes(), 0).has_optimizer
    assert torch.optim.Optimizer.__init__ is original


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1, 2, 3, 6], "0-3,6"),
        ([0, 3], "0,3"),
        ([0, 4, 8, 12], "0-12/4"),
        ([1, 2, 5, 8, 11], "1-2,5-11/3"),
    ],
)
def test_members_are_written_as_runs(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


@given(ranks=st.sets(st.integers(0, 2000), min_size=1, max_size=60))
def test_members_that_are_written_are_the_members_that_are_read(ranks: set[int], tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("boards") / "1.board"
    value = ranges(sorted(ranks))
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    if fits(value):
        board.write_fact(f"{protocol.FACT_GROUP}7", value)
        assert parse(path.read_bytes(), 0).groups == {"7": tuple(sorted(ranks))}


def world(**groups: list[int]) -> SimpleNamespace:
    tables = SimpleNamespace(pg_group_ranks={}, pg_names={})
    for name, ranks in groups.items():
        group = object()
        tables.pg_names[group] = name
        tables.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return SimpleNamespace(_world=tables)


def test_a_list_of_ranks_that_would_be_cut_is_not_written(path: Path) -> None:
    odd = [number * number for number in range(200)]
    Groups(world(odd=odd, even=[0, 2, 4]), StatusFileWriter(str(path), rank=0, world_size=1)).write()
    assert parse(path.read_bytes(), 0).groups == {"even": (0, 2, 4)}


def test_a_name_that_comes_to_mean_other_ranks_is_told_again_and_nothing_else_is(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    c10d = world(a=[0, 1])
    groups = Groups(c10d, board)
    groups.write()
    groups.write()
    assert protocol.FACTS_USED.unpack_from(path.read_bytes(), protocol.FACTS_USED_AT) == (1,)
    c10d._world = world(a=[0, 5])._world
    groups.write()
    assert parse(path.read_bytes(), 0).groups == {"a": (0, 5)}


def mesh(coordinate: list[int] | None, names: tuple[str, ...] | None, size: int, root: object = None) -> object:
    tensor = SimpleNamespace(numel=lambda: size)
    return SimpleNamespace(
        mesh_dim_names=names, mesh=tensor, get_coordinate=lambda: coordinate, _root_mesh=root, ndim=len(names or ())
    )


def test_the_largest_mesh_with_names_wins_and_parts_of_one_do_not_count(path: Path) -> None:
    place = MeshCoordinates(StatusFileWriter(str(path), rank=0, world_size=1))
    place.write_if_larger(mesh([0], ("small",), 4))
    place.write_if_larger(mesh([1, 2], ("dp", "tp=x y"), 8))
    place.write_if_larger(mesh([3], ("flat",), 8))
    place.write_if_larger(mesh([1, 1], None, 64))
    place.write_if_larger(mesh(None, ("elsewhere",), 64))
    place.write_if_larger(mesh([1], ("part",), 64, root=object()))
    assert parse(path.read_bytes(), 0).mesh == (("dp", 1), ("tp_x_y", 2))


def test_keys_are_kept_whole_and_of_a_long_one_the_end_that_names_the_rank() -> None:
    assert key_text(["a", "b"]) == "a,b"
    many = key_text([f"key{number:04d}" for number in range(200)])
    assert many.startswith("key0000,key0001,")
    assert many.endswith(",...")
    assert set(map(len, many.split(",")[:-1])) == {7}
    long = key_text("ü" * 900 + "//cpu//0/17")
    assert long.startswith("...ü")
    assert long.endswith("//cpu//0/17")
    assert fits(many)
    assert fits(long)


def test_groups_mesh_partners_and_functional_collectives_of_four_ranks(tmp_path: Path) -> None:
    processes = fork_ranks(4, FACTS, boards=tmp_path)
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
        for _ in range(2):  # whatever the first one tells it has told when the second one comes
            _wait_for_a_beat_of_each(Boards(tmp_path))
    finally:
        ends = [ended(process) for process in processes]
    assert [(rank.status, rank.err) for rank in ends] == [(0, "")] * 4
    boards = Boards(tmp_path).all()
    assert not list(tmp_path.glob("*.trouble.jsonl"))
    assert [dict(board.mesh) for board in boards] == [
        {"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}, {"dp": 1, "tp": 1},
    ]  # fmt: skip
    members = [set(board.groups.values()) for board in boards]
    assert members[0] >= {(0, 1, 2, 3), (0, 3), (0, 1), (0, 2)}
    assert members[1] >= {(0, 1, 2, 3), (0, 1), (1, 3)}
    assert (0, 3) not in members[1]
    assert [_partners(board.calls) for board in boards] == [
        [("send", 3)],
        [("batch_isend_irecv", 2)],
        [("batch_isend_irecv", 1)],
        [("recv", 0)],
    ]
    (send,) = (call for call in boards[0].calls if call.op == "send")
    assert boards[0].groups[send.group] == (0, 3)
    (gathered,) = (call for call in boards[3].calls if call.op.startswith("all_gather"))
    assert boards[3].groups[gathered.group] == (2, 3)
    assert gathered.elements == 4
    assert gathered.place is not None
    assert (gathered.place.function, gathered.dtype) == ("main", "float32")


def _wait_for_a_beat_of_each(boards: Boards) -> None:
    before = {board.pid: board.beat_s or 0.0 for board in boards.all()}
    wait_for(lambda: all((board.beat_s or 0.0) > before[board.pid] for board in boards.all()), "a beat of each rank")


def _partners(calls: tuple[Call, ...]) -> list[tuple[str, int | None]]:
    """Of transfers; a broadcast has a peer as well, its root."""
    return [(call.op, call.peer) for call in calls if call.op in TRANSFERS]


def test_a_wait_for_a_key_and_for_a_handle_is_on_the_board_while_it_lasts(tmp_path: Path) -> None:
    boards = Boards(tmp_path / "boards")
    first, second = fork_ranks(2, WAITS, boards=boards.directory, STORE=str(tmp_path / "store"))
    try:
        key = wait_for(lambda: _lasting(boards, first.pid, "wait store.get"), "the wait for a key")
        first.stdin.write("\n")
        first.stdin.flush()
        handle = wait_for(lambda: _lasting(boards, first.pid, "wait irecv"), "the wait for a handle")
    finally:
        ends = [ended(process) for process in (_with_a_line(second), first)]
    assert [(rank.status, rank.err) for rank in ends] == [(0, ""), (0, "")]
    assert (key.key, key.peer, key.place and key.place.function) == ("pg//cpu//0/1", None, "wait_for_a_key")
    assert (handle.key, handle.peer, handle.elements) == ("", 1, 5)
    assert handle.place is not None
    assert handle.place.function == "wait_for_a_handle"
    over = [call for call in boards.board(ends[1].pid).calls if call.op.startswith(protocol.WAIT)]
    assert [call.op for call in over if call.left_s is not None] == ["wait store.get", "wait irecv"]


def _with_a_line(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process


def _lasting(boards: Boards, pid: int, op: str) -> Call | None:
    if not (boards.directory / protocol.STATUS_FILE.format(pid=pid)).exists():
        return None
    return next((call for call in boards.board(pid).calls if call.op == op and call.left_s is None), None)


INSIDE = """
import os, sys, threading
import torch.distributed as dist
store = dist.FileStore(os.environ["STORE"], 1)
def late():
    sys.stdin.readline()
    dist.FileStore(os.environ["STORE"], 1).set("gate", "open")
threading.Thread(target=late).start()
original = dist.distributed_c10d._new_process_group_helper
def helper(*arguments, **options):
    store.wait(["gate"])
    return original(*arguments, **options)
dist.distributed_c10d._new_process_group_helper = helper
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""


def test_a_key_waited_for_inside_a_collective_belongs_to_that_call_while_it_lasts(tmp_path: Path) -> None:
    boards = Boards(tmp_path / "boards")
    (process,) = fork_ranks(1, "-c", INSIDE, boards=boards.directory, STORE=str(tmp_path / "store"))
    try:
        call = wait_for(lambda: _with_a_key(boards, process.pid), "the key of init_process_group")
    finally:
        rank = ended(_with_a_line(process))
    assert (rank.status, rank.err) == (0, "")
    assert (call.op, call.key) == ("init_process_group", "gate")
    assert [(one.op, one.key) for one in boards.board(rank.pid).calls] == [
        ("init_process_group", ""),
        ("destroy_process_group", ""),
    ]


def _with_a_key(boards: Boards, pid: int) -> Call | None:
    if not (boards.directory / protocol.STATUS_FILE.format(pid=pid)).exists():
        return None
    return next((call for call in boards.board(pid).calls if call.key), None)


GRADIENTS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in (model, model[0]):
    optimizer.zero_grad()
    inputs(torch.ones(2)).sum().backward()
    optimizer.step()
"""


def test_a_step_says_how_many_parameters_had_a_gradient(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", GRADIENTS, boards=tmp_path)
    assert (rank.status, rank.err) == (0, "")
    assert Boards(tmp_path).board(rank.pid).gradients == {1: 4, 2: 2}


@pytest.fixture
def waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Every wait has lasted as soon as it has begun."""
    monkeypatch.setattr(waits_module, "LASTING_NS", 0)
    return Waits(StatusFileWriter(str(path), rank=0, world_size=1), (), TroubleLog(str(path.parent)))


def during(waits: Waits, handle: Handle, keys: object, call: Callable[[], object]) -> object:
    """Call a function as a patch of it does."""
    wait = waits.begin(handle, keys)
    try:
        return call()
    finally:
        waits.end(wait)


def test_a_wait_that_is_over_when_the_beat_looks_was_never_there(path: Path, waits: Waits) -> None:
    assert during(waits, Handle("store.get"), "key", lambda: 7) == 7
    waits.write_lasting()
    assert parse(path.read_bytes(), 0).calls == ()


def test_only_the_outermost_wait_of_a_thread_is_told_and_told_once(path: Path, waits: Waits) -> None:
    def inner() -> None:
        during(waits, Handle("store.wait"), ["inner"], waits.write_lasting)
        waits.write_lasting()

    during(waits, Handle("store.get", peer=3), "outer", inner)
    (call,) = parse(path.read_bytes(), 0).calls
    assert (call.op, call.key, call.peer, call.left_s is None) == ("wait store.get", "outer", 3, False)


def test_a_wait_that_ends_while_it_is_written_down_has_ended(
    path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = waits._status_file.enter_call

    def over_meanwhile(*arguments: int, **options: int) -> int:
        waits._ongoing.clear()
        return enter(*arguments, **options)

    monkeypatch.setattr(waits._status_file, "enter_call", over_meanwhile)
    waits._ongoing[7] = OngoingWait(Handle("store.get"), "key", 0)
    waits.write_lasting()
    (call,) = parse(path.read_bytes(), 0).calls
    assert (call.key, call.left_s is None) == ("key", False)


def test_the_oldest_of_too_many_handles_loses_its_name(waits: Waits) -> None:
    class Work:
        pass

    works = [Work() for _ in range(waits_module.HANDLES_LIMIT + 1)]
    for number in range(len(works)):
        waits.remember(works[number], Handle("irecv", peer=number))
    assert (waits.handle_of(works[0]).op, waits.handle_of(works[1]).peer) == ("collective", 1)
    works.clear()
    assert waits._handles == {}
