"""Looking deeper: which launch with one change comes next, and what it says about the attempt it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import evidence as evidence_of
from builders import frame, raised, rank_evidence, spec, worded
from hypothesis import given
from runs import RUNS, run

from nsa_harness.core.comparison.severity import severity
from nsa_harness.core.evidence.evidence import DebugMessage
from nsa_harness.core.evidence.health_samples import HealthSamples, MemoryGrowth
from nsa_harness.core.experiment import diagnostic_rerun
from nsa_harness.core.experiment.diagnostic_rerun import (
    AGAIN,
    GROWTH,
    MAX_RERUNS,
    next_change,
    with_change,
)
from nsa_harness.core.experiment.repeats import with_flakiness
from nsa_harness.core.outcome.rerun_findings import rerun_findings
from nsa_harness.core.plan import DiagnosticRerun, Expect, RunSpec
from nsa_harness.core.report import Culprit, Finding, Outcome, Place, Report, Severity, Status, exit_code
from nsa_harness.core.schedule import Policy, failed_enough, needs_another_attempt
from nsa_harness.subject.playbook import second_runs
from nsa_harness.texts.sentences import with_words

PASS, FAIL, HANG = Status.PASS, Status.FAIL, Status.HANG
IN_BACKWARD = Place(file="/home/ada/train.py", line=20, function="main", text="loss.backward()")
FORWARD = Place(file="/home/ada/model.py", line=11, function="forward", text="y = g * x")
OURS = (
    "/lib/nsa",
    "--attention",
    "nsa",
    "--branch",
    "all",
    "--backend",
    "gloo",
    "--no-detect-anomaly",
    "--trace-grads",
)
DDP = "rank 0 raised RuntimeError: Parameter indices which did not receive grad for rank 0: 4 5"


def bad(
    cause: str, status: Status = FAIL, *, confidence: float = 0.95, place: Place | None = None, **more: Any
) -> Outcome:
    culprit = Culprit(ranks=(0,), step=1, collective=None, place=place)
    return run("ddp", status, cause=cause, culprit=culprit, findings=(found(cause, confidence=confidence),), **more)


def found(code: str, claim: str = "", *, confidence: float = 0.95, place: Place | None = None) -> Finding:
    return Finding(code=code, claim=claim, ranks=(0,), place=place, confidence=confidence, proof=("p",), advice="a")


def launch(**changes: Any) -> RunSpec:
    return replace(spec(), **{"ranks": 2, "scenario": "ddp", **changes})


def rerun_finding(base: Outcome, deeper: Outcome) -> Finding:
    return worded(diagnostic_rerun.rerun_finding(base, deeper))


def with_diagnostic_reruns(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    return with_words(diagnostic_rerun.with_diagnostic_reruns(outcomes))


def planned(outcome: Outcome, probe: str = "full", **changes: Any) -> list[str]:
    """Every change that would be made, one after another."""
    made: list[str] = []
    base = launch(**changes)
    while change := next_change(base, outcome, made, probe=probe, program_changes=second_runs(base)):
        made.append(change.name)
    return made


def look(change: str, status: Status = FAIL, *, says: str = "this", cause: str | None = None, **more: Any) -> Outcome:
    asked = DiagnosticRerun(of=1, change=change, says=says)
    told = {"cause": cause} if cause else {}
    return run("ddp", status, attempt=2, spec_hash="deeper", final=False, deepening=asked, dir="ddp~2", **told, **more)


@pytest.mark.parametrize(
    ("outcome", "changes", "names"),
    [
        (bad("exception", place=IN_BACKWARD), {}, ["anomaly"]),
        (bad("exception", phase="backward"), {}, ["anomaly"]),
        (bad("exception", place=FORWARD, phase="forward"), {}, []),
        (bad("inplace_modification", phase="backward"), {}, ["anomaly"]),
        (bad("exception", summary=DDP), {}, ["names"]),
        (bad("exception", summary=DDP), {"env": (("TORCH_DISTRIBUTED_DEBUG", "INFO"),)}, []),
        (bad("exception", summary=DDP), {"ranks": 1}, []),
        (bad("ready_twice", place=Place(parameter="gate.weight")), {}, []),
        (bad("checkpoint_recompute_mismatch"), {}, ["checkpoint_debug"]),
        (bad("cuda_assert"), {"device": "cuda"}, ["launch_blocking"]),
        (bad("cuda_assert"), {"device": "cpu"}, []),
        (bad("lock_cycle", HANG), {}, []),
        (bad("unknown", HANG, confidence=0.3), {}, ["recorded"]),
        (bad("unknown", HANG, confidence=0.3), {"ranks": 1}, ["again"]),
        (bad("unknown", HANG, confidence=0.3), {"env": (("_NSA_HARNESS_RECORD", "{}"),)}, ["again"]),
        (bad("rank_conditional_collective", HANG), {}, ["recorded"]),
        (bad("uneven_inputs"), {}, ["recorded"]),
        (bad("unknown", HANG, confidence=0.3), {"program": OURS}, ["recorded", "vanilla"]),
        (bad("exception", phase="backward", confidence=0.5), {"program": OURS}, ["anomaly", "recorded", "names"]),
        (bad("transport", HANG), {"program": tuple(w.replace("gloo", "nccl") for w in OURS)}, ["gloo", "again"]),
        (bad("transport", HANG), {"program": ("train.py", "--backend", "nccl")}, ["again"]),
        (bad("unknown", HANG, confidence=0.3), {"program": ("t.py", *OURS[1:-1])}, ["recorded"]),
        (
            bad("unknown", HANG, confidence=0.3),
            {"program": (*OURS[:3], "--branch", "cmp", *OURS[5:])},
            ["recorded"],
        ),
        (bad("exception", phase="backward"), {"program": (*OURS[:-2], "--detect-anomaly", OURS[-1])}, []),
        (bad("slow", confidence=0.5), {}, []),
        (bad("flaky", confidence=0.5), {}, []),
        (run("ddp", PASS), {}, []),
    ],
)
def test_what_a_run_left_open_decides_what_is_tried(
    outcome: Outcome, changes: dict[str, Any], names: list[str]
) -> None:
    assert planned(outcome, **changes) == names


def test_a_recorded_rerun_names_the_line_that_made_the_ranks_diverge_and_is_never_certain() -> None:
    origin = Place(file="/home/ada/train.py", line=7)
    own = replace(found("deepened", "train.py:7 draws `x` at random", place=origin), advice="Draw once.")
    deeper = replace(
        look("recorded", HANG, says="a record", cause="uneven_inputs"),
        findings=(own,), culprit=Culprit(ranks=(0,), step=1, collective=None, place=FORWARD),
    )  # fmt: skip
    base = replace(bad("uneven_inputs", HANG, place=IN_BACKWARD), dir="ddp")
    first, second = with_diagnostic_reruns([base, deeper])
    assert first.culprit is not None
    assert first.culprit.place is not None
    assert (first.culprit.place.line, first.findings[-1].advice) == (7, "Draw once.")
    says = "with a record (attempt 2) the ranks diverged because of this line: train.py:7 draws `x` at random"
    assert first.findings[-1].claim == says
    assert first.findings[-1].confidence < 0.9
    assert second.rerun_answer == says


def test_without_the_probe_no_mode_is_asked_for_that_it_alone_could_switch_on() -> None:
    outcome = bad("exception", place=IN_BACKWARD)
    assert planned(outcome, probe="off") == []
    assert planned(outcome, probe="off", program=OURS) == ["anomaly"]


def test_a_deeper_launch_differs_in_the_one_thing_and_shows_it() -> None:
    base = launch(env=(("A", "1"),))
    change = next_change(base, bad("exception", summary=DDP), (), probe="full")
    assert change is not None
    deeper = with_change(base, change, 1)
    assert deeper.env == (("A", "1"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"))
    assert deeper.deepening == DiagnosticRerun(of=1, change="names", says="TORCH_DISTRIBUTED_DEBUG=INFO")
    assert ("run.env.TORCH_DISTRIBUTED_DEBUG", "INFO") in deeper.settings
    assert deeper.spec_hash != base.spec_hash
    unchanged = {"env": base.env, "deepening": None, "settings": base.settings, "notes": base.notes}
    assert replace(deeper, spec_hash=base.spec_hash, **unchanged) == base


def test_an_option_of_our_own_program_takes_its_other_value_and_no_other_word_changes() -> None:
    base = launch(program=OURS)
    made = [
        next_change(
            base,
            bad("unknown", confidence=0.3, phase="backward"),
            made,
            probe="full",
            program_changes=second_runs(base),
        )
        for made in (("recorded",), ("recorded", "names"))
    ]
    assert made[1] is not None
    assert with_change(base, made[1], 1).program == (*OURS[:-2], "--detect-anomaly", OURS[-1])


def test_the_same_launch_over_another_backend_changes_its_option_and_says_so() -> None:
    base = launch(program=tuple(word.replace("gloo", "nccl") for word in OURS), backend="nccl")
    change = next_change(base, bad("transport", HANG), (), probe="full", program_changes=second_runs(base))
    assert change is not None
    deeper = with_change(base, change, 1)
    assert (deeper.program, deeper.backend) == (OURS, "gloo")
    assert ("needs.backend", "gloo") in deeper.settings


def test_a_look_is_not_expected_to_find_what_it_was_made_for() -> None:
    """Of tracemalloc's own memory the growth that it looks into cannot be told."""
    base = launch(expect=Expect(findings=("memory_growth", "no_gradient")))
    assert with_change(base, GROWTH, 1).expect.findings == ("no_gradient",)
    assert with_change(base, AGAIN, 1).expect == base.expect


