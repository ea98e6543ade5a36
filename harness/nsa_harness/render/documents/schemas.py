"""JSON Schemas (2020-12) of the documents that programs read, made from the types that the writers render.

Keys, types and words come from there; what is said of each key stands here, and a key of which nothing is said is a
mistake that a test finds. Closed where the contract is: an object has the keys of its type and no more. Open is
`detail`, whose keys may change; of a report `standings` and `why` in it do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from nsa_harness import __version__, protocol
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import WORTHS
from nsa_harness.core.evidence.live import FirstSnapshot, RankProgress
from nsa_harness.core.experiment.signature import SLOW
from nsa_harness.core.report import MachineFacts, Report, Status
from nsa_harness.render import events
from nsa_harness.render.documents import report_json
from nsa_harness.render.experiments import bisect_json
from nsa_harness.supervisor.storage.ledger import LedgerLine

Schema = dict[str, Any]


class Document(StrEnum):
    """What `nsa-harness schema` prints the schema of."""

    SCENARIO = "scenario"
    PLAN = "plan"
    REPORT = "report"
    BISECT = "bisect"
    EVENTS = "events"


def json_schema(document: Document) -> Schema:
    match document:
        case Document.REPORT:
            return _report_schema()
        case Document.BISECT:
            return _bisect_schema()
        case Document.EVENTS:
            return _events_schema()
        case Document.PLAN:
            from nsa_harness.core.comparison.plan_file import plan_schema

            return plan_schema()
    from nsa_harness.core.scenario.scenario import json_schema as scenario_schema

    return scenario_schema()


def _report_schema() -> Schema:
    known = _types(report=Report)
    return _whole(Document.REPORT, f"report.json, schema {report_json.SCHEMA}", report_json.SCHEMA, known, _top(known))


def _top(known: Schema) -> Schema:
    """A report as `report_json` renders it, from the type that it renders."""
    _rearrange_outcome(known)
    values = known.pop("Report")["properties"]
    detail = {key: values.pop(key) for key in report_json.REPORT_DETAIL}
    schema = _constant(report_json.SCHEMA)
    return _closed({"schema": schema, **values, "detail": _open(detail, required=())})


def _rearrange_outcome(known: Schema) -> None:
    """What `outcome_values` does with a value, done with its type."""
    outcome, verdict = known["Outcome"]["properties"], known.pop("Verdict")["properties"]
    outcome.pop("verdict")
    detail = {key: outcome.pop(key) for key in report_json.OUTCOME_DETAIL}
    detail["place_text"] = {"type": "object"}
    place = known["Place"]
    known["SourceLine"] = {**place, "description": "A place with its statement."}
    for of_people in ("CallStack", "EnteredCall"):
        known[of_people] = _pointing(known[of_people], "Place", "SourceLine")
    without_text = {key: value for key, value in place["properties"].items() if key != "text"}
    known["Place"] = _closed(without_text, place["description"])
    verdict["cause"] = outcome_cause = _or_null(_words(Cause))
    known["Finding"]["properties"]["code"] = outcome_cause["anyOf"][0]
    known["Finding"]["properties"]["confidence"] = {"enum": list(WORTHS)}
    outcome["phase"] = _or_null(_words(protocol.KINDS[1:]))
    detail["metrics"]["additionalProperties"] = _NUMBER
    known["RankSummary"]["properties"]["loss"] = _or_null(_NUMBER)
    known["Outcome"] = _closed(
        {
            **{key: outcome.pop(key) for key in ("scenario", "spec_hash", "attempt", "final")},
            "verdict": verdict["status"],
            **{key: verdict[key] for key in ("kind", "cause", "summary")},
            **outcome,
            "detail": _open(detail, required=("standings", "why")),
        },
        known["Outcome"]["description"],
    )


def _bisect_schema() -> Schema:
    """The type that is written, with the words that its texts are made of; `p_hang` may be left out."""
    known = _types(bisect=bisect_json.SearchRecord)
    for name, verdict in (("StoredProbe", _or_null(_words(Status))), ("Signature", _words((*Status, SLOW)))):
        known[name]["properties"].update(verdict=verdict, cause=_or_null(_words(Cause)))
    answer = known["Answer"]
    answer["required"].remove("p_hang")
    answer["properties"]["p_hang"] = answer["properties"]["p_hang"]["anyOf"][0]
    del known["StoredDetail"]["additionalProperties"]
    title = f"bisect.json, schema {bisect_json.SCHEMA}"
    return _whole(Document.BISECT, title, bisect_json.SCHEMA, known, known.pop("SearchRecord"))


# Of each event what it has beside the head; a name in brackets tells two forms of one event apart.
_SCENARIO_EVENTS: Mapping[str, Mapping[str, Any]] = {
    "plan": {"machine": MachineFacts, "scenarios": list[events.Planned]},
    "launch": events.Planned.__annotations__,
    "phase": {"phase": str, "elapsed_s": float, "deadline_s": float | None, "ranks": list[RankProgress]},
    "look": {"rows": list[FirstSnapshot]},
    "suspect": {"text": str},
    "released": {"text": str},
    "done": {"counts": dict[Status, int], "exit_code": int, "run_dir": str},
    "plan (dry run)": {
        "dry_run": bool,
        "command": list[str],
        "env": dict[str, str],
        "ranks": int,
        "backend": str,
        "spec_hash": str,
        "notes": list[str],
    },
    "plan (dry run of what cannot run)": {"dry_run": bool, "skip": str},
    "done (of a claim)": {"claim": LedgerLine, "exit_code": int, "run_dir": str},
    "error": {"message": str},
}


def _events_schema() -> Schema:
    known = _types(
        report=Report,
        **{f"{name}.{key}": of for name, keys in _SCENARIO_EVENTS.items() for key, of in keys.items()},
    )
    forms = {name: {key: known.pop(f"{name}.{key}") for key in keys} for name, keys in _SCENARIO_EVENTS.items()}
    _top(known)
    bisect = _bisect_schema()["$defs"]
    probe = bisect["StoredProbe"]["properties"]
    known = {**bisect, **known}
    forms["outcome"] = {"outcome": _refer("Outcome"), "run_dir": {"type": "string"}}
    forms["probe"] = {key: probe[key] for key in bisect_json.ProbeEvent.__annotations__}
    forms["probe"]["counts_as"] = bisect["CountsAs"]
    forms["done (of a bisection)"] = {"answer": _refer("Answer"), "run_dir": {"type": "string"}}
    for name, more in forms.items():
        known[name] = _closed({**_head(name.partition(" ")[0]), **more})
    title = f"one line of events.jsonl and of --json, schema {events.SCHEMA}"
    return _whole(Document.EVENTS, title, events.SCHEMA, known, {"oneOf": [_refer(name) for name in forms]})


def _head(event: str) -> Schema:
    return {
        "schema": _constant(events.SCHEMA),
        "event": _constant(event),
        "t_s": {"type": ["number", "null"]},
        "run_id": {"type": ["string", "null"]},
        "scenario": {"type": ["string", "null"]},
    }


class _Plain(GenerateJsonSchema):
    """Titles that only repeat the key are left out."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic names it
        return False


