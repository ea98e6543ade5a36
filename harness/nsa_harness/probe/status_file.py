"""The writing side of a process's status file: one write to shared memory per progress event."""

from __future__ import annotations

import _thread
import itertools
import mmap
import os
import time

from .. import protocol

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_monotonic_ns = time.monotonic_ns
_pack_slot = protocol.SLOT.pack_into
_KIND_SHIFT = protocol.EVENT_KIND_SHIFT
_pack_call = protocol.CALL.pack_into
_number_at = protocol.U64.unpack_from
_set_time = protocol.U64.pack_into
_pack_total = protocol.TOTAL.pack_into
_pack_forward = protocol.FORWARD.pack_into
_FORWARDS_AT, _FORWARDS, _FORWARD_SIZE = protocol.FORWARDS_AT, protocol.FORWARDS, protocol.FORWARD.size
_CALLS_AT, _CALLS, _CALL_SIZE, _LEFT_AT = (
    protocol.CALLS_AT,
    protocol.CALLS,
    protocol.CALL.size,
    protocol.CALL_RETURNED_AT,
)
_SHORT_NS = 100_000  # shorter pauses are not compared with the longest: stall limits are seconds
_HASH_START, _HASH_FACTOR, _HASH_MASK = protocol.HASH_START, protocol.HASH_FACTOR, protocol.HASH_MASK


class _Slots(_thread._local):
    """[offset, native thread id, events so far] of this thread's slots, once it has them."""

    training: list[int] | None = None
    events: list[int] | None = None


class Inside(_thread._local):
    """The call that a thread is in. One list, so that a call looks up one thread-local attribute."""

    def __init__(self) -> None:
        # The number of the collective, 0 = none, -1 = one that is not in the status file; the thread's slot for events.
        self.call: list[Any] = [0, None]


