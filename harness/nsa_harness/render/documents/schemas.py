"""JSON Schemas (2020-12) of the documents that programs read, made from the types that the writers and readers use.

An object is closed: it has the keys of its type, each always there, and no more. Open are the objects below `detail`,
whose keys may change; of an outcome's, `standings` and `why` do not. A key's description is written at its field, or
in descriptions.toml; a key without one is a mistake that a test finds.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from nsa_harness import __version__
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import WORTHS
from nsa_harness.core.evidence.live import FirstSnapshot, RankProgress
from nsa_harness.core.experiment.trial import SLOW
from nsa_harness.core.report import MachineFacts, Status
from nsa_harness.render import events
from nsa_harness.render.documents import report_json
from nsa_harness.render.experiments import bisect_json
from nsa_harness.supervisor.storage.ledger import LedgerLine

Schema = dict[str, Any]


class Document(StrEnum):
    """A document whose schema `nsa-harness schema` prints."""

    SCENARIO = "scenario"
    PLAN = "plan"
    REPORT = "report"
    BISECT = "bisect"
    EVENTS = "events"


def json_schema(document: Document) -> Schema:
    match document:
        case Document.REPORT:
            types = _report_types()
            title = f"report.json, schema {report_json.SCHEMA}"
            return _whole(document, title, report_json.SCHEMA, types, types["StoredReport"])
        case Document.BISECT:
            types = _bisect_types()
            title = f"bisect.json, schema {bisect_json.SCHEMA}"
            return _whole(document, title, bisect_json.SCHEMA, types, types["SearchRecord"])
        case Document.EVENTS:
            return _events_schema()
        case Document.PLAN:
            from nsa_harness.core.comparison.plan_file import plan_schema

            return plan_schema()
    from nsa_harness.core.scenario.scenario import json_schema as scenario_schema

    return scenario_schema()


def _report_types(**values: Any) -> dict[str, Schema]:
    """Return the types of a report and of other values, with the words that a report's texts are chosen from."""
    types = _types(report=report_json.StoredReport, **values)
    types["Finding"]["properties"]["code"]["enum"] = [str(cause) for cause in Cause]
    types["Finding"]["properties"]["confidence"]["enum"] = list(WORTHS)
    types["OutcomeDetail"] |= {"additionalProperties": True, "required": ["standings", "why"]}
    types["ReportDetail"] |= {"additionalProperties": True, "required": []}
    # The contract has places without their statements, which only people need.
    types["SourceLine"] = {**types["Place"], "description": "A place with its statement."}
    for name in ("CallStack", "EnteredCall"):
        types[name] = _renamed(types[name], 'Place"', 'SourceLine"')
    known = {key: value for key, value in types["Place"]["properties"].items() if key != "text"}
    types["Place"] = _closed(known, types["Place"]["description"])
    return types


def _bisect_types() -> dict[str, Schema]:
    """Return the types of bisect.json, with the words that its texts are chosen from; `p_hang` may be missing."""
    types = _types(bisect=bisect_json.SearchRecord)
    for name, verdicts in (("StoredProbe", Status), ("Signature", (*Status, SLOW))):
        types[name]["properties"]["verdict"] = _words(*verdicts, or_null=name == "StoredProbe")
        types[name]["properties"]["cause"] = _words(*Cause, or_null=True)
    answer = types["Answer"]
    answer["required"].remove("p_hang")
    answer["properties"]["p_hang"] = answer["properties"]["p_hang"]["anyOf"][0]
    types["StoredDetail"]["additionalProperties"] = True
    return types


