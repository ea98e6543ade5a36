"""The file report.json (schema 1): its types, its writer and its reader.

Every key outside "detail" is always present, and null if its value is unknown. Values that only people need are under
"detail". A number that JSON cannot represent is null outside "detail", and "nan", "inf" or "-inf" inside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar

from pydantic import ValidationError, WithJsonSchema
from typing_extensions import TypedDict  # before Python 3.12, pydantic accepts only this TypedDict

from nsa_harness import protocol
from nsa_harness.core.comparison.decisions import Playbook, playbook_for
from nsa_harness.core.comparison.hypotheses import Arm, HypothesisRow, hypothesis_rows
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.host import NcclInfo
from nsa_harness.core.experiment.why import WhyReport
from nsa_harness.core.plan import DiagnosticRerun
from nsa_harness.core.report import (
    Artifact,
    CallStack,
    Culprit,
    Divergence,
    Finding,
    HangKind,
    MachineFacts,
    MemoryAt,
    NamedValue,
    Number,
    Outcome,
    RankStatus,
    RankSummary,
    Report,
    RuleAnswer,
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
from nsa_harness.core.stored_keys import stored_keys, to_stored
from nsa_harness.errors import StoredRunError
from nsa_harness.render.experiments.why_json import WhyRecord, why_values
from nsa_harness.render.text import escape, escaped
from nsa_harness.supervisor.storage.adapters import error_texts, json_value, type_adapter
from nsa_harness.texts import words

SCHEMA: Literal[1] = 1

Texts = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]
# The reader also accepts codes of other versions. The schema lists the codes of this version.
CauseCode = Annotated[str, WithJsonSchema({"type": "string", "enum": [str(cause) for cause in Cause]})]
Phase = Annotated[str, WithJsonSchema({"type": "string", "enum": list(protocol.KINDS[1:])})]


class PlaceText(TypedDict):
    """The text of the source lines at the locations of an outcome's culprit and findings.

    They are stored apart from the places, because programs should not rely on them.
    """

    culprit: Annotated[str | None, doc("source line of the culprit's place; null if unknown")]
    findings: Annotated[tuple[str | None, ...], doc("source line of each finding's place; null if unknown")]


class _FirstDetail(TypedDict):
    about: Annotated[str, doc("the scenario in one line")]
    subject: Annotated[str, doc("the program that ran, in one line")]
    ranks: Annotated[int, doc("number of ranks")]
    backend: Annotated[str, doc("gloo, nccl or any")]
    notes: Annotated[Texts, doc("choices that nsa-harness made, such as a CPU form on a machine without GPUs")]
    checked: Annotated[Texts, doc("checks that found nothing wrong")]
    not_covered: Annotated[Texts, doc("what this run cannot show, such as nccl on a machine without GPUs")]
    ruled_out: Annotated[Texts, doc("possible causes that the evidence excludes")]
    standings: Annotated[tuple[RankStatus, ...], doc("where each rank was at the end; a stable key")]
    vitals: Annotated[tuple[RankSummary, ...], doc("measurements of each rank, if the run ended on its own")]
    metrics: Annotated[dict[str, Number], doc("numbers that the program reported; nan and inf are strings")]
    artifacts: Annotated[tuple[Artifact, ...], doc("files of the attempt, or why a file was not written")]
    why: Annotated[str | None, doc("the proof of a HANG in one sentence; null for other verdicts; a stable key")]
    ended: Annotated[str, doc("how the processes ended, or which signals ended them")]
    repeat: Annotated[str | None, doc("the command that repeats the run; or null")]
    next: Annotated[str | None, doc("the next command to run; or null")]


class OutcomeDetail(_FirstDetail, total=False):
    """The keys of an outcome that are meant for people rather than programs.

    The keys of this class may be missing in reports that earlier versions wrote.
    """

    device: Annotated[str, doc("cpu, cuda or any; empty in reports of earlier versions")]
    tags: Annotated[Texts, doc("tags of the scenario")]
    settings: Annotated[Pairs, doc("settings that differ from their defaults: dotted keys and values")]
    chosen: Annotated[Pairs, doc("settings that the model size or the machine decided: dotted keys and values")]
    criteria: Annotated[Pairs, doc("limits and expectations that decide the verdict")]
    missing_gradients: Annotated[Texts | None, doc("parameters without a gradient; null if not traced on every rank")]
    last_agreed: Annotated[
        str | None, doc("for a HANG, the last collective that every rank completed; null if it is not known")
    ]
    raised: Annotated[str, doc("for a FAIL, the rank and exception that failed first; or empty")]
    deepening: Annotated[
        DiagnosticRerun | None,
        doc("for a diagnostic rerun, which never counts: the question that it answers about another attempt; or null"),
    ]
    showed: Annotated[str | None, doc("the answer to the question in `deepening`; or null")]
    stacks: Annotated[tuple[CallStack, ...], doc("call stacks, the culprit's first")]
    divergence: Annotated[
        Divergence | None,
        doc("collectives of one process group around the first call where its ranks diverge; or null"),
    ]
    cost: Annotated[StepCost | None, doc("the cost of a training step, and the size of the model; or null")]
    memory: Annotated[
        tuple[MemoryAt, ...],
        doc("memory of each rank at its start, at its last stack dump, and at the end of a run that failed"),
    ]
    signals: Annotated[
        dict[int, str], doc("for a HANG, how each rank would react to a signal, according to the kernel; none was sent")
    ]
    nccl: Annotated[NcclInfo | None, doc("how NCCL connected the ranks, as read from its log; null if there is no log")]
    own_status: Annotated[
        Status | None, doc("how this attempt ended, if `verdict` is the verdict of all attempts together; else null")
    ]
    place_text: Required[Annotated[PlaceText, doc("source lines of the culprit's and the findings' places")]]


class StoredOutcome(TypedDict):
    """The outcome of one attempt of one scenario, as stored in report.json."""

    scenario: Annotated[str, doc("name of the scenario")]
    spec_hash: Annotated[str, doc("hash, in 12 hex digits, of everything that decides what runs")]
    attempt: Annotated[int, doc("number of the attempt, from 1")]
    final: Annotated[bool, doc("whether this attempt counts, because no later attempt replaces it")]
    verdict: Annotated[Status, doc("PASS, FAIL, HANG, SKIP or ERROR")]
    kind: Annotated[HangKind | None, doc("deadlock, livelock, starved or stopped; null if the verdict is not HANG")]
    cause: Annotated[CauseCode | None, doc("a cause code of docs/findings.md; null for PASS")]
    summary: Annotated[str, doc("the verdict explained in one sentence")]
    expected: Annotated[bool, doc("whether verdict, cause and findings are those that the scenario expects")]
    flaky: Annotated[bool, doc("whether attempts with the same spec_hash have different verdicts")]
    phase: Annotated[Phase | None, doc("kind of the culprit's last progress event; or null")]
    culprit: Annotated[
        Culprit | None, doc("the ranks that others wait for or that made others fail, and where they are; or null")
    ]
    victims: Annotated[tuple[int, ...], doc("ranks that wait for the culprit")]
    last_step: Annotated[
        dict[int, int | None], doc("finished optimizer steps per rank; null without a status file or an optimizer")
    ]
    exit_codes: Annotated[
        dict[int, int | None],
        doc("exit code per rank, or a negative signal number; null if it still ran when nsa-harness ended the job"),
    ]
    findings: Annotated[tuple[Finding, ...], doc("findings, the cause of the verdict first")]
    trouble: Annotated[tuple[Trouble, ...], doc("what could not be observed, with the reasons")]
    timing: Annotated[Timing, doc("durations in seconds")]
    usage: Annotated[Usage, doc("peak memory, and the speed")]
    dir: Annotated[str, doc("name of the attempt's directory")]
    values: NotRequired[
        Annotated[
            tuple[NamedValue, ...],
            doc("names of the program whose values decide or differ between ranks, most telling first; not for PASS"),
        ]
    ]
    detail: Annotated[
        OutcomeDetail, doc("for people; its keys may change without a new schema, except `standings` and `why`")
    ]


class ReportDetail(TypedDict):
    """The keys of a report that are meant for people rather than programs."""

    command: Annotated[str, doc("the command as typed, without secrets")]
    interrupted: Annotated[bool, doc("whether Ctrl-C or a signal ended the run early")]
    not_run: NotRequired[Annotated[Texts, doc("scenarios of the plan that were not started")]]
    files: NotRequired[
        Annotated[tuple[Artifact, ...], doc("files collected from all attempts; an empty file has its reason")]
    ]
    tree: NotRequired[Annotated[Walk | None, doc("the path through the decision tree; null if no run needs the tree")]]
    why: NotRequired[Annotated[WhyRecord, doc("for runs of `nsa-harness why`: the answer, as in why.json")]]


class StoredReport(TypedDict):
    """The contents of report.json: one run of one or more scenarios."""

    schema: Annotated[Literal[1], doc("version of the format; raised only if a reader would break, not for new keys")]
    run_id: Annotated[str, doc("name of the run directory")]
    harness: Annotated[str, doc("version of nsa-harness")]
    machine: Annotated[MachineFacts, doc("the machine that nsa-harness ran on")]
    outcomes: Annotated[tuple[StoredOutcome, ...], doc("one object per attempt")]
    gates: NotRequired[
        Annotated[
            tuple[RuleAnswer, ...],
            doc("the decision rules for this program, in the order of the plan, with their results for these runs"),
        ]
    ]
    detail: Annotated[ReportDetail, doc("for people; its keys may change without a new schema")]


OUTCOME_DETAIL = tuple(OutcomeDetail.__annotations__)
_SPEC_KEYS = tuple(field.name for field in fields(SpecSummary))
_VERDICT_KEYS = ("kind", "cause", "summary")
HasPlace = TypeVar("HasPlace", Culprit, Finding)


def to_json(report: Report, playbook: Playbook | None = None, why: WhyReport | None = None) -> str:
    """Return the contents of report.json.

    `playbook`: the hypotheses and decision rules for runs of nsa-harness's own program. If it is given, the results for
    the hypotheses are added under "detail". `why`: the answer of `nsa-harness why`, if it launched the runs.
    """
    report = escaped(report)
    values = asdict(replace(report, outcomes=()))
    detail = json_value({key: values[key] for key in ReportDetail.__annotations__ if key in values}, keeps_names=True)
    if why:
        detail["why"] = why_values(why)
    if playbook:
        hypotheses = playbook_for(playbook, report.outcomes).hypotheses
        detail["hypotheses"] = [_hypothesis(row) for row in hypothesis_rows(report.outcomes, hypotheses)]
    contract = {key: values.get(key) for key in StoredReport.__annotations__}
    contract |= {"schema": SCHEMA, "outcomes": [outcome_values(outcome) for outcome in report.outcomes]}
    return json.dumps({**json_value(contract), "detail": detail}, indent=1, allow_nan=False) + "\n"


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a JSON object."""
    values = to_stored(escaped(outcome))
    values |= values.pop("spec")
    verdict = values.pop("verdict")
    values |= {"verdict": verdict.pop("status"), **verdict}
    values["place_text"] = {
        "culprit": _take_text(values["culprit"]),
        "findings": [_take_text(finding) for finding in values["findings"]],
    }
    detail = {key: values.pop(key) for key in OUTCOME_DETAIL}
    contract = {key: values[key] for key in StoredOutcome.__annotations__ if key != "detail"}
    return {**json_value(contract), "detail": json_value(detail, keeps_names=True)}


