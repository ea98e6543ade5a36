"""Reads and writes comm.lock files, and reads what the ranks of a stored attempt communicated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nsa_harness import protocol
from nsa_harness.core.comparison.communication import (
    Change,
    ChangeKind,
    Group,
    Lock,
    Meshes,
    Operation,
    Role,
    Steps,
    bytes_of,
    changes,
    folded,
    recorded_steps,
    role_of,
    roles,
    steady_step,
)
from nsa_harness.core.evidence.flight import MAX_BYTES, parse_dump
from nsa_harness.core.evidence.status_file import parse as parse_board
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Fact, Facts
from nsa_harness.core.verdict.group_waits import TRANSFERS
from nsa_harness.errors import ScenarioError
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.texts.words import plural

VERSION = 1
_MOST_CALLS = 100_000  # of a repeated block that is read
SUFFIX = ".comm.lock"
_BELOW_PYTHON, _ANY = "(below Python)", "any"
_HEAD = f"""comm.lock {VERSION}
# What each rank communicates in one training step, recorded by `nsa-harness lock`. Review changes to it like code.
# Each line of a step: how often, group, operation, dtype, elements of this rank, call site. Comments do not count.
"""
_ENTRIES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the latter before torch 2.10
_MOST_ENTRIES = "20000"  # of the flight recorder: as many as are read


def with_large_recorder(spec: RunSpec) -> RunSpec:
    """Return the launch with a record of each transfer, and a flight recorder of long steps unless it sets a size."""
    env = {**dict.fromkeys(_ENTRIES, _MOST_ENTRIES), protocol.ENV_TRANSFERS: "1", **dict(spec.env)}
    return replace(spec, env=tuple(sorted(env.items())))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the ranks of an attempt communicated in one step.

    `is_steady`: the step before was the same. `step`: None if no step was recorded completely, for the given `reason`.
    """

    step: int | None
    is_steady: bool
    ranks: tuple[Steps, ...]
    meshes: Meshes
    reason: str = ""

    @property
    def operations(self) -> Mapping[int, tuple[Operation, ...]]:
        """The operations of each rank in this step."""
        return {} if self.step is None else {rank: steps[self.step] for rank, steps in enumerate(self.ranks)}

    @property
    def roles(self) -> tuple[Role, ...]:
        return roles(self.operations, self.meshes)


def recorded(attempt: AttemptDir, ranks: int) -> Recorded:
    """Return what the ranks of a judged attempt communicated in the last step that repeats, or else in the last one."""
    files = {}
    try:
        for rank in range(ranks):
            folder, read = attempt.rank(rank), attempt.directory.read_whole_file
            status_file = parse_board(read(folder / "board", protocol.STATUS_FILE_SIZE), 0)
            files[rank] = status_file, parse_dump(read(folder / "flight.json", MAX_BYTES))
    except (OSError, ValueError) as error:
        why = f"rank {rank} left no record of its collectives: {error}"
        return Recorded(step=None, is_steady=False, ranks=(), meshes={}, reason=why)
    meshes = {rank: dict(status_file.mesh) for rank, (status_file, _) in files.items()}
    steps = tuple(recorded_steps(status_file, flight, meshes) for status_file, flight in files.values())
    step, is_steady = steady_step(steps)
    reason = "" if step is not None else (
        "no optimizer step ended on every rank" if not all(status_file.steps_s for status_file, _ in files.values())
        else "a step has more calls than the ranks record (1024 from Python, 20000 in all)"
    )  # fmt: skip
    return Recorded(step=step, is_steady=is_steady, ranks=steps, meshes=meshes, reason=reason)


