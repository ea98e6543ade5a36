"""The reading side of the progress board: bytes somebody else wrote, believed only as far as they prove themselves."""

from __future__ import annotations

from harness import protocol
from harness.core.observed.evidence import Board, Call, Frame, Mark
from harness.core.place import Place

_NS = 1_000_000_000


def parse(data: bytes, launched_ns: int) -> Board:
    """The board as a value, times in seconds since `launched_ns`.

    A slot caught between two states is left out. Raises ValueError, and nothing else, for what is no board at all.
    """
    pid, rank, world_size, created_ns = _identity(data)
    clock = _Clock(launched_ns)
    strings = _strings(data)
    beat_ns, _ = protocol.BEAT.unpack_from(data, protocol.BEAT_AT)
    end_ns, flags = protocol.END.unpack_from(data, protocol.END_AT)
    enqueued, completed, changed_ns = protocol.COLLECTIVES.unpack_from(data, protocol.COLLECTIVES_AT)
    return Board(
        pid=pid,
        rank=rank if rank >= 0 else None,
        world_size=world_size if world_size > 0 else None,
        created_s=clock.seconds(created_ns),
        beat_s=clock.seconds_if_set(beat_ns),
        exit_s=clock.seconds_if_set(end_ns) if flags & protocol.END_ATEXIT else None,
        raised=bool(flags & protocol.END_RAISED),
        marks=_marks(data, strings, clock),
        gaps_s=_gaps(data),
        steps_s=_steps(data, clock),
        calls=_calls(data, strings, clock),
        enqueued=enqueued,
        completed=completed,
        collectives_changed_s=clock.seconds_if_set(changed_ns),
        seen=_seen(data, strings),
    )


def _seen(data: bytes, strings: list[str]) -> Frame | None:
    place = _place(_string(strings, protocol.SEEN.unpack_from(data, protocol.SEEN_AT)[0]))
    if place is None or place.file is None or place.line is None:
        return None
    return Frame(file=place.file, line=place.line, function=place.function or "")


def answered(data: bytes) -> int:
    """The number of the last request for the flight recorder that this process has answered."""
    return int(protocol.BEAT.unpack_from(data, protocol.BEAT_AT)[1])


class _Clock:
    def __init__(self, launched_ns: int) -> None:
        self._launched_ns = launched_ns

    def seconds(self, at_ns: int) -> float:
        return (at_ns - self._launched_ns) / _NS

    def seconds_if_set(self, at_ns: int) -> float | None:
        return self.seconds(at_ns) if at_ns else None


def _identity(data: bytes) -> tuple[int, int, int, int]:
    if len(data) < protocol.HEADER_SIZE:
        raise ValueError(f"a board has {protocol.BOARD_SIZE} bytes, this file {len(data)}")
    magic, layout, size, pid, rank, world_size, _, created_ns = protocol.IDENTITY.unpack_from(
        data, protocol.IDENTITY_AT
    )
    if magic != protocol.MAGIC:
        raise ValueError(f"a board begins with {protocol.MAGIC!r}, this file with {magic!r}")
    if layout != protocol.LAYOUT:
        raise ValueError(f"this harness reads board layout {protocol.LAYOUT}, the file has layout {layout}")
    if size != protocol.BOARD_SIZE or len(data) != protocol.BOARD_SIZE:
        raise ValueError(f"a board has {protocol.BOARD_SIZE} bytes, this one says {size} and has {len(data)}")
    return pid, rank, world_size, created_ns


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
    return strings[number] if number < len(strings) else ""


def _marks(data: bytes, strings: list[str], clock: _Clock) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for index in range(protocol.SLOTS):
        at = protocol.SLOTS_AT + index * protocol.SLOT_SIZE
        tid, at_ns, count, what, position, check = protocol.SLOT.unpack_from(data, at)
        kind = what >> protocol.WHAT_KIND_SHIFT
        if not count or check != at_ns ^ count ^ what ^ position or not 0 < kind < len(protocol.KINDS):
            continue
        name = _string(strings, what >> protocol.WHAT_STRING_SHIFT & protocol.WHAT_STRING_MASK)
        step = what & protocol.WHAT_STEP_MASK
        marks.append(
            Mark(
                tid=tid,
                kind=protocol.KINDS[kind],
                name=name,
                step=step,
                at_s=clock.seconds(at_ns),
                count=count,
                position=position,
            )
        )
    return tuple(sorted(marks, key=lambda mark: mark.at_s, reverse=True))


def _gaps(data: bytes) -> dict[str, float]:
    gaps: dict[str, float] = {}
    for number, kind in enumerate(protocol.KINDS):
        (gap_ns,) = protocol.GAP.unpack_from(data, protocol.GAPS_AT + number * protocol.GAP.size)
        if number and gap_ns:
            gaps[kind] = gap_ns / _NS
    return gaps


def _steps(data: bytes, clock: _Clock) -> tuple[tuple[int, float], ...]:
    """The newest unbroken series of the ring: what does not continue it is a torn write or an older lap."""
    ring = [protocol.STEP.unpack_from(data, protocol.STEPS_AT + i * protocol.STEP.size) for i in range(protocol.STEPS)]
    done = sorted((step, at_ns) for i, (step, at_ns) in enumerate(ring) if step and (step - 1) % protocol.STEPS == i)
    series: list[tuple[int, int]] = []
    for step, at_ns in done:
        follows = bool(series) and step == series[-1][0] + 1 and at_ns >= series[-1][1]
        torn = bool(series) and step == series[-1][0] + 1 and at_ns < series[-1][1]
        if torn:
            continue
        series = [*series, (step, at_ns)] if follows else [(step, at_ns)]
    return tuple((step, clock.seconds(at_ns)) for step, at_ns in series)


def _calls(data: bytes, strings: list[str], clock: _Clock) -> tuple[Call, ...]:
    ring = [protocol.CALL.unpack_from(data, protocol.CALLS_AT + i * protocol.CALL.size) for i in range(protocol.CALLS)]
    whole = (record for i, record in enumerate(ring) if record[0] and (record[0] - 1) % protocol.CALLS == i)
    return tuple(_call(record, strings, clock) for record in sorted(whole))


def _call(record: tuple[int, ...], strings: list[str], clock: _Clock) -> Call:
    number, entered_ns, left_ns, elements, step, position, op, group, place, dtype = record
    return Call(
        number=number,
        op=_string(strings, op),
        group=_string(strings, group),
        place=_place(_string(strings, place)),
        elements=elements,
        dtype=_string(strings, dtype),
        step=step,
        position=position,
        entered_s=clock.seconds(entered_ns),
        left_s=clock.seconds(left_ns) if left_ns >= entered_ns else None,
    )


def _place(text: str) -> Place | None:
    """From "file:line:function", where the file may hold colons itself."""
    file, _, rest = text.rpartition(":")[0].rpartition(":")
    function = text.rpartition(":")[2]
    if not file or not rest.isascii() or not rest.isdigit() or len(rest) > 9:
        return None
    return Place(file=file, line=int(rest), function=function or None)