def from_json(text: str, where: str = "report.json") -> Report:
    """Parse report.json. Raise StoredRunError, which names the file as `where`, if it is invalid."""
    try:
        values: Any = json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, [f"not JSON, or cut short: {error}"]) from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        schema = values.get("schema") if isinstance(values, dict) else type(values).__name__
        raise _unreadable(where, [f"schema: expected {SCHEMA}, got {schema!r}; this nsa-harness reads schema {SCHEMA}"])
    try:
        # Converted back to JSON, because pydantic's strict mode accepts lists for tuples only in JSON.
        values = type_adapter(StoredReport).validate_json(json.dumps(values), strict=True)
        values |= values.pop("detail")
        values.pop("why", None)
        values["outcomes"] = tuple(
            _outcome(outcome, f"outcomes.{number}") for number, outcome in enumerate(values["outcomes"])
        )
        del values["schema"]
        return Report(**values)
    except ValidationError as error:
        raise _unreadable(where, error_texts(error)) from None
    except (_WrongShapeError, RecursionError) as error:
        raise _unreadable(where, [str(error)]) from None


class _WrongShapeError(Exception):
    """Raised if two values in a stored report contradict each other."""


def _outcome(values: Any, where: str) -> Outcome:
    """Convert a validated `StoredOutcome`. Raise _WrongShapeError, which names its path `where`, if inconsistent."""
    values = {**values, **values["detail"]}
    del values["detail"]
    texts = values.pop("place_text")
    if len(texts["findings"]) != len(values["findings"]):
        raise _WrongShapeError(f"{where}.findings: expected a list as long as detail.place_text.findings")
    values["culprit"] = values["culprit"] and _with_text(values["culprit"], texts["culprit"])
    values["findings"] = tuple(map(_with_text, values["findings"], texts["findings"]))
    values["verdict"] = Verdict(status=values["verdict"], **{key: values.pop(key) for key in _VERDICT_KEYS})
    spec = {key: values.pop(key) for key in _SPEC_KEYS if key in values}
    names = {key: name for name, key in stored_keys(Outcome).items()}
    return Outcome(spec=SpecSummary(**spec), **{names[key]: value for key, value in values.items()})


