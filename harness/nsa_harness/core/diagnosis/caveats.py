"""How sure a cause may be: what the evidence leaves open turns a certain claim into a likely one.

Each rule weighs its own evidence; whether the rest of the run fits is asked here, of every rule alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Caveat, row_of
from nsa_harness.core.diagnosis.confidence import CERTAIN, LIKELY, confidence
from nsa_harness.core.diagnosis.context import Case, Explanation, at, raised_alike, shorten
from nsa_harness.core.diagnosis.rank_text import ranks_text
from nsa_harness.core.evidence.evidence import Ending, RankSnapshot
from nsa_harness.core.evidence.exit_messages import gave_up_as
from nsa_harness.core.evidence.stacks import in_probe
from nsa_harness.core.report import Finding, Status
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import waited_for

_RACE_S = 1.0  # two ranks that fail of themselves so close together: the later one need not follow from the first
_BETWEEN_FILES = ("torch/distributed/", "torch/nn/parallel/")
_TO_THE_EYE = frozenset({WaitKind.STOPPED, WaitKind.GONE})  # the kernel says so, without a stack

Check = Callable[[Case, Explanation], "str | None"]


_UNWATCHED = "nobody watched it: the files may lack what came first"


def as_sure_as_proven(case: Case, explanation: Explanation) -> Finding:
    """The finding as it is, or likely, with what else is possible."""
    found = _of_one_moment(case, explanation.finding)
    if found.confidence < CERTAIN or case.judgement.status not in (Status.FAIL, Status.HANG):
        return found
    doubts = explanation.cause.row.doubts
    asked = (_LEFT_OPEN[doubt] for doubt in Caveat if doubt in doubts)
    answers = (one if isinstance(one, str) else one(case, explanation) for one in asked)
    unwatched = _UNWATCHED if case.evidence.ending is Ending.UNWATCHED else None
    left_open = next((words for words in answers if words is not None), unwatched)
    if left_open is None:
        return found
    sure = confidence(explanation.seen, explanation.cause.row.certain_by, left_open=True)
    return replace(found, left_open=tuple(dict.fromkeys((*found.left_open, left_open))), confidence=sure)


def with_reason(found: Finding, besides: Sequence[Finding]) -> Finding:
    """The cause with the reason that stands beside it, where that one is certain and is one: likely, if it was less."""
    for one in besides:
        row = row_of(one.code)
        if row.reason_of == found.code and one.confidence >= CERTAIN:
            sure = max(found.confidence, LIKELY)
            return replace(found, claim=f"{found.claim}; {row.as_reason} ({one.code})", confidence=sure)
    return found


def _of_one_moment(case: Case, found: Finding) -> Finding:
    """Stacks that somebody took of each rank once: they need not be of the same moment."""
    gave_up = any(gave_up_as(rank) for rank in case.evidence.ranks)
    if case.evidence.ending is not Ending.UNWATCHED or not case.stacks_only or gave_up:
        return found
    return replace(found, left_open=(*found.left_open, "it moved, and the dumps of its ranks are of different moments"))


def _all_are_blamed(case: Case, explanation: Explanation) -> str | None:
    """Where ranks do not go together and no party is left that did right."""
    blamed = set(explanation.ranks)
    everyone = [rank.rank for rank in case.evidence.ranks] if explanation.parties is None else explanation.parties
    alone = len(blamed) > 1 and blamed.issuperset(everyone)
    return "the run does not show which of them is wrong" if alone else None


def _some_rank_stands_elsewhere(case: Case, explanation: Explanation) -> str | None:
    """A root that does not wait for those who are blamed, and that they do not wait for: it hangs by itself."""
    if case.judgement.status is not Status.HANG or not explanation.ranks:
        return None
    # Neither blamed itself, nor in one circle of waits with a rank that is.
    apart = (one for one in case.roots if waited_for(one.rank, case.roots).isdisjoint(explanation.ranks))
    alone = next((one for one in apart if one.kind is not WaitKind.GONE), None)
    if alone is None:
        return None
    return f"rank {alone.rank} is blocked in {alone.stands_in} at the same time, which that does not explain"


def _some_rank_is_unseen(case: Case, explanation: Explanation) -> str | None:
    """A rank of which nothing is known may be the one that the others wait for."""
    if case.judgement.status is not Status.HANG:
        return None
    others = (rank.rank for rank in case.evidence.ranks if rank.rank not in explanation.ranks)
    waits = case.waits
    unseen = [rank for rank in others if not _is_seen(waits.get(rank), case.looked.get(rank))]
    return f"nothing is known of {ranks_text(unseen)}" if unseen else None


def _is_seen(wait: Wait | None, looked: RankSnapshot | None) -> bool:
    if wait is None:
        return False
    return wait.kind in _TO_THE_EYE or (looked is not None and (bool(looked.stacks) or looked.board is not None))


def _another_failed_too(case: Case, explanation: Explanation) -> str | None:
    """A rank that failed of itself just after: what came first in time need not be what came first in cause."""
    first = case.first_failure
    if first is None or first.collateral:
        return None
    others = [one for one in case.judgement.failures if one.rank not in (*explanation.ranks, first.rank)]
    close = [one for one in others if not one.collateral and one.at_s - first.at_s < _RACE_S]
    other = next((one for one in close if one.kind is not FailureKind.LEFT and not raised_alike(one, first)), None)
    return None if other is None else f"rank {other.rank} failed of itself too: {shorten(other.text, 120)}"


def _ended_in_a_collective(case: Case, _: Explanation) -> str | None:
    """What a rank is told there, or dies of, may be about another one."""
    first = case.first_failure
    board = case.board(first.rank) if first else None
    if first is not None and first.raised is not None:
        files = [frame.file for frame in first.raised.frames[:1]]
        inside = any(in_probe(file) or any(word in file for word in _BETWEEN_FILES) for file in files)
    else:
        inside = board is not None and any(call.left_s is None for call in board.calls)
    return "that came out of a collective, so another rank may be to blame" if inside else None


def _no_line_of_the_program(case: Case, explanation: Explanation) -> str | None:
    """Of a hang whose place is inside a library the cause may lie in what led there."""
    if case.judgement.status is not Status.HANG or (
        explanation.place is not None and explanation.place.file is not None
    ):
        return None
    return "no line of the program is known for it"


def _caught_something(case: Case, explanation: Explanation) -> str | None:
    """An exception that only the blamed ranks caught may be why they went another way."""
    others = {one.type for rank, board in case.boards.items() if rank not in explanation.ranks for one in board.caught}
    boards = [(rank, case.boards[rank]) for rank in explanation.ranks if rank in case.boards]
    own = [(rank, one) for rank, board in boards for one in board.caught if one.left_forward]
    alone = next(((rank, one) for rank, one in own if one.type not in others), None)
    return None if alone is None else f"rank {alone[0]} caught {alone[1].type}{at(alone[1].place)}, which may be why"


def _a_lost_wake_up(case: Case, explanation: Explanation) -> str | None:
    """A lock has a holder. A condition, an event or a queue waits for what was never done, for whatever reason."""
    root = next((one for one in case.roots if one.rank in explanation.ranks), None)
    leaf = root.leaf if root else None
    waits = leaf is not None and leaf.function.rpartition(".")[2] in ("wait", "get", "put", "result")
    return "the stacks do not show why nobody ends that wait" if waits else None


def _of_a_loop_without_a_beat(case: Case, explanation: Explanation) -> str | None:
    """Only the beat of the process tells a loop in Python from a call that keeps the interpreter's lock."""
    boards = [case.boards.get(rank) for rank in explanation.ranks]
    below = any(root.computing for root in case.roots if root.rank in explanation.ranks)
    blind = below or any(board is None or board.beat_s is None for board in boards)
    return "a call of that line does not return" if blind else None


