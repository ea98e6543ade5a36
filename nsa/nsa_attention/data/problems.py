"""Handling of bad data. It is skipped and counted, or it stops the run."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from typing import Any

from ..values import BadShards
from ..world import CannotRunError

EXAMPLES = 5
# Number of bad shards and records that are remembered, so that the next epoch does not count them again.
MOST_PLACES = 100_000


class BadShardError(Exception):
    """Raised if the rest of a shard cannot be read."""


class BadRecordError(Exception):
    """The error for a record without usable text. A shard yields it in place of the text."""


def unreadable(error: OSError) -> BadShardError:
    """Return a BadShardError that gives the reason why a shard cannot be read.

    Raises CannotRunError instead if too many files are open, because the shard itself is not damaged.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise CannotRunError(f"{error.strerror}; raise the limit with ulimit -n") from error
    if isinstance(error, FileNotFoundError):
        return BadShardError("does not exist any more")
    return BadShardError(f"cannot be read ({error.strerror or error})")


class DataProblems:
    """A thread-safe counter of the bad data that a rank skips."""

    def __init__(self, policy: BadShards) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._places: set[str] = set()
        self._examples: list[str] = []
        self._slow: Counter[str] = Counter()

    def shard(self, place: str, problem: str) -> None:
        """Count the shard `place` as skipped, or raise CannotRunError if `--bad-shards` is `stop`."""
        self._report_once("shards", place, problem)

    def record(self, place: str, problem: str) -> None:
        """Count the record at `place` as skipped, or raise CannotRunError if `--bad-shards` is `stop`."""
        self._report_once("records", place, problem)

    def row(self, place: str, problem: str) -> None:
        """Count an unreadable row of the file `place`, or raise CannotRunError if `--bad-shards` is `stop`."""
        self._report("rows", place, problem)

    def slow(self, place: str, seconds: float) -> None:
        """Count a read of the shard `place` that took too long."""
        # Slow data is never skipped, because the order of the data would then depend on the timing.
        with self._lock:
            self._slow[place] += 1
        self._note(f"{place}: a read took {seconds:.1f} s")

    def _report_once(self, kind: str, place: str, problem: str) -> None:
        with self._lock:
            is_repeated = place in self._places
            if len(self._places) < MOST_PLACES:
                self._places.add(place)
        # With policy `stop`, always report: a prefetching worker may already have reported the same problem.
        if not is_repeated or self._policy is BadShards.STOP:
            self._report(kind, place, problem)

    def _report(self, kind: str, place: str, problem: str) -> None:
        if self._policy is BadShards.STOP:
            raise CannotRunError(f"{place}: {problem}; --bad-shards skip skips and counts it")
        with self._lock:
            self._counts[kind] += 1
        self._note(f"{place}: {problem}")

    def _note(self, text: str) -> None:
        with self._lock:
            if len(self._examples) < EXAMPLES and text not in self._examples:
                self._examples.append(text)

    def summary(self) -> dict[str, Any]:
        """Return the counts of the problems so far, with examples, for loader_rank<r>.json."""
        with self._lock:
            return {"left_out": dict(self._counts), "slow": dict(self._slow), "examples": list(self._examples)}

    def sentence(self) -> str | None:
        """Return a human-readable summary of the problems so far, or None if there were none."""
        with self._lock:
            counts = [f"{count} {kind} skipped" for kind, count in sorted(self._counts.items())]
            if self._slow:
                counts.append(f"{sum(self._slow.values())} slow reads")
            return f"{', '.join(counts)}: {'; '.join(self._examples)}" if counts else None
