"""`nsa-harness watch --shared DIR`: observe the ranks of one node of a job, and report the whole job once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nsa_harness.commands.attempt import AttemptAudience, Notify, prepare
from nsa_harness.commands.judge import judge_attempt, judge_stored
from nsa_harness.commands.session import report_of, write_report
from nsa_harness.commands.watch import OnHang, WatchRequest, WatchSession
from nsa_harness.core.report import Outcome
from nsa_harness.core.scenario.observed_job import with_ranks
from nsa_harness.core.verdict.limits import START_S
from nsa_harness.errors import HarnessError, UsageError
from nsa_harness.render.listener import Broadcast, Listener
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.observe.node_agent import NodeAgent, NodeJob, node_name
from nsa_harness.supervisor.observe.observed_job import (
    ObservedJob,
    SignalForwarder,
    WatchedCommand,
    check_command,
    shell_status,
)
from nsa_harness.supervisor.storage.record import write_record, write_spec
from nsa_harness.supervisor.storage.redacted_files import redact_files
from nsa_harness.supervisor.storage.rundir import NODES, AttemptDir, RunDir, hold_lock
from nsa_harness.supervisor.storage.safe_directory import release_ballast
from nsa_harness.supervisor.storage.shared_directory import (
    Decision,
    SharedDirectory,
    claim_node,
    finish_job,
    job_identity,
    join_job,
    node_count,
    node_names,
)


def watch_node(request: WatchRequest) -> int:
    """Run and observe the command of one node. Return its exit status, or 124 if nsa-harness ended it."""
    check_command(request.command)
    assert request.shared is not None
    options = request.options
    run = RunDir(request.shared, redact=options.redact, git_diff=options.git_diff, reads_values=options.reads_values)
    forwarder = SignalForwarder()
    end_dead_runs()
    try:
        request.shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = join_job(run, _job(request), _restarts())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(
            f"--shared {request.shared}: {reason.lower()}; choose a directory that all nodes can write"
        ) from None
    session = NodeWatchSession(request=request, run=run, forwarder=forwarder, number=number)
    return session.run_command()


def _job(request: WatchRequest) -> str:
    return job_identity(request.command, os.environ)


def _restarts() -> int:
    """Return how often Slurm has requeued the job."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class NodeAudience(AttemptAudience):
    """An adapter that passes on what the watch of one node reports.

    That the ranks of this node make no progress does not mean that the job has stalled, so this is not passed on.
    """

    tell: Notify
    is_quiet: Callable[[], bool]

    def report_stall(self, text: str) -> None:
        if not self.is_quiet():
            self.tell(lambda listener: listener.on_stall(self.name, text))

    def report_recovery(self, text: str) -> None: ...


