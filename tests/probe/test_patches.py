"""A patch changes nothing of what it covers: not the call, not its result, not what the function looks like."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nsa_harness.probe.patches import TroubleLog, before_first_call, patch

Calls = list[tuple[Any, ...]]


def scaled(value: int, *, by: int = 2) -> int:
    """Multiply, or fail for zero."""
    if not value:
        raise ValueError("nothing to scale")
    return value * by


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of `scaled`, which is unpatched afterwards."""
    monkeypatch.setattr(sys.modules[__name__], "scaled", scaled)
    return sys.modules[__name__]


@pytest.fixture
def trouble(tmp_path: Path) -> TroubleLog:
    return TroubleLog(str(tmp_path))


def noted(directory: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for path in directory.glob("*.trouble.jsonl") for line in path.open()]
    return [(line["piece"], line["error"]) for line in lines]


def watched(calls: Calls) -> dict[str, Callable[..., object]]:
    def before(arguments: Any, options: Any) -> str:
        calls.append(("before", arguments, options))
        return "state"

    def after(*values: Any) -> None:
        calls.append(("after", *values[:4], repr(values[4])))

    return {"before": before, "after": after}


def test_both_callbacks_see_the_call_and_the_caller_gets_what_it_would_have_got(
    space: Any, trouble: TroubleLog
) -> None:
    calls: Calls = []
    patch(space, "scaled", "piece", trouble, **watched(calls))
    assert space.scaled(3, by=5) == 15
    with pytest.raises(ValueError, match="nothing to scale") as raised:
        space.scaled(0)
    assert (raised.value.__context__, raised.value.__cause__) == (None, None)
    assert calls == [
        ("before", (3,), {"by": 5}),
        ("after", "state", (3,), {"by": 5}, 15, "None"),
        ("before", (0,), {}),
        ("after", "state", (0,), {}, None, "ValueError('nothing to scale')"),
    ]


def test_a_patched_function_looks_and_pickles_as_before(space: Any, trouble: TroubleLog) -> None:
    original = scaled
    original.marker = "kept"  # type: ignore[attr-defined]
    patch(space, "scaled", "piece", trouble, before=lambda *_: None)
    covered = space.scaled
    assert covered is not original
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__", "marker"):
        assert getattr(covered, name) == getattr(original, name)
    assert inspect.signature(covered) == inspect.signature(original)
    assert inspect.unwrap(covered) is original
    assert pickle.loads(pickle.dumps(covered)) is covered


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_callback_that_raises_is_noted_once_and_never_called_again(
    space: Any, trouble: TroubleLog, tmp_path: Path, fails: str
) -> None:
    calls: Calls = []

    def broken(*_: Any) -> None:
        calls.append(())
        raise OSError("planted")

    patch(space, "scaled", "piece", trouble, **{**watched([]), fails: broken})
    with pytest.raises(ValueError, match="nothing to scale") as raised:
        space.scaled(0)
    assert raised.value.__context__ is None
    assert space.scaled(2) == 4
    assert len(calls) == 1
    assert noted(tmp_path) == [("piece", "OSError: planted")]


def test_nothing_of_the_probe_runs_while_torch_compiles(space: Any, trouble: TroubleLog) -> None:
    calls: Calls = []
    patch(space, "scaled", "piece", trouble, **watched(calls), unless=lambda: True)
    before_first_call(space, "scaled", "piece", trouble, lambda *_: calls.append(()), unless=lambda: True)
    assert space.scaled(2) == 4
    assert calls == []


def test_every_namespace_with_the_function_gets_one_patch(space: Any, trouble: TroubleLog) -> None:
    twin, other = ModuleType("twin"), ModuleType("other")
    twin.scaled, other.scaled = scaled, len  # type: ignore[attr-defined]
    patch(space, "scaled", "piece", trouble, also=(twin, other))
    assert twin.scaled is space.scaled
    assert other.scaled is len


def test_the_first_call_finds_what_was_made_of_the_function_in_the_meantime(space: Any, trouble: TroubleLog) -> None:
    original, calls = scaled, Calls()

    def cover(arguments: Any, _options: Any) -> None:
        assert space.scaled is original
        calls.append(arguments)
        space.scaled = lambda value: -value

    before_first_call(space, "scaled", "piece", trouble, cover)
    waiting = space.scaled
    assert (waiting(2), waiting(3)) == (-2, 6)
    assert calls == [(2,)]


def test_a_first_call_through_a_later_wrapper_leaves_the_wrapper_in_its_place(space: Any, trouble: TroubleLog) -> None:
    calls: Calls = []
    before_first_call(space, "scaled", "piece", trouble, lambda arguments, _: calls.append(arguments))
    inner = space.scaled
    wrapper = space.scaled = lambda value: inner(value) + 1
    assert (space.scaled(2), space.scaled(3)) == (5, 7)
    assert space.scaled is wrapper
    assert calls == [(2,)]


def test_an_inherited_method_is_inherited_again_after_the_first_call(trouble: TroubleLog, tmp_path: Path) -> None:
    class Base:
        def act(self) -> str:
            return "acted"

    class Heir(Base):
        pass

    def broken(*_: Any) -> None:
        raise OSError("planted")

    before_first_call(Heir, "act", "piece", trouble, broken)
    assert Heir().act() == "acted"
    assert "act" not in vars(Heir)
    assert noted(tmp_path) == [("piece", "OSError: planted")]
