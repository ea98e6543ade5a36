"""Caveats: questions that the evidence leaves open. One open question turns a certain cause into a likely one.

A rule weighs its own evidence. This module checks, in the same way for every rule, whether the rest of the run fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Caveat
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.diagnosis.context import DiagnosisContext, is_same_exception
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.evidence.evidence import Ending, RankSnapshot
from nsa_harness.core.evidence.exit_messages import timeout_message
from nsa_harness.core.evidence.stacks import in_probe
from nsa_harness.core.report import Fact, Status
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import waited_for

_RACE_S = 1.0  # failures closer than this may be independent
_BETWEEN_FILES = ("torch/distributed/", "torch/nn/parallel/")
_SHOWN_BY_KERNEL = frozenset({WaitKind.STOPPED, WaitKind.GONE})  # waits that are proven without a stack

Check = Callable[[DiagnosisContext, Explanation], "OpenQuestion | None"]


def with_caveat(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation with the first caveat that applies to the run; unchanged if it is not certain anyway."""
    explanation = _of_one_moment(context, explanation)
    if explanation.confidence < CERTAIN or context.judgement.status not in (Status.FAIL, Status.HANG):
        return explanation
    doubts = explanation.cause.row.doubts
    answers = (_CHECKS[caveat](context, explanation) for caveat in Caveat if caveat in doubts)
    unwatched = OpenQuestion(code="unwatched") if context.evidence.ending is Ending.POST_MORTEM else None
    return replace(explanation, caveat=next(filter(None, answers), unwatched))


def with_reason(explanation: Explanation, noted: Sequence[Explanation]) -> Explanation:
    """Return the explanation with the certain finding among `noted` that is the reason for it, if there is one."""
    for finding in noted:
        if finding.cause.row.reason_of == explanation.cause.value and finding.confidence >= CERTAIN:
            return replace(explanation, reason=finding.cause)
    return explanation


