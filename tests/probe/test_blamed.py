"""What torch refuses, told in the program's own names: real errors of DDP, autograd and checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nsa_harness import protocol
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.probe import autograd
from nsa_harness.probe.exception_hints import hints, in_place_lines, line_that_uses, ordered_names
from nsa_harness.probe.hooks import StepCallers
from nsa_harness.probe.names import ModuleNames
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.places import foreign_code
from nsa_harness.probe.status_file import StatusFileWriter

FOREIGN = foreign_code(torch)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.spare = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = self.trunk

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        x = self.trunk(self.frozen(x))
        return self.experts[chosen](x)


def line_of(text: str) -> int:
    """The first line of this file that has it."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def refused(action: Callable[[], object], *models: Any, fresh: tuple[Any, ...] = ()) -> list[tuple[str, str, Any]]:
    """(kind, name, line) of each hint at what `action` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    found = hints(caught.value, caught.value.__traceback__, models, fresh, FOREIGN)
    assert all(hint.get("file", __file__) == __file__ for hint in found)
    return [(hint["kind"], hint["name"], hint.get("line")) for hint in found]


def test_numbers_of_parameters_become_names_and_the_line_that_uses_or_makes_them() -> None:
    model = DistributedDataParallel(Branches())
    model(torch.ones(2, 4), 0).sum().backward()
    used, made = line_of("return self.experts[chosen](x)"), line_of("self.spare = nn.Linear")
    assert refused(lambda: model(torch.ones(2, 4), 0), model) == [
        ("without gradient", "experts.1.weight", used),
        ("without gradient", "experts.1.bias", used),
        ("without gradient", "spare.weight", made),
        ("without gradient", "spare.bias", made),
    ]


def test_the_line_that_uses_a_whole_part_is_named_for_a_parameter_of_it() -> None:
    plain, wrapped = Branches(), DistributedDataParallel(Branches())
    unused = ("experts.1.weight", "experts.1.bias")
    for model in (plain, wrapped):
        assert line_that_uses([Cell(), model], unused, FOREIGN) == (
            __file__,
            line_of("return self.experts[chosen](x)"),
            "forward",
        )
    assert line_that_uses([plain], ("decoder.weight",), FOREIGN) is None


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x) + x


def test_where_all_of_a_part_shares_its_fate_the_line_that_calls_the_part_is_named() -> None:
    names = ("cell.inner.weight", "cell.inner.bias")
    whole, inside = (one.forward.__code__.co_firstlineno + 1 for one in (Outer, Cell))
    assert line_that_uses([Outer()], names, FOREIGN) == (__file__, whole, "forward")
    assert line_that_uses([Outer()], names[:1], FOREIGN) == (__file__, inside, "forward")


def test_the_order_of_names_is_the_order_of_ddps_numbers() -> None:
    model = DistributedDataParallel(Branches())
    parameters = dict(model.module.named_parameters())
    assert [id(parameters[name]) for name in ordered_names(model)] == [
        id(one) for one in model._build_params_for_reducer()[0]
    ]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(4, 4), Cell()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(2):
            x = checkpoint(self.cell, x, use_reentrant=True)
        return x


def test_what_is_ready_twice_stands_where_the_checkpoint_is() -> None:
    model = DistributedDataParallel(Shared())
    loss = model(torch.ones(2, 4)).sum()
    ((kind, name, line),) = refused(loss.backward, model)
    assert (kind, line) == ("ready twice", line_of("x = checkpoint(self.cell, x"))
    assert name in ("cell.inner.weight", "cell.inner.bias")


def moody(x: Tensor) -> Tensor:
    MOODS.append(len(MOODS))
    return x.sin() if len(MOODS) > 1 else x.sin().exp().tanh()


MOODS: list[int] = []


def test_what_is_computed_otherwise_is_the_function_that_was_checkpointed() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(moody, x, use_reentrant=False).sum()
    assert refused(loss.backward) == [("recomputed", "moody", line_of("MOODS.append"))]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).exp()
        padding = torch.zeros_like(weights, dtype=torch.bool)
        padding[:, -1] = True
        weights.masked_fill_(padding, 0.0)
        return weights


def test_of_several_lines_in_place_the_one_on_what_torch_names_is_told() -> None:
    model = Masked()
    loss = model(torch.ones(2, 4)).sum()
    assert refused(loss.backward, model) == [("in place", "exp", line_of("weights.masked_fill_(padding"))]


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.refine = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stage = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x)
        return self.refine(x) if self.stage > 1 else x


def test_a_module_that_was_never_called_before_is_what_a_static_graph_grew_by() -> None:
    model = DistributedDataParallel(Staged(), static_graph=True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    model.module.stage = 2
    loss = model(torch.ones(2, 4)).sum()
    line = line_of("return self.refine(x) if")
    assert refused(loss.backward, model, fresh=(model.module.refine,)) == [
        ("newly used", "refine.weight", line),
        ("newly used", "refine.bias", line),
    ]


def test_an_error_of_the_users_own_has_no_hints() -> None:
    assert refused(lambda: [][1], Branches()) == []


def counted(self: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    gate += 1.0
    self.calls += 1
    number = 0
    number += 1
    x.requires_grad_(True)
    return gate * number


def test_a_counter_is_no_tensor_changed_in_place() -> None:
    assert list(in_place_lines(counted.__code__, "sigmoid")) == [(line_of("    gate += 1.0"), True)]


def test_modules_are_fresh_in_the_step_of_their_first_call(tmp_path: Path) -> None:
    board = StatusFileWriter(str(tmp_path / "1.board"), rank=0, world_size=1)
    names, model = ModuleNames(board), Staged()
    names.find(model)
    names.find(model.base)
    board.finish_step()
    board.begin_step()
    names.find(model.refine)
    names.find(model.base)
    assert names.new_modules() == [model.refine]
    assert names.models() == [model]


def test_the_lines_that_lead_to_the_optimizer_are_told_once_innermost_first(tmp_path: Path) -> None:
    path = tmp_path / "1.board"
    board = StatusFileWriter(str(path), rank=0, world_size=1)
    callers = StepCallers(board, FOREIGN)
    for _ in range(3):
        callers.note_caller()
    told = parse(path.read_bytes(), 0).optimizer_chain
    name = "test_the_lines_that_lead_to_the_optimizer_are_told_once_innermost_first"
    assert [(frame.file, frame.line, frame.function) for frame in told][:1] == [
        (Path(__file__).name, line_of("        callers.note_caller()"), name)
    ]
    assert protocol.FACTS_USED.unpack_from(path.read_bytes(), protocol.FACTS_USED_AT) == (1,)


def test_a_reentrant_checkpoint_without_a_gradient_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1.board"
    board, module = StatusFileWriter(str(path), rank=0, world_size=1), sys.modules["torch.utils.checkpoint"]
    monkeypatch.setattr(module, "check_backward_validity", module.check_backward_validity)
    autograd.watch_checkpoints(torch, board, TroubleLog(str(tmp_path)))
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert parse(path.read_bytes(), 0).checkpoint_without_gradient is None
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        checkpoint(torch.sin, torch.ones(2), use_reentrant=True)
    place = parse(path.read_bytes(), 0).checkpoint_without_gradient
    assert place is not None
    assert (place.file, place.line) == (__file__, line_of("checkpoint(torch.sin, torch.ones(2), use_reentrant"))
