"""What torch refused: who said so, in which step, and the user's own line for it."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_harness.core.diagnosis.case import Case, Explanation, counted, explained, layer_of, module_of, place_of
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import Board, Hint
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.place import Place
from nsa_harness.core.verdict.verdict import Failure, FailureKind

_FIRST_MARKS = 3  # a batch asked for, a batch got, the forward of the whole model
_SHOWN = 3
_OF_PARAMETERS = ("without gradient", "ready twice", "newly used")  # kinds of hints


def step_of(case: Case, failure: Failure) -> int | None:
    """The step whose backward pass went wrong: the one before, where the next forward pass of DDP found out."""
    rank = case.rank(failure.rank) if failure.rank is not None else None
    board = rank.board if rank else None
    if board is None:
        return None
    unfinished = Cause.UNUSED_PARAMS.said_in(failure.text) is not None
    return board.step - 1 if unfinished and _found_out_later(case, board) else board.step


def raised_so(case: Case, cause: Cause) -> list[Failure]:
    """Those that say so, the first in time in front; none where something else failed first."""
    first = case.first_failure
    if first is None or first.kind is not FailureKind.RAISED or first.collateral or not cause.said_in(first.text):
        return []
    return [one for one in case.judgement.failures if not one.collateral and cause.said_in(one.text)]


def raised_alike(one: Failure, other: Failure) -> bool:
    """The same kind of exception in the same line of the program: neither is the other's victim."""
    if one.raised is None or other.raised is None or one.collateral or other.collateral:
        return False
    if one.raised.type != other.raised.type:
        return False
    return user_frame(one.raised.frames) == user_frame(other.raised.frames)


def ranks_of(failures: Sequence[Failure]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in failures if one.rank is not None))


def refusal(
    case: Case,
    failures: Sequence[Failure],
    claim: str,
    *,
    cause: Cause,
    confidence: float,
    advice: str | None = None,
    ranks: tuple[int, ...] | None = None,
    step: int | None = None,
) -> Explanation:
    return explained(
        cause,
        claim,
        ranks=ranks_of(failures) if ranks is None else ranks,
        place=_place(case, failures[0]),
        confidence=confidence,
        proof=tuple(one.raised.proof for one in failures if one.raised)[:1],
        advice=advice,
        step=step,
    )


def hinted(case: Case, failure: Failure, hint: Hint) -> Place:
    frame = hint.frame
    parameter = hint.name if hint.kind in _OF_PARAMETERS else None
    module = parameter.rpartition(".")[0] or None if parameter else module_of(case, failure.rank)["module"]
    return Place(
        file=frame.file if frame else None,
        line=frame.line if frame else None,
        function=frame.function if frame else None,
        module=module if isinstance(module, str) else None,
        layer=layer_of(module if isinstance(module, str) else None),
        parameter=parameter,
    )


def hints_of(failure: Failure, kind: str) -> list[Hint]:
    return [hint for hint in failure.raised.hints if hint.kind == kind] if failure.raised else []


def names_of(failure: Failure) -> str:
    names = [hint.name for kind in _OF_PARAMETERS for hint in hints_of(failure, kind)]
    if not names:
        return "some of its parameters"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{counted(len(names), 'parameter')} ({', '.join(names[:_SHOWN])}{more})" if names[1:] else names[0]


def _place(case: Case, failure: Failure) -> Place | None:
    """The user's line that the probe found for it; else the one that called torch."""
    hints = failure.raised.hints if failure.raised else ()
    placed = [hint for hint in hints if hint.frame is not None]
    if placed and (placed[0].kind != "in place" or len(placed) == 1):
        return hinted(case, failure, placed[0])
    frame = user_frame(failure.raised.frames) if failure.raised else None
    return place_of(case, failure.rank, frame)


def _found_out_later(case: Case, board: Board) -> bool:
    """Nothing but the first forward pass has begun since the last optimizer step, or that step lacked gradients."""
    if board.step < 2:
        return False
    before = board.step - 1
    seen = {one.gradients[before] for one in case.boards.values() if before in one.gradients}
    lacked = board.gradients.get(before, 0) < max({*board.gradients.values(), *seen}, default=0)
    return lacked or board.position <= _FIRST_MARKS
