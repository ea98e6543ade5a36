"""JSON Schemas (2020-12) for the files that programs read.

They are generated from the types of the writers and readers. Every object has exactly the keys of its type, except the
objects below `detail`, whose keys may change. In the `detail` of an outcome, `standings` and `why` are always present.
The description of a key comes from the annotation of its field or from descriptions.toml. A test fails if a key has no
description.
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
from nsa_harness.core.diagnosis.confidence import CONFIDENCE_VALUES
from nsa_harness.core.evidence.live import FirstSnapshot, RankProgress
from nsa_harness.core.experiment.trial import SLOW
from nsa_harness.core.report import MachineFacts, Status
from nsa_harness.render import events
from nsa_harness.render.documents import report_json
from nsa_harness.render.experiments import bisect_json, why_json
from nsa_harness.supervisor.storage.ledger import LedgerLine

Schema = dict[str, Any]


class Document(StrEnum):
    """The name of a file format whose schema `nsa-harness schema` can print."""

    SCENARIO = "scenario"
    PLAN = "plan"
    REPORT = "report"
    BISECT = "bisect"
    WHY = "why"
    EVENTS = "events"


def json_schema(document: Document) -> Schema:
    """Return the JSON Schema of a file format."""
    match document:
        case Document.REPORT:
            types = _report_types()
            title = f"report.json, schema {report_json.SCHEMA}"
            return _document_schema(document, title, report_json.SCHEMA, types, types["StoredReport"])
        case Document.BISECT:
            types = _bisect_types()
            title = f"bisect.json, schema {bisect_json.SCHEMA}"
            return _document_schema(document, title, bisect_json.SCHEMA, types, types["SearchRecord"])
        case Document.WHY:
            types = _place_types(_types(why=why_json.WhyRecord))
            title = f"why.json, schema {why_json.SCHEMA}"
            return _document_schema(document, title, why_json.SCHEMA, types, types["WhyRecord"])
        case Document.EVENTS:
            return _events_schema()
        case Document.PLAN:
            from nsa_harness.core.comparison.plan_file import plan_schema

            return plan_schema()
    from nsa_harness.core.scenario.scenario import json_schema as scenario_schema

    return scenario_schema()


def _report_types(**values: Any) -> dict[str, Schema]:
    """Map the name of each type in report.json, and of the further types `values`, to its schema."""
    types = _types(report=report_json.StoredReport, **values)
    types["Finding"]["properties"]["code"]["enum"] = [str(cause) for cause in Cause]
    types["Finding"]["properties"]["confidence"]["enum"] = list(CONFIDENCE_VALUES)
    types["StoredOutcome"]["required"].remove("values")  # earlier versions did not write it
    types["OutcomeDetail"] |= {"additionalProperties": True, "required": ["standings", "why"]}
    types["ReportDetail"] |= {"additionalProperties": True, "required": []}
    return _place_types(types)


_WITH_SOURCE_LINES = (
    "CallStack", "EnteredCall", "Candidate", "Division", "Explanation", "FirstAnswer", "WhyRun",
)  # fmt: skip


def _place_types(types: dict[str, Schema]) -> dict[str, Schema]:
    """Return the types with two types of places: only those in stacks, calls and answers have a source line."""
    types["SourceLine"] = {**types["Place"], "description": "A place with its source line."}
    for name in filter(types.__contains__, _WITH_SOURCE_LINES):
        types[name] = _rename_references(types[name], 'Place"', 'SourceLine"')
    without_text = {key: value for key, value in types["Place"]["properties"].items() if key != "text"}
    types["Place"] = _closed_object(without_text, types["Place"]["description"])
    return types


def _bisect_types() -> dict[str, Schema]:
    """Map the name of each type in bisect.json to its schema."""
    types = _types(bisect=bisect_json.SearchRecord)
    for name, verdicts in (("StoredProbe", Status), ("Signature", (*Status, SLOW))):
        types[name]["properties"]["verdict"] = _one_of(*verdicts, or_null=name == "StoredProbe")
        types[name]["properties"]["cause"] = _one_of(*Cause, or_null=True)
    answer = types["AnswerEntry"]
    answer["required"].remove("p_hang")
    answer["properties"]["p_hang"] = answer["properties"]["p_hang"]["anyOf"][0]
    types["StoredDetail"]["additionalProperties"] = True
    return types


# The keys of each event in addition to the common keys. A name in brackets distinguishes variants of one event.
_EVENTS: Mapping[str, Mapping[str, Any]] = {
    "plan": {"machine": MachineFacts, "scenarios": list[events.PlannedRun]},
    "launch": events.PlannedRun.__annotations__,
    "phase": {"phase": str, "elapsed_s": float, "deadline_s": float | None, "ranks": list[RankProgress]},
    "look": {"rows": list[FirstSnapshot]},
    "job": {"job": str, "state": str, "text": str},
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
    "done (of why)": {"why": why_json.WhyRecord, "exit_code": int, "run_dir": str},
    "error": {"message": str},
}


def _events_schema() -> Schema:
    forms = {f"{event}.{key}": value for event, keys in _EVENTS.items() for key, value in keys.items()}
    types = {**_bisect_types(), **_report_types(**forms)}
    values = {event: {key: types.pop(f"{event}.{key}") for key in keys} for event, keys in _EVENTS.items()}
    probe = types["StoredProbe"]["properties"]
    values["probe"] = {key: probe[key] for key in bisect_json.ProbeEvent.__annotations__}
    values["probe"]["counts_as"] = types["ProbeResult"]
    values["done (of a bisection)"] = {"answer": {"$ref": "#/$defs/AnswerEntry"}, "run_dir": {"type": "string"}}
    for event, keys in values.items():
        head = {
            "schema": {"const": events.SCHEMA},
            "event": {"const": event.partition(" ")[0]},
            "t_s": {"type": ["number", "null"]},
            "run_id": {"type": ["string", "null"]},
            "scenario": {"type": ["string", "null"]},
        }
        types[event] = _closed_object({**head, **keys})
    title = f"one line of events.jsonl and of --json, schema {events.SCHEMA}"
    top = {"oneOf": [{"$ref": f"#/$defs/{event}"} for event in values]}
    return _document_schema(Document.EVENTS, title, events.SCHEMA, types, top)


class _Plain(GenerateJsonSchema):
    # Titles would only repeat the keys.
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - the name of the parameter is pydantic's
        return False


def _types(**values: Any) -> dict[str, Schema]:
    """Map the names of the given types, and of all types that they use, to their schemas."""
    inputs = [(name, "serialization", TypeAdapter(value)) for name, value in values.items()]
    schemas, definitions = TypeAdapter.json_schemas(inputs, schema_generator=_Plain)  # type: ignore[arg-type]  # str for Literal
    types = {name.lstrip("_"): _rename_references(schema, "_", "") for name, schema in definitions["$defs"].items()}
    objects = {
        name: _closed_object(schema["properties"], schema.get("description", "")) if "properties" in schema else schema
        for name, schema in types.items()
    }
    return objects | {str(name): schema for (name, _), schema in schemas.items()}


def _rename_references(schema: Schema, before: str, after: str) -> Schema:
    """Return a copy of the schema in which references that start with `before` start with `after` instead."""
    result: Schema = json.loads(json.dumps(schema).replace(f'"#/$defs/{before}', f'"#/$defs/{after}'))
    return result


def _closed_object(keys: Schema, description: str = "") -> Schema:
    """Return the schema of an object that has exactly the given keys."""
    return {
        "type": "object",
        **({"description": description} if description else {}),
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


def _one_of(*values: str, or_null: bool) -> Schema:
    schema = {"type": "string", "enum": [str(value) for value in values]}
    return {"anyOf": [schema, {"type": "null"}]} if or_null else schema


def _document_schema(document: Document, title: str, schema: int, types: dict[str, Schema], top: Schema) -> Schema:
    """Return the complete schema of a file format. Raise KeyError if a key has no description."""
    source = files("nsa_harness.render.documents").joinpath("descriptions.toml")
    texts = tomllib.loads(source.read_text(encoding="utf-8"))

    def with_descriptions(schema: Schema, name: str) -> Schema:
        if "properties" not in schema:
            return schema
        own = texts.get(name, {})
        keys = {
            key: {
                **with_descriptions(value, name),
                "description": own.get(key) or value.get("description") or texts["any"][key],
            }
            for key, value in schema["properties"].items()
        }
        return {**schema, "properties": keys}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nsa-harness:{__version__}:{document}:{schema}",
        "title": f"{title}, of nsa-harness {__version__}",
        **with_descriptions(top, str(document)),
        "$defs": {name: with_descriptions(types[name], name) for name in sorted(_used_types(top, types))},
    }


def _used_types(node: Any, types: dict[str, Schema], names: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names of all types that a schema uses, directly or indirectly, and the `names` found before."""
    if isinstance(node, dict):
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name and name not in names:
            names = _used_types(types[name], types, names | {name})
        node = list(node.values())
    for item in node if isinstance(node, list) else ():
        names = _used_types(item, types, names)
    return names
