"""A summary of several CI jobs, as Markdown and as JSON (schema 1)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from nsa_harness.core.ci import Group, JobSummary, News, NightComparison, Nights, NightSummary, skip_reasons, surprises
from nsa_harness.core.comparison.history import Entry, FlakeRate
from nsa_harness.core.report import Outcome, Status, counts
from nsa_harness.render import answer
from nsa_harness.render.documents.report_json import outcome_values
from nsa_harness.render.text import escaped, markdown, markdown_code, markdown_fence, markdown_prose, markdown_table
from nsa_harness.supervisor.storage.adapters import type_adapter
from nsa_harness.texts import words

SCHEMA = 1
_ALL_GOOD = "every verdict is as expected"
_HEADINGS = {Group.NEW: "New failures", Group.FLAKY: "Flaky", Group.STILL: "Still failing", Group.FIXED: "Fixed"}
_MOST_CHANGES = 8  # differences of the surroundings in the text of an issue


def ci_summary_json(
    summary: NightSummary, comparison: NightComparison | None = None, rows: Mapping[str, Any] | None = None
) -> str:
    """Return the summary as a JSON object. `rows`: for each job, its row in the matrix of the workflow."""
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
        **(_comparison_values(comparison, rows or {}) if comparison else {}),
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


_MAX_FENCE_BYTES = 4001
MOST_BYTES = 1_000_000  # GitHub does not show a job summary that is larger than 1024 KiB


def ci_summary_md(summary: NightSummary, comparison: NightComparison | None = None, ci_run: str = "") -> str:
    """Return the summary as Markdown, failures first. Its heading is RED if the exit code is not 0, else GREEN.

    `comparison`: with earlier nights. `ci_run`: the URL of the CI run, for the text of an issue.
    """
    summary = escaped(summary)
    sections = (
        _heading(summary),
        *(_comparison_sections(comparison, ci_run) if comparison else ()),
        _job_table(summary.jobs),
        _unexpected_outcomes(summary) if comparison is None else [],
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
    remaining_bytes = limit_bytes - _MAX_FENCE_BYTES - len(note.format(len(lines)).encode())
    first_lines: list[str] = []
    for line in lines:
        remaining_bytes -= len(line.encode()) + 1
        if remaining_bytes < 0:
            break
        first_lines.append(line)
    fences = [line for line in first_lines if line.startswith("```")]
    first_lines += [
        re.sub("[^`].*", "", fence) for fence in fences[-1:] if len(fences) % 2
    ]  # a block of code must not contain the note
    return "\n".join(first_lines) + "\n" + note.format(len(lines) - len(first_lines))


def _heading(summary: NightSummary) -> list[str]:
    color = "RED" if summary.exit_code else "GREEN"
    final = [outcome for _, outcome in summary.outcomes()]
    verdicts = " · ".join(f"{status.value} {number}" for status, number in counts(final).items())
    totals = f"{words.plural(len(final), 'verdict')} from {words.plural(len(summary.jobs), 'job')}"
    good = "every job that counts is as expected" if any(job.is_red for job in summary.jobs) else _ALL_GOOD
    return [
        f"# {color}: {', '.join(summary.reasons) or good}",
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


# The comparison with earlier nights.


def _comparison_sections(comparison: NightComparison, ci_run: str) -> Iterator[list[str]]:
    counted = ", ".join(f"{len(news)} {_HEADINGS[group].lower()}" for group, news in comparison.groups.items())
    since = f"Since the last night ({_time(comparison.last_night)})" if comparison.last_night else "No earlier night"
    yield [f"{since}: {counted}."]
    for group, news in comparison.groups.items():
        if not news:
            continue
        yield [f"## {_HEADINGS[group]}"]
        if group is Group.NEW:
            for item in news:
                issue = markdown_fence(issue_text(item, ci_run), "markdown")
                yield [f"### {markdown(issue_title(item))}", "", *issue]
            continue
        rows = [
            (
                markdown(item.outcome.spec.scenario),
                markdown(", ".join(item.jobs)),
                markdown_prose(item.outcome.verdict.summary, in_table=True),
                markdown(_rate(item.rate) if group is Group.FLAKY else _good(item)),
            )
            for item in news
        ]
        last = "attempts not as expected" if group is Group.FLAKY else "last good night"
        yield markdown_table(("scenario", "jobs", "this night", last), rows)


def issue_title(failure: News) -> str:
    """Return the title of an issue about a failure, such as "HANG in train: deadlock at train.py:12"."""
    outcome = escaped(failure.outcome)
    place = words.place_name(outcome.culprit.place) if outcome.culprit and outcome.culprit.place else ""
    cause = " at ".join(filter(None, (words.headline_tag(outcome), place)))
    return f"{outcome.verdict.status.value} in {outcome.spec.scenario}{f': {cause}' if cause else ''}"


def issue_text(failure: News, ci_run: str) -> str:
    """Return the text of an issue about a failure as Markdown."""
    outcome = escaped(failure.outcome)
    place = outcome.culprit.place if outcome.culprit else None
    # The command of the report names a file on the machine of the CI job. A scenario with tags is in a file of its own.
    repeat = f"nsa-harness run {shlex.quote(outcome.spec.scenario)}" if outcome.spec.tags else outcome.repeat_command
    changed = [f"{name}: {before} -> {after}" for name, before, after in failure.changed]
    if len(changed) > _MOST_CHANGES:
        changed = [*changed[:_MOST_CHANGES], f"{len(changed) - _MOST_CHANGES} more"]
    facts = {
        "Title": issue_title(failure),
        "Place": markdown_code(f"{words.whole_place_name(place)} {place.function or ''}".strip()) if place else "",
        "Jobs": markdown(", ".join(failure.jobs)),
        "Repeat": markdown_code(repeat) if repeat else "",
        "Last good night": markdown(_good(failure)),
        "First bad night": markdown(f"commit {failure.commit}") if failure.commit else "",
        "Changed since": markdown("; ".join(changed)),
        "CI run": ci_run,
    }
    title, *others = (f"{name}: {text}" for name, text in facts.items() if text)
    summary = markdown_prose(answer.sentence(outcome.verdict.summary))
    return "\n".join([title, "", summary, "", *(f"- {line}" for line in others)])


def _good(item: News) -> str:
    good = item.last_good
    if good is None:
        return "none is known"
    commit = good.surroundings.get("commit")
    return _time(good.run_id) + (f", commit {commit}" if commit else "")


def _time(run_id: str) -> str:
    """Return the date and time in a run ID, such as "2026-11-28 14:05", or the run ID if it has none."""
    found = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)", run_id)
    return "{}-{}-{} {}:{}".format(*found.groups()) if found else run_id


def _rate(rate: FlakeRate | None) -> str:
    if rate is None:
        return "unknown"
    low, high = rate.interval
    return f"{rate.bad} of {rate.runs}, a rate between {low * 100:.0f} and {high * 100:.0f} %"


def _comparison_values(comparison: NightComparison, rows: Mapping[str, Any]) -> dict[str, Any]:
    groups = {
        group.value: [
            {
                "scenario": item.outcome.spec.scenario,
                "jobs": item.jobs,
                "title": issue_title(item),
                "last_good": item.last_good and item.last_good.run_id,
                "good_commit": item.good_commit or None,
                "rate": item.rate and asdict(item.rate),
                "row": rows.get(item.jobs[0]),
            }
            for item in news
        ]
        for group, news in comparison.groups.items()
    }
    return {"last_night": comparison.last_night or None, **groups, "history": _history_values(comparison.nights)}


def _history_values(nights: Nights) -> dict[str, Any]:
    """Return the attempts of all nights. Their surroundings are stored once each, because few of them differ."""
    numbers: dict[str, int] = {}
    entries = [
        {
            "job": job,
            **asdict(replace(entry, numbers={}, surroundings={})),
            "surroundings": numbers.setdefault(json.dumps(dict(entry.surroundings)), len(numbers)),
        }
        for (job, _), group in nights.items()
        for entry in group
    ]
    return {"entries": entries, "surroundings": [json.loads(text) for text in numbers]}


def nights_from_json(text: str) -> Nights:
    """Return the attempts of all nights from a summary as JSON. If it has none, an exception is raised."""
    history = json.loads(text)["history"]
    nights: dict[tuple[str, str], list[Entry]] = {}
    for values in history["entries"]:
        job, number = values.pop("job"), values.pop("surroundings")
        entry = type_adapter(Entry).validate_python({**values, "surroundings": history["surroundings"][number]})
        nights.setdefault((job, entry.scenario), []).append(entry)
    return nights