@pytest.mark.parametrize("probe", ["off", "board", "full"])
@given(RUNS)
def test_no_run_is_looked_into_without_end(probe: str, outcomes: list[Outcome]) -> None:
    assert all(len(planned(one, probe, program=OURS)) <= MAX_RERUNS for one in outcomes)


def test_a_look_counts_for_nothing_but_what_it_shows() -> None:
    base = bad("exception", place=IN_BACKWARD)
    outcomes = with_diagnostic_reruns(with_flakiness([base, look("anomaly", PASS, says="anomaly detection")]))
    assert [(one.final, one.flaky, one.verdict) for one in outcomes[:1]] == [(True, False, base.verdict)]
    assert not outcomes[1].final
    assert not outcomes[1].flaky
    assert exit_code(report(outcomes)) == exit_code(report((base,))) == 1


def test_a_look_is_no_repetition() -> None:
    outcomes = [bad("exception"), look("anomaly", PASS)]
    assert not needs_another_attempt(Policy(), outcomes)
    assert needs_another_attempt(Policy(repeat=2), outcomes)
    assert failed_enough(Policy(maxfail=1), [outcomes])


def test_a_look_that_is_run_again_by_itself_is_a_run_like_any() -> None:
    alone = look("anomaly", FAIL)
    assert with_flakiness([alone])[0].final
    assert not needs_another_attempt(Policy(), [alone])


