"""A summary of several CI jobs, as Markdown and as JSON (schema 1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nsa_harness.core.ci import JobSummary, NightSummary, skip_reasons, surprises
from nsa_harness.core.report import Outcome, Status, counts
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.text import escaped, markdown, markdown_code, markdown_prose, markdown_table
from nsa_harness.texts import words

SCHEMA = 1


def ci_summary_json(summary: NightSummary) -> str:
    """Return the summary as a JSON object."""
    summary = escaped(summary)
    values = {
        "schema": SCHEMA,
        "red": summary.exit_code != 0,
        "exit_code": summary.exit_code,
        "reasons": summary.reasons,
        "counts": counts([outcome for _, outcome in summary.outcomes()]),
        "jobs": [_job(job) for job in summary.jobs],
        "not_as_expected": [_brief(job, outcome) for job, outcome in surprises(summary)],
        "skipped": [asdict(item) for item in skip_reasons(summary)],
        "missing": summary.missing,
        "unread": [asdict(item) for item in summary.unread],
    }
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _job(job: JobSummary) -> dict[str, Any]:
    return {
        "job": job.job,
        "exit_code": job.exit_code,
        "interrupted": job.interrupted,
        "remark": job.remark or None,
        "machines": [asdict(machine) for machine in job.machines],
        "counts": counts(job.outcomes),
        "outcomes": [outcome_values(outcome) for outcome in job.outcomes],
    }


def _brief(job: str, outcome: Outcome) -> dict[str, Any]:
    verdict = asdict(outcome.verdict)
    return {"job": job, "scenario": outcome.spec.scenario, "verdict": verdict.pop("status"), **verdict}


MOST_BYTES = 1_000_000  # GitHub does not show a job summary that is larger than 1024 KiB


def ci_summary_md(summary: NightSummary) -> str:
    """Return the summary as Markdown, failures first. Its heading is RED if the exit code is not 0, else GREEN."""
    summary = escaped(summary)
    sections = (
        _heading(summary),
        _job_table(summary.jobs),
        _unexpected_outcomes(summary),
        _missing_reports(summary),
        _skips(summary),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def cut(text: str, limit_bytes: int = MOST_BYTES) -> str:
    """Return the text, shortened to `limit_bytes` with a note on how many lines were left out."""
    if len(text.encode()) <= limit_bytes:
        return text
    lines = text.split("\n")
    note = "\n**Cut here:** {} more lines do not fit; `nsa-harness ci summary --out FILE DIR` writes all of them.\n"
    remaining_bytes = limit_bytes - len(note.format(len(lines)).encode())
    first_lines: list[str] = []
    for line in lines:
        remaining_bytes -= len(line.encode()) + 1
        if remaining_bytes < 0:
            break
        first_lines.append(line)
    return "\n".join(first_lines) + "\n" + note.format(len(lines) - len(first_lines))


def _heading(summary: NightSummary) -> list[str]:
    color = "RED" if summary.exit_code else "GREEN"
    final = [outcome for _, outcome in summary.outcomes()]
    verdicts = " · ".join(f"{status.value} {number}" for status, number in counts(final).items())
    totals = f"{words.plural(len(final), 'verdict')} from {words.plural(len(summary.jobs), 'job')}"
    return [
        f"# {color}: {', '.join(summary.reasons) or 'every verdict is as expected'}",
        "",
        f"{totals}: {verdicts}. Exit code {summary.exit_code}.",
    ]


def _job_table(jobs: Sequence[JobSummary]) -> list[str]:
    rows = [
        (
            markdown(job.job),
            *(str(number) for number in counts(job.outcomes).values()),
            str(job.exit_code),
            markdown(" and ".join(f"{machine.host}: {words.machine_line(machine)}" for machine in job.machines)),
            f"**{markdown(job.remark)}**" if job.remark else "",
        )
        for job in sorted(jobs, key=lambda job: not job.is_red)
    ]
    head = ("job", *(f"{status.value}:" for status in Status), "exit code:", "machine", "remark")
    return markdown_table(head, rows) if rows else []


def _unexpected_outcomes(summary: NightSummary) -> list[str]:
    rows = [
        (
            f"**{outcome.verdict.status.value}**",
            markdown(outcome.spec.scenario),
            markdown(job),
            markdown(words.headline_tag(outcome)),
            markdown_prose(" · ".join([outcome.verdict.summary, *words.remarks(outcome)]), in_table=True),
        )
        for job, outcome in surprises(summary)
    ]
    head = ("verdict", "scenario", "job", "cause", "summary")
    return ["## Not as expected", "", *markdown_table(head, rows)] if rows else []


def _missing_reports(summary: NightSummary) -> list[str]:
    lines = [f"- {markdown(job)} left no report, so its verdicts are not known" for job in summary.missing]
    lines += [f"- {markdown_code(item.file)}: {markdown(item.why)}" for item in summary.unread]
    return ["## Missing reports", "", *lines] if lines else []


def _skips(summary: NightSummary) -> list[str]:
    rows = [
        (markdown(item.scenario), markdown(item.reason), markdown(", ".join(item.jobs)))
        for item in skip_reasons(summary)
    ]
    return ["## Skipped", "", *markdown_table(("scenario", "reason", "jobs"), rows)] if rows else []
