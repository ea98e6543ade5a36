"""An exception that leaves a forward is told by its line, and nothing of the program changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nsa_harness import protocol
from nsa_harness.core.evidence.board import parse
from nsa_harness.core.evidence.evidence import CaughtException
from nsa_harness.probe.board import BoardWriter
from nsa_harness.probe.hooks import CAUGHT_LIMIT, CaughtExceptions
from nsa_harness.probe.places import foreign_code


class Fussy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > 4:
            raise ValueError("too large")
        return x


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.board"


@pytest.fixture
def hooked(path: Path):  # type: ignore[no-untyped-def]
    """A board, and a hook on every module that looks at what was raised, as the probe's own does."""
    teller = CaughtExceptions(BoardWriter(str(path), rank=0, world_size=1), foreign_code(torch))

    def look(_module: nn.Module, _arguments: object, output: object) -> None:
        if output is None:
            teller.look()

    handle = nn.modules.module.register_module_forward_hook(look, always_call=True)
    yield path
    handle.remove()


def told(path: Path) -> tuple[CaughtException, ...]:
    return parse(path.read_bytes(), 0).caught


def test_what_a_forward_raised_is_told_once_with_the_users_own_line(hooked: Path) -> None:
    with pytest.raises(ValueError, match="too large"):
        nn.Sequential(nn.Sequential(Fussy()))(torch.ones(9))
    (one,) = told(hooked)
    assert (one.step, one.type) == (1, "ValueError")
    assert one.place is not None
    assert (Path(one.place.file or "").name, one.place.function) == ("test_caught.py", "forward")


def test_of_what_torch_raised_the_line_that_called_it_is_told(hooked: Path) -> None:
    with pytest.raises(RuntimeError):
        nn.Linear(4, 4)(torch.ones(3))
    (one,) = told(hooked)
    assert one.place is not None
    assert one.place.function == "test_of_what_torch_raised_the_line_that_called_it_is_told"


def test_a_forward_without_a_result_inside_an_except_raised_nothing(hooked: Path) -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None: ...

    try:
        raise KeyError("elsewhere")
    except KeyError:
        Silent()(torch.ones(1))
    assert told(hooked) == ()


def test_a_program_that_catches_all_the_time_is_told_by_its_first_exceptions(hooked: Path) -> None:
    kept = []
    for _ in range(CAUGHT_LIMIT + 3):
        with pytest.raises(ValueError, match="too large") as caught:
            Fussy()(torch.ones(9))
        kept.append(caught.value)
    assert len(told(hooked)) == CAUGHT_LIMIT


def test_words_that_are_no_step_type_and_place_are_left_out(path: Path) -> None:
    board = BoardWriter(str(path), rank=0, world_size=1)
    for number, text in enumerate(("", "x ValueError a.py:1:f", "3 ValueError", f"{'9' * 40} E a.py:1:f")):
        board.fact(f"{protocol.FACT_CAUGHT}{number}", text)
    board.fact(f"{protocol.FACT_CAUGHT}9", "3 ValueError a.py:7:f")
    assert [(one.step, one.type) for one in told(path)] == [(3, "ValueError")]


def test_a_finished_step_keeps_how_many_marks_it_had(path: Path) -> None:
    board = BoardWriter(str(path), rank=0, world_size=1)
    for _ in range(3):
        board.mark(board.what("forward", "net"))
    board.finish_step(5)
    read = parse(path.read_bytes(), 0)
    assert (read.marked, read.gradients) == ({1: 3}, {1: 5})
