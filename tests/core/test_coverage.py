"""What coverage shows: where ranks parted, and that it makes nothing certain."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import board, call, case, evidence, frame, rank_evidence, rank_snapshot, snapshot

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import CERTAIN, EvidenceKind
from nsa_harness.core.diagnosis.explanation import Explanation
from nsa_harness.core.diagnosis.parting import with_parting
from nsa_harness.core.evidence.coverage import Coverage, read_coverage
from nsa_harness.core.evidence.evidence import Evidence, Source, StatusFile
from nsa_harness.core.evidence.reduced import COVERAGE_LINES, with_short_coverage
from nsa_harness.core.recording.first_executions import OwnRun, own_runs
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.collection import excerpts, program_lines
from nsa_harness.core.source_code.program_source import ProgramSource

FILE = "/own/train.py"
TEXT = """\
def save(model):
    if model.is_new:
        return
    dist.barrier()

def main():
    for batch in loader:
        loss = step(batch)
        if loss > limit:
            break
        log(loss)
        try:
            check(loss)
        except ValueError:
            continue
        if rank == 0:
            print(loss)
        reduce(loss)
    save(model)
    if best:
        send(1)
    else:
        send(2)
    finish()
"""
LOOP = [7, 8, 9, 11, 12, 13, 16]  # what each rank executes of main in its first iteration


def coverage(lines: Sequence[int], *, start_s: float = 1.0) -> Coverage:
    """The coverage of a rank that executed a line each second."""
    entries = tuple((0, line, 0, start_s + at) for at, line in enumerate(lines))
    return Coverage(files=(FILE,), threads=("MainThread",), entries=entries)


def program(text: str = TEXT) -> tuple[Source, ...]:
    return tuple(excerpts(FILE, text, set(range(1, 30))))


def runs(*lines: Sequence[int], shared_s: Sequence[float] = ()) -> tuple[OwnRun, ...]:
    ranks = dict(enumerate(map(coverage, lines)))
    return own_runs(ranks, ProgramSource(program()), dict.fromkeys(ranks, shared_s))


def branch_of(run: OwnRun) -> int | None:
    return run.branch and run.branch.line


def test_the_branch_around_new_lines_of_one_rank_is_where_ranks_parted() -> None:
    (run,) = runs([*LOOP, 17, 18], [*LOOP, 18])
    assert (run.ranks, branch_of(run), run.entry.line) == ((0,), 16, 17)
    assert not run.is_detour


def test_both_ways_from_one_branch_are_told() -> None:
    one, other = runs([*LOOP, 18, 19, 20, 21], [*LOOP, 18, 19, 20, 23])
    assert {(one.ranks, branch_of(one)), (other.ranks, branch_of(other))} == {((0,), 20), ((1,), 20)}


def test_a_jump_out_of_a_branch_changes_what_comes_next() -> None:
    (run,) = runs([*LOOP, 18, 10, 19], [*LOOP, 18])
    assert (branch_of(run), run.is_detour, run.is_loop) == (9, True, False)


def test_a_loop_that_one_rank_has_left_is_no_branch() -> None:
    (run,) = runs([*LOOP, 18, 19], [*LOOP, 18])
    assert (branch_of(run), run.is_loop) == (7, True)


def test_a_handler_that_one_rank_entered_is_named_itself() -> None:
    (run,) = runs([*LOOP, 14, 15], [*LOOP])
    assert (branch_of(run), run.is_detour) == (14, True)


def test_who_returned_early_parted_at_its_return_and_not_where_it_is_now() -> None:
    back = runs([*LOOP, 18, 19, 2, 3, 20], [*LOOP, 18, 19, 2, 4], [*LOOP, 18, 19, 2, 3])
    ways = {(run.ranks, branch_of(run)) for run in back}
    assert ((0,), 2) in ways  # its last new line before line 20 was the return
    assert ((1,), 2) in ways


def test_a_rank_that_is_only_further_took_no_other_way() -> None:
    (run,) = runs([*LOOP, 18, 19, 2, 4, 20, 23, 24], [*LOOP, 18, 19, 2, 4])
    assert (run.entry.line, run.branch) == (20, None)


def test_ranks_that_communicated_since_are_together_again() -> None:
    first, second = runs([*LOOP, 17, 18, 19, 20, 21], [*LOOP, 18, 19, 20], shared_s=(10.5,))
    assert (first.entry.line, second.entry.line) == (17, 21)
    own = runs([*LOOP, 17, 21], [*LOOP], shared_s=(8.5,))
    assert [run.entry.line for run in own] == [17, 21]


def test_unknown_source_has_runs_but_no_branch() -> None:
    (run,) = own_runs({0: coverage([7, 8]), 1: coverage([7])}, ProgramSource(()), {})
    assert (run.entry.line, run.branch) == (8, None)


# In the diagnosis.


def seen(*lines: Sequence[int], stand: Sequence[int] = (17, 18), boards: Sequence[StatusFile] = ()) -> Evidence:
    """A run whose ranks executed these lines, and that stand at the lines `stand`."""
    status_files = boards or [board(rank=rank) for rank in range(len(lines))]
    ranks = [
        rank_evidence(rank, coverage=coverage(each), status_file=status_file)
        for rank, (each, status_file) in enumerate(zip(lines, status_files, strict=True))
    ]
    looks = [rank_snapshot(rank, frame(line, file=FILE, function="main")) for rank, line in enumerate(stand)]
    return evidence(*ranks, snapshots=(snapshot(1, 20.0, *looks),), sources=program())


GUESS = Explanation(
    cause=Cause.RANK_CONDITIONAL_COLLECTIVE, evidence=EvidenceKind.PART, ranks=(0,), place=Place(file=FILE, line=18)
)


def line_of(run: Evidence, explanation: Explanation = GUESS) -> int | None:
    place = with_parting(case(run), explanation).place
    return place and place.line


def test_the_line_of_a_guess_becomes_the_branch_and_the_confidence_stays() -> None:
    told = with_parting(case(seen([*LOOP, 17], [*LOOP, 18])), GUESS)
    assert (told.place and told.place.line, told.confidence) == (16, GUESS.confidence)
    parting = told.facts["parting"]
    assert isinstance(parting, dict)
    assert (parting["ranks"], parting["line"].line) == ((0,), 17)


def test_what_is_certain_keeps_its_line_and_gets_the_evidence() -> None:
    sure = replace(GUESS, evidence=EvidenceKind.REPAIRED)
    assert sure.confidence >= CERTAIN
    told = with_parting(case(seen([*LOOP, 17], [*LOOP, 18])), sure)
    assert (told.place, "parting" in told.facts) == (sure.place, True)


def test_a_loop_that_ended_leaves_the_line_to_the_rule() -> None:
    run = seen([*LOOP, 18, 19], [*LOOP, 18], stand=(19, 18))
    assert (line_of(run), line_of(run, replace(GUESS, place=None))) == (18, 7)


def test_lines_that_only_print_are_no_reason() -> None:
    assert line_of(seen([*LOOP, 17, 18], [*LOOP, 18], stand=(18, 18))) == 18


def test_a_cause_that_is_no_way_through_the_program_stays_as_it_is() -> None:
    waits = replace(GUESS, cause=Cause.LOCK_CYCLE)
    assert with_parting(case(seen([*LOOP, 17], [*LOOP, 18])), waits) == waits


def test_a_way_before_the_last_collective_and_the_last_two_steps_is_no_reason() -> None:
    together = board(calls=(call(left_s=9.5),), steps_s=((1, 9.1), (2, 9.6)))
    assert line_of(seen([*LOOP, 17], [*LOOP, 18], boards=[together] * 2)) == 18
    slower = board(calls=(call(left_s=9.5),), steps_s=((1, 7.5), (2, 9.6)))
    assert line_of(seen([*LOOP, 17], [*LOOP, 18], boards=[slower] * 2)) == 16


def test_without_the_coverage_of_every_rank_nothing_changes() -> None:
    run = seen([*LOOP, 17], [*LOOP, 18])
    for missing in ((0,), (1,), (0, 1)):
        ranks = (replace(rank, coverage=None) if rank.rank in missing else rank for rank in run.ranks)
        assert with_parting(case(replace(run, ranks=tuple(ranks))), GUESS) == GUESS


def test_the_source_of_lines_that_only_some_ranks_executed_is_stored() -> None:
    run = replace(seen([*LOOP, 17], [*LOOP, 18]), snapshots=())
    assert program_lines(run) == {FILE: {17, 18}}


# The file.


def file_of(*records: tuple[int, bytes], is_full: int = 0) -> bytes:
    header = protocol.RECORDING_MAGIC, protocol.RECORDING_LAYOUT, 1, 3, 13, -1, -1, is_full
    head = protocol.RECORDING_HEADER.pack(*header).ljust(protocol.RECORDING_HEADER_SIZE, b"\0")
    heads = (protocol.RECORD_HEAD.pack(len(body), kind) + body + bytes(-len(body) & 7) for kind, body in records)
    return head + b"".join(heads) + bytes(40)


def numbers(kind: int, *given: int) -> tuple[int, bytes]:
    return kind, struct.pack(f"<{len(given)}q", *given)


NAMED = (
    (protocol.RECORD_STRING, b"/own/train.py"),
    (protocol.RECORD_STRING, b"MainThread"),
    numbers(protocol.RECORD_THREAD, 0, 1),
)


def line_body(line: int, at_ns: int, *, file: int = 0, thread: int = 0) -> tuple[int, bytes]:
    return numbers(protocol.RECORD_LINE, thread, file, line, at_ns)


def test_a_file_has_the_lines_in_the_order_of_their_first_execution() -> None:
    read = read_coverage(file_of(*NAMED, line_body(9, 3_000_000_000), line_body(2, 4_500_000_000)), 1_000_000_000)
    assert [(line.file, line.line, line.at_s) for line in read.lines()] == [(FILE, 9, 2.0), (FILE, 2, 3.5)]
    assert (read.threads, read.is_complete) == (("MainThread",), True)
    assert not read_coverage(file_of(*NAMED, is_full=1), 0).is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        file_of(line_body(9, 3)),
        file_of(*NAMED, line_body(9, 3, file=2)),
        file_of(*NAMED, line_body(9, 3, thread=1)),
        file_of(*NAMED, (9, b"other")),
        file_of(*NAMED, numbers(protocol.RECORD_LINE, 0, 0, 9)),
        file_of(*NAMED, line_body(9, 3))[:-45],
    ],
)
def test_a_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"damaged coverage file|no header"):
        read_coverage(data, 0)


def test_evidence_keeps_the_files_in_which_ranks_differ_and_else_nothing() -> None:
    common = tuple((1, line, 0, 0.5) for line in range(COVERAGE_LINES))

    def with_common(lines: Sequence[int]) -> Coverage:
        own = coverage(lines)
        return replace(own, files=(FILE, "/own/model.py"), entries=(*common, *own.entries))

    short = evidence(rank_evidence(0, coverage=coverage([7, 8])), rank_evidence(1, coverage=coverage([7])))
    assert with_short_coverage(short) is short
    long = evidence(rank_evidence(0, coverage=with_common([7, 8])), rank_evidence(1, coverage=with_common([7])))
    kept = [rank.coverage for rank in with_short_coverage(long).ranks]
    assert [each and len(each.entries) for each in kept] == [2, 1]
    apart = evidence(
        rank_evidence(0, coverage=coverage(range(COVERAGE_LINES + 1))), rank_evidence(1, coverage=coverage([1]))
    )
    cut = with_short_coverage(apart)
    assert [rank.coverage for rank in cut.ranks] == [None, None]
    assert [trouble.what for trouble in cut.trouble] == ["coverage"]
