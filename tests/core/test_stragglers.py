"""A rank that needs longer than the others for its own part of each step, and healthy runs that look much like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import board, call, case, ended, evidence, finding_of, rank_evidence

from nsa_harness.core.diagnosis.rules.stragglers import straggler
from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.evidence.health_records import read_health_samples
from nsa_harness.core.evidence.health_samples import DataWait, HealthSamples, LineShare, StepTimes
from nsa_harness.core.report import Place

LINE = Place(file="/home/ada/train.py", line=18, function="step")
STEPS = (*range(2, 17), 18, 20, 22, 24)


def times(own_s: float | Callable[[int], float], passed_s: float = 1.0, **changes: Any) -> HealthSamples:
    """The times of a rank that computes for `own_s`, or for `own_s(step)`, and otherwise waits for the others."""
    own = own_s if callable(own_s) else lambda _: own_s
    rows = (
        {"step": step, "count": 1 if step <= 16 else 2, "passed_s": passed_s, "min_own_s": own(step)}
        | {"max_own_s": own(step), "backward_s": 0.0, "fetching_s": 0.0, **changes}
        for step in STEPS
    )
    return HealthSamples(step_times=tuple(StepTimes(**row) for row in rows))


def found(*ranks: HealthSamples | None, sources: tuple[Source, ...] = (), **changes: Any) -> Any:
    members = (rank_evidence(n, exit=ended(n), health=one, **changes) for n, one in enumerate(ranks))
    explanation = straggler(case(evidence(*members, sources=sources)))
    return finding_of(explanation) if explanation else None


def test_the_rank_for_which_the_others_wait_in_every_step_is_named() -> None:
    one = found(times(0.4), times(0.9), times(0.4), times(0.5))
    assert (one.code, one.ranks, one.confidence) == ("straggler", (1,), 0.85)
    facts = {name: one.facts[name] for name in ("slowest_rank", "own_s", "usual_s", "lost_s", "steps", "phase")}
    assert facts == {
        "slowest_rank": 1, "own_s": 0.9, "usual_s": 0.4, "lost_s": 0.5, "steps": 21, "phase": "other",
    }  # fmt: skip
    assert one.facts["other_ranks"] == [0, 2, 3]
    assert one.proof == tuple(f"rank{number}/looks.jsonl" for number in range(4))
    assert "rank 1 needs 2.2 times as long per step as the median of ranks 0, 2, 3" in one.claim


def lines(own_s: float, **counts: int) -> HealthSamples:
    """The times of a rank, and how often each function was seen, on its line 18."""
    shares = tuple(LineShare(place=replace(LINE, function=name), count=count) for name, count in counts.items())
    return replace(times(own_s), lines=shares, line_samples=sum(counts.values()))


def test_the_function_is_named_in_which_the_slow_rank_spends_more_of_its_time_than_the_others() -> None:
    loop = Source(file=LINE.file, first=16, text="def prepare(rows):\n    for row in rows:\n        clean(row)\n")
    ranks = [lines(0.4, backward=18, step=2), lines(0.9, prepare=12, backward=6, step=2)]
    one = found(*ranks, sources=(loop,))
    assert (one.place, one.facts["loop_line"]) == (replace(LINE, function="prepare"), 17)
    assert "It spends 60 % of its time in prepare" in one.claim
    assert "in the loop in line 17, against 0 % on the others" in one.claim
    assert found(lines(0.4, backward=18, step=2), lines(0.9, backward=8, step=2)).place is None
    assert found(lines(0.4, backward=9, step=11), lines(0.9, backward=12, step=8)).place is None


def test_of_two_slow_ranks_both_are_named() -> None:
    one = found(times(0.4), times(0.8), times(0.9), times(0.4))
    assert (one.ranks, one.facts["slowest_rank"]) == ((1, 2), 2)


@pytest.mark.parametrize(
    ("changes", "phase"),
    [({"backward_s": 0.45}, "backward"), ({"fetching_s": 0.45}, "loading"), ({"fetching_s": 0.2}, None)],
)
def test_the_phase_that_takes_most_of_the_extra_time_is_named(changes: dict[str, float], phase: str | None) -> None:
    assert found(times(0.4), times(0.9, **changes)).facts["phase"] == phase


@pytest.mark.parametrize(
    "ranks",
    [
        (times(0.65), times(0.84)),  # a small ratio
        (times(0.02), times(0.06)),  # a small share of the step: all ranks wait for the network
        (times(0.001, passed_s=0.01), times(0.008, passed_s=0.01)),  # a few milliseconds
        (times(lambda step: 0.3 + 0.4 * (step % 2)), times(lambda step: 0.7 - 0.4 * (step % 2))),  # they take turns
        (times(lambda step: 0.9 if step % 10 == 0 else 0.4), times(0.4)),  # rank 0 saves every ten steps
        (times(0.4, max_own_s=0.8), times(0.9, min_own_s=0.6)),  # a busy machine leaves the times uncertain
        (times(0.4, max_own_s=0.9), times(0.9)),  # the other rank does not wait
        (times(0.4, passed_s=0.4), times(0.9, passed_s=0.9)),  # the ranks do not wait for each other in each step
        (times(0.4), None),  # nothing was measured on one rank
        (HealthSamples(), HealthSamples()),  # an older run
        (HealthSamples(step_times=times(0.4).step_times[:9]), times(0.9)),  # too few steps
        (times(0.9),),
    ],
)
def test_ranks_that_are_not_slower_in_most_steps_are_no_finding(ranks: tuple[HealthSamples | None, ...]) -> None:
    assert found(*ranks) is None


def test_stages_of_a_pipeline_are_not_compared() -> None:
    assert found(times(0.4), times(0.9), status_file=board(calls=(call(op="isend"),))) is None
    assert found(times(0.4), times(0.9), status_file=board(calls=(call(op="all_reduce"),))) is not None


def test_a_rank_that_waits_for_its_loader_is_left_to_the_finding_about_loaders() -> None:
    waits = tuple(
        DataWait(step=step, waited_s=waited_s, elapsed_s=elapsed_s, place=LINE)
        for step, waited_s, elapsed_s in ((3, 1.0, 10.0), (12, 9.0, 19.0), (24, 17.0, 30.0))
    )
    slow = times(0.9, fetching_s=0.5)
    assert found(times(0.4), HealthSamples(step_times=slow.step_times, data_waits=waits)) is None


def test_the_times_in_the_probes_file_are_read() -> None:
    record = {
        "at": "step", "optimizer": 0, "step": 18, "anon": None, "gpu": None, "broken": 0, "names": [], "value": "",
        "never": 0, "never_names": [], "losses": 3, "bad_losses": 0, "bad_in_a_row": 0,
        "times_us": [2, 900000, 300000, 400000, 200000, 100000],
    }  # fmt: skip
    samples = read_health_samples([record])
    assert samples is not None
    assert samples.step_times == (
        StepTimes(
            step=18, count=2, passed_s=0.9, min_own_s=0.3, max_own_s=0.4, backward_s=0.2, fetching_s=0.1
        ),
    )  # fmt: skip
