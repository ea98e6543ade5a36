"""torch's debugging modes: on where a launch asks for them, untouched where it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as checkpoint

from nsa_harness import protocol
from nsa_harness.probe import autograd
from nsa_harness.probe.patches import TroubleLog


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TroubleLog]:
    """torch as it was, afterwards too."""
    monkeypatch.delenv(protocol.ENV_ANOMALY, raising=False)
    monkeypatch.delenv(protocol.ENV_CHECKPOINT_DEBUG, raising=False)
    yield TroubleLog(str(tmp_path))
    torch.autograd.set_detect_anomaly(False)
    while autograd._open_contexts:
        autograd._open_contexts.pop().__exit__(None, None, None)


def modes() -> tuple[bool, bool | None]:
    return torch.is_anomaly_enabled(), checkpoint._checkpoint_debug_enabled


def test_nothing_is_switched_on_unasked(trouble: TroubleLog) -> None:
    autograd.switch_debugging_on(torch, trouble)
    assert modes() == (False, None)


@pytest.mark.parametrize(
    ("name", "on"), [(protocol.ENV_ANOMALY, (True, None)), (protocol.ENV_CHECKPOINT_DEBUG, (False, True))]
)
def test_each_mode_is_switched_on_by_its_name_alone(
    name: str, on: tuple[bool, bool | None], trouble: TroubleLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    autograd.switch_debugging_on(torch, trouble)
    assert modes() == on


def test_a_mode_that_this_torch_lacks_is_noted_and_costs_the_other_nothing(
    trouble: TroubleLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(protocol.ENV_ANOMALY, "1")
    monkeypatch.setenv(protocol.ENV_CHECKPOINT_DEBUG, "1")
    monkeypatch.delattr(sys.modules[autograd.CHECKPOINT], "set_checkpoint_debug_enabled")
    autograd.switch_debugging_on(torch, trouble)
    assert torch.is_anomaly_enabled()
    (noted,) = (file.read_text() for file in tmp_path.glob("*.trouble.jsonl"))
    assert "checkpoint debug" in noted
