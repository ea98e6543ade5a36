"""Predict a rank's next call from its earlier calls, and compare ranks by calls that are no longer stored."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from zlib import crc32

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Call, StatusFile
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.verdict.group_waits import TRANSFERS

MIN_REPEATS = 2  # repeats before a pattern is trusted


@dataclass(frozen=True, kw_only=True)
class ExpectedCall:
    """A prediction of a rank's next call, based on its own earlier calls."""

    at: int  # index of an earlier event that is equal to the expected event
    times: int  # number of times that the expected event followed the same event before

    @property
    def is_trusted(self) -> bool:
        """Whether the rank's pattern of calls has been repeated often enough to trust the prediction."""
        return self.times >= MIN_REPEATS


@lru_cache(maxsize=4096)  # most ranks of a large job have equal histories
def expected_next(sites: tuple[Hashable, ...], at: int) -> ExpectedCall | None:
    """Predict the call at index `at` from the calls before it, or return None if they allow no clear prediction.

    `sites` identifies the rank's calls in order. The prediction is the call that followed the longest earlier sequence
    equal to the latest calls. There is none if the call before `at` is new, or if the longest equal sequences were
    followed by different calls.
    """
    lengths = {index: _common_length(sites, index, at) for index in range(1, at) if sites[index - 1] == sites[at - 1]}
    if not lengths:
        return None
    longest = max(lengths.values())
    best = [index for index, length in lengths.items() if length == longest]
    if len({sites[index] for index in best}) > 1:
        return None
    return ExpectedCall(at=best[-1], times=sum(sites[index] == sites[best[-1]] for index in lengths))


def comes_later(sites: Sequence[Hashable], expected: ExpectedCall, at: int, site: Hashable) -> bool:
    """Return whether the call `site` came after the expected call in the previous iteration."""
    return site in sites[expected.at + 1 : at]


def leaves_a_loop(sites: Sequence[Hashable], at: int) -> bool:
    """Return whether the rank, with its call at index `at`, left a loop in the same way as before."""
    return any(sites[index - 1] == sites[at - 1] and sites[index] == sites[at] for index in range(1, at))


def _common_length(sites: Sequence[Hashable], index: int, at: int) -> int:
    """Return the number of calls before `index` that match the calls before `at`."""
    length = 0
    while length < index and sites[index - 1 - length] == sites[at - 1 - length]:
        length += 1
    return length


def call_with_changed_peer(status_file: StatusFile) -> Call | None:
    """Return the rank's latest transfer if its peer is not the usual one, otherwise None."""
    transfers = [call for call in status_file.calls if not call.op.startswith(protocol.WAIT) and call.peer is not None]
    if not transfers:
        return None
    latest = transfers[-1]
    usual = [
        call.peer
        for call in transfers[:-1]
        if (call.op, call.group, call.place) == (latest.op, latest.group, latest.place)
    ]
    return latest if len(usual) >= MIN_REPEATS and len(set(usual)) == 1 and usual[0] != latest.peer else None


_INVERSE_FACTOR = pow(protocol.HASH_FACTOR, -1, 1 << 64)  # undoes the multiplication by HASH_FACTOR


def diverged_before_history(group: str, status_files: Mapping[int, StatusFile]) -> bool:
    """Return whether the ranks' calls in a group had already diverged before the oldest calls still stored.

    Each rank stores a hash over all its calls. The stored calls are removed from this hash, the latest first, down to a
    number of calls that all ranks have in common. Ranks that made fewer calls, or whose calls cannot be removed from
    the hash, are ignored.
    """
    histories = [hashes for status_file in status_files.values() if (hashes := _hashes(group, status_file))]
    common = max((min(hashes) for hashes in histories), default=0)
    return len({hashes[common] for hashes in histories if common in hashes}) > 1


def _hashes(group: str, status_file: StatusFile) -> dict[int, int]:
    """Map each number N to the hash of the rank's first N calls in the group, where it can be computed."""
    total = status_file.counts.get(group)
    calls = [call for call in _latest_calls(status_file) if call.group == group and _is_counted(call)]
    # If two threads made the calls, the order in which they were added to the hash is unknown.
    if total is None or len({call.tid for call in calls}) > 1:
        return {}
    hashes, current = {total.calls: total.hash}, total.hash
    for count, call in zip(range(total.calls - 1, -1, -1), calls, strict=False):
        call_hash = _call_hash(call)
        if call_hash is None:
            break
        current = hashes[count] = (current * _INVERSE_FACTOR & protocol.HASH_MASK) ^ call_hash
    return hashes if hashes.get(0, protocol.HASH_START) == protocol.HASH_START else {}


def _latest_calls(status_file: StatusFile) -> Iterator[Call]:
    """Yield the calls of a rank from the latest backwards, up to the first gap in their numbers."""
    backwards = status_file.calls[::-1]
    yield from backwards[:1]
    for later, call in pairwise(backwards):
        if call.number != later.number - 1:
            return
        yield call


def _is_counted(call: Call) -> bool:
    """Return whether a call is included in the hash of its group's calls."""
    return not call.op.startswith(protocol.WAIT) and call.op not in TRANSFERS


def _call_hash(call: Call) -> int | None:
    """Return the hash of a call that the instrumentation also computes, or None if the call path is unknown."""
    if not call.chain and (call.place is None or call.place.file is None or not is_library(call.place.file)):
        return None
    lines = "\n".join(f"{frame.file}:{frame.line}:{frame.function}" for frame in call.chain)
    elements = call.elements if call.op in protocol.EQUAL_SIZES else 0
    return ((crc32(call.op.encode()) << 32 ^ crc32(lines.encode("utf-8", "replace"))) + elements) & protocol.HASH_MASK
