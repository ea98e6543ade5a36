"""What is declared of an observed job: limits and nothing else, and a name for its folder."""

from __future__ import annotations

import pytest

from nsa_harness.core.plan import Limits
from nsa_harness.core.scenario.observed_job import job_name, observed_limits, observed_spec, with_ranks
from nsa_harness.errors import UsageError


def test_an_observed_job_has_no_deadline_unless_one_is_given():
    assert observed_limits(()) == Limits()
    assert observed_limits(("limits.stall_s=10", "limits.busy_s=auto")) == Limits(stall_s=10.0)
    assert observed_limits(("limits.deadline_s=5",)).deadline_s == 5.0
    assert observed_limits(("limits.deadline_s=5",), 7.0).deadline_s == 7.0


@pytest.mark.parametrize("word", ["train.steps=3", "stall_s=3", "limits", "limits.stall_s=-1", "limits.stal_s=4"])
def test_nothing_but_a_limit_can_be_set(word):
    with pytest.raises(UsageError):
        observed_limits((word,))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("torchrun", "--nproc-per-node", "2", "src/train.py", "--x"), "train"),
        (("./run all.sh",), "run_all.sh"),
        (("/usr/bin/true",), "true"),
        (("..",), "job"),
        (("x" * 300,), "x" * 60),
    ],
)
def test_a_job_is_named_after_its_script(command, name):
    assert job_name(command) == name


def test_a_command_without_ranks_says_so_and_still_makes_a_report():
    spec = observed_spec("job", "observed", ("true",), Limits(), "hash")
    assert (with_ranks(spec, 4).ranks, with_ranks(spec, 4).notes) == (4, ())
    assert with_ranks(spec, 0).ranks == 1
    assert with_ranks(spec, 0).notes == ("no rank was seen: the command did not import torch, or it exited too early",)
