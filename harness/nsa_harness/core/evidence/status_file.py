"""Read the status files in which processes record their progress.

The observed process may be writing to its file at the same time, so records that are inconsistent are skipped.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import (
    Call,
    CallCount,
    CaughtException,
    DataLoaderProgress,
    ForwardMode,
    Frame,
    ModuleCall,
    ProgressEvent,
    StatusFile,
    StepForwards,
    StoreKeyWrites,
)
from nsa_harness.core.evidence.rank_ranges import read_ranks
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.report import Place

_NS = 1_000_000_000
_STEP_DIGITS = 12
_AGAIN = re.compile(r"[0-9]+ ([0-9]{10}) ([0-9]{10}) ([0-9]{10})")
_HANDLED = re.compile(r"([01])([01]) [0-9.]+ (.*)", re.DOTALL)
_COORDINATE = re.compile(r"([^ =]{1,40})=([0-9]{1,7})(?= |$)")

_MAX_CHAIN = 64  # frames
_STEPS_OF_FORWARDS = 3  # if two ranks are one step apart: the step that both did, and the one before
_GRADIENTS = {protocol.CALL_GRADIENTS: True, protocol.CALL_NO_GRADIENTS: False}

_Clock = Callable[[int], float]  # from nanoseconds to seconds since the launch


def parse(data: bytes, launched_ns: int, newest_calls: int = protocol.CALLS) -> StatusFile:
    """Return the content of a status file. Raise ValueError if `data` is not that of a status file.

    Times are in seconds since `launched_ns`. Only the latest `newest_calls` calls are read. If this is not the maximum,
    the entered modules are not read either, because a frequent reader only needs the progress. Inconsistent records are
    skipped.
    """
    pid, rank, world_size, created_ns, layout = _identity(data)
    data = _as_layout_3(data) if layout == protocol.LAYOUT_2 else data

    def clock(at_ns: int) -> float:
        return (at_ns - launched_ns) / _NS

    def clock_if_set(at_ns: int) -> float | None:
        return clock(at_ns) if at_ns else None

    realtime_ns = protocol.CLOCK.unpack_from(data, protocol.CLOCK_AT)[0]
    strings = _strings(data)
    steps = _steps(data)
    calls = _ring(data, protocol.CALL, protocol.CALLS_AT, protocol.CALLS)
    facts = _facts(data, strings)
    chains = _chains(data, strings)
    mode = protocol.MODE.unpack_from(data, protocol.MODE_AT)[0]
    beat_ns, _ = protocol.HEARTBEAT.unpack_from(data, protocol.HEARTBEAT_AT)
    end_ns, flags = protocol.END.unpack_from(data, protocol.END_AT)
    enqueued, completed, changed_ns = protocol.COLLECTIVES.unpack_from(data, protocol.COLLECTIVES_AT)
    modules, forwards = _forwards(data, strings) if newest_calls == protocol.CALLS else ((), ())
    device_recorded, device_completed, device_ns = protocol.DEVICE.unpack_from(data, protocol.DEVICE_AT)
    return StatusFile(
        pid=pid,
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size > 0 else None,
        created_s=clock(created_ns),
        beat_s=clock_if_set(beat_ns),
        exit_s=clock_if_set(end_ns) if flags & protocol.END_ATEXIT else None,
        ended_by_exception=bool(flags & protocol.END_RAISED),
        events=_events(data, strings, clock),
        gaps_s=_gaps(data),
        steps_s=tuple((step, clock(at_ns)) for step, at_ns, _, _ in steps),
        calls=tuple(_call(record, strings, chains, clock) for record in calls[-newest_calls:]),
        enqueued=enqueued,
        completed=completed,
        collectives_changed_s=clock_if_set(changed_ns),
        heartbeat_frame=_frame(_string(strings, protocol.LAST_LINE.unpack_from(data, protocol.LAST_LINE_AT)[0])),
        gradients={step: gradients for step, _, gradients, _ in steps},
        events_per_step={step: events for step, _, _, events in steps if events},
        groups=_groups(facts),
        caught_exceptions=_read_caught(facts, chains),
        mesh=tuple(
            (axis, int(coordinate)) for axis, coordinate in _COORDINATE.findall(facts.get(protocol.FACT_MESH, ""))
        ),
        backend=facts.get(protocol.FACT_BACKEND, ""),
        device_pending=max(0, device_recorded - device_completed),
        device_completed=device_completed,
        device_changed_s=clock_if_set(device_ns),
        checkpoint_without_gradient=read_place(facts.get(protocol.FACT_CHECKPOINT_INPUT, "")),
        optimizer_chain=_frames(facts.get(protocol.FACT_STEPPED, "")),
        exit_chain=_frames(facts.get(protocol.FACT_EXITED_FROM, "")),
        stopped=_stopped(facts),
        has_optimizer=facts.get(protocol.FACT_OPTIMIZER) != "none",
        autograd_nodes=_count(facts.get(protocol.FACT_NODES, "")),
        realtime_ns=realtime_ns or None,
        zero_ns=realtime_ns + launched_ns if realtime_ns else None,
        counts=_counts(data, strings),
        loaders=tuple(
            DataLoaderProgress(
                number=number,
                iterators=iterators,
                batches=batches,
                is_exhausted=bool(is_exhausted),
                chain=_at(chains, chain, ()),
            )
            for number, batches, iterators, chain, is_exhausted in _ring(
                data, protocol.LOADER, protocol.LOADERS_AT, protocol.LOADERS
            )
        ),
        keys_set=tuple(
            StoreKeyWrites(
                key=key[:length].decode("utf-8", "replace"),
                count=count,
                at_s=clock(at_ns),
                chain=_at(chains, chain, ()),
            )
            for count, at_ns, chain, length, key in protocol.KEY.iter_unpack(
                data[protocol.KEYS_AT : protocol.FORWARDS_AT]
            )
            if count
        ),
        mode=ForwardMode(training=bool(mode & protocol.MODE_TRAINING), gradients=bool(mode & protocol.MODE_GRADIENTS))
        if mode & protocol.MODE_KNOWN
        else None,
        modules=modules,
        forwards=forwards,
    )


def process_and_rank(data: bytes) -> tuple[int, int | None]:
    """Return the process id and the rank in a status file. Raise ValueError if `data` is not that of a status file."""
    pid, rank, *_ = _identity(data)
    return pid, rank if rank >= 0 else None


_FACTS_AT_2 = protocol.CALLS_AT + protocol.LAYOUT_2_CALLS * protocol.LAYOUT_2_CALL.size
_SIZES = {
    protocol.LAYOUT: protocol.STATUS_FILE_SIZE,
    protocol.LAYOUT_2: _FACTS_AT_2 + protocol.FACTS * protocol.FACT.size + protocol.STRINGS_SIZE,
}


def _as_layout_3(data: bytes) -> bytes:
    converted = bytearray(protocol.STATUS_FILE_SIZE)
    converted[: protocol.CALLS_AT] = data[: protocol.CALLS_AT]
    for call in _ring(data, protocol.LAYOUT_2_CALL, protocol.CALLS_AT, protocol.LAYOUT_2_CALLS):
        at = protocol.CALLS_AT + (call[0] - 1) % protocol.CALLS * protocol.CALL.size
        protocol.LAYOUT_2_CALL.pack_into(converted, at, *call)
    facts_size = protocol.FACTS * protocol.FACT.size
    converted[protocol.FACTS_AT : protocol.FACTS_AT + facts_size] = data[_FACTS_AT_2 : _FACTS_AT_2 + facts_size]
    converted[protocol.STRINGS_AT :] = data[_FACTS_AT_2 + facts_size :]
    return bytes(converted)


def _identity(data: bytes) -> tuple[int, int, int, int, int]:
    """Return (pid, rank, world size, creation in ns, layout), or raise ValueError if this is no known status file."""
    if len(data) < protocol.HEADER_SIZE:
        raise ValueError(f"a status file has {protocol.STATUS_FILE_SIZE} bytes, this file has {len(data)}")
    magic, layout, size, pid, rank, world_size, _, created_ns = protocol.IDENTITY.unpack_from(
        data, protocol.IDENTITY_AT
    )
    if magic != protocol.MAGIC:
        raise ValueError(f"a status file begins with {protocol.MAGIC!r}, this file with {magic!r}")
    if layout not in _SIZES:
        raise ValueError(
            f"this harness reads status file layouts {protocol.LAYOUT_2} and {protocol.LAYOUT}; the file has {layout}"
        )
    if not size == len(data) == _SIZES[layout]:
        raise ValueError(f"a status file has {_SIZES[layout]} bytes; this file names {size} and has {len(data)}")
    return pid, rank, world_size, created_ns, layout


def _strings(data: bytes) -> list[str]:
    used, count = protocol.STRINGS_USED.unpack_from(data, protocol.STRINGS_USED_AT)
    at, end = protocol.STRINGS_AT, protocol.STRINGS_AT + min(used, protocol.STRINGS_SIZE)
    strings: list[str] = []
    while len(strings) < count and at + protocol.STRING_LENGTH.size <= end:
        (length,) = protocol.STRING_LENGTH.unpack_from(data, at)
        at += protocol.STRING_LENGTH.size
        if at + length > end:
            break
        strings.append(data[at : at + length].decode("utf-8", "replace"))
        at += length
    return strings


def _string(strings: list[str], number: int) -> str:
    return _at(strings, number, "")


_Item = TypeVar("_Item")


def _at(items: list[_Item], number: int, absent: _Item) -> _Item:
    return items[number] if number < len(items) else absent


def _events(data: bytes, strings: list[str], clock: _Clock) -> tuple[ProgressEvent, ...]:
    """Return the latest events of all threads, with the most recent first."""
    events: list[ProgressEvent] = []
    for index in range(protocol.SLOTS):
        at = protocol.SLOTS_AT + index * protocol.SLOT_SIZE
        tid, at_ns, count, packed, position, check = protocol.SLOT.unpack_from(data, at)
        kind = packed >> protocol.EVENT_KIND_SHIFT
        if not count or check != at_ns ^ count ^ packed ^ position or not 0 < kind < len(protocol.KINDS):
            continue
        name = _string(strings, packed >> protocol.EVENT_STRING_SHIFT & protocol.EVENT_STRING_MASK)
        step = packed & protocol.EVENT_STEP_MASK
        events.append(
            ProgressEvent(
                tid=tid,
                kind=protocol.KINDS[kind],
                name=name,
                step=step,
                at_s=clock(at_ns),
                count=count,
                position=position,
            )
        )
    return tuple(sorted(events, key=lambda event: event.at_s, reverse=True))


def _gaps(data: bytes) -> dict[str, float]:
    size = len(protocol.KINDS) * protocol.GAP.size
    gaps_ns = protocol.GAP.iter_unpack(data[protocol.GAPS_AT : protocol.GAPS_AT + size])
    gaps = list(zip(protocol.KINDS, gaps_ns, strict=True))[1:]
    return {kind: gap_ns / _NS for kind, (gap_ns,) in gaps if gap_ns}


def _steps(data: bytes) -> list[tuple[int, ...]]:
    series: list[tuple[int, ...]] = []
    for record in _ring(data, protocol.STEP, protocol.STEPS_AT, protocol.STEPS):
        follows = bool(series) and record[0] == series[-1][0] + 1
        if follows and record[1] < series[-1][1]:
            continue
        # Records with other numbers are being written or were overwritten.
        if not follows:
            series = []
        series.append(record)
    return series


def _forwards(data: bytes, strings: list[str]) -> tuple[tuple[ModuleCall, ...], tuple[StepForwards, ...]]:
    """Return the modules whose forward methods were called, and, for each recent step, the modules called in it."""
    ring = _ring(data, protocol.FORWARD, protocol.FORWARDS_AT, protocol.FORWARDS)
    # A record that is being written leaves a gap. Only the records after the latest gap are used.
    latest = ring[_unbroken_from(ring) :]
    by_step: dict[int, list[tuple[int, ...]]] = {}
    for record in latest:
        by_step.setdefault(record[1] & protocol.EVENT_STEP_MASK, []).append(record)
    modules: dict[tuple[int, int], int] = {}
    steps: list[StepForwards] = []
    for step, records in list(by_step.items())[-_STEPS_OF_FORWARDS:]:
        thread = by_step[max(by_step)][0][3]
        keys = [
            (packed >> protocol.EVENT_STRING_SHIFT & protocol.EVENT_STRING_MASK, place)
            for _, packed, place, tid in records
            if tid == thread
        ]
        calls = tuple(modules.setdefault(key, len(modules)) for key in keys)
        is_complete = records[0][0] == 1 or records[0] is not latest[0]
        steps.append(StepForwards(step=step, is_complete=is_complete, calls=calls))
    calls_of = (ModuleCall(name=_string(strings, name), place=read_place(_string(strings, at))) for name, at in modules)
    return tuple(calls_of), tuple(steps)


def _unbroken_from(ring: Sequence[tuple[int, ...]]) -> int:
    """Return the index of the first record after the latest gap in a ring buffer, or 0 if there is no gap."""
    after_gaps = (at for at in range(len(ring) - 1, 0, -1) if ring[at][0] != ring[at - 1][0] + 1)
    return next(after_gaps, 0)


def _facts(data: bytes, strings: list[str]) -> dict[str, str]:
    """Return the named strings in the status file, the latest for each name."""
    (used,) = protocol.FACTS_USED.unpack_from(data, protocol.FACTS_USED_AT)
    pairs = (
        protocol.FACT.unpack_from(data, protocol.FACTS_AT + i * protocol.FACT.size)
        for i in range(min(used, protocol.FACTS))
    )
    return {_string(strings, name): _string(strings, value) for name, value in pairs}


def _groups(facts: dict[str, str]) -> dict[str, tuple[int, ...]]:
    prefix = protocol.FACT_GROUP
    return {name[len(prefix) :]: read_ranks(value) for name, value in facts.items() if name.startswith(prefix)}


def _stopped(facts: Mapping[str, str]) -> dict[int, tuple[Frame, ...]]:
    """Return the lines that stopped each process."""
    pids = {name: name.removeprefix(protocol.FACT_STOPPED) for name in facts if name.startswith(protocol.FACT_STOPPED)}
    return {int(pid): _frames(facts[name]) for name, pid in pids.items() if pid.isdecimal()}


def _read_caught(facts: dict[str, str], chains: list[tuple[Frame, ...]]) -> tuple[CaughtException, ...]:
    exceptions: list[CaughtException] = []
    for name, value in sorted(facts.items()):
        parts = value.split(" ", 2) if name.startswith(protocol.FACT_CAUGHT) else []
        if len(parts) == 3 and parts[0].isascii() and parts[0].isdecimal() and len(parts[0]) < _STEP_DIGITS:
            exception = CaughtException(step=int(parts[0]), type=parts[1], place=read_place(parts[2]))
            number = name[len(protocol.FACT_CAUGHT) :]
            again = facts.get(protocol.FACT_CAUGHT_AGAIN + number, "")
            exceptions.append(_with_handler(_with_count(exception, again, chains), number, facts))
    return tuple(exception for exception in exceptions if exception.left_forward or exception.caught_at is not None)


def _with_count(exception: CaughtException, again: str, chains: list[tuple[Frame, ...]]) -> CaughtException:
    """Return the exception with its number of occurrences, its latest step and its callers filled in."""
    numbers = _AGAIN.fullmatch(again)
    if numbers is None:
        return exception
    count, last_step, node = map(int, numbers.groups())
    return replace(
        exception, count=max(1, count), last_step=max(exception.step, last_step), chain=_at(chains, node, ())
    )


def _with_handler(exception: CaughtException, number: str, facts: dict[str, str]) -> CaughtException:
    """Return the exception with the program's line that finally caught it filled in.

    Each text about exception `number` describes one handler: "10 3.0 run.py:30:main". The first digit is 1 if the
    handler did not raise the exception again. The second digit is 1 if the exception had left a module's forward.
    """
    lines = [
        match
        for name, value in sorted(facts.items())
        if name.startswith(f"{protocol.FACT_HANDLED}{number}.") and (match := _HANDLED.fullmatch(value))
    ]
    place = next((read_place(line[3]) for line in lines if line[1] == "1"), None)
    return replace(exception, caught_at=place, left_forward=not lines or any(line[2] == "1" for line in lines))


def _chains(data: bytes, strings: list[str]) -> list[tuple[Frame, ...]]:
    """Return, for each recorded line, the call stack that led to it, innermost frame first."""
    (used,) = protocol.NODES_USED.unpack_from(data, protocol.NODES_USED_AT)
    chains: list[tuple[Frame, ...]] = [()]
    for number in range(1, min(used + 1, protocol.NODES)):
        place, caller = protocol.NODE.unpack_from(data, protocol.NODES_AT + number * protocol.NODE.size)
        frame = _frame(_at(strings, place, ""))
        is_valid = frame is not None and caller < number and (bool(chains[caller]) or not caller)
        chains.append(_chain(frame, chains[caller]) if frame is not None and is_valid else ())
    return chains


@lru_cache(maxsize=1 << 14)
def _chain(frame: Frame, callers: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return (frame, *callers)[:_MAX_CHAIN]


def _counts(data: bytes, strings: list[str]) -> dict[str, CallCount]:
    size = protocol.TOTALS * protocol.TOTAL.size
    totals = protocol.TOTAL.iter_unpack(data[protocol.TOTALS_AT : protocol.TOTALS_AT + size])
    return {
        _at(strings, group, ""): CallCount(calls=calls, hash=call_hash)
        for group, calls, call_hash, check in totals
        if calls and check == group ^ calls ^ call_hash
    }


@lru_cache(maxsize=1 << 14)
def _frame(text: str) -> Frame | None:
    place = read_place(text)
    if place is None or place.file is None or place.line is None:
        return None
    return Frame(file=place.file, line=place.line, function=place.function or "")


def _frames(text: str) -> tuple[Frame, ...]:
    return tuple(filter(None, map(_frame, text.split(protocol.CHAIN_JOIN))))


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def _ring(data: bytes, record: struct.Struct, at: int, count: int) -> list[tuple[int, ...]]:
    """Return the records in a ring buffer in the order of their numbers."""
    ring = record.iter_unpack(memoryview(data)[at : at + count * record.size])
    return sorted(values for slot, values in enumerate(ring) if values[0] and (values[0] - 1) % count == slot)


def _call(record: tuple[int, ...], strings: list[str], chains: list[tuple[Frame, ...]], clock: _Clock) -> Call:
    number, entered_ns, left_ns, elements, step, position, op, group, place, dtype, key, flags, peer, chain, tid = (
        record
    )
    callers = _at(chains, chain, ())
    return Call(
        number=number,
        op=_string(strings, op),
        group=_string(strings, group),
        place=_own_place(read_place(_string(strings, place)), callers),
        elements=elements,
        dtype=_string(strings, dtype),
        step=step,
        position=position,
        entered_s=clock(entered_ns),
        left_s=clock(left_ns) if left_ns >= entered_ns else None,
        peer=peer if peer >= 0 else None,
        **{"transfers" if _string(strings, op) == "batch_isend_irecv" else "key": _string(strings, key)},
        chain=callers,
        grad=_GRADIENTS.get(flags),
        tid=tid or None,
    )


def _own_place(place: Place | None, callers: Sequence[Frame]) -> Place | None:
    """Return the program's own line from which a call was made, perhaps through a library such as Lightning."""
    if place is None or not callers or not is_library(place.file or ""):
        return place
    return Place(file=callers[0].file, line=callers[0].line, function=callers[0].function)


@lru_cache(maxsize=1 << 14)  # all ranks run the same lines, and share their places
def read_place(text: str) -> Place | None:
    """Return the source location in a string such as "file:line:function", or None if it is not one."""
    file, _, rest = text.rpartition(":")[0].rpartition(":")
    function = text.rpartition(":")[2]
    if not file or not rest.isascii() or not rest.isdigit() or len(rest) > 9:
        return None
    return Place(file=file, line=int(rest), function=function or None)
