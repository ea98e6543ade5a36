"""Use a rank's call history: predict the next call from a pattern, and compare calls that are no longer stored."""

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
    """A prediction of a rank's next call, made from the repeating pattern of its earlier calls."""

    at: int  # index of the past event with the longest equal history; the event there is expected
    times: int  # how often the expected event followed the event before it

    @property
    def is_trusted(self) -> bool:
        return self.times >= MIN_REPEATS


@lru_cache(maxsize=4096)  # in a large world most ranks did the same
def expected_next(sites: tuple[Hashable, ...], at: int) -> ExpectedCall | None:
    """Return the prediction for index `at` of a rank's calls, made from the calls before it.

    `sites` identifies each call. Return None if the call before `at` never occurred earlier, or if the earlier places
    with the longest matching history were followed by different calls.
    """
    lengths = {here: _common_length(sites, here, at) for here in range(1, at) if sites[here - 1] == sites[at - 1]}
    if not lengths:
        return None
    longest = max(lengths.values())
    best = [here for here, length in lengths.items() if length == longest]
    if len({sites[here] for here in best}) > 1:
        return None
    return ExpectedCall(at=best[-1], times=sum(sites[here] == sites[best[-1]] for here in lengths))


def comes_later(sites: Sequence[Hashable], predicted: ExpectedCall, at: int, site: Hashable) -> bool:
    """Whether the call `site` came after the predicted call in the previous iteration."""
    return site in sites[predicted.at + 1 : at]


def leaves_a_loop(sites: Sequence[Hashable], at: int) -> bool:
    """Whether the calls at `at - 1` and `at` directly followed each other before.

    If the call at `at` was not expected, the rank then left a loop in the same way as before.
    """
    return any(sites[here - 1] == sites[at - 1] and sites[here] == sites[at] for here in range(1, at))


def _common_length(sites: Sequence[Hashable], here: int, at: int) -> int:
    """Return how many consecutive calls directly before index `here` equal those directly before index `at`."""
    length = 0
    while length < here and sites[here - 1 - length] == sites[at - 1 - length]:
        length += 1
    return length


def call_with_changed_peer(status_file: StatusFile) -> Call | None:
    """Return the rank's latest send or receive if the same source line always used another peer before, else None."""
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


_UNDONE = pow(protocol.HASH_FACTOR, -1, 1 << 64)


def diverged_before_history(group: str, status_files: Mapping[int, StatusFile]) -> bool:
    """Whether ranks made different calls in the group before the oldest call that all of them still store.

    Each rank stores one hash over all its calls. The stored calls are removed from this hash again, until the hashes of
    all ranks cover the same number of calls. Ranks with fewer calls, or with a hash that cannot be reduced, are
    ignored.
    """
    histories = [hashes for status_file in status_files.values() if (hashes := _hashes(group, status_file))]
    common = max((min(hashes) for hashes in histories), default=0)
    return len({hashes[common] for hashes in histories if common in hashes}) > 1


def _hashes(group: str, status_file: StatusFile) -> dict[int, int]:
    """Return, for each number N of calls that can be reached, the hash over the rank's first N calls in the group.

    The numbers go back from all calls to those that are no longer stored. The result is empty if the hash is unknown or
    inconsistent, or if several threads made calls.
    """
    total = status_file.counts.get(group)
    calls = [call for call in _latest_calls(status_file) if call.group == group and _is_counted(call)]
    # With two threads it is unknown which of them counted first.
    if total is None or len({call.tid for call in calls}) > 1:
        return {}
    hashes, rolled = {total.calls: total.hash}, total.hash
    for count, call in zip(range(total.calls - 1, -1, -1), calls, strict=False):
        call_hash = _call_hash(call)
        if call_hash is None:
            break
        rolled = hashes[count] = (rolled * _UNDONE & protocol.HASH_MASK) ^ call_hash
    return hashes if hashes.get(0, protocol.HASH_START) == protocol.HASH_START else {}


def _latest_calls(status_file: StatusFile) -> Iterator[Call]:
    """Yield the stored calls from the latest one backwards, and stop at the first gap in their numbers."""
    backwards = status_file.calls[::-1]
    yield from backwards[:1]
    for later, call in pairwise(backwards):
        if call.number != later.number - 1:
            return
        yield call


def _is_counted(call: Call) -> bool:
    return not call.op.startswith(protocol.WAIT) and call.op not in TRANSFERS


def _call_hash(call: Call) -> int | None:
    """Return the hash of one call, computed as the probe does.

    Return None if the source lines that led to the call are unknown.
    """
    if not call.chain and (call.place is None or call.place.file is None or not is_library(call.place.file)):
        return None
    lines = "\n".join(f"{frame.file}:{frame.line}:{frame.function}" for frame in call.chain)
    elements = call.elements if call.op in protocol.EQUAL_SIZES else 0
    return ((crc32(call.op.encode()) << 32 ^ crc32(lines.encode("utf-8", "replace"))) + elements) & protocol.HASH_MASK