@dataclass(kw_only=True)
class NodeWatchSession(WatchSession):
    """The session of one node's agent. Only the coordinator judges the job and writes its documents."""

    earlier: dict[str, Outcome] = field(default_factory=dict)  # outcomes of earlier attempts, by directory
    ended_by_us: bool = False  # nsa-harness ended the ranks of this node
    has_finished: bool = False  # this agent wrote the report of the whole job

    def _store_record(self) -> None:
        if not self.run.directory.exists(self.run.record):
            write_record(self.run, self.record)

    def _first_attempt(self) -> AttemptDir:
        self.first_number = self.number
        own = self._join(self.number)
        self.agent.take_over()
        return own

    def _join(self, number: int) -> AttemptDir:
        """Claim this node's directory in an attempt, and return it."""
        whole = self.run.attempt(self.spec.scenario, number)
        self.files = SharedDirectory(attempt=whole, node=claim_node(whole, node_name()))
        self.agent = NodeAgent(
            files=self.files,
            expected_nodes=self.request.nodes or node_count(self.request.command),
            start_s=self.request.limits.start_s or START_S,
            ends_job=self.request.on_hang is OnHang.KILL,
            on_lead=self._prepare_whole,
            on_decision=self._report_decision,
            on_stall=lambda text: self._tell(lambda listener: listener.on_stall(whole.path.name, text)),
            on_recovery=lambda text: self._tell(lambda listener: listener.on_progress_again(whole.path.name, text)),
            note=self._note,
        )
        return self.files.own

    def _to_listeners(self, screen: Listener, others: tuple[Listener, ...]) -> Notify:
        """Return a function that tells the listeners of the whole job only what the coordinator says."""
        self.screen, self.whole_job = Broadcast(listeners=(screen,)), Broadcast(listeners=others)

        def notify(tell: Callable[[Listener], None]) -> None:
            if self.agent.leads:
                self.whole_job(tell)

        return notify

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        """Tell the screen and, as the coordinator, the listeners of the whole job."""
        self.screen(tell)
        self.broadcast(tell)

    def _say(self, text: str) -> None:
        if not self.request.options.json:
            self.output.print_line(text)

    def _note(self, what: str, why: str) -> None:
        self._say(f"{what}: {why}; the job goes on")
        with suppress(OSError):
            own = self.files.own
            own.append_record(own.watch, {"event": "trouble", "what": what, "why": why, "rank": None})

    def _observe_as_long_as_stored(self, child_command: WatchedCommand, attempt: AttemptDir) -> bool:
        """Observe the job. Whatever goes wrong with that, the job goes on, and keeps its exit status."""
        try:
            return self._observe(child_command, attempt)
        except Exception as error:
            self._say(f"no report: {type(error).__name__}: {error}; the job goes on")
            return self.ended_by_us
        finally:
            self.agent.stop()

    def _redact(self) -> None:
        with suppress(OSError):
            redact_files(self.files.own)
            if self.has_finished:
                super()._redact()

    def _begin(self, child_command: WatchedCommand) -> None:
        try:
            self.agent.start(child_command.origin_ns)
            self.agent.coordinate()
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}; the job goes on")

    def _new_job(self, **parts: Any) -> ObservedJob:
        agent = self.agent
        audience = NodeAudience(
            name=self.files.attempt.path.name,
            notify=self.broadcast,
            tell=self._tell,
            is_quiet=lambda: agent.is_suspecting,
        )
        return NodeJob(**{**parts, "agent": agent, "listener": audience})

    def _prepare_whole(self) -> None:
        """Write what describes the whole job, once, and lock it against `report`."""
        whole = self.files.attempt
        self.lock = hold_lock(self.run)
        if not self.run.directory.exists(whole.spec):
            prepare(whole, self.spec, self.facts)
            names = node_names(os.environ)
            nodes = {"event": "nodes", "expected": self.agent.expected_nodes, "names": list(names)}
            whole.append_record(whole.watch, nodes)

    def _next_attempt(self, child_command: WatchedCommand, observation: ObservedJob) -> AttemptDir:
        observation.store_spec()
        self.agent.change(ended=True, living_ranks=())
        self.agent.stop()
        self.agent.resign()
        self.number += 1
        self.spec = self._spec()
        attempt = self._join(self.number)
        prepare(attempt, self.spec, self.facts)
        child_command.next_attempt(attempt)
        self._begin(child_command)
        return attempt

    # Reports.

    def _judge_whole(self) -> Outcome:
        whole, states = self.files.attempt, self.files.states().values()
        count = max([state.world_size for state in states] + [rank + 1 for state in states for rank in state.ranks])
        spec = with_ranks(self.spec, count)
        write_spec(whole, spec)
        return judge_attempt(whole, spec, "job", self.number)

    def _earlier_outcomes(self) -> list[Outcome]:
        """Return the outcomes of the attempts before this one, which may have been observed by other agents."""
        for attempt in self.run.attempts():
            name = attempt.path.name
            if name != self.files.attempt.path.name and name not in self.earlier:
                with suppress(HarnessError, OSError):
                    self.earlier[name] = judge_stored(attempt)
        return list(self.earlier.values())

    def _report_whole(self, outcome: Outcome, *, is_final: bool) -> None:
        report = report_of(self.run, self.record, [*self._earlier_outcomes(), outcome])
        write_report(self.run, report)
        self._tell(lambda listener: listener.on_outcome(outcome, self.run.path))
        if is_final:
            self._tell(lambda listener: listener.on_done(report, self.run.path))

    def _report_decision(self, decision: Decision) -> None:
        """Report a hang, a passed deadline or a missing node while the job is still running."""
        outcome = self._judge_whole()
        self._report_whole(outcome, is_final=False)
        if not self.request.options.json:
            self.output.print_verdict(outcome, self.run.path, "the job is still running")
        if self.request.on_hang is OnHang.EXEC and decision.kind in ("hang", "deadline"):
            self._call_hook(self.files.attempt)

    def _conclude(self, child_command: WatchedCommand, observation: ObservedJob, *, must_end: bool) -> None:
        self.ended_by_us = must_end
        observation.store_spec()
        status = shell_status(child_command.child.wait())
        hang = self.agent.coordination.requests.hang
        restarts = hang if observation.watch.reported_proof is None and not must_end else 0
        self.agent.change(ended=True, status=status, living_ranks=(), restarts=restarts)
        verdict = self.agent.wait_for_others(self._finish)
        release_ballast(self.files.attempt.path / NODES)
        if must_end:
            self._say("nsa-harness ended the ranks of this node")
        elif not verdict and not self.request.quiet:
            self._say(f"this node has ended; page of the whole job: {self.run.path}/report.html")

    def _finish(self) -> str:
        """Judge and report the whole job, and return its verdict."""
        outcome = self._judge_whole()
        self._report_whole(outcome, is_final=True)
        self.has_finished = True
        finish_job(self.run, _job(self.request), _restarts(), self.first_number)
        release_ballast(self.run.path)
        return str(outcome.verdict.status)
