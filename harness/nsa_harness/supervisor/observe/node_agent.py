"""The agent of one node of a job on several nodes, for `nsa-harness watch --shared`.

An agent watches the ranks of its own node, and publishes their state in the shared directory. One of the agents is the
coordinator. It requests snapshots from all agents when no rank makes progress, and decides with the same proof as for a
job on one node. If the coordinator no longer renews its lease, another agent takes over.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nsa_harness import __version__
from nsa_harness.core.diagnosis.stall_note import stall_note
from nsa_harness.core.evidence.evidence import Ending, Evidence, Sample, Snapshot
from nsa_harness.core.evidence.nodes import evidence_of_snapshots, merge, merge_limits
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import HangKind
from nsa_harness.core.verdict.node_states import (
    LEASE_S,
    NodeState,
    Requests,
    SeenNode,
    Step,
    exceeds_limits,
    lost_nodes,
    next_step,
    quiet_s,
)
from nsa_harness.core.verdict.proof import SETTLE_S, Proof
from nsa_harness.core.verdict.verdict import proof_of
from nsa_harness.core.verdict.wait_graph import WaitGraph
from nsa_harness.supervisor.observe.observed_job import ObservedJob
from nsa_harness.supervisor.storage.shared_directory import Coordination, Decision, Look, SharedDirectory
from nsa_harness.texts.sentences import stall_text

_BEAT_S = 1.0
_LOOK_EVERY_S = 3.0
_MAX_LOOKS = 40  # merged snapshots of one suspicion that are kept
_END_WAIT_S = 40.0  # for the other nodes, once the node of the coordinator has ended; longer than LOST_S


def node_name() -> str:
    """Return the name of this node: the one that Slurm gave it, or else the name of the host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0] or "node"


@dataclass(kw_only=True)
class Changes:
    """Remembers when a value was seen to change, on this machine's clock."""

    _last: dict[str, tuple[object, float]] = field(default_factory=dict)

    def unchanged_s(self, key: str, value: object) -> float:
        """Return for how long `key` has had `value`."""
        now_s = time.monotonic()
        if key not in self._last or self._last[key][0] != value:
            self._last[key] = value, now_s
        return now_s - self._last[key][1]


