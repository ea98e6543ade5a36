"""The one table of causes: what is read from it, and what each row needs beside itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evaluation.trials import read_label
from nsa_harness.core.diagnosis.causes import Cause, row_of
from nsa_harness.core.report import Status
from nsa_harness.core.scenario.checks import contradictions
from nsa_harness.core.scenario.scenario import ExpectedVerdict, Scenario
from nsa_harness.subject.program import PROGRAM
from nsa_harness.texts.causes import sections, text_of

TESTS = Path(__file__).resolve().parents[1]
CORE = TESTS.parent / "harness" / "nsa_harness" / "core"


def mistakes(cause: str) -> list[str]:
    scenario = Scenario.model_validate({"name": "x", "expect": {"verdict": ExpectedVerdict.FAIL, "cause": cause}})
    return [what for _, what in contradictions(scenario, PROGRAM)]


@pytest.mark.parametrize("cause", Cause)
def test_a_scenario_can_expect_whatever_a_verdict_can_come_with(cause: Cause) -> None:
    refused = mistakes(cause)
    assert (refused == []) is bool(cause.row.verdicts)
    assert all(words.startswith(f'unknown cause "{cause}"') for words in refused)


def test_a_run_whose_loss_leads_to_no_parameter_can_be_expected() -> None:
    assert mistakes("no_gradient") == []
    assert mistakes("no_gradiant") == ['unknown cause "no_gradiant"; did you mean "no_gradient"?']


def test_a_code_of_another_version_is_a_cause_that_is_unknown() -> None:
    assert row_of("of_tomorrow") is row_of(None) is Cause.UNKNOWN.row
    assert row_of("nan") is Cause.NAN.row


# Of a rule no more is known than its text: it may name one of several causes.
NAMED_BY_RULES = {
    name
    for path in (*(CORE / "diagnosis" / "rules").glob("*.py"), CORE.parent / "subject" / "tables.py")
    for name in re.findall(r"Cause\.([A-Z0-9_]+)\b(?!\.find_message|\.row)", path.read_text())
}


def used_elsewhere(cause: Cause) -> list[str]:
    """The modules beside the diagnosis and its readers that say this cause of a run."""
    parts = (".", "comparison", "experiment", "outcome", "../commands")
    paths = [path for part in parts for path in CORE.glob(f"{part}/*.py")]
    return [
        path.name
        for path in paths
        if re.search(
            rf"(?:(?:cause|code)=|return )Cause\.{cause.name}\b|make_finding\(\s*Cause\.{cause.name}\b",
            path.read_text(),
        )
    ]


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_has_somebody_who_says_it(cause: Cause) -> None:
    assert cause.name in NAMED_BY_RULES or used_elsewhere(cause), (
        f"{cause}: no rule names it: write one in a module of harness/nsa_harness/core/diagnosis/rules (its __init__"
        " says how)"
    )


PROGRAMS = {path.stem: path.read_text() for path in (TESTS / "faults").glob("[!_]*.py")}


LABELS = {name: read_label(name, text) for name, text in PROGRAMS.items()}
FROZEN = "tests/frozen/facts.jsonl"
# For each cause that no program in tests/faults shows: the file that names it instead, and the reason.
WITHOUT_PROGRAM = {
    Cause.RANK_ABSENT: ("tests/core/test_aftermath.py", "needs a job that was not watched"),
    Cause.GRADIENT_ORDER_DIFFERS: (FROZEN, "only the traces of nsa.train show the order"),
    Cause.CUDA_OOM: (FROZEN, "needs a GPU"),
    Cause.CUDA_ASSERT: (FROZEN, "needs a GPU kernel"),
    Cause.HIDDEN_PACKAGE: ("tests/core/test_resources.py", "the program must not start"),
    Cause.DISK_FULL: ("tests/core/test_resources.py", "a test program must not fill a shared disk"),
    Cause.UNKNOWN: (FROZEN, "such a program would show that a rule is missing"),
    Cause.EXPECTATION_MISSED: (
        "tests/core/test_expectation.py",
        "the number comes from a scenario; test programs have none",
    ),
    Cause.GATE_COLLAPSE: (FROZEN, "only the model of nsa.train has gates"),
    Cause.PER_TOKEN_NODES: ("tests/end_to_end/test_step_costs.py", "only nsa.train counts the nodes of its graph"),
    Cause.QUADRATIC_COST: ("tests/end_to_end/test_step_costs.py", "only nsa.train reports the memory of its graph"),
    Cause.MEMORY_EXCESS: ("tests/end_to_end/test_step_costs.py", "only nsa.train reports what its shape needs"),
    Cause.SLOW_LINK: ("tests/end_to_end/test_network.py", "needs two hosts"),
    Cause.GPU_FAULT: ("tests/core/test_resources.py", "needs a faulty GPU; tested with constructed values"),
    Cause.IDLE_DEVICE: ("tests/core/test_resources.py", "needs two GPUs; tested with recorded values"),
    Cause.DEEPENED: ("tests/core/test_deepening.py", "needs a second run with one change"),
    Cause.SAME_PLACE: ("tests/core/test_same_place.py", "needs several attempts of one launch"),
    Cause.MISSING_NEED: ("tests/core/test_outcome.py", "needs a machine that lacks something"),
    Cause.INTERRUPTED: (FROZEN, "Ctrl-C comes from outside the program"),
    Cause.NODE_LOST: ("tests/core/test_nodes.py", "needs a job on several nodes"),
    Cause.STILL_RUNNING: (FROZEN, "needs a job that is only inspected"),
    Cause.SUSPECTED: (FROZEN, "needs a job that is only inspected"),
    Cause.INCONCLUSIVE: ("tests/core/test_aftermath.py", "needs the incomplete files of a job that was not watched"),
    Cause.FRAMEWORK_PHASE: ("tests/core/test_frameworks.py", "needs a framework"),
    Cause.RETRACTED_HANG: (FROZEN, "needs a watched job that continues after its proof"),
    Cause.ATTEMPT_DIRECTORY_LOST: ("tests/end_to_end/test_lost_directory.py", "leaves no evidence"),
    Cause.HARNESS_ERROR: (FROZEN, "needs a defect of nsa-harness itself"),
}


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_shown_by_a_program_with_a_healthy_twin_or_by_a_named_file(cause: Cause) -> None:
    if cause in WITHOUT_PROGRAM:
        path, _ = WITHOUT_PROGRAM[cause]
        assert (f'"{cause}"' if path == FROZEN else cause) in (TESTS.parent / path).read_text()
        return
    twins = {name: label.twin for name, label in LABELS.items() if label.cause == cause}
    assert any(twins.values()), (
        f"{cause}: write a program in tests/faults whose LABEL names this cause and which is healthy when told"
        f" `healthy` ({list(twins)}), or say in WITHOUT_PROGRAM what shows it"
    )


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_has_a_section_of_three_parts_and_advice(cause: Cause) -> None:
    row = cause.row
    assert cause in sections(), f"{cause}: give it a section in texts/causes.toml"
    for part in ("means", "proven_by", "remedy"):
        words = text_of(cause, part)
        assert words.endswith("."), f"{cause}: {part} in texts/causes.toml is a part of its section in docs/findings.md"
    assert row.code == cause.name.lower()
    assert row.verdicts or row.is_noted, f"{cause}: its row says neither which verdicts it is the cause of nor beside"
    assert bool(row.kinds) is (Status.HANG in row.verdicts), f"{cause}: kinds are those of a HANG"


def test_every_program_of_the_corpus_has_a_cause_of_the_table_and_no_cause_is_listed_twice() -> None:
    shown = {label.cause for label in LABELS.values() if label.cause}
    assert shown | set(WITHOUT_PROGRAM) == set(Cause)
    assert not shown & set(WITHOUT_PROGRAM)


SAID = "\n".join(path.read_text() for path in (TESTS / "core").glob("test_*.py") if path.name != Path(__file__).name)


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_named_by_a_test_of_the_core(cause: Cause) -> None:
    assert f'"{cause}"' in SAID or f"Cause.{cause.name}" in SAID, (
        f"{cause}: write tests in tests/core: its rule answers, and something else explains the run"
    )
