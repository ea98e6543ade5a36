"""What the probe sees of work that a program leaves undone: real processes that do so, and the same done well."""

from __future__ import annotations

import json

import pytest
from ranks import run_forks

from nsa_harness import protocol
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import HealthSamples

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
numbers = torch.ones(2)

for _ in range(3):
    dist.all_reduce(numbers, async_op=True)
for _ in range(3):
    dist.all_reduce(numbers, async_op=True).get_future().wait()
for number in range(4):
    some = dist.all_reduce(numbers, async_op=True)
    if number == 3:
        some.wait()
for _ in range(3):
    dist.barrier(async_op=True)
for _ in range(2):
    dist.all_reduce(numbers, async_op=True)
for _ in range(3):
    dist.broadcast(numbers, 0, async_op=True)  # this rank is the root
group = dist.group.WORLD
for _ in range(3):
    group.allreduce([numbers])  # below what is recorded

class Quit(Exception):
    pass

class Pair(nn.Linear):
    def forward(self, x):
        return {"both": (super().forward(x), None)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.teacher, self.fixed, self.average = (nn.Linear(4, 4) for _ in range(3))
        self.pair = Pair(4, 4)
        self.fixed.eval()
        self.scale = nn.Parameter(torch.tensor([1e30]))
        self.mood = ""

    def forward(self, x):
        if self.mood == "quit":
            raise Quit
        if self.mood == "own word":
            raise ValueError("not this one")
        if self.mood == "full":
            torch.empty(1 << 50)
        if self.mood == "narrow":
            x = x[:, :3]
        with torch.no_grad():
            self.teacher(x)
            self.pair(x)
        self.fixed(x).detach(), self.average(x).detach()
        return self.second(self.first(x).detach()) * (self.scale * 1e-30)

model = Net()

def step(x, mood=""):
    model.mood = mood
    loss = (model(x=x) if mood == "keyword" else model(x)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        for parameter in model.average.parameters():
            parameter.data = parameter.data * 0.9

for mood in ("", "narrow", "", "quit", "", "own word", "", "full", "", "again", "", "keyword", "", "narrow"):
    batch = torch.randn(3, 4)
    again = mood in ("again", "keyword")
    try:
        step(batch, "narrow" if again else mood)
    except Exception:
        if again:
            step(batch, mood)
still = nn.Linear(4, 1)
frozen_by_hand = nn.Linear(4, 1)
with torch.no_grad():
    frozen_by_hand(torch.ones(4))
for parameter in frozen_by_hand.parameters():
    parameter.grad = torch.zeros_like(parameter)
for _ in range(4):
    (still(torch.randn(3, 4)) * 0).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> HealthSamples:
    boards = tmp_path_factory.mktemp("boards")
    (rank,) = run_forks(1, "-c", PROGRAM, boards=boards)
    assert (rank.status, rank.err) == (0, "")
    assert not list(boards.glob("*.trouble.jsonl"))
    lines = (boards / protocol.HEALTH_SAMPLES.format(pid=rank.pid)).read_text().splitlines()
    found = read_health_samples([json.loads(line) for line in lines])
    assert found is not None
    return found


def test_only_a_line_that_asks_none_of_its_handles_is_told(looks: HealthSamples) -> None:
    told = [(one.op, one.place.line, one.calls) for one in looks.unawaited_calls if one.place]
    assert told == [("all_reduce", 9, 3)]


def test_batches_that_an_accident_ended_are_counted_and_those_tried_again_or_left_out_are_not(
    looks: HealthSamples,
) -> None:
    (one,) = looks.dropped_batches
    assert one.place is not None
    assert (one.type, one.place.function, one.batches) == ("RuntimeError", "forward", 2)


def test_what_a_backward_pass_leaves_is_told_of_each_model_without_an_optimizer(looks: HealthSamples) -> None:
    net, linear = looks.gradient_arrivals
    assert (net.model, net.without_gradient_count, net.without_gradient) == ("Net", 2, ("first.weight", "first.bias"))
    assert (net.zero_gradient_count, net.sample_count > 3) == (0, True)
    assert (linear.model, linear.zero_gradient_count, linear.sample_count) == ("Linear", 2, 4)


def test_a_parameter_that_began_with_what_nobody_begins_with_is_told(looks: HealthSamples) -> None:
    assert [(one.unset, one.unset_value) for one in looks.gradient_arrivals] == [(("Net.scale",), "1e+30"), ((), "")]
