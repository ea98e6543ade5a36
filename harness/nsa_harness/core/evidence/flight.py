"""Read dumps of torch's flight recorder, as JSON or as a pickle.

torch's own analyser is not used, because it fails on dumps of gloo.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nsa_harness.core.evidence.evidence import Collective, Frame, RankSnapshot

_MAX_INSTRUCTIONS = 4_000_000  # a full recorder of 2000 entries with frames has about 500 000
# None of these instructions imports or calls anything, so a pickle with only these instructions is safe to load.
_SAFE_INSTRUCTIONS = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINUNICODE", "SHORT_BINUNICODE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET",
})  # fmt: skip

# The recorder uses the C++ names of dtypes; the probe and most people use the Python names.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
_UNREADABLE = (
    pickle.PickleError, ValueError, LookupError, TypeError, AttributeError, EOFError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip


def plain_value(data: bytes) -> Any:
    """Return the data in a pickle without importing or calling anything named in the pickle.

    Raise ValueError, with the position in bytes, for any data but dicts, lists, tuples, strings and numbers.
    """
    at: int | None = 0
    try:
        for count, (instruction, argument, position) in enumerate(pickletools.genops(io.BytesIO(data))):
            at = position
            if count >= _MAX_INSTRUCTIONS:
                raise ValueError(f"more than {_MAX_INSTRUCTIONS} instructions")
            if instruction.name not in _SAFE_INSTRUCTIONS:
                raise ValueError(f"{instruction.name} is no instruction for plain values")
            # Unpickling allocates memory for every memo number up to the highest one in the pickle.
            if instruction.name == "LONG_BINPUT" and (argument or 0) > len(data):
                raise ValueError(f"number {argument} for one of few values")
        return pickle.loads(data)
    except _UNREADABLE as error:
        raise ValueError(f"byte {at} of {len(data)}: {error}") from error


MAX_BYTES = 64 << 20
_MAX_PER_GROUP = 16  # latest collectives, and open collectives, that `essential_collectives` keeps per group
_MAX_ENTRIES = 20_000  # latest entries that are read; torch stores 2000 by default
_MAX_GROUPS = 4096
_MAX_TENSORS = 64  # tensors per coalesced operation
_MAX_RANKS = 1 << 16
_MAX_TEXT = 200
_MAX_FRAMES = 64
_PICKLE_START = b"\x80"


@dataclass(frozen=True, kw_only=True)
class FlightDump:
    """The content of a rank's flight recorder dump."""

    collectives: tuple[Collective, ...]
    transfers: tuple[Collective, ...]  # sends and receives, which are numbered separately from the collectives
    groups: dict[str, tuple[int, ...]]  # process group -> global ranks of its members, if the dump has them (NCCL)
    # (group, number of the collective) -> the stack that entered it, innermost first; empty for a JSON dump
    frames: dict[tuple[str, int], tuple[Frame, ...]] = field(default_factory=dict)


def parse_dump(data: bytes) -> FlightDump:
    """Return the content of a flight recorder dump. Raise ValueError if it is invalid."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"not a flight recorder dump: {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        dump = plain_value(data) if data[:1] == _PICKLE_START else json.loads(data)
        return _flight_dump(_dict(dump, "the top"))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a flight recorder dump: {error}") from error


def parse_flight(text: str) -> tuple[Collective, ...]:
    """Return the collectives in a JSON flight recorder dump, oldest first. Raise ValueError if `text` is not a dump."""
    return parse_dump(text.encode("utf-8", "replace")).collectives


def essential_collectives(
    collectives: Sequence[Collective], max_latest: int = _MAX_PER_GROUP
) -> tuple[Collective, ...]:
    """Return only the collectives that show who waits for whom: each group's latest and its oldest incomplete ones."""
    by_group: dict[str, list[Collective]] = {}
    for collective in collectives:
        by_group.setdefault(collective.group, []).append(collective)
    essential = {
        (collective.group, collective.seq)
        for group in by_group.values()
        for collective in [
            *group[-max_latest:],
            *[collective for collective in group if not collective.retired][:_MAX_PER_GROUP],
        ]
    }
    return tuple(collective for collective in collectives if (collective.group, collective.seq) in essential)


