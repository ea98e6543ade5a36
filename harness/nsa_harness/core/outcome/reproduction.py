"""Write the files that reproduce a failed or hung run without nsa-harness.

These are the command line and, if the communication calls alone repeat the failure, a script that makes these calls.
"""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pprint import pformat

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Cause, Replay, row_of
from nsa_harness.core.diagnosis.context import collectives_of
from nsa_harness.core.diagnosis.profile import pace
from nsa_harness.core.evidence.evidence import Call, Ending, Evidence, RankEvidence, StatusFile
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.redaction import placeholders, shell_line, shell_words, where_to_set
from nsa_harness.core.report import Outcome, Status

MOST_ELEMENTS = 1 << 24
MOST_LINES = 60
_CALLS_OF_A_RANK = (12, 8, 5, 3)  # tried in this order until the script is short enough

# Names of operations in the flight recorder and in Python, with the script's operation for each.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "all_gather_object": "all_gather_object",
    "broadcast_object_list": "broadcast_object_list",
}
MAKERS = {"new_group": "new_group"}
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "broadcast_object_list"})
TRANSFERS = frozenset({"send", "recv", "isend", "irecv"})

_NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = {prefix + name: name for name in _NAMES for prefix in ("", "torch.")}

# The statements use variables of the script: tensor, where (the group), first (the root or first member), size, peer,
# started.
STATEMENTS = {
    "all_reduce": "dist.all_reduce(tensor, group=where)",
    "broadcast": "dist.broadcast(tensor, first, group=where)",
    "reduce": "dist.reduce(tensor, first, group=where)",
    "all_gather": "dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor, group=where)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(tensor.repeat(size), tensor, group=where)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(tensor.clone(), tensor.repeat(size), group=where)",
    "all_to_all_single": "dist.all_to_all_single(tensor.repeat(size), tensor.repeat(size), group=where)",
    "gather": "dist.gather(tensor, [tensor.clone() for _ in range(size)] if rank == first else None, first, where)",
    "scatter": "dist.scatter(tensor, [tensor.clone() for _ in range(size)] if rank == first else None, first, where)",
    "barrier": "dist.barrier(group=where)",
    "monitored_barrier": "dist.monitored_barrier(group=where)",
    "all_gather_object": "dist.all_gather_object([None] * size, rank, group=where)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], first, group=where)",
    "new_group": "dist.new_group()",
    "send": "dist.send(tensor, peer)",
    "recv": "dist.recv(tensor, peer)",
    "isend": "started.append(dist.isend(tensor, peer))",
    "irecv": "started.append(dist.irecv(tensor, peer))",
}


_SET_UP = ("init_process_group", "destroy_process_group")
_DEFAULT = ("", "0")

Members = tuple[int, ...]
Channel = tuple[bool, str, Members]  # (whether it is a point-to-point transfer, group name, members)


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """One collective or point-to-point call in a reproduction script."""

    operation: str  # a key of STATEMENTS
    group: str  # distinguishes groups, and never appears in a script; empty for the group of all ranks
    members: Members  # ranks of the group; for a transfer the sender and the receiver
    elements: int
    dtype: str
    peer: int | None = None
    root: int | None = None  # root of a collective, unless it is the first member of its group
    number: int = 0  # position in its channel, from 1
    is_done: bool = True

    @property
    def channel(self) -> Channel:
        """The process group of a collective, or the two ranks of a point-to-point call."""
        return self.peer is not None, self.group, self.members


class NotRepeatableError(Exception):
    """Raised if a recorded call cannot be repeated in a reproduction script."""


def diverging_calls(evidence: Evidence, *, from_python: bool) -> dict[int, tuple[ScriptCall, ...]]:
    """Map each rank to its calls, starting shortly before the ranks diverge."""
    all_ranks = tuple(range(evidence.world_size))
    source = _from_status_file if from_python else _from_recorder
    calls_of = {rank.rank: tuple(source(rank, evidence, all_ranks)) for rank in evidence.ranks}
    channels = {call.channel for calls in calls_of.values() for call in calls}
    starts = {channel: _first_number(channel, calls_of) for channel in channels}
    return {
        rank: tuple(call for call in calls if (start := starts[call.channel]) is not None and call.number >= start)
        for rank, calls in calls_of.items()
    }


def ranks_outside_calls(evidence: Evidence) -> Members:
    """Return the ranks that were still running but were not inside any recorded call."""
    return tuple(rank.rank for rank in evidence.ranks if not (_has_ended(rank) or _is_in_a_call(rank, evidence)))


def _has_ended(rank: RankEvidence) -> bool:
    return rank.exception is not None or (rank.exit is not None and not rank.exit.during_teardown)


