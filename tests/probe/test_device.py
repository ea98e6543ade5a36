"""How far a GPU is, seen through events: a fake CUDA at the border says which ones it has reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_harness.core.evidence.evidence import StatusFile as SeenBoard
from nsa_harness.core.evidence.status_file import parse
from nsa_harness.probe import device
from nsa_harness.probe.patches import TroubleLog
from nsa_harness.probe.status_file import StatusFileWriter


class FakeCuda:
    """What the probe uses of torch.cuda; `reached` events are done, `log` holds what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self.reached = 0
        self.initialized = True
        self.capturing = False
        self.broken = False
        fake = self

        class CUDAGraph:
            def capture_begin(self, fails: bool = False) -> None:
                fake.log.append("begin")
                if fails:
                    raise RuntimeError("capture refused")

            def capture_end(self) -> None:
                fake.log.append("end")

        self.CUDAGraph = CUDAGraph

    def Event(self) -> FakeEvent:  # noqa: N802 - the name torch has for it
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.events.append(FakeEvent(self, len(self.events)))
        return self.events[-1]

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def set_device(self, number: int) -> None:
        self.log.append(f"device {number}")

    def synchronize(self) -> None:
        raise AssertionError("the probe must never synchronize")


class FakeEvent:
    device = 3

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda, self._number = cuda, number

    def record(self) -> None:
        self._cuda.log.append("record")

    def query(self) -> bool:
        self._cuda.log.append("query")
        return self._number < self._cuda.reached

    def synchronize(self) -> None:
        raise AssertionError("the probe must never synchronize")


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory, self.cuda = directory, FakeCuda()
        self._board = StatusFileWriter(str(directory / "7.board"), rank=0, world_size=1)
        fake_torch = SimpleNamespace(
            cuda=self.cuda, nn=torch.nn, compiler=torch.compiler, version=SimpleNamespace(cuda="12.8")
        )
        marks = device.install(fake_torch, self._board, TroubleLog(str(directory)))
        assert marks is not None
        self.marks = marks

    @property
    def seen(self) -> SeenBoard:
        return parse((self.directory / "7.board").read_bytes(), 0)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    for handle in made.marks._handles:
        handle.remove()


def forward() -> None:
    torch.nn.Identity()(torch.ones(1))


def test_a_torch_without_cuda_costs_nothing(tmp_path: Path) -> None:
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    plain = SimpleNamespace(version=SimpleNamespace(cuda=None))
    assert (
        device.install(
            plain, StatusFileWriter(str(tmp_path / "7.board"), rank=0, world_size=1), TroubleLog(str(tmp_path))
        )
        is None
    )
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_an_event_is_recorded_once_a_beat_and_counted_when_the_device_reaches_it(rig: Rig) -> None:
    forward()
    assert rig.cuda.log == [], "nobody has asked yet"
    rig.marks.poll()
    forward()
    forward()
    assert rig.cuda.log == ["record"]
    rig.marks.poll()
    assert (rig.seen.device_pending, rig.seen.device_completed, rig.seen.device_changed_s) == (1, 0, None)
    rig.cuda.reached = 1
    rig.marks.poll()
    assert (rig.seen.device_pending, rig.seen.device_completed) == (0, 1)
    assert rig.seen.device_changed_s is not None


def test_the_beat_thread_takes_the_device_of_the_event_before_it_asks(rig: Rig) -> None:
    rig.marks.poll()
    forward()
    rig.marks.poll()
    assert rig.cuda.log == ["record", "device 3", "query"]


@pytest.mark.parametrize("state", [{"initialized": False}, {"capturing": True}])
def test_nothing_is_recorded_before_cuda_is_up_or_into_a_capture(rig: Rig, state: dict[str, Any]) -> None:
    vars(rig.cuda).update(state)
    rig.marks.poll()
    forward()
    assert rig.cuda.log == []


def test_nothing_is_asked_while_a_graph_is_captured(rig: Rig) -> None:
    rig.marks.poll()
    forward()
    graph = rig.cuda.CUDAGraph()
    graph.capture_begin()
    rig.marks.poll()
    assert rig.cuda.log == ["record", "begin"]
    graph.capture_end()
    rig.marks.poll()
    assert rig.cuda.log[-1] == "query"


def test_a_capture_that_is_refused_is_over(rig: Rig) -> None:
    rig.marks.poll()
    forward()
    with pytest.raises(RuntimeError, match="capture refused"):
        rig.cuda.CUDAGraph().capture_begin(fails=True)
    rig.marks.poll()
    assert rig.cuda.log[-1] == "query"


def test_a_device_that_fails_is_left_alone_and_the_program_goes_on(rig: Rig, tmp_path: Path) -> None:
    rig.marks.poll()
    rig.cuda.broken = True
    forward()
    assert rig.marks._handles == []
    assert "device-side assert" in next(tmp_path.glob("*.trouble.jsonl")).read_text()
    rig.marks.poll()
    forward()
    assert rig.cuda.log == []


def test_no_more_than_a_bounded_number_of_events_is_pending(rig: Rig) -> None:
    for _ in range(device.PENDING_LIMIT + 5):
        rig.marks.poll()
        forward()
    assert len(rig.cuda.events) == device.PENDING_LIMIT
