"""Blocks of tokenized documents that the ranks of one node share.

One rank of the node owns a shard, reads it, and tokenizes it block by block. It writes the tokens of a block to
anonymous memory, and sends the file descriptor of this memory to the other ranks through abstract Unix sockets. The
kernel frees the memory and the sockets when the processes end, so nothing outlives a run. No thread waits for messages:
a rank receives them when it needs a block.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tokens import Tokens

WAIT_S = 5.0  # longest wait for a block that its owner has not read, or for a rank that accepts no messages
MOST_WAIT_S = 60.0  # longest wait for a block that its owner is tokenizing
POLL_S = 0.1
MOST_BYTES = 1 << 31  # size limit of an encoded block

_BEGUN, _BLOCK, _NONE = range(3)  # kinds of messages
_MESSAGE = struct.Struct("<32siq4q")  # identity of the data, local rank, kind, key
_SIZES = struct.Struct("<QQ")  # bytes of the tokens, and bytes of the description
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("|u1", "<u2", "<u4"))}
_MALFORMED = (ValueError, TypeError, KeyError, struct.error, IndexError, OverflowError, RecursionError, MemoryError)
# A launcher gives these variables one value on all ranks of a node, and other values on other nodes or in other runs.
_OF_NODE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")

Key = tuple[int, int, int, int]  # number of the session, epoch, shard, block

_streams: Counter[int] = Counter()  # number of streams that each local rank has opened, all in the same order


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The outcome of reading a block: the number of records, and any delay or error."""

    records: int  # including bad records
    has_text: bool
    slow_s: float | None  # duration of a slow read; None if it was not slow
    problem: str | None  # why the rest of the shard cannot be read; None if it can


@dataclass(frozen=True, kw_only=True)
class SharedBlock:
    """The tokens of a block's usable documents, in shuffled order, and the problems of its other records."""

    reading: Reading
    documents: list[Tokens]
    bad_records: list[tuple[int, str]]  # number of the record in the block, and its problem

    def encode(self) -> bytes:
        """Return the block as bytes for `decode`. Raise ValueError if the block is too large."""
        tokens = np.concatenate(self.documents) if self.documents else np.zeros(0, np.uint8)
        lengths = [len(document) for document in self.documents]
        description = json.dumps([vars(self.reading), lengths, self.bad_records, tokens.dtype.str]).encode()
        if len(description) + tokens.nbytes > MOST_BYTES:
            raise ValueError("the block is too large")
        return _SIZES.pack(tokens.nbytes, len(description)) + tokens.tobytes() + description

    @classmethod
    def decode(cls, content: NDArray[np.uint8], vocab: int) -> SharedBlock:
        """Decode the bytes of a block. Raise one of _MALFORMED if they are invalid or a token is not below `vocab`."""
        size, description_size = _SIZES.unpack(content[: _SIZES.size].tobytes())
        if _SIZES.size + size + description_size != len(content):
            raise ValueError("its size is wrong")
        description = content[_SIZES.size + size :].tobytes()
        reading, lengths, bad_records, dtype = json.loads(description)
        tokens = content[_SIZES.size : _SIZES.size + size].view(_DTYPES[dtype])
        problem, slow_s = reading["problem"], reading["slow_s"]
        is_valid = (
            all(type(length) is int and length >= 0 for length in lengths)
            and sum(lengths) == len(tokens)
            and (not len(tokens) or int(tokens.max()) < vocab)
            and all(type(number) is int and isinstance(text, str) for number, text in bad_records)
            and type(reading["records"]) is int
            and (problem is None or isinstance(problem, str))
        )
        if not is_valid:
            raise ValueError("not a block")
        ends = np.cumsum(lengths, dtype=np.int64)
        return cls(
            reading=Reading(
                records=reading["records"],
                has_text=bool(reading["has_text"]),
                slow_s=None if slow_s is None else float(slow_s),
                problem=problem,
            ),
            documents=[tokens[end - length : end] for end, length in zip(ends.tolist(), lengths, strict=True)],
            bad_records=[(number, text) for number, text in bad_records],
        )