# The keys that each event has beside the head; a name in brackets distinguishes two forms of one event.
_EVENTS: Mapping[str, Mapping[str, Any]] = {
    "plan": {"machine": MachineFacts, "scenarios": list[events.Planned]},
    "launch": events.Planned.__annotations__,
    "phase": {"phase": str, "elapsed_s": float, "deadline_s": float | None, "ranks": list[RankProgress]},
    "look": {"rows": list[FirstSnapshot]},
    "suspect": {"text": str},
    "released": {"text": str},
    "outcome": {"outcome": report_json.StoredOutcome, "run_dir": str},
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
    forms = {f"{event}.{key}": value for event, keys in _EVENTS.items() for key, value in keys.items()}
    types = {**_bisect_types(), **_report_types(**forms)}
    values = {event: {key: types.pop(f"{event}.{key}") for key in keys} for event, keys in _EVENTS.items()}
    probe = types["StoredProbe"]["properties"]
    values["probe"] = {key: probe[key] for key in bisect_json.ProbeEvent.__annotations__}
    values["probe"]["counts_as"] = types["ProbeResult"]
    values["done (of a bisection)"] = {"answer": {"$ref": "#/$defs/Answer"}, "run_dir": {"type": "string"}}
    for event, keys in values.items():
        head = {
            "schema": {"const": events.SCHEMA},
            "event": {"const": event.partition(" ")[0]},
            "t_s": {"type": ["number", "null"]},
            "run_id": {"type": ["string", "null"]},
            "scenario": {"type": ["string", "null"]},
        }
        types[event] = _closed({**head, **keys})
    title = f"one line of events.jsonl and of --json, schema {events.SCHEMA}"
    top = {"oneOf": [{"$ref": f"#/$defs/{event}"} for event in values]}
    return _whole(Document.EVENTS, title, events.SCHEMA, types, top)


class _Plain(GenerateJsonSchema):
    """A generator that leaves out titles, which only repeat the key."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic names it
        return False


def _types(**values: Any) -> dict[str, Schema]:
    """Return the schemas of these values and of all types that they hold, each object closed."""
    inputs = [(name, "serialization", TypeAdapter(value)) for name, value in values.items()]
    made, shared = TypeAdapter.json_schemas(inputs, schema_generator=_Plain)  # type: ignore[arg-type]  # str for Literal
    types = {name.lstrip("_"): _renamed(schema, "_", "") for name, schema in shared["$defs"].items()}
    closed = {
        name: _closed(schema["properties"], schema.get("description", "")) if "properties" in schema else schema
        for name, schema in types.items()
    }
    return closed | {str(name): schema for (name, _), schema in made.items()}


def _renamed(schema: Schema, before: str, after: str) -> Schema:
    """Return the schema with its references to types whose names begin with `before` changed."""
    renamed: Schema = json.loads(json.dumps(schema).replace(f'"#/$defs/{before}', f'"#/$defs/{after}'))
    return renamed


def _closed(keys: Schema, description: str = "") -> Schema:
    described = {"description": description} if description else {}
    return {
        "type": "object",
        **described,
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


def _words(*words: str, or_null: bool) -> Schema:
    schema = {"type": "string", "enum": [str(word) for word in words]}
    return {"anyOf": [schema, {"type": "null"}]} if or_null else schema


def _whole(document: Document, title: str, schema: int, types: dict[str, Schema], top: Schema) -> Schema:
    """Return the schema of a document with the types that it uses. Raises KeyError for a key without a description."""
    source = files("nsa_harness.render.documents").joinpath("descriptions.toml")
    texts = tomllib.loads(source.read_text(encoding="utf-8"))

    def described(schema: Schema, name: str) -> Schema:
        if "properties" not in schema:
            return schema
        own = texts.get(name, {})
        keys = {
            key: {
                **described(value, name),
                "description": own.get(key) or value.get("description") or texts["any"][key],
            }
            for key, value in schema["properties"].items()
        }
        return {**schema, "properties": keys}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nsa-harness:{__version__}:{document}:{schema}",
        "title": f"{title}, of nsa-harness {__version__}",
        **described(top, str(document)),
        "$defs": {name: described(types[name], name) for name in sorted(_used(top, types))},
    }


def _used(node: Any, types: dict[str, Schema], found: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return `found` with the names of the types that `node` refers to."""
    if isinstance(node, dict):
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found = _used(types[name], types, found | {name})
        node = list(node.values())
    for item in node if isinstance(node, list) else ():
        found = _used(item, types, found)
    return found