def schedule_misses(attempt: AttemptDir, spec: RunSpec) -> tuple[Facts, ...]:
    """Return the facts of each difference between an attempt and the comm.lock file that it is compared with.

    Roles whose differences are the same share one. Empty if there is no such file.
    """
    if spec.expect.communication is None:
        return ()
    file = spec.expect.communication.file
    found = recorded(attempt, spec.ranks)
    if found.step is None:
        return ({"variant": "no communication", "file": file, "reason": found.reason},)
    lock = parse_lock(spec.expect.communication.text, file)
    ranks: dict[tuple[tuple[Change, ...], int, int], list[int]] = {}
    for rank, operations in found.operations.items():
        before = role_of(rank, lock.roles, found.meshes).operations
        if not lock.has_peers:
            before, operations = (
                tuple(one for one in side if one.op not in TRANSFERS) for side in (before, operations)
            )
        key = changes(before, operations), bytes_of(before), bytes_of(operations)
        ranks.setdefault(key, []).append(rank)
    return tuple(
        {
            "variant": "communication", "file": file, "number": found.step, "steady": found.is_steady,
            "who": "all" if len(group) == spec.ranks else ", ".join(map(str, group)),
            "bytes_before": before, "bytes_after": after, "changes": tuple(map(change_facts, found_changes)),
            "counts": tuple(
                {"kind": kind.value, "count": count}
                for kind in ChangeKind
                if (count := sum(change.count for change in found_changes if change.kind is kind))
            ),
        }
        for (found_changes, before, after), group in ranks.items()
        if found_changes
    )  # fmt: skip


def varying_calls(found: Recorded) -> Iterator[str]:
    """Yield a line for each call that differs between the last two recorded steps, on the first rank where one does."""
    for steps in found.ranks if found.step is not None and not found.is_steady else ():
        earlier = max((step for step in steps if step < (found.step or 0)), default=None)
        if earlier is None:
            yield "  only one step was recorded completely; a lock needs two"
            return
        if differing := changes(steps[earlier], steps[found.step or 0]):
            yield f"  from step {earlier} to step {found.step}:"
            for change in differing:
                yield from (
                    f"  {sign}{_line(change.count, one)}"
                    for sign, one in (("-", change.before), ("+", change.after))
                    if one
                )
            return


def change_facts(change: Change) -> Facts:
    """Return a change of a schedule as facts, with its kind, how often it occurs, and the call before and after it."""
    sides = {"before": change.before, "after": change.after}
    facts: dict[str, Fact] = {"kind": change.kind.value, "count": change.count}
    return facts | {
        side: {
            "group": one.group.names[0], "op": one.label, "dtype": one.dtype,
            "elements": _ANY if one.elements is None else one.elements, "site": one.site,
        }
        for side, one in sides.items()
        if one
    }  # fmt: skip


def lock_text(lock: Lock) -> str:
    """Return the text of a comm.lock file."""
    head = f"{_HEAD}ranks {lock.ranks}{', with peers' if lock.has_peers else ''}\n"
    return head + "".join(f"{line}\n" for role in lock.roles for line in _role_lines(role))


def _totals(operations: Sequence[Operation]) -> str:
    return f"{plural(len(operations), 'call')}, {bytes_of(operations):,} bytes"


def _role_lines(role: Role) -> Iterator[str]:
    yield f"\nrole {role.who}: {_totals(role.operations)}"
    for group in sorted({operation.group for operation in role.operations}, key=lambda group: group.names):
        own = [operation for operation in role.operations if operation.group == group]
        yield f"  group {' = '.join(group.names)}: {group.size} ranks, {_totals(own)}"
    yield "  step:"
    width = max([14, *(len(one.label) for one in role.operations)])
    for times, block in folded(role.operations):
        if len(block) == 1:
            yield _line(times, block[0], width=width)
            continue
        yield f"    repeat {times} x"
        yield from (_line(count, one, "    |", width) for count, (one,) in folded(block, longest=1))


def _line(times: int, one: Operation, indent: str = "   ", width: int = 14) -> str:
    size = _ANY if one.elements is None else f"{one.elements:,}"
    text = f"{indent} {times:>3} x {one.group.names[0]:<6} {one.label:<{width}} {one.dtype:<9} {size:>13}  "
    return f"{text}{one.site or _BELOW_PYTHON}" + (f"  # line {one.line}" if one.line else "")


_TOTALS = r"(?P<calls>\d+) calls?, (?P<bytes>[\d,]+) bytes"
_PEER = r"(?:next|previous|[+-]\d+|rank 0|last|any)(?: in \S+)?"
_FORMS = {
    "ranks": re.compile(r"ranks (?P<ranks>\d{1,6})(?P<peers>, with peers)?"),
    "role": re.compile(rf"role (?P<who>all|[\w.]+=\d+|\d+(?:-\d*)?(?:,\d+(?:-\d*)?)*): {_TOTALS}"),
    "group": re.compile(rf"  group (?P<names>\S+(?: = \S+)*): (?P<size>\d+) ranks, {_TOTALS}"),
    "step": re.compile(r"  step:"),
    "repeat": re.compile(r"    repeat (?P<times>\d{1,5}) x"),
    "call": re.compile(
        r"   (?P<inner> \|)? {1,3}(?P<times>\d{1,5}) x (?P<group>\S+) +(?P<op>\w+)"
        rf"(?: (?:to|from) (?P<peer>{_PEER}(?: = {_PEER})*))? +(?P<dtype>\w+)"
        r" +(?P<size>[\d,]+|any)  (?P<site>\S.*)"
    ),
}


