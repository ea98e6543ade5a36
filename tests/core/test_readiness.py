"""GO or NO-GO: what hand-built runs come to against the shipped checklist, and against small ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import evidence, rank_evidence
from runs import run

from nsa_harness.core.evidence.health_samples import HealthSamples, MemorySample, Replica, ReplicaSample
from nsa_harness.core.experiment.checklist import (
    Checklist,
    PlannedRun,
    checklist_mistakes,
    fill_run_directories,
    run_name_mistakes,
)
from nsa_harness.core.experiment.readiness import (
    CriterionResult,
    Decision,
    Measurement,
    PhaseRuns,
    Readiness,
    expected_s,
    judge_checklist,
    numbers_of,
    planned_numbers,
    slope,
    unmet_need,
)
from nsa_harness.core.report import Finding, MachineFacts, Outcome, Place, Status, Timing, Usage

LAPTOP = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0+cpu")
BOX = replace(LAPTOP, gpus=("A100", "A100"))
SMALL = {
    "phases": [
        {"name": "parts", "runs": ["parts"]},
        {"name": "branches", "runs": ["one", "two"], "needs": ["parts"]},
        {"name": "text", "runs": ["text"], "needs": ["parts"]},
        {"name": "stable", "runs": ["stable"], "needs": ["text"]},
    ],
    "criteria": {
        "throughput": {"metric": "tokens_per_s_median", "in": ["text", "stable"], "gt": 50, "unit": "tokens/s"},
        "steps": {"metric": "steps", "in": ["stable"], "ge": 500},
        "device": {"metric": "peak_gpu_bytes", "in": ["stable"], "lt": 30e9, "unit": "bytes", "needs": {"gpus": 2}},
    },
}
NAMES = (("parts",), ("one", "two"), ("text",), ("stable",))


def checklist(value: Any = SMALL) -> Checklist:
    return Checklist.model_validate_json(json.dumps(value))


def ran(name: str, status: Status = Status.PASS, **changes: Any) -> Outcome:
    metrics = {"tokens_per_s_median": 800.0, "steps": 500.0}
    facts = {"metrics": metrics, "repeat_command": f"nsa-harness run reports/r/{name}/spec.json"}
    return run(name, status, **{**facts, **changes})


def judged(*outcomes: Outcome, facts: MachineFacts = LAPTOP, asked: Checklist | None = None) -> Readiness:
    """The runs that were made; every other run of the phases was not."""
    made = {outcome.spec.scenario: outcome for outcome in outcomes}
    return judge_checklist(
        asked or checklist(),
        [
            PhaseRuns(
                names=names,
                outcomes=tuple(made[name] for name in names if name in made),
                numbers={name: numbers_of(made[name], None) for name in names if name in made},
            )
            for names in NAMES
        ],
        facts,
    )


def all_but(*others: Outcome) -> list[Outcome]:
    names = [name for phase in NAMES for name in phase]
    known = {one.spec.scenario: one for one in others}
    return [known.get(name) or ran(name) for name in names]


def criterion(found: Readiness, name: str) -> tuple[CriterionResult, str | None]:
    row = next(row for row in found.criteria if row.name == name)
    return row.result, row.run


def test_every_criterion_met_is_go_and_what_this_machine_lacks_stands_beside_it() -> None:
    found = judged(*all_but(ran("stable", not_covered=("nccl", "bf16"), notes=("CPU form, chosen because no GPU",))))
    assert found.decision is Decision.GO
    assert [(one.what, one.why) for one in found.not_tested] == [
        ("device", "needs 2 GPUs; this machine has no GPU"),
        ("nccl", "this machine has no GPU"),
        ("bf16", "this machine has no GPU"),
    ]
    assert [row.result for row in found.phases] == [CriterionResult.MET] * 4


@pytest.mark.parametrize(
    ("missed", "changes"),
    [
        ("throughput", {"metrics": {"tokens_per_s_median": 50.0, "steps": 500.0}}),
        ("steps", {"metrics": {"tokens_per_s_median": 51.0, "steps": 499.0}}),
        ("device", {"usage": Usage(peak_rss_bytes=1, peak_gpu_bytes=30_000_000_000, tokens_per_s=None)}),
    ],
)
def test_each_criterion_that_is_missed_is_no_go_and_is_the_only_one_named(missed: str, changes: dict[str, Any]) -> None:
    enough = {"usage": Usage(peak_rss_bytes=1, peak_gpu_bytes=29_999_999_999, tokens_per_s=None)}
    assert judged(*all_but(ran("stable", **enough)), facts=BOX).decision is Decision.GO
    found = judged(*all_but(ran("stable", **{**enough, **changes})), facts=BOX)
    assert found.decision is Decision.NO_GO
    assert [row.name for row in found.criteria if row.result is CriterionResult.MISSED] == [missed]
    assert criterion(found, missed) == (CriterionResult.MISSED, "stable")
    assert found.phases[-1].result is CriterionResult.MISSED
    assert found.phases[-1].why == missed


def test_of_several_runs_the_one_nearest_to_its_limit_counts_with_its_margin() -> None:
    slower = ran("text", metrics={"tokens_per_s_median": 60.0})
    row = judged(*all_but(slower)).criteria[0]
    assert (row.run, row.measured, row.margin) == ("text", Measurement(value=60.0), pytest.approx(0.2))
    assert row.repeat == "nsa-harness run reports/r/text/spec.json"


def test_a_run_that_fails_is_no_go_with_its_cause_line_and_command() -> None:
    place = Place(file="train.py", line=41)
    finding = Finding(
        code="exception", claim="it raised", ranks=(1,), place=place, confidence=0.9, proof=(), advice="mend it"
    )
    found = judged(*all_but(ran("two", Status.FAIL, findings=(finding,), summary="rank 1 raised", next_command="look")))
    assert found.decision is Decision.NO_GO
    bad = found.phases[1].runs[1]
    assert bad.blame is not None
    assert (bad.blame.cause, bad.blame.place, bad.blame.sentence, bad.blame.advice, bad.blame.next) == (
        "exception", place, "rank 1 raised", "mend it", "look",
    )  # fmt: skip


def test_what_is_wrong_in_a_run_that_passed_is_no_go_unless_it_is_accepted() -> None:
    shut = Finding(
        code="gate_collapse", claim="1 gate shut", ranks=(), place=None, confidence=0.7, proof=(), advice="look"
    )
    asked = checklist({**SMALL, "accept": ["gate_collapse"]})
    found = judged(*all_but(ran("one", findings=(shut,))))
    assert found.decision is Decision.NO_GO
    assert (found.phases[1].why, found.phases[1].runs[0].cause) == ("one", "gate_collapse")
    assert judged(*all_but(ran("one", findings=(shut,))), asked=asked).decision is Decision.GO


def test_behind_a_number_that_a_scenario_misses_stands_what_made_it_so() -> None:
    def finding(code: str, claim: str) -> Finding:
        return Finding(code=code, claim=claim, ranks=(), place=None, confidence=0.7, proof=(), advice=f"{code}!")

    findings = (finding("expectation_missed", "loss_last: nan is not < 6"), finding("nan", "the losses were nan"))
    missed = {"cause": "expectation_missed", "summary": "loss_last: nan is not < 6"}
    run_row = judged(*all_but(ran("one", Status.FAIL, findings=findings, **missed))).phases[1].runs[0]
    assert run_row.cause == "nan"
    assert run_row.blame is not None
    assert run_row.blame.sentence == "loss_last: nan is not < 6; the losses were nan"
    assert run_row.blame.advice == "nan!"
    run_row = judged(*all_but(ran("one", Status.FAIL, findings=findings[:1], **missed))).phases[1].runs[0]
    assert run_row.cause == "expectation_missed"


def test_a_failure_that_was_announced_is_as_it_should_be() -> None:
    assert judged(*all_but(ran("one", Status.FAIL, expected=True))).decision is Decision.GO


def test_what_needs_a_failed_phase_is_not_reached_and_what_does_not_goes_on() -> None:
    asked = checklist()
    failed = {"parts": CriterionResult.MET, "branches": CriterionResult.MISSED, "text": CriterionResult.MISSED}
    assert [unmet_need(failed, phase) for phase in asked.phases] == ["", "", "", "text failed"]
    found = judged(all_but(ran("parts", Status.HANG))[0])
    assert [(row.result, row.why) for row in found.phases] == [
        (CriterionResult.MISSED, "parts"),
        (CriterionResult.NOT_REACHED, "parts failed"),
        (CriterionResult.NOT_REACHED, "parts failed"),
        (CriterionResult.NOT_REACHED, "text was not reached"),
    ]
    assert criterion(found, "steps") == (CriterionResult.NOT_REACHED, "stable")
    assert found.decision is Decision.NO_GO


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: all_but()[:-1], "0 of 1 runs finished"),  # interrupted
        (lambda: all_but(ran("stable", Status.ERROR, summary="disk")), "nsa-harness could not judge stable"),
    ],
)
def test_what_could_have_been_told_and_was_not_is_undecided(made: Callable[[], Sequence[Outcome]], why: str) -> None:
    found = judged(*made())
    assert (found.decision, found.phases[-1].why) == (Decision.UNDECIDED, why)


def test_a_number_that_no_run_reported_is_undecided() -> None:
    found = judged(*all_but(ran("stable", metrics={"steps": 500.0})))
    assert found.decision is Decision.UNDECIDED
    assert found.criteria[0].why == "stable reported no tokens_per_s_median (reported: steps)"


def test_a_run_that_cannot_run_here_is_listed_but_a_criterion_of_it_is_undecided() -> None:
    skip = ran("one", Status.SKIP, summary="needs 2 GPUs")
    found = judged(*all_but(skip, ran("two", Status.SKIP, summary="needs 2 GPUs")))
    assert (found.decision, found.phases[1].result) == (Decision.GO, CriterionResult.NOT_TESTED)
    assert ("one", "needs 2 GPUs") in [(one.what, one.why) for one in found.not_tested]
    assert judged(*all_but(ran("stable", Status.SKIP, metrics={}))).decision is Decision.UNDECIDED


RATIO: dict[str, Any] = {
    **SMALL,
    "criteria": {
        "times": {"metric": "step_s_median", "in": ["one"], "over": "two", "lt": 4},
        "apart": {"metric": "loss_last", "in": ["one"], "minus": "two", "le": 0.5},
    },
}


@pytest.mark.parametrize(
    ("other_s", "loss", "decision"),
    [(1.0, 4.5, Decision.GO), (0.5, 4.5, Decision.NO_GO), (1.0, 4.4, Decision.NO_GO), (1.0, 5.6, Decision.NO_GO)],
)
def test_a_number_may_be_told_against_another_run(other_s: float, loss: float, decision: Decision) -> None:
    one = ran("one", metrics={"step_s_median": 2.0, "loss_last": 5.0})
    two = ran("two", metrics={"step_s_median": other_s, "loss_last": loss})
    assert judged(*all_but(one, two), asked=checklist(RATIO)).decision is decision


def test_an_interval_must_lie_within_its_limit_and_one_across_it_decides_nothing() -> None:
    asked = checklist({**SMALL, "criteria": {"slope": {"metric": "memory", "in": ["stable"], "lt": 10.0}}})
    for number, result in (
        (Measurement(value=5.0, low=1.0, high=9.0), CriterionResult.MET),
        (Measurement(value=5.0, low=1.0, high=11.0), CriterionResult.OPEN),
        (Measurement(value=15.0, low=10.0, high=20.0), CriterionResult.MISSED),
    ):
        done = [
            PhaseRuns(
                names=names, outcomes=tuple(map(ran, names)), numbers={name: {"memory": number} for name in names}
            )
            for names in NAMES
        ]
        assert judge_checklist(asked, done, LAPTOP).criteria[0].result is result


def jumps(slope_bytes: float, noise: float = 0.0) -> Iterator[tuple[int, int]]:
    """As the probe looks: at each step at first, then farther and farther apart. A warm-up of 300 MB in 20 steps."""
    for step in [*range(1, 16), *range(16, 64, 2), *range(64, 500, 8)]:
        warm = 300e6 * min(step, 20) / 20
        yield step, int(warm + slope_bytes * step + noise * ((step * 7919) % 13 - 6))


def ends(number: Measurement | None) -> tuple[float, float]:
    assert number is not None
    assert number.low is not None
    assert number.high is not None
    return number.low, number.high


@pytest.mark.parametrize("noise", [0.0, 100e3])
def test_a_slope_is_found_after_the_warm_up_with_an_interval_that_holds_it(noise: float) -> None:
    for grows in (0.0, 1e6):
        low, high = ends(slope(list(jumps(grows, noise))))
        assert low - 1 <= grows <= high + 1
        assert high - low < 10e3
    assert slope(list(jumps(1e6))[:8]) is None


def looked(slope_bytes: float, checksums: Sequence[str]) -> HealthSamples:
    looks = tuple(
        ReplicaSample(at="stepped", round=number, steps=number, checksum=one) for number, one in enumerate(checksums)
    )
    replica = Replica(number=0, ranks=(0, 1), names=(("a", "b"),), samples=looks, blocks=())
    memory = tuple(MemorySample(step=step, anonymous_bytes=size, gpu_bytes=None) for step, size in jumps(slope_bytes))
    return HealthSamples(memory=memory, replicas=(replica,))


def test_the_rank_whose_memory_grows_most_counts_and_replicas_are_told_apart_where_all_have_told() -> None:
    ranks = (rank_evidence(0, health=looked(0.0, "abc")), rank_evidence(1, health=looked(2e5, "abc")))
    numbers = numbers_of(ran("stable"), evidence(*ranks))
    assert numbers["memory_slope_bytes"].value == pytest.approx(2e5, rel=0.01)
    assert (numbers["replicas_apart"], numbers["replica_looks"]) == (Measurement(value=0.0), Measurement(value=3.0))
    assert "gpu_slope_bytes" not in numbers
    assert "replicas_apart" not in numbers_of(ran("stable"), evidence(ranks[0], rank_evidence(1)))


def test_time_is_foretold_by_the_steps_of_what_trained() -> None:
    timing = Timing(launch_s=5.0, wall_s=20.0, no_progress_s=None, detected_s=None, teardown_s=None)
    trained = ran("a", metrics={"step_s_median": 0.5, "steps": 20.0, "optimizer_s": 0.1}, timing=timing)
    data = ran("b", metrics={"step_s_median": 0.001, "steps": 200.0}, timing=timing)
    assert expected_s([100, 200], [data, trained]) == pytest.approx(2 * 10 + 300 * 0.5)
    assert expected_s([100], [data]) is None


@pytest.mark.parametrize(
    ("changes", "place", "what"),
    [
        ({"phases": [*SMALL["phases"], {"name": "text", "runs": ["x"]}]}, ("phases", 4, "name"), "text is the name"),
        ({"phases": [{"name": "a", "runs": ["parts"], "needs": ["b"]}]}, ("phases", 0, "needs", 0), "b is no earlier"),
        ({"accept": ["gate_colapse"]}, ("accept", 0), 'no such finding; did you mean "gate_collapse"?'),
        (
            {"criteria": {"x": {"metric": "m", "in": ["a"], "lt": 1, "over": "a", "minus": "a"}}},
            ("criteria", "x", "minus"),
            "given together with over",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_told_with_its_place(changes: Any, place: tuple[Any, ...], what: str) -> None:
    (found,) = checklist_mistakes(checklist({**SMALL, **changes}))
    assert found[0] == place
    assert found[1].startswith(what)


def test_names_of_runs_are_checked_once_their_matrix_is_known() -> None:
    value: Any = {
        "phases": [
            {"name": "a", "runs": ["x"], "together": "may", "set": {"train.resume": "{late}/c.pt"}},
            {"name": "b", "runs": ["late", "x@k=1"]},
        ],
        "criteria": {
            "time": {"metric": "step_s_median", "in": ["x"], "lt": 1},
            "count": {"metric": "steps", "in": ["x", "y"], "lt": 1},
            "other": {"metric": "loss_last", "in": ["late"], "over": "z", "lt": 1},
            "whole": {"metric": "loss_last", "in": ["late"], "minus": "x", "lt": 1},
            "itself": {"metric": "loss_last", "in": ["late"], "minus": "late", "lt": 1},
        },
    }
    found = list(run_name_mistakes(checklist(value), [("x@k=1", "x@k=2"), ("late", "x@k=1")]))
    assert [place for place, _ in found] == [
        ("phases", 0, "set", "train.resume"),
        ("phases", 1, "runs"),
        ("criteria", "time", "metric"),
        ("criteria", "count", "in", 1),
        ("criteria", "other", "over"),
        ("criteria", "whole", "minus"),
        ("criteria", "itself", "in"),
    ]
    assert found[5][1] == "x has a matrix; name one of its runs: x@k=1, x@k=2, x@k=1"
    value["phases"][0].update(together="must", set={})
    assert ("criteria", "time", "metric") not in [
        place for place, _ in run_name_mistakes(checklist(value), [("x@k=1", "x@k=2"), ("late", "x@k=1")])
    ]


def test_the_folder_of_a_run_takes_the_place_of_its_name() -> None:
    assert fill_run_directories("{a}/c.pt {b} 3", {"a": "reports/r/a~2"}) == "reports/r/a~2/c.pt {b} 3"
    assert fill_run_directories(3, {"a": "x"}) == 3


def test_memory_at_the_end_of_the_planned_run_is_the_peak_and_the_growth_and_shrinking_counts_as_none() -> None:
    numbers = {
        "steps": Measurement(value=500.0),
        "peak_rss_bytes": Measurement(value=5e8),
        "memory_slope_bytes": Measurement(value=162e3, low=-10e3, high=170e3),
        "memory_bytes": Measurement(value=100e9),
    }
    three_days = PlannedRun(steps=518_400, ranks=8, nodes=2)
    found = planned_numbers(three_days, ran("stable"), numbers)
    share = found.pop("planned_memory_share")
    assert found == {}
    assert [share.value, share.low, share.high] == pytest.approx(
        [4 * (5e8 + 162e3 * 518_400) / 100e9, 4 * 5e8 / 100e9, 4 * (5e8 + 170e3 * 518_400) / 100e9]
    )
    assert planned_numbers(three_days, ran("stable"), {"peak_rss_bytes": Measurement(value=5e8)}) == {}


def test_what_the_planned_run_has_and_no_run_had_is_not_tested() -> None:
    asked = checklist({**SMALL, "planned": {"steps": 50_000, "ranks": 16, "seq_len": 4096, "nodes": 2}})
    short = {"chosen": (("model.seq_len", "256"),), "device": "cuda", "not_covered": ()}
    outcomes = [replace(one, spec=replace(one.spec, **short)) for one in all_but()]
    found = judged(*outcomes, facts=replace(LAPTOP, gpus=("A100",) * 8), asked=asked)
    assert [(one.what, one.why) for one in found.not_tested] == [
        ("16 ranks", "at most 2 ran"),
        ("6 of 8 GPUs", "at most 2 ranks ran"),
        ("sequence 4096", "at most 256 tokens ran"),
        ("2 nodes", "one node ran"),
        ("50000 steps", "at most 500 ran"),
    ]
