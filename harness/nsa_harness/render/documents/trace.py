"""trace.json: one attempt on a time line of ranks, for ui.perfetto.dev and chrome://tracing.

Each rank is a process of the trace. It has a thread for its steps, one for each of its own threads (calls from Python
and the latest progress event), and one for each process group, as the flight recorder saw it. Unfinished slices stay
open.
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
from nsa_harness.core.evidence.steps import entered_s, python_calls
from nsa_harness.core.report import Outcome, Place
from nsa_harness.render import answer
from nsa_harness.render.text import escaped
from nsa_harness.texts import words

_MAX_EVENTS, _MIN_RANK_EVENTS = 100_000, 200  # calls and collectives: of all ranks; kept per rank at least
_THREADS = 1000  # per rank: Perfetto wants thread numbers that are unique in the whole trace
_SLIVER_US = 1.0  # length of a collective whose end was not recorded

_Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Lanes:
    """The threads of one rank, numbered in the order of their first event."""

    rank: int
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.rank + 1  # 0 is the kernel's

    def at(self, name: str) -> _Event:
        number = self.numbers.setdefault(name, len(self.numbers))
        return {"pid": self.pid, "tid": self.pid * _THREADS + min(number, _THREADS - 1)}

    def names(self) -> Iterator[_Event]:
        """Yield the names and the order of process and threads."""
        yield _named("process_name", {"pid": self.pid}, {"name": f"rank {self.rank}"})
        yield _named("process_sort_index", {"pid": self.pid}, {"sort_index": self.rank})
        for number, name in enumerate(list(self.numbers)):
            yield _named("thread_name", self.at(name), {"name": name})
            yield _named("thread_sort_index", self.at(name), {"sort_index": number})


def trace_json(evidence: Evidence, outcome: Outcome) -> str:
    """Return the trace. `outcome` is the verdict on `evidence`."""
    most = max(_MIN_RANK_EVENTS, _MAX_EVENTS // max(1, len(evidence.ranks)))
    events: list[_Event] = []
    entered: dict[tuple[str, int], list[tuple[float, _Event]]] = {}
    for rank in evidence.ranks:
        lanes = _Lanes(rank=rank.rank)
        lanes.at(_STEPS)
        events += _of_rank(rank, lanes, most, entered)
        events += _of_samples(evidence, lanes)
        events += lanes.names()
    events += _arrows(entered)
    events += _of_the_run(evidence, outcome)
    whole = {
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event["ts"], event["name"])),
        "displayTimeUnit": "ms",
        "otherData": {
            "scenario": outcome.spec.scenario,
            "attempt": outcome.attempt,
            "verdict": outcome.verdict.status,
            "cause": outcome.verdict.cause,
            "summary": outcome.verdict.summary,
            "kept of each rank": f"the newest {most} calls and collectives at most",
        },
    }
    return json.dumps(escaped(whole), separators=(",", ":"), allow_nan=False) + "\n"


_STEPS = "steps"


def _of_rank(
    rank: RankEvidence, lanes: _Lanes, most: int, entered: dict[tuple[str, int], list[tuple[float, _Event]]]
) -> Iterator[_Event]:
    if rank.exception is not None and rank.exception.at_s is not None:
        yield _instant(f"raised {rank.exception.type}", rank.exception.at_s, lanes, {"message": rank.exception.message})
    if rank.exit is not None:
        status = "" if rank.exit.status is None else f" with {words.exit_word(rank.exit.status)}"
        yield _instant(f"ended{status}", rank.exit.at_s, lanes, {"by the harness": rank.exit.during_teardown})
    if rank.status_file is None:
        return
    yield from _steps(rank.status_file, lanes)
    yield from _marks(rank.status_file, lanes)
    yield from (_call(call, rank.status_file, lanes) for call in rank.status_file.calls[-most:])
    newest = sorted(rank.collectives, key=lambda one: one.created_ns)[-most:]
    calls = python_calls(rank.status_file, newest)
    for one in newest:
        at_s = entered_s(rank.status_file, one)
        if at_s is None:
            continue
        slice_ = _collective(one, at_s, calls.get((one.group, one.seq)), lanes)
        entered.setdefault((one.group, one.seq), []).append((at_s, slice_))
        yield slice_


def _steps(board: StatusFile, lanes: _Lanes) -> Iterator[_Event]:
    """Yield the steps. The oldest stored step is skipped unless it is the first: its begin is not known."""
    known = board.steps_s
    if known and known[0][0] == 1:
        known = ((0, board.created_s), *known)
    for (_, began_s), (step, done_s) in pairwise(known):
        yield _slice(f"step {step}", began_s, done_s, lanes.at(_STEPS), "step", {})
    if board.latest_training_event is not None and board.exit_s is None and (not known or board.step > known[-1][0]):
        began_s = known[-1][1] if known else board.created_s
        yield _slice(f"step {board.step}", began_s, None, lanes.at(_STEPS), "step", {})


def _marks(board: StatusFile, lanes: _Lanes) -> Iterator[_Event]:
    """Yield the latest progress event of each thread, but not an open collective, which is shown as a call."""
    inside = any(call.left_s is None for call in board.calls)
    newest = {mark.tid: mark for mark in reversed(board.events)}
    for mark in newest.values():
        if inside and mark.kind == "collective":
            continue
        kept = {"name": mark.name, "step": mark.step}
        if mark.kind in ("exit", "returned", "raised"):
            yield {**_instant(mark.kind, mark.at_s, lanes, kept), **_thread(mark.tid, board, lanes), "s": "t"}
        else:
            yield _slice(_told(mark), mark.at_s, board.exit_s, _thread(mark.tid, board, lanes), "phase", kept)


def _told(mark: ProgressEvent) -> str:
    return f"{mark.kind} {mark.name}".rstrip()


def _thread(tid: int | None, board: StatusFile, lanes: _Lanes) -> _Event:
    trains = tid is None or tid == (board.latest_training_event.tid if board.latest_training_event else board.pid)
    return lanes.at("training thread" if trains else f"thread {tid}")


def _call(call: Call, board: StatusFile, lanes: _Lanes) -> _Event:
    kept = {"group": call.group, "step": call.step, "number": call.number, "place": _place(call.place), "key": call.key}
    return _slice(call.op, call.entered_s, call.left_s, _thread(call.tid, board, lanes), "call", kept)


def _collective(one: Collective, at_s: float, call: Call | None, lanes: _Lanes) -> _Event:
    """Return the collective from its enqueuing to the end of its call; gloo's recorder has no end."""
    left_s = call.left_s if call else None
    ended_s = (at_s + _SLIVER_US / 1e6 if left_s is None or left_s < at_s else left_s) if one.retired else None
    end = "when its call was left" if one.retired and left_s is not None else "not recorded" if one.retired else "none"
    kept = {"seq": one.seq, "sizes": [list(sizes) for sizes in one.sizes], "dtypes": list(one.dtypes), "end": end}
    return _slice(f"{one.op} #{one.seq}", at_s, ended_s, lanes.at(f"group {one.group}"), "collective", kept)


