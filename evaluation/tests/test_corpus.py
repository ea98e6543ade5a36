"""Labels of the corpus are read from programs, and a report that is wrong in one part is wrong in that part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from render.render_samples import PASSED

from evaluation.trials import (
    Label,
    Trial,
    TrialResult,
    accuracy,
    accuracy_values,
    corpus,
    corpus_root,
    read_label,
    trial_line,
    trial_result,
    trial_spec,
    trials,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import Culprit, Finding, HangKind, Outcome, Place, Status, Verdict

PROGRAM = '''"""A rank waits for itself.

More of it.
"""
LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1], "step": 4, "ranks": 4}
lock = object()
lock.acquire()  # to blame
'''
FAULT = Trial(label=read_label("thread_lock", PROGRAM), healthy=False)
TWIN = replace(FAULT, healthy=True)
LEAK = Trial(
    label=Label(name="silent_leak", about="", verdict="PASS", cause="memory_growth", culprit=(0,)), healthy=False
)


def finding(code: str, confidence: float = 0.95, line: int = 7) -> Finding:
    place = Place(file="/home/ada/thread_lock.py", line=line)
    return Finding(code=code, claim="so", ranks=(1,), place=place, confidence=confidence, proof=(), advice="")


def reported(verdict: str = "HANG", *, confidence: float = 0.95, **changes: Any) -> Outcome:
    """What a report says that is right about FAULT, but for the changes."""
    said = {"kind": HangKind.DEADLOCK, "cause": "lock_cycle", "ranks": (1,), "line": 7, "step": 4, **changes}
    place = Place(file=said.get("file", "/home/ada/thread_lock.py"), line=said["line"])
    return replace(
        PASSED,
        verdict=Verdict(status=Status(verdict), kind=said["kind"], cause=said["cause"], summary="so"),
        culprit=Culprit(ranks=said["ranks"], step=said["step"], collective=None, place=place),
        findings=(finding(said["cause"], confidence),),
    )


def healthy(*findings: Finding) -> Outcome:
    return replace(PASSED, findings=findings)


# --- labels


def test_a_label_is_the_literal_at_the_top_and_the_marked_line() -> None:
    label = FAULT.label
    assert (label.name, label.about, label.ranks) == ("thread_lock", "A rank waits for itself.", 4)
    assert (label.verdict, label.kind, label.cause) == ("HANG", "deadlock", "lock_cycle")
    assert (label.culprit, label.step, label.line, label.twin, label.control) == ((1,), 4, 7, True, False)


def test_a_program_with_nothing_wrong_is_a_control_and_has_no_twin() -> None:
    control = read_label("control_quiet", 'LABEL = {"verdict": "PASS"}\n')
    assert (control.control, control.twin, control.line) == (True, False, None)
    assert [one.name for one in trials([FAULT.label, control])] == [
        "thread_lock",
        "thread_lock_healthy",
        "control_quiet",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("x = 1\n", "one literal LABEL"),
        ("LABEL = {'verdict': f()}\n", "one literal LABEL"),
        ("LABEL = {'verdict': 'PASS'\n", "one literal LABEL"),
        ("LABEL = ['PASS']\n", "a dict with a verdict"),
        ("LABEL = {'cause': 'nan'}\n", "a dict with a verdict"),
        ("LABEL = {'verdict': 'HANG', 'coz': 'nan'}\n", "does not know coz"),
        ("LABEL = {'verdict': 'HANG'}\na()  # to blame\nb()  # to blame\n", "lines [2, 3]"),
    ],
)
def test_a_label_that_is_wrong_is_refused_with_the_program_and_the_mistake(text: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=r"^odd: ") as refused:
        read_label("odd", text)
    assert mistake in str(refused.value)


# --- answers


def test_a_report_that_says_all_that_is_due_is_right() -> None:
    answer = trial_result(FAULT, reported())
    assert answer.wrong == ()
    assert trial_line(answer, 12) == "right  thread_lock   HANG lock_cycle   4.6 s"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"verdict": "FAIL"}, ("verdict",)),
        ({"kind": HangKind.LIVELOCK}, ("kind",)),
        ({"cause": "pipe_full"}, ("cause",)),
        ({"ranks": (0,)}, ("culprit",)),
        ({"ranks": (0, 1)}, ("culprit",)),
        ({"line": 10}, ("line",)),
        ({"line": None}, ("line",)),
        ({"file": "/home/ada/other.py"}, ("line",)),
        ({"step": 5}, ("step",)),
        ({"line": 9}, ()),
    ],
)
def test_a_report_that_is_wrong_in_one_part_is_wrong_in_that_part(
    changes: dict[str, Any], wrong: tuple[str, ...]
) -> None:
    assert trial_result(FAULT, reported(**changes)).wrong == wrong


def test_a_wrong_answer_is_told_with_what_is_due() -> None:
    line = trial_line(trial_result(FAULT, reported(ranks=(0,), step=5)), 12)
    assert line.endswith(
        "said rank 0 line 7 step 5, due HANG lock_cycle rank 1 line 7 step 4; differs in culprit, step"
    )


def test_a_healthy_program_must_pass_without_a_finding() -> None:
    assert trial_result(TWIN, healthy()).wrong == ()
    assert trial_result(TWIN, healthy(finding("nan"))).wrong == ("cause",)
    assert trial_result(TWIN, reported()).wrong == ("verdict", "cause")


def test_a_silent_fault_is_found_among_the_findings_of_a_pass() -> None:
    leak = replace(finding("memory_growth"), ranks=(0,))
    assert trial_result(LEAK, healthy(finding("no_gradient"), leak)).wrong == ()
    assert trial_result(LEAK, healthy(finding("no_gradient"))).wrong == ("cause", "culprit")
    assert trial_result(LEAK, healthy()).wrong == ("cause", "culprit")


# --- figures


def answers() -> list[TrialResult]:
    return [
        trial_result(FAULT, reported()),
        trial_result(FAULT, reported(ranks=(0,), confidence=0.7)),
        trial_result(FAULT, reported(cause="pipe_full")),
        trial_result(LEAK, healthy()),
        trial_result(TWIN, healthy()),
        trial_result(TWIN, reported()),
        trial_result(TWIN, healthy(finding("nan"))),
    ]


def test_each_rate_counts_the_answers_whose_label_has_that_part() -> None:
    found = accuracy(answers())
    shares = {name: (getattr(found, name).right, getattr(found, name).of) for name in ("verdict", "cause", "culprit")}
    assert shares == {"verdict": (6, 7), "cause": (2, 4), "culprit": (2, 4)}
    assert ((found.line.right, found.line.of), (found.step.right, found.step.of)) == ((3, 3), (3, 3))


def test_sure_and_wrong_is_named_and_less_than_sure_is_not() -> None:
    found = accuracy(answers())
    assert found.certain_and_wrong == ("thread_lock",)
    bands = {name: (share.right, share.of) for name, share in found.bands.items()}
    assert bands == {"certain": (1, 2), "likely": (0, 1), "unknown": (0, 0)}


def test_what_is_held_against_a_healthy_program_is_named() -> None:
    found = accuracy(answers())
    assert found.false_hangs == ("thread_lock_healthy",)
    assert found.false_alarms == ("thread_lock_healthy", "thread_lock_healthy")


def test_a_cause_said_of_a_healthy_program_costs_precision() -> None:
    causes = {name: (one.planted, one.said, one.right) for name, one in accuracy(answers()).causes.items()}
    assert causes == {
        "lock_cycle": (3, 3, 2),
        "memory_growth": (1, 0, 0),
        "nan": (0, 1, 0),
        "pipe_full": (0, 1, 0),
    }


def test_the_figures_are_values_for_programs() -> None:
    values = accuracy_values(answers())
    assert values["certain_and_wrong"] == ["thread_lock"]
    assert [one["wrong"] for one in values["answers"]][1] == ["culprit"]  # type: ignore[index]
    assert str(accuracy(answers()).verdict) == "85.7 % (6 of 7)"


def test_no_answers_have_no_rates() -> None:
    found = accuracy([])
    assert (found.verdict.rate, str(found.verdict), found.latency_median_s) == (None, "-", None)


def test_what_the_label_says_reaches_the_launch_and_what_is_due_does_not(tmp_path: Path) -> None:
    text = 'LABEL = {"verdict": "HANG", "cause": "lock_cycle", "ranks": 4, "limits": {"busy_s": 8}, "words": ["fd"]}\n'
    (tmp_path / "io_odd.py").write_text(text)
    fault, twin_ = corpus(tmp_path)
    spec = trial_spec(fault, tmp_path)
    assert (spec.ranks, spec.limits.busy_s, spec.program[-2:]) == (4, 8.0, ("fault", "fd"))
    assert trial_spec(twin_, tmp_path).program[-2:] == ("healthy", "fd")
    assert (spec.expect.verdict, spec.expect.cause, spec.fault) == ("PASS", None, None)


# --- the programs


LABELS = [trial.label for trial in corpus(corpus_root()) if not trial.healthy]


def test_there_are_eighty_faults_over_every_category_and_fifteen_controls() -> None:
    faults = [label for label in LABELS if not label.control]
    controls = [label for label in LABELS if label.control]
    assert len(faults) >= 80
    assert len(controls) >= 15
    assert {label.name.partition("_")[0] for label in faults} >= {
        *("backward", "data", "ddp", "exit", "flaky", "forward", "fsdp", "gc", "groups", "io", "mesh", "net", "p2p"),
        *("proc", "rdzv", "signal", "silent", "store", "thread"),
    }
    assert {label.ranks for label in LABELS} >= {2, 4, 8}


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label.name)
def test_a_label_says_what_the_harness_can_say(label: Label) -> None:
    assert label.about.endswith(".")
    assert label.verdict in set(Status)
    assert label.kind is None or (label.verdict == Status.HANG and label.kind in set(HangKind))
    assert label.cause is None or label.cause in set(Cause)
    assert all(0 <= rank <= label.ranks for rank in label.culprit)  # one more: a rank that was never started
    assert set(label.needs) <= {"root", "gpu"}
