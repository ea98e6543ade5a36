"""What a board tells of calls, loaders and modes, so that the ranks can be laid side by side."""

from __future__ import annotations

import gzip
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import PROGRAMS, REPOSITORY, Boards, ended, fork_ranks

from nsa_harness import protocol
from nsa_harness.core.collectives.call_history import diverged_before_history
from nsa_harness.core.collectives.timeline import timeline, with_comparable_callers
from nsa_harness.core.evidence.evidence import CallCount, DataLoaderProgress, ForwardMode, ModuleCall
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.core.report import Place
from nsa_harness.probe.chains import CHAINS_LIMIT, FRAMES_LIMIT, RECENT_LIMIT, CallPath, Chains
from nsa_harness.probe.hooks import CallingLines
from nsa_harness.probe.status_file import StatusFileWriter

GUEST = PROGRAMS / "guest_timeline.py"
# The ancient ones have layout 1, which is not read.
RECORDED = [
    path
    for path in sorted((REPOSITORY / "tests" / "evidence").glob("*/boards/*.board.gz"))
    if protocol.IDENTITY.unpack_from(gzip.decompress(path.read_bytes()), 0)[1] == protocol.LAYOUT_2
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.board"


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(GUEST.read_text().splitlines(), 1) if text in line)


def test_two_ranks_tell_callers_threads_loaders_and_mode(tmp_path: Path) -> None:
    processes = fork_ranks(2, str(GUEST), boards=tmp_path)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    boards = Boards(tmp_path).all()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [ended(process).status for process in processes] == [0, 0]
    assert not list(tmp_path.glob("*.trouble.jsonl"))

    for board in boards:
        reduced = [call for call in board.calls if call.op == "all_reduce"]
        chains = [[(frame.function, frame.line) for frame in call.chain] for call in reduced]
        inner = ("share", line_of("dist.all_reduce(value)"))
        trained = [inner, ("train", line_of("share(loss.detach())")), ("main", line_of("train(model, batch)"))]
        evaluated = [inner, ("evaluate", line_of("share(torch.nn")), ("main", line_of("    evaluate(model)"))]
        # Below: the guest's last line, and what started it.
        assert [chain[:3] for chain in chains[:-1]] == [trained] * 4 + [evaluated]
        assert chains[-1] == [("beside", line_of("dist.all_reduce(torch.ones(3)"))]
        assert {frame.file for call in reduced for frame in call.chain[:3]} == {str(GUEST)}
        assert [call.grad for call in reduced] == [True] * 4 + [False, True]
        assert {call.tid for call in reduced[:-1]} == {board.pid}
        assert reduced[-1].tid not in (None, board.pid)
        # The loss without parameters came after the model, and is no forward of the program's.
        assert board.mode == ForwardMode(training=False, gradients=False)
        events = timeline(board.rank or 0, board, (), "gloo")
        assert [event.chain for event in events.events] == [call.chain for call in reduced[:-1]]
        assert events.is_complete

    one, other = boards
    assert one.counts == other.counts
    assert one.counts["0"].calls == 6  # the group of the thread was made there
    # What the ranks themselves counted is undone from what they wrote, to the same count.
    older, newer = replace(one, calls=one.calls[-5:]), replace(other, calls=other.calls[-3:])
    assert not diverged_before_history("0", {0: older, 1: newer})
    # All of them are undone to the beginning: a rank of which that fails would say nothing of the other.
    unlike = replace(other, calls=(), counts={"0": CallCount(calls=6, hash=1)})
    assert diverged_before_history("0", {0: one, 1: unlike})
    told = [
        [(loader.number, loader.iterators, loader.batches, loader.is_exhausted) for loader in each.loaders]
        for each in boards
    ]
    assert told == [[(1, 2, 1, False), (2, 2, 2, True)], [(1, 2, 2, False), (2, 3, 2, True)]]
    assert [frame.line for frame in one.loaders[0].chain][:1] == [line_of("enumerate(loader)")]
    lines = with_comparable_callers({board.rank or 0: timeline(board.rank or 0, board, (), "gloo") for board in boards})
    assert len({event.site for event in lines[0].events}) == 2


