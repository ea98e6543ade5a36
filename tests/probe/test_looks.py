"""Looks at a rank's numbers: what bytes say, which steps are looked at, and what a real program leaves in its file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_forks, run_ranks

from nsa_harness import protocol
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import HealthSamples
from nsa_harness.probe.fingerprint import (
    ZEROS_BYTES,
    Unreadable,
    all_zero,
    checksum,
    not_finite,
    sample_bytes,
    size_and_sum,
    values_of,
)
from nsa_harness.probe.gradients import cut_of, note_cut
from nsa_harness.probe.health_samples import is_sampled
from nsa_harness.probe.replicas import (
    LiveReplica,
    _all_reduced,
    belongings,
    forget_reduced,
    note_reduced,
    optimizer_facts,
    summed_and_left_out,
)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def data_of(tensor: torch.Tensor, limit: int = 1 << 20) -> tuple[bytes, str]:
    return sample_bytes(tensor, limit), str(tensor.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, 1.5, -2.0, math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_and_said(dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(37, dtype=dtype)
    tensor[20] = value
    expected = None if math.isfinite(value) else "nan" if math.isnan(value) else "inf"
    assert not_finite(*data_of(tensor)) == expected


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_the_smallest_number_are_finite(dtype: torch.dtype) -> None:
    facts = torch.finfo(dtype)
    tensor = torch.tensor([facts.max, facts.min, facts.tiny, facts.smallest_normal, 0.0], dtype=dtype)
    assert not_finite(*data_of(tensor)) is None
    assert list(values_of(*data_of(tensor))) == tensor.tolist()


@given(values=st.lists(st.floats(width=32), max_size=50))
def test_finite_is_what_torch_calls_finite(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert (not_finite(*data_of(tensor)) is None) == bool(tensor.isfinite().all())


def test_whole_numbers_are_never_broken_and_have_a_checksum() -> None:
    data, dtype = data_of(torch.tensor([-1, 2**62]))
    assert (not_finite(data, dtype), tuple(values_of(data, dtype))) == (None, ())
    assert checksum(data) != checksum(data_of(torch.tensor([-1, 2**61]))[0])


def test_of_a_large_tensor_pieces_from_begin_to_end_are_read_and_no_element_is_cut() -> None:
    tensor = torch.arange(100_003, dtype=torch.float64)
    values = list(values_of(*data_of(tensor, 1000)))
    assert len(values) <= 125
    assert (values[0], values[-1] > 99_990) == (0.0, True)
    assert set(values) <= set(tensor.tolist())


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4).t()[1:, 1:], torch.ones(3, device="meta"), torch.ones(3).to_sparse()]
)
def test_what_has_no_plain_memory_on_the_host_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unreadable):
        sample_bytes(tensor, 1000)


def test_an_empty_tensor_has_nothing_to_say() -> None:
    data, dtype = data_of(torch.ones(0))
    assert (data, not_finite(data, dtype), size_and_sum(values_of(data, dtype))) == (b"", None, (0.0, 0))


@pytest.mark.parametrize(
    ("gradients", "still"),
    [
        ([torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16) * -1], 2),
        ([torch.zeros(3), torch.tensor([0.0, 1e-30])], 0),
        ([torch.tensor([2.0**-17, 0.0], dtype=torch.float16)], 0),  # its bytes are 0x00 and 0x80, as those of -0.0
        ([torch.cat([torch.zeros(5000), torch.ones(1), torch.zeros(5000)])], 0),  # the sample of it is zero
        ([torch.zeros(ZEROS_BYTES // 4 + 1)], 0),
        ([torch.zeros(3).to_sparse()], 0),
        ([], 0),
    ],
    ids=["all zero", "one number", "bytes of zeros", "in the middle", "too much to read", "not to be read", "none"],
)
def test_gradients_are_zero_where_every_number_of_them_was_read_and_is(
    gradients: list[torch.Tensor], still: int
) -> None:
    assert all_zero(gradients) == still


def test_gradients_are_reduced_where_each_was_summed_since_the_newest_backward_began() -> None:
    model = torch.nn.Linear(2, 3)
    every = list(model.named_parameters())
    assert not _all_reduced(every)
    model(torch.ones(2)).sum().backward()
    for parameter in model.parameters():
        assert not _all_reduced(every)
        note_reduced(parameter.grad)
    assert _all_reduced(every)
    forget_reduced()
    assert not _all_reduced(every)
    note_reduced(model.weight.grad[:1])
    note_reduced(model.bias.grad)
    assert not _all_reduced(every), "another tensor begins where the gradient does"


def test_a_model_is_divided_if_the_program_sums_only_some_of_its_gradients() -> None:
    model = torch.nn.Linear(2, 3)
    replica = LiveReplica(0, model, "model")
    model(torch.ones(2)).sum().backward()
    assert list(summed_and_left_out(replica)) == []
    note_reduced(model.weight.grad)
    parts = [(kind, [name for name, _ in part.parameters]) for part, kind in summed_and_left_out(replica)]
    assert parts == [("summed", ["weight"]), ("left out", ["bias"])]
    note_reduced(model.bias.grad)
    assert list(summed_and_left_out(replica)) == []
    forget_reduced()


class Quantizer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        for name, tensor in {"codes": torch.ones(4, 2), "count": torch.ones(4, dtype=torch.int64)}.items():
            self.register_buffer(name, tensor)
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_buffers_and_copies_of_a_model_belong_to_it_and_statistics_caches_and_counters_do_not() -> None:
    model, average, other = Quantizer(), Quantizer(), torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    own_weights = dict(model.named_parameters())
    original = LiveReplica(0, model, "model")
    found = list(belongings([original]))
    things = [(thing, kind) for thing, kind, _ in found]
    assert (things[0][0] is model, things[0][1]) == (True, "buffers")
    assert {id(thing) for thing, kind in things if kind == "copy"} == {id(average), id(shadow)}
    assert not {id(thing) for thing, _ in things} & {id(other), id(own_weights)}
    buffers = LiveReplica(1, model, "buffers", original)
    assert [name for name, _ in buffers._tensors()] == ["codes"]
    model.broadcast_buffers = True
    assert buffers._tensors() == []


def test_a_dict_is_released_once_the_program_has_dropped_it() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    replica = LiveReplica(0, tensors, "copy")
    assert replica.model() is tensors
    del tensors
    assert replica.model() is None


def test_the_state_of_an_optimizer_counts_if_it_covers_the_whole_model() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam([model.weight], lr=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    replica = LiveReplica(0, model, "model")
    assert optimizer_facts([optimizer], replica) == {"rates": [0.5], "state": ""}
    other = torch.optim.Adam([model.bias], lr=0.1)
    other.step()
    both = optimizer_facts([optimizer, other], replica)
    assert (both["rates"], bool(both["state"])) == ([0.5, 0.1], True)
    other.step()
    assert optimizer_facts([optimizer, other], replica)["state"] != both["state"]


def test_a_collective_without_autograd_is_the_reason_if_all_parameters_without_gradient_lie_behind_it() -> None:
    text, image = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    note_cut("all_gather a.py:3:f", [text(torch.ones(2)).tanh()])
    note_cut("all_gather a.py:9:f", [torch.ones(2)])
    weights = {id(parameter) for parameter in text.parameters()}
    assert cut_of(weights) == cut_of({id(text.bias)}) == "all_gather a.py:3:f"
    assert cut_of({*weights, id(image.weight)}) == cut_of(set()) == ""


def test_the_first_steps_are_looked_at_and_then_eight_an_octave() -> None:
    looked = [count for count in range(1, 4097) if is_sampled(count)]
    assert looked[:19] == [*range(1, 17), 18, 20, 22]
    assert [count for count in looked if 2048 < count <= 4096] == [2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096]
    assert not is_sampled(0)


PROGRAM = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

def train():
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    extra = torch.nn.Linear(4, 1)
    for parameter in extra.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.01)
    for step in range(1, 7):
        inputs = torch.randn(3, 4)
        loss = model(inputs).square().mean() + extra(inputs).detach().mean()
        if rank == 1 and step == 5:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 2:
            with torch.no_grad():
                model.module[1].bias.add_(1.0)

train()
folder = os.environ["_NSA_HARNESS_BOARDS"]
lines = {"all": "w", "lock": "w", "log": "a"}
for name, mode in lines.items():
    with open(os.path.join(folder, name), mode) as file:
        file.write("" if name == "lock" else "x")
torch.save({}, os.path.join(folder, "last.pt"))
dist.destroy_process_group()
"""


