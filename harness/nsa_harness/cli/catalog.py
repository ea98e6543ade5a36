"""The commands `nsa-harness list`, `explain` and `schema`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.options import Ranks, argument, option, option_lines
from nsa_harness.cli.run import invocation_from_args
from nsa_harness.errors import UsageError, did_you_mean


def list_scenarios(
    verbose: Annotated[bool, option("-v --verbose", "Also describe the scenarios that nsa-harness ships.")] = False,
    as_json: Annotated[bool, option("--json", "Print the list as JSON.")] = False,
) -> None:
    """List your scenarios and those that nsa-harness ships.

    Yours are shown first, with their description, tags, aliases and variants. The others are only named or counted,
    unless -v is given.
    """
    from nsa_harness.cli.text import catalog_json, catalog_lines, short_catalog_lines
    from nsa_harness.supervisor.launch.planning import all_scenarios

    items, notes = all_scenarios(Path.cwd())
    lines = catalog_lines if verbose else short_catalog_lines
    _print([catalog_json(items)] if as_json else lines(items, _columns()))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def explain(
    context: typer.Context,
    targets: Annotated[
        list[str],
        argument(
            "SCENARIO|KEY=VALUE", "A scenario and settings, as for `run`; or a cause, such as rank0_only_collective."
        ),
    ],
    ranks: Ranks = 2,
) -> None:
    """Explain the settings of a scenario, or a cause.

    For a scenario: the resolved YAML, and where each value comes from. For a cause: its meaning, and what to try.
    """
    from nsa_harness.cli.text import cause_lines, explanation, kind_lines
    from nsa_harness.core.diagnosis.causes import Cause
    from nsa_harness.core.report import HangKind
    from nsa_harness.supervisor.launch.machine import machine_facts

    if len(targets) == 1 and targets[0] in list(HangKind):
        _print(kind_lines(HangKind(targets[0]), _columns()))
    elif causes := [cause for cause in Cause if [cause.value] == targets]:
        _print(cause_lines(causes[0], _columns()))
    else:
        try:
            _print(option_lines(Path.cwd()))
            _print(explanation(invocation_from_args(context, targets, ranks=ranks), machine_facts()))
        except UsageError as error:
            similar = [cause.value for cause in Cause if targets[0] in cause.value]
            suggestion = did_you_mean(targets[0], list(Cause)).removeprefix("; ")
            more = f"\ncauses with a similar name: {', '.join(similar)}" if similar else ""
            more = (
                f"\namong the causes: {suggestion}"
                if suggestion and not similar and "did you mean" not in str(error)
                else more
            )
            raise UsageError(f"{error}{more}") from None


def schema(
    document: Annotated[
        str, argument("[DOCUMENT]", "scenario, plan, report, bisect or events. Default: scenario.")
    ] = "scenario",
) -> None:
    """Print the JSON schema of a file.

    Editors use the schemas of scenario and plan files; programs use the schemas of report.json, bisect.json and events.
    """
    from nsa_harness.errors import did_you_mean
    from nsa_harness.render.documents.schemas import Document, json_schema

    if document not in list(Document):
        names = ", ".join(Document)
        raise UsageError(f"no schema for {document!r}{did_you_mean(document, list(Document))}; known: {names}")
    print(json.dumps(json_schema(Document(document)), indent=2))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _columns() -> int:
    from nsa_harness.render.terminal.stream import output_size

    return output_size(sys.stdout, os.environ)[0]
