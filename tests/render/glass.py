"""A terminal made of glass: what a person would see after the bytes that a program wrote to it."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECE = re.compile(r"\x1b\[(?P<args>[0-9;?]*)(?P<command>[A-Za-z])|(?P<sign>.)", re.DOTALL)


class Glass:
    """Understands what the writer uses, and refuses everything else."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines: list[str] = [""]
        self.row = self.column = 0
        self.cursor_is_visible = self.wraps = True

    def write(self, text: str) -> None:
        for piece in _PIECE.finditer(text):
            if piece["sign"] is not None:
                self._sign(piece["sign"])
            else:
                self._command(piece["command"], piece["args"])

    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines]

    def _sign(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
        elif sign == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        else:
            assert sign >= " ", f"the control character {sign!r}"
            if self.column + cell_len(sign) > self.columns:
                assert self.wraps, "a line of the frame is wider than the screen"
                self._sign("\n")
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + sign + line[self.column + 1 :]
            self.column += 1

    def _command(self, command: str, args: str) -> None:
        match command, args:
            case "m", _:
                pass
            case (("h" | "l"), "?25"):
                self.cursor_is_visible = command == "h"
            case (("h" | "l"), "?7"):
                self.wraps = command == "h"
            case "A", _:
                self.row -= int(args)
                assert self.row >= 0, "the cursor left the screen"
            case "K", "":
                self.lines[self.row] = self.lines[self.row][: self.column]
            case "J", "":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            case _:
                raise AssertionError(f"not understood: CSI {args} {command}")
