"""The one table of causes: what is read from it, and what each row needs beside itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evaluation.trials import read_label
from nsa_harness.core.diagnosis.causes import Cause, CauseTest, CauseTestKind, Producer, row_of
from nsa_harness.core.report import Status
from nsa_harness.core.scenario.checks import contradictions
from nsa_harness.core.scenario.scenario import ExpectedVerdict, Scenario
from nsa_harness.subject.program import PROGRAM
from nsa_harness.texts.causes import sections, text_of

TESTS = Path(__file__).resolve().parents[1]
CORE = TESTS.parent / "harness" / "nsa_harness" / "core"
FACTS = (TESTS / "frozen" / "facts.jsonl").read_text(encoding="utf-8")


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
    if cause.row.producer is Producer.RULE:
        assert cause.name in NAMED_BY_RULES, (
            f"{cause}: no rule names it: write one in a module of harness/nsa_harness/core/diagnosis/rules (its"
            " __init__ says how), or say in its row who else does (producer=)"
        )
    else:
        assert used_elsewhere(cause), f"{cause}: its row says that {cause.row.producer} produces it, and nothing does"


PROGRAMS = {path.stem: path.read_text() for path in (TESTS / "faults").glob("[!_]*.py")}


def lacking(cause: Cause, shown: CauseTest) -> str | None:
    """What has to be added before it is shown so; None where nothing is."""
    match shown.by:
        case CauseTestKind.PROGRAM:
            if shown.name not in PROGRAMS:
                return f"write the program tests/faults/{shown.name}.py, which ends in its fault when told `fault`"
            label = read_label(shown.name, PROGRAMS[shown.name])
            if label.cause != cause:
                return f'give LABEL in tests/faults/{shown.name}.py "cause": "{cause}"; it has {label.cause}'
            return None if label.twin else f"let tests/faults/{shown.name}.py be healthy when told `healthy`"
        case CauseTestKind.EVIDENCE:
            return None if f'"{cause}"' in FACTS else "no judgement of tests/frozen/facts.jsonl names it"
        case CauseTestKind.TEST:
            named = (TESTS.parent / shown.name).exists() and cause in (TESTS.parent / shown.name).read_text()
            return None if named else f"write a test that reaches it in {shown.name}"


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_shown_by_what_its_row_names(cause: Cause) -> None:
    shown = cause.row.shown_by
    assert shown, f"{cause}: shown_by in its row has to name a program of tests/faults with a healthy twin"
    missing = [words for one in shown if (words := lacking(cause, one))]
    assert missing == [], f"{cause}: {'; '.join(missing)}"
    by_hand = [one for one in shown if one.by in (CauseTestKind.EVIDENCE, CauseTestKind.TEST)]
    assert all(one.reason for one in by_hand), f"{cause}: say in its row why no program shows it (reason=)"


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


def test_every_program_of_the_corpus_has_a_cause_of_the_table_that_is_shown_by_one() -> None:
    labels = [read_label(name, text) for name, text in PROGRAMS.items()]
    shown = {cause for cause in Cause if any(one.by is CauseTestKind.PROGRAM for one in cause.row.shown_by)}
    assert {label.cause for label in labels if label.cause} == shown


SAID = "\n".join(path.read_text() for path in (TESTS / "core").glob("test_*.py") if path.name != Path(__file__).name)


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_named_by_a_test_of_the_core(cause: Cause) -> None:
    assert f'"{cause}"' in SAID or f"Cause.{cause.name}" in SAID, (
        f"{cause}: write tests in tests/core: its rule answers, and something else explains the run"
    )
