"""The output of `list`, `explain` and `run --dry-run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.redaction import where_to_set
from nsa_harness.core.report import HangKind, MachineFacts
from nsa_harness.core.scenario.explain import resolved_lines, scenario_lines
from nsa_harness.core.scenario.yaml_tree import plain, visible
from nsa_harness.render.terminal.layout import NARROW, labelled, paragraph
from nsa_harness.supervisor.launch.launcher import command_line
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    Plan,
    SelectedScenario,
    checked,
    resolved,
    selected_scenarios,
)
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.texts.causes import text_of
from nsa_harness.texts.words import MEANING

_NAME_COLUMNS = 22


def catalog_lines(items: Sequence[SelectedScenario], width: int) -> Iterator[str]:
    """Yield the directories, and for each family its name, question, tags, other names and members."""
    by_folder: dict[str, dict[str, list[SelectedScenario]]] = {}
    for item in sorted(items, key=lambda item: (-item.priority, item.family)):
        by_folder.setdefault(item.file.rpartition("/")[0] or ".", {}).setdefault(item.family, []).append(item)
    column = min(max((len(item.family) for item in items), default=0), _NAME_COLUMNS) + 4
    for number, (folder, families) in enumerate(by_folder.items()):
        if number:
            yield ""
        yield f"{folder}/"
        for family, members in families.items():
            yield from _family_lines(family, members, column, width)


def _family_lines(family: str, members: Sequence[SelectedScenario], column: int, width: int) -> Iterator[str]:
    first = members[0]
    names = [", ".join(member.name.removeprefix(family) for member in members)] if first.name != family else []
    marks = "; ".join([*filter(None, (", ".join(first.tags),)), *(f"also {alias}" for alias in first.aliases)])
    texts = [f"{_about(first)} [{marks}]" if marks else _about(first), *names]
    indent = " " * (column if width >= NARROW else 4)
    beside = width >= NARROW and len(family) <= column - 4
    if not beside:
        yield f"  {family}"
    for number, text in enumerate(texts):
        yield from paragraph(text, width, f"  {family:<{column - 2}}" if beside and number == 0 else indent, indent)


def catalog_json(items: Sequence[SelectedScenario]) -> str:
    fields = [
        {
            "name": item.name,
            "about": _about(item),
            "tags": item.tags,
            "aliases": item.aliases,
            "priority": item.priority,
            "file": item.file,
        }
        for item in sorted(items, key=lambda item: (-item.priority, item.family))
    ]
    return json.dumps(fields, indent=2)


def explanation(question: Invocation, facts: MachineFacts) -> Iterator[str]:
    """Yield the resolved YAML of each selected scenario, with `---` between documents."""
    asked, notes = selected_scenarios(question)
    yield from (f"# {note}" for note in notes)
    for number, (item, scenario) in enumerate(zip(asked, checked(asked), strict=True)):
        if number:
            yield "---"
        yield from scenario_lines(scenario, item.tree)
        spec = resolved(item, scenario, question, facts)
        yield from resolved_lines(spec, "" if isinstance(spec, Skip) else shell_command(spec, Redaction()))


def cause_lines(cause: Cause, width: int) -> Iterator[str]:
    """Yield the meaning of a cause, its proof and its remedy, as in docs/findings.md."""
    yield cause.value
    for label, key in (("means", "means"), ("proven by", "proven_by"), ("try", "remedy")):
        yield from labelled(label, text_of(cause, key), width, len("proven by") + 2)


def kind_lines(kind: HangKind, width: int) -> Iterator[str]:
    """Yield the meaning of a kind of HANG, and its causes."""
    yield kind.value
    yield from labelled("means", MEANING[kind], width, len("causes") + 2)
    yield from labelled("causes", " · ".join(one for one in Cause if kind in one.row.kinds), width, len("causes") + 2)


def command_lines(plan: Plan, redaction: Redaction) -> Iterator[str]:
    """Yield the exact commands, each with its choices; for a scenario that cannot run, the reason."""
    yield from (f"# {note}" for note in plan.notes)
    for spec in map(redaction.spec, plan.specs):
        if isinstance(spec, Skip):
            yield f"# {spec.scenario}: SKIP, {spec.reason}"
            continue
        yield f"# {spec.scenario}: {spec.ranks} ranks · {spec.backend} · {visible(spec.subject)}"
        yield from (f"#   {note}" for note in spec.notes)
        if spec.fault:
            who = "every rank" if spec.fault.rank is None else f"rank {spec.fault.rank}"
            yield f"#   planted fault: {spec.fault.kind} on {who} (only `nsa-harness run` plants it)"
        command = shell_command(spec, redaction)
        yield from (f"#   {line.removeprefix('# ')}" for line in where_to_set(command, "what you typed"))
        yield command


def command_events(plan: Plan, redaction: Redaction) -> Iterator[str]:
    """Yield a `plan` event per scenario, as in the event stream."""
    for spec in map(redaction.spec, plan.specs):
        event = {"schema": 1, "event": "plan", "t_s": 0.0, "run_id": None, "scenario": spec.scenario, "dry_run": True}
        if isinstance(spec, Skip):
            facts: dict[str, object] = {"skip": spec.reason}
        else:
            facts = {
                "command": command_line(spec, sys.executable, None),
                "env": dict(spec.env),
                "ranks": spec.ranks,
                "backend": spec.backend,
                "spec_hash": spec.spec_hash,
                "notes": spec.notes,
            }
        yield json.dumps({**event, **facts})


def shell_command(spec: RunSpec, redaction: Redaction) -> str:
    """Return the command as one line to paste into a shell."""
    words = command_line(spec, sys.executable, None)
    declared = [f"{name}={value}" for name, value in spec.env]
    return redaction.command(["env", *declared, *words] if declared else words)


def _about(item: SelectedScenario) -> str:
    value = plain(item.tree)
    assert isinstance(value, dict)
    return visible(str(value.get("about") or ""))