def test_the_forward_line_becomes_the_place_and_is_said_by_both() -> None:
    own = found("deepened", "the forward line is ada/model.py:11 in forward (MulBackward0)", place=FORWARD)
    deeper = look("anomaly", says="anomaly detection", cause="exception", findings=(own,))
    base, told = with_diagnostic_reruns([bad("exception", place=IN_BACKWARD), deeper])
    sentence = "with anomaly detection (attempt 2) the forward line is ada/model.py:11 in forward (MulBackward0)"
    assert base.culprit is not None
    assert base.culprit.place == FORWARD
    assert (base.findings[-1].code, base.findings[-1].claim, told.rerun_answer) == ("deepened", sentence, sentence)
    assert base.findings[-1].confidence >= 0.9
    assert severity(base.findings[-1], base) is Severity.INFO
    assert with_diagnostic_reruns([base, told]) == (base, told)


def leaking(**changes: Any) -> Outcome:
    return run("ddp", PASS, findings=(found("memory_growth", confidence=0.8),), **changes)


def test_memory_that_grows_beside_a_pass_is_looked_into_once() -> None:
    assert planned(leaking()) == ["growth"]
    assert planned(leaking(), probe="board") == []
    assert planned(run("ddp", PASS)) == []
    assert planned(bad("slow"), program=OURS) == []


def test_where_it_was_allocated_is_said_by_the_run_that_passed_too() -> None:
    grown = MemoryGrowth(place=FORWARD, first_step=9, last_step=17, size_bytes=8 << 20)
    small = replace(grown, size_bytes=1 << 19)
    spent = replace(launch(), deepening=DiagnosticRerun(of=1, change="growth", says="tracemalloc"))
    seen = evidence_of(
        rank_evidence(0, health=HealthSamples(memory_growth=(small,))),
        rank_evidence(1, health=HealthSamples(memory_growth=(grown,))),
    )
    own = worded(*rerun_findings(spent, seen))
    assert own.claim == "8.0 MiB more are alive after step 17 than after step 9, allocated at ada/model.py:11"
    base, _ = with_diagnostic_reruns([leaking(), look("growth", PASS, says="tracemalloc", findings=(own,))])
    assert [one.code for one in base.findings] == ["memory_growth", "deepened"]
    assert base.findings[1].claim == f"with tracemalloc (attempt 2) {own.claim}"
    assert (base.findings[1].place, base.culprit) == (FORWARD, None)


def test_a_look_that_failed_otherwise_moves_no_place_and_is_not_certain() -> None:
    own = found("deepened", "the forward line is ada/model.py:11", place=FORWARD)
    base = bad("exception", place=IN_BACKWARD)
    told, _ = with_diagnostic_reruns([base, look("anomaly", HANG, findings=(own,))])
    assert told.culprit == base.culprit
    assert told.findings[-1].confidence < 0.9
    assert "but the run ended differently: HANG lock_cycle" in told.findings[-1].claim


