"""The reproduction of a run that failed or hung: its bare command line, and a script where calls alone repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pprint import pformat

from nsa_harness.core.diagnosis.causes import Replay, row_of
from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.repro.calls import STATEMENTS, Made, Members, NotRepeatableError, parting_calls, stands_elsewhere

MOST_LINES = 60
_CALLS_OF_A_RANK = (12, 8, 5, 3)  # tried in this order until the script fits


def script(calls: Mapping[int, Sequence[Made]], cause: str) -> str | None:
    """The whole text; None where the ranks did too many different things for a screen."""
    texts = (_text({rank: made[:most] for rank, made in calls.items()}, cause) for most in _CALLS_OF_A_RANK)
    return next((text for text in texts if text.count("\n") <= MOST_LINES), None)


def _text(calls: Mapping[int, Sequence[Made]], cause: str) -> str:
    groups = _groups(calls)
    rows = {rank: [_row(one, groups) for one in made] for rank, made in sorted(calls.items())}
    rooted = any(one.root is not None for made in calls.values() for one in made)
    used = dict.fromkeys(one.operation for made in calls.values() for one in made)
    lines = [
        f'"""The calls of {len(calls)} ranks around the point where they part ({cause}), and nothing else.',
        "",
        "Made from the record of a run: no line of the program is in it. It needs torch alone:",
        f"torchrun --standalone --nproc-per-node={len(calls)} repro.py",
        '"""',
        "",
        "import torch",
        "import torch.distributed as dist",
        "",
        "# rank: (operation, group, elements, type, peer), in the order in which it made them",
        f"CALLS = {pformat(rows, width=110, compact=True)}",
        f"GROUPS = {[list(members) for _, members in groups]}",
        "",
        'dist.init_process_group("gloo")',
        "rank, started = dist.get_rank(), []",
        "groups = [dist.new_group(members) for members in GROUPS]",
        "for operation, group, elements, kind, peer in CALLS[rank]:",
        "    where, first = (None, 0) if group is None else (groups[group], GROUPS[group][0])",
        "    tensor, size = torch.ones(elements, dtype=getattr(torch, kind)), dist.get_world_size(where)",
        *(["    first = first if peer is None else peer"] if rooted else []),
        *_branches(list(used)),
        "for work in started:",
        "    work.wait()",
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _groups(calls: Mapping[int, Sequence[Made]]) -> list[tuple[str, Members]]:
    """Every group but the one of all ranks, in an order that all ranks make them in. The names stay out of the text."""
    return sorted({(one.group, one.members) for made in calls.values() for one in made if one.group})


def _row(one: Made, groups: Sequence[tuple[str, Members]]) -> tuple[str, int | None, int, str, int | None]:
    group = groups.index((one.group, one.members)) if one.group else None
    return (one.operation, group, one.elements, one.dtype, one.root if one.peer is None else one.peer)


def _branches(operations: Sequence[str]) -> list[str]:
    lines = []
    for number, operation in enumerate(operations):
        lines += [f'    {"elif" if number else "if"} operation == "{operation}":', f"        {STATEMENTS[operation]}"]
    return lines


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
