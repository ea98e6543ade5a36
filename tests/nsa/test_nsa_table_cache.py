"""What is computed once for a length, or for starts as long as they live: when it is given again, and when not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_attention.ops import table_cache as module
from nsa_attention.ops.fused import backend
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.table_cache import cached_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    module.clear_cache()
    yield
    module.clear_cache()


class Computation:
    """Counts how often it runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Tensor:
        self.runs += 1
        return torch.zeros(3)


@pytest.fixture
def compute() -> Computation:
    return Computation()


def starts(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_numbers_of_one_sequence_are_computed_once(compute: Computation) -> None:
    first, second, other = (cached_table(None, CPU, ("spans", number), compute) for number in (7, 7, 8))
    assert first is second
    assert first is not other
    assert compute.runs == 2


def test_only_the_newest_of_many_lengths_are_kept(compute: Computation) -> None:
    for number in range(module.MAX_ENTRIES):
        cached_table(None, CPU, number, compute)
    cached_table(None, CPU, 0, compute)  # is the newest now
    cached_table(None, CPU, "one more", compute)
    assert compute.runs == module.MAX_ENTRIES + 1
    cached_table(None, CPU, 0, compute)
    assert compute.runs == module.MAX_ENTRIES + 1
    cached_table(None, CPU, 1, compute)
    assert compute.runs == module.MAX_ENTRIES + 2


def test_starts_are_told_apart_by_the_tensor_and_not_by_its_values(compute: Computation) -> None:
    one, equal = starts(0, 4), starts(0, 4)
    cached_table(one, CPU, 1, compute)
    cached_table(equal, CPU, 1, compute)
    cached_table(one, CPU, 1, compute)
    assert compute.runs == 2
    cached_table(one, CPU, 2, compute)
    assert compute.runs == 3


def test_starts_that_changed_are_others(compute: Computation) -> None:
    changing = starts(0, 2, 4)
    cached_table(changing, CPU, 1, compute)
    changing[1] = 3
    cached_table(changing, CPU, 1, compute)
    cached_table(changing, CPU, 1, compute)
    assert compute.runs == 2


def test_nothing_outlives_its_starts(compute: Computation) -> None:
    gone = starts(0, 4)
    cached_table(gone, CPU, 1, compute)
    assert len(module._by_starts) == 1
    del gone
    gc.collect()
    assert len(module._by_starts) == 0


def test_what_inference_mode_made_is_not_given_to_a_training_step(compute: Computation) -> None:
    """Its tensors may not be saved for a backward pass."""
    with torch.inference_mode():
        cached_table(None, CPU, 1, compute)
    given = cached_table(None, CPU, 1, compute)
    assert compute.runs == 2
    assert not given.is_inference()
    with torch.inference_mode():
        cached_table(starts(0, 4), CPU, 1, compute)  # starts without a version
    assert compute.runs == 3


def test_what_has_no_values_is_kept_for_nobody(compute: Computation) -> None:
    with FakeTensorMode():
        cached_table(None, CPU, 1, compute)
    compiled = torch.compile(lambda one: one + cached_table(None, CPU, 1, lambda: torch.zeros(3)), backend="eager")
    compiled(torch.ones(3))
    cached_table(None, CPU, 1, compute)
    assert compute.runs == 2


def test_while_a_graph_is_captured_nothing_is_kept(compute: Computation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a captured computation there are values only when the graph is replayed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(module, "_stream", lambda _device: 0)
    gpu = torch.device("cuda")
    cached_table(None, gpu, 1, compute)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cached_table(None, gpu, 1, compute)
    cached_table(None, gpu, 1, compute)
    assert compute.runs == 2


def test_another_stream_computes_for_itself(compute: Computation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for stream in (1, 2, 1):
        monkeypatch.setattr(module, "_stream", lambda _device, stream=stream: stream)
        cached_table(None, torch.device("cuda"), 1, compute)
    assert compute.runs == 2


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_all_layers_share_the_spans_of_a_length(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(backend, "spanned_attention", lambda *tensors: seen.append(tensors[3]))
    fused, given = FusedBackend(), starts(0, 5, 9) if packed else None
    q, k = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 2, 4)
    for _ in range(2):
        fused.attend_compressed(q, k, k, block_len=4, block_stride=2, scale=1.0, starts=given)
        fused.attend_sliding(q, q, q, window=3, scale=1.0, starts=given)
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    fused.attend_sliding(q, q, q, window=4, scale=1.0, starts=given)
    assert seen[4] is not seen[3]
