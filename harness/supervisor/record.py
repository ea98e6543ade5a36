"""run.json: what `report` needs to know of a run besides its attempts."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from harness import __version__
from harness.core.plan import Skip
from harness.core.report import MachineFacts
from harness.supervisor.rundir import RunDir, write_document


@dataclass(frozen=True, kw_only=True)
class Record:
    """One command: what was asked, by which harness, on which machine, and what could not run."""

    schema: int = 1
    command: str
    harness: str
    machine: MachineFacts
    controller: int  # process id
    skips: tuple[Skip, ...]
    interrupted: bool = False  # by Ctrl-C or TERM


_RECORD = TypeAdapter(Record)


def write_record(run: RunDir, record: Record) -> None:
    write_document(run.request, _RECORD.dump_json(record, indent=1).decode())


def read_record(run: RunDir) -> Record:
    """run.json; a run without a readable one is still judged."""
    try:
        return _RECORD.validate_json(run.request.read_bytes())
    except (OSError, ValidationError):
        return Record(
            command="unknown (run.json is missing or unreadable)",
            harness=__version__,
            machine=MachineFacts(host="unknown", cpus=0, gpus=(), torch=None),
            controller=0,
            skips=(),
        )
