"""Where memory that grows was allocated: counted twice, by the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_harness.probe.growth import Growth
from nsa_harness.probe.patches import TroubleLog

Keep = Callable[[list[object], torch.Tensor, torch.Tensor], None]


@pytest.fixture
def growth(tmp_path: Path) -> Iterator[Growth]:
    one = Growth(torch, SimpleNamespace(is_writing=True), TroubleLog(str(tmp_path)))  # type: ignore[arg-type]
    one.watch()
    yield one
    one._handle.remove()
    one.stop()


def train(growth: Growth, keep: Keep, steps: int = 20) -> list[dict[str, Any]]:
    """A program that keeps something of each step; the lines that grew."""
    weight = torch.zeros(64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept: list[object] = []
    for _ in range(steps):
        rows = torch.ones(1024, 64)
        loss = (rows @ weight).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        keep(kept, rows, loss)
    return [line | {"of": (one["first"], one["last"])} for one in growth.records() for line in one["lines"]]


@pytest.mark.parametrize(
    ("keep", "statement", "size"),
    [
        (lambda kept, rows, _: kept.append(rows), "rows = torch.ones(1024, 64)", 8 * 1024 * 64 * 4),
        # Only the graph of a loss holds the rows that it was computed from.
        (lambda kept, _, loss: kept.append(loss), "rows = torch.ones(1024, 64)", 8 * 1024 * 64 * 4),
        (lambda kept, *_: kept.append(bytes(1 << 20)), "(lambda kept, *_: kept.append(bytes(1 << 20))", 8 << 20),
    ],
)
def test_the_line_that_made_what_is_kept_comes_first(growth: Growth, keep: Keep, statement: str, size: int) -> None:
    most = train(growth, keep)[0]
    file, line, _ = str(most["place"]).rsplit(":", 2)
    assert Path(file).read_text().splitlines()[int(line) - 1].strip().startswith(statement)
    assert most["of"] == (9, 17)
    assert size <= most["bytes"] < size + 20_000


def test_a_program_that_keeps_nothing_has_no_line_of_note(growth: Growth) -> None:
    found = train(growth, lambda *_: None)
    assert [one for one in found if one["bytes"] > 20_000] == []


def test_a_program_of_few_steps_tells_nothing(growth: Growth) -> None:
    assert train(growth, lambda kept, rows, _: kept.append(rows), steps=12) == []