def _is_in_a_call(rank: RankEvidence, evidence: Evidence) -> bool:
    calls = rank.status_file.calls if rank.status_file else ()
    inside = any(call.left_s is None and call.op not in _SET_UP for call in calls)
    return inside or any(not collective.retired for collective in collectives_of(evidence, rank))


def _from_recorder(rank: RankEvidence, evidence: Evidence, all_ranks: Members) -> Iterator[ScriptCall]:
    groups = rank.status_file.groups if rank.status_file else {}
    for collective in collectives_of(evidence, rank):
        members = all_ranks if collective.group in _DEFAULT else groups.get(collective.group)
        if members is None:
            raise NotRepeatableError(f"the members of a group that rank {rank.rank} used are not known")
        operation = COLLECTIVES.get(collective.op)
        if operation is None:
            raise NotRepeatableError("the ranks made a call that the script has no form of")
        yield ScriptCall(
            operation=operation,
            group=_group(collective.group),
            members=members,
            elements=min(max(1, sum(prod(size) for size in collective.sizes[:1])), MOST_ELEMENTS),
            dtype=DTYPES.get(collective.dtypes[0] if collective.dtypes else "", "float32"),
            number=collective.seq,
            is_done=collective.retired,
        )


def _from_status_file(rank: RankEvidence, evidence: Evidence, all_ranks: Members) -> Iterator[ScriptCall]:
    if rank.status_file is None:
        raise NotRepeatableError(f"rank {rank.rank} left no record of its calls")
    counts: dict[Channel, int] = {}
    for call in _whole_steps(evidence, rank.status_file):
        script_call = _script_call(rank.rank, call, rank.status_file, all_ranks)
        if script_call is not None:
            counts[script_call.channel] = counts.get(script_call.channel, 0) + 1
            yield replace(script_call, number=counts[script_call.channel])


def _whole_steps(evidence: Evidence, status_file: StatusFile) -> Iterator[Call]:
    """Yield a rank's recorded calls, starting with the first step that is recorded in full on every rank."""
    firsts = [rank.status_file.calls[0] for rank in evidence.ranks if rank.status_file and rank.status_file.calls]
    since = max((call.step + 1 for call in firsts if call.number > 1), default=0)
    return (call for call in status_file.calls if call.step >= since)


def _script_call(rank: int, call: Call, status_file: StatusFile, all_ranks: Members) -> ScriptCall | None:
    """Convert a recorded call to a call in the reproduction script, or return None if the script does not need it."""
    if call.op in _SET_UP or call.op.startswith(protocol.WAIT):
        return None
    is_done, dtype = call.left_s is not None, DTYPES.get(call.dtype, "float32")
    elements = min(max(1, call.elements), MOST_ELEMENTS)
    if call.op in TRANSFERS:
        if call.peer is None:
            raise NotRepeatableError(f"rank {rank} named no peer in a transfer")
        pair = (rank, call.peer) if "send" in call.op else (call.peer, rank)
        return ScriptCall(
            operation=call.op, group="", members=pair, elements=elements, dtype=dtype, peer=call.peer, is_done=is_done
        )
    members = all_ranks if call.group in _DEFAULT else status_file.groups.get(call.group)
    operation = COLLECTIVES.get(call.op) or MAKERS.get(call.op)
    if operation is None or members is None:
        raise NotRepeatableError("the ranks made a call that the script has no form of, or in a group nobody knows")
    return ScriptCall(
        operation=operation,
        group=_group(call.group),
        members=members,
        elements=elements,
        dtype=dtype,
        root=call.peer if operation in ROOTED and call.peer != members[0] else None,
        is_done=is_done,
    )


def _group(name: str) -> str:
    return "" if name in _DEFAULT else name


def _first_number(channel: Channel, calls_of: Mapping[int, Sequence[ScriptCall]]) -> int | None:
    """Return the number of the first call to repeat, or None if the ranks never diverge."""
    transfer, _, members = channel
    of_rank = {
        rank: {call.number: call for call in calls_of.get(rank, ()) if call.channel == channel}
        for rank in dict.fromkeys(members)
    }
    numbers = sorted({number for calls in of_rank.values() for number in calls})
    start = known_since = max((min(calls) for calls in of_rank.values() if calls), default=0)
    for number in numbers:
        if number < known_since:
            continue
        calls = [of_rank[rank].get(number) for rank in of_rank]
        if not _calls_agree(calls, transfer=transfer):
            return start
        start = number
    return None


