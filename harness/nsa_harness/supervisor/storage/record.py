"""Reads, writes and validates the run.json of each run, with its plan, and the spec.json of each attempt."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from nsa_harness import __version__
from nsa_harness.core.comparison.plan_file import PlanText
from nsa_harness.core.plan import MAX_RANKS, EngineChoice, Launcher, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.scenario import NAME, FaultKind
from nsa_harness.core.scenario.yaml_tree import origin_of, parse_yaml, value_text, visible
from nsa_harness.core.schedule import ONCE, Policy
from nsa_harness.core.stored_keys import stored_as
from nsa_harness.errors import ScenarioError, StoredRunError, did_you_mean
from nsa_harness.protocol import PROBE_FULL
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir
from nsa_harness.supervisor.storage.safe_directory import SafeDirectory, safe_file

SIZE_LIMIT_BYTES = 1_000_000

Location = tuple[str | int, ...]
Mistake = tuple[Location, str]


def load_spec(path: Path, directory: SafeDirectory | None = None) -> RunSpec:
    """Return the spec in a file, read through the run's `directory` if given. Raise ScenarioError with all errors."""
    label = visible(str(path))
    text = _spec_text(label, *(safe_file(path) if directory is None else (directory, path)))
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScenarioError([f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}"]) from None
    except RecursionError:
        raise ScenarioError([f"{label}:1:1: not a spec: nested too deeply"]) from None
    spec, mistakes = _parse_spec(text, document)
    if mistakes or spec is None:
        raise ScenarioError([_with_position(text, label, location, message) for location, message in mistakes])
    return spec


def _spec_text(label: str, directory: SafeDirectory, path: Path) -> str:
    try:
        return directory.read_whole_file(path, SIZE_LIMIT_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise ScenarioError([f"{label}:1:1: is not UTF-8"]) from None
    except ValueError as error:
        raise ScenarioError([f"{label}:1:1: is {error}; a spec has a few thousand bytes"]) from None
    except OSError as error:
        raise ScenarioError([f"{label}:1:1: cannot be read: {error.strerror}"]) from None


def _parse_spec(text: str, document: object) -> tuple[RunSpec | None, list[Mistake]]:
    """Return the spec and the errors in it. The spec is None if it could not be parsed."""
    if not isinstance(document, dict):
        return None, [((), "not a spec: expected the spec.json of an attempt")]
    schema = document.get("schema")
    if schema != 1:
        newer = isinstance(schema, int | float) and schema > 1
        advice = "use the newer nsa-harness that wrote it" if newer else "run the scenario again with this version"
        return None, [(("schema",), f"expected 1, got {value_text(schema)}; {advice}")]
    try:
        spec = type_adapter(RunSpec).validate_json(text, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        return None, [(detail["loc"], _error_text(detail["msg"], detail["input"])) for detail in details]
    return spec, list(_unknown_keys(document, asdict(spec), ())) or list(value_mistakes(spec))


def _error_text(message: str, value: object) -> str:
    if message == "Field required":
        return "is required"
    got = f", got {value_text(value)}" if isinstance(value, str | int | float | None) else ""
    return message[0].lower() + message[1:] + got


def _unknown_keys(document: object, fields: object, location: Location) -> Iterator[Mistake]:
    """Yield an error for each key in a stored spec that is unknown and therefore might be misspelled."""
    if isinstance(document, dict) and isinstance(fields, dict):
        for key, value in document.items():
            if key in fields:
                yield from _unknown_keys(value, fields[key], (*location, key))
            else:
                yield (*location, key), f"unknown key{did_you_mean(key, fields)}"


def value_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Yield an error for each value in a spec that is not allowed."""
    # The name becomes a directory's name, so a stored run of unknown origin must not contain a path in it.
    if not NAME.fullmatch(spec.scenario):
        yield ("scenario",), f"expected a scenario's name, got {value_text(spec.scenario)}"
    if not 1 <= spec.ranks <= MAX_RANKS:
        yield ("ranks",), f"expected 1 to {MAX_RANKS}, got {spec.ranks}"
    if not spec.program:
        yield ("program",), "expected a command, got an empty list"
    if (
        spec.launcher is Launcher.TORCHRUN
        and spec.program
        and spec.program[0].startswith("-")
        and spec.program[0] != "-m"
    ):
        yield ("program",), f"expected a program or -m, got {value_text(spec.program[0])}"
    if spec.fault and spec.fault.kind not in list(FaultKind):
        yield (
            ("fault", "kind"),
            f"unknown fault {value_text(spec.fault.kind)}{did_you_mean(spec.fault.kind, FaultKind)}",
        )
    if any("\0" in word for pair in spec.env for word in pair) or any("\0" in word for word in spec.program):
        yield (), "a NUL character cannot be passed to a program"


def _with_position(text: str, label: str, location: Location, message: str) -> str:
    """Return the message with the position of the key at `location` in the file, or line 1 if that is unknown."""
    root = parse_yaml(text, label).root
    position = str(origin_of(root, location)) if root else f"{label}:1:1"
    return ": ".join(part for part in (position, ".".join(visible(str(step)) for step in location), message) if part)


_HASH = "spec"  # event in the watcher's journal with the hash of spec.json


def write_spec(attempt: AttemptDir, spec: RunSpec) -> None:
    """Write the spec of a launch, and its hash to the watcher's journal, so that a later edit is noticed."""
    text = json_text(spec, indent=1) + "\n"
    attempt.directory.write(attempt.spec, text)
    attempt.append_record(attempt.watch, {"event": _HASH, "sha256": _sha256(text.encode())})


def load_judged_spec(attempt: AttemptDir) -> RunSpec:
    """Return the spec of a stored attempt. Raise ScenarioError if it is invalid or was edited."""
    spec = load_spec(attempt.spec, attempt.directory)
    hashes = [
        record.get("sha256") for record in attempt.directory.read_records(attempt.watch) if record.get("event") == _HASH
    ]
    if hashes and hashes[-1] != _sha256(attempt.directory.read_whole_file(attempt.spec, SIZE_LIMIT_BYTES)):
        message = "it was edited after its launch, so a verdict would not be about the spec that ran"
        advice = f"restore the launched spec, or launch this one: nsa-harness run {shlex.quote(str(attempt.spec))}"
        raise ScenarioError([f"{visible(str(attempt.spec))}:1:1: {message}; {visible(advice)}"])
    return spec


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


_MAX_BYTES = 16 << 20


@stored_as(was_interrupted="interrupted", plan_text="agreed")
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of run.json: the plan and the options of a command, nsa-harness's version, and the machine."""

    schema: int = 1
    command: str
    harness: str
    machine: MachineFacts
    controller: int  # process id
    plan: tuple[RunSpec | Skip, ...]  # the launches in the order of the command line
    policy: Policy = ONCE
    jobs: int | None = 1
    probe: str = PROBE_FULL
    deepen: bool = False
    was_interrupted: bool = False  # Ctrl-C or TERM ended the command
    engine: EngineChoice | None = None  # None: this machine runs each launch itself
    plan_text: PlanText | None = None  # the plan file at the start; None: an old nsa-harness, which did not store it


@dataclass(frozen=True, kw_only=True)
class _Plan:
    plan: tuple[RunSpec | Skip, ...]


def write_record(run: RunDir, record: RunRecord) -> None:
    """Write run.json without secrets. A separate file, needed to resume the run, has the launches with secrets."""
    learn_launch_secrets(run, record.plan)
    plan = tuple(map(run.redaction.spec, record.plan))
    if plan != record.plan:
        run.directory.write(run.plan, json_text(_Plan(plan=record.plan), indent=1) + "\n")
    plan_text = run.redaction.value(record.plan_text)
    redacted_record = replace(
        record, plan=plan, command=run.redaction.command_text(record.command), plan_text=plan_text
    )
    run.directory.write(run.record, json_text(redacted_record, indent=1) + "\n")


def learn_launch_secrets(run: RunDir, plan: Iterable[RunSpec | Skip]) -> None:
    """Find the secrets in the launches and the environment of a run. They are numbered in the order of the plan."""
    for spec in plan:
        if isinstance(spec, RunSpec):
            run.redaction.learn_launch(spec)
    run.redaction.suspect_environment(os.environ)


def plan_to_resume(run: RunDir) -> RunRecord:
    """Return the record of a run to resume. Raise StoredRunError if it is unreadable or invalid."""
    record = with_unredacted_plan(run, read_record(run))
    if not record.plan:
        raise StoredRunError(f"{run.record}: the plan is missing or unreadable, so the run cannot be resumed")
    for index, spec in enumerate(record.plan):
        for location, message in value_mistakes(spec) if isinstance(spec, RunSpec) else ():
            where = ".".join(map(str, ("plan", index, *location)))
            raise StoredRunError(f"{run.record}: {where}: {message}; the run cannot be resumed")
    return record


def with_unredacted_plan(run: RunDir, record: RunRecord) -> RunRecord:
    """Return the record with its launches' secrets filled in. Raise StoredRunError if they cannot be read."""
    try:
        return replace(
            record, plan=type_adapter(_Plan).validate_json(run.directory.read_whole_file(run.plan, _MAX_BYTES)).plan
        )
    except FileNotFoundError:
        return record
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise StoredRunError(f"{run.plan}: cannot be read: {reason}; the run cannot be resumed") from None


def read_record(run: RunDir) -> RunRecord:
    """Return the contents of run.json, or a placeholder. Raise StoredRunError if a newer nsa-harness wrote the run."""
    try:
        text = run.directory.read_whole_file(run.record, _MAX_BYTES)
        _refuse_newer(run, text)
        return type_adapter(RunRecord).validate_json(text)
    except (OSError, ValueError, RecursionError):
        return RunRecord(
            command="unknown (run.json is missing or unreadable)",
            harness=__version__,
            machine=MachineFacts(host="unknown", cpus=0, gpus=(), torch=None),
            controller=0,
            plan=(),
        )


def _refuse_newer(run: RunDir, text: bytes) -> None:
    """Raise StoredRunError if the run was written by a newer version of nsa-harness."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > RunRecord.schema:
        raise StoredRunError(
            f"{run.record}: schema: expected {RunRecord.schema}, got {schema}; use the newer nsa-harness that wrote"
            " this run"
        )
