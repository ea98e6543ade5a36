"""Writes the status file of a process. Each progress event is one write to shared memory."""

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
_call_head = protocol.CALL_HEAD.unpack_from
_set_time = protocol.U64.pack_into
_pack_total = protocol.TOTAL.pack_into
_pack_forward = protocol.FORWARD.pack_into
_FORWARDS_AT, _FORWARDS, _FORWARD_SIZE = protocol.FORWARDS_AT, protocol.FORWARDS, protocol.FORWARD.size
_CALLS_AT, _CALLS, _CALL_SIZE, _RETURNED_AT = (
    protocol.CALLS_AT,
    protocol.CALLS,
    protocol.CALL.size,
    protocol.CALL_RETURNED_AT,
)
_SHORTEST_GAP_NS = 100_000  # shorter pauses are ignored: stall limits are seconds long
_HASH_START, _HASH_FACTOR, _HASH_MASK = protocol.HASH_START, protocol.HASH_FACTOR, protocol.HASH_MASK


class _ThreadSlots(_thread._local):
    """The areas of the status file in which the calling thread writes its events.

    One slot is for training events and one for other events. A slot is [offset, native thread id, events so far], or
    None before the thread's first event.
    """

    training: list[int] | None = None
    events: list[int] | None = None


class CurrentCall(_thread._local):
    """The collective call that a thread is in, kept in one list, so that a call needs one thread-local lookup."""

    def __init__(self) -> None:
        # First the number of the call in the status file: 0 = not in a call, -1 = the call could not be written.
        # Then the thread's slot for events, once it has one.
        self.state: list[Any] = [0, None]


