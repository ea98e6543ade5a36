"""report.json, schema 1: the types that describe it, its writer, and its reader.

The keys of the contract are always there, null when unknown. What only people need is stored under "detail", where a
number that JSON cannot write is the text "nan", "inf" or "-inf"; in the contract it is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar

from pydantic import ValidationError, WithJsonSchema
from typing_extensions import TypedDict  # pydantic takes no other one before Python 3.12

from nsa_harness import protocol
from nsa_harness.core.comparison.decisions import Playbook, playbook_for
from nsa_harness.core.comparison.hypotheses import HypothesisRow, Side, answers
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.plan import DiagnosticRerun
from nsa_harness.core.report import (
    STORED_KEYS,
    Artifact,
    CallStack,
    Culprit,
    Divergence,
    Finding,
    GateAnswer,
    HangKind,
    MachineFacts,
    MemoryAt,
    Number,
    Outcome,
    RankStatus,
    RankSummary,
    Report,
    SpecSummary,
    Status,
    StepCost,
    Timing,
    Trouble,
    Usage,
    Verdict,
    Walk,
    doc,
)
from nsa_harness.errors import StoredRunError
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.storage.adapters import adapter, json_value, mistakes

SCHEMA: Literal[1] = 1

Texts = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]
# A reader accepts codes of other versions; the schema lists those of this one.
CauseCode = Annotated[str, WithJsonSchema({"type": "string", "enum": [str(cause) for cause in Cause]})]
Phase = Annotated[str, WithJsonSchema({"type": "string", "enum": list(protocol.KINDS[1:])})]


class PlaceText(TypedDict):
    """The statements at the places of culprit and findings: the contract has the places without them."""

    culprit: Annotated[str | None, doc("at the culprit's place; null when unknown")]
    findings: Annotated[tuple[str | None, ...], doc("at the place of each finding; null when unknown")]


class _FirstDetail(TypedDict):
    about: Annotated[str, doc("one line of the scenario")]
    subject: Annotated[str, doc("what ran, in a line")]
    ranks: Annotated[int, doc("number of ranks")]
    backend: Annotated[str, doc("gloo, nccl or any")]
    notes: Annotated[Texts, doc("choices made on the user's behalf")]
    checked: Annotated[Texts, doc("what was inspected and found in order")]
    not_covered: Annotated[Texts, doc("what this form of the scenario cannot show")]
    ruled_out: Annotated[Texts, doc("possible causes that the evidence excludes")]
    standings: Annotated[tuple[RankStatus, ...], doc("where each rank was at the end; stable")]
    vitals: Annotated[tuple[RankSummary, ...], doc("each rank of a run that ended")]
    metrics: Annotated[
        dict[str, Number], doc("numbers that the program reported; those that JSON cannot write are texts")
    ]
    artifacts: Annotated[tuple[Artifact, ...], doc("files of the run, or the reason why they are not there")]
    why: Annotated[str | None, doc("the proof of a HANG in a sentence; null otherwise; stable")]
    ended: Annotated[str, doc("what was done to the processes")]
    repeat: Annotated[str | None, doc("the command that repeats it; or null")]
    next: Annotated[str | None, doc("the command to continue with; or null")]


class OutcomeDetail(_FirstDetail, total=False):
    """The part of an outcome that only people need; an earlier version has not written the keys of this class."""

    device: Annotated[str, doc("cpu, cuda or any; or empty")]
    tags: Annotated[Texts, doc("of the scenario")]
    settings: Annotated[Pairs, doc("dotted keys that differ from their defaults, with their values")]
    chosen: Annotated[Pairs, doc("keys that were left to the shape or the machine, with their values")]
    criteria: Annotated[Pairs, doc("the limits and expectations that decide the verdict")]
    missing_gradients: Annotated[Texts | None, doc("parameters without a gradient; null: not traced on every rank")]
    last_agreed: Annotated[
        str | None, doc("of a HANG, the latest collective called from Python that every rank has left; or null")
    ]
    deepening: Annotated[
        DiagnosticRerun | None,
        doc("the question about another attempt that this one answers; it never counts; or null"),
    ]
    showed: Annotated[str | None, doc("the answer to the question of `deepening`; or null")]
    stacks: Annotated[tuple[CallStack, ...], doc("call stacks, the culprit's first")]
    divergence: Annotated[
        Divergence | None, doc("the collectives of one group around the first call where its ranks diverge; or null")
    ]
    cost: Annotated[StepCost | None, doc("the cost of a step, and the size of the model; or null")]
    memory: Annotated[
        tuple[MemoryAt, ...],
        doc("what each rank used at boot, at its latest dump, and at the end of a run that did not end well"),
    ]
    signals: Annotated[
        dict[int, str], doc("how each rank of a HANG reacts to a signal, as the kernel says; none was sent for this")
    ]
    nccl: Annotated[NcclInfo | None, doc("how NCCL connected the ranks, as its log says; null: no log")]
    own_status: Annotated[
        Status | None, doc("how the attempt ended, where its verdict is that of all attempts together; else null")
    ]
    place_text: Required[Annotated[PlaceText, doc("the statements at the places of culprit and findings")]]


class StoredOutcome(TypedDict):
    """One attempt of one scenario."""

    scenario: Annotated[str, doc("name")]
    spec_hash: Annotated[str, doc("twelve hex digits over everything that decides what runs")]
    attempt: Annotated[int, doc("number from 1")]
    final: Annotated[bool, doc("whether this attempt counts")]
    verdict: Annotated[Status, doc("PASS, FAIL, HANG, SKIP or ERROR")]
    kind: Annotated[HangKind | None, doc("deadlock, livelock, starved or stopped; null unless HANG")]
    cause: Annotated[CauseCode | None, doc("a code of docs/findings.md; null for PASS")]
    summary: Annotated[str, doc("one sentence")]
    expected: Annotated[bool, doc("whether verdict, cause and findings are what the scenario announced")]
    flaky: Annotated[bool, doc("whether attempts of this spec disagree")]
    phase: Annotated[Phase | None, doc("kind of the culprit's latest progress event; or null")]
    culprit: Annotated[
        Culprit | None, doc("the ranks that others wait for or fail because of, and where they are; or null")
    ]
    victims: Annotated[tuple[int, ...], doc("the ranks that wait for the culprit")]
    last_step: Annotated[
        dict[int, int | None], doc("finished optimizer steps of each rank; null without a status file or an optimizer")
    ]
    exit_codes: Annotated[
        dict[int, int | None],
        doc("of each rank before the harness ended any process; a negative signal number; null if it had not ended"),
    ]
    findings: Annotated[tuple[Finding, ...], doc("what was found, the cause of the verdict first")]
    trouble: Annotated[tuple[Trouble, ...], doc("what could not be observed")]
    timing: Annotated[Timing, doc("seconds")]
    usage: Annotated[Usage, doc("peaks, and the speed")]
    dir: Annotated[str, doc("the attempt's directory")]
    detail: Annotated[
        OutcomeDetail, doc("for people; its keys may change without a new schema, except `standings` and `why`")
    ]


class ReportDetail(TypedDict):
    """The part of a report that only people need."""

    command: Annotated[str, doc("as typed, without secrets")]
    interrupted: Annotated[bool, doc("whether Ctrl-C or a signal ended it early")]
    not_run: NotRequired[Annotated[Texts, doc("scenarios of the plan that were never started")]]
    files: NotRequired[
        Annotated[tuple[Artifact, ...], doc("written for all attempts together; an empty file has its reason")]
    ]
    tree: NotRequired[Annotated[Walk | None, doc("the path through the decision tree; null: there is nothing to ask")]]


class StoredReport(TypedDict):
    """One run of one or more scenarios."""

    schema: Annotated[Literal[1], doc("raised where a reader would break; keys may be added without that")]
    run_id: Annotated[str, doc("name of the run directory")]
    harness: Annotated[str, doc("version of the harness")]
    machine: Annotated[MachineFacts, doc("the machine that the harness ran on")]
    outcomes: Annotated[tuple[StoredOutcome, ...], doc("one object for each attempt")]
    gates: NotRequired[
        Annotated[
            tuple[GateAnswer, ...],
            doc("the gates that fit the program, with the answers of the runs, in the order agreed"),
        ]
    ]
    detail: Annotated[ReportDetail, doc("for people; its keys may change without a new schema")]


OUTCOME_DETAIL = tuple(OutcomeDetail.__annotations__)
_OF_THE_SPEC = tuple(field.name for field in fields(SpecSummary))
_OF_THE_VERDICT = ("kind", "cause", "summary")
Placed = TypeVar("Placed", Culprit, Finding)


def to_json(report: Report, playbook: Playbook | None = None) -> str:
    """Return report.json. `playbook`: what is asked of the runs of our program, with their answers under "detail"."""
    report = escaped(report)
    values = asdict(replace(report, outcomes=()))
    detail = json_value({key: values[key] for key in ReportDetail.__annotations__}, names_numbers=True)
    if playbook:
        asked = playbook_for(playbook, report.outcomes).hypotheses
        detail["hypotheses"] = [_hypothesis(row) for row in answers(report.outcomes, asked)]
    contract = {key: values.get(key) for key in StoredReport.__annotations__}
    contract |= {"schema": SCHEMA, "outcomes": [outcome_values(outcome) for outcome in report.outcomes]}
    return json.dumps({**json_value(contract), "detail": detail}, indent=1, allow_nan=False) + "\n"


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """Return one outcome as report.json and the event stream store it."""
    values = asdict(escaped(outcome), dict_factory=_by_stored_key)
    values |= values.pop("spec")
    verdict = values.pop("verdict")
    values |= {"verdict": verdict.pop("status"), **verdict}
    values["place_text"] = {
        "culprit": _take_text(values["culprit"]),
        "findings": [_take_text(finding) for finding in values["findings"]],
    }
    detail = {key: values.pop(key) for key in OUTCOME_DETAIL}
    contract = {key: values[key] for key in StoredOutcome.__annotations__ if key != "detail"}
    return {**json_value(contract), "detail": json_value(detail, names_numbers=True)}


def _by_stored_key(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {STORED_KEYS.get(name, name): value for name, value in values}


def from_json(text: str, where: str = "report.json") -> Report:
    """Return the report that a file holds. Raises StoredRunError, which names every value that is wrong."""
    try:
        stored = json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, [f"not JSON, or cut short: {error}"]) from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        found = stored.get("schema") if isinstance(stored, dict) else type(stored).__name__
        raise _unreadable(where, [f'schema: expected {SCHEMA}, got {found!r}; this harness reads "schema": {SCHEMA}'])
    try:
        # Through JSON once more: pydantic's strict mode takes lists for tuples and names for enums only from there.
        values: Any = adapter(StoredReport).validate_json(json.dumps(stored), strict=True)
        values |= values.pop("detail")
        values["outcomes"] = tuple(
            _outcome(outcome, f"outcomes.{number}") for number, outcome in enumerate(values["outcomes"])
        )
        del values["schema"]
        return Report(**values)
    except ValidationError as error:
        raise _unreadable(where, mistakes(error)) from None
    except (_WrongShapeError, RecursionError) as error:
        raise _unreadable(where, [str(error)]) from None


class _WrongShapeError(Exception):
    """Two values that do not fit together."""


def _outcome(stored: Any, where: str) -> Outcome:
    """Return the outcome that `stored`, a validated StoredOutcome, was written from."""
    values = {**stored, **stored["detail"]}
    del values["detail"]
    texts = values.pop("place_text")
    if len(texts["findings"]) != len(values["findings"]):
        raise _WrongShapeError(f"{where}.findings: expected a list as long as detail.place_text.findings")
    values["culprit"] = values["culprit"] and _with_text(values["culprit"], texts["culprit"])
    values["findings"] = tuple(map(_with_text, values["findings"], texts["findings"]))
    values["verdict"] = Verdict(status=values["verdict"], **{key: values.pop(key) for key in _OF_THE_VERDICT})
    spec = {key: values.pop(key) for key in _OF_THE_SPEC if key in values}
    return Outcome(spec=SpecSummary(**spec), **values)


def _with_text(holder: Placed, text: str | None) -> Placed:
    return replace(holder, place=holder.place and replace(holder.place, text=text))


def _take_text(holder: dict[str, Any] | None) -> str | None:
    """Remove the statement of a place from the contract and return it."""
    place = holder["place"] if holder else None
    text: str | None = place.pop("text") if place else None
    return text


def _hypothesis(row: HypothesisRow) -> dict[str, Any]:
    return {
        "text": row.hypothesis.text,
        "answer": row.answer.value,
        "because": row.reason,
        "control": _side(row.control),
        "changed": _side(row.changed),
        "command": row.command,
    }


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {"scenario": side.run.spec.scenario, "bad": side.ended.bad, "of": side.ended.of}


def _finite_number(text: str) -> float:
    """Python reads NaN, and 1e999 as infinity; no report holds either."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _unreadable(where: str, found: Iterable[str]) -> StoredRunError:
    lines = "\n".join(f"  {escape(mistake)}" for mistake in found)
    return StoredRunError(
        f"{escape(where)} cannot be read as a report:\n{lines}\n"
        "Repeat the run, or name another run directory: nsa-harness report RUN"
    )
