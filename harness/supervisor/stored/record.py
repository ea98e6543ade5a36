"""run.json: what `report` needs to know of a run besides its attempts."""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness import __version__
from harness.core.attempts import ONCE, Policy
from harness.core.plan import RunSpec, Skip
from harness.core.report import MachineFacts
from harness.errors import StoredRunError
from harness.protocol import PROBE_FULL
from harness.supervisor.stored.adapters import adapter, json_text
from harness.supervisor.stored.reading import read_whole
from harness.supervisor.stored.rundir import RunDir, write_document
from harness.supervisor.stored.stored_spec import value_mistakes

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Record:
    """One command: what was asked, by which harness, on which machine, and with which options."""

    schema: int = 1
    command: str
    harness: str
    machine: MachineFacts
    controller: int  # process id
    plan: tuple[RunSpec | Skip, ...]  # in the order asked for
    policy: Policy = ONCE
    jobs: int | None = 1
    probe: str = PROBE_FULL
    deepen: bool = False
    interrupted: bool = False  # by Ctrl-C or TERM


def write_record(run: RunDir, record: Record) -> None:
    write_document(run.request, json_text(record, indent=1) + "\n")


def plan_to_resume(run: RunDir) -> Record:
    """run.json of a run to go on with. Raises StoredRunError when it cannot be read or asks for what no plan can."""
    record = read_record(run)
    if not record.plan:
        raise StoredRunError(f"{run.request}: the plan is missing or unreadable, so the run cannot be resumed")
    for place, spec in enumerate(record.plan):
        for location, what in value_mistakes(spec) if isinstance(spec, RunSpec) else ():
            where = ".".join(map(str, ("plan", place, *location)))
            raise StoredRunError(f"{run.request}: {where}: {what}; the run cannot be resumed")
    return record


def read_record(run: RunDir) -> Record:
    """run.json; a run without a readable one is still judged. Raises StoredRunError for one of a later harness."""
    try:
        text = read_whole(run.request, _MAX_BYTES)
        _refuse_newer(run, text)
        return adapter(Record).validate_json(text)
    except (OSError, ValueError, RecursionError):
        return Record(
            command="unknown (run.json is missing or unreadable)",
            harness=__version__,
            machine=MachineFacts(host="unknown", cpus=0, gpus=(), torch=None),
            controller=0,
            plan=(),
        )


def _refuse_newer(run: RunDir, text: bytes) -> None:
    """What its words mean is not known here, so a verdict could be wrong."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > Record.schema:
        raise StoredRunError(
            f"{run.request}: schema: expected {Record.schema}, got {schema}; a newer nsa-harness wrote this run: "
            "use that one"
        )
