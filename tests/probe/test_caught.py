"""An exception that leaves a forward is told by its line, and nothing of the program changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import CaughtException
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.probe.exceptions import CAUGHT_LIMIT, CaughtExceptions
from nsa_harness.probe.places import foreign_code
from nsa_harness.probe.status_file import StatusFileWriter


class Fussy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > 4:
            raise ValueError("too large")
        return x


class Raising(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, _: Tensor) -> Tensor:
        raise self.error


BOARDS: list[StatusFileWriter] = []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.board"


@pytest.fixture
def hooked(path: Path):  # type: ignore[no-untyped-def]
    """A board, and a hook on every module that looks at what was raised, as the probe's own does."""
    BOARDS.append(StatusFileWriter(str(path), rank=0, world_size=1))
    teller = CaughtExceptions(BOARDS[-1], foreign_code(torch))

    def look(_module: nn.Module, _arguments: object, output: object) -> None:
        if output is None:
            teller.note_forward_exit()

    handle = nn.modules.module.register_module_forward_hook(look, always_call=True)
    yield path
    handle.remove()


def told(path: Path) -> tuple[CaughtException, ...]:
    return parse(path.read_bytes(), 0).caught_exceptions


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


def test_the_first_of_each_kind_is_kept_and_the_others_are_counted_with_the_newest_step(hooked: Path) -> None:
    for _ in range(CAUGHT_LIMIT + 3):
        with pytest.raises(ValueError, match="too large"):
            Fussy()(torch.ones(9))
    BOARDS[-1].finish_step()
    BOARDS[-1].begin_step()
    with pytest.raises(RuntimeError):
        nn.Linear(4, 4)(torch.ones(3))
    with pytest.raises(ValueError, match="too large"):
        Fussy()(torch.ones(9))
    raised, after = told(hooked)
    assert (raised.step, raised.type, raised.count, raised.last_step) == (1, "ValueError", CAUGHT_LIMIT + 4, 2)
    assert (after.step, after.type, after.count, after.last_step) == (2, "RuntimeError", 1, 2)
    here = "test_the_first_of_each_kind_is_kept_and_the_others_are_counted_with_the_newest_step"
    # Below: what started the test.
    assert [frame.function for frame in raised.chain][:2] == ["forward", here]
    assert [frame.function for frame in after.chain][:1] == [here]
    assert raised.place is not None
    assert raised.chain[0].line == raised.place.line


def test_more_kinds_than_there_is_room_for_are_left_out(hooked: Path) -> None:
    kept = []
    for kind in [type(f"Error{number}", (ValueError,), {}) for number in range(CAUGHT_LIMIT + 2)]:
        with pytest.raises(kind) as caught:
            Raising(kind("on purpose"))(torch.ones(9))
        kept.append(caught.value)
    assert [one.type for one in told(hooked)] == [f"Error{number}" for number in range(CAUGHT_LIMIT)]


@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, _StopRecomputationError]
)
def test_what_only_steers_is_no_exception_of_the_programs(hooked: Path, kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        Raising(kind())(torch.ones(1))
    assert told(hooked) == ()


@pytest.mark.parametrize("kind", [torch.linalg.LinAlgError, torch.OutOfMemoryError, FileNotFoundError])
def test_an_error_that_torch_or_python_has_a_public_name_for_counts(hooked: Path, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Raising(kind("on purpose"))(torch.ones(1))
    assert [one.type for one in told(hooked)] == [kind.__name__]


def test_a_checkpoint_that_stops_to_recompute_catches_nothing_of_the_programs(hooked: Path) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin()

    checkpoint(nn.Sequential(Block(), Block()), torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert told(hooked) == ()


def test_what_passes_through_packages_alone_is_theirs(hooked: Path) -> None:
    names: dict[str, object] = {"call": nn.Linear(4, 4), "x": torch.ones(3), "found": []}
    package = "try:\n    call(x)\nexcept RuntimeError as error:\n    found.append(str(error))\n"
    exec(compile(package, str(hooked.parent / "site-packages" / "tries.py"), "exec"), names)
    assert names["found"]
    assert told(hooked) == ()


def test_words_that_are_no_step_type_and_place_are_left_out(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    for number, text in enumerate(("", "x ValueError a.py:1:f", "3 ValueError", f"{'9' * 40} E a.py:1:f")):
        board.write_fact(f"{protocol.FACT_CAUGHT}{number}", text)
    board.write_fact(f"{protocol.FACT_CAUGHT}9", "3 ValueError a.py:7:f")
    board.write_fact(f"{protocol.FACT_CAUGHT_AGAIN}9", "9 12 no numbers")
    assert [(one.step, one.type, one.count, one.last_step) for one in told(path)] == [(3, "ValueError", 1, None)]


def test_a_finished_step_keeps_how_many_marks_it_had(path: Path) -> None:
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    for _ in range(3):
        board.write_training_event(board.event_code("forward", "net"))
    board.finish_step(5)
    read = parse(path.read_bytes(), 0)
    assert (read.events_per_step, read.gradients) == ({1: 3}, {1: 5})
