"""trace.json: one attempt as a timeline of its ranks, for ui.perfetto.dev and chrome://tracing.

Each rank is a process of the trace. A rank has one trace thread for its steps, one per thread of the program (with
collective calls from Python and the latest progress event), and one per process group (with the collectives of the
flight recorder). A slice that had not ended stays open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nsa_harness.core.evidence.evidence import Call, Collective, Evidence, ProgressEvent, RankEvidence, StatusFile
from nsa_harness.core.evidence.reduced import typical_ranks
from nsa_harness.core.evidence.steps import entered_s, python_calls
from nsa_harness.core.report import Outcome, Place
from nsa_harness.render import answer
from nsa_harness.render.text import escaped
from nsa_harness.texts import words

_MAX_EVENTS = 100_000  # maximum number of calls and of collectives, over all ranks
_MIN_RANK_EVENTS = 200  # calls and collectives that every rank may have, even if there are many ranks
_MAX_RANKS = 64  # ranks that are drawn: those at fault, and of all others some of each kind
_THREADS = 1000  # thread numbers per rank: Perfetto requires numbers that are unique in the whole trace
_SLIVER_US = 1.0  # length that is drawn for a collective whose end is not known

_Event = dict[str, Any]  # a trace event, or some of its keys


@dataclass(frozen=True, kw_only=True)
class _Lanes:
    """The trace threads of one rank, numbered in the order in which they are first used."""

    rank: int
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.rank + 1  # process 0 is the kernel

    def at(self, name: str) -> _Event:
        """Return the keys "pid" and "tid" for an event on the trace thread called `name`."""
        number = self.numbers.setdefault(name, len(self.numbers))
        return {"pid": self.pid, "tid": self.pid * _THREADS + min(number, _THREADS - 1)}

    def names(self) -> Iterator[_Event]:
        """Yield events that tell the trace viewer the names of the rank and its threads."""
        yield _metadata("process_name", {"pid": self.pid}, {"name": f"rank {self.rank}"})
        yield _metadata("process_sort_index", {"pid": self.pid}, {"sort_index": self.rank})
        for number, name in enumerate(list(self.numbers)):
            yield _metadata("thread_name", self.at(name), {"name": name})
            yield _metadata("thread_sort_index", self.at(name), {"sort_index": number})


def trace_json(evidence: Evidence, outcome: Outcome) -> str:
    """Return trace.json as text."""
    at_fault = frozenset(outcome.culprit.ranks[:_MAX_RANKS] if outcome.culprit else ())
    drawn = at_fault | typical_ranks(evidence, _MAX_RANKS - len(at_fault))
    limit = max(_MIN_RANK_EVENTS, _MAX_EVENTS // max(1, len(drawn)))
    events: list[_Event] = []
    slices: _CollectiveSlices = {}
    for rank in (rank for rank in evidence.ranks if rank.rank in drawn):
        lanes = _Lanes(rank=rank.rank)
        lanes.at(_STEPS)
        events += _rank_events(rank, lanes, limit, slices)
        events += _sample_events(evidence, lanes)
        events += lanes.names()
    events += _arrows(slices)
    events += _run_events(evidence, outcome)
    trace = {
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event["ts"], event["name"])),
        "displayTimeUnit": "ms",
        "otherData": {
            "scenario": outcome.spec.scenario,
            "attempt": outcome.attempt,
            "verdict": outcome.verdict.status,
            "cause": outcome.verdict.cause,
            "summary": outcome.verdict.summary,
            "stored per rank": f"the latest {limit} calls and collectives at most",
            **({"ranks": f"{len(drawn)} of {len(evidence.ranks)}"} if len(drawn) < len(evidence.ranks) else {}),
        },
    }
    return json.dumps(escaped(trace), separators=(",", ":"), allow_nan=False) + "\n"


_STEPS = "steps"
# The collectives of all ranks by group and number, each with its start time.
_CollectiveSlices = dict[tuple[str, int], list[tuple[float, _Event]]]


def _rank_events(rank: RankEvidence, lanes: _Lanes, limit: int, slices: _CollectiveSlices) -> Iterator[_Event]:
    """Yield the trace events of one rank, with at most `limit` calls, and add its collectives to `slices`."""
    if rank.exception is not None and rank.exception.at_s is not None:
        yield _instant(f"raised {rank.exception.type}", rank.exception.at_s, lanes, {"message": rank.exception.message})
    if rank.exit is not None:
        status = "" if rank.exit.status is None else f" with {words.exit_word(rank.exit.status)}"
        yield _instant(f"ended{status}", rank.exit.at_s, lanes, {"by nsa-harness": rank.exit.during_teardown})
    if rank.status_file is None:
        return
    yield from _steps(rank.status_file, lanes)
    yield from _latest_events(rank.status_file, lanes)
    yield from (_call(call, rank.status_file, lanes) for call in rank.status_file.calls[-limit:])
    latest = sorted(rank.collectives, key=lambda collective: collective.created_ns)[-limit:]
    calls = python_calls(rank.status_file, latest)
    for collective in latest:
        at_s = entered_s(rank.status_file, collective)
        if at_s is None:
            continue
        key = (collective.group, collective.seq)
        slice_ = _collective(collective, at_s, calls.get(key), lanes)
        slices.setdefault(key, []).append((at_s, slice_))
        yield slice_


def _steps(status_file: StatusFile, lanes: _Lanes) -> Iterator[_Event]:
    """Yield one trace slice for each training step of a rank."""
    ends_s = status_file.steps_s
    if ends_s and ends_s[0][0] == 1:  # the start of a later step is not known
        ends_s = ((0, status_file.created_s), *ends_s)
    for (_, began_s), (step, done_s) in pairwise(ends_s):
        yield _slice(f"step {step}", began_s, done_s, lanes.at(_STEPS), "step", {})
    has_open_step = not ends_s or status_file.step > ends_s[-1][0]
    if status_file.latest_training_event is not None and status_file.exit_s is None and has_open_step:
        began_s = ends_s[-1][1] if ends_s else status_file.created_s
        yield _slice(f"step {status_file.step}", began_s, None, lanes.at(_STEPS), "step", {})


def _latest_events(status_file: StatusFile, lanes: _Lanes) -> Iterator[_Event]:
    """Yield the latest progress event of each thread."""
    in_collective = any(call.left_s is None for call in status_file.calls)
    latest = {event.tid: event for event in reversed(status_file.events)}
    for event in latest.values():
        if in_collective and event.kind == "collective":
            continue  # drawn by `_call`
        args = {"name": event.name, "step": event.step}
        if event.kind in ("exit", "returned", "raised"):
            yield {**_instant(event.kind, event.at_s, lanes, args), **_thread(event.tid, status_file, lanes), "s": "t"}
        else:
            thread = _thread(event.tid, status_file, lanes)
            yield _slice(_event_name(event), event.at_s, status_file.exit_s, thread, "phase", args)


def _event_name(event: ProgressEvent) -> str:
    return f"{event.kind} {event.name}".rstrip()


def _thread(tid: int | None, status_file: StatusFile, lanes: _Lanes) -> _Event:
    """Return the keys "pid" and "tid" for an event on the thread `tid`, or on the training thread if it is None."""
    event = status_file.latest_training_event
    training_tid = event.tid if event else status_file.pid
    return lanes.at("training thread" if tid in (None, training_tid) else f"thread {tid}")


def _call(call: Call, status_file: StatusFile, lanes: _Lanes) -> _Event:
    args = {"group": call.group, "step": call.step, "number": call.number, "place": _place(call.place), "key": call.key}
    return _slice(call.op, call.entered_s, call.left_s, _thread(call.tid, status_file, lanes), "call", args)


def _collective(collective: Collective, at_s: float, call: Call | None, lanes: _Lanes) -> _Event:
    """Return the trace slice for a collective recorded by the flight recorder.

    The slice starts when the collective was enqueued. It ends when the Python call returned, because gloo's flight
    recorder does not record the end of a collective.
    """
    left_s = call.left_s if call else None
    ended_s = None
    end = "none"
    if collective.retired:
        ended_s = at_s + _SLIVER_US / 1e6 if left_s is None or left_s < at_s else left_s
        end = "not recorded" if left_s is None else "when the call returned"
    args = {
        "seq": collective.seq,
        "sizes": [list(sizes) for sizes in collective.sizes],
        "dtypes": list(collective.dtypes),
        "end": end,
    }
    name = f"{collective.op} #{collective.seq}"
    return _slice(name, at_s, ended_s, lanes.at(f"group {collective.group}"), "collective", args)


def _arrows(slices: _CollectiveSlices) -> Iterator[_Event]:
    """Yield arrows that connect the collectives of different ranks with the same group and number."""
    several = ((key, sorted(ranks, key=lambda rank: rank[0])) for key, ranks in slices.items() if len(ranks) > 1)
    for number, ((group, seq), members) in enumerate(several, 1):
        for index, (_, slice_) in enumerate(members):
            phase = "s" if index == 0 else "f" if index == len(members) - 1 else "t"
            where = {key: slice_[key] for key in ("ts", "pid", "tid")}
            # A viewer connects events that have the same name, category and id.
            identity = {"name": f"group {group} #{seq}", "cat": "collective", "id": number}
            yield {**where, "ph": phase, **identity, **({"bp": "e"} if phase == "f" else {})}


def _sample_events(evidence: Evidence, lanes: _Lanes) -> Iterator[_Event]:
    """Yield one event for each stack snapshot of a rank."""
    for sample in evidence.samples_of_rank.get(lanes.rank, ()):
        leaf = f"{sample.leaf.function} {sample.leaf.file}:{sample.leaf.line}" if sample.leaf else None
        yield _instant(f"snapshot: {sample.motion}", sample.at_s, lanes, {"innermost frame": leaf})


def _run_events(evidence: Evidence, outcome: Outcome) -> Iterator[_Event]:
    """Yield the events that concern the whole attempt: its start, the last stall, signals and the verdict."""
    yield _global_instant(f"attempt {outcome.attempt} of {outcome.spec.scenario} starts", 0.0, {})
    # Snapshots before the last progress belong to a stall that has ended.
    since_s = -math.inf if evidence.last_progress_s is None else evidence.last_progress_s
    if snapshots_s := [sample.at_s for sample in evidence.samples if sample.at_s > since_s]:
        yield _global_instant("stall: no rank makes progress", min(snapshots_s), {})
    signals = {(signal.signal, signal.sender, signal.at_s) for signal in evidence.signals}
    for name, sender, at_s in signals:
        if at_s is not None:
            yield _global_instant(f"{name} from {sender}", at_s, {})
    title = f"{words.verdict(outcome)}: {answer.title(outcome)}"
    yield _global_instant(title, evidence.ended_s, {"summary": outcome.verdict.summary})


# Constructors of trace events.


def _slice(name: str, began_s: float, ended_s: float | None, where: _Event, kind: str, args: _Event) -> _Event:
    """Return a trace slice of the category `kind` on the thread `where`, unfinished if `ended_s` is None."""
    start = {"name": name, "ts": _us(began_s), "cat": kind, **where}
    if ended_s is None:
        return {**start, "ph": "B", "args": {**_without_empty(args), "unfinished": True}}
    return {**start, "ph": "X", "dur": max(0.0, _us(ended_s) - _us(began_s)), "args": _without_empty(args)}


def _instant(name: str, at_s: float, lanes: _Lanes, args: _Event) -> _Event:
    """Return a trace event of one rank that has no duration."""
    where = {"pid": lanes.pid, "tid": lanes.at(_STEPS)["tid"]}
    return {"name": name, "ph": "I", "ts": _us(at_s), "s": "p", "cat": "event", **where, "args": _without_empty(args)}


def _global_instant(name: str, at_s: float, args: _Event) -> _Event:
    """Return a trace event that has no duration and is drawn across all ranks."""
    where = {"pid": 1, "tid": _THREADS}
    return {"name": name, "ph": "I", "ts": _us(at_s), "s": "g", "cat": "event", **where, "args": _without_empty(args)}


def _metadata(name: str, where: _Event, args: _Event) -> _Event:
    return {"name": name, "ph": "M", "ts": 0, **where, "args": args}


def _without_empty(args: _Event) -> _Event:
    return {key: value for key, value in args.items() if value not in (None, "")}


def _us(seconds: float) -> float:
    """Convert seconds to microseconds. Return 0 if the time is unknown."""
    return round(seconds * 1e6, 1) if math.isfinite(seconds) else 0.0


def _place(place: Place | None) -> str | None:
    return None if place is None or place.file is None else words.whole_place_name(place)
