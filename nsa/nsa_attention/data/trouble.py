"""What is wrong with the data: left out and counted, or the end of the run, as `--bad-shards` says."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ..values import BadShards
from ..world import CannotRunError

EXAMPLES = 5
# So many places are known again when the next epoch comes to them.
MOST_PLACES = 100_000


class BadShardError(Exception):
    """What cannot be read of a shard, from here on to its end."""


class BadRecordError(Exception):
    """One record of a shard that is none; the next one may be."""


class Trouble:
    """Counts what is left out. Several threads may report."""

    def __init__(self, policy: BadShards) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._places: set[str] = set()
        self._examples: list[str] = []
        self._slow: Counter[str] = Counter()

    def shard(self, place: str, problem: str) -> None:
        """Raises CannotRunError where a bad shard stops the run."""
        self._report_once("shards", place, problem)

    def record(self, place: str, problem: str) -> None:
        """The same for one record."""
        self._report_once("records", place, problem)

    def row(self, place: str, problem: str) -> None:
        """The same for a row of tokens, in whose place another one is trained on."""
        self._report("rows", place, problem)

    def slow(self, place: str, seconds: float) -> None:
        """Never left out: what is, would depend on the clock, and so would the order of the data."""
        with self._lock:
            self._slow[place] += 1
        self._note(f"{place}: a read took {seconds:.1f} s")

    def _report_once(self, kind: str, place: str, problem: str) -> None:
        with self._lock:
            known = place in self._places
            if len(self._places) < MOST_PLACES:
                self._places.add(place)
        # A worker that is an epoch ahead may have met it first: what stops the run stops it wherever it is met.
        if not known or self._policy is BadShards.STOP:
            self._report(kind, place, problem)

    def _report(self, kind: str, place: str, problem: str) -> None:
        if self._policy is BadShards.STOP:
            raise CannotRunError(f"{place}: {problem}; --bad-shards skip leaves it out and counts it")
        with self._lock:
            self._counts[kind] += 1
        self._note(f"{place}: {problem}")

    def _note(self, text: str) -> None:
        with self._lock:
            if len(self._examples) < EXAMPLES and text not in self._examples:
                self._examples.append(text)

    def summary(self) -> dict[str, Any]:
        """For a file."""
        with self._lock:
            return {"left_out": dict(self._counts), "slow": dict(self._slow), "examples": list(self._examples)}

    def sentence(self) -> str | None:
        """For people; None if nothing was wrong."""
        with self._lock:
            counts = [f"{count} {kind} left out" for kind, count in sorted(self._counts.items())]
            if self._slow:
                counts.append(f"{sum(self._slow.values())} slow reads")
            return f"{', '.join(counts)}: {'; '.join(self._examples)}" if counts else None
