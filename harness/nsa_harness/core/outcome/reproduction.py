"""The reproduction of a run that failed or hung: its bare command line, and a script where calls alone repeat it.

Of a bisection a script that runs the program as the failing probe did, without the harness watching.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pprint import pformat

from nsa_harness import protocol
from nsa_harness.core.diagnosis.causes import Replay, row_of
from nsa_harness.core.diagnosis.context import collectives_of
from nsa_harness.core.evidence.evidence import Call, Evidence, RankEvidence, StatusFile
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.redaction import placeholders, shell_line, typed, where_to_set
from nsa_harness.core.report import Outcome, Status

MOST_ELEMENTS = 1 << 24
MOST_LINES = 60
_CALLS_OF_A_RANK = (12, 8, 5, 3)  # tried in this order until the script fits

# Names of the flight recorder and of Python, each with the operation of the script.
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

# In terms of the script's names: tensor, where (the group), first (the root; its first member), size, peer, started.
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
Channel = tuple[bool, str, Members]  # a transfer?


@dataclass(frozen=True, kw_only=True)
class Made:
    """One call as a script can make it."""

    operation: str  # of `operations`
    group: str  # tells groups apart, and never stands in a script; empty for the one of all ranks
    members: Members  # of its group; of a transfer sender and receiver
    elements: int
    dtype: str
    peer: int | None = None
    root: int | None = None  # of a collective, where that is not the first member of its group
    number: int = 0  # in its channel, from 1
    done: bool = True

    @property
    def channel(self) -> Channel:
        """What is counted together: the collectives of a group, the transfers from one rank to another."""
        return self.peer is not None, self.group, self.members


class NotRepeatableError(Exception):
    """A call that no script of ours can make; the text says which."""


def parting_calls(evidence: Evidence, *, from_python: bool) -> dict[int, tuple[Made, ...]]:
    """The calls of each rank, without those before the last agreement of their channel, in the order of the calls.

    From the flight recorder, which has DDP's own ones too, or as they were called from Python. Raises
    NotRepeatableError.
    """
    everybody = tuple(range(evidence.world_size))
    source = _from_board if from_python else _from_recorder
    made = {rank.rank: tuple(source(rank, evidence, everybody)) for rank in evidence.ranks}
    begins = {channel: _begin(channel, made) for channel in {one.channel for calls in made.values() for one in calls}}
    return {
        rank: tuple(one for one in calls if (begin := begins[one.channel]) is not None and one.number >= begin)
        for rank, calls in made.items()
    }


def stands_elsewhere(evidence: Evidence) -> Members:
    """Ranks that neither left by themselves nor stand in a call to others: what held them is in no such record."""
    return tuple(rank.rank for rank in evidence.ranks if not (_left(rank) or _stands_in_a_call(rank, evidence)))


def _left(rank: RankEvidence) -> bool:
    return rank.raised is not None or (rank.exit is not None and not rank.exit.by_us)


def _stands_in_a_call(rank: RankEvidence, evidence: Evidence) -> bool:
    calls = rank.board.calls if rank.board else ()
    inside = any(call.left_s is None and call.op not in _SET_UP for call in calls)
    return inside or any(not one.retired for one in collectives_of(evidence, rank))


def _from_recorder(rank: RankEvidence, evidence: Evidence, everybody: Members) -> Iterator[Made]:
    groups = rank.board.groups if rank.board else {}
    for one in collectives_of(evidence, rank):
        members = everybody if one.group in _DEFAULT else groups.get(one.group)
        if members is None:
            raise NotRepeatableError(f"the members of a group that rank {rank.rank} used are not known")
        operation = COLLECTIVES.get(one.op)
        if operation is None:
            raise NotRepeatableError("the ranks made a call that the script has no form of")
        yield Made(
            operation=operation,
            group=_group(one.group),
            members=members,
            elements=min(max(1, sum(prod(size) for size in one.sizes[:1])), MOST_ELEMENTS),
            dtype=DTYPES.get(one.dtypes[0] if one.dtypes else "", "float32"),
            number=one.seq,
            done=one.retired,
        )


def _from_board(rank: RankEvidence, evidence: Evidence, everybody: Members) -> Iterator[Made]:
    if rank.board is None:
        raise NotRepeatableError(f"rank {rank.rank} left no record of its calls")
    counts: dict[Channel, int] = {}
    for call in _whole_steps(evidence, rank.board):
        one = _called(rank.rank, call, rank.board, everybody)
        if one is not None:
            counts[one.channel] = counts.get(one.channel, 0) + 1
            yield replace(one, number=counts[one.channel])


def _whole_steps(evidence: Evidence, board: StatusFile) -> Iterator[Call]:
    """From the first step that every rank still remembers whole: what was overwritten would shift the numbers."""
    firsts = [rank.board.calls[0] for rank in evidence.ranks if rank.board and rank.board.calls]
    since = max((call.step + 1 for call in firsts if call.number > 1), default=0)
    return (call for call in board.calls if call.step >= since)


def _called(rank: int, call: Call, board: StatusFile, everybody: Members) -> Made | None:
    """None for what sets up, and for a wait, whose call stands in the record itself."""
    if call.op in _SET_UP or call.op.startswith(protocol.WAIT):
        return None
    done, dtype = call.left_s is not None, DTYPES.get(call.dtype, "float32")
    elements = min(max(1, call.elements), MOST_ELEMENTS)
    if call.op in TRANSFERS:
        if call.peer is None:
            raise NotRepeatableError(f"rank {rank} named no peer in a transfer")
        pair = (rank, call.peer) if "send" in call.op else (call.peer, rank)
        return Made(
            operation=call.op, group="", members=pair, elements=elements, dtype=dtype, peer=call.peer, done=done
        )
    members = everybody if call.group in _DEFAULT else board.groups.get(call.group)
    operation = COLLECTIVES.get(call.op) or MAKERS.get(call.op)
    if operation is None or members is None:
        raise NotRepeatableError("the ranks made a call that the script has no form of, or in a group nobody knows")
    return Made(
        operation=operation,
        group=_group(call.group),
        members=members,
        elements=elements,
        dtype=dtype,
        root=call.peer if operation in ROOTED and call.peer != members[0] else None,
        done=done,
    )


def _group(name: str) -> str:
    return "" if name in _DEFAULT else name


def _begin(channel: Channel, made: Mapping[int, Sequence[Made]]) -> int | None:
    """The number of the last call that all members made alike and finished; None where they agree to the end."""
    transfer, _, members = channel
    of_rank = {
        rank: {one.number: one for one in made.get(rank, ()) if one.channel == channel}
        for rank in dict.fromkeys(members)
    }
    numbers = sorted({number for calls in of_rank.values() for number in calls})
    known_since = max((min(calls) for calls in of_rank.values() if calls), default=0)
    begin = known_since
    for number in numbers:
        if number < known_since:
            continue
        calls = [of_rank[rank].get(number) for rank in of_rank]
        if not _agree(calls, transfer=transfer):
            return begin
        begin = number
    return None


def _agree(calls: Sequence[Made | None], *, transfer: bool) -> bool:
    there = [one for one in calls if one is not None and one.done]
    if len(there) < len(calls):
        return False
    return transfer or len({(one.operation, one.elements, one.dtype, one.root) for one in there}) == 1


def script(calls: Mapping[int, Sequence[Made]], cause: str) -> str | None:
    """The whole text; None where the ranks did too many different things for a screen."""
    texts = (_script_text({rank: made[:most] for rank, made in calls.items()}, cause) for most in _CALLS_OF_A_RANK)
    return next((text for text in texts if text.count("\n") <= MOST_LINES), None)


def _script_text(calls: Mapping[int, Sequence[Made]], cause: str) -> str:
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
    """None for what neither failed nor hung. `command`: the program's own command line, redacted as `spec` is."""
    if outcome.verdict.status not in (Status.FAIL, Status.HANG):
        return None
    text, why_not = _script(evidence, outcome)
    return Reproduction(command=_command_text(spec, command, text is not None), script=text, why_not=why_not)