def looks(boards: Path, pid: int) -> HealthSamples:
    lines = (boards / protocol.HEALTH_SAMPLES.format(pid=pid)).read_text().splitlines()
    found = read_health_samples([json.loads(line) for line in lines])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[HealthSamples]:
    """A program in which everything is wrong that can be without a word."""
    boards = tmp_path_factory.mktemp("boards")
    ranks = run_forks(2, "-c", PROGRAM, boards=boards)
    assert [(rank.status, rank.err) for rank in ranks] == [(0, "")] * 2
    assert not list(boards.glob("*.trouble.jsonl"))
    return [looks(boards, rank.pid) for rank in ranks]


def test_a_broken_loss_is_told_by_the_rank_that_had_it_with_step_and_line(two: list[HealthSamples]) -> None:
    first, second = two
    assert second.non_finite_loss is not None
    assert second.non_finite_loss.place is not None
    assert (second.non_finite_loss.step, second.non_finite_loss.value, second.non_finite_loss.place.function) == (
        5,
        "nan",
        "train",
    )
    assert first.non_finite_loss is None  # its only broken loss came from parameters that were
    assert (first.losses, first.bad_losses, second.bad_in_a_row) == (6, 1, 2)


def test_broken_parameters_are_told_by_every_rank_with_their_names(two: list[HealthSamples]) -> None:
    for one in two:
        assert one.non_finite_parameters is not None
        assert (one.non_finite_parameters.step, one.non_finite_parameters.names[0]) == (5, "0.weight")