@dataclass(kw_only=True)
class NodeAgent:
    """One node's part in the observation of a job on several nodes."""

    files: SharedDirectory
    expected_nodes: int  # 0 = unknown
    start_s: float  # a node that has not come after this time is reported
    ends_job: bool  # end the ranks of all nodes after a proven hang
    on_lead: Callable[[], None]  # called when this agent becomes the coordinator
    on_decision: Callable[[Decision], None]  # called in the coordinator when all nodes have stored their files
    on_stall: Callable[[str], None]  # called in the coordinator with text about a suspected stall
    on_recovery: Callable[[str], None]
    note: Callable[[str, str], None]  # records what could not be done, and why
    own: Coordination | None = None  # what this agent publishes as coordinator; None = another agent is coordinator
    progress_s: float | None = None  # on the monotonic clock: the last progress of this node's ranks
    is_suspecting: bool = False  # the watch of this node begins to suspect a stall of the job
    blocked_term: int = 0  # a term that another agent has claimed
    _changes: Changes = field(default_factory=Changes)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _episode: dict[str, list[Snapshot]] = field(default_factory=dict)
    _samples: dict[str, list[Sample]] = field(default_factory=dict)
    _looks: dict[str, Look] = field(default_factory=dict)
    _next_look_s: float = 0.0
    _reported: set[str] = field(default_factory=set)
    _pending: Decision | None = None  # a decision whose files not all nodes have stored yet
    _failed: bool = False

    def __post_init__(self) -> None:
        self.state = NodeState(node=self.files.node)
        self._began_s = time.monotonic()

    def start(self, origin_ns: int) -> None:
        """Publish the first state of this node, and begin to publish it every second."""
        self.state = NodeState(
            node=self.files.node, host=platform.node(), harness=__version__, attempt=self.files.attempt.path.name,
            started=time.time(), origin_ns=origin_ns,
        )  # fmt: skip
        self._publish()
        threading.Thread(target=self._publish_until_stopped, name="node state", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _publish_until_stopped(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._publish()

    def _publish(self) -> None:
        with self._lock:
            pause_s = None
            if self.state.living_ranks and self.progress_s is not None:
                pause_s = round(time.monotonic() - self.progress_s, 3)
            self.state = replace(self.state, beat=self.state.beat + 1, quiet_s=pause_s)
            with self._noting_failures("state.json"):
                self.files.write_state(self.state)
                if self.own is not None:
                    if self.files.is_superseded(self.own.term):
                        self.own = None
                    else:
                        self.own = replace(self.own, beat=self.own.beat + 1)
                        self.files.write_coordination(self.own)

    @contextmanager
    def _noting_failures(self, name: str) -> Iterator[None]:
        """Record the first error of the file system, and go on: the job must not depend on the report."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.note(name, f"it could not be written: {error.strerror or error}")

    def change(self, **changes: Any) -> None:
        """Change the state of this node, and publish it at once."""
        with self._lock:
            self.state = replace(self.state, **changes)
            self._publish()

    # As one of the nodes.

    def follow(self, job: NodeJob, now_s: float, limits: Limits) -> Ending | None:
        """Publish the progress of this node's ranks, answer a request, and follow a decision."""
        watch, ranks = job.watch, job.ranks
        living = ranks.living_pids
        limit_s = watch.stall_limit_s(limits)
        coordination = self.coordination
        with self._lock:
            self.progress_s = time.monotonic() - (now_s - ranks.last_progress_s())
            self.state = replace(
                self.state,
                ranks=tuple(sorted(ranks.pids)),
                living_ranks=tuple(sorted(living)),
                world_size=ranks.world_size,
                is_ending=job.ends_on_request(),
                stall_s=limit_s,
                check_s=watch.closed_wait_limit_s(limit_s),
            )
        requests = coordination.requests
        if requests.look > self.state.look and requests.is_suspected:
            self._answer(job, requests, now_s, limits)
        elif not requests.is_suspected and not requests.hang and watch.stalled_since_s is not None:
            if watch.reported_proof is not None:
                job.retract()
            else:
                watch.end_suspicion(max(ranks.last_progress_s(), watch.stalled_since_s))
        decision = coordination.decision
        if decision is not None and decision.number > self.state.done:
            self._store(job, decision)
        if job.ends_job and decision is not None and requests.end == decision.number:
            watch.spec = replace(watch.spec, limits=job.spec.limits)
            return Ending.DEADLINE if decision.kind == "deadline" else Ending.STALL
        if watch.reported_proof is not None:
            job.follow_reported_job(now_s)
            if watch.reported_proof is None:
                self.change(restarts=requests.hang)
        return None

    def _answer(self, job: NodeJob, requests: Requests, now_s: float, limits: Limits) -> None:
        watch = job.watch
        if watch.stalled_since_s is None:
            self.is_suspecting = True
            watch.begin_suspicion(now_s, job.ranks.last_progress_s(), watch.stall_limit_s(limits))
            self.is_suspecting = False
            self.files.remove_looks(requests.first)
        count = len(watch.snapshots.samples)
        watch.snapshots.count = requests.look - 1
        watch.snapshots.take()
        episode = watch.snapshots.episode
        snapshot = episode[-1] if episode and episode[-1].number == requests.look else None
        look = Look(
            look=requests.look,
            snapshot=snapshot,
            samples=tuple(watch.snapshots.samples[count:]),
            last_progress_s=job.ranks.last_progress_s(),
            limits=limits,
            exited_ranks=tuple(sorted(job.ranks.exited_ranks)),
            backend=watch.spec.backend,
        )
        with self._noting_failures(f"look{requests.look}.json"):
            self.files.write_look(look)
            self.change(look=requests.look)

    def _store(self, job: NodeJob, decision: Decision) -> None:
        """Store what the judge needs of this node for a decision."""
        watch = job.watch
        if decision.kind == "deadline":
            observed, watch.spec = watch.spec, replace(watch.spec, limits=job.spec.limits)
            watch.close(Ending.DEADLINE)
            watch.spec = observed
        elif decision.kind != "hang":
            watch.close(Ending.DETACHED)
        else:
            watch.snapshots.episode = [one for one in watch.snapshots.episode if one.number in decision.looks]
            watch.write("proof", kind=decision.hang_kind, reason=decision.reason)
            watch.read_values()
            if job.ends_job:
                self.change(done=decision.number)
                return
            kind = HangKind(decision.hang_kind) if decision.hang_kind else None
            watch.reported_proof = Proof(kind=kind, reason=decision.reason, graph=WaitGraph(waits=(), roots=()))
            job.proven_ranks = frozenset(job.ranks.living_pids)
            watch.close(Ending.STALL if watch.snapshots.episode else Ending.DETACHED)
            if not self.leads:
                self.on_stall(f"HANG ({decision.reason}); {self.coordination.holder} writes the report")
        job.command.copy_probe_files(job.attempt.probe_files)
        self.change(done=decision.number)

    # As the coordinator.

    @property
    def coordination(self) -> Coordination:
        return self.own or self.files.coordination()

    @property
    def leads(self) -> bool:
        return self.own is not None

    def coordinate(self) -> Step:
        """Take over the coordination if nobody has it, and do what is due. Return the step."""
        if not self.leads:
            self.take_over()
        if not self.leads:
            return Step.WAIT
        nodes = self._nodes()
        self._finish_decision(nodes)
        min_nodes = 1 if self._is_start_over else self.expected_nodes
        step = next_step(nodes, self.coordination.requests, min_nodes=min_nodes)
        self._report_absent(nodes)
        requests = self.coordination.requests
        if step is Step.BEGIN:
            self._episode.clear()
            self._request(replace(requests, look=requests.look + 1, first=requests.look + 1))
            pause_s = quiet_s(nodes)
            self.on_stall(f"no rank of {len(nodes)} nodes has made progress for {pause_s:.1f} s; taking stacks")
        elif step is Step.CANCEL:
            self._request(replace(requests, first=requests.look + 1))
            if any(node.state.living_ranks and not node.state.is_ending for node in nodes if not node.is_lost):
                self.on_recovery("progress again, so it was no hang")
        elif step is Step.RETRACT:
            self._request(replace(requests, first=requests.look + 1, hang=0))
            self.on_recovery("progress again, so it was no hang")
        elif step is Step.JUDGE:
            self._judge(nodes, requests)
        return step

    @property
    def _is_start_over(self) -> bool:
        return time.monotonic() - self._began_s > self.start_s

    def resign(self) -> None:
        """Let another agent take over at once."""
        with self._lock:
            if self.own is not None:
                with self._noting_failures("coordinator.json"):
                    self.files.write_coordination(replace(self.own, holder="", beat=self.own.beat + 1))
            self.own = None

    def publish_verdict(self, text: str) -> None:
        with self._lock:
            if self.own is not None:
                self.own = replace(self.own, verdict=text)
        self._publish()

    def take_over(self) -> None:
        """Become the coordinator if nobody is, or if the coordinator no longer renews its lease."""
        current = self.files.coordination()
        unchanged_s = self._changes.unchanged_s("coordinator", (current.term, current.beat, self.blocked_term))
        if unchanged_s <= LEASE_S and (current.holder or self.blocked_term > current.term):
            return
        term = max(current.term, self.blocked_term) + 1
        with self._noting_failures("coordinator.json"):
            if not self.files.claims_term(term):
                self.blocked_term = term
                return
            requests = replace(current.requests, first=current.requests.look + 1)
            if current.requests.hang:
                requests = current.requests
            with self._lock:
                self.own = replace(current, term=term, holder=self.files.node, beat=0, requests=requests)
                self.files.write_coordination(self.own)
                self._pending = current.decision  # the last coordinator may not have reported it
            self.on_lead()

    def _nodes(self) -> list[SeenNode]:
        states = {**self.files.states(), self.files.node: self.state}
        return [
            SeenNode(state=state, unseen_s=self._changes.unchanged_s(name, state.beat))
            for name, state in states.items()
        ]

    def _request(self, requests: Requests) -> None:
        with self._lock:
            if self.own is not None:
                self.own = replace(self.own, requests=requests)
        self._publish()

    def _finish_decision(self, nodes: list[SeenNode]) -> None:
        """Report a decision once all nodes that still report have stored their files for it."""
        decision = self._pending
        active = [node.state for node in nodes if not node.state.ended and not node.is_lost]
        if decision is not None and all(state.done >= decision.number for state in active):
            self._pending = None
            if self.ends_job and decision.kind in ("hang", "deadline"):
                # Not before: where one node ends its ranks, those of the others fail.
                self._request(replace(self.coordination.requests, end=decision.number))
            else:
                self.on_decision(decision)

    def _report_absent(self, nodes: list[SeenNode]) -> None:
        """Decide once that a node is lost, or that a node never came."""
        lost = lost_nodes(nodes)
        count = sum(len(node.state.ranks) for node in nodes)
        has_all_ranks = count > 0 and count >= max(node.state.world_size for node in nodes)
        is_missing = len(nodes) < self.expected_nodes and self._is_start_over and not has_all_ranks
        kind, key = ("lost", f"lost {lost}") if lost else ("missing", "missing")
        if (not lost and not is_missing) or key in self._reported or self._pending is not None:
            return
        if all(node.state.ended or node.is_lost for node in nodes):
            return  # the final report says so
        self._reported.add(key)
        self.decide(kind)

    def decide(self, kind: str, requests: Requests | None = None, **facts: Any) -> None:
        """As the coordinator, publish a decision. All agents then store their files, and `on_decision` reports it."""
        with self._lock:
            if self.own is None:
                return
            number = self.own.decision.number + 1 if self.own.decision else 1
            self._pending = Decision(number=number, kind=kind, **facts)
            requests = requests or self.own.requests
            if kind == "hang":
                requests = replace(requests, hang=number)
            self.own = replace(self.own, decision=self._pending, requests=requests)
        self._publish()

    def _judge(self, nodes: list[SeenNode], requests: Requests) -> None:
        """Merge the snapshots of all nodes, and decide that the job hangs if they prove it, or request the next."""
        if not self._read_looks(nodes, requests):
            return
        numbers = sorted({snapshot.number for episode in self._episode.values() for snapshot in episode})
        whole = self._evidence(numbers)
        proof = proof_of(whole) if whole.snapshots else None
        if proof is not None and (proof.is_closed or exceeds_limits(nodes)):
            looks = deciding_looks(whole.snapshots)
            if proof_of(self._evidence(looks)) is not None:  # as the judge will see it
                kind = proof.kind and str(proof.kind)
                ended = replace(requests, first=requests.look + 1)
                self.decide("hang", ended, looks=looks, hang_kind=kind, reason=proof.reason)
                return
        self._say_where(whole)
        if time.monotonic() >= self._next_look_s:
            self._request(replace(requests, look=requests.look + 1))

    def _read_looks(self, nodes: list[SeenNode], requests: Requests) -> bool:
        """Read every node's answer to the latest request. Return whether all of them could be read."""
        active = [node.state.node for node in nodes if not node.state.ended and not node.is_lost]
        for name in active:
            known = self._looks.get(name)
            if known is not None and known.look == requests.look:
                continue
            look = self.files.look(name, requests.look)
            if look is None:
                return False
            self._looks[name] = look
            self._samples.setdefault(name, []).extend(look.samples)
            if look.snapshot is not None:
                episode = self._episode.setdefault(name, [])
                episode.append(look.snapshot)
                del episode[1:-_MAX_LOOKS]
            is_second = requests.look <= requests.first
            self._next_look_s = time.monotonic() + (SETTLE_S if is_second else _LOOK_EVERY_S)
        self._looks = {name: self._looks[name] for name in active}
        return True

    def _evidence(self, looks: list[int] | tuple[int, ...]) -> Evidence:
        """Return the merged evidence of the snapshots with these numbers."""
        parts = {}
        for name, look in sorted(self._looks.items()):
            parts[name] = evidence_of_snapshots(
                name,
                [snapshot for snapshot in self._episode.get(name, ()) if snapshot.number in looks],
                self._samples.get(name, ()),
                last_progress_s=look.last_progress_s,
                limits=look.limits,
                exited_ranks=look.exited_ranks,
                backend=look.backend,
            )
        return merge(parts)

    def _say_where(self, evidence: Evidence) -> None:
        """Say where the ranks are blocked, if this has changed."""
        exited = [exit.rank for exit in evidence.exits if exit.rank is not None]
        note = stall_note(
            evidence.snapshots, evidence.samples, last_progress_s=evidence.last_progress_s or 0.0,
            limits=merge_limits([evidence.limits]), exited_ranks=exited, backend=evidence.backend, attended=True,
        )  # fmt: skip
        if note is not None:
            key = str((note.stalled_ranks, note.moving_ranks, note.open_waits))
            if key not in self._reported:
                self._reported.add(key)
                self.on_stall(stall_text(note))

    # At the end.

    def wait_for_others(self, finish: Callable[[], str]) -> str:
        """Once this node has ended, wait until the job has, and call `finish` in the coordinator. Return the verdict.

        An agent that is not the coordinator waits only until it has seen that the coordinator still works. The verdict
        is empty if another agent will find it.
        """
        deadline_s = time.monotonic() + _END_WAIT_S
        at_end = self.files.coordination()
        while time.monotonic() < deadline_s and not self._failed:
            step = self.coordinate()
            if step is Step.FINISH:
                verdict = finish()
                self.publish_verdict(verdict)
                self.resign()
                return verdict
            current = self.files.coordination()
            is_alive = bool(current.holder) and (current.term, current.beat) != (at_end.term, at_end.beat)
            if not self.leads and (current.verdict or is_alive):
                return current.verdict
            time.sleep(0.3)
        self.resign()
        return ""


def deciding_looks(snapshots: tuple[Snapshot, ...]) -> tuple[int, ...]:
    """Return the numbers of at most three snapshots that prove a hang: the first, and the last two that settle it."""
    last = snapshots[-1]
    earlier = [snapshot.number for snapshot in snapshots if last.at_s - snapshot.at_s >= SETTLE_S]
    return tuple(sorted({*earlier[:1], *earlier[-1:], last.number}))


@dataclass(kw_only=True)
class NodeJob(ObservedJob):
    """One attempt of an observed job on several nodes, as one of its agents sees it."""

    agent: NodeAgent

    def _decide(self, now_s: float, limits: Limits) -> Ending | None:
        if self.watch.spec.ranks < self.ranks.rank_count:
            self.store_spec()
        if self.ranks.has_restarted:
            return Ending.STALL if self.watch.reported_proof else Ending.RESTARTED
        ending = self.agent.follow(self, now_s, limits)
        self.agent.coordinate()
        return ending

    def _on_deadline(self) -> Ending | None:
        self.agent.decide("deadline")
        self.watch.spec = replace(self.watch.spec, limits=replace(self.spec.limits, deadline_s=None))
        return None

    def ends_on_request(self) -> bool:
        """Return whether the job reacts to a signal that asks it to end."""
        return self._ends_on_request()

    def retract(self) -> None:
        """Retract the reported hang, because a rank of another node has made progress."""
        self._retract(max(self.ranks.last_progress_s(), self.watch.stalled_since_s or 0.0))

    def follow_reported_job(self, now_s: float) -> None:
        """Retract the reported hang if the ranks of this node run on."""
        self._follow_reported_job(now_s)