class StatusFileWriter:
    """A writer of this process's status file.

    A progress event costs about a microsecond and never blocks. In a forked child, the same hooks run, but their events
    go to private memory and never to the parent's file.
    """

    def __init__(
        self, path: str, *, rank: int, world_size: int, on_failure: Callable[[Exception], object] | None = None
    ) -> None:
        """Create the status file with mode 0600. Raise OSError if that fails.

        The first time that a progress event cannot be written, `on_failure` is called with the exception. The caller of
        the progress event sees no exception, and nothing more is written to the file.
        """
        self._memory: mmap.mmap | bytearray = _new_file(path)
        self._threads = _ThreadSlots()
        self._slots_taken = 0
        self._strings: dict[str, int] = {}
        self._strings_used = 0
        self._nodes: dict[tuple[int, int], int] = {}
        self._totals: dict[int, list[int]] = {}  # string-table index of the group -> [offset, calls, hash]
        self._mode_flags = 0
        self._gaps = [0] * protocol.GAP_COUNT
        self._last_event_ns = _monotonic_ns()
        self._last_event = 0
        self.step = 1
        self._position = 0
        self.is_step_done = False
        self._next_call = itertools.count(1).__next__
        self._next_forward = itertools.count(1).__next__
        self._lock = _thread.allocate_lock()
        self.is_writing = True
        self.is_exiting = False  # the interpreter is exiting
        self.on_failure = on_failure
        self.rank = rank
        self.string_number("")
        self._created_ns = self._last_event_ns
        self.write_identity(rank, world_size)
        protocol.CLOCK.pack_into(self._memory, protocol.CLOCK_AT, time.time_ns() - _monotonic_ns())
        os.rename(path + ".new", path)
        os.register_at_fork(after_in_child=self._detach)

    def write_identity(self, rank: int, world_size: int) -> None:
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

    def string_number(self, text: str) -> int:
        """Return the index of `text` in the string table, added if necessary, or 0 if the table is full."""
        number = self._strings.get(text)
        if number is not None:
            return number
        with self._lock:
            return self._add_string(text)

    def event_code(self, kind: str, text: str) -> int:
        """Return one integer that contains the kind and the text of a progress event."""
        return protocol.KIND[kind] << _KIND_SHIFT | self.string_number(text) << protocol.EVENT_STRING_SHIFT

    def write_training_event(self, event: int, _gradients: object = None) -> None:
        """Write a training event of the calling thread. As an autograd pre-hook, it is called with `_gradients`."""
        try:
            now = _monotonic_ns()
            slot = self._threads.training
            if slot is None:
                slot = self._threads.training = self._claim_slot()
            self._position = position = self._position + 1
            # The same statements as in `_write`, without the cost of a call.
            slot[2] = events = slot[2] + 1
            if now - self._last_event_ns > _SHORTEST_GAP_NS:
                self._note_gap(now - self._last_event_ns)
            self._last_event_ns = now
            self._last_event = event = event | self.step
            _pack_slot(self._memory, slot[0], slot[1], now, events, event, position, events ^ position ^ event ^ now)
        except Exception as error:
            self._give_up(error)

    def write_forward(self, event: int, place: int) -> None:
        """Record that a module's forward pass begins.

        `place` is the string-table index of the line that called the module. The training event is overwritten by the
        next event, so the forward is also added to a ring of recent forwards.
        """
        try:
            self.write_training_event(event)
            number = self._next_forward()
            _pack_forward(
                self._memory,
                _FORWARDS_AT + (number - 1) % _FORWARDS * _FORWARD_SIZE,
                number,
                self._last_event,
                place,
                self._threads.training[1],  # type: ignore[index]  # write_training_event has claimed the slot
            )
        except Exception as error:
            self._give_up(error)

    def write_event(self, event: int) -> None:
        """Write an event of the calling thread that is not a training event, such as a call or an exit."""
        self._write(self.event_slot(), _monotonic_ns(), event)

    def finish_step(self, gradients: int = 0) -> None:
        """Record that the optimizer step, which began with `gradients` gradients, is finished."""
        self.begin_step()
        at = protocol.STEPS_AT + (self.step - 1) % protocol.STEPS * protocol.STEP.size
        protocol.STEP.pack_into(self._memory, at, self.step, _monotonic_ns(), gradients, self._position)
        self.is_step_done = True

    def begin_step(self) -> None:
        """Begin the next training step if the current one is finished."""
        if self.is_step_done:
            self.is_step_done = False
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
        event: int = 0,
    ) -> int:
        """Record the start of a collective call or a wait, and return its number.

        `op`, `group`, `place`, `dtype` and `key` are indices in the string table, `elements` is a count, `peer` a
        global rank, and `chain` a node number. A wait has lasted since `entered_ns`. If `slot`, where the calling
        thread writes its events, is given, write `event` to it as well.
        """
        number = self._next_call()
        now = _monotonic_ns()
        if slot is not None:
            self._write(slot, now, event)
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

    def leave_call(self, number: int, slot: list[int] | None = None, event: int = 0) -> int:
        """Record that the collective call or wait with this number has returned, and return how long it took, in ns.

        Nothing is recorded if a later call has taken its entry in the ring of 1024 calls, and the result is 0. If
        `slot` is given, write `event` to it as well.
        """
        now, at = _monotonic_ns(), _CALLS_AT + (number - 1) % _CALLS * _CALL_SIZE
        if slot is not None:
            self._write(slot, now, event)
        stored_number, entered = _call_head(self._memory, at)
        if stored_number != number:
            return 0
        _set_time(self._memory, at + _RETURNED_AT, now)
        return int(now - entered)

    def add_to_total(self, group: int, call_hash: int) -> None:
        """Add a call to the count and the hash of all calls in its group, which also cover calls before the ring."""
        total = self._totals.get(group) or self._new_total(group)
        if total is None:
            return
        with self._lock:
            total[1] = calls = total[1] + 1
            total[2] = rolling_hash = (total[2] ^ call_hash) * _HASH_FACTOR & _HASH_MASK
            _pack_total(self._memory, total[0], group, calls, rolling_hash, group ^ calls ^ rolling_hash)

    def event_slot(self) -> list[int]:
        """Return the slot of the status file in which this thread writes events other than training events."""
        return self._threads.events or self._claim_event_slot()

    def node_number(self, place: int, caller: int) -> int:
        """Return the number of the node for a line called from `caller`, or 0 if the tree of stacks is full."""
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

    def write_loader(self, number: int, batches: int, iterators: int, chain: int, *, ended: bool) -> None:
        """Record the progress of the DataLoader with this number.

        `batches` counts the batches of its latest iterator, `iterators` the iterators that the loader has made, and
        `chain` is the node of the line that made the iterator. There is room for 64 loaders; an entry that a later
        loader has taken is not overwritten.
        """
        at = protocol.LOADERS_AT + (number - 1) % protocol.LOADERS * protocol.LOADER.size
        if _number_at(self._memory, at)[0] <= number:
            protocol.LOADER.pack_into(self._memory, at, number, batches, iterators, chain, ended)

    def write_key(self, slot: int, count: int, chain: int, key: bytes) -> None:
        """Record that the line `chain` has set the store key `key` for the `count`-th time, in record `slot`."""
        at, stored_key = protocol.KEYS_AT + slot * protocol.KEY.size, key[-protocol.KEY_LIMIT :]
        protocol.KEY.pack_into(self._memory, at, count, _monotonic_ns(), chain, len(stored_key), stored_key)

    def write_mode(self, flags: int) -> None:
        """Record whether the model's latest forward pass runs in training mode and with gradients enabled."""
        if flags != self._mode_flags:
            self._mode_flags = flags
            protocol.MODE.pack_into(self._memory, protocol.MODE_AT, flags)

    def call_arguments(self, number: int) -> tuple[int, int, int, int]:
        """Return the group, elements, dtype and peer of a call, or (0, 0, 0, -1) if it was overwritten."""
        call = protocol.CALL.unpack_from(self._memory, _call_at(number))
        return (call[7], call[3], call[9], call[12]) if call[0] == number else (0, 0, 0, -1)

    def write_awaited_key(self, number: int, key: int) -> None:
        """Record which store key, as an index in the string table, a call waits for; 0 means none."""
        at = _call_at(number)
        if protocol.U64.unpack_from(self._memory, at)[0] == number:
            protocol.STRING_NUMBER.pack_into(self._memory, at + protocol.CALL_KEY_AT, key)

    def write_heartbeat(self, last_answered: int) -> None:
        """Record the time of a heartbeat, and the last flight recorder request that was answered."""
        protocol.HEARTBEAT.pack_into(self._memory, protocol.HEARTBEAT_AT, _monotonic_ns(), last_answered)

    def write_last_line(self, place: str) -> None:
        """Record which line of the program the main thread is executing."""
        protocol.LAST_LINE.pack_into(self._memory, protocol.LAST_LINE_AT, self.string_number(place))

    def last_request(self) -> int:
        """Return the id of the latest request to dump the flight recorder, or 0 if there was none."""
        return int(protocol.REQUEST.unpack_from(self._memory, protocol.REQUEST_AT)[0])

    def last_values_request(self) -> int:
        """Return the id of the latest request to write values, or 0 if there was none."""
        return int(protocol.VALUES_REQUEST.unpack_from(self._memory, protocol.VALUES_REQUEST_AT)[0])

    def answer_values(self, request: int) -> None:
        """Record that the request for values with the id `request` was answered. The id 1 stands for no request yet."""
        if request == 1:
            protocol.VALUES_REQUEST.pack_into(self._memory, protocol.VALUES_REQUEST_AT, request)
        protocol.VALUES_ANSWER.pack_into(self._memory, protocol.VALUES_ANSWER_AT, request)

    def write_collective_counts(self, enqueued_count: int, completed_count: int) -> None:
        """Record the number of collectives that this process has enqueued and completed."""
        protocol.COLLECTIVES.pack_into(
            self._memory, protocol.COLLECTIVES_AT, enqueued_count, completed_count, _monotonic_ns()
        )

    def write_fact(self, name: str, value: str) -> int:
        """Store a fact, replacing an earlier one. Return the offset for `overwrite_fact`, or 0 without room."""
        with self._lock:
            key = self._add_string(name)
            at = protocol.STRINGS_AT + self._strings_used + protocol.STRING_LENGTH.size
            pair = key, self._add_string(value)
            (used,) = protocol.FACTS_USED.unpack_from(self._memory, protocol.FACTS_USED_AT)
            if used == protocol.FACTS or 0 in pair:
                return 0
            protocol.FACT.pack_into(self._memory, protocol.FACTS_AT + used * protocol.FACT.size, *pair)
            protocol.FACTS_USED.pack_into(self._memory, protocol.FACTS_USED_AT, used + 1)
            return at

    def overwrite_fact(self, at: int, value: str) -> None:
        """Overwrite the string at offset `at` in the status file with `value`, a string of the same length."""
        self._memory[at : at + len(value)] = value.encode("ascii")

    def write_device_counts(self, recorded_events: int, completed_events: int, *, changed: bool) -> None:
        """Record how many CUDA events were recorded and reached. `changed`: update the time of the latter."""
        at_ns = _monotonic_ns() if changed else protocol.DEVICE.unpack_from(self._memory, protocol.DEVICE_AT)[2]
        protocol.DEVICE.pack_into(self._memory, protocol.DEVICE_AT, recorded_events, completed_events, at_ns)

    def write_end(self, flag: int) -> None:
        """Record how and when the process ends."""
        flags = protocol.END.unpack_from(self._memory, protocol.END_AT)[1]
        protocol.END.pack_into(self._memory, protocol.END_AT, _monotonic_ns(), flags | flag)

    def _write(self, slot: list[int], now: int, event: int) -> None:
        try:
            position = self._position
            slot[2] = events = slot[2] + 1
            if now - self._last_event_ns > _SHORTEST_GAP_NS:
                self._note_gap(now - self._last_event_ns)
            self._last_event_ns = now
            self._last_event = event = event | self.step
            _pack_slot(self._memory, slot[0], slot[1], now, events, event, position, events ^ position ^ event ^ now)
        except Exception as error:
            self._give_up(error)

    def _new_total(self, group: int) -> list[int] | None:
        """Reserve space to count the calls in a process group. Return None if no space is left."""
        with self._lock:
            number = len(self._totals)
            if number == protocol.TOTALS:
                return None
            return self._totals.setdefault(group, [protocol.TOTALS_AT + number * protocol.TOTAL.size, 0, _HASH_START])

    def _claim_event_slot(self) -> list[int]:
        self._threads.events = slot = self._claim_slot()
        return slot

    def _give_up(self, error: Exception) -> None:
        if self.is_writing:
            self._detach()
            if self.on_failure is not None:
                self.on_failure(error)

    def _detach(self) -> None:
        self._memory = bytearray(protocol.STATUS_FILE_SIZE)
        self._lock = _thread.allocate_lock()
        self.is_writing = False

    def _add_string(self, text: str) -> int:
        existing = self._strings.get(text)
        if existing is not None:
            return existing
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
        """Reserve space for the calling thread's events in the status file."""
        with self._lock:
            index = self._slots_taken
            if index < protocol.SLOTS:
                self._slots_taken += 1
            else:
                index = self._slot_of_a_dead_thread()
        return [protocol.SLOTS_AT + index * protocol.SLOT_SIZE, _thread.get_native_id(), 0]

    def _slot_of_a_dead_thread(self) -> int:
        """Return the slot of a thread that has ended, or the last slot, which threads then share."""
        for index in range(protocol.SLOTS):
            tid = protocol.SLOT.unpack_from(self._memory, protocol.SLOTS_AT + index * protocol.SLOT_SIZE)[0]
            if not os.path.exists(f"/proc/self/task/{tid}"):
                return index
        return protocol.SLOTS - 1

    def _note_gap(self, gap_ns: int) -> None:
        kind = self._last_event >> _KIND_SHIFT
        if gap_ns > self._gaps[kind]:
            self._gaps[kind] = gap_ns
            protocol.GAP.pack_into(self._memory, protocol.GAPS_AT + kind * protocol.GAP.size, gap_ns)


def _call_at(number: int) -> int:
    return _CALLS_AT + (number - 1) % _CALLS * _CALL_SIZE


def _new_file(path: str) -> mmap.mmap:
    """Create a temporary file for `path` and map it into memory.

    The caller renames the file once its header is complete. The disk blocks are allocated first, because a write
    through a mapping to a full tmpfs kills a process with SIGBUS.
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
