"""The site file, which describes a cluster to nsa-harness once for all runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nsa_harness.core.scenario.checks import parse_model
from nsa_harness.core.scenario.yaml_tree import Origin, from_plain, origin_of, parse_yaml, value_text
from nsa_harness.engine.slurm_facts import parse_time_limit
from nsa_harness.errors import ScenarioError, UsageError

_SIZE_LIMIT_BYTES = 1_000_000
_Count = Annotated[int, Field(ge=1, le=100_000)]


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a check of a text, whose error says what was expected."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"expected {expected}, got {value_text(text)}")
        return text

    return AfterValidator(check)


def _time_limit(text: str) -> str:
    try:
        parse_time_limit(text)
    except ValueError:
        forms = 'minutes ("90"), hours ("04:00:00"), or days and hours ("2-12")'
        raise ValueError(f"expected {forms}, got {value_text(text)}") from None
    return text


_Word = Annotated[  # is written into a script as it is
    str, _matching(r"[^\s\"'`$\\]+", "one word without spaces, quotes, dollars and backslashes")
]
_Line = Annotated[str, _matching(r"[^\n\r]+", "a single line")]
_Variable = Annotated[str, _matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable, such as NCCL_DEBUG")]
_Directive = Annotated[str, _matching(r"--[^\n\r]+", "an option of sbatch, such as --qos=high")]
_TimeLimit = Annotated[str, AfterValidator(_time_limit)]


class Site(BaseModel):
    """The settings of a cluster. Options of the command line override the keys with the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    nodes: _Count | None = None
    partition: _Word | None = None
    account: _Word | None = None
    constraint: _Word | None = None
    gpus_per_node: _Count | None = None
    cpus_per_node: _Count | None = None
    time_limit: _TimeLimit | None = None  # as `sbatch --time` takes it
    directives: tuple[_Directive, ...] = ()  # further lines of #SBATCH
    srun: tuple[_Word, ...] = ()  # further options of srun
    setup: tuple[_Line, ...] = ()  # shell commands before the job, such as `module load cuda`
    env: dict[_Variable, str] = Field(default_factory=dict)
    agent: _Word | None = None  # the path of nsa-harness on the nodes
    rendezvous: _Word | None = None  # the address at which the nodes meet
    hosts: dict[_Word, _Word | None] = Field(default_factory=dict)  # of --engine hosts: name and address
    launcher: _Line = "ssh -o BatchMode=yes {host}"  # of --engine hosts: starts a command on a host

    def setup_commands(self) -> tuple[str, ...]:
        """Return the shell commands before the job. The first one that fails ends the job."""
        return ("set -e", *self.setup, "set +e") if self.setup else ()


def site_settings(path: Path | None, options: dict[str, str | int]) -> Site:
    """Return the settings of a site file, if any, overridden by options. Raise UsageError if an option is wrong."""
    site = Site() if path is None else read_site(path)
    values = {**site.model_dump(by_alias=True, exclude_defaults=True), **options}
    tree = from_plain(json.loads(json.dumps(values)), Origin(source="command line"))
    changed, mistakes = parse_model(Site, tree)
    if changed is None:
        raise UsageError("\n".join(f"--{one.key.replace('_', '-')}: {one.message}" for one in mistakes))
    return changed


def place_of_setting(path: Path, key: str) -> str | None:
    """Return the place of a key of a site file, such as "site.yaml:3:1", or None if the file does not have it."""
    root = parse_yaml(path.read_text(encoding="utf-8"), str(path)).root
    if root is None or not isinstance(root.content, dict) or key not in root.content:
        return None
    return str(origin_of(root, (key,)))


def read_site(path: Path) -> Site:
    """Return the settings in a site file. Raise ScenarioError, with all mistakes, if one is wrong."""
    try:
        raw = path.read_bytes()
        if len(raw) > _SIZE_LIMIT_BYTES:
            raise UsageError(f"--site: {path}: larger than {_SIZE_LIMIT_BYTES} bytes")
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--site: {path}: {reason}") from None
    parsed = parse_yaml(text, str(path))
    mistakes = [str(mistake) for mistake in parsed.mistakes]
    site, wrong = (None, ()) if parsed.root is None else parse_model(Site, parsed.root)
    mistakes += [str(mistake) for mistake in wrong]
    if mistakes or site is None:
        raise ScenarioError(mistakes or [f"{path}:1:1: the file is empty"])
    if "{host}" not in site.launcher:
        raise ScenarioError([f"{path}: launcher: expected a command with {{host}}, such as `ssh {{host}}`"])
    return site
