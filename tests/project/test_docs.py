"""The documents against the code: what they name exists, and what exists is named."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from documents import DOCUMENTS, REPOSITORY, SAMPLE, blocks, rows, text, tool, words
from pydantic import BaseModel

import nsa_attention
from nsa_harness import errors, protocol
from nsa_harness.cli import main as cli
from nsa_harness.core.comparison.decision_rules import condition_text
from nsa_harness.core.comparison.plan_file import PlanText, read_plan, read_stored_plan
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import HangKind, Status
from nsa_harness.core.scenario import resolve
from nsa_harness.core.scenario.scenario import ScenarioFile
from nsa_harness.core.verdict import limits, motion, proof
from nsa_harness.subject.environment import TABLE
from nsa_harness.supervisor.launch.planning import Invocation, check_scenarios, select_scenarios
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage import sources
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir

CONTRACTS = "docs/internals/contracts.md"
SHIPPED = read_stored_plan(shipped_plan()).plan
USERS_OWN = {
    "scenarios/train_small.yaml",
    "reports/latest",
    "reports/latest/report.html",
    "tests/test_train.py",
    ".github/workflows/train.yml",
}  # what the documents tell a reader to make
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|root|opt)/")


def command_parameters() -> dict[str, dict[str, tuple[list[str], str | None]]]:
    """command -> option -> (its names, its environment name), without --help."""
    return {
        name: {param.name: (list(param.opts), param.envvar) for param in command.params if param.opts[0][0] == "-"}
        for name, command in commands_of(typer.main.get_command(cli.app))
    }


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its whole name: `run`, `ci matrix`."""
    for name, command in group.commands.items():
        inner = list(commands_of(command, f"{prefix}{name} ")) if hasattr(command, "commands") else []
        yield from inner or [(f"{prefix}{name}", command)]


def test_every_command_stands_in_the_contracts_and_no_other() -> None:
    typed = [words(cells[0])[0].split()[1:] for cells in rows(CONTRACTS, "command")]
    shown = {" ".join(takewhile(str.islower, line)) for line in typed}
    assert shown == set(command_parameters())


def test_every_option_stands_in_the_contracts_with_its_environment_name_and_no_other() -> None:
    real = {
        (option, command, environment)
        for command, options in command_parameters().items()
        for names, environment in options.values()
        for option in names
    }
    shown = {
        (word.split()[0], command, environment)
        for option, commands, variable, _ in rows(CONTRACTS, "option")
        if (environment := next(iter(words(variable)), None))
        for command in commands.split(", ")
        for word in words(option)
    }
    assert shown == real