def _calls_agree(calls: Sequence[ScriptCall | None], *, transfer: bool) -> bool:
    """Return whether every rank finished this call, with equal arguments if it is a collective."""
    finished_calls = [call for call in calls if call is not None and call.is_done]
    if len(finished_calls) < len(calls):
        return False
    return transfer or len({(call.operation, call.elements, call.dtype, call.root) for call in finished_calls}) == 1


def script(calls: Mapping[int, Sequence[ScriptCall]], cause: str) -> str | None:
    """Return a script that repeats the calls of all ranks, or None if it would be too long."""
    texts = (
        _script_text({rank: rank_calls[:most] for rank, rank_calls in calls.items()}, cause)
        for most in _CALLS_OF_A_RANK
    )
    return next((text for text in texts if text.count("\n") <= MOST_LINES), None)


def _script_text(calls: Mapping[int, Sequence[ScriptCall]], cause: str) -> str:
    groups = sorted({(call.group, call.members) for rank_calls in calls.values() for call in rank_calls if call.group})
    rows = {rank: [_row(call, groups) for call in rank_calls] for rank, rank_calls in sorted(calls.items())}
    has_roots = any(call.root is not None for rank_calls in calls.values() for call in rank_calls)
    used = dict.fromkeys(call.operation for rank_calls in calls.values() for call in rank_calls)
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
        *(["    first = first if peer is None else peer"] if has_roots else []),
        *_branches(list(used)),
        "for work in started:",
        "    work.wait()",
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _row(call: ScriptCall, groups: Sequence[tuple[str, Members]]) -> tuple[str, int | None, int, str, int | None]:
    group = groups.index((call.group, call.members)) if call.group else None
    return (call.operation, group, call.elements, call.dtype, call.root if call.peer is None else call.peer)


def _branches(operations: Sequence[str]) -> list[str]:
    lines = []
    for number, operation in enumerate(operations):
        lines += [f'    {"elif" if number else "if"} operation == "{operation}":', f"        {STATEMENTS[operation]}"]
    return lines


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The contents of the `repro/` directory of an attempt."""

    command: str  # content of command.txt
    script: str | None
    no_script_reason: str  # why there is no script; empty with a script


def reproduction(spec: RunSpec, evidence: Evidence, outcome: Outcome, command: str) -> Reproduction | None:
    """Return the files that reproduce a failed or hung run of `command` (without secrets), or None."""
    if outcome.verdict.status not in (Status.FAIL, Status.HANG):
        return None
    text, why_not = _script(evidence, outcome)
    return Reproduction(command=_command_text(spec, command, text is not None), script=text, no_script_reason=why_not)


def _script(evidence: Evidence, outcome: Outcome) -> tuple[str | None, str]:
    replay = row_of(outcome.verdict.cause).replay
    if replay is Replay.NONE:
        return None, "the cause lies in no call to other ranks: command.txt repeats the program itself"
    if not any(rank.status_file or rank.collectives for rank in evidence.ranks):
        return None, "no call of any rank was recorded, and a script is made of calls"
    ranks_outside = ranks_outside_calls(evidence) if outcome.verdict.status is Status.HANG else ()
    if ranks_outside:
        return None, f"rank {ranks_outside[0]} was outside every recorded call, where a script of calls cannot bring it"
    all_have_recorder = all(rank.collectives for rank in evidence.ranks)
    try:
        calls = diverging_calls(evidence, from_python=replay is Replay.PYTHON_CALLS or not all_have_recorder)
    except NotRepeatableError as reason:
        return None, str(reason)
    if not _calls_differ(calls):
        return None, "the record holds no call in which the ranks part"
    text = script(calls, outcome.verdict.cause or "")
    return text, "" if text else f"the calls of {len(calls)} ranks do not fit into {MOST_LINES} lines"


def _calls_differ(calls: Mapping[int, Sequence[ScriptCall]]) -> bool:
    calls_by_rank = [
        [(call.operation, call.channel, call.elements, call.dtype, call.root) for call in rank_calls]
        for rank_calls in calls.values()
    ]
    return any(calls_of_rank != calls_by_rank[0] for calls_of_rank in calls_by_rank)


def _command_text(spec: RunSpec, command: str, scripted: bool) -> str:
    lines = ["# The program itself, without the harness:"]
    if spec.fault is not None:
        lines += ["# (its fault was planted by the harness and is not in this line: run spec.json for that)"]
    lines += [f"cd {shell_words([spec.cwd])}"] if spec.cwd else []
    line = " ".join(filter(None, (shell_line((), spec.env), command)))
    lines += [*where_to_set(line, "spec.json"), line]
    if scripted:
        lines += ["# The calls of its ranks alone:", f"torchrun --standalone --nproc-per-node={spec.ranks} repro.py"]
    return "\n".join(lines) + "\n"


NAME = "repro.py"
_UNBROKEN = "\0"  # replaces a blank at which the line must not be broken


def repro_script(spec: RunSpec, *, working_dir: str, about: str) -> str | None:
    """Return a script that repeats the launch without nsa-harness, or None if torchrun is not used."""
    if spec.launcher is Launcher.PLAIN:
        return None
    return "\n".join(_lines(spec, working_dir, about)) + "\n"


def repro_command(spec: RunSpec) -> str:
    return f"torchrun --standalone --nproc-per-node={spec.ranks} {NAME}"


def _lines(spec: RunSpec, working_dir: str, about: str) -> Iterator[str]:
    head, *words = spec.program
    module = head == "-m"
    program, args = (words[0], words[1:]) if module else (head, words)
    yield f'"""{_one_line(about)}'
    yield ""
    yield f"    {repro_command(spec)}"
    yield '"""'
    yield ""
    yield "import os"
    yield "import runpy"
    yield "import sys"
    if spec.fault is not None:
        yield "import torch"
    yield ""
    yield f"os.chdir({spec.cwd or working_dir!a})"
    yield f"os.environ.update({dict(spec.env)!a})"
    yield f"sys.argv[1:] = {_list(args)}"
    yield from _filled_in(args, dict(spec.env))
    if spec.fault is not None:
        # The program does not contain its planted fault, so the package plants it, as in the probe.
        yield "from nsa_harness.faults.plant import plant  # the fault of this scenario was planted on purpose"
        yield f"plant({json.dumps(asdict(spec.fault))!a})"
    if module:
        yield "sys.path.insert(0, os.getcwd())"
        yield f"runpy.run_module({program!a}, run_name='__main__', alter_sys=True)"
        return
    yield f"sys.argv[0] = {program!a}"
    yield f"sys.path[0] = os.path.dirname(os.path.abspath({program!a}))"
    yield f"runpy.run_path({program!a}, run_name='__main__')"


