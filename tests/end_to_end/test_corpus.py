"""A sample of the corpus under torchrun, by the command; `python tools/accuracy.py` runs all of it."""

from __future__ import annotations

import json

# A collective left out, a lock in backward, and what is wrong in silence.
SAMPLE = ("groups_log_if_high", "backward_lock", "silent_nan_loss_one_rank")


def test_a_sample_of_the_corpus_is_answered_rightly_in_every_part(workspace):
    ran = workspace.harness("selftest", "--score", *SAMPLE)
    corpus = json.loads(ran.out)["corpus"]

    assert {one["name"]: one["wrong"] for one in corpus["answers"]} == {
        name: [] for program in SAMPLE for name in (program, f"{program}_healthy")
    }
    assert ran.code == 0