def _script(evidence: Evidence, outcome: Outcome) -> tuple[str | None, str]:
    replay = row_of(outcome.verdict.cause).replay
    if replay is Replay.NONE:
        return None, "the cause lies in no call to other ranks: command.txt repeats the program itself"
    if not any(rank.board or rank.collectives for rank in evidence.ranks):
        return None, "no call of any rank was recorded, and a script is made of calls"
    elsewhere = stands_elsewhere(evidence) if outcome.verdict.status is Status.HANG else ()
    if elsewhere:
        return None, f"rank {elsewhere[0]} was outside every recorded call, where a script of calls cannot bring it"
    recorded = all(rank.collectives for rank in evidence.ranks)
    try:
        calls = parting_calls(evidence, from_python=replay is Replay.PYTHON_CALLS or not recorded)
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


def _command_text(spec: RunSpec, command: str, scripted: bool) -> str:
    lines = ["# The program itself, without the harness:"]
    if spec.fault is not None:
        lines += ["# (its fault was planted by the harness and is not in this line: run spec.json for that)"]
    lines += [f"cd {typed([spec.cwd])}"] if spec.cwd else []
    line = " ".join(filter(None, (shell_line((), spec.env), command)))
    lines += [*where_to_set(line, "spec.json"), line]
    if scripted:
        lines += ["# The calls of its ranks alone:", f"torchrun --standalone --nproc-per-node={spec.ranks} repro.py"]
    return "\n".join(lines) + "\n"


NAME = "repro.py"
_HELD = "\0"  # in place of a blank where no line may break


def repro_script(spec: RunSpec, *, working_dir: str, about: str) -> str | None:
    """None for a launch that is no Python program under torchrun: its command is all there is."""
    if spec.launcher is Launcher.PLAIN:
        return None
    return "\n".join(_lines(spec, working_dir, about)) + "\n"


def repro_command(spec: RunSpec) -> str:
    return f"torchrun --standalone --nproc-per-node={spec.ranks} {NAME}"


def _lines(spec: RunSpec, working_dir: str, about: str) -> Iterator[str]:
    """All that comes from outside is told by `ascii`: a literal of plain characters, whatever it holds."""
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
        # A planted fault is no part of the program: the package plants it, as it did in the probe.
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
    """What was taken out of the words and the environment, which whoever runs the script has to know."""
    for variable in placeholders((*args, *env.values())):
        yield f"secret = os.environ[{variable!a}]  # export {variable}=...: the value is in a probe's spec.json"
        yield f"sys.argv = [word.replace('${variable}', secret) for word in sys.argv]"
        yield f"for name in {[*env]!a}:"
        yield f"    os.environ[name] = os.environ[name].replace('${variable}', secret)"


def _list(words: list[str]) -> str:
    """Wrapped, to keep a long command on a screen. A literal holds no blank that a line could break at."""
    body = textwrap.fill(
        " ".join(ascii(word).replace(" ", _HELD) + "," for word in words),
        110,
        break_long_words=False,
        break_on_hyphens=False,
    )
    body = body.replace(_HELD, " ")
    return f"[{body[:-1]}]" if "\n" not in body else "[\n" + textwrap.indent(body, "    ") + "\n]"


def _one_line(text: str) -> str:
    return ascii(text.replace(" \u00b7 ", ", "))[1:-1].replace('"', "'")[:200]