def _with_text(holder: HasPlace, text: str | None) -> HasPlace:
    """Return a copy of a culprit or finding with `text` as its source line."""
    return replace(holder, place=holder.place and replace(holder.place, text=text))


def _take_text(holder: dict[str, Any] | None) -> str | None:
    """Remove the source line from a culprit or finding and return it."""
    place = holder["place"] if holder else None
    text: str | None = place.pop("text") if place else None
    return text


def _hypothesis(row: HypothesisRow) -> dict[str, Any]:
    return {
        "text": row.hypothesis.text,
        "answer": row.answer.value,
        "because": words.hypothesis_reason_alone(row),
        "control": _side(row.control),
        "changed": _side(row.changed),
        "command": row.command,
    }


def _side(side: Arm | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {"scenario": side.run.spec.scenario, "bad": side.counts.failed, "of": side.counts.attempts}


def _finite_number(text: str) -> float:
    """Convert the text to a float. Raise ValueError if it is NaN or infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _unreadable(where: str, errors: Iterable[str]) -> StoredRunError:
    lines = "\n".join(f"  {escape(error)}" for error in errors)
    return StoredRunError(
        f"{escape(where)} cannot be read as a report:\n{lines}\n"
        "Repeat the run, or name another run directory: nsa-harness report RUN"
    )