class SharedBlocks:
    """The socket through which a rank receives blocks from the other ranks of its node.

    `rank` is the rank within the node, and `size` the number of ranks on the node. `identity` describes the data:
    messages about other data are ignored.
    """

    def __init__(self, *, rank: int, size: int, shards: int, vocab: int, identity: str) -> None:
        self.rank, self.size, self.shards, self.vocab = rank, size, shards, vocab
        node = [os.environ.get(name) for name in _OF_NODE]
        self._name = hashlib.sha256(repr((node, os.geteuid(), size, _streams[rank])).encode()).hexdigest()
        _streams[rank] += 1
        self.identity = hashlib.sha256(identity.encode()).digest()
        self.received: dict[Key, int | None] = {}  # descriptor of a block, or None if its owner could not provide it
        self.begun: set[Key] = set()
        self.heard: set[int] = set()  # ranks that have sent a message
        self._starts = 0
        self.socket: socket.socket | None = None
        # If there is no socket, for example because too many files are open, this rank reads all blocks itself.
        with suppress(OSError, AttributeError):
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            weakref.finalize(self, own.close)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            own.bind(self.address(rank))
            own.settimeout(POLL_S)
            self.socket = own

    def address(self, rank: int) -> bytes:
        """Return the socket address of a rank of the node."""
        return f"\0nsa-data-{self._name}-{rank}".encode()

    def start(self) -> Session:
        """Return a new session. The stream calls this whenever it starts to read from a position."""
        self._starts += 1
        return Session(self, self._starts)

    def receive(self) -> None:
        """Receive and store one message. Raise TimeoutError after POLL_S, and ConnectionError if there is no socket."""
        if self.socket is None:
            raise ConnectionError("this rank has no socket")
        space = socket.CMSG_SPACE(struct.calcsize("3i")) + socket.CMSG_SPACE(struct.calcsize("i"))
        message, ancillary, _, _ = self.socket.recvmsg(_MESSAGE.size, space)
        user, descriptors = None, array("i")
        for _, kind, content in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                _, user, _ = struct.unpack("3i", content)
            elif kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        # An abstract address has no permissions, so any user may send messages.
        if user == os.geteuid() and len(message) == _MESSAGE.size and self._store(message, descriptors):
            return
        for descriptor in descriptors:
            os.close(descriptor)

    def _store(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Store the content of a message. Return whether its file descriptors were stored and must stay open."""
        identity, rank, kind, *numbers = _MESSAGE.unpack(message)
        start, epoch, shard, block = numbers
        key = start, epoch, shard, block
        if identity != self.identity or key in self.received:
            return False
        self.heard.add(rank)
        if kind == _BEGUN:
            self.begun.add(key)
            return False
        if kind == _BLOCK and len(descriptors) != 1:
            return False
        self.received[key] = descriptors[0] if kind == _BLOCK else None
        return kind == _BLOCK

    def forget_before(self, key: Key) -> None:
        """Free the blocks that come before `key` in the stream."""
        self.begun = {begun for begun in self.begun if begun >= key}
        for passed in [other for other in self.received if other < key]:
            if (descriptor := self.received.pop(passed)) is not None:
                os.close(descriptor)


class Session:
    """The exchange of blocks between the ranks of a node, until the stream is closed or moved to another position."""

    def __init__(self, shared: SharedBlocks, start: int) -> None:
        self._shared, self._start = shared, start
        self._patience_s = dict.fromkeys(range(shared.size), WAIT_S)
        self._send_patience_s = dict(self._patience_s)
        self._closed = threading.Event()
        self.missed: tuple[int, int, int] | None = None  # the first block that this rank had to read itself
        self.reason = ""

    def is_own(self, epoch: int, shard: int) -> bool:
        """Return whether this rank owns a shard. `shard` is the index in the shuffled order of the epoch."""
        return self._owner(epoch, shard) == self._shared.rank

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """End all waits for other ranks within POLL_S, including waits in other threads."""
        self._closed.set()

    def begin(self, epoch: int, shard: int, block: int) -> None:
        """Tell the other ranks that this rank has read the block and is going to send its tokens."""
        for rank in self._others():
            with suppress(OSError):
                self._send_now(rank, _BEGUN, (self._start, epoch, shard, block), None)

    def offer(self, epoch: int, shard: int, block: int, content: SharedBlock | None) -> None:
        """Send the block to the other ranks, or tell them that this rank cannot provide it."""
        key = self._start, epoch, shard, block
        descriptor = None
        try:
            if content is not None:
                with suppress(OSError, AttributeError, ValueError, MemoryError):
                    descriptor = _anonymous_memory(content.encode())
            for rank in self._others():
                self._send(rank, _NONE if descriptor is None else _BLOCK, key, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def take(self, epoch: int, shard: int, block: int) -> SharedBlock | None:
        """Wait for a block that another rank owns, and return it, or None if this rank has to read it itself.

        After a block that an owner did not provide in time, this rank waits only half as long for the next one. The
        waits for an owner that is always late thus add up to at most 2 * WAIT_S.
        """
        owner, key = self._owner(epoch, shard), (self._start, epoch, shard, block)
        patience_s = self._patience_s[owner]
        content, reason = None, f"it did not provide one within {patience_s:.1f} s"
        try:
            content = self._receive(owner, key, patience_s)
        except TimeoutError:
            pass
        except OSError as error:
            reason, patience_s = str(error), 0.0
        except _MALFORMED as error:
            reason = f"its block is not valid ({error})"
        self._patience_s[owner] = patience_s / 2 if content is None else WAIT_S
        if content is None and self.missed is None:
            self.missed = epoch, shard, block
            self.reason = f"local rank {owner}: {reason}"
        return content

    def _owner(self, epoch: int, shard: int) -> int:
        return (epoch * self._shared.shards + shard) % self._shared.size

    def _others(self) -> list[int]:
        return [rank for rank in range(self._shared.size) if rank != self._shared.rank]

    def _receive(self, owner: int, key: Key, patience_s: float) -> SharedBlock | None:
        shared, begin_s = self._shared, time.monotonic()
        shared.forget_before(key)
        while key not in shared.received:
            try:
                shared.receive()
            except TimeoutError:
                if owner in shared.heard:
                    _check_presence(shared.address(owner))
                limit_s = MOST_WAIT_S if key in shared.begun else patience_s
                if self.is_closed() or time.monotonic() - begin_s > limit_s:
                    raise
        if (descriptor := shared.received.pop(key)) is None:
            return None
        try:
            return SharedBlock.decode(_content(descriptor), shared.vocab)
        finally:
            os.close(descriptor)

    def _send(self, rank: int, kind: int, key: Key, descriptor: int | None) -> None:
        """Send a message. If `rank` has not started or its message queue is full, try again for a limited time."""
        begin_s = time.monotonic()
        while True:
            try:
                self._send_now(rank, kind, key, descriptor)
                self._send_patience_s[rank] = WAIT_S
                return
            except OSError as error:
                has_ended = isinstance(error, ConnectionRefusedError) and rank in self._shared.heard
                if has_ended or time.monotonic() - begin_s > self._send_patience_s[rank]:
                    self._send_patience_s[rank] = 0.0 if has_ended else self._send_patience_s[rank] / 2
                    return
            if self._closed.wait(POLL_S / 10):
                return

    def _send_now(self, rank: int, kind: int, key: Key, descriptor: int | None) -> None:
        message = _MESSAGE.pack(self._shared.identity, self._shared.rank, kind, *key)
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        if self._shared.socket is not None:
            self._shared.socket.sendmsg([message], rights, socket.MSG_DONTWAIT, self._shared.address(rank))


def _check_presence(address: bytes) -> None:
    """Raise ConnectionRefusedError if no process has a socket at `address`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.connect(address)


def _anonymous_memory(content: bytes) -> int:
    """Return the file descriptor of memory with this content. The memory is freed with its last descriptor."""
    descriptor = os.memfd_create("nsa-data")
    try:
        rest = memoryview(content)
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _content(descriptor: int) -> NDArray[np.uint8]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > 2 * MOST_BYTES:
        raise ValueError("it is no memory of a block")
    content = np.empty(status.st_size, np.uint8)
    done = 0
    while done < len(content):
        count = os.preadv(descriptor, [content[done:].data], done)
        if not count:
            raise ValueError("it has shrunk")
        done += count
    return content