TRAINER = "/usr/lib/python3.11/site-packages/lightning/ddp.py"


@pytest.mark.parametrize(
    ("file", "led_here", "told"),
    [
        ("/usr/lib/python3.11/site-packages/lightning/ddp.py", True, ("/home/ada/train.py", 9)),
        (
            "/usr/lib/python3.11/site-packages/lightning/ddp.py",
            False,
            ("/usr/lib/python3.11/site-packages/lightning/ddp.py", 3),
        ),
        ("/home/ada/sync.py", True, ("/home/ada/sync.py", 3)),
    ],
)
def test_the_place_of_a_call_that_a_trainer_makes_is_the_line_of_the_program_that_led_to_it(
    path: Path, file: str, led_here: bool, told: tuple[str, int]
) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    inside, caller = board.string_number(f"{file}:3:barrier"), board.string_number("/home/ada/train.py:9:save")
    chain = board.node_number(caller, 0) if led_here else 0
    if led_here and "packages" not in file:
        chain = board.node_number(inside, chain)
    board.enter_call(board.string_number("barrier"), board.string_number("0"), inside, 1, 0, chain=chain)
    (call,) = parse(path.read_bytes(), 0).calls
    assert call.place is not None
    assert (call.place.file, call.place.line) == told


def test_a_chain_that_one_rank_does_not_know_is_compared_by_its_line_alone(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=2)
    op, place, caller = (
        board.string_number("all_reduce"),
        board.string_number("/a/train.py:3:share"),
        board.string_number("/a/train.py:9:main"),
    )
    chain = board.node_number(place, board.node_number(caller, 0))
    board.enter_call(op, board.string_number("0"), place, 1, 0, chain=chain)
    known = parse(path.read_bytes(), 0)
    board.enter_call(op, board.string_number("0"), place, 1, 0)
    mixed = parse(path.read_bytes(), 0)
    lines = with_comparable_callers({0: timeline(0, known, (), "gloo"), 1: timeline(1, mixed, (), "gloo")})
    assert len({event.site for line in lines.values() for event in line.events}) == 1
    assert [frame.line for frame in known.calls[0].chain] == [3, 9]


def test_every_board_of_layout_2_still_reads_and_leaves_empty_what_it_does_not_know() -> None:
    assert len(RECORDED) > 40
    calls = 0
    for recorded in RECORDED:
        data = gzip.decompress(recorded.read_bytes())
        board = parse(data, 0)
        numbers = [call.number for call in board.calls]
        assert numbers == sorted(set(numbers))
        assert all(call.op and call.place and call.entered_s > 0 for call in board.calls if call.op == "all_reduce")
        assert all((call.chain, call.grad, call.tid) == ((), None, None) for call in board.calls)
        assert (board.counts, board.loaders, board.mode, board.forwards) == ({}, (), None, ())
        assert board.events
        calls += len(numbers)
    assert calls > 150