def drop_incomplete_recorders(snapshots: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
    """Remove the flight recorders of ranks without a status file, unless every such rank has a recorder.

    If only some recorders could be read, the ranks without a recorder would seem to have skipped collectives.
    """
    without_status_file = [rank for rank in snapshots if rank.status_file is None and rank.process is not None]
    if all(rank.collectives for rank in without_status_file):
        return tuple(snapshots)
    return tuple(replace(rank, collectives=()) if rank in without_status_file else rank for rank in snapshots)


def missing_numbers(collectives: Sequence[Collective]) -> Iterator[tuple[str, int, int]]:
    """Yield each gap in the sequence numbers of one rank's collectives, as (group, first, last).

    A flight recorder only overwrites its oldest entries, so such a gap is unexpected. A gap after a collective that has
    not completed is ignored, because `essential_collectives` drops completed collectives after it.
    """
    latest: dict[str, Collective] = {}
    for collective in sorted(collectives, key=lambda collective: (collective.group, collective.seq)):
        before = latest.get(collective.group)
        if before is not None and before.retired and collective.seq > before.seq + 1:
            yield collective.group, before.seq + 1, collective.seq - 1
        latest[collective.group] = collective


def _flight_dump(dump: Mapping[Any, Any]) -> FlightDump:
    entries = _list(dump.get("entries"), "entries")[-_MAX_ENTRIES:]
    collectives: list[Collective] = []
    transfers: list[Collective] = []
    frames: dict[tuple[str, int], tuple[Frame, ...]] = {}
    for number, entry in enumerate(entries):
        where = f"entry {number}"
        point_to_point = _is_true(_dict(entry, where).get("is_p2p"))
        collective = _collective(entry, where, point_to_point)
        (transfers if point_to_point else collectives).append(collective)
        if not point_to_point:
            frames[collective.group, collective.seq] = _frames(entry, where)
    return FlightDump(
        collectives=tuple(collectives),
        transfers=tuple(transfers),
        groups=_groups(_dict(dump.get("pg_config") or {}, "pg_config")),
        frames={key: entered_by for key, entered_by in frames.items() if entered_by},
    )


def _frames(entry: Mapping[Any, Any], where: str) -> tuple[Frame, ...]:
    where = f"{where}: frames"
    frames = [_dict(frame, where) for frame in _list(entry.get("frames"), where)[:_MAX_FRAMES]]
    return tuple(
        Frame(
            file=_string(frame.get("filename"), where),
            line=_integer(frame.get("line"), where),
            function=_string(frame.get("name"), where),
        )
        for frame in frames
    )


def _collective(entry: Mapping[Any, Any], where: str, point_to_point: bool) -> Collective:
    group = _list(entry.get("process_group"), f"{where}: process_group")
    name = _string(entry.get("profiling_name"), f"{where}: profiling_name")
    state = entry.get("state")
    retired = _is_true(entry.get("retired")) or state == "completed"
    return Collective(
        group=_string(group[0] if group else None, f"{where}: process_group"),
        seq=_integer(
            entry.get("p2p_seq_id", 0) if point_to_point else entry.get("collective_seq_id"), f"{where}: number"
        ),
        op=name.rpartition(":")[2],
        sizes=tuple(_sizes(entry, where)),
        dtypes=tuple(
            _dtype(_string(dtype, f"{where}: input_dtypes"))
            for dtype in _list(entry.get("input_dtypes"), f"{where}: input_dtypes")[:_MAX_TENSORS]
        ),
        retired=retired,
        created_ns=_integer(entry.get("time_created_ns"), f"{where}: time_created_ns"),
        # gloo records the state "scheduled" until the collective completes, so it does not show whether it has started.
        started=None if name.startswith("gloo:") else retired or state == "started",
    )


def _dtype(cpp_name: str) -> str:
    return _DTYPES.get(cpp_name, cpp_name)


def _sizes(entry: Mapping[Any, Any], where: str) -> list[tuple[int, ...]]:
    where = f"{where}: input_sizes"
    tensors = _list(entry.get("input_sizes"), where)[:_MAX_TENSORS]
    return [tuple(_integer(size, where) for size in _list(sizes, where)[:_MAX_TENSORS]) for sizes in tensors]


def _groups(configuration: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    members_of = {}
    for name, about in list(configuration.items())[:_MAX_GROUPS]:
        where = f"pg_config {_string(name, 'pg_config')!r}"
        ranks = _dict(about, where).get("ranks")
        if isinstance(ranks, str):
            ranks = json.loads(ranks)
        members = tuple(_integer(rank, where) for rank in _list(ranks, where)[:_MAX_RANKS])
        # gloo records one group without a name and without ranks.
        if members:
            members_of[str(name)] = members
    return members_of


# Each function below returns one value of an untrusted document, or raises an error that names the field.


def _dict(value: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is {_repr_of(value)}, no object")
    return value


def _list(value: object, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{where} is {_repr_of(value)}, no list")
    return value


def _string(value: object, where: str) -> str:
    """Return a string or integer as a string, or raise TypeError, naming `where`, for any other value."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{where} is {_repr_of(value)}, no text")
    return str(value)[:_MAX_TEXT]


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{where} is {_repr_of(value)}, no whole number")
    number = int(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{where} has more than 64 bits")
    return number


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, (str, int)) and str(value).lower() in ("true", "1"))


def _repr_of(value: object) -> str:
    scalar = value is None or isinstance(value, (bool, float, str))
    return repr(value)[:40] if scalar else type(value).__name__
