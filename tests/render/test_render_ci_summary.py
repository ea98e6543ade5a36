"""One summary of many jobs: what is red and why, and that nothing in a stored report can break it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from render_samples import DEADLOCK, ERRED, FAILED, MACHINE, MIXED, PASSED, SKIPPED, hostile

from nsa_harness.core.ci import JobReport, NightSummary, UnreadFile, night_summary
from nsa_harness.core.report import Outcome, Report, exit_code
from nsa_harness.render.ci_summary import ci_summary_json, ci_summary_md, cut
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.supervisor.storage import reports as reading
from nsa_harness.supervisor.storage.reports import matrix_jobs, stored_reports

HANGS = replace(DEADLOCK, expected=False)
FAILS = replace(FAILED, expected=False)


def report(*outcomes: Outcome, interrupted: bool = False) -> Report:
    return replace(MIXED, outcomes=outcomes, interrupted=interrupted)


def night(*jobs: tuple[str, Report], unread: Sequence[UnreadFile] = (), expected: Sequence[str] = ()) -> NightSummary:
    stored = [JobReport(job=job, file=f"{job}/report.json", report=one) for job, one in jobs]
    return night_summary(stored, unread, expected)


def first_line(summary: NightSummary) -> str:
    return ci_summary_md(summary).splitlines()[0]


GREEN = night(("a", report(PASSED, SKIPPED)), ("b", report(PASSED)), expected=["a", "b"])
RED = night(
    ("plan-1of2-gloo-cpu-torch2.13", report(PASSED, SKIPPED, FAILS)),
    ("plan-2of2-gloo-cpu-torch2.13", report(HANGS, ERRED, SKIPPED)),
    ("plan-1of2-nccl-1gpu-torch2.13", report(SKIPPED)),
    unread=[UnreadFile(file="runs/x/report.json", why="no report: not JSON, or cut short")],
    expected=["plan-1of2-gloo-cpu-torch2.13", "plan-9of9-gloo-cpu-torch2.13"],
)


def test_the_summary_of_a_red_night_is_this(golden: Callable[[str, str], None]) -> None:
    golden("ci_summary.md", ci_summary_md(RED))
    golden("ci_summary.json", ci_summary_json(RED))


def test_a_night_in_which_all_is_as_expected_is_green_and_counts_its_skips_aloud() -> None:
    assert (GREEN.exit_code, GREEN.reasons) == (0, ())
    assert first_line(GREEN) == "# GREEN: every verdict is as expected"
    assert "3 verdicts from 2 jobs: PASS 2 · FAIL 0 · HANG 0 · SKIP 1 · ERROR 0. Exit code 0." in ci_summary_md(GREEN)
    assert SKIPPED.verdict.summary in ci_summary_md(GREEN)


@pytest.mark.parametrize(
    ("reports", "code", "line"),
    [
        ([report(PASSED), report(HANGS, FAILS)], 124, "# RED: 1 unexpected HANG, 1 unexpected FAIL"),
        ([report(PASSED), report(FAILS)], 1, "# RED: 1 unexpected FAIL"),
        ([report(replace(PASSED, expected=False))], 1, "# RED: 1 unexpected PASS"),
        ([report(PASSED), report(ERRED)], 125, "# RED: 1 ERROR"),
        ([report(SKIPPED), report(SKIPPED)], 125, "# RED: everything was skipped"),
        ([report(SKIPPED), report(PASSED)], 125, "# RED: 1 job skipped everything"),
        ([report(PASSED), report(PASSED, interrupted=True)], 130, "# RED: 1 job interrupted"),
        ([report(PASSED), report()], 125, "# RED: 1 job judged nothing"),
        ([], 125, "# RED: no report at all"),
    ],
)
def test_the_first_line_and_the_exit_code_say_what_is_wrong(reports: list[Report], code: int, line: str) -> None:
    summary = night(*((f"job{number}", one) for number, one in enumerate(reports)))
    assert (summary.exit_code, first_line(summary)) == (code, line)
    assert json.loads(ci_summary_json(summary))["exit_code"] == code


def test_all_outcomes_together_give_the_code_that_one_run_of_them_would_give() -> None:
    for outcomes in ([PASSED], [PASSED, FAILS], [HANGS, FAILS, ERRED], [PASSED, ERRED], [DEADLOCK, PASSED]):
        split = night(*((f"job{number}", report(outcome)) for number, outcome in enumerate(outcomes)))
        assert split.exit_code == exit_code(report(*outcomes))


def test_an_attempt_that_does_not_count_is_not_counted() -> None:
    summary = night(("a", report(replace(FAILS, final=False), PASSED)))
    assert (summary.exit_code, summary.reasons) == (0, ())


def test_a_job_of_the_matrix_without_a_report_makes_a_night_red() -> None:
    summary = night(("a", report(PASSED)), expected=["a", "b", "c"])
    assert summary.exit_code == 125
    assert first_line(summary) == "# RED: 2 jobs left no report"
    assert "- b left no report, so its verdicts are not known" in ci_summary_md(summary)


def test_a_file_that_cannot_be_read_makes_a_night_red_even_if_all_else_passed() -> None:
    summary = night(("a", report(PASSED)), unread=[UnreadFile(file="a/report.json", why="cut short")])
    assert (summary.exit_code, first_line(summary)) == (125, "# RED: 1 file unreadable")


def test_no_text_of_a_report_or_a_path_reaches_the_summary_unescaped() -> None:
    attack = "x\x1b[2J`|<script>\n# GREEN\u202e"
    summary = night((attack, hostile()), unread=[UnreadFile(file=attack, why=attack)])
    for text in (ci_summary_md(summary), ci_summary_json(summary)):
        assert not set(text) & set("\x1b\u202e")
    assert "<script>" not in ci_summary_md(summary).replace("`|<script>", "").replace("`\\|<script>", "")
    assert [line for line in ci_summary_md(summary).splitlines() if line.startswith("# ")] == [first_line(summary)]


def test_a_summary_that_github_would_refuse_is_cut_at_a_line_and_says_so() -> None:
    long = replace(FAILS, verdict=replace(FAILS.verdict, summary="again " * 600))
    whole = ci_summary_md(night(*((f"job{number}", report(long)) for number in range(320))))
    short = cut(whole)
    assert len(whole.encode()) > 1_000_000 >= len(short.encode()) > 990_000
    assert short.splitlines()[0] == whole.splitlines()[0]
    left_out = int(short.split("**Cut here:** ")[1].split()[0])
    assert left_out + len(short.splitlines()) - 2 == len(whole.split("\n"))
    assert cut("short") == "short"


# What lies on disk.


def stored(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(text)
    return folder


def test_a_report_belongs_to_the_job_whose_folder_it_lies_in(tmp_path: Path) -> None:
    stored(tmp_path / "artifact" / "job-1" / "20261121T101500-3f2a", to_json(MIXED))
    stored(tmp_path / "elsewhere" / "20261121T101500-3f2b", to_json(MIXED))
    found = stored_reports([tmp_path], ["job-1", "job-2"])
    assert [(item.job, item.text) for item in found.reports] == [
        ("job-1", to_json(MIXED)),
        ("elsewhere", to_json(MIXED)),
    ]
    assert [item.job for item in stored_reports([tmp_path / "elsewhere"]).reports] == ["elsewhere"]


def test_a_copy_of_the_newest_run_is_not_counted_twice(tmp_path: Path) -> None:
    stored(tmp_path / "job" / "20261121T101500-3f2a", to_json(MIXED))
    stored(tmp_path / "job" / "latest", to_json(MIXED))  # what an upload makes of a link
    (tmp_path / "job" / "link").symlink_to("latest")
    assert len(stored_reports([tmp_path, tmp_path / "job"], ["job"]).reports) == 1


def test_a_run_that_was_ended_before_its_report_is_said(tmp_path: Path) -> None:
    (tmp_path / "20261121T101500-3f2a").mkdir()
    (tmp_path / "20261121T101500-3f2a" / "run.json").write_text("{}")
    (item,) = stored_reports([tmp_path]).unread
    assert item.why == "the run started but has no report; it was ended before it was judged"


def test_what_a_program_under_test_calls_its_report_is_not_ours(tmp_path: Path) -> None:
    run = stored(tmp_path / "20261121T101500-3f2a", to_json(MIXED))
    (run / "run.json").write_text("{}")
    stored(run / "my_scenario", "{}")
    found = stored_reports([tmp_path])
    assert (len(found.reports), found.unread) == (1, ())


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    (item,) = stored_reports([tmp_path / "nowhere"]).unread
    assert (item.file, item.why) == (str(tmp_path / "nowhere"), "No such file or directory")


def test_a_pipe_a_link_a_folder_and_binary_in_place_of_a_report_are_told_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("binary", "folder", "large", "link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary" / "report.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder" / "report.json").mkdir()
    (tmp_path / "large" / "report.json").write_text("x" * 2000)
    (tmp_path / "link" / "report.json").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe" / "report.json")
    monkeypatch.setattr(reading, "MAX_REPORT_BYTES", 1000)
    found = stored_reports([tmp_path])
    assert found.reports == ()
    assert {Path(item.file).parent.name: item.why[:20] for item in found.unread} == {
        "binary": "not a text file: 'ut",
        "folder": "not a file",
        "large": "2000 bytes, over the",
        "link": "a link, which is not",
        "pipe": "not a file",
    }


@pytest.mark.parametrize("text", ["", "[]", "{", '{"include": []}', '{"include": [{"name": 7}]}', '{"include": [7]}'])
def test_a_matrix_that_cannot_be_read_is_said_because_no_missing_job_would_be_noticed(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "matrix.json").write_text(text)
    lost = matrix_jobs(tmp_path / "matrix.json")
    assert isinstance(lost, UnreadFile)
    assert lost.why.endswith("so missing jobs are not noticed")


def test_the_machines_of_a_job_are_shown_once() -> None:
    text = ci_summary_md(night(("a", report(PASSED)), ("a", report(PASSED))))
    assert text.count(MACHINE.host) == 1
