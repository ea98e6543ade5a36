"""A sample of the corpus under torchrun; `python -m evaluation run corpus` runs all of it."""

from __future__ import annotations

import sys

import pytest

from evaluation.trials import CorpusRequest, corpus, corpus_root, run_corpus

# A quick run shows that what is labelled, launched and compared belongs together.
LONG = (
    "groups_log_if_high",
    "silent_nan_loss_one_rank",
    "silent_straggler",
    "backward_lock",
    "proc_spawned_rank_raises",
)
SAMPLE = ["data_worker_killed", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]


@pytest.mark.parametrize("program", SAMPLE)
def test_a_sample_of_the_corpus_is_answered_rightly_in_every_part(tmp_path, program):
    chosen = [trial for trial in corpus(corpus_root()) if trial.label.name == program]
    request = CorpusRequest(root=corpus_root(), out=tmp_path, command="a test")
    results = [result for some in run_corpus(chosen, request, sys.stdout).values() for result in some]
    assert {result.trial.name: result.wrong for result in results} == {program: (), f"{program}_healthy": ()}