def test_every_exit_code_is_explained_and_no_other() -> None:
    tree = ast.parse(text("harness/nsa_harness/core/report.py"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "exit_code")
    returned = {node.value.value for node in ast.walk(function) if isinstance(node, ast.Return)}
    usage = {thing.exit_code for thing in vars(errors).values() if hasattr(thing, "exit_code")}
    assert {int(cells[0]) for cells in rows("docs/verdicts.md", "code", "when")} == returned | usage


def test_every_verdict_and_every_kind_of_hang_is_explained() -> None:
    assert [cells[0] for cells in rows("docs/verdicts.md", "verdict", "when")] == list(Status)
    assert {cells[0] for cells in rows("docs/verdicts.md", "kind")} == set(HangKind)


def test_the_numbers_of_the_limits_are_those_of_the_code() -> None:
    modules = (limits, proof, motion, resolve)
    names = [(module, name) for module in modules for name in vars(module) if name.isupper() and name[0] != "_"]
    real = {name: value for module, name in names if isinstance(value := getattr(module, name), int | float)}
    shown = {words(cells[0])[0]: float(cells[1]) for cells in rows("docs/internals/verdicts.md", "name", "value")}
    assert shown == real


@pytest.mark.parametrize("name", ["docs/findings.md", "docs/internals/decisions.md"])
def test_what_a_document_says_of_causes_is_made_from_their_table(name: str) -> None:
    made = tool("make_findings").with_causes(name, text(name))
    assert made == text(name), "the table of causes says otherwise: run python tools/make_findings.py"


def test_the_figures_of_strangers_in_the_readme_are_those_of_the_newest_round() -> None:
    newest = max((REPOSITORY / "evaluation" / "rounds").glob("*/score.json"))
    figures = json.loads(newest.read_text())["figures"]
    names = ("verdict", "false HANG", "rank", "cause", "line", "certain and wrong")
    expected = " | ".join(figures[name].partition(" (")[0] for name in names)
    assert f"| {expected} |" in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = (REPOSITORY / "docs" / "internals" / "accuracy.md").read_text(encoding="utf-8")
    assert all(figures[name] in table for name in names)


def test_every_gate_stands_in_the_decisions_in_its_order_and_no_other() -> None:
    shown = [(words(cells[0])[0], *cells[1:]) for cells in rows("docs/internals/decisions.md", "gate", "if")]
    assert shown == [
        (name, condition_text(one.condition), one.then, one.because) for name, one in SHIPPED.gates.items()
    ]


def test_every_question_of_the_tree_stands_in_the_decisions_and_no_other() -> None:
    shown = [tuple(cells[:2]) for cells in rows("docs/internals/decisions.md", "question", "of gate")]
    assert shown == [(one.asks, one.gate) for one in SHIPPED.questions]


def test_the_plan_file_of_the_decisions_can_be_read() -> None:
    (example,) = [block for block in blocks("docs/decisions.md", "yaml") if "gates:" in block]
    assert read_plan(PlanText(file="example", text=example), None).mistakes == ()


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every dotted key of a scenario file, with its default and its words where only certain words are allowed."""
    defaults = model.model_construct().model_dump(mode="json", by_alias=True)
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        arguments = [*get_args(field.annotation), field.annotation]
        section = next((one for one in arguments if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if section is None or field.annotation is not section:
            allowed = field.annotation if isinstance(field.annotation, type) else ()
            choice = tuple(allowed) if allowed and issubclass(allowed, StrEnum) else ()
            yield key, shown_default(defaults.get(field.alias or name), required=field.is_required()), choice
        if section is not None:
            repeated = "NAME." if field.annotation is not section and dict in map(origin, arguments) else ""
            yield from keys(section, f"{key}.{repeated}")


def origin(annotation: object) -> object:
    return getattr(annotation, "__origin__", None)


def shown_default(value: object, *, required: bool) -> str:
    if required:
        return "required"
    if value in (None, "", [], {}):
        return "none given"
    return value if isinstance(value, str) else json.dumps(value)


def test_every_key_of_a_scenario_is_documented_with_its_default_and_words_and_no_other_key_is() -> None:
    table = {words(cells[0])[0]: cells for cells in rows("docs/scenario-keys.md", "key", "default")}
    real = {key: (default, choice) for key, default, choice in keys(ScenarioFile)}
    assert {key: cells[1].strip("`") for key, cells in table.items()} == {key: real[key][0] for key in real}
    for key, (_, choice) in real.items():
        assert not choice or words(table[key][2]) == list(choice), key


def test_every_environment_name_is_documented_with_its_key() -> None:
    table = {words(cells[0])[0]: words(cells[1])[0] for cells in rows("docs/scenario-keys.md", "name", "sets")}
    assert table == {name: key for name, (key, _) in TABLE.items()}


@pytest.mark.parametrize("name", ["README.md", "docs/scenarios.md"])
def test_every_scenario_shown_in_a_document_is_a_sound_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for number, block in enumerate(blocks(name, "yaml")):
        (tmp_path / f"shown{number}.yaml").write_text(block)
        question = Invocation(arguments=(f"./shown{number}.yaml",), working_dir=tmp_path, environ={})
        asked, _ = select_scenarios(question)
        assert len(check_scenarios(asked)) == len(asked) > 0


def test_every_key_of_a_stored_report_is_documented() -> None:
    stored = json.loads((SAMPLE / "report.json").read_text())
    (outcome,) = stored["outcomes"]
    assert {word for cells in rows(CONTRACTS, "key") for word in words(cells[0])} == set(stored)
    of_an_outcome = {word for cells in rows(CONTRACTS, "key of an outcome") for word in words(cells[0])}
    assert of_an_outcome == set(outcome)


def test_every_event_is_documented_with_its_keys() -> None:
    table = {words(cells[0])[0]: set(words(cells[2])) for cells in rows(CONTRACTS, "event")}
    common = {"schema", "event", "t_s", "run_id", "scenario"}
    for line in (SAMPLE / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        assert set(event) - common == table[event["event"]], event["event"]


def test_every_file_of_a_run_directory_is_documented() -> None:
    run, attempt = RunDir(Path("run")), AttemptDir(Path("attempt"))
    paths = (one for one in (*vars(run).values(), *vars(attempt).values()) if isinstance(one, Path))
    real = {path.name for path in paths} - {"run", "attempt"}
    shown = {word.strip("/").split("/")[0] for cells in rows(CONTRACTS, "file") for word in words(cells[0])}
    assert real | {sources.FILE} <= shown


def test_the_layouts_of_boards_that_are_written_and_read_are_told() -> None:
    told = re.findall(r"\blayout (\d+)", text(CONTRACTS))
    assert told == [str(protocol.LAYOUT), str(protocol.LAYOUT_2)]


def test_every_file_of_a_stored_attempt_is_documented() -> None:
    attempt = SAMPLE / "fault_deadlock"
    names = {str(path.relative_to(attempt)) for path in attempt.rglob("*") if path.is_file()}
    general = {re.sub(r"rank\d+", "rank<r>", re.sub(r"\.\d+\.", ".<n>.", name)) for name in names}
    assert general <= set(words(text(CONTRACTS)))


def test_the_codemap_has_one_line_for_every_folder_and_for_nothing_else() -> None:
    shown = re.findall(r"^- `((?:harness|nsa)/[\w/]*)` — ", text("ARCHITECTURE.md"), re.M)
    folders = [path for top in ("harness", "nsa") for path in (REPOSITORY / top, *(REPOSITORY / top).rglob("*"))]
    folders = [path for path in folders if path.is_dir() and not path.is_symlink()]
    held = [path for path in folders if any(one.is_file() for one in path.iterdir())]
    real = [f"{path.relative_to(REPOSITORY)}/" for path in held if path.name != "__pycache__"]
    assert sorted(shown) == sorted(real)


def test_every_page_begins_with_a_command_that_there_is() -> None:
    known = {name.split()[0] for name in command_parameters()}
    pages = {*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "docs" / "internals").rglob("*.md")}
    for page in sorted(page for page in pages if page.name != "README.md"):
        begins = re.match(r"# [^\n]+\n\n```(?:text|sh)\n(.*?)^```$", page.read_text(), re.M | re.S)
        assert begins, f"{page.name} begins with no command"
        for line in begins[1].splitlines():
            program, first = line.replace("python -m ", "python ").split()[:2]
            is_ours = (program, first in known) == ("nsa-harness", True)
            assert is_ours or (REPOSITORY / first).exists() or importlib.util.find_spec(first), line


def test_the_index_of_causes_leads_to_each_of_them() -> None:
    index = text("docs/findings.md").partition("| I see | look at |")[2].partition("\n## ")[0]
    assert {one.value for one in Cause} == set(re.findall(r"\]\(#(\w+)\)", index))


def test_every_link_of_a_document_leads_to_a_file() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_a_document_names_exists() -> None:
    path = re.compile(
        r"(?:harness|nsa|scenarios|tests|docs|tools|reports|benchmarks|evaluation|\.ci|\.github)/[\w./-]*"
    )
    named = {(document.name, word) for document in DOCUMENTS for word in words(document.read_text())}
    missing = [at for at in named if path.fullmatch(at[1]) and at[1] not in USERS_OWN and not exists(at[1])]
    assert missing == []


def test_every_module_and_test_that_a_page_about_the_subject_names_exists() -> None:
    package, pages = REPOSITORY / "nsa" / "nsa_attention", (REPOSITORY / "docs" / "internals" / "nsa").glob("*.md")
    named = {word for page in pages for word in words(page.read_text())}
    modules = {word for word in named if re.fullmatch(r"(?:ops|data)/[\w/]+\.py", word)}
    assert modules
    assert [name for name in sorted(modules) if not (package / name).is_file()] == []
    tests = [word.partition("::") for word in named if "::test_" in word]
    sources = {file: text(f"tests/nsa/{file}") for file, _, _ in tests}
    assert tests
    assert [name for file, _, name in tests if f"def {name}(" not in sources[file]] == []


def test_every_name_that_a_page_about_the_subject_takes_from_a_module_is_defined_there() -> None:
    package, pages = REPOSITORY / "nsa" / "nsa_attention", (REPOSITORY / "docs" / "internals" / "nsa").glob("*.md")
    named = []
    for page in pages:
        named += re.findall(r"`([\w/]+\.py)`: `(\w+)`", page.read_text())
        for example in blocks(f"docs/internals/nsa/{page.name}", "python"):
            imports = [node for node in ast.parse(example).body if isinstance(node, ast.ImportFrom)]
            for module, node in ((node.module or "", node) for node in imports):
                names = [alias.name for alias in node.names]
                if module == "nsa_attention":
                    assert set(names) <= set(nsa_attention.__all__), page.name
                elif module.startswith("nsa_attention."):
                    path = module.removeprefix("nsa_attention.").replace(".", "/")
                    named += [(f"{path}.py", name) for name in names]
    assert len(named) > 10
    assert [
        at for at in named if not re.search(rf"^(?:def|class) {at[1]}\b", (package / at[0]).read_text(), re.M)
    ] == []


def exists(name: str) -> bool:
    return (REPOSITORY / name).exists()


def test_no_file_of_the_repository_names_a_path_of_one_machine() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if not exists(".git"):
        pytest.skip("no git checkout, so nobody knows which files belong to it")
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [
        name for name in names if (REPOSITORY / name).is_file() and MACHINE_PATH.search(readable(REPOSITORY / name))
    ]
    assert found == []


def readable(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")