def _types(**asked: Any) -> Schema:
    """The definitions of these types and of all that they hold, each closed; simple ones by their name."""
    inputs = [(name, "serialization", TypeAdapter(of)) for name, of in asked.items()]
    made, shared = TypeAdapter.json_schemas(inputs, schema_generator=_Plain)  # type: ignore[arg-type]  # str for Literal
    known = {name.lstrip("_"): _described(schema) for name, schema in shared["$defs"].items()}
    return {**known, **{str(name): schema for (name, _), schema in made.items() if name not in ("report", "bisect")}}


def _described(schema: Schema) -> Schema:
    schema = _renamed(schema)
    return _closed(schema["properties"], schema.get("description", "")) if "properties" in schema else schema


def _renamed(node: Any) -> Any:
    """References without the underscore of a private class."""
    if isinstance(node, dict):
        return {key: value.replace("/_", "/") if key == "$ref" else _renamed(value) for key, value in node.items()}
    return [_renamed(one) for one in node] if isinstance(node, list) else node


def _closed(keys: Schema, about: str = "") -> Schema:
    """An object with these keys, each always there."""
    return {
        "type": "object",
        **({"description": about} if about else {}),
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


def _open(keys: Schema, required: Sequence[str]) -> Schema:
    return {"type": "object", "properties": keys, "required": list(required)}


def _whole(document: Document, title: str, schema: int, known: Schema, top: Schema) -> Schema:
    """With what is said of each key. Raises KeyError where nothing is said of one."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nsa-harness:{__version__}:{document}:{schema}",
        "title": f"{title}, of nsa-harness {__version__}",
        **_told(top, str(document)),
        "$defs": {name: _told(known[name], name) for name in sorted(_used(top, known))},
    }


def _told(schema: Schema, name: str) -> Schema:
    if "properties" not in schema:
        return schema
    keys = {
        key: {**_told(value, f"{name}.{key}"), "description": _ABOUT.get(f"{name}.{key}") or _ABOUT[key]}
        for key, value in schema["properties"].items()
    }
    return {**schema, "properties": keys}


def _used(node: Any, known: Schema, found: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names of the definitions that lead from here."""
    if isinstance(node, dict):
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found = _used(known[name], known, found | {name})
        node = list(node.values())
    for one in node if isinstance(node, list) else ():
        found = _used(one, known, found)
    return found


def _pointing(schema: Schema, before: str, after: str) -> Schema:
    text = deepcopy(schema)

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("$ref") == f"#/$defs/{before}":
                node["$ref"] = f"#/$defs/{after}"
            node = list(node.values())
        for one in node if isinstance(node, list) else ():
            walk(one)

    walk(text)
    return text


def _refer(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _constant(value: object) -> Schema:
    return {"const": value}


def _words(known: Any) -> Schema:
    return {"type": "string", "enum": [str(one) for one in known]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}  # below "detail"


# What is said of a key, wherever it stands; "Type.key" where it means another thing there.
_ABOUT = {
    "schema": "raised where a reader would break; keys may be added without that",
    "run_id": "name of the run directory",
    "harness": "version of the harness",
    "machine": "the machine that the harness ran on",
    "outcomes": "one object for each attempt",
    "detail": "for people; its keys may change without a new schema",
    "Outcome.detail": "for people; its keys may change without a new schema, but for `standings` and `why`",
    "command": "as typed, without secrets",
    "interrupted": "whether Ctrl-C or a signal ended it early",
    "not_run": "scenarios of the plan that were never started",
    "gates": "what was agreed before the run and fits its program, with what the runs say to it, in the order agreed",
    "tree": "the way through the decision tree; null where there is nothing to ask",
    # A gate, and a question of the tree.
    "GateAnswer.name": "as the plan names it",
    "when": "its condition in words",
    "then": "what was agreed to do",
    "because": "why that follows",
    "state": "fired, held or not reached",
    "GateAnswer.why": "the runs that say so, or what is missing",
    "GateAnswer.runs": "folders of the attempts that say so",
    "GateAnswer.commands": "of one that fired the runs to make next",
    "leads": "whether it is what to do now: the first that fired, where no certain cause goes before it",
    "steps": "its questions in order; empty where the cause of every failure is certain",
    "leaf": "where it leads; null where every answer was no",
    "made_from": "the runs that it is made from",
    "TreeStep.question": "as the plan asks it",
    "TreeStep.answer": "yes, no, open or not asked",
    "TreeStep.why": "the runs that answer it, or what is missing",
    "leads_to": "null: the path goes on",
    "TreeStep.command": "of an open question what answers it; null otherwise",
    "host": "name of the machine",
    "cpus": "cores",
    "gpus": "names of the GPUs",
    "torch": "version of torch; null: none is installed",
    # An outcome.
    "scenario": "name of the scenario; null where an event concerns the whole run",
    "Outcome.scenario": "name",
    "spec_hash": "twelve hex digits over everything that decides what runs",
    "attempt": "number from 1",
    "final": "whether this attempt counts",
    "verdict": "PASS, FAIL, HANG, SKIP or ERROR",
    "kind": "deadlock, livelock, starved or stopped; null unless HANG",
    "cause": "a code of docs/findings.md; null for PASS",
    "summary": "one sentence",
    "expected": "whether verdict and cause are what the scenario announced",
    "flaky": "whether attempts of this spec disagree",
    "phase": "kind of the culprit's newest mark",
    "phase.phase": "launch, step N or finish",
    "culprit": "the ranks that others wait for or fail because of, and where they are; or null",
    "Standing.culprit": "whether others wait for it, or fail because of it",
    "victims": "the ranks that wait for the culprit",
    "last_step": "finished optimizer steps of each rank; null without a board, or an optimizer",
    "exit_codes": "of each rank before the harness ended anything; minus the signal; null if it had not ended",
    "findings": "what was found, the cause of the verdict first",
    "trouble": "what could not be observed",
    "timing": "seconds",
    "usage": "peaks, and how fast it was",
    "dir": "the attempt's folder",
    "step": "optimizer step in progress, from 1; null where none is counted",
    "collective": "the collective that it stands in or left out; or null",
    "place": "a line of the program; or null",
    "group": "name of the process group",
    "seq": "number of the collective in its group, as the flight recorder counts; null when unknown",
    "op": "operation, such as all_reduce",
    "file": "absolute path; null when unknown",
    "line": "from 1; null when unknown",
    "function": "name of the function; null when unknown",
    "module": "of the model, such as blocks.3.attn; null when unknown",
    "layer": "from 0; null when unknown",
    "parameter": "of the model; null when unknown",
    "text": "of the place the statement; of an event a sentence for people",
    "code": "a code of docs/findings.md",
    "claim": "what is said, as a sentence",
    "ranks": "global ranks",
    "Outcome.detail.ranks": "how many there are",
    "launch.ranks": "how many there are; null where it cannot run",
    "Planned.ranks": "how many there are; null where it cannot run",
    "plan (dry run).ranks": "how many there are",
    "phase.ranks": "where each of them is",
    "RankProgress.rank": "global rank",
    "RankProgress.phase": "kind of its newest mark, and what belongs to it",
    "confidence": "how sure; 0.9 and above: the evidence leaves no other reading",
    "proof": "files that show it, relative to the run directory, :line allowed",
    "advice": "what to do",
    "left_open": "other readings of the evidence, and what was not seen; empty where it is certain",
    "what": "what it is about",
    "why": "the reason; of a HANG why it is one; null where there is none",
    "rank": "global rank; null where it concerns no single one",
    "launch_s": "from the launch to the first mark of the slowest rank; null when unknown",
    "wall_s": "from the launch to the end of the last process",
    "quiet_s": "since the last progress; null when unknown",
    "detected_s": "from the culprit's last mark, or from the first failure, to the verdict; null when unknown",
    "teardown_s": "what ending the processes took; null when unknown",
    "peak_rss_bytes": "the most memory of any rank; null when unknown",
    "Vital.peak_rss_bytes": "the most memory of this rank; null when unknown",
    "peak_gpu_bytes": "the most GPU memory of any rank; null when unknown",
    "tokens_per_s": "as the program reports; null when it does not",
    # Below detail.
    "about": "one line of the scenario",
    "subject": "what ran, in a line",
    "backend": "gloo, nccl or any",
    "notes": "choices made on the user's behalf",
    "checked": "what was looked at and found in order",
    "not_covered": "what this form of it cannot show",
    "ruled_out": "what was asked and is not the cause",
    "standings": "where each rank stood at the end; stable",
    "vitals": "each rank of a run that ended",
    "metrics": "numbers that the program reported; those that JSON cannot say as text",
    "artifacts": "files of the run, or the reason why they are not there",
    "Outcome.detail.why": "the proof of a HANG in a sentence; null otherwise; stable",
    "ended": "what was done to the processes",
    "repeat": "the command that repeats it; or null",
    "next": "the command to go on with; or null",
    "device": "cpu, cuda or any; empty in a report of an earlier version",
    "tags": "of the scenario",
    "settings": "dotted keys other than their defaults, with their values",
    "chosen": "what became of keys that were left to the shape or the machine, with their values",
    "criteria": "the limits and expectations that decide the verdict",
    "missing_gradients": "parameters without a gradient; null: not traced on every rank",
    "last_agreed": "of a HANG the latest collective called from Python that every rank has left; or null",
    "deepening": "the question of another attempt that this one was made to answer; it never counts; or null",
    "showed": "of a deepening what it says about that attempt; or null",
    "stacks": "call stacks, the culprit's first",
    "memory": "what each rank used at boot, at its newest dump, and at the end of a run that did not end well",
    "signals": "of each rank of a HANG what it does with a signal, as the kernel says; nothing was sent to find out",
    "nccl": "how NCCL connected the ranks, as its log says; null: it wrote nothing",
    "files": "made of all attempts together; of an empty one the reason, too",
    "moment": "boot, dump or end",
    "MemoryAt.step": "of a dump; null otherwise",
    "MemoryAt.rss_bytes": "resident memory; null when unknown",
    "allocated_bytes": "that torch has given out on the GPU; null when unknown",
    "reserved_bytes": "that torch holds on the GPU; null when unknown",
    "allocator_step": "up to which the two before are known, where that is not this moment; else null",
    "device_bytes": "of the process on its GPU, as the driver says; null when unknown",
    "version": "of NCCL; null when it does not say",
    "channels": "for collectives; null when it does not say",
    "p2p_channels": "for transfers; null when it does not say",
    "transports": "such as P2P/CUMEM, the most used first",
    "network": "such as Socket or IB; null when it does not say",
    "seen": "ranks whose log has a line of NCCL's",
    "connected": "of them those that finished every communicator that they began",
    "warnings": "what it warned of",
    "cost": "what a step cost, and of which size it was; or null",
    "StepCost.tokens": "of a sequence",
    "StepCost.layers": "of the model",
    "StepCost.batch": "sequences of each rank",
    "StepCost.seconds": "the median of the steps that count; null when none does",
    "StepCost.error": "the standard error of that median, as a share of it",
    "StepCost.cpu_s": "processor seconds of all threads of rank 0, as `seconds`",
    "StepCost.cpu_error": "as `error`",
    "StepCost.steps": "how many count: not the first one",
    "StepCost.nodes": "of the autograd graph; null when the program does not say",
    "StepCost.bytes": "that the graph keeps for the backward pass; null when the program does not say",
    "StepCost.peak_bytes": "of the GPU, or of the process; null when the program does not say",
    "StepCost.implementations": "of each part of the model, with the part's name",
    "StepCost.until_tokens": "from which length on another implementation runs; null when no length is known",
    "divergence": "the collectives of one group around the first one at which its ranks part; or null",
    "Divergence.ranks": "of each column, the culprit's first",
    "Divergence.rows": "oldest first; null: nothing was entered there",
    "Divergence.group": "the process group",
    "shared": "so many rows at the beginning were the same on every rank",
    "EnteredCall.op": "the collective",
    "EnteredCall.seq": "the recorder's number in the group; null when unknown",
    "EnteredCall.step": "the optimizer step; null when unknown",
    "EnteredCall.place": "null: below Python, as DDP's own ones",
    "elements": "of all its tensors",
    "dtype": "of its tensors",
    "peer": "the root, where it has one; or null",
    "inside": "they have not come out of it",
    "place_text": "the statements at the places of culprit and findings",
    "stands_in": "what it is blocked in, or did last",
    "waits_for": "whom or what it waits for; empty: nothing",
    "coordinates": "its place in the job's mesh, such as dp=1 tp=1; or empty",
    "CallStack.of": "thread, process or exception; empty: the thread that trains",
    "frames": "the program's own lines, innermost first",
    "innermost": "the library's function that the innermost of these calls in the end; or empty",
    "library": "frames of libraries, left out",
    "around": "the innermost line between its neighbours, at the last of them; null: not stored",
    "CallStack.proof": "file with the whole stack; or null",
    "loss": "the last one; null when unknown",
    "gradients": "such as 67 of 67; null when unknown",
    "buckets": "of DDP; null when unknown",
    "longest_quiet_s": "longest time without progress; null when unknown",
    "step_s": "time between two optimizer steps, of the slowest rank; null where it was not asked or seen",
    "path": "relative to the attempt, a pattern allowed",
    "count": "lines, rows or files; null when absent",
    "absent": "why it is not there; null when it is",
    "Deepening.of": "the attempt it asks about",
    "change": "the one thing changed",
    "says": "the same for people",
    # A bisection.
    "question": "what is searched",
    "outcome_sought": "the failure that counts; null until one was seen",
    "answer": "what was found",
    "Answer.kind": "in which form the answer is",
    "StoredAnswer.kind": "in which form the answer is",
    "items": "layers, a half-open range of them, values or names, by the kind of the answer",
    "StoredAnswer.items": "as places among the items of the subject",
    "bounds": "of an undecided one between what it lies; else null",
    "Bounds.passing": "the largest that was seen to pass, in the words of `items`; or null",
    "Bounds.failing": "the smallest that was seen to fail, in the words of `items`; or null",
    "Bounds.open": "the items that may still matter; of values the first and the last one",
    "Bounds.known": "the items that what fails does not fail without",
    "p_hang": "how often what should fail does; only where runs are flaky",
    "controls": "the attempts that show both ends",
    "good": "of what passes; or null",
    "bad": "of what fails; or null",
    "alone": "the failing one without the harness; or null",
    "zones": "neighbours that end alike, in order, where another failure lies beside the one sought",
    "start": "the first length, 0 is the good end",
    "stop": "the first length behind it",
    "probes": "each configuration that was tried, in order",
    "floor_probes": "what an oracle would need",
    "commands": "what proves the answer, to paste into a shell",
    "n": "number from 1",
    "subset": "places among the items of the subject, as half-open spans",
    "config": "the configuration, by dotted key",
    "purpose": "why it was asked",
    "open": "what is still open, as places among the items of the subject",
    "known": "of an undecided search, what the failing set does not fail without, as places",
    "left": "probes still to come at most",
    "in_full": "whether only a launch by torchrun can answer it",
    "launcher": "torchrun, fork or plain; none where it could not be launched",
    "culprits": "ranks",
    "counts_as": "good, bad, different or unresolved",
    "Signature.place": "the culprit's line; or null",
    "StoredProbe.verdict": "PASS, FAIL, HANG, SKIP or ERROR; null: it could not be launched, or was ended early",
    "early": "whether it was ended before a verdict, in a wait that an earlier probe has proven; it counts as bad",
    "started_s": "when it began, on the clock of the search, which stands between its sessions; null: not kept",
    "search_probes": "how many of the probes are neither controls nor proofs",
    "form": "how a choice of items becomes a configuration",
    "key": "what is varied",
    "noun": "one item",
    "bad_values": "what each item is set to",
    "good_values": "what each item is otherwise",
    "open_end": "whether nobody says that the last item fails",
    "together": "items that go on and off as one",
    "labels": "the items for people",
    "in_a_row": "whether the program is told from where to where, so that only neighbours were asked together",
    "groups": "sets of which each is enough",
    "p_bad": "how often what should fail does; null where runs are not flaky",
    "passing": "a set that was seen to pass; or null",
    "failing": "a set that was seen to fail; or null",
    # Events.
    "event": "which one",
    "t_s": "seconds since the run began; null where nothing runs, and of a bisection",
    "scenarios": "the plan",
    "name": "of the scenario",
    "skip": "why it cannot run here; null where it can",
    "deadline_s": "after so many seconds it is ended; null: never",
    "elapsed_s": "since its launch",
    "rss_bytes": "the peak so far; null when unknown",
    "rows": "ranks that stand alike",
    "blocked_in": "what they stand in; or running",
    "FirstLook.place": "file and line; empty when unknown",
    "idle_s": "since the thread that trains last ran; null when unknown",
    "cpu_s": "of the process so far; null when unknown",
    "age_s": "of the job",
    "counts": "how often each verdict was given",
    "exit_code": "of the harness",
    "run_dir": "the run directory",
    "dry_run": "that nothing is launched",
    "done (of a claim).claim": "what was claimed and how it ended: a line of the ledger",
    "LedgerLine.schema": "1",
    "LedgerLine.kind": "claim, or verify",
    "at": "when it was filed, UTC",
    "LedgerLine.text": "what is claimed",
    "result": "supported, refuted, undecided or not comparable; fixed, not fixed, fails otherwise or undecided",
    "LedgerLine.why": "what the result rests on",
    "fixed": "yes, not yet or no; null where nothing failed before",
    "computes": "the same, what differs, or not known",
    "LedgerLine.key": "in which the sides differ",
    "sides": "without what is claimed to help, and with it",
    "LedgerSide.what": "the value of the side",
    "failed": "runs that failed",
    "of": "runs that were judged",
    "rate": "share of them that failed; null where none was judged",
    "low": "the least that the share of failures can be, at the confidence",
    "high": "the most that it can be",
    "ends": "how they failed, and how often",
    "attempts": "launches",
    "seconds": "of all launches together",
    "LedgerLine.runs": "names of run directories",
    "commit": "of the working directory; null: it is no checkout",
    "dirty": "whether it had changes that are not committed",
    "LedgerLine.machine": "its name",
    "env": "variables that the scenario declares",
    "message": "what is wrong with the command line",
    "outcome": "as in report.json",
}
