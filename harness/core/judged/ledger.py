"""The ledger of collectives called from Python: which rank left out a call that the others made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.core.observed.evidence import Board, Call
from harness.core.place import Place

# A key says "this call": the same operation, in the same group, on the same source line.
Key = tuple[str, str, str | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """`rank` passed the point in `step` where `made_by` called `call`, and did not call it."""

    rank: int
    call: Call
    step: int
    counts: tuple[tuple[int, int], ...]  # (rank, how often in that step)

    @property
    def place(self) -> Place | None:
        return self.call.place


def first_skipped(boards: Mapping[int, Board]) -> Skipped | None:
    """The earliest call that some rank left out, or None."""
    found = sorted(_skipped(boards), key=_order)
    return found[0] if found else None


def last_agreed(boards: Mapping[int, Board]) -> Call | None:
    """The latest call that every rank made and left, as the first of them made it; None for fewer than two ranks."""
    ledgers = [_ledger(board) for _, board in sorted(boards.items())]
    if len(ledgers) < 2:
        return None
    agreed = []
    for key in set.intersection(*(set(ledger) for ledger in ledgers)):
        if not all(_remembers(board, key[0]) for board in boards.values()):
            continue
        left = min(sum(call.left_s is not None for call in ledger[key]) for ledger in ledgers)
        agreed += ledgers[0][key][left - 1 : left] if left else []
    return max(agreed, key=lambda call: (call.step, call.number), default=None)


def ledger_lines(board: Board) -> Iterator[str]:
    """The calls as a table for people, oldest first."""
    yield "number  step  position  entered_s     left_s  elements  call"
    for call in board.calls:
        left = "   inside" if call.left_s is None else f"{call.left_s:9.3f}"
        place = f"  {call.place.file}:{call.place.line} {call.place.function}" if call.place else ""
        yield (
            f"{call.number:6}  {call.step:4}  {call.position:8}  {call.entered_s:9.3f}  {left}  {call.elements:8}"
            f"  {call.op} group {call.group}{place}"
        )


def _order(skipped: Skipped) -> tuple[int, int, int, int, str, str]:
    """Whole, so that the same evidence gives the same answer in every process."""
    call = skipped.call
    return skipped.step, call.position, call.number, skipped.rank, call.op, call.group


def _skipped(boards: Mapping[int, Board]) -> Iterator[Skipped]:
    ledgers = {rank: _ledger(board) for rank, board in boards.items()}
    keys = {key for ledger in ledgers.values() for key in ledger}
    for step, key in keys:
        counts = {
            rank: len(ledger.get((step, key), ())) for rank, ledger in ledgers.items() if _remembers(boards[rank], step)
        }
        most = max(counts.values(), default=0)
        caller = next((rank for rank, count in counts.items() if count == most), None)
        for rank, count in counts.items():
            if caller is None or count == most:
                continue
            call = ledgers[caller][(step, key)][count]
            if _passed(boards[rank], call):
                yield Skipped(rank=rank, call=call, step=step, counts=tuple(sorted(counts.items())))


def _ledger(board: Board) -> dict[tuple[int, Key], list[Call]]:
    ledger: dict[tuple[int, Key], list[Call]] = {}
    for call in board.calls:
        place = call.place
        key = (call.op, call.group, place.file if place else None, place.line if place else None)
        ledger.setdefault((call.step, key), []).append(call)
    return ledger


def _remembers(board: Board, step: int) -> bool:
    """The ring still holds every call of that step: nothing older than the step's first call was overwritten."""
    if not board.calls or board.calls[0].number == 1:
        return True
    return board.calls[0].step < step


def _passed(board: Board, call: Call) -> bool:
    """The rank is beyond the point in the program where `call` is made, and not because it failed before it."""
    if board.step != call.step:
        return board.step > call.step
    if board.position > call.position:
        return True
    later = [one for one in board.calls if one.step == call.step and one.position >= call.position]
    met = Counter((one.op, one.group) for one in later)
    return bool(later) and met[(call.op, call.group)] == 0
