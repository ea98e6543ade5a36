"""The summary of many jobs for programs, schema 1; each outcome as report.json holds it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from harness.core.ci.ci_summary import JobSummary, NightSummary, skip_reasons, surprises
from harness.core.report import Outcome, counts
from harness.render.report_json import outcome_values
from harness.render.text import escaped

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