def test_a_replica_is_looked_at_as_it_is_made_and_around_each_step(two: list[HealthSamples]) -> None:
    (first, _), (second, _) = (one.replicas for one in two)
    assert (first.ranks, first.names[0]) == ((0, 1), ("0.weight", "0.weight"))
    assert [(look.at, look.round, look.steps) for look in first.samples[:6]] == [
        ("made", 0, 0), ("begun", 0, 0), ("stepped", 1, 1), ("begun", 1, 1), ("stepped", 2, 2), ("begun", 2, 2),
    ]  # fmt: skip
    same = [a.checksum == b.checksum for a, b in zip(first.samples, second.samples, strict=True)]
    assert same[:6] == [True, True, True, True, True, False]


def test_a_model_outside_of_ddp_is_looked_at_from_before_the_first_step_on(two: list[HealthSamples]) -> None:
    for one in two:
        model, extra = one.replicas
        assert (model.in_ddp, model.was_broadcast, extra.in_ddp, extra.was_broadcast) == (True, True, False, True)
        assert (extra.ranks, extra.names) == ((0, 1), (("weight", "weight"), ("bias", "bias")))
        assert [(look.at, look.round) for look in extra.samples[:3]] == [("made", 0), ("stepped", 1), ("begun", 1)]


def test_files_that_are_begun_anew_and_hold_something_are_told_with_their_line(two: list[HealthSamples]) -> None:
    for one in two:
        assert [(Path(each.path).name, each.place.line) for each in one.overwritten_files if each.place] == [
            ("all", 30),
            ("last.pt", 32),
        ]


def test_a_parameter_that_never_had_a_gradient_is_told_though_its_module_ran(two: list[HealthSamples]) -> None:
    assert [one.without_gradient for one in two] == [("Linear.weight", "Linear.bias")] * 2


def test_the_end_and_the_memory_of_each_step_are_told(two: list[HealthSamples]) -> None:
    assert [(one.open_group, one.steps) for one in two] == [(False, 6)] * 2
    assert [point.step for point in two[0].memory] == [1, 2, 3, 4, 5, 6]
    assert all(point.anonymous_bytes > 1 << 20 for one in two for point in one.memory)


LOSSES = """
import hashlib, torch, torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters())
seen = hashlib.sha256()
for step in range(30):
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.update(repr(loss.item()).encode())
print(seen.hexdigest())
"""


@pytest.mark.slow
def test_looks_change_no_bit_of_a_loss(tmp_path: Path) -> None:
    outs: list[Any] = [
        run_ranks(1, "-c", LOSSES, boards=tmp_path / mode, **{protocol.ENV_PROBE: mode})[0].out
        for mode in (protocol.PROBE_FULL, protocol.PROBE_OFF)
    ]
    assert outs[0] == outs[1] != ""
    assert list((tmp_path / protocol.PROBE_FULL).glob("*.looks.jsonl"))