def test_the_modules_of_the_newest_steps_are_told_in_their_order_each_with_the_line_that_called_it(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    place = board.string_number("/a/train.py:3:forward")

    def step(*names: str) -> None:
        board.begin_step()
        for name in names:
            board.write_forward(board.event_code("forward", name), place if name == "blocks.1" else 0)

    for _ in range(protocol.FORWARDS):
        step("a")
        board.finish_step()
    step("net", "blocks.0", "blocks.1")
    board.finish_step()
    step("net", "blocks.1", "net")
    beside = threading.Thread(target=board.write_forward, args=(board.event_code("forward", "other"), 0))
    beside.start()
    beside.join()

    seen, last = parse(path.read_bytes(), 0), protocol.FORWARDS + 2
    assert [one.step for one in seen.forwards] == [last - 2, last - 1, last]
    called = ModuleCall(name="blocks.1", place=Place(file="/a/train.py", line=3, function="forward"))
    net, block = (ModuleCall(name=name, place=None) for name in ("net", "blocks.0"))
    assert seen.modules_entered(last - 1) == (net, block, called)
    assert seen.modules_entered(last) == (net, called, net)
    assert seen.latest_training_event is not None
    assert (seen.latest_training_event.kind, seen.latest_training_event.step) == ("forward", last)
    assert parse(path.read_bytes(), 0, newest_calls=1).forwards == ()
    for _ in range(protocol.FORWARDS):
        board.write_forward(board.event_code("forward", "net"), 0)
    assert [(one.step, one.is_complete) for one in parse(path.read_bytes(), 0).forwards] == [(last, False)]
    assert parse(path.read_bytes(), 0).modules_entered(last) is None


def test_a_torn_forward_ends_what_is_known_of_the_steps_before_it(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    for step in range(3):
        board.begin_step()
        board.write_forward(board.event_code("forward", "net"), 0)
        board.write_forward(board.event_code("forward", f"head{step}"), 0)
        board.finish_step()
    data = bytearray(path.read_bytes())
    assert [one.is_complete for one in parse(bytes(data), 0).forwards] == [True, True, True]
    protocol.U64.pack_into(data, protocol.FORWARDS_AT + 2 * protocol.FORWARD.size, 0)
    torn = parse(bytes(data), 0)
    assert [(one.step, one.is_complete) for one in torn.forwards] == [(2, False), (3, True)]


def test_a_hook_knows_the_line_that_calls_a_module_however_deep_it_is_called(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    lines = CallingLines(board, ("/nowhere/",), "<torch>")
    scope: dict[str, Any] = {"hook": lines.calling_line}
    exec(compile("def inner():\n    return hook()\ndef call():\n    return inner()", "<torch>", "exec"), scope)
    exec(compile("def direct():\n    return hook()", "<torch>", "exec"), scope)
    code = compile("def model():\n    yield call()\n    yield direct()\n    yield call()", "/a/model.py", "exec")

    def hooked() -> int:
        return lines.calling_line()

    scope["hook"] = hooked
    exec(code, scope)
    told = [*scope["model"](), *scope["model"]()]
    first, second, third = (board.string_number(f"/a/model.py:{line}:model") for line in (2, 3, 4))
    assert told == [first, second, third] * 2


def test_a_board_of_layout_2_with_the_size_of_another_is_refused() -> None:
    data = gzip.decompress(RECORDED[0].read_bytes())
    with pytest.raises(ValueError, match=f"has {len(data)} bytes"):
        parse(data + b"\0", 0)


def test_the_hash_of_a_group_tells_another_order_and_outlives_the_calls(path: Path) -> None:
    def rolled(*calls: int) -> tuple[int, int]:
        board = StatusFileWriter(str(path), rank=0, world_size=1)
        group = board.string_number("0")
        for call in calls:
            board.add_to_total(group, call)
        count = parse(path.read_bytes(), 0).counts["0"]
        return count.calls, count.hash

    again = list(range(protocol.CALLS)) * 2
    assert rolled(*again) == rolled(*again)
    assert rolled(*again)[0] == 2 * protocol.CALLS
    assert rolled(1, 2, *again) != rolled(2, 1, *again)
    assert rolled(1)[1] != rolled(1, 1)[1]


def test_a_count_caught_between_two_states_is_left_out(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    group = board.string_number("0")
    board.add_to_total(group, 1)
    old = path.read_bytes()
    board.add_to_total(group, 2)
    new = path.read_bytes()
    whole = [parse(each, 0).counts for each in (old, new)]
    for cut in range(protocol.TOTALS_AT + 8, protocol.TOTALS_AT + protocol.TOTAL.size, 8):
        assert parse(old[:cut] + new[cut:], 0).counts in ({}, *whole)


def test_more_groups_lines_and_loaders_than_there_is_room_for_do_no_harm(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    for group in range(protocol.TOTALS + 9):
        board.add_to_total(group, 1)
    board.write_loader(1, 5, 1, 0, ended=False)
    board.write_loader(protocol.LOADERS + 1, 7, 2, 0, ended=True)
    board.write_loader(1, 6, 1, 0, ended=False)
    place = board.string_number("a.py:1:f")
    nodes = [board.node_number(place, caller) for caller in range(protocol.NODES + 9)]
    assert nodes[:2] == [1, 2]
    assert nodes[-10:] == [0] * 10
    assert board.node_number(place, 0) == 1
    assert board.node_number(0, 0) == 0
    seen = parse(path.read_bytes(), 0)
    assert len(path.read_bytes()) == protocol.STATUS_FILE_SIZE
    assert seen.loaders == (DataLoaderProgress(number=protocol.LOADERS + 1, iterators=2, batches=7, is_exhausted=True),)


def test_a_stack_that_is_known_is_not_read_again_and_code_without_end_is_not_held(path: Path) -> None:
    import sys

    board = StatusFileWriter(str(path), rank=0, world_size=1)
    chains = Chains(board, ("<frozen ",))
    names: dict[str, object] = {"of": lambda: chains.find(sys._getframe(1))}
    for number in range(CHAINS_LIMIT + 5):
        exec(compile("def call():\n    return of()", f"made{number % 3}.py", "exec"), names)
        call = names["call"]
        assert callable(call)
        first, again = [call() for _ in range(2)]
        assert first is again
    assert len(chains._chains) < CHAINS_LIMIT
    assert sum(map(len, chains._recent.values())) <= RECENT_LIMIT


def test_a_chain_is_the_way_of_this_very_call_however_many_lead_to_one_line(path: Path) -> None:
    import sys

    board = StatusFileWriter(str(path), rank=0, world_size=1)
    chains = Chains(board, ("<frozen ",))

    def call() -> CallPath:
        return chains.find(sys._getframe(0))

    def through(depth: int) -> CallPath:
        return through(depth - 1) if depth else call()

    depths = [*range(RECENT_LIMIT + 4), *reversed(range(RECENT_LIMIT + 4)), 3, 0, 3, 200, 201]
    found = [(depth, through(depth)) for depth in depths]
    lengths = [len(chain.frames) for _, chain in found[: RECENT_LIMIT + 4]]
    assert lengths == list(range(lengths[0], lengths[0] + RECENT_LIMIT + 4))
    assert all(chain is found[depth][1] for depth, chain in found if depth < RECENT_LIMIT + 4)
    assert len(found[-1][1].frames) == FRAMES_LIMIT
    assert found[2][1].node != found[3][1].node

    def twice() -> list[CallPath]:
        first = call()
        return [first, call()]

    first, second = twice()
    assert [frame for frame in first.frames if frame not in second.frames] == [first.frames[1]]
    assert first.node != second.node


def test_a_stack_that_ends_earlier_or_goes_on_is_another(path: Path) -> None:
    def frame(back: SimpleNamespace | None) -> SimpleNamespace:
        return SimpleNamespace(f_code=code, f_lasti=4, f_lineno=1, f_back=back)

    code = compile("1", "same.py", "eval")
    chains = Chains(StatusFileWriter(str(path), rank=0, world_size=1), ("<frozen ",))
    stacks = [frame(frame(None)), frame(None), frame(frame(frame(None)))]
    for _ in range(2):
        assert [len(chains.find(stack).frames) for stack in stacks] == [2, 1, 3]


def test_two_lines_that_call_in_turn_have_each_its_own_chain(path: Path) -> None:
    import sys

    chains = Chains(StatusFileWriter(str(path), rank=0, world_size=1), ("<frozen ",))
    texts = ["def call():\n    return of()", "\ndef call():\n    return of()", "\n\ndef call():\n    return of()"]
    calls = []
    for text in texts:
        names: dict[str, object] = {"of": lambda: chains.find(sys._getframe(1))}
        exec(compile(text, "same.py", "exec"), names)
        calls.append(names["call"])
    found = [[call() for call in calls] for _ in range(3)]  # type: ignore[operator]
    assert found[0] == found[1] == found[2]
    assert len({chain.place for chain in found[0]}) == 3
    assert len({chain.frames[0][1] for chain in found[0]}) == 1
