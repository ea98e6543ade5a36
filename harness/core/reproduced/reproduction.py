"""The reproduction of a run that failed or hung: its bare command line, and a script where calls alone repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core.diagnosed.causes import Replay, row_of
from harness.core.observed.evidence import Evidence
from harness.core.plan import RunSpec
from harness.core.report import Outcome, Status
from harness.core.reproduced.calls import Made, NotRepeatableError, parting_calls, stands_elsewhere
from harness.core.reproduced.script import MOST_LINES, script


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    command: str  # text of command.txt
    script: str | None
    why_not: str  # why there is no script; empty with one


def reproduction(spec: RunSpec, evidence: Evidence, outcome: Outcome, command: str) -> Reproduction | None:
    """None for what neither failed nor hung. `command`: the program's own command line."""
    if outcome.verdict.status not in (Status.FAIL, Status.HANG):
        return None
    text, why_not = _script(evidence, outcome)
    return Reproduction(command=_command_text(spec, command, text is not None), script=text, why_not=why_not)


def _script(evidence: Evidence, outcome: Outcome) -> tuple[str | None, str]:
    replay = row_of(outcome.verdict.cause).replay
    if replay is Replay.NONE:
        return None, "the cause lies in no call to other ranks: command.txt repeats the program itself"
    elsewhere = stands_elsewhere(evidence) if outcome.verdict.status is Status.HANG else ()
    if elsewhere:
        return None, f"rank {elsewhere[0]} stood outside every recorded call, where a script of calls cannot bring it"
    try:
        calls = parting_calls(evidence, from_python=replay is Replay.PYTHON_CALLS or not _recorded(evidence))
    except NotRepeatableError as reason:
        return None, str(reason)
    if not _part(calls):
        return None, "the record holds no call in which the ranks part"
    text = script(calls, outcome.verdict.cause or "")
    return text, "" if text else f"the calls of {len(calls)} ranks do not fit into {MOST_LINES} lines"


def _part(calls: Mapping[int, Sequence[Made]]) -> bool:
    """Some rank does otherwise than another: equal calls would just pass."""
    done = [
        [(one.operation, one.channel, one.elements, one.dtype, one.root) for one in made] for made in calls.values()
    ]
    return any(one != done[0] for one in done)


def _recorded(evidence: Evidence) -> bool:
    return all(rank.collectives for rank in evidence.ranks)


def _command_text(spec: RunSpec, command: str, scripted: bool) -> str:
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.env)
    lines = ["# The program itself, without the harness:"]
    if spec.fault is not None:
        lines += ["# (its fault was planted by the harness and is not in this line: run spec.json for that)"]
    lines += [f"cd {shlex.quote(spec.cwd)}"] if spec.cwd else []
    lines += [" ".join(filter(None, (env, command)))]
    if scripted:
        lines += ["# The calls of its ranks alone:", f"torchrun --standalone --nproc-per-node={spec.ranks} repro.py"]
    return "\n".join(lines) + "\n"
