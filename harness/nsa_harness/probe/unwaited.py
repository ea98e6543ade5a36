"""Asynchronous collectives whose handles nobody ever asks: what they bring may be read before it has come.

Counted by the line that calls. One that waits for some of its handles and not for others has a reason; one that never
asked any of them has none. Only lines of the program count: torch hands its own handles on to C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .places import is_installed, place_text
from .status_file import StatusFileWriter

FEW = 3  # handles of a line: a program that ends has a right to leave its newest one
LINES_LIMIT = 256
NOBODY = -1  # no root is known
# What brings something to every rank, to all but the root, and to the root alone. What a rank only gives away (isend)
# is out of its hands, and a barrier brings nothing.
TO_ALL = frozenset(
    {
        "_all_gather_base",
        "_reduce_scatter_base",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "irecv",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
FROM_ROOT = frozenset({"broadcast", "scatter"})
TO_ROOT = frozenset({"gather", "reduce"})


class CallingLine:
    """One line of the program that calls a collective asynchronously."""

    __slots__ = ("asked", "calls", "op", "place")

    def __init__(self, op: str, place: str) -> None:
        self.op = op
        self.place = place  # "" = nobody asks what becomes of it
        self.calls = 0
        self.asked = False  # some handle of it was waited for, or asked whether it is done


class Unwaited:
    """The lines, by code and instruction. Holds on to no handle."""

    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._lines: dict[tuple[Any, int, str], CallingLine] = {}

    def handed_out(self, op: str, peer: int, frame: Any, tensors: Any) -> CallingLine | None:
        """A handle for `frame`, which called `op`; None where nothing comes of it to this rank."""
        if not (
            op in TO_ALL
            or (op in FROM_ROOT and peer not in (self._board.rank, NOBODY))
            or (op in TO_ROOT and peer == self._board.rank)
        ):
            return None
        key = (frame.f_code, frame.f_lasti, op)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= LINES_LIMIT:
                return None
            line = self._lines[key] = CallingLine(op, self._place(frame, tensors))
        line.calls += 1
        return line

    def records(self) -> Iterator[dict[str, Any]]:
        for line in self._lines.values():
            if line.place and not line.asked and line.calls >= FEW:
                yield {"at": "unwaited", "op": line.op, "place": line.place, "calls": line.calls}

    def _place(self, frame: Any, tensors: Any) -> str:
        """On a device a later wait of the same group, or for the stream, covers it, and nobody sees that."""
        file = frame.f_code.co_filename
        if file.startswith(self._foreign) or is_installed(file) or not all(map(_on_host, tensors)):
            return ""
        return place_text(file, frame.f_lineno, frame.f_code.co_name)


def _on_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")
