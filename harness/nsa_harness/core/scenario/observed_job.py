"""Describe a job that nsa-harness only observes, for the commands `watch`, `attach` and `read`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from nsa_harness.core.plan import Expect, Launcher, Limits, RunSpec
from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.overrides import is_override, parse_override, with_overrides
from nsa_harness.core.scenario.yaml_tree import Node, Origin, from_plain, merge
from nsa_harness.errors import UsageError

_SECTION = "limits."
_MAX_NAME = 60
# Launchers. They are not ranks, even if RANK is set in their own environment.
_STARTER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_STARTER_COMMANDS = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "srun", "mpirun"})
_STARTER_WORDS = 4  # the launcher is among the first words: interpreter, a switch, -m, module


def starts_ranks(words: Sequence[str]) -> bool:
    """Return whether the command is a launcher such as `torchrun` or `python -m torch.distributed.run`."""
    return any(
        word in _STARTER_MODULES or word.rpartition("/")[2] in _STARTER_COMMANDS for word in words[:_STARTER_WORDS]
    )


def observed_limits(words: Sequence[str], deadline_s: float | None = None, *, defaults: Node | None = None) -> Limits:
    """Return the time limits set by arguments such as `limits.stall_s=10`. Raise UsageError if one is invalid.

    `defaults`: a tree with the limits of the user's project, which apply where no argument sets one. `deadline_s` is
    the value of --deadline. Without it, `limits.deadline_s` applies. By default there is no deadline.
    """
    for word in words:
        if not (is_override(word) and word.startswith(_SECTION)):
            raise UsageError(
                f"{word}: only limits can be set here, such as limits.stall_s=10; your command follows `--`"
            )
    bare = from_plain({"name": "job", "about": "observed", "run": {"command": ["job"]}}, Origin(source="command line"))
    bare = bare if defaults is None else merge(bare, defaults)
    result = check_scenario(with_overrides(bare, [parse_override(word) for word in words]), None)
    if result.scenario is None:
        raise UsageError("\n".join(str(mistake) for mistake in result.mistakes))
    limits = Limits(**dict(result.scenario.limits))
    return limits if deadline_s is None else replace(limits, deadline_s=deadline_s)


def observed_spec(name: str, about: str, command: Sequence[str], limits: Limits, spec_hash: str) -> RunSpec:
    """Return the spec of a job that nsa-harness only observes."""
    return RunSpec(
        scenario=name,
        about=about,
        ranks=1,
        launcher=Launcher.PLAIN,
        program=tuple(command),
        env=(),
        cwd=None,
        backend="any",
        device="any",
        subject=" ".join(command),
        limits=limits,
        expect=Expect(),
        fault=None,
        notes=(),
        not_covered=(),
        spec_hash=spec_hash,
    )


def with_ranks(spec: RunSpec, rank_count: int) -> RunSpec:
    """Return the spec with this number of ranks, and with a note if the number is 0."""
    notes = () if rank_count else ("no rank was seen: the command did not import torch, or it exited too early",)
    return replace(spec, ranks=max(1, rank_count), notes=notes)


def job_name(command: Sequence[str]) -> str:
    """Return a directory name for a job, based on the first Python file in its command."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    stem = script.rsplit("/", 1)[-1].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("_.-")[:_MAX_NAME] or "job"
