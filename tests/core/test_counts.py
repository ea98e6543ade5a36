"""What lies before the calls that are kept: told by the hashes that the ranks counted, where they can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from builders import USER, collective, whole
from lockstep import Made, Run, rounds, run
from test_calls_differ import main, stood

from nsa_harness.core.collectives.call_history import diverged_before_history
from nsa_harness.core.collectives.timeline import timeline
from nsa_harness.core.evidence.evidence import Frame, StatusFile
from nsa_harness.core.evidence.flight import missing_numbers
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.core.report import Place
from nsa_harness.probe.chains import CallPath
from nsa_harness.probe.status_file import StatusFileWriter
from nsa_harness.protocol import EQUAL_SIZES

REDUCE, GATHER = Made(), Made(op="all_gather", line=41)


def counted(tmp_path: Path, made: Sequence[Made], kept: int, *, group: str = "0") -> StatusFile:
    """What the probe itself writes of these calls, and of them the newest `kept`."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.board"
    writer = StatusFileWriter(str(path), rank=0, world_size=2)
    for one in made:
        text = f"{USER}:{one.line}:step"
        place = writer.string_number(text)
        chain = CallPath(place, writer.node_number(place, 0), crc32(text.encode()), [])
        writer.enter_call(
            writer.string_number(one.op), writer.string_number(group), place, one.elements, 0, chain=chain.node
        )
        sized = one.elements if one.op in EQUAL_SIZES else 0
        writer.add_to_total(writer.string_number(group), (crc32(one.op.encode()) << 32 ^ chain.hash) + sized)
    return parse(path.read_bytes(), 0, kept)


SAME = rounds([REDUCE, GATHER], 6)
OTHER_ORDER = [SAME[1], SAME[0], *SAME[2:]]
OTHER_SIZE = [replace(SAME[0], elements=5), *SAME[1:]]
UNEVEN = [SAME[0], replace(SAME[1], elements=5), *SAME[2:]]


@pytest.mark.parametrize(
    ("mine", "kept", "other_kept", "parted"),
    [
        (SAME, 4, 4, False),
        (SAME, 4, 7, False),  # of one rank fewer are kept
        (SAME[:-3], 4, 7, False),  # it stands at another count
        (OTHER_ORDER, 4, 4, True),
        (OTHER_ORDER, 4, 7, True),
        (OTHER_ORDER[:-3], 4, 7, True),
        (OTHER_SIZE, 4, 4, True),
        (UNEVEN, 4, 4, False),  # sizes of it may rightly differ
        (OTHER_ORDER, 12, 12, False),  # it is kept, and seen
        (OTHER_ORDER, 12, 11, True),
        (OTHER_ORDER[:2], 2, 4, False),  # it never came so far
    ],
)
def test_hashes_that_differ_at_one_count_say_that_the_ranks_parted_before(
    tmp_path: Path, mine: Sequence[Made], kept: int, other_kept: int, parted: bool
) -> None:
    boards = {0: counted(tmp_path, SAME, other_kept), 1: counted(tmp_path, mine, kept)}
    assert diverged_before_history("0", boards) is parted
    assert not diverged_before_history("another", boards)


def test_what_cannot_be_undone_says_nothing(tmp_path: Path) -> None:
    one, other = counted(tmp_path, SAME, 4), counted(tmp_path, OTHER_ORDER, 4)
    first, *rest = other.calls
    threads = replace(other, calls=(replace(first, tid=7), *(replace(one, tid=8) for one in rest)))
    assert not diverged_before_history("0", {0: one, 1: threads})
    assert not diverged_before_history("0", {0: one, 1: replace(other, counts={})})
    behind = counted(tmp_path, OTHER_ORDER[:-3], 4)
    assert diverged_before_history("0", {0: one, 1: behind})
    # At 12 calls, and not back to 9, where the other one is.
    unknown = replace(one, calls=tuple(replace(each, chain=()) for each in one.calls))
    assert not diverged_before_history("0", {0: unknown, 1: behind})
    # A call of a library's, which nothing of the program led to, has no line.
    place = Place(file="/usr/lib/python3.11/site-packages/x/y.py", line=1, function="f")
    library = replace(one, calls=tuple(replace(each, chain=(), place=place) for each in one.calls))
    assert diverged_before_history("0", {0: library, 1: behind})


def test_a_hole_in_the_calls_ends_what_is_undone(tmp_path: Path) -> None:
    one, other = counted(tmp_path, SAME, 9), counted(tmp_path, SAME, 9)
    holed = replace(other, calls=(other.calls[0], *other.calls[4:]))
    assert not diverged_before_history("0", {0: one, 1: holed})


MADE = rounds([Made(), Made(op="broadcast", line=41, root=0), Made(op="barrier", line=45, elements=0)], 4)
OTHER_TYPE = [*MADE[:9], replace(MADE[9], dtype="float64"), *MADE[10:]]


def late(ran: Run, boards: dict[int, StatusFile]) -> Run:
    """The same, of boards that have lost what was before the second step."""
    found = {}
    for rank, board in ran.boards.items():
        calls = tuple(
            replace(one, chain=(Frame(file=USER, line=(one.place or Place()).line or 0, function="step"),))
            for one in board.calls[3:]
        )
        found[rank] = replace(board, calls=calls, counts=boards[rank].counts)
    lines = {rank: timeline(rank, found[rank], ran.collectives[rank], "gloo") for rank in found}
    return Run(timelines=lines, boards=found, collectives=ran.collectives)


@pytest.mark.parametrize("parted", [False, True])
def test_a_finding_is_certain_only_where_the_ranks_did_the_same_before_what_is_kept(
    tmp_path: Path, parted: bool
) -> None:
    ran = run(MADE, MADE, OTHER_TYPE)
    first = [MADE[1], MADE[0], *MADE[2:3]] if parted else MADE[:3]
    made = [[*(first if rank == 2 else MADE[:3]), *one[3:10]] for rank, one in enumerate((MADE, MADE, OTHER_TYPE))]
    boards = {rank: counted(tmp_path, one, 10) for rank, one in enumerate(made)}
    found = main(stood(late(ran, boards)))
    assert (found.code, found.ranks) == ("dtype_mismatch", (2,))
    assert (found.confidence, "already differ before the oldest recorded call" in whole(found)) == (
        (0.8, True) if parted else (0.95, False)
    )


def test_numbers_that_a_recorder_lacks_between_others_are_told_and_forbid_certain() -> None:
    whole = [collective(seq, retired=True) for seq in (1, 2, 5, 6)]
    assert list(missing_numbers(whole)) == [("0", 3, 4)]
    # What is open is kept while others go.
    assert list(missing_numbers([replace(whole[0], retired=False), *whole[2:]])) == []
    assert list(missing_numbers([*whole[:2], collective(9, group="1")])) == []

    ran = run(MADE, MADE, OTHER_TYPE)
    assert main(stood(ran)).confidence == 0.95
    holed = dict(ran.collectives)
    holed[1] = tuple(one for one in holed[1] if one.seq != 3)
    found = main(stood(replace(ran, collectives=holed)))
    assert (found.code, found.ranks, found.confidence) == ("dtype_mismatch", (2,), 0.8)
    assert found.left_open == ("the flight recorder of rank 1 lacks some calls of group 0",)
