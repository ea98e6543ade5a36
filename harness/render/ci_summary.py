"""The summary of many jobs: for people, bad news first, and for programs, schema 1."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from nsa_harness.core.ci import JobSummary, NightSummary, SkipReason, skip_reasons, surprises
from nsa_harness.core.report import Outcome, Status, counts
from nsa_harness.render import words
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.text import escaped, markdown, markdown_code

SCHEMA = 1


def ci_summary_json(summary: NightSummary) -> str:
    summary = escaped(summary)
    values = {
        "schema": SCHEMA,
        "red": summary.exit_code != 0,
        "exit_code": summary.exit_code,
        "reasons": summary.reasons,
        "counts": counts([outcome for _, outcome in summary.outcomes()]),
        "jobs": [_job(job) for job in summary.jobs],
        "not_as_expected": [{"job": job, **_brief(outcome)} for job, outcome in surprises(summary)],
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


def _brief(outcome: Outcome) -> dict[str, Any]:
    verdict = outcome.verdict
    return {
        "scenario": outcome.scenario,
        "verdict": verdict.status,
        "kind": verdict.kind,
        "cause": verdict.cause,
        "summary": verdict.summary,
    }


MOST_BYTES = 1_000_000  # GitHub shows nothing at all of a job summary above 1024 KiB


def ci_summary_md(summary: NightSummary) -> str:
    """The whole summary. Its first line says RED or GREEN."""
    summary = escaped(summary)
    sections = (_head(summary), _jobs(summary.jobs), _surprises(summary), _lost(summary), _skips(summary))
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def cut(text: str, limit_bytes: int = MOST_BYTES) -> str:
    """The text, or its first whole lines and a sentence that says how many are left out."""
    if len(text.encode()) <= limit_bytes:
        return text
    lines = text.split("\n")
    note = "\n**Cut here:** {} more lines do not fit; `nsa-harness ci summary --out FILE DIR` writes all of them.\n"
    left_bytes = limit_bytes - len(note.format(len(lines)).encode())
    kept: list[str] = []
    for line in lines:
        left_bytes -= len(line.encode()) + 1
        if left_bytes < 0:
            break
        kept.append(line)
    return "\n".join(kept) + "\n" + note.format(len(lines) - len(kept))


def _head(summary: NightSummary) -> Iterator[str]:
    color = "RED" if summary.exit_code else "GREEN"
    yield f"# {color}: {', '.join(summary.reasons) or 'every verdict is as expected'}"
    yield ""
    final = [outcome for _, outcome in summary.outcomes()]
    found = " · ".join(f"{status.value} {number}" for status, number in counts(final).items())
    judged = f"{words.plural(len(final), 'verdict')} of {words.plural(len(summary.jobs), 'job')}"
    yield f"{judged}: {found}. Exit code {summary.exit_code}."


def _jobs(jobs: Sequence[JobSummary]) -> Iterator[str]:
    if not jobs:
        return
    yield f"| job | {' | '.join(status.value for status in Status)} | exit code | machine | remark |"
    yield f"| --- | {' | '.join('---:' for _ in Status)} | ---: | --- | --- |"
    for job in sorted(jobs, key=lambda job: not job.red):
        numbers = " | ".join(str(number) for number in counts(job.outcomes).values())
        machines = markdown(" and ".join(f"{one.host}: {words.machine_line(one)}" for one in job.machines))
        remark = f"**{markdown(job.remark)}**" if job.remark else ""
        yield f"| {markdown(job.job)} | {numbers} | {job.exit_code} | {machines} | {remark} |"


def _surprises(summary: NightSummary) -> Iterator[str]:
    found = surprises(summary)
    if not found:
        return
    yield from ("## Not as expected", "")
    yield from ("| verdict | scenario | job | kind or cause | in one sentence |", "| --- | --- | --- | --- | --- |")
    for job, outcome in found:
        cells = (outcome.scenario, job, words.headline_tag(outcome), _sentence(outcome))
        yield f"| **{outcome.verdict.status.value}** | {' | '.join(map(markdown, cells))} |"


def _sentence(outcome: Outcome) -> str:
    return " · ".join([outcome.verdict.summary, *words.remarks(outcome)])


def _lost(summary: NightSummary) -> Iterator[str]:
    if not summary.missing and not summary.unread:
        return
    yield from ("## Not there", "")
    yield from (f"- {markdown(job)} left no report: no verdict of this job is known" for job in summary.missing)
    yield from (f"- {markdown_code(item.file)}: {markdown(item.why)}" for item in summary.unread)


def _skips(summary: NightSummary) -> Iterator[str]:
    found = skip_reasons(summary)
    if not found:
        return
    yield from ("## Skipped", "", "| scenario | reason | jobs |", "| --- | --- | --- |", *_skip_rows(found))


def _skip_rows(found: Iterable[SkipReason]) -> Iterator[str]:
    for item in found:
        yield f"| {markdown(item.scenario)} | {markdown(item.reason)} | {markdown(', '.join(item.jobs))} |"
