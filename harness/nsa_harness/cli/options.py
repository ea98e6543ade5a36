"""Command-line options shared by several commands, and the way in which options appear in --help."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import sys
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from nsa_harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nsa_harness.core.plan import EngineChoice
    from nsa_harness.core.report import MachineFacts
    from nsa_harness.supervisor.launch.planning import SelectedScenario
    from nsa_harness.supervisor.storage.rundir import RunOptions

AUTO = "auto"
# Headings of the groups of options in a command's help.
PROGRAM = "Your program"
SELECTION = "Which scenarios"
ATTEMPTS = "How often"
REPORT = "Report"
CLUSTER = "Where it runs"

_OTHERS = "Options"
_MAX_NAME_COLUMNS = 26  # maximum width of the left column of --help, which shows the option and its metavar
_WHOLE_SENTENCE = 1000  # characters
_VARIABLES = "Each option can also be set by an environment variable: --some-option X is NSA_HARNESS_SOME_OPTION=X."
# A line of --help is not wrapped at this hyphen, which becomes an ordinary one when the help is printed.
_UNBROKEN_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def option(form: str, text: str, group: str | None = None, **more: Any) -> Any:
    """Declare an option as --help shows it, such as "-t --tag TAG", with its description and heading."""
    names, metavar = re.fullmatch(r"((?:-\S+ ?)+)(.*)", form).groups()  # type: ignore[union-attr]
    return typer.Option(*names.split(), metavar=metavar or None, help=text, rich_help_panel=group, **more)


def argument(form: str, text: str, **more: Any) -> Any:
    """Declare an argument as --help shows it, such as "[RUN]", with its description."""
    return typer.Argument(metavar=form, help=text, **more)


class GroupedCommand(TyperCommand):
    """A command whose --help groups the options, each of which has a variable such as NSA_HARNESS_DRY_RUN."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for param in self.params:
            if isinstance(param, TyperOption) and param.envvar is None:
                param.envvar = _variable(param.opts)
            if "--notify" in getattr(param, "opts", ()):
                setattr(param, "value_from_envvar", _notify_variable)  # noqa: B010

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_UNBROKEN_HYPHEN, "-")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        self.help = (self.help or "").replace("-", _UNBROKEN_HYPHEN)
        super().format_help_text(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        lines = (self.epilog or "").split("\n")
        self.epilog = "\n".join(part for line in lines for part in _example_lines(line, formatter.width - 2))
        super().format_epilog(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[OPTIONS]", *map(_in_usage, self._arguments())]

    def get_short_help_str(self, limit: int = 45) -> str:  # noqa: ARG002
        """Return the whole first sentence of the help. The list of commands wraps it."""
        return super().get_short_help_str(_WHOLE_SENTENCE)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [(str(param.metavar), param.help or "") for param in self._arguments()]
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": arguments}
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption) and (record := _without_variable(param).get_help_record(ctx)):
                groups.setdefault(param.rich_help_panel or _OTHERS, []).append(record)
        groups[_OTHERS] = groups.pop(_OTHERS)  # last, with --help
        widest = min(_MAX_NAME_COLUMNS, formatter.width // 3)
        column = max(
            (len(name) for records in groups.values() for name, _ in records if len(name) <= widest), default=0
        )
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    rows = [(f"{left:<{column}}", text.replace("-", _UNBROKEN_HYPHEN)) for left, text in records]
                    formatter.write_dl(rows, col_max=widest)
        formatter.write_paragraph()
        formatter.write_text(_VARIABLES.replace("-", _UNBROKEN_HYPHEN))

    def _arguments(self) -> list[TyperArgument]:
        return [param for param in self.params if isinstance(param, TyperArgument) and not param.hidden]


def _example_lines(line: str, width: int) -> Iterator[str]:
    """Yield the lines of one line of the examples in --help. A long command continues after a backslash."""
    if line.startswith("#") or len(line) <= width:
        yield from textwrap.wrap(line, width, subsequent_indent="# ") or [line]
        return
    start = ""
    for word in re.findall(r"(?:'[^']*'|\S)+", line):
        if start.strip() and len(f"{start} {word} \\") > width:
            yield f"{start} \\"
            start = f"  {word}"
        else:
            start = f"{start} {word}" if start else word
    yield start


def _variable(names: Sequence[str]) -> str:
    """Return the environment variable for an option, such as NSA_HARNESS_DRY_RUN for --dry-run."""
    name = next((name for name in names if name.startswith("--")), names[0])
    return f"NSA_HARNESS_{name.lstrip('-').replace('-', '_').upper()}"


def _notify_variable(_: Any) -> list[str] | None:
    """Return the targets in NSA_HARNESS_NOTIFY, one on each line, because a command contains spaces."""
    return os.environ.get("NSA_HARNESS_NOTIFY", "").splitlines() or None


def _in_usage(param: TyperArgument) -> str:
    name = str(param.metavar)
    optional = name if param.required or name.startswith("[") else f"[{name}]"
    return f"{optional}..." if param.nargs == -1 and not name.endswith("...") else optional


def _without_variable(param: TyperOption) -> TyperOption:
    """Return a copy of the option whose help does not mention its environment variable."""
    plain = copy.copy(param)
    plain.show_envvar = False
    return plain


# Options that several commands share.


class Probe(StrEnum):
    OFF = "off"
    BOARD = "board"
    FULL = "full"


_STRICT = "Exit with 125 if anything was skipped, and with 1 if a run passed with a silent fault, such as NaN."
_NOTIFY = (
    "Send a message about a HANG, a FAIL, a suspected stall or the answer to a service, such as slack://..., or run CMD"
    " with the message as JSON on stdin. Repeatable."
)
_PROBE = "Instrumentation in the ranks: full, board (progress events only) or off."
Script = Annotated[
    str | None, option("--script FILE", "Your script, like FILE.py. Its arguments follow `--`.", PROGRAM)
]
Ranks = Annotated[int, option("--ranks N", "Number of ranks for your script.", PROGRAM, min=1)]
JsonLines = Annotated[bool, option("--json", "Print events as JSON lines to stdout, and text to stderr.", REPORT)]
Out = Annotated[Path | None, option("--out DIR", "Directory for reports. Default: ./reports.", REPORT)]
Strict = Annotated[bool, option("--strict", _STRICT, REPORT)]
ProbeMode = Annotated[Probe, option("--probe", _PROBE, REPORT)]
Verbose = Annotated[bool, option("-v --verbose", "Also print the evidence, above the answer.", REPORT)]
NoRedact = Annotated[bool, option("--no-redact", "Do not remove secrets from the reports.", REPORT)]
NoValues = Annotated[bool, option("--no-values", "Do not read values of the program's variables.", REPORT)]
GitDiff = Annotated[bool, option("--git-diff", "Store the diff of uncommitted changes in env.json.", REPORT)]
Notify = Annotated[list[str] | None, option("--notify URL|exec CMD", _NOTIFY, REPORT)]
_ENGINE = (
    "Run each launch as a job: slurm, hosts (those of a site file), local (in the background) or an installed engine."
    " Default: run it directly."
)
EngineName = Annotated[str | None, option("--engine NAME", _ENGINE, CLUSTER)]
Nodes = Annotated[
    int | None, option("--nodes N", "Nodes of a job, which share its ranks equally. Default: 1.", CLUSTER, min=1)
]
Partition = Annotated[str | None, option("--partition P", "Partition of Slurm.", CLUSTER)]
Account = Annotated[str | None, option("--account A", "Account that Slurm charges.", CLUSTER)]
Constraint = Annotated[str | None, option("--constraint C", "Features of Slurm that the nodes must have.", CLUSTER)]
GpusPerNode = Annotated[int | None, option("--gpus-per-node G", "GPUs that a job gets on each node.", CLUSTER, min=1)]
SiteFile = Annotated[
    Path | None, option("--site FILE", "Settings of the cluster as YAML; options override them.", CLUSTER)
]
StoredRun = Annotated[Path | None, argument("[RUN]", "A run directory. Default: the latest run.")]


def typed_command() -> str:
    """Return the command line of this process, quoted for a shell, without the tokens in --notify."""
    words = list(sys.argv[1:])
    own = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words[:own]):
        if word == "--notify" and index + 1 < own:
            words[index + 1] = "..."
        elif word.startswith("--notify="):
            words[index] = "--notify=..."
    return shlex.join(["nsa-harness", *words])


def run_options(
    out: Path | None, probe: Probe, *, as_json: bool, no_redact: bool, git_diff: bool = False, no_values: bool = False,
    strict: bool = False, verbose: bool = False, notify: Sequence[str] | None = None,
) -> RunOptions:  # fmt: skip
    """Return the options that all commands share, with the command line that the user typed.

    Raise UsageError if a target of --notify cannot be used.
    """
    from nsa_harness.supervisor.storage.rundir import RunOptions

    os.environ.pop("NSA_HARNESS_NOTIFY", None)  # so that the program does not get the tokens, and no report has them
    if notify:
        from nsa_harness.render.notifier import check_targets

        check_targets(notify)

    return RunOptions(
        command=typed_command(), out=out, json=as_json, probe=probe.value, redact=not no_redact, git_diff=git_diff,
        reads_values=not no_values, strict=strict, verbose=verbose, notify=tuple(notify or ()),
    )  # fmt: skip


def engine_choice(engine: str | None, site: Path | None, **settings: str | int | None) -> EngineChoice | None:
    """Return the engine that the options choose, or None without --engine. Raise UsageError if it cannot be used.

    `settings`: the options that override the site file, by the names of its keys.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if engine is None:
        if given or site is not None:
            name = next(iter(given), "site").replace("_", "-")
            raise UsageError(f"--{name} belongs to a job; add --engine slurm")
        return None
    from nsa_harness.commands.engine_job import check_engine
    from nsa_harness.core.plan import EngineChoice
    from nsa_harness.engine.site import site_settings

    choice_site = site_settings(site, given)
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    choice = EngineChoice(
        name=engine, nodes=choice_site.nodes or 1, gpus_per_node=choice_site.gpus_per_node or 0,
        site=choice_site.model_dump_json(by_alias=True, exclude_defaults=True),
        options=("--engine", engine, *words, *(("--site", str(site.resolve())) if site else ())),
    )  # fmt: skip
    check_engine(choice, site, given)
    return choice


def facts_of(choice: EngineChoice | None) -> MachineFacts:
    """Return the facts of this machine, with the GPUs that a job of the engine gets instead of its own."""
    from dataclasses import replace

    from nsa_harness.supervisor.launch.machine import machine_facts

    facts = machine_facts()
    if choice is None or not choice.gpus_per_node:
        return facts
    return replace(facts, gpus=(f"GPU of {choice.name}",) * (choice.gpus_per_node * choice.nodes))


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user set the option `name`, even to its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def origin_of_option(context: typer.Context, name: str) -> str:
    """Return where the value of the option `name` comes from, as `explain` shows it."""
    source = context.get_parameter_source(name)
    origins = {"COMMANDLINE": "command line", "ENVIRONMENT": _variable([name]), "DEFAULT_MAP": "pyproject.toml"}
    return origins.get(source.name, "default") if source is not None else "default"


def parse_jobs(text: str) -> int | None:
    """Return the value of --jobs, or None for "auto". Raise UsageError if it is invalid."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise UsageError(f"--jobs: expected a number of runs or auto, got {text!r}")
    return int(text)


def parse_budget(text: str | None) -> float | None:
    """Return the value of --budget in seconds. Raise UsageError if it is invalid."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh]?)", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--budget: expected a time such as 90s, 20m or 2h, got {text!r}")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"]


# Defaults from the user's pyproject.toml.


def option_defaults(group: Any, working_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the project's defaults by command and parameter, as `default_map` of a click context.

    `group`: the click group with all commands. Raises ScenarioError, with all mistakes, if the table has any.
    """
    from nsa_harness.supervisor.launch.project_file import read_project_file

    project = read_project_file(working_dir)
    if project is None:
        return {}
    options = {f"--{key}": value for key, value in project.options().items()}
    return {
        name: {param.name: options[form] for param in command.params for form in param.opts if form in options}
        for name, command in group.commands.items()
    }


def option_lines(working_dir: Path) -> Iterator[str]:
    """Yield one YAML comment for each option that the project sets, with its line in pyproject.toml."""
    from nsa_harness.render.notifier import name_of
    from nsa_harness.supervisor.launch.project_file import read_project_file

    project = read_project_file(working_dir)
    if project is not None:
        for key, value in project.options().items():
            if isinstance(value, list):  # URLs of --notify, which contain tokens
                value = list(map(name_of, map(str, value)))
            yield f"{f'# --{key}: {json.dumps(value)}':<44}  # {project.origin(key)}"


# Shell completion.


def scenario_names(incomplete: str) -> list[str]:
    """Return the scenario names that begin with `incomplete`, for shell completion."""
    return [item.name for item in _catalog() if item.name.startswith(incomplete)]


def scenario_tags(incomplete: str) -> list[str]:
    """Return the scenario tags that begin with `incomplete`, for shell completion."""
    return sorted({tag for item in _catalog() for tag in item.tags if tag.startswith(incomplete)})


def shape_names(incomplete: str) -> list[str]:
    """Return the model sizes that begin with `incomplete`, for shell completion."""
    from nsa_harness.subject.options import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def _catalog() -> Sequence[SelectedScenario]:
    """Return all scenarios, or an empty tuple if a scenario file is invalid."""
    from nsa_harness.errors import HarnessError
    from nsa_harness.supervisor.launch.planning import all_scenarios

    try:
        return all_scenarios(Path.cwd())[0]
    except HarnessError:
        return ()