def _arrows(entered: dict[tuple[str, int], list[tuple[float, _Event]]]) -> Iterator[_Event]:
    """Yield arrows from the first rank in a collective to the last, also if the collectives of a number differ."""
    several = ((key, sorted(ranks, key=lambda rank: rank[0])) for key, ranks in entered.items() if len(ranks) > 1)
    for number, ((group, seq), members) in enumerate(several, 1):
        for place, (_, slice_) in enumerate(members):
            phase = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
            where = {key: slice_[key] for key in ("ts", "pid", "tid")}
            # A viewer joins what has the same name, category and id.
            joined = {"name": f"group {group} #{seq}", "cat": "collective", "id": number}
            yield {**where, "ph": phase, **joined, **({"bp": "e"} if phase == "f" else {})}


def _of_samples(evidence: Evidence, lanes: _Lanes) -> Iterator[_Event]:
    for sample in evidence.samples:
        if sample.rank == lanes.rank:
            leaf = f"{sample.leaf.function} {sample.leaf.file}:{sample.leaf.line}" if sample.leaf else None
            yield _instant(f"look: {sample.motion}", sample.at_s, lanes, {"stands at": leaf})


def _of_the_run(evidence: Evidence, outcome: Outcome) -> Iterator[_Event]:
    yield _everywhere(f"attempt {outcome.attempt} of {outcome.spec.scenario} begins", 0.0, {})
    # An earlier stall has ended.
    since_s = -math.inf if evidence.last_progress_s is None else evidence.last_progress_s
    if looks_s := [sample.at_s for sample in evidence.samples if sample.at_s > since_s]:
        yield _everywhere("suspected: no rank has moved", min(looks_s), {})
    signals = {(one.signal, one.sender, one.at_s) for one in evidence.signals}
    yield from (_everywhere(f"{name} from {sender}", at_s, {}) for name, sender, at_s in signals if at_s is not None)
    yield _everywhere(
        f"{words.verdict(outcome)}: {answer.title(outcome)}", evidence.ended_s, {"summary": outcome.verdict.summary}
    )


# The forms of an event.


def _slice(name: str, began_s: float, ended_s: float | None, where: _Event, kind: str, args: _Event) -> _Event:
    """Return a slice. Without an end it stays open and is marked as unfinished."""
    began = {"name": name, "ts": _us(began_s), "cat": kind, **where}
    if ended_s is None:
        return {**began, "ph": "B", "args": {**_kept(args), "unfinished": True}}
    return {**began, "ph": "X", "dur": max(0.0, _us(ended_s) - _us(began_s)), "args": _kept(args)}


def _instant(name: str, at_s: float, lanes: _Lanes, args: _Event) -> _Event:
    where = {"pid": lanes.pid, "tid": lanes.at(_STEPS)["tid"]}
    return {"name": name, "ph": "I", "ts": _us(at_s), "s": "p", "cat": "event", **where, "args": _kept(args)}


def _everywhere(name: str, at_s: float, args: _Event) -> _Event:
    where = {"pid": 1, "tid": _THREADS}
    return {"name": name, "ph": "I", "ts": _us(at_s), "s": "g", "cat": "event", **where, "args": _kept(args)}


def _named(what: str, where: _Event, args: _Event) -> _Event:
    return {"name": what, "ph": "M", "ts": 0, **where, "args": args}


def _kept(args: _Event) -> _Event:
    return {key: value for key, value in args.items() if value not in (None, "")}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1) if math.isfinite(seconds) else 0.0


def _place(place: Place | None) -> str | None:
    return None if place is None or place.file is None else words.place_name(place)
