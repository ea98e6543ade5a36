"""Outcomes of a plan: a test says what a run was set to and how it ended."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from nsa_harness.core.comparison.plan_file import read_stored_plan
from nsa_harness.core.outcome.outcome import skipped_outcome
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import Culprit, Finding, Outcome, SpecSummary, Status, Verdict
from nsa_harness.supervisor.launch.scenario_files import shipped_plan

PLAN = read_stored_plan(shipped_plan()).plan
CAUSES = {Status.FAIL: "exception", Status.HANG: "lock_cycle", Status.SKIP: "missing_need", Status.ERROR: "infra"}
BAD = (Status.FAIL, Status.HANG)


def run(name: str, status: Status = Status.PASS, settings: dict[str, str] | None = None, **changes: Any) -> Outcome:
    """One attempt on two ranks over gloo, as nobody announced it unless it passed."""
    plain = skipped_outcome(Skip(scenario=name, about="", reason=""))
    cause = changes.pop("cause", CAUSES.get(status))
    facts: dict[str, Any] = {
        "spec_hash": name,
        "verdict": Verdict(status=status, kind=None, cause=cause, summary=changes.pop("summary", "")),
        "expected": status in (Status.PASS, Status.SKIP),
        "settings": tuple(sorted((settings or {}).items())),
        "criteria": (("expect.verdict", "PASS"), ("limits.deadline_s", "600")),
        "ranks": int((settings or {}).get("run.ranks", "2")),
        "backend": "gloo",
        "device": "cpu",
        "dir": name,
    }
    return changed(plain, **{**facts, **changes})


def changed(outcome: Outcome, **changes: Any) -> Outcome:
    """The outcome with other values in its fields or in those of its spec."""
    of_spec = {field.name for field in fields(SpecSummary)} & changes.keys()
    spec = replace(outcome.spec, **{name: changes.pop(name) for name in of_spec})
    return replace(outcome, spec=spec, **changes)


def sure(outcome: Outcome, confidence: float = 0.95) -> Outcome:
    """The same with its cause as a finding."""
    code = outcome.verdict.cause or ""
    told = Finding(code=code, claim="", ranks=(), place=None, confidence=confidence, proof=(), advice="untie the knot")
    return replace(outcome, findings=(told,))


def failed_in(step: int) -> Culprit:
    return Culprit(ranks=(0,), step=step, collective=None, place=None)


_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "parallel.wrapper": st.sampled_from(["manual", "none", "fsdp"]),
        "parallel.static_graph": st.just("true"),
        "gc.layers": st.sampled_from(["all", "0:6", "6:12"]),
        "gc.mode": st.just("reentrant"),
        "model.branch": st.sampled_from(["cmp", "sel", "win", "cmp+sel"]),
        "model.layers": st.sampled_from(["4", "5", "12"]),
        "needs.backend": st.sampled_from(["gloo", "nccl"]),
        "run.ranks": st.just("1"),
        "train.steps": st.sampled_from(["1", "2"]),
    },
)
RUNS = st.lists(
    st.builds(
        run,
        st.sampled_from("abcdefgh"),
        st.sampled_from(list(Status)),
        _SETTINGS,
        flaky=st.booleans(),
        final=st.booleans(),
        expected=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda outcome: outcome.spec.scenario,  # as in a report, where a name and an attempt are one run
)
