"""What lies before the calls that are kept: as many as each group counted, and their rolling hash.

The hash is undone call by call, from the newest kept one back, until every rank is at the same count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from zlib import crc32

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import Call, StatusFile
from nsa_harness.core.evidence.stacks import is_library
from nsa_harness.core.verdict.group_waits import TRANSFERS

_UNDONE = pow(protocol.HASH_FACTOR, -1, 1 << 64)


def parted_before(group: str, boards: Mapping[int, StatusFile]) -> bool:
    """What these ranks called in the group before the oldest call that all of them keep was not the same.

    The hashes are compared at one count. A rank that has not come so far, or whose hashes cannot be undone, says
    nothing.
    """
    known = [hashes for board in boards.values() if (hashes := _hashes(group, board))]
    common = max((min(hashes) for hashes in known), default=0)
    return len({hashes[common] for hashes in known if common in hashes}) > 1


def _hashes(group: str, board: StatusFile) -> dict[int, int]:
    """By count, from the newest call back to before the oldest kept one; empty = not known."""
    total = board.counts.get(group)
    calls = [one for one in _newest(board) if one.group == group and _is_counted(one)]
    # Of two threads nobody knows which one counted first.
    if total is None or len({one.tid for one in calls}) > 1:
        return {}
    hashes, rolled = {total.calls: total.hash}, total.hash
    for count, call in zip(range(total.calls - 1, -1, -1), calls, strict=False):
        call_hash = _call_hash(call)
        if call_hash is None:
            break
        rolled = hashes[count] = (rolled * _UNDONE & protocol.HASH_MASK) ^ call_hash
    return hashes if hashes.get(0, protocol.HASH_START) == protocol.HASH_START else {}


def _newest(board: StatusFile) -> Iterator[Call]:
    """The unbroken series of calls that ends with the newest one, backwards."""
    backwards = board.calls[::-1]
    yield from backwards[:1]
    for later, one in pairwise(backwards):
        if one.number != later.number - 1:
            return
        yield one


def _is_counted(call: Call) -> bool:
    return not call.op.startswith(protocol.WAIT) and call.op not in TRANSFERS


def _call_hash(call: Call) -> int | None:
    """As the probe has hashed it; None where not every line that led to it is known."""
    if not call.chain and (call.place is None or call.place.file is None or not is_library(call.place.file)):
        return None
    lines = "\n".join(f"{one.file}:{one.line}:{one.function}" for one in call.chain)
    elements = call.elements if call.op in protocol.EVEN else 0
    return ((crc32(call.op.encode()) << 32 ^ crc32(lines.encode("utf-8", "replace"))) + elements) & protocol.HASH_MASK