def _of_one_moment(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Note that stacks collected after the run may show the ranks at different moments."""
    gave_up = any(timeout_message(rank) for rank in context.evidence.ranks)
    if context.evidence.ending is not Ending.POST_MORTEM or not context.stacks_only or gave_up:
        return explanation
    return replace(explanation, left_open=(*explanation.left_open, OpenQuestion(code="different_moments")))


def _left_open(caveat: Caveat, **facts: Fact) -> OpenQuestion:
    return OpenQuestion(code=caveat.value, facts=facts)


def _all_are_blamed(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check whether the explanation blames every rank that disagrees, so that it does not show which side is right."""
    blamed = set(explanation.ranks)
    parties = [rank.rank for rank in context.evidence.ranks] if explanation.parties is None else explanation.parties
    all_blamed = len(blamed) > 1 and blamed.issuperset(parties)
    return _left_open(Caveat.ALL_ARE_BLAMED) if all_blamed else None


def _some_rank_stands_elsewhere(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for a root that hangs on its own: it waits for no rank at fault, and no rank at fault waits for it."""
    if context.judgement.status is not Status.HANG or not explanation.ranks:
        return None
    # These roots are not at fault, and are in no cycle of waits with a rank at fault.
    apart = (root for root in context.roots if waited_for(root.rank, context.roots).isdisjoint(explanation.ranks))
    alone = next((root for root in apart if root.kind is not WaitKind.GONE), None)
    if alone is None:
        return None
    return _left_open(Caveat.A_RANK_STANDS_ELSEWHERE, rank=alone.rank, blocked_in=alone.blocked_in)


def _some_rank_is_unseen(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for a rank whose state is unknown: the other ranks may wait for it."""
    if context.judgement.status is not Status.HANG:
        return None
    others = (rank.rank for rank in context.evidence.ranks if rank.rank not in explanation.ranks)
    waits = context.waits
    unseen = [rank for rank in others if not _is_seen(waits.get(rank), context.last_snapshot.get(rank))]
    return _left_open(Caveat.A_RANK_IS_UNSEEN, unseen=tuple(unseen)) if unseen else None


def _is_seen(wait: Wait | None, snapshot: RankSnapshot | None) -> bool:
    if wait is None:
        return False
    return wait.kind in _SHOWN_BY_KERNEL or (
        snapshot is not None and (bool(snapshot.stacks) or snapshot.status_file is not None)
    )


def _another_failed_too(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for another rank that failed on its own shortly after: the first failure may not have caused the second."""
    first = context.first_failure
    if first is None or first.collateral:
        return None
    others = [failure for failure in context.judgement.failures if failure.rank not in (*explanation.ranks, first.rank)]
    close = [failure for failure in others if not failure.collateral and failure.at_s - first.at_s < _RACE_S]
    other = next(
        (
            failure
            for failure in close
            if failure.kind is not FailureKind.LEFT and not is_same_exception(failure, first)
        ),
        None,
    )
    return None if other is None else _left_open(Caveat.ANOTHER_FAILED_TOO, rank=other.rank, failure=other.text)


def _ended_in_a_collective(context: DiagnosisContext, _: Explanation) -> OpenQuestion | None:
    """Check whether the failure was raised in a collective: its message may be about another rank."""
    first = context.first_failure
    board = context.board(first.rank) if first else None
    if first is not None and first.raised is not None:
        files = [frame.file for frame in first.raised.frames[:1]]
        inside = any(in_probe(file) or any(word in file for word in _BETWEEN_FILES) for file in files)
    else:
        inside = board is not None and any(call.left_s is None for call in board.calls)
    return _left_open(Caveat.ENDED_IN_A_COLLECTIVE) if inside else None


def _no_line_of_the_program(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check whether the place of a hang has no line of the program: the cause may be in the code that called it."""
    if context.judgement.status is not Status.HANG or (
        explanation.place is not None and explanation.place.file is not None
    ):
        return None
    return _left_open(Caveat.NO_LINE_OF_THE_PROGRAM)


def _caught_something(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for an exception that only ranks at fault caught: it may be the reason for their different path."""
    others = {
        exception.type
        for rank, board in context.boards.items()
        if rank not in explanation.ranks
        for exception in board.caught_exceptions
    }
    boards = [(rank, context.boards[rank]) for rank in explanation.ranks if rank in context.boards]
    own = [
        (rank, exception) for rank, board in boards for exception in board.caught_exceptions if exception.left_forward
    ]
    rank, alone = next(((rank, exception) for rank, exception in own if exception.type not in others), (None, None))
    return _left_open(Caveat.CAUGHT_SOMETHING, rank=rank, exception=alone.type, line=alone.place) if alone else None


def _a_lost_wake_up(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for a wait on a condition, event or queue. It has no holder, so the run does not show who should end it."""
    root = next((root for root in context.roots if root.rank in explanation.ranks), None)
    leaf = root.leaf if root else None
    waits = leaf is not None and leaf.function.rpartition(".")[2] in ("wait", "get", "put", "result")
    return _left_open(Caveat.LOST_WAKE_UP) if waits else None


def _of_a_loop_without_a_beat(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for a missing heartbeat. Only a heartbeat distinguishes a loop in Python from a call that keeps the GIL."""
    boards = [context.boards.get(rank) for rank in explanation.ranks]
    below = any(root.computing for root in context.roots if root.rank in explanation.ranks)
    blind = below or any(board is None or board.beat_s is None for board in boards)
    return _left_open(Caveat.LOOP_WITHOUT_A_BEAT) if blind else None


def _ended_as_if_done(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Check for a rank that exited between two steps: it may have had fewer steps to do."""
    boards = [board for rank in explanation.ranks if (board := context.boards.get(rank))]
    if any(board.exit_chain for board in boards):
        return None
    between = [
        board
        for board in boards
        if board.latest_training_event is not None and board.latest_training_event.kind in ("step", "data")
    ]
    return _left_open(Caveat.ENDED_AS_IF_DONE) if between else None


_CHECKS: dict[Caveat, Check] = {
    Caveat.ALL_ARE_BLAMED: _all_are_blamed,
    Caveat.A_RANK_STANDS_ELSEWHERE: _some_rank_stands_elsewhere,
    Caveat.A_RANK_IS_UNSEEN: _some_rank_is_unseen,
    Caveat.ANOTHER_FAILED_TOO: _another_failed_too,
    Caveat.ENDED_IN_A_COLLECTIVE: _ended_in_a_collective,
    Caveat.NO_LINE_OF_THE_PROGRAM: _no_line_of_the_program,
    Caveat.CAUGHT_SOMETHING: _caught_something,
    Caveat.WAITS_FOR_ANYBODY: lambda *_: _left_open(Caveat.WAITS_FOR_ANYBODY),  # no run can rule it out
    Caveat.LOST_WAKE_UP: _a_lost_wake_up,
    Caveat.LOCK_OF_ITS_OWN: lambda *_: _left_open(Caveat.LOCK_OF_ITS_OWN),  # no run can rule it out
    Caveat.LOOP_WITHOUT_A_BEAT: _of_a_loop_without_a_beat,
    Caveat.ENDED_AS_IF_DONE: _ended_as_if_done,
}