@dataclass
class _Parsed:
    """The part of a comm.lock file that has been read: one role. `totals` has the line and text of each total."""

    who: str
    groups: dict[str, Group] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    totals: list[tuple[int, str, str]] = field(default_factory=list)  # (line, group or "", calls and bytes)


def parse_lock(text: str, origin: str) -> Lock:
    """Return the content of a comm.lock file. Raise ScenarioError, with all mistakes, if it is damaged or edited.

    `origin`: the name of the file.
    """
    lines = text.splitlines()
    if not lines or lines[0] != f"comm.lock {VERSION}":
        found = lines[0][:40] if lines else ""
        raise ScenarioError([f"{origin}:1: expected the line `comm.lock {VERSION}`, got {found!r}"])
    mistakes: list[str] = []
    ranks, has_peers, parsed, block, times = 0, False, list[_Parsed](), list[Operation](), 0
    for number, line in enumerate([*lines[1:], ""], start=2):
        content = re.sub(r"\s*#.*", "", line).rstrip()
        form, match = next(
            ((name, match) for name, form in _FORMS.items() if (match := form.fullmatch(content))), ("", None)
        )
        if times and not (form == "call" and match and match["inner"]) and (content or number > len(lines)):
            if len(block) * times > _MOST_CALLS:
                mistakes.append(f"{origin}:{number}: the repeated block above has more than {_MOST_CALLS:,} calls")
            else:
                parsed[-1].operations += block * times
            block, times = [], 0
        if not content:
            continue
        role = parsed[-1] if parsed else None
        if match is None or (form not in ("ranks", "role") and role is None):
            mistakes.append(f"{origin}:{number}: this line does not belong in a comm.lock file: {content.strip()[:60]}")
        elif form == "ranks":
            ranks, has_peers = int(match["ranks"]), match["peers"] is not None
        elif form == "role":
            parsed.append(
                _Parsed(
                    match["who"],
                    totals=[(number, "", f"{plural(int(match['calls']), 'call')}, {match['bytes']} bytes")],
                )
            )
        elif role and form == "group":
            names = tuple(match["names"].split(" = "))
            role.groups[names[0]] = Group(names=names, size=int(match["size"]))
            role.totals.append((number, names[0], f"{plural(int(match['calls']), 'call')}, {match['bytes']} bytes"))
        elif form == "repeat":
            times = int(match["times"])
        elif role and form == "call":
            if match["group"] not in role.groups:
                mistakes.append(f"{origin}:{number}: the role has no group {match['group']}")
                continue
            site = match["site"]
            one = Operation(
                group=role.groups[match["group"]], op=match["op"], dtype=match["dtype"],
                elements=None if match["size"] == _ANY else int(match["size"].replace(",", "")),
                site="" if site == _BELOW_PYTHON else site,
                peer=tuple(match["peer"].split(" = ")) if match["peer"] else (),
            )  # fmt: skip
            (block if times else role.operations).extend([one] * int(match["times"]))
    for role in parsed if not mistakes else ():
        for number, name, total in role.totals:
            own = [one for one in role.operations if not name or one.group.names[0] == name]
            if (sum_of_lines := _totals(own)) != total:
                mistakes.append(
                    f"{origin}:{number}: {total} are not what the lines of the step add up to: {sum_of_lines}"
                )
    if not mistakes and not (ranks and parsed):
        mistakes.append(f"{origin}:{len(lines)}: the file ends before a role")
    if mistakes:
        raise ScenarioError(
            [*mistakes, "A comm.lock file is not edited by hand. Write it again with `nsa-harness lock`."]
        )
    read = tuple(Role(who=one.who, operations=tuple(one.operations)) for one in parsed)
    return Lock(ranks=ranks, roles=read, has_peers=has_peers)