class StatusFileWriter:
    """The status file of this process. A progress event costs about a microsecond and never blocks.

    A forked child keeps calling the same hooks. Its events go to private memory, never to its parent's file.
    """

    def __init__(
        self, path: str, *, rank: int, world_size: int, failed: Callable[[Exception], object] | None = None
    ) -> None:
        """Create the file with mode 0600 and all its blocks. Raises OSError without space or directory.

        If a progress event cannot be written, `failed` is called and no exception is raised.
        """
        self._memory: mmap.mmap | bytearray = _new_file(path)
        self._threads = _Slots()
        self._slots_taken = 0
        self._strings: dict[str, int] = {}
        self._strings_used = 0
        self._nodes: dict[tuple[int, int], int] = {}
        self._totals: dict[int, list[int]] = {}  # by group: offset, calls, hash
        self._mode = 0
        self._gaps = [0] * protocol.GAP_COUNT
        self._last_at = _monotonic_ns()
        self._last_what = 0
        self.step = 1
        self._position = 0
        self.step_done = False
        self._next_call = itertools.count(1).__next__
        self._next_forward = itertools.count(1).__next__
        self._lock = _thread.allocate_lock()
        self.live = True
        self.over = False  # the interpreter is exiting
        self.failed = failed
        self.rank = rank
        self.string("")
        self._created_ns = self._last_at
        self.identify(rank, world_size)
        protocol.CLOCK.pack_into(self._memory, protocol.CLOCK_AT, time.time_ns() - _monotonic_ns())
        os.rename(path + ".new", path)
        os.register_at_fork(after_in_child=self._detach)

    def identify(self, rank: int, world_size: int) -> None:
        self.rank = rank
        protocol.IDENTITY.pack_into(
            self._memory,
            protocol.IDENTITY_AT,
            protocol.MAGIC,
            protocol.LAYOUT,
            protocol.STATUS_FILE_SIZE,
            os.getpid(),
            rank,
            world_size,
            0,
            self._created_ns,
        )

    def string(self, text: str) -> int:
        """Return the number of a string in the table, which is added if it is new; 0 if the table is full."""
        known = self._strings.get(text)
        if known is not None:
            return known
        with self._lock:
            return self._append(text)

    def what(self, kind: str, text: str) -> int:
        """Return the part of a progress event that does not change from one event to the next."""
        return protocol.KIND[kind] << _KIND_SHIFT | self.string(text) << protocol.EVENT_STRING_SHIFT

    def progress_event(self, what: int, _gradients: object = None) -> None:
        """Write what this thread trains. The second parameter lets the method serve as an autograd pre-hook."""
        try:
            now = _monotonic_ns()
            slot = self._threads.training
            if slot is None:
                slot = self._threads.training = self._claim_slot()
            self._position = position = self._position + 1
            # As in `_write`, without the cost of a call.
            slot[2] = events = slot[2] + 1
            if now - self._last_at > _SHORT_NS:
                self._note_gap(now - self._last_at)
            self._last_at = now
            self._last_what = what = what | self.step
            _pack_slot(self._memory, slot[0], slot[1], now, events, what, position, events ^ position ^ what ^ now)
        except Exception as error:
            self._give_up(error)

    def forward(self, what: int, place: int) -> None:
        """A module's forward begins, called from `place`: a progress event that the next event does not overwrite."""
        try:
            self.progress_event(what)
            number = self._next_forward()
            _pack_forward(
                self._memory,
                _FORWARDS_AT + (number - 1) % _FORWARDS * _FORWARD_SIZE,
                number,
                self._last_what,
                place,
                self._threads.training[1],  # type: ignore[index]  # the event has claimed it
            )
        except Exception as error:
            self._give_up(error)

    def note(self, what: int) -> None:
        """Write what else happens in this thread: a call, a start, an end. Its training event stays readable."""
        self._write(self.events(), _monotonic_ns(), what)

    def finish_step(self, gradients: int = 0) -> None:
        """An optimizer step is done. Events before the next batch or forward still belong to the step."""
        self.begin_step()
        at = protocol.STEPS_AT + (self.step - 1) % protocol.STEPS * protocol.STEP.size
        protocol.STEP.pack_into(self._memory, at, self.step, _monotonic_ns(), gradients, self._position)
        self.step_done = True

    def begin_step(self) -> None:
        """Begin the next step, if the last step is done."""
        if self.step_done:
            self.step_done = False
            self.step += 1
            self._position = 0

    def enter_call(
        self,
        op: int,
        group: int,
        place: int,
        elements: int,
        dtype: int,
        key: int = 0,
        peer: int = -1,
        entered_ns: int | None = None,
        chain: int = 0,
        flags: int = 0,
        slot: list[int] | None = None,
        what: int = 0,
    ) -> int:
        """Write a call of a collective, or a wait that has lasted since `entered_ns`, and return the call's number.

        `elements` is a number, `peer` a global rank, `chain` a node; the others are strings. With `slot`, the calling
        thread's slot, also write `what` to it.
        """
        number = self._next_call()
        now = _monotonic_ns()
        if slot is not None:
            self._write(slot, now, what)
        _pack_call(
            self._memory,
            _CALLS_AT + (number - 1) % _CALLS * _CALL_SIZE,
            number,
            entered_ns or now,
            0,
            elements,
            self.step,
            self._position,
            op,
            group,
            place,
            dtype,
            key,
            flags,
            peer,
            chain,
            slot[1] if slot is not None else 0,
        )
        return number

    def leave_call(self, number: int, slot: list[int] | None = None, what: int = 0) -> None:
        """Write that a call has returned, unless 1024 later calls have overwritten its place."""
        now, at = _monotonic_ns(), _CALLS_AT + (number - 1) % _CALLS * _CALL_SIZE
        if slot is not None:
            self._write(slot, now, what)
        if _number_at(self._memory, at)[0] == number:
            _set_time(self._memory, at + _LEFT_AT, now)

    def count_call(self, group: int, call_hash: int) -> None:
        """Add a call to the count and hash of all calls of its group, which outlive the ring of calls."""
        total = self._totals.get(group) or self._new_total(group)
        if total is None:
            return
        with self._lock:
            total[1] = calls = total[1] + 1
            total[2] = rolled = (total[2] ^ call_hash) * _HASH_FACTOR & _HASH_MASK
            _pack_total(self._memory, total[0], group, calls, rolled, group ^ calls ^ rolled)

    def events(self) -> list[int]:
        """Return this thread's slot for everything but training."""
        return self._threads.events or self._new_events()

    def node(self, place: int, caller: int) -> int:
        """Return the node of a line that was called from node `caller`, 0 = from none; 0 if there is no room."""
        with self._lock:
            number = self._nodes.get((place, caller), len(self._nodes) + 1)
            if not place or number == protocol.NODES:
                return 0
            if number > len(self._nodes):
                protocol.NODE.pack_into(self._memory, protocol.NODES_AT + number * protocol.NODE.size, place, caller)
                # The node is complete before the count that makes it visible.
                protocol.NODES_USED.pack_into(self._memory, protocol.NODES_USED_AT, number)
                self._nodes[place, caller] = number
            return number

    def loader(self, number: int, batches: int, iterators: int, chain: int, *, ended: bool) -> None:
        """Write how far the latest iterator of a DataLoader is, unless 64 later loaders have overwritten its place."""
        at = protocol.LOADERS_AT + (number - 1) % protocol.LOADERS * protocol.LOADER.size
        if _number_at(self._memory, at)[0] <= number:
            protocol.LOADER.pack_into(self._memory, at, number, batches, iterators, chain, ended)

    def key_set(self, slot: int, count: int, chain: int, key: bytes) -> None:
        """Write that a line of the program has set a key of a store for the `count`th time."""
        at, kept = protocol.KEYS_AT + slot * protocol.KEY.size, key[-protocol.KEY_LIMIT :]
        protocol.KEY.pack_into(self._memory, at, count, _monotonic_ns(), chain, len(kept), kept)

    def mode(self, flags: int) -> None:
        """Write how the latest forward runs, in MODE_ flags."""
        if flags != self._mode:
            self._mode = flags
            protocol.MODE.pack_into(self._memory, protocol.MODE_AT, flags)

    def described(self, number: int) -> tuple[int, int, int, int]:
        """Return (group, elements, dtype, peer) of a recent call."""
        call = protocol.CALL.unpack_from(self._memory, _call_at(number))
        return (call[7], call[3], call[9], call[12]) if call[0] == number else (0, 0, 0, -1)

    def call_waits_for(self, number: int, key: int) -> None:
        """Write the key of a store that this call waits for, 0 = it no longer waits."""
        at = _call_at(number)
        if protocol.U64.unpack_from(self._memory, at)[0] == number:
            protocol.STRING_NUMBER.pack_into(self._memory, at + protocol.CALL_KEY_AT, key)

    def heartbeat(self, answered: int) -> None:
        protocol.HEARTBEAT.pack_into(self._memory, protocol.HEARTBEAT_AT, _monotonic_ns(), answered)

    def saw(self, place: str) -> None:
        protocol.LAST_LINE.pack_into(self._memory, protocol.LAST_LINE_AT, self.string(place))

    def requested(self) -> int:
        """Return the number of the latest request for the flight recorder."""
        return int(protocol.REQUEST.unpack_from(self._memory, protocol.REQUEST_AT)[0])

    def count_collectives(self, enqueued: int, completed: int) -> None:
        protocol.COLLECTIVES.pack_into(self._memory, protocol.COLLECTIVES_AT, enqueued, completed, _monotonic_ns())

    def fact(self, name: str, value: str) -> int:
        """Write a fact under a name. A later value under the same name replaces it.

        Return where a new value is stored, for `rewrite`, or 0 if the fact was not written.
        """
        with self._lock:
            key = self._append(name)
            at = protocol.STRINGS_AT + self._strings_used + protocol.STRING_LENGTH.size
            pair = key, self._append(value)
            (used,) = protocol.FACTS_USED.unpack_from(self._memory, protocol.FACTS_USED_AT)
            if used == protocol.FACTS or 0 in pair:
                return 0
            protocol.FACT.pack_into(self._memory, protocol.FACTS_AT + used * protocol.FACT.size, *pair)
            protocol.FACTS_USED.pack_into(self._memory, protocol.FACTS_USED_AT, used + 1)
            return at

    def rewrite(self, at: int, value: str) -> None:
        """Overwrite a value of `fact` by another ASCII value of the same length."""
        self._memory[at : at + len(value)] = value.encode("ascii")

    def count_device(self, recorded: int, completed: int, *, changed: bool) -> None:
        at_ns = _monotonic_ns() if changed else protocol.DEVICE.unpack_from(self._memory, protocol.DEVICE_AT)[2]
        protocol.DEVICE.pack_into(self._memory, protocol.DEVICE_AT, recorded, completed, at_ns)

    def end(self, flag: int) -> None:
        """Add a flag to the end record."""
        flags = protocol.END.unpack_from(self._memory, protocol.END_AT)[1]
        protocol.END.pack_into(self._memory, protocol.END_AT, _monotonic_ns(), flags | flag)

    def _write(self, slot: list[int], now: int, what: int) -> None:
        try:
            position = self._position
            slot[2] = events = slot[2] + 1
            if now - self._last_at > _SHORT_NS:
                self._note_gap(now - self._last_at)
            self._last_at = now
            self._last_what = what = what | self.step
            _pack_slot(self._memory, slot[0], slot[1], now, events, what, position, events ^ position ^ what ^ now)
        except Exception as error:
            self._give_up(error)

    def _new_total(self, group: int) -> list[int] | None:
        """Return a new group's place and count, or None if there is no room."""
        with self._lock:
            number = len(self._totals)
            if number == protocol.TOTALS:
                return None
            return self._totals.setdefault(group, [protocol.TOTALS_AT + number * protocol.TOTAL.size, 0, _HASH_START])

    def _new_events(self) -> list[int]:
        self._threads.events = slot = self._claim_slot()
        return slot

    def _give_up(self, error: Exception) -> None:
        """Stop writing to the file, without an exception in the program."""
        if self.live:
            self._detach()
            if self.failed is not None:
                self.failed(error)

    def _detach(self) -> None:
        self._memory = bytearray(protocol.STATUS_FILE_SIZE)
        self._lock = _thread.allocate_lock()
        self.live = False

    def _append(self, text: str) -> int:
        known = self._strings.get(text)
        if known is not None:
            return known
        data = text.encode("utf-8", "replace")[: protocol.STRING_LIMIT]
        size = protocol.STRING_LENGTH.size + len(data)
        if self._strings_used + size > protocol.STRINGS_SIZE:
            return 0
        at = protocol.STRINGS_AT + self._strings_used
        protocol.STRING_LENGTH.pack_into(self._memory, at, len(data))
        self._memory[at + protocol.STRING_LENGTH.size : at + size] = data
        self._strings_used += size
        number = len(self._strings)
        # The text is complete before the count that makes it visible.
        protocol.STRINGS_USED.pack_into(self._memory, protocol.STRINGS_USED_AT, self._strings_used, number + 1)
        self._strings[text] = number
        return number

    def _claim_slot(self) -> list[int]:
        """Return a slot for a thread without one."""
        with self._lock:
            index = self._slots_taken
            if index < protocol.SLOTS:
                self._slots_taken += 1
            else:
                index = self._slot_of_a_dead_thread()
        return [protocol.SLOTS_AT + index * protocol.SLOT_SIZE, _thread.get_native_id(), 0]

    def _slot_of_a_dead_thread(self) -> int:
        """Return a dead thread's slot. If all threads live, they share the last slot, which keeps the latest event."""
        for index in range(protocol.SLOTS):
            tid = protocol.SLOT.unpack_from(self._memory, protocol.SLOTS_AT + index * protocol.SLOT_SIZE)[0]
            if not os.path.exists(f"/proc/self/task/{tid}"):
                return index
        return protocol.SLOTS - 1

    def _note_gap(self, gap_ns: int) -> None:
        kind = self._last_what >> _KIND_SHIFT
        if gap_ns > self._gaps[kind]:
            self._gaps[kind] = gap_ns
            protocol.GAP.pack_into(self._memory, protocol.GAPS_AT + kind * protocol.GAP.size, gap_ns)


def _call_at(number: int) -> int:
    return _CALLS_AT + (number - 1) % _CALLS * _CALL_SIZE


def _new_file(path: str) -> mmap.mmap:
    """Return a mapping of `path`.new, which the caller renames once the header is complete.

    The blocks are allocated here: a write through a mapping to a full tmpfs would kill the program by SIGBUS.
    """
    fresh = path + ".new"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        os.posix_fallocate(descriptor, 0, protocol.STATUS_FILE_SIZE)
        return mmap.mmap(descriptor, protocol.STATUS_FILE_SIZE)
    except OSError:
        os.unlink(fresh)
        raise
    finally:
        os.close(descriptor)
