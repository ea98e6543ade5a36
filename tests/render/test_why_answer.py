"""The answer of `nsa-harness why` at every width, in a pipe, in the documents, and in each of its kinds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from render_samples import MIXED
from why_samples import ANSWERS, CERTAIN, COUNTER, EXPLANATION, line

from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.recording.explanation import (
    RETURNED,
    Candidate,
    ExperimentKind,
    OriginKind,
    PlannedExperiment,
    RankValues,
)
from nsa_harness.errors import StoredRunError
from nsa_harness.render.documents.html import report_html
from nsa_harness.render.documents.schemas import Document, json_schema
from nsa_harness.render.documents.summary_md import summary_md
from nsa_harness.render.experiments.why import answer_lines, header_lines, run_lines
from nsa_harness.render.experiments.why_json import from_json, why_json
from nsa_harness.render.terminal.layout import NO_WIDTH
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.texts import why as texts

RUN_DIR = Path("reports/20261121T101900-aaaa")
SAYS = {
    "certain": "ANSWER value computed from rank-local data at train.py:52 · certain, by experiment",
    "likely": "· likely (1 run, 14.5 s)",
    "decision": "this proves the decision, not its origin",
    "dropped": "train.py:52 is dropped",
    "first_line": "The ranks wait because of `lock_cycle` at train.py:87",
    "not_explained": "No recorded statement or value before the failure explains it",
    "passed": "0 of 2 recorded runs failed in this way",
    "otherwise": "0 of 1 recorded run failed in this way, 1 failed otherwise",
    "undecided": "Interrupted; the same command continues.",
}


def shown(report: WhyReport, width: int) -> list[str]:
    rows = [row for number in range(len(report.runs)) for row in run_lines(first(report, number + 1), width)]
    return [*header_lines(report, width, "python3.12", 12.0), *rows, *answer_lines(report, RUN_DIR, width)]


def first(report: WhyReport, count: int) -> WhyReport:
    return replace(report, runs=report.runs[:count])


@pytest.mark.parametrize("width", [40, 60, 80, 200, NO_WIDTH])
@pytest.mark.parametrize("kind", ANSWERS)
def test_every_answer_is_shown_in_full_at_every_width(kind: str, width: int) -> None:
    report = ANSWERS[kind]
    lines = shown(report, width)
    told = " ".join(" ".join(lines).split())
    for text in (SAYS[kind], "/home/ada/project", "it writes its files again", f"{RUN_DIR}/report.html", "python3.12"):
        assert text in told, told
    long = [one for one in lines if len(one) > width and "reports/" not in one]
    assert long == []
    if report.has_origin and report.explanation and report.origin:
        namer = texts.namer_of(texts.places_of(report.explanation))
        assert " ".join(texts.sentences(report.explanation, report.origin, namer)) in told
        assert texts.remedy(report.origin, namer) in told
        assert all(source in told for _, source, _ in texts.path_rows(report.explanation, report.origin, namer))


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_documents_show_what_the_terminal_shows(kind: str) -> None:
    report = ANSWERS[kind]
    page = re.sub(r"<(style|script)>.*?</\1>|<[^>]+>", "", report_html(MIXED, PLAYBOOK, why=report), flags=re.DOTALL)
    markdown = re.sub(r"\\(?=[!-/:-@\[-`{-~])", "", summary_md(MIXED, PLAYBOOK, why=report))
    for document in (unescape(page), markdown):
        told = " ".join(document.replace("`", "").replace("**", "").split())
        said = SAYS[kind].replace("`", "").replace("ANSWER ", "ANSWER: ")
        assert said in told
        assert "Why train of 20261121T101500-3f2a failed" in told


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_stored_answer_is_as_its_schema_says_and_is_read_back(kind: str) -> None:
    text = why_json(ANSWERS[kind])
    Draft202012Validator(json_schema(Document.WHY)).validate(json.loads(text))
    assert from_json(text) == ANSWERS[kind]


@pytest.mark.parametrize(
    ("before", "after"), [('"candidate": 0', '"candidate": 7'), ('"schema": 1', '"schema": 2'), ("{", "")]
)
def test_a_damaged_answer_is_refused(before: str, after: str) -> None:
    with pytest.raises(StoredRunError):
        from_json(why_json(CERTAIN).replace(before, after, 1))


@pytest.mark.parametrize("kind", OriginKind)
def test_each_kind_of_origin_has_its_sentence_and_remedy_with_and_without_a_name(kind: OriginKind) -> None:
    for candidate in (
        Candidate(place=line(3, "x = f()"), kind=kind, ranks=(1, 2), name="x", caller=line(9, "f()")),
        Candidate(place=line(3, "f()"), kind=kind, ranks=(1,)),
    ):
        namer = texts.namer_of([candidate.place])
        sentence, remedy = texts.makes(candidate, namer), texts.remedy(candidate, namer)
        assert texts.title(kind)
        assert remedy.endswith(".")
        assert "  " not in sentence + remedy
        assert "{" not in sentence + remedy
    decides = f"decides differently on the ranks ({texts.title(kind)})"
    named = {
        OriginKind.CALL, OriginKind.LEFT_OUT, OriginKind.EXCEPTION, OriginKind.OTHER_RANKS_FILE, OriginKind.UNKNOWN,
        OriginKind.EARLY_COPY, OriginKind.STALE_PARAMETERS, OriginKind.UNSYNCHRONIZED,
        OriginKind.DISCARDED_RESULT, OriginKind.SKIPPED_COLLECTIVE,
    }  # fmt: skip
    assert (sentence == decides) == (kind not in named)


def test_a_number_that_a_function_returns_is_told_as_its_result() -> None:
    results = RankValues(name=RETURNED, values=((0, "0.75"), (1, "0.25")))
    origin = Candidate(
        place=line(3, "return f"), kind=OriginKind.MISSING_REDUCTION, ranks=(1,), occurrence=4, values=(results,)
    )
    told = list(texts.sentences(replace(EXPLANATION, candidates=(origin,)), origin, texts.namer_of([origin.place])))
    assert told[0].startswith("train.py:3 returns different values on the ranks (")
    assert told[1].startswith("At its execution 4")
    assert told[1].endswith("the function returns 0.75 on rank 0 and 0.25 on rank 1.")


@pytest.mark.parametrize("kind", ExperimentKind)
def test_each_kind_of_experiment_says_what_it_changes(kind: ExperimentKind) -> None:
    planned = PlannedExperiment(kind=kind, candidate=0, place=line(3, ""), name="x", instruction={"reference": 2})
    text = texts.change_text(planned)
    assert text.endswith("(`x` at train.py:3)")
    assert ("rank 2" in text) == (kind not in (ExperimentKind.UNDO_LEAK, ExperimentKind.FIX_HASH_SEED))


def test_many_ranks_share_the_columns_of_the_table() -> None:
    values = RankValues(name="count", values=tuple((rank, str(rank == 5)) for rank in range(64)))
    explanation = replace(EXPLANATION, division=None)
    head, rows = texts.value_table(explanation, replace(COUNTER, values=(values,)))
    assert head == ("value", "ranks 0-4, 6-63", "rank 5")
    assert rows == [("count", "False", "True")]
    assert texts.values_text(values) == "True on rank 5 and False on ranks 0-4, 6-63"


def test_the_finding_of_a_recorded_rerun_names_the_origin() -> None:
    finding = texts.finding_of(EXPLANATION, ["train~2/explanation.json"])
    assert finding is not None
    assert (finding.place, finding.ranks, finding.facts["kind"]) == (COUNTER.place, (2,), "missing_reduction")
    assert finding.claim.startswith("train.py:52 takes `self.bad` from this rank's own data")
    assert texts.finding_of(replace(EXPLANATION, candidates=()), ()) is None


@pytest.mark.parametrize("goes_on", [True, False])
def test_ranks_that_part_in_a_call_are_not_said_to_go_different_ways(goes_on: bool) -> None:
    """A call with different roots, for example, which no rank finishes, or after which all ranks are at one line."""
    ways = (
        ((0, 1), line(70, "save(model)") if goes_on else None),
        ((2,), line(70, "save(model)") if goes_on else None),
    )
    assert EXPLANATION.division is not None
    explanation = replace(EXPLANATION, division=replace(EXPLANATION.division, ways=ways))
    origin = explanation.candidates[0]
    namer = texts.namer_of(texts.places_of(explanation))
    said = list(texts.sentences(explanation, origin, namer))
    assert "The ranks part at line 61, `self.bad >= self.patience`." in said
    rows = [row for *_, row in texts.path_rows(explanation, origin, namer)]
    assert "the ranks part here" in rows
    assert not any("sends" in text for text in (*said, *rows))