def test_checkpointing_in_debug_mode_raises_the_same_in_other_words() -> None:
    own = found("deepened", "the recomputation parts at ada/model.py:11", place=FORWARD)
    base = bad("checkpoint_recompute_mismatch", place=Place(file="/home/ada/model.py", line=8))
    told, _ = with_diagnostic_reruns([base, look("checkpoint_debug", cause="exception", findings=(own,))])
    assert told.culprit is not None
    assert told.culprit.place == FORWARD


def test_a_name_goes_beside_the_line_that_was_known() -> None:
    own = found("deepened", "the parameter is gate.weight", place=Place(parameter="gate.weight", module="gate"))
    told, _ = with_diagnostic_reruns(
        [bad("ready_twice", place=IN_BACKWARD), look("names", cause="ready_twice", findings=(own,))]
    )
    assert told.culprit is not None
    assert told.culprit.place == replace(IN_BACKWARD, parameter="gate.weight", module="gate")


@pytest.mark.parametrize(
    ("deeper", "said"),
    [
        (look("gloo", PASS), "the run passed, so it needs NCCL: its transport, or the order of work on the device"),
        (look("gloo", HANG, cause="transport"), "the run ended the same way, so it is not NCCL"),
        (look("vanilla", PASS), "the run passed, so the fault is in NSA's attention"),
        (
            look("again", HANG, cause="transport"),
            "the run ended the same way, so it happens every time, as far as two attempts show",
        ),
        (look("again", FAIL, cause="killed"), "the run ended differently: FAIL killed"),
    ],
)
def test_what_follows_from_a_pair_of_runs_is_said_as_likely(deeper: Outcome, said: str) -> None:
    told = rerun_finding(bad("transport", HANG), deeper)
    assert told.claim == f"with this (attempt 2) {said}"
    assert told.confidence < 0.9


@pytest.mark.parametrize(
    ("losses", "said"),
    [((5.5, 5.5), "; the last losses are equal"), ((5.5, 5.25), "; the last losses differ: 5.5 and 5.25")],
)
def test_the_same_seed_twice_compares_the_losses(losses: tuple[float, float], said: str) -> None:
    base, again = bad("unknown", metrics={"loss_last": losses[0]}), look("again", metrics={"loss_last": losses[1]})
    assert rerun_finding(base, again).claim.endswith(said)


def test_another_line_is_named_beside_the_first_one() -> None:
    there = Culprit(ranks=(0,), step=1, collective=None, place=FORWARD)
    told = rerun_finding(
        bad("cuda_assert", place=IN_BACKWARD), look("launch_blocking", cause="cuda_assert", culprit=there)
    )
    assert "the run ended the same way, at ada/model.py:11 instead of ada/train.py:20, so that is" in told.claim


def shown(change: str, *ranks: Any) -> list[Finding]:
    asked = DiagnosticRerun(of=1, change=change, says="this")
    return list(map(worded, rerun_findings(launch(deepening=asked), evidence_of(*ranks))))


def test_the_first_rank_to_fail_says_where_the_forward_was() -> None:
    debugged = DebugMessage(
        operation="MulBackward0", frames=(frame(11, file="/home/ada/model.py", function="forward"),)
    )
    late = replace(debugged, frames=(frame(99),))
    (told,) = shown(
        "anomaly",
        rank_evidence(0, exception=raised(0, at_s=9.0), debug_message=late),
        rank_evidence(1, exception=raised(1, at_s=8.0), debug_message=debugged),
    )
    assert told.claim == "the forward line is ada/model.py:11 in forward (MulBackward0)"
    assert (told.ranks, told.proof) == ((1,), ("rank1/stderr.log",))


def test_the_names_of_parameters_are_taken_from_what_ddp_says() -> None:
    text = "Parameters which did not receive grad for rank 0: gate.weight, layers.3.spare.bias"
    (told,) = shown("names", rank_evidence(0, exception=raised(0, message=text)))
    assert told.claim == "the parameters are gate.weight, layers.3.spare.bias"
    assert told.place == Place(parameter="gate.weight", module="gate")


def test_an_attempt_that_looks_into_nothing_shows_nothing_of_the_kind() -> None:
    debugged = DebugMessage(operation="MulBackward0", frames=(frame(11),))
    assert list(rerun_findings(launch(), evidence_of(rank_evidence(0, debug_message=debugged)))) == []


def report(outcomes: tuple[Outcome, ...]) -> Report:
    from nsa_harness.core.report import MachineFacts

    machine = MachineFacts(host="h", cpus=2, gpus=(), torch=None)
    return Report(run_id="r", harness="0", machine=machine, command="c", interrupted=False, outcomes=outcomes)
