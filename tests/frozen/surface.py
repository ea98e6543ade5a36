"""Three lists that moves and renames must not change: the order of the rules, the hashes of scenarios, the help.

python tests/frozen/freeze.py rule_order    and likewise spec_hashes, help
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import typer

from nsa_harness.cli.main import app, run_command_line
from nsa_harness.core.diagnosis.rules import RULES, RulePhase
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.program import Surroundings
from nsa_harness.core.scenario.resolve import resolve
from nsa_harness.subject.program import PROGRAM
from nsa_harness.subject.tables import RULES as OWN_RULES
from nsa_harness.supervisor.launch.planning import all_scenarios, check_scenarios

HERE = Path(__file__).resolve().parent
RULE_ORDER = HERE / "rule_order.txt"
SPEC_HASHES = HERE / "spec_hashes.json"
HELP = HERE / "help.txt"

_MACHINES = (
    MachineFacts(host="laptop", cpus=2, gpus=(), torch="2.13.0+cpu"),
    MachineFacts(host="box", cpus=64, gpus=("A100", "A100"), torch="2.13.0"),
)
_SURROUNDINGS = Surroundings(python="/usr/bin/python3", subject_dir="/srv/nsa", content_hash="c0ffee")


def rule_order() -> str:
    """Each phase with the names of its rules, both in the order in which they are asked."""
    rules = {**RULES, RulePhase.PROGRAM: (*RULES[RulePhase.PROGRAM], *OWN_RULES)}
    lines = [line for phase in RulePhase for line in (phase.name, *(f"    {rule.__name__}" for rule in rules[phase]))]
    return "\n".join(lines) + "\n"


def spec_hashes() -> str:
    """The `spec_hash` of every shipped scenario on a machine without and on one with GPUs; null where it is skipped."""
    items, _ = all_scenarios(HERE)
    specs = {
        item.name: [resolve(scenario, facts, _SURROUNDINGS, PROGRAM) for facts in _MACHINES]
        for item, scenario in zip(items, check_scenarios(items), strict=True)
    }
    lines = (
        f"{json.dumps(name)}: {json.dumps([one.spec_hash if isinstance(one, RunSpec) else None for one in on])}"
        for name, on in sorted(specs.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def help_text() -> str:
    """The help of every command, 80 columns wide."""
    return "\n".join(f"$ {' '.join(('nsa-harness', *words))} --help\n{_help(words)}" for words in _commands())


def _commands() -> Iterator[tuple[str, ...]]:
    def below(group: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, command in sorted(getattr(group, "commands", {}).items()):
            yield from below(command, (*words, name))

    yield from below(typer.main.get_command(app), ())


def _help(words: tuple[str, ...]) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_HARNESS_")}
    with patch.dict(os.environ, {**clean, "COLUMNS": "80"}, clear=True), redirect_stdout(io.StringIO()) as out:
        assert run_command_line([*words, "--help"]) == 0
    return out.getvalue()