def _ended_as_if_done(case: Case, explanation: Explanation) -> str | None:
    """A rank that left between two steps may have had fewer of them to do."""
    boards = [board for rank in explanation.ranks if (board := case.boards.get(rank))]
    if any(board.left_from for board in boards):
        return None
    between = [board for board in boards if board.training is not None and board.training.kind in ("step", "data")]
    return "it had fewer steps to do than the others" if between else None


# What is asked of the run; words where no run shows it.
_LEFT_OPEN: dict[Caveat, Check | str] = {
    Caveat.ALL_ARE_BLAMED: _all_are_blamed,
    Caveat.A_RANK_STANDS_ELSEWHERE: _some_rank_stands_elsewhere,
    Caveat.A_RANK_IS_UNSEEN: _some_rank_is_unseen,
    Caveat.ANOTHER_FAILED_TOO: _another_failed_too,
    Caveat.ENDED_IN_A_COLLECTIVE: _ended_in_a_collective,
    Caveat.NO_LINE_OF_THE_PROGRAM: _no_line_of_the_program,
    Caveat.CAUGHT_SOMETHING: _caught_something,
    Caveat.WAITS_FOR_ANYBODY: "the run does not show who should have set it",
    Caveat.LOST_WAKE_UP: _a_lost_wake_up,
    Caveat.LOCK_OF_ITS_OWN: "that process took it twice itself",
    Caveat.LOOP_WITHOUT_A_BEAT: _of_a_loop_without_a_beat,
    Caveat.ENDED_AS_IF_DONE: _ended_as_if_done,
}
