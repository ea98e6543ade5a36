"""docs/internals/mission.md says what tests/support/mission.py says, and every name in it exists."""

from __future__ import annotations

import ast
import fnmatch
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from documents import REPOSITORY, rows, text, tool, words
from mission import ITEMS, path_of
from test_docs import commands_of, keys

from nsa_harness.cli import main as cli
from nsa_harness.core.scenario.env_names import KNOWN_NAMES
from nsa_harness.core.scenario.scenario import ScenarioFile
from nsa_harness.subject.environment import TABLE
from nsa_harness.supervisor.launch.planning import all_scenarios


def test_the_page_is_made_from_the_items() -> None:
    assert text("docs/internals/mission.md") == tool("make_mission").page(), "python tools/make_mission.py"


def test_every_thing_stands_there_once() -> None:
    assert [name for name, count in Counter(item.text for item in ITEMS).items() if count > 1] == []


def test_every_thing_lies_somewhere_and_has_a_test_and_a_command() -> None:
    assert [one.text for one in ITEMS if not (one.tests and one.shown_by)] == []
    assert [one.text for one in ITEMS if not (one.options or one.files or one.scenarios or one.leaves)] == []


def test_every_file_is_there() -> None:
    assert [name for item in ITEMS for name in item.files if not (REPOSITORY / name).is_file()] == []


def test_every_scenario_ships() -> None:
    patterns = {pattern for item in ITEMS for pattern in item.scenarios}
    assert [pattern for pattern in sorted(patterns) if not fnmatch.filter(shipped(), pattern)] == []


def test_every_test_is_collected() -> None:
    parts = [test.partition("::") for item in ITEMS for test in item.tests]
    assert [f"{file}::{name}" for file, _, name in parts if name not in names_in(file)] == []


def test_every_option_is_one() -> None:
    assert [option for item in ITEMS for option in item.options if not is_option(option)] == []


def test_what_is_left_is_a_file_of_the_contracts() -> None:
    known = set(words(text("docs/internals/contracts.md")))
    assert [name for item in ITEMS for name in item.leaves if name not in known] == []


def test_the_commands_that_show_things_are_commands() -> None:
    assert [item.shown_by for item in ITEMS if not is_command(item.shown_by)] == []


@pytest.mark.parametrize(
    "option",
    [
        "model.brunch",
        "nsa.train --data-set",
        "nsa-harness bisect --gc",
        "nsa-harness bisekt",
        "NSA_TRACE_GRAD=",
        "word",
    ],
)
def test_what_is_no_option_is_noticed(option: str) -> None:
    assert not is_option(option)


@pytest.mark.parametrize("line", ["nsa-harness bisekt", "nsa-harness run --ofen", "nsa.train --data-set", "pytest"])
def test_what_is_no_command_is_noticed(line: str) -> None:
    assert not is_command(line)


def test_a_test_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "class TestB:\n    def test_c(self): ...\ndef helper(): ...\ndef test_d(): ...\n"
    )
    assert set(collected(tmp_path / "test_a.py")) == {"TestB::test_c", "test_d"}
    assert set(collected(tmp_path / "test_z.py")) == set()


def test_what_lacks_something_is_told_on_the_page() -> None:
    told = [cells[0] for cells in rows("docs/internals/mission.md", "what", "try") if "**Missing:**" in cells[0]]
    assert told == [f"{item.text}<br>**Missing:** {item.missing}" for item in ITEMS if item.missing]


@cache
def shipped() -> list[str]:
    items, _ = all_scenarios(REPOSITORY / "tests" / "golden")
    return [known for item in items for known in (item.name, *item.aliases)]


@cache
def commands() -> dict[str, set[str]]:
    """Command -> the words that begin its options."""
    found = commands_of(typer.main.get_command(cli.app))
    return {name: {one for param in command.params for one in param.opts} for name, command in found}


@cache
def scenario_keys() -> set[str]:
    return {key for key, _, _ in keys(ScenarioFile)}


@cache
def train_options() -> tuple[set[str], set[str]]:
    """Flags of nsa.train, and the names that it reads from its environment."""
    from nsa_attention.settings import CONFIG_ENV, parser
    from nsa_attention.train_options import OPTIONS

    flags = {word for action in parser()._actions for word in action.option_strings}
    return flags, {CONFIG_ENV, *(name for option in OPTIONS for name, _ in option.env)}


def is_command(line: str) -> bool:
    """`nsa-harness` with a command and its options, or `nsa.train` with its own; variables may stand before it."""
    program, *arguments = [word for word in line.split() if not word.partition("=")[0].isupper() or "=" not in word]
    options = [word for word in arguments if word.startswith("-")]
    if program == "nsa.train":
        return all(is_option(f"nsa.train {word}") for word in options)
    found = [name for name in commands() if f"{' '.join(arguments)} ".startswith(f"{name} ")]
    return program == "nsa-harness" and found != [] and set(options) <= commands()[found[0]]


def is_option(name: str) -> bool:
    """A scenario's key, an option or command of nsa-harness, an option of nsa.train, or a variable with its `=`."""
    program, _, rest = name.partition(" ")
    if program == "nsa.train":
        return rest in train_options()[0]
    if program == "nsa-harness":
        command, dashes, option = rest.partition(" --")
        return command in commands() and (not dashes or f"--{option}" in commands()[command])
    if name.endswith("="):
        return name[:-1] in {*train_options()[1], *TABLE, *KNOWN_NAMES}
    return name in scenario_keys()


@cache
def names_in(name: str) -> frozenset[str]:
    return frozenset(collected(REPOSITORY / path_of(name)))


def collected(path: Path) -> Iterator[str]:
    """The tests of a file as pytest names them, without running any of it."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = (one for one in node.body if isinstance(one, ast.FunctionDef))
            yield from (f"{node.name}::{one.name}" for one in inner if one.name.startswith("test"))
