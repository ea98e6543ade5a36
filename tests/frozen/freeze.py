"""The frozen judgements: what judge and diagnosis make of every evidence that a test ever built by hand.

    python tests/frozen/freeze.py              write all generated files of this folder, and print what changed
    python tests/frozen/freeze.py judgements   write one of them

evidence.jsonl.gz was dumped once, from all tests of the core and from the recordings; it is not made again. This module
imports nothing that moves: what it asks is looked up in the package by name.
"""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from facts_and_sentences import canonical, joined, split

HERE = Path(__file__).resolve().parent
EVIDENCE = HERE / "evidence.jsonl.gz"
FACTS = HERE / "facts.jsonl"
SENTENCES = HERE / "sentences.jsonl"
_PACKAGES = ("nsa_harness", "harness")
_PARTS = ("core", "texts", "subject", "render", "supervisor", "commands")
_SPEC = {
    "scenario": "frozen",
    "about": "",
    "ranks": 2,
    "program": ("train.py",),
    "env": (),
    "cwd": None,
    "backend": "gloo",
    "device": "cpu",
    "subject": "train.py",
    "fault": None,
    "notes": (),
    "not_covered": (),
    "spec_hash": "0",
}


def judgements() -> list[dict[str, Any]]:
    """Return what each frozen evidence is judged to be, in their order."""
    return [json.loads(canonical(_judged(json.loads(line)))) for line in evidence_lines()]


def frozen_judgements() -> list[dict[str, Any]]:
    """Return the judgements that are stored."""
    return joined(*(path.read_text(encoding="utf-8").splitlines() for path in (FACTS, SENTENCES)))


def evidence_lines() -> list[str]:
    with gzip.open(EVIDENCE, "rt", encoding="utf-8") as lines:
        return lines.read().splitlines()


def _judged(stored: dict[str, Any]) -> dict[str, Any]:
    """The outcome as report.json has it, and what is decided from its cause."""
    evidence, spec = evidence_of(stored), _spec(len(stored["ranks"]))
    outcome = outcome_of_stored(stored)
    made = named("reproduction")(spec, evidence, outcome, "torchrun train.py")
    values = named("outcome_values")(outcome)
    for finding in values["findings"]:
        finding.pop("facts", None)  # frozen as the sentence that is made of them
    return {
        "outcome": _without_the_empty(values),
        "severity": [str(named("severity")(finding, outcome)) for finding in outcome.findings],
        "deepening": list(_changes(spec, outcome)),
        "reproduction": made and [made.script, made.no_script_reason],
    }


def outcome_of_stored(stored: dict[str, Any]) -> Any:
    """What judge and diagnosis make of one frozen evidence."""
    evidence, spec = evidence_of(stored), _spec(len(stored["ranks"]))
    return named("judge_evidence")(
        spec,
        evidence,
        attempt=1,
        directory="frozen",
        artifacts=(),
        metrics=evidence.metrics,
        repeat="",
        own_rules=(named("gate_collapse"),),
    )


def evidence_of(stored: dict[str, Any]) -> Any:
    """What the program reported was kept with its rank when it was frozen."""
    reported = [row for rank in stored["ranks"] for row in rank.get("gates", ())]
    return named("type_adapter")(named("Evidence")).validate_python({**stored, "reported": reported})


def _spec(ranks: int) -> Any:
    launcher, limits, expect = named("Launcher").TORCHRUN, named("Limits")(deadline_s=600.0), named("Expect")()
    return named("RunSpec")(**{**_SPEC, "ranks": ranks, "launcher": launcher, "limits": limits, "expect": expect})


def _changes(spec: Any, outcome: Any) -> Iterator[str]:
    made: list[str] = []
    while (change := named("next_change")(spec, outcome, made, probe="full")) is not None:
        made.append(change.name)
        yield change.name


def _without_the_empty(value: Any) -> Any:
    match value:
        case dict():
            kept = {key: _without_the_empty(item) for key, item in value.items()}
            return {key: item for key, item in kept.items() if item not in (None, "", [], {})}
        case list() | tuple():
            return [_without_the_empty(item) for item in value]
    return value


@cache
def named(name: str) -> Any:
    """The one thing of the package that has this name, wherever it is defined today."""
    found = [vars(module)[name] for module in _modules() if name in vars(module)]
    own = {id(one): one for one in found if not inspect.ismodule(one)}
    assert len(own) == 1, f"{name}: {len(own)} things of that name"
    return next(iter(own.values()))


@cache
def _modules() -> tuple[Any, ...]:
    package = next(name for name in _PACKAGES if importlib.util.find_spec(name) is not None)
    names = [
        module.name
        for part in _PARTS
        for module in pkgutil.walk_packages([str(_folder(package) / part)], f"{package}.{part}.")
    ]
    return tuple(importlib.import_module(name) for name in names)


def _folder(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])


def freeze_judgements() -> str:
    before, now = frozen_judgements() if FACTS.exists() else [], judgements()
    for path, lines in zip((FACTS, SENTENCES), split(now), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    changed = [number for number, one in enumerate(now, 1) if before[number - 1 : number] != [one]]
    return f"{len(now)} judgements; changed: {', '.join(map(str, changed)) or 'none'}"


def main(names: Sequence[str]) -> None:
    from frozen_lists import LISTS, freeze_list  # it imports the package, and this module is imported without

    freezers = {"judgements": freeze_judgements, **{name: partial(freeze_list, name) for name in LISTS}}
    if unknown := set(names) - set(freezers):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not one of {', '.join(freezers)}")
    for name in names or freezers:
        print(freezers[name](), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    main(sys.argv[1:])
