"""Read the table `[tool.nsa-harness]` of the user's pyproject.toml."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nsa_harness.core.scenario.checks import parse_model
from nsa_harness.core.scenario.scenario import LimitSection
from nsa_harness.core.scenario.yaml_tree import Node, Origin, Plain, from_plain, origin_of, plain, visible, without
from nsa_harness.errors import ScenarioError, UsageError

LIMITS = "limits"
_NAME = "pyproject.toml"
_TOOL = "nsa-harness"
_SIZE_LIMIT_BYTES = 1_000_000
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_PROGRAM = re.compile(r"^exec +([\w.+-]+/[\w./+-]+)(?=\s|$)")
_KEY = re.compile(r"\s*([\w\"'.-]+)\s*=")


def _jobs(value: object) -> object:
    """Return the value of `jobs`. Raise ValueError if it is neither a positive whole number nor "auto"."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


_Count = Annotated[int, Field(ge=1)]


class ProjectSettings(BaseModel):
    """The defaults of a project: time limits, and the options of the command line that suit every run.

    Each option has its long name, without the dashes in front.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-")
    )

    ranks: _Count | None = None
    python: str | None = None
    out: str | None = None
    probe: Literal["off", "board", "full"] | None = None
    jobs: Annotated[object, AfterValidator(_jobs)] = None
    retries: Annotated[int, Field(ge=0)] | None = None
    deepen: bool | None = None
    strict: bool | None = None
    verbose: bool | None = None
    no_redact: bool | None = None
    no_values: bool | None = None
    git_diff: bool | None = None
    on_hang: str | None = None
    notify: list[str] | None = None
    limits: LimitSection | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectFile:
    """The defaults that a project sets for nsa-harness, each with its line in pyproject.toml."""

    directory: Path
    tree: Node

    def options(self) -> dict[str, Plain]:
        """Return the value of each option that the project sets. Relative paths start at the directory of the file."""
        options = plain(self.tree)
        assert isinstance(options, dict)
        options.pop(LIMITS, None)
        for key in ("out", "python"):
            if key in options and (key == "out" or "/" in str(options[key])):
                options[key] = str(self.directory / Path(str(options[key])).expanduser())
        if "on-hang" in options:
            options["on-hang"] = self._command(str(options["on-hang"]))
        if "notify" in options:
            targets = options["notify"]
            assert isinstance(targets, list)
            options["notify"] = [self._command(str(target)) for target in targets]
        return options

    def _command(self, value: str) -> str:
        """Return "exec CMD" with the whole path of a program that is named by a relative path."""
        return _PROGRAM.sub(lambda match: f"exec {shlex.quote(str(self.directory / match[1]))}", value)

    def origin(self, key: str) -> str:
        """Return the file and line that set `key`, such as "pyproject.toml:12"."""
        origin = origin_of(self.tree, (key,))
        return f"{origin.source}:{origin.line}"


def read_project_file(working_dir: Path) -> ProjectFile | None:
    """Return the nearest pyproject.toml with a table `[tool.nsa-harness]`, or None if there is none.

    The search starts in `working_dir` and goes up to the root of the git repository, or of the file system. Raises
    UsageError if a file that names nsa-harness is not valid TOML, and ScenarioError, with all mistakes, if a setting is
    wrong.
    """
    for directory in (working_dir, *working_dir.parents):
        path = directory / _NAME
        table = _read_table(path)
        if table is not None:
            if mistakes := parse_model(ProjectSettings, table)[1]:
                raise ScenarioError(
                    [f"{mistake.origin}: tool.{_TOOL}.{mistake.key}: {mistake.message}" for mistake in mistakes]
                )
            return ProjectFile(directory=directory, tree=table)
        if (directory / ".git").exists():
            break
    return None


def project_limits(working_dir: Path) -> Node | None:
    """Return the time limits of the project as the tree of a scenario, or None if no project is configured."""
    project = read_project_file(working_dir)
    if project is None:
        return None
    assert isinstance(project.tree.content, dict)
    return without(project.tree, [key for key in project.tree.content if key != LIMITS])


def _read_table(path: Path) -> Node | None:
    try:
        with path.open("rb") as file:
            raw = file.read(_SIZE_LIMIT_BYTES + 1)
    except OSError:
        return None
    if f"tool.{_TOOL}".encode() not in raw:
        return None
    if len(raw) > _SIZE_LIMIT_BYTES:
        raise UsageError(f"{path}: larger than {_SIZE_LIMIT_BYTES} bytes")
    try:
        text = raw.decode()
        table = tomllib.loads(text).get("tool", {}).get(_TOOL)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {visible(str(error), 200)}") from None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.{_TOOL}: expected a table")
    places = {name: Origin(source=_NAME, line=line, column=1) for name, line in _lines(text)}
    return _node("", table, places)


def _node(key: str, value: object, places: Mapping[str, Origin]) -> Node:
    """Return a setting as a tree. A value that YAML does not have, such as a date, becomes its text."""
    origin = places.get(key) or places.get(key.split(".")[0]) or Origin(source=_NAME)
    if isinstance(value, dict):
        children = {str(name): _node(f"{key}.{name}".lstrip("."), child, places) for name, child in value.items()}
        return Node(origin=origin, content=children)
    return from_plain(_plain(value), origin)


def _plain(value: object) -> Plain:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | float) else str(value)


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield each key below `[tool.nsa-harness]`, such as "limits.stall_s", with its line."""
    prefix: str | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            name = header[1].replace('"', "").replace(" ", "")
            rest = name.removeprefix(f"tool.{_TOOL}")
            prefix = None if rest == name or (rest and not rest.startswith(".")) else f"{rest[1:]}." if rest else ""
            if prefix:
                yield prefix[:-1], number
        elif prefix is not None and (key := _KEY.match(line)):
            yield prefix + key[1].replace('"', ""), number
