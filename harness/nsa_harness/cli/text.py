"""The text that `nsa-harness list`, `explain` and `run --dry-run` print."""

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
from nsa_harness.render.terminal.screen import shared_notes
from nsa_harness.supervisor.launch.launcher import command_line
from nsa_harness.supervisor.launch.planning import (
    Invocation,
    LaunchPlan,
    SelectedScenario,
    check_scenarios,
    resolve_scenario,
    select_scenarios,
)
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.texts.causes import text_of
from nsa_harness.texts.words import MEANING, launch_line, plural

_NAME_COLUMNS = 22


def short_catalog_lines(items: Sequence[SelectedScenario], width: int) -> Iterator[str]:
    """Yield the output of `list`: the user's scenarios, and the names and numbers of the shipped ones."""
    users = [item for item in items if not item.is_shipped]
    yield from catalog_lines(users, width)
    shipped: dict[str, dict[str, None]] = {}
    for item in sorted(items, key=lambda item: (-item.priority, item.family)):
        if item.is_shipped:
            shipped.setdefault(item.file.rpartition("/")[0] or ".", {})[item.family] = None
    if not shipped:
        return
    main, *others = sorted(shipped, key=len)
    count = plural(sum(map(len, shipped.values())), "scenario")
    yield from [""] if users else []
    hint = "`nsa-harness run NAME` runs one, and `nsa-harness list -v` describes them"
    yield from paragraph(f"shipped with nsa-harness: {count}; {hint}", width)
    yield from paragraph("  ".join(shipped[main]), width, "  ")
    texts = [f"{len(shipped[name])} in {name.removeprefix(f'{main}/')}/" for name in shipped if name in others]
    yield from paragraph(f"and {' · '.join(texts)}", width, "  ")


def catalog_lines(items: Sequence[SelectedScenario], width: int) -> Iterator[str]:
    """Yield the output of `nsa-harness list -v`, the user's scenarios first, wrapped to `width` columns."""
    by_directory: dict[str, dict[str, list[SelectedScenario]]] = {}
    for item in sorted(items, key=lambda item: (item.is_shipped, -item.priority, item.family)):
        by_directory.setdefault(item.file.rpartition("/")[0] or ".", {}).setdefault(item.family, []).append(item)
    column = min(max((len(item.family) for item in items), default=0), _NAME_COLUMNS) + 4
    for number, (directory, families) in enumerate(by_directory.items()):
        if number:
            yield ""
        yield f"{directory}/"
        for family, members in families.items():
            yield from _family_lines(family, members, column, width)


def _family_lines(family: str, members: Sequence[SelectedScenario], column: int, width: int) -> Iterator[str]:
    first = members[0]
    names = [", ".join(member.name.removeprefix(family) for member in members)] if first.name != family else []
    tags_and_aliases = "; ".join(
        [*filter(None, (", ".join(first.tags),)), *(f"also {alias}" for alias in first.aliases)]
    )
    texts = [f"{_about(first)} [{tags_and_aliases}]" if tags_and_aliases else _about(first), *names]
    indent = " " * (column if width >= NARROW else 4)
    fits_beside_name = width >= NARROW and len(family) <= column - 4
    if not fits_beside_name:
        yield f"  {family}"
    for number, text in enumerate(texts):
        yield from paragraph(
            text, width, f"  {family:<{column - 2}}" if fits_beside_name and number == 0 else indent, indent
        )


def catalog_json(items: Sequence[SelectedScenario]) -> str:
    """Return the output of `nsa-harness list --json`."""
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


def explanation(invocation: Invocation, facts: MachineFacts) -> Iterator[str]:
    """Yield the output of `nsa-harness explain` for scenarios, as YAML."""
    items, notes = select_scenarios(invocation)
    yield from (f"# {note}" for note in notes)
    for number, (item, scenario) in enumerate(zip(items, check_scenarios(items), strict=True)):
        if number:
            yield "---"
        yield from scenario_lines(scenario, item.tree)
        spec = resolve_scenario(item, scenario, invocation, facts)
        yield from resolved_lines(spec, "" if isinstance(spec, Skip) else shell_command(spec, Redaction()))


def cause_lines(cause: Cause, width: int) -> Iterator[str]:
    """Yield the output of `nsa-harness explain` for a cause, wrapped to `width` columns."""
    yield cause.value
    for label, key in (("means", "means"), ("proven by", "proven_by"), ("try", "remedy")):
        yield from labelled(label, text_of(cause, key), width, len("proven by") + 2)


def kind_lines(kind: HangKind, width: int) -> Iterator[str]:
    """Yield the output of `nsa-harness explain` for one kind of hang."""
    yield kind.value
    yield from labelled("means", MEANING[kind], width, len("causes") + 2)
    yield from labelled(
        "causes", " · ".join(cause for cause in Cause if kind in cause.row.kinds), width, len("causes") + 2
    )


def command_lines(plan: LaunchPlan, redaction: Redaction) -> Iterator[str]:
    """Yield the output of `nsa-harness run --dry-run`, with secrets removed."""
    specs = tuple(map(redaction.spec, plan.specs))
    shared = shared_notes(specs)
    yield from (f"# {note}" for note in plan.notes)
    yield from (f"# {text}" for text in shared.values())
    for spec in specs:
        if isinstance(spec, Skip):
            yield f"# {spec.scenario}: SKIP, {spec.reason}"
            continue
        yield f"# {spec.scenario}: {launch_line(spec.ranks, spec.backend, visible(spec.subject))}"
        yield from (f"#   {note}" for note in spec.notes if note not in shared)
        if spec.fault:
            ranks = "every rank" if spec.fault.rank is None else f"rank {spec.fault.rank}"
            yield f"#   planted fault: {spec.fault.kind} on {ranks} (planted only by `nsa-harness run`)"
        command = shell_command(spec, redaction)
        yield from (f"#   {line.removeprefix('# ')}" for line in where_to_set(command, "what you typed"))
        yield command


def command_events(plan: LaunchPlan, redaction: Redaction) -> Iterator[str]:
    """Yield the output of `nsa-harness run --dry-run --json`, with secrets removed."""
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
    """Return the shell command that launches a run, including its environment variables."""
    words = command_line(spec, sys.executable, None)
    variables = [f"{name}={value}" for name, value in spec.env]
    return redaction.command(["env", *variables, *words] if variables else words)


def _about(item: SelectedScenario) -> str:
    value = plain(item.tree)
    assert isinstance(value, dict)
    return visible(str(value.get("about") or ""))
