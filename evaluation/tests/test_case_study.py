"""The case study's page is made of what was run, and each belief of the reports has a row that names its source."""

from __future__ import annotations

import re
import shlex

import pytest

from evaluation.case_study import (
    BELIEFS,
    CLAIMS,
    COMMANDS,
    EXPERIMENT,
    NOT_COMPARABLE,
    REPORTS,
    RUNS,
    SETTINGS,
    Command,
    page,
    reported_files,
    verdict_on,
)
from evaluation.experiments import PAGES
from evaluation.plan_truth import REFUTED, SUPPORTED

KNOWN = EXPERIMENT.load()
SEEN = KNOWN[EXPERIMENT.key]
PAGE = PAGES / "case-study.md"
ANSWERED = [command for name, command in CLAIMS.items() if name in SEEN and SEEN[name]["result"] != NOT_COMPARABLE]
SUBJECTS = (
    *("DDP", "Safe mode", "Buckets", "Buffers", "no_sync", "Static graph", "Branches", "Memory", "NCCL"),
    *("Sequence length", "Batch size", "Layers", "Checkpointing", "FSDP", "Unused parameters"),
)


def test_the_page_says_what_was_recorded() -> None:
    assert PAGE.read_text() == "\n".join(page(KNOWN))


def test_every_stored_result_is_of_the_command_as_it_stands() -> None:
    assert set(SEEN) <= set(COMMANDS)
    assert [name for name in SEEN if not EXPERIMENT.is_current(name, SEEN[name])] == []


def test_every_belief_has_a_row_with_its_quotation_and_its_source() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "“" in line]
    assert len(rows) == len(BELIEFS)
    head = next(line for line in PAGE.read_text().splitlines() if line.startswith("| about |"))
    assert {row.count(" |") for row in rows} == {head.count(" |")}
    for row, belief in zip(rows, BELIEFS, strict=True):
        number, _, section = belief.source.partition(", ")
        assert 1 <= int(number) <= len(REPORTS)
        assert section
        assert f"“{belief.quote}” | {belief.source} |" in row
    assert set(SUBJECTS) <= {belief.subject for belief in BELIEFS}


def test_every_claim_answers_a_question_of_the_page() -> None:
    asked = {belief.claim for belief in BELIEFS} | {command.cause for command in RUNS.values()}
    assert asked == set(COMMANDS)
    assert {belief.agrees for belief in BELIEFS if belief.claim in CLAIMS} == {SUPPORTED, REFUTED}


def test_a_claim_says_of_a_belief_only_what_its_result_says() -> None:
    belief = next(belief for belief in BELIEFS if belief.claim in CLAIMS)
    other = SUPPORTED if belief.agrees == REFUTED else REFUTED
    said = {result: verdict_on(belief, {"result": result}) for result in (belief.agrees, other, "undecided", "exit 2")}
    assert list(said.values()) == ["agrees", "contradicts", "open", "open"]
    assert verdict_on(belief, {"result": NOT_COMPARABLE}) == "not testable here"
    assert verdict_on(belief, None) == "not run yet"


@pytest.mark.parametrize("command", ANSWERED, ids=lambda command: command.name)
def test_the_sides_differ_in_the_one_setting_that_the_command_names(command: Command) -> None:
    claim = SEEN[command.name]["claim"]
    words = shlex.split(SEEN[command.name]["command"])
    axes = [word.partition("=")[0] for word in words if re.fullmatch(r"[a-z_.]+=[^{,]+,[^,]+", word)]
    assert [claim["key"]] == (axes or ["commit"])


@pytest.mark.parametrize("command", ANSWERED, ids=lambda command: command.name)
def test_the_numbers_of_a_row_are_those_of_the_answer(command: Command) -> None:
    claim, said = SEEN[command.name]["claim"], "\n".join(SEEN[command.name]["said"])
    rows = [line for line in page(KNOWN) if f"| [{command.text}]" in line]
    for side in claim["sides"]:
        assert re.search(rf"failed {side['failed']} of {side['of']}\b", said)
        assert all(f"| {side['failed']} of {side['of']} |" in row for row in rows)
    assert all(f"| {claim['attempts']} |" in row for row in rows)


def test_neither_the_settings_nor_the_program_of_the_reports_says_what_is_wrong() -> None:
    branch = reported_files()["ops/selected_branch.py"]
    texts = [branch, *(path.read_text() for path in SETTINGS.glob("*.yaml"))]
    for text in texts:
        assert not re.search(r"per.?token|loop|slow|ready|twice|fault|seed_|hang", text, re.IGNORECASE)
    assert "#" not in branch
    assert '"""' not in branch


def test_the_settings_are_those_of_the_reports_with_three_branches() -> None:
    text = (SETTINGS / "training.yaml").read_text()
    for setting in ("layers: 12", "seq_len: 2048", "wrapper: ddp", "layers: all, mode: reentrant", "dtype: bfloat16"):
        assert setting in text
    assert "branch" not in text
    assert "impl" not in text


def test_a_machine_of_ours_is_not_on_the_page() -> None:
    assert not re.search(r"/(?:tmp|work|root)/", PAGE.read_text())
