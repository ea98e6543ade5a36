"""A sample of the corpus under torchrun, by the command; `python tools/accuracy.py` runs all of it."""

from __future__ import annotations

import json

import pytest

# A quick run shows that what is labelled, launched and compared belongs together.
LONG = ("groups_log_if_high", "silent_nan_loss_one_rank", "backward_lock")
SAMPLE = ["data_worker_killed", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]


@pytest.mark.parametrize("program", SAMPLE)
def test_a_sample_of_the_corpus_is_answered_rightly_in_every_part(workspace, program):
    ran = workspace.harness("selftest", "--score", program)
    corpus = json.loads(ran.out)["corpus"]

    assert {one["name"]: one["wrong"] for one in corpus["answers"]} == {program: [], f"{program}_healthy": []}
    assert ran.code == 0
