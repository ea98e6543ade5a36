"""The question why the ranks of a failed run took different ways, and its answer.

The answer comes from a second run, in which each rank records its statements and values, and from further runs in which
an experiment removes the supposed origin of the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.trial import FAILED_STATUSES, failure_signature
from nsa_harness.core.recording.explanation import Candidate, Explanation, OriginKind, SilentDifference
from nsa_harness.core.report import Finding, Outcome, Place, Ranks, Status

MAX_EXPERIMENTS = 5
MAX_OTHER_CANDIDATES = 2  # candidates that are shown besides the one that counts as the origin


class WhyResult(StrEnum):
    """The kind of answer to the question why a run failed."""

    CERTAIN = "certain"  # an experiment removed the difference, and the run went on
    DECISION = "decision"  # the run went on with a forced decision, whose origin is likely
    LIKELY = "likely"  # an origin is known, but no experiment proved it
    FIRST_LINE = "first_line"  # the line of the first run stands: a lock, a pipe, a queue, a sleep or a native wait
    NOT_EXPLAINED = "not_explained"  # the recorded run failed alike, and shows no difference that explains it
    PASSED = "passed"  # no recorded run failed
    OTHERWISE = "otherwise"  # a recorded run failed, but in another way
    UNDECIDED = "undecided"  # interrupted, the budget was used up, or no run could be judged


HAS_ORIGIN = (WhyResult.CERTAIN, WhyResult.DECISION, WhyResult.LIKELY)


class RunResult(StrEnum):
    """The way in which a run of `why` ended, compared with the failed run."""

    SAME = "same"
    PASSED = "passed"
    OTHERWISE = "otherwise"
    UNJUDGED = "unjudged"


class Proof(StrEnum):
    """The conclusion that an experiment allows about its candidate."""

    ORIGIN = "origin"  # the run went on: the candidate is the origin
    DECISION = "decision"  # the run went on with a forced decision
    DROPPED = "dropped"  # the run failed nevertheless: the candidate is not the origin
    SECOND_CAUSE = "second_cause"  # the run got past the point, and then failed somewhere else
    RACE = "race"  # the run also goes on without the change, so it proves nothing
    OTHERWISE = "otherwise"  # with the change, the run failed in another way, which proves nothing
    NONE = "none"  # the change could not be made, or the run could not be judged


SUCCESSES = (Proof.ORIGIN, Proof.DECISION)


@dataclass(frozen=True, kw_only=True)
class FirstAnswer:
    """The failure to explain, and the answer that its own run gave."""

    run_id: str
    path: str  # of the run directory
    attempt: str  # name of its directory
    verdict: Status
    cause: str | None
    place: Place | None
    ranks: Ranks
    advice: str
    stands: bool  # a recorded run cannot show a better line


@dataclass(frozen=True, kw_only=True)
class WhyRun:
    """A run that `why` launched, and what it showed."""

    dir: str
    end: str  # such as "HANG · lock_cycle · train.py:4"
    result: RunResult
    wall_s: float
    experiment: str = ""  # kind of the experiment; "": the run was only recorded
    change: str = ""  # the change that the experiment makes, in words
    candidate: int | None = None  # index of the candidate that the experiment is about
    place: Place | None = None  # the statement at which the experiment makes its change
    name: str = ""  # the variable that the experiment sets
    next_place: Place | None = None  # where the ranks stopped after the point that the experiment let them pass
    proof: Proof = Proof.NONE
    reason: str = ""  # why the change could not be made


@dataclass(frozen=True, kw_only=True)
class WhyReport:
    """The answer to the question why the ranks of a failed run took different ways."""

    scenario: str
    first: FirstAnswer
    directory: str  # in which the program runs
    max_runs: int
    budget_s: float | None = None
    values: bool = True  # values are recorded, not only statements
    experiments: bool = True
    passed_before: int = 0  # attempts of the failed launch that passed
    result: WhyResult = WhyResult.UNDECIDED
    explanation: Explanation | None = None
    runs: tuple[WhyRun, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def recorded_runs(self) -> tuple[WhyRun, ...]:
        return tuple(run for run in self.runs if not run.experiment)

    @property
    def unchanged_runs(self) -> tuple[WhyRun, ...]:
        """The recorded runs, and the experiments that found nothing to change and therefore needed no control run."""
        following = (*self.runs[1:], None)
        return self.recorded_runs + tuple(
            run
            for run, control in zip(self.runs, following, strict=True)
            if run.proof is Proof.RACE and (control is None or control.experiment)
        )

    @property
    def has_origin(self) -> bool:
        """Whether the answer is a line that made the difference between the ranks."""
        return self.result in HAS_ORIGIN and self.origin is not None

    @property
    def took_s(self) -> float:
        return sum(run.wall_s for run in self.runs)

    @property
    def is_flaky(self) -> bool:
        """Whether the same launch has also passed, so that an experiment in which it passes proves nothing."""
        has_raced = any(run.proof is Proof.RACE for run in self.runs)
        return (
            bool(self.passed_before) or has_raced or any(run.result is RunResult.PASSED for run in self.recorded_runs)
        )

    @property
    def is_controlled(self) -> bool:
        """Whether the unchanged program was launched again after an experiment that let the ranks go on."""
        successes = [index for index, run in enumerate(self.runs) if run.proof in SUCCESSES]
        return bool(successes) and any(not run.experiment for run in self.runs[successes[-1] :])

    @property
    def dropped(self) -> frozenset[int]:
        """Indices of the candidates that an experiment excluded."""
        return frozenset(
            run.candidate for run in self.runs if run.proof is Proof.DROPPED and run.candidate is not None
        ) - {run.candidate for run in self.runs if run.proof is Proof.ORIGIN}

    @property
    def origin(self) -> Candidate | None:
        """The candidate that counts as the origin: the one that an experiment proved, or else the most likely one."""
        candidates = self.explanation.candidates if self.explanation else ()
        proved = [run.candidate for run in self.runs if run.proof is Proof.ORIGIN]
        remaining = [index for index in range(len(candidates)) if index not in self.dropped]
        if any(run.proof is Proof.DECISION for run in self.runs):  # a line behind the decision is an effect
            remaining.sort(key=lambda index: self._is_effect(candidates[index]))
        return next((candidates[index] for index in (*proved, *remaining) if index is not None), None)

    def _is_effect(self, candidate: Candidate) -> bool:
        """Return whether a candidate is no more than the call in which a rank stopped."""
        ends = self.explanation.ends if self.explanation else ()
        stops = {(place.file, place.line) for _, place, _ in ends if place}
        return candidate.kind is OriginKind.CALL and (candidate.place.file, candidate.place.line) in stops

    @property
    def others(self) -> tuple[Candidate, ...]:
        """Further candidates that no experiment excluded."""
        candidates = self.explanation.candidates if self.explanation else ()
        remaining = [one for index, one in enumerate(candidates) if index not in self.dropped and one != self.origin]
        return tuple(remaining[:MAX_OTHER_CANDIDATES])


# In these waits, the stack of the first run shows the line to change. What made the wait endless is not a difference
# between the ways of the ranks.
_WAITS_WITHIN_A_RANK = frozenset({
    Cause.BACKWARD_FUNCTION_BLOCKED, Cause.BLOCKED_IO, Cause.DATALOADER_WORKER_BLOCKED, Cause.DATALOADER_WORKER_DIED,
    Cause.DEBUGGER_WAITS, Cause.FORK_LOCK, Cause.GIL_HELD_NATIVE, Cause.LOCK_CYCLE, Cause.NATIVE_BUSY_LOOP,
    Cause.PIPE_FULL, Cause.POOL_WORKER_LOST, Cause.RPC_DEADLOCK, Cause.SHUTDOWN_HANG, Cause.STARVED,
    Cause.STOPPED_PROCESS, Cause.THREAD_DIED, Cause.TRANSPORT,
})  # fmt: skip
# These failures come from outside the program, or are the same on every rank.
_NO_QUESTION_OF_RANKS = frozenset({
    Cause.CHECKPOINT_RECOMPUTE_MISMATCH, Cause.CUDA_OOM, Cause.DISK_FULL, Cause.EXPECTATION_MISSED,
    Cause.HIDDEN_PACKAGE, Cause.HOST_OOM, Cause.INFRA, Cause.INPLACE_MODIFICATION, Cause.KILLED, Cause.NO_GRADIENT,
    Cause.SEGFAULT, Cause.SLOW, Cause.STATIC_GRAPH_CHANGED,
})  # fmt: skip


def line_stands(cause: str | None) -> bool:
    """Return whether the line of the first run stands for this cause, whatever a recorded run shows."""
    return cause in _WAITS_WITHIN_A_RANK


def ranks_part(outcome: Outcome, ranks: int) -> bool:
    """Return whether a recorded run could show why the ranks of this failed run took different ways.

    `ranks`: the number of ranks of the launch.
    """
    if outcome.verdict.status not in FAILED_STATUSES or ranks < 2:
        return False
    cause = outcome.verdict.cause
    if cause in _WAITS_WITHIN_A_RANK or cause in _NO_QUESTION_OF_RANKS:
        return False
    is_failure_of_all = outcome.culprit is not None and len(outcome.culprit.ranks) >= ranks
    return outcome.verdict.status is Status.HANG or outcome.divergence is not None or not is_failure_of_all


def silent_difference(outcome: Outcome) -> SilentDifference | None:
    """Return what differs between the replicas of a model although the run passed, or None if nothing is known to."""
    finding = silent_finding(outcome)
    if finding is None:
        return None
    names = finding.facts.get("first_parts") or finding.facts.get("parts") or ()
    names = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
    return SilentDifference(kind=str(finding.facts.get("identified_by", "")), names=names)


def calls_past_ddp(outcome: Outcome) -> bool:
    """Return whether replicas differ in a run that passed because of a line that called the model past DDP."""
    finding = silent_finding(outcome)
    return finding is not None and finding.facts.get("identified_by") == "bypassed"


def silent_finding(outcome: Outcome) -> Finding | None:
    """Return the finding about replicas that differ in a run that passed, or None."""
    if outcome.verdict.status is not Status.PASS:
        return None
    return next((finding for finding in outcome.findings if finding.code == Cause.REPLICA_DIVERGENCE), None)


def fails_alike(first: Outcome, again: Outcome) -> bool:
    """Return whether a recorded run failed as the first run did.

    Recording changes the speed of the ranks, so the same fault may be seen from another rank's line. One of cause, line
    and culprit must be the same. A run that is stopped at its deadline while it polls may be proven to hang the next
    time; then the line must be the same.
    """
    before, now = failure_signature(first), failure_signature(again)
    has_same_place = before.place is not None and before.place == now.place
    if before.verdict != now.verdict:
        return has_same_place and Cause.SLOW in (before.cause, now.cause)
    has_same_ranks = first.culprit is not None and again.culprit is not None
    has_same_ranks = has_same_ranks and first.culprit.ranks == again.culprit.ranks  # type: ignore[union-attr]
    return before.cause == now.cause or has_same_place or has_same_ranks


def run_result(first: Outcome, again: Outcome) -> RunResult:
    """Return how a run ended, compared with the first run."""
    if silent_finding(first) is not None and again.verdict.status is Status.PASS:
        return RunResult.PASSED if silent_finding(again) is None else RunResult.SAME
    if again.verdict.status is Status.PASS:
        return RunResult.PASSED
    if again.verdict.status not in FAILED_STATUSES:
        return RunResult.UNJUDGED
    return RunResult.SAME if fails_alike(first, again) else RunResult.OTHERWISE


def with_decision(explanation: Explanation, place: Place, name: str) -> Explanation:
    """Return the explanation with the proven decision at `place`, by the value of `name`, as the last candidate."""
    division = explanation.division
    known = {(one.place.file, one.place.line, one.name) for one in explanation.candidates}
    if division is None or (place.file, place.line, name) in known:
        return explanation
    decision = Candidate(
        place=place, kind=OriginKind.UNKNOWN, ranks=division.ways[0][0] if division.ways else (), name=name,
        occurrence=division.occurrence, values=division.values,
    )  # fmt: skip
    return replace(explanation, candidates=(*explanation.candidates, decision))


def result_of(report: WhyReport) -> WhyResult:
    """Return the kind of answer that the runs of a report give."""
    results = [run.result for run in report.recorded_runs]
    if RunResult.SAME not in results:
        ends = (WhyResult.OTHERWISE, RunResult.OTHERWISE), (WhyResult.PASSED, RunResult.PASSED)
        return next((result for result, end in ends if end in results), WhyResult.UNDECIDED)
    if report.first.stands:
        return WhyResult.FIRST_LINE
    proofs = {run.proof for run in report.runs}
    if Proof.ORIGIN in proofs and report.is_controlled and not report.is_flaky:
        return WhyResult.CERTAIN
    if Proof.DECISION in proofs and report.origin and report.is_controlled and not report.is_flaky:
        return WhyResult.DECISION
    return WhyResult.LIKELY if report.origin else WhyResult.NOT_EXPLAINED


def is_budget_used(report: WhyReport) -> bool:
    """Return whether no further run may start."""
    return len(report.runs) >= report.max_runs or (report.budget_s is not None and report.took_s >= report.budget_s)


def needs_recorded_run(report: WhyReport, most: int) -> bool:
    """Return whether to launch the recorded program, without an experiment.

    It is launched until it fails as the first run did, but at most `most` times, and once more as a control after an
    experiment that let the ranks go on.
    """
    results = [run.result for run in report.recorded_runs]
    needs_control = bool(report.runs) and report.runs[-1].proof in SUCCESSES
    return needs_control or (RunResult.SAME not in results and len(results) < most)


def first_answer(outcome: Outcome, run_id: str, path: str, advice: str) -> FirstAnswer:
    """Return the failure to explain.

    `run_id`, `path`: name and path of its run directory. `advice`: what its own run advised.
    """
    culprit = silent_finding(outcome) or outcome.culprit
    cause = Cause.REPLICA_DIVERGENCE if isinstance(culprit, Finding) else outcome.verdict.cause
    return FirstAnswer(
        run_id=run_id, path=path, attempt=outcome.dir, verdict=outcome.verdict.status, cause=cause,
        place=culprit.place if culprit else None, ranks=culprit.ranks if culprit else (), advice=advice,
        stands=line_stands(outcome.verdict.cause) or calls_past_ddp(outcome),
    )  # fmt: skip
