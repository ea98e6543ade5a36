"""BISECT.md, bisect.json and the picture in report.html."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bisect_samples import (
    COUNT,
    DIFFERENT,
    FLAKY,
    INTERRUPTED,
    NINETY_SIX,
    NONE,
    ONE_KEY,
    RANGE,
    SAMPLES,
    SEVERAL,
    SINGLE,
    THRESHOLD,
    UNDECIDED,
    hostile,
)
from render_samples import MIXED, POISON, QUIET
from test_render_documents import Page

from nsa_harness.core.search.question import Purpose
from nsa_harness.core.search.report import BisectReport
from nsa_harness.errors import StoredRunError
from nsa_harness.render.documents.documents import write_documents
from nsa_harness.render.documents.html import COPY_SCRIPT, report_html
from nsa_harness.render.experiments.bisect_json import bisect_json, from_json, stored_search
from nsa_harness.render.experiments.bisect_md import MAX_CHARACTERS, bisect_md
from nsa_harness.render.experiments.picture import GRID_WIDTH, MAX_DRAWN_ROWS, legend, picture
from nsa_harness.render.text import escaped
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.storage.rundir import RunDir

Golden = Callable[[str, str], None]
STACKS = {
    "p09/dumps/rank0.txt": "Thread 1\n    all_reduce (distributed_c10d.py:2810)\n    step (train.py:88)\n",
    "p10/dumps/rank0.txt": "Thread 1\n    step (train.py:90)\n",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_markdown_of_each_kind_of_answer_is_as_recorded(golden: Golden, name: str) -> None:
    golden(f"bisect.{name}.md", bisect_md(SAMPLES[name], STACKS))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_json_of_each_kind_of_answer_is_as_recorded(golden: Golden, name: str) -> None:
    golden(f"bisect.{name}.json", bisect_json(SAMPLES[name]))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stored_bisection_comes_back_as_it_was(name: str) -> None:
    assert from_json(bisect_json(SAMPLES[name])) == escaped(SAMPLES[name])


def test_a_bisection_that_an_earlier_harness_has_stored_is_read() -> None:
    """It knew neither zones nor bounds, nor when a probe began or whether it was ended early."""
    stored = json.loads(bisect_json(SINGLE))
    del stored["answer"]["bounds"], stored["detail"]["answer"]["zones"]
    for probe in stored["probes"]:
        del probe["early"], probe["started_s"]
    unknown = tuple(replace(probe, started_s=None) for probe in SINGLE.probes)
    assert from_json(json.dumps(stored)) == escaped(replace(SINGLE, probes=unknown))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_keys_of_the_contract_come_first_and_are_always_there(name: str) -> None:
    stored = json.loads(bisect_json(SAMPLES[name]))
    contract = ["schema", "question", "outcome_sought", "answer", "controls", "probes", "floor_probes", "commands"]
    assert list(stored) == [*contract, "detail"]
    assert list(stored["answer"])[:3] == ["kind", "items", "confidence"]
    assert list(stored["controls"]) == ["good", "bad"]
    assert {tuple(probe)[:5] for probe in stored["probes"]} == {("n", "config", "verdict", "counts_as", "dir")}
    assert list(stored["commands"])[:2] == ["bad", "good"]


@pytest.mark.parametrize(
    ("told", "items"),
    [(SINGLE, [7]), (RANGE, [4, 9]), (SEVERAL, [2, 9]), (THRESHOLD, [96]), (COUNT, [5]), (NONE, [])],
)
def test_the_items_of_an_answer_are_those_of_the_question(told: BisectReport, items: list[object]) -> None:
    assert json.loads(bisect_json(told))["answer"]["items"] == items


def test_an_answer_of_keys_names_them_and_a_flaky_one_says_how_often() -> None:
    assert json.loads(bisect_json(ONE_KEY))["answer"]["items"] == ["gc.mode"]
    assert json.loads(bisect_json(FLAKY))["answer"]["p_hang"] == 0.5
    assert "p_hang" not in json.loads(bisect_json(SINGLE))["answer"]


def test_an_undecided_answer_has_the_bounds_of_what_is_open() -> None:
    bounds = json.loads(bisect_json(UNDECIDED))["answer"]["bounds"]
    ends = {"passing": [0, 1, 2, 3, 4, 5], "failing": [*range(12)]}
    assert bounds == {**ends, "open": [6, 7, 8, 9, 10, 11], "known": []}
    told = replace(UNDECIDED, answer=replace(UNDECIDED.answer, open=(0, 1), known=(6,)))
    assert json.loads(bisect_json(told))["answer"]["bounds"] == {**ends, "open": [0, 1], "known": [6]}
    assert from_json(bisect_json(told)).answer == told.answer
    assert json.loads(bisect_json(SINGLE))["answer"]["bounds"] is None


def test_a_search_that_was_cut_short_has_the_bounds_that_its_probes_show() -> None:
    cut = replace(THRESHOLD, probes=THRESHOLD.probes[:5], answer=INTERRUPTED.answer)
    bounds = json.loads(bisect_json(cut))["answer"]["bounds"]
    assert bounds == {"passing": [64], "failing": [96], "open": [65, 96], "known": []}


def test_a_control_that_did_not_end_as_it_should_is_no_control() -> None:
    assert json.loads(bisect_json(SINGLE))["controls"] == {"good": "p01", "bad": "p02"}
    assert json.loads(bisect_json(NONE))["controls"] == {"good": "p01", "bad": None}


def test_the_bad_control_of_an_open_end_is_the_step_that_failed() -> None:
    good, bad, *rest = THRESHOLD.probes
    steps = (good, replace(good, purpose=Purpose.GALLOP, dir="p02"), replace(bad, purpose=Purpose.GALLOP, dir="p03"))
    assert json.loads(bisect_json(replace(THRESHOLD, probes=(*steps, *rest))))["controls"] == {
        "good": "p01",
        "bad": "p03",
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stored: stored.pop("detail"), "unexpected content: KeyError: 'detail'"),
        (lambda stored: stored.update(schema=2), "schema: Input should be 1"),
        (lambda stored: stored["probes"][0].update(n="one"), "probes.0.n"),
        (lambda stored: stored["detail"].update(subject=None), "unexpected content: TypeError"),
        (lambda stored: stored["probes"][2].update(subset=[[0, 13]]), "probes.2.subset: not valid ranges of 12 items"),
        (
            lambda stored: stored["probes"][2].update(subset=[[4, 6], [0, 2]]),
            "probes.2.subset: not valid ranges of 12 items",
        ),
        (lambda stored: stored["probes"][2].update(open=[0, 1 << 40]), "probes.2.open: not within 12 items"),
        (
            lambda stored: stored["detail"]["answer"].update(failing=[[-1, 2]]),
            "detail.answer.failing: not valid ranges",
        ),
        (lambda stored: stored["detail"]["answer"].update(items=[0, 1 << 40]), "detail.answer.items: not within"),
    ],
)
def test_a_stored_bisection_that_is_not_one_is_refused_with_the_place(
    change: Callable[[dict[str, object]], object], says: str
) -> None:
    stored = json.loads(bisect_json(SINGLE))
    change(stored)
    with pytest.raises(StoredRunError, match=re.escape(says)):
        from_json(json.dumps(stored))


def test_a_file_cut_short_is_refused() -> None:
    with pytest.raises(StoredRunError, match="cut short"):
        from_json(bisect_json(SINGLE)[:-40])


def _run_with_a_stack(path: Path) -> RunDir:
    run = RunDir(path / "run")
    for dumps in (run.attempt("p12").dumps, path / "dumps"):
        dumps.mkdir(parents=True)
        (dumps / "rank0.txt").write_text("Thread 1\n    step (train.py:90)\n")
    run.attempt("p12").spec.write_text("{}")
    return run


def test_a_search_has_two_documents_beside_those_of_any_run(tmp_path: Path) -> None:
    run = _run_with_a_stack(tmp_path)
    assert write_documents(run, QUIET, PLAYBOOK) == ()
    assert not run.search.exists()
    assert write_documents(run, QUIET, PLAYBOOK, SINGLE) == ()
    assert stored_search(run) == escaped(SINGLE)
    text = run.search_summary.read_text()
    assert "step (train.py:90)" in text
    assert "p12/dumps/rank0.txt" in text


def test_a_stored_search_shows_no_file_outside_its_run(tmp_path: Path) -> None:
    run = _run_with_a_stack(tmp_path)
    outside = replace(SINGLE, probes=tuple(replace(probe, dir="..") for probe in SINGLE.probes))
    write_documents(run, QUIET, PLAYBOOK, outside)
    assert "train.py:90" not in run.search_summary.read_text()


def test_a_run_that_is_no_bisection_and_one_beyond_all_measure_are_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(StoredRunError, match="has no "):
        stored_search(run)
    with run.search.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(StoredRunError, match="larger than"):
        stored_search(run)


def test_the_first_line_is_the_answer() -> None:
    assert bisect_md(SINGLE).split("\n")[0] == "# It hangs with layer 7 alone."


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    for told in SAMPLES.values():
        rows = [line for line in bisect_md(told, STACKS).split("\n") if line.startswith("| ")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {9}


def test_an_issue_takes_every_document_whole() -> None:
    many = tuple(replace(SINGLE.probes[3], n=n, summary="x" * 3000, counts_as=DIFFERENT) for n in range(1, 900))
    stacks = {f"p{n}/dumps/rank0.txt": "frame\n" * 10_000 for n in range(40)}
    text = bisect_md(replace(NINETY_SIX, probes=many), stacks)
    assert len(text) <= MAX_CHARACTERS
    assert text.startswith("# It hangs with layer 63 alone.")
    assert "The rest was cut" in text
    assert text.count("```") % 2 == 0


def test_no_text_of_a_program_becomes_markup() -> None:
    text = bisect_md(hostile(), {POISON: POISON})
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S)
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert "<script>" not in prose
    assert not re.search(r"(?<!\\)\]\(http://evil", prose)
    assert set("\x1b\x9b\x07\x00\r\u202e").isdisjoint(text)


def drawn(told: BisectReport) -> ElementTree.Element:
    page = report_html(QUIET, PLAYBOOK, told)
    found = re.search(r'<ol class="search".*?</ol>', page, re.S)
    assert found is not None
    return ElementTree.fromstring(found.group())


def test_the_page_with_a_search_is_as_recorded(golden: Golden) -> None:
    golden("bisect.report.html", report_html(MIXED, PLAYBOOK, SINGLE))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_picture_has_a_row_a_probe_and_all_of_it_lies_within(name: str) -> None:
    told = SAMPLES[name]
    drawings = list(drawn(told).iter("svg"))
    assert len(drawings) - len(told.probes) in (0, 1)
    for svg in drawings:
        width, height = map(float, svg.attrib["viewBox"].split()[2:])
        assert width == GRID_WIDTH
        for rect in svg.iter("rect"):
            assert float(rect.attrib["x"]) >= 0
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_the_picture_is_told_to_who_cannot_see_it() -> None:
    rows = drawn(SINGLE)
    title = f'id="{rows.attrib["aria-labelledby"]}">12 probes over 12 layers. It hangs with layer 7 alone.<'
    assert title in report_html(QUIET, PLAYBOOK, SINGLE)
    pictures = list(rows.iter("svg"))
    assert {one.attrib["role"] for one in pictures} == {"img"}
    assert pictures[3].attrib["aria-label"] == "probe 4 · [6,12) → [6,9) · gc.layers=0:9 · HANG · 4.2 s · same"


def test_the_verdict_stands_in_the_picture_as_text_and_not_as_colour_alone() -> None:
    texts = {text.text for text in drawn(UNDECIDED).iter("span")}
    assert {"PASS", "HANG", "FAIL", "ERROR", "none"} <= texts


def test_a_long_search_is_drawn_in_part_and_says_so() -> None:
    many = tuple(replace(SINGLE.probes[3], n=n) for n in range(1, MAX_DRAWN_ROWS + 51))
    told = replace(SINGLE, probes=many)
    made = picture(told)
    assert made is not None
    assert (len(made.rows), made.omitted) == (MAX_DRAWN_ROWS, 50)
    assert "50 more probes are not drawn" in report_html(QUIET, PLAYBOOK, told)


def test_the_answer_of_zones_is_drawn_as_neighbours_over_the_whole_width() -> None:
    made = picture(SAMPLES["zones"])
    assert made is not None
    assert [(cell.role, cell.x, round(cell.x + cell.width, 1)) for cell in made.answer] == [
        ("good", 0.0, 131.7),
        ("different", 131.7, 331.7),
        ("bad", 331.7, 400.0),
    ]


def test_numbers_over_the_columns_are_explained_where_names_are_long() -> None:
    assert legend(ONE_KEY)[2] == "gc.mode: reentrant instead of non_reentrant"
    assert legend(SINGLE) == legend(NINETY_SIX) == legend(THRESHOLD) == ()


def test_a_search_without_a_probe_has_no_picture() -> None:
    assert picture(replace(SINGLE, probes=())) is None
    assert '<ol class="search"' not in report_html(QUIET, PLAYBOOK, replace(SINGLE, probes=()))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_tag_of_the_page_is_closed_and_none_is_a_programs(name: str) -> None:
    page = report_html(QUIET, PLAYBOOK, SAMPLES[name]).replace(f"<script>{COPY_SCRIPT}</script>", "")
    assert "<script>" not in page
    Page().feed(page)


def test_a_report_without_a_search_says_nothing_of_one() -> None:
    assert "Bisection" not in report_html(QUIET, PLAYBOOK)