def _filled_in(args: list[str], env: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the script that fill in the launch's secrets from environment variables."""
    for variable in placeholders((*args, *env.values())):
        yield f"secret = os.environ[{variable!a}]  # export {variable}=...: the value is in a probe's spec.json"
        yield f"sys.argv = [word.replace('${variable}', secret) for word in sys.argv]"
        yield f"for name in {[*env]!a}:"
        yield f"    os.environ[name] = os.environ[name].replace('${variable}', secret)"


def _list(words: list[str]) -> str:
    body = textwrap.fill(
        " ".join(ascii(word).replace(" ", _UNBROKEN) + "," for word in words),
        110,
        break_long_words=False,
        break_on_hyphens=False,
    )
    body = body.replace(_UNBROKEN, " ")
    return f"[{body[:-1]}]" if "\n" not in body else "[\n" + textwrap.indent(body, "    ") + "\n]"


def _one_line(text: str) -> str:
    return ascii(text.replace(" \u00b7 ", ", "))[1:-1].replace('"', "'")[:200]


# The command to run next after a run that reached its deadline while it was still active.

_RESERVE = 1.25  # the proposed deadline is this many times the projected duration, because steps vary
_SLOWED_BY = (Cause.STRAGGLER, Cause.INPUT_BOUND)  # findings that say why a run is slow


def after_slow(spec: RunSpec, evidence: Evidence, codes: Collection[str]) -> str | None:
    """Return the command to run after a slow run, or None if the run was not slow.

    `codes` are the codes of the run's findings. If one of them says why the run is slow, the command explains it.
    Otherwise the command runs the script again, with a deadline that suffices at the measured rate. If the number of
    planned steps is unknown, or if a command line cannot repeat the launch, the command explains the cause `slow`.
    """
    if Cause.SLOW not in codes or evidence.ending is not Ending.DEADLINE:
        return None
    if reason := next((cause for cause in _SLOWED_BY if cause in codes), None):
        return f"nsa-harness explain {reason}"
    speed, script = pace(evidence), spec.program[0] if spec.program else ""
    is_whole = spec.launcher is Launcher.TORCHRUN and not (spec.env or spec.cwd or spec.fault)
    if speed is None or speed.left_s is None or not (is_whole and script.endswith(".py")):
        return f"nsa-harness explain {Cause.SLOW}"
    deadline_s = 10 * math.ceil(_RESERVE * (evidence.ended_s + speed.left_s) / 10)
    python = ["--python", spec.python] if spec.python else []
    arguments = ["--", *spec.program[1:]] if spec.program[1:] else []
    options = ["--ranks", str(spec.ranks), *python, f"limits.deadline_s={deadline_s}"]
    return shlex.join(["nsa-harness", "run", script, *options, *arguments])
