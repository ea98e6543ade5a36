"""What other programs may rely on, as it is today: keys with their types, options, environment names, exit codes.

    python tests/frozen/contract.py        prints it as JSON, of the tree in which it is called

contract.json was printed by this once, in the tree before its folders moved, and is not made again. This module imports
nothing that moves: the command line is entered by its console script, and what else it asks is looked up by name.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from freeze import evidence_lines, named, outcome_of_stored

HERE = Path(__file__).resolve().parent
CONTRACT = HERE / "contract.json"
_STATUSES = ("PASS", "FAIL", "HANG", "SKIP", "ERROR")
_DATA = {  # objects whose keys are data: names of ranks, metrics, scenarios
    "last_step", "exit_codes", "metrics", "config", "counts", "env",
}  # fmt: skip


def contract(tree: Path) -> dict[str, Any]:
    """Of the package that is installed here, with the golden files, the sample and the documents of its `tree`.

    A key names the part and the path in it: "events: outcome: outcome.verdict".
    """
    parts = {
        "commands": dict(_commands()),
        "exit codes": dict([*_exit_codes_of_reports(), *_exit_codes_of_mistakes()]),
        "outcome": shapes(_outcomes()),
        "report.json": shapes(_documents(tree, "*.report.json")),
        "bisect.json": shapes(_documents(tree, "bisect.*.json")),
        "ci summary": shapes(_documents(tree, "ci_summary.json")),
        "events": _by_event(
            [
                *_events(tree),
                *_events_of_a_bisection(tree),
                *_said("run", "ddp_onestep", *_DRY),
                *_said("run", "nothere", "--json", code=2),
            ]
        ),
        "list": shapes(_said("list", "--json")),
        "scenario": dict(_schema(_said("schema")[0])),
        "findings": dict.fromkeys(re.findall(r"^## ([a-z0-9_]+)$", (tree / "docs/findings.md").read_text(), re.M)),
    }
    return {f"{part}: {path}": value for part, paths in parts.items() for path, value in sorted(paths.items())}


_DRY = ("--dry-run", "--json")


def shapes(values: Sequence[Any]) -> dict[str, list[str]]:
    """The path of each key in any of the values, with the types that are found there."""
    found: dict[str, set[str]] = {}
    for value in values:
        for path, kind in _paths(value, ""):
            found.setdefault(path, set()).add(kind)
    return {path: sorted(kinds) for path, kinds in sorted(found.items())}


def _paths(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, _kind(value)
    match value:
        case dict():
            data = path.rpartition(".")[2] in _DATA
            for key, item in value.items():
                yield from _paths(item, f"{path}.{'*' if data else key}".lstrip("."))
        case list() | tuple():
            for item in value:
                yield from _paths(item, f"{path}[]")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "list"


def _commands() -> Iterator[tuple[str, Any]]:
    """Each option and argument of each command, with everything that `--help` says of it but the prose."""

    def below(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, command in sorted(group.commands.items()):
            yield f"{prefix}{name}", None
            yield from ((f"{prefix}{name} {_name(one)}", _parameter(one)) for one in command.params)
            yield from below(command, f"{prefix}{name} ") if hasattr(command, "commands") else ()

    yield from below(typer.main.get_command(_entry("app")), "")


def _name(parameter: Any) -> str:
    return parameter.opts[0] if parameter.opts[0].startswith("-") else f"<{parameter.metavar or parameter.name}>"


def _parameter(parameter: Any) -> dict[str, Any]:
    default = parameter.default
    return {
        "names": [*parameter.opts, *parameter.secondary_opts] if parameter.opts[0].startswith("-") else [],
        "environment": parameter.envvar,
        "flag": getattr(parameter, "is_flag", False),
        "bounds": [getattr(parameter, "min", None), getattr(parameter, "max", None)],
        "metavar": parameter.metavar,
        "default": default if isinstance(default, bool | int | float | str | None) else str(default),
        "required": parameter.required,
        "repeated": parameter.multiple or parameter.nargs != 1,
    }


def _exit_codes_of_reports() -> Iterator[tuple[str, int]]:
    """Of a run with one outcome of each kind, and of one that was interrupted."""
    exit_code = named("exit_code")
    for status, expected, strict in product(_STATUSES, (True, False), (True, False)):
        verdict = SimpleNamespace(status=named("Status")(status), cause="some_cause")
        outcome = SimpleNamespace(final=True, verdict=verdict, expected=expected)
        report = SimpleNamespace(interrupted=False, outcomes=(outcome,))
        words = f"{status} {'expected' if expected else 'unexpected'}{' --strict' if strict else ''}"
        yield words, exit_code(report, strict=strict)
    yield "interrupted", exit_code(SimpleNamespace(interrupted=True, outcomes=()))


def _exit_codes_of_mistakes() -> Iterator[tuple[str, int]]:
    for words in (
        "--version", "run", "run no_such_scenario", "run --no-such-option", "run ddp_onestep --dry-run",
        "run ddp_onestep no.such.key=1", "run --git-bisect no_such_scenario", "report no_such_run", "no_such_command",
        "watch -- no_such_command_anywhere", "watch -- ./no_program", "attach 999999999", "bisect no_such_scenario",
        "explain no_such_scenario", "list -- word", "ci summary no_such_folder", "selftest no_such_program",
    ):  # fmt: skip
        yield f"$ {words}", _called(words.split())[0]


def _outcomes() -> list[Any]:
    return [named("outcome_values")(outcome_of_stored(json.loads(line))) for line in evidence_lines()]


def _documents(tree: Path, pattern: str) -> list[Any]:
    """The golden files, which the tests of the renderers compare with what is rendered."""
    return [json.loads(file.read_text()) for file in sorted((tree / "tests/golden/render").glob(pattern))]


def _events(tree: Path) -> list[Any]:
    files = (tree / "tests/golden/render/events.jsonl", tree / "reports/sample/events.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _events_of_a_bisection(tree: Path) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(tree / "tests/golden/render/bisect.flaky.json", Path(folder) / "bisect.json")
        stored = named("stored_search")(named("RunDir")(Path(folder)))
    probes = [named("probe_event")(stored.subject, probe) for probe in stored.probes]
    last = {**named("answer_event")(stored, "reports/run"), "event": "done (bisect)"}
    return json.loads(json.dumps([*probes, last]))


def _by_event(events: Sequence[Any]) -> dict[str, list[str]]:
    kinds = {event["event"] for event in events}
    each = {kind: shapes([event for event in events if event["event"] == kind]) for kind in kinds}
    return {f"{kind}: {path}": types for kind, paths in each.items() for path, types in paths.items()}


def _schema(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a scenario file with its types, words and default; names of our classes are left out."""

    def forms(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        yield node
        for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
            yield from forms(one)

    def below(node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        all_forms = list(forms(node))
        if path:
            words = sorted({str(word) for form in all_forms for word in form.get("enum", ())})
            kinds = sorted({kind for form in all_forms for kind in _listed(form.get("type", []))})
            yield path, {"types": kinds, "words": words, "default": node.get("default")}
        for form in all_forms:
            for key, inner in form.get("properties", {}).items():
                yield from below(inner, f"{path}.{key}".lstrip("."))
            for key, mark in (("additionalProperties", ".*"), ("items", "[]")):
                if isinstance(form.get(key), dict):
                    yield from below(form[key], f"{path}{mark}")

    yield from below(schema, "")


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _said(*words: str, code: int = 0) -> list[Any]:
    """The JSON that a command prints."""
    ended, out = _called(words)
    assert ended == code, words
    try:
        return [json.loads(out)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in out.splitlines()]


def _called(words: Sequence[str]) -> tuple[int, str]:
    """Exit code and stdout of the console script, in this process and an empty folder."""
    out, argv = io.StringIO(), sys.argv
    clean = {name: value for name, value in os.environ.items() if name.startswith("NSA_")}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("no_program").write_text("")
        sys.argv = ["nsa-harness", *words]
        for name in clean:
            del os.environ[name]
        try:
            with redirect_stdout(out), redirect_stderr(io.StringIO()):
                _entry("main")()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
        finally:
            sys.argv = argv
            os.environ.update(clean)
    raise AssertionError("the console script returned")


def _entry(name: str) -> Any:
    (script,) = entry_points(group="console_scripts", name="nsa-harness")
    return script.load().__globals__[name]


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in contract(Path.cwd()).items())
    print("{\n" + ",\n".join(lines) + "\n}")
