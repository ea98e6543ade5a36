"""Judge a run by its evidence: PASS, FAIL, HANG or ERROR.

Neither the verdict nor the diagnosis has access to the planted fault, the name of the scenario or the expected result.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.evidence.evidence import (
    ChildSample,
    EarlierError,
    Ending,
    Evidence,
    Exit,
    RaisedException,
    RankEvidence,
    RankSnapshot,
    Sample,
    Stack,
)
from nsa_harness.core.evidence.exit_messages import earliest_program_error, timeout_message
from nsa_harness.core.evidence.stacks import group_call, in_function, in_probe
from nsa_harness.core.report import HangKind, Status
from nsa_harness.core.verdict.limits import final_limits, last_progress_s
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.proof import LOOP_LINES, Proof, prove
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import RANK_WAITS, post_mortem_graph

_GROUPS = "torch/distributed/distributed_c10d.py"


def is_shutting_down(rank: RankSnapshot) -> bool:
    """Return whether the interpreter is exiting, according to the probe or else the stack."""
    if rank.status_file is not None and any(event.kind == "exit" for event in rank.status_file.events):
        return True
    main = _main_thread(rank)
    if main is None or not main.frames:
        return False
    join_frame = in_function(main.frames[-1:], "/threading.py", ("_shutdown",))
    return (join_frame or in_function(main.frames, _GROUPS, ("destroy_process_group",))) is not None


def _main_thread(rank: RankSnapshot) -> Stack | None:
    by_id = next((stack for stack in rank.stacks if stack.tid == rank.pid), None)
    return by_id or next((stack for stack in rank.stacks if stack.tid is None and stack.thread == "MainThread"), None)


_MIN_MOVING_SAMPLES = 2  # a single transferred byte may be a library's heartbeat


def moving_ranks(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Return the ranks that progressed in `samples`, or computed on more lines than an endless loop."""
    samples_of: dict[int, list[Sample]] = {}
    for sample in samples:
        samples_of.setdefault(sample.rank, []).append(sample)
    return tuple(rank for rank, own in sorted(samples_of.items()) if _moves(own))


def ranks_with_progress(evidence: Evidence) -> list[int]:
    """Return, in ascending order, the ranks that made progress while the job was watched."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    return sorted({*moving_ranks(evidence.samples), *_ranks_with_new_events(last, evidence)})


def observation_sentence(evidence: Evidence) -> str:
    """Return a sentence, beginning with MOVING or SUSPECT, on which ranks of a job still progress."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    without_probe = [rank.rank for rank in last if rank.status_file is None]
    has, own = ("has", "its own") if len(without_probe) == 1 else ("have", "theirs")
    missing = f"; {_ranks_text(without_probe)} {has} no probe, so no step, module or collective of {own} is known"
    moving = ranks_with_progress(evidence)
    if moving:
        does = "moves" if len(moving) == 1 else "move"
        return f"MOVING: {_ranks_text(moving)} {does}{missing if without_probe else ''}"
    if not last:
        return "SUSPECT: no rank could be looked at"
    motions = {sample.rank: sample.motion for sample in evidence.samples}
    states = ", ".join(f"rank {rank.rank} {motions.get(rank.rank, 'unseen')}" for rank in last)
    return f"SUSPECT: nothing moves, and it is not proven that nothing can: {states}{missing if without_probe else ''}"


def _moves(own: Sequence[Sample]) -> bool:
    """Return whether a rank made progress, according to its samples."""
    moving = [sample for sample in own if sample.motion == Motion.MOVING]
    burning = [sample for sample in own if sample.motion == Motion.BURNING]
    children = [child for sample in burning for child in sample.child_samples]
    lines_by_process = [
        _lines(burning),
        *(_lines([child for child in children if child.pid == pid]) for pid in {child.pid for child in children}),
    ]
    return len(moving) >= _MIN_MOVING_SAMPLES or any(len(lines) > LOOP_LINES for lines in lines_by_process)


def _lines(samples: Sequence[Sample] | Sequence[ChildSample]) -> set[tuple[str, int]]:
    return {(sample.leaf.file, sample.leaf.line) for sample in samples if sample.leaf}


def _ranks_with_new_events(last: Sequence[RankSnapshot], evidence: Evidence) -> set[int]:
    """Return the ranks that recorded progress after the first sample."""
    begun_s = evidence.samples[0].at_s if evidence.samples else evidence.ended_s
    return {rank.rank for rank in last if rank.status_file and last_progress_s(rank.status_file) > begun_s}


# A rank prints these messages after a peer has exited. They are never the first failure if there is another one.
_COLLATERAL = re.compile(
    r"Connection (?:closed by|reset by) peer|Socket (?:unexpectedly )?closed|Timed out waiting|Broken pipe"
    r"|failed to recv, got 0 bytes|Connection refused|Watchdog caught collective operation timeout"
    r"|failed to pass monitoredBarrier|successfully reached monitoredBarrier, but received errors"
    r"|ncclRemoteError|Detected mismatch between collectives on ranks"
)
# A program may also raise these errors itself, for a connection or pipe of its own.
_MAY_BE_OWN_PIPE = re.compile(r"(?:Connection\w*|BrokenPipe|EOF|OS|URL)Error$")
# gloo aborts a rank that receives a message of a different collective. That rank itself called the right collective.
_MISMATCH_ABORT = re.compile(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size")


# Peers notice a closed connection at once. The exit of the process at its other end is recorded a little later.
_EXIT_DELAY_S = 0.5
_DESTROYS = "destroy_process_group"
# A shell, or the program's own signal handler, reports SIGTERM as the second value.
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class FailureKind(StrEnum):
    """The way in which a process of the run failed."""

    RAISED = "raised"  # ended by an exception
    SIGNAL = "signal"  # killed by a signal
    CODE = "code"  # exited with a code other than 0
    LEFT = "left"  # exited with 0, or an unknown status, while other ranks still needed it
    LAUNCHER = "launcher"  # only the launcher failed
    UNSEEN = "unseen"  # exited with an unknown status, while SIGTERM ended the other ranks


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one process of a run."""

    kind: FailureKind
    rank: int | None  # None for the launcher
    at_s: float
    text: str  # for people
    is_collateral: bool = False  # the failure of another rank caused it
    status: int | None = None
    exception: RaisedException | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict of a run, with the failures or the proof behind it."""

    status: Status
    failures: tuple[Failure, ...]  # in order of time, but collateral failures come last
    proof: Proof | None  # the proof of a hang
    pass_reason: str | None = None  # for PASS: a sentence with the evidence that the run ended well
    error: str | None = None  # for ERROR: why the run could not be judged


def judge(evidence: Evidence) -> Judgement:
    """Return the verdict. FAIL comes before HANG, because a dead rank explains why others wait."""
    proof = proof_of(evidence)
    failures = _failures(evidence, proof)
    if evidence.ending is Ending.POST_MORTEM:
        return _judge_post_mortem(evidence, failures)
    if evidence.launcher_error:
        return Judgement(status=Status.ERROR, failures=failures, proof=None, error=evidence.launcher_error)
    if lacks_node(evidence, failures):
        return Judgement(status=Status.ERROR, failures=failures, proof=None, error="node missing")
    if failures or evidence.ending is Ending.DEADLINE:
        return Judgement(status=Status.FAIL, failures=failures, proof=proof)
    if proof is not None:
        return Judgement(status=Status.HANG, failures=(), proof=proof)
    if evidence.ending in (Ending.EXITED, Ending.RESTARTED) and (reason := pass_reason(evidence)):
        return Judgement(status=Status.PASS, failures=(), proof=None, pass_reason=reason)
    errors = {
        Ending.STALL: "the run was ended as a stall, and the evidence on disk does not prove one",
        Ending.EARLY: "ended early, and nothing is proven of it: it stood as another run did that was proven to hang",
        Ending.EXITED: _unseen_end_text(evidence),
        Ending.INTERRUPTED: "interrupted before it ended",
        Ending.CONTROLLER_DIED: f"the harness died before the run ended; {_ending_without_controller(evidence)}",
        Ending.NOT_LAUNCHED: "the launcher could not be started",
        Ending.RESTARTED: "the job started its ranks anew, and nothing shows why",
        Ending.DETACHED: observation_sentence(evidence),
    }
    return Judgement(status=Status.ERROR, failures=(), proof=None, error=errors[evidence.ending])


def lacks_node(evidence: Evidence, failures: Sequence[Failure]) -> bool:
    """Return whether a job cannot be judged, because the ranks of a node never began or their end is unknown.

    A rank that failed on its own is the reason even if a node was lost later.
    """
    own = [failure for failure in failures if not failure.is_collateral and failure.rank is not None]
    if any(evidence.nodes.get(failure.rank or 0) not in evidence.lost_nodes for failure in own):
        return False
    ranks = [rank for rank in evidence.ranks if rank.pid]
    waits = evidence.ending is Ending.DETACHED and len(ranks) < evidence.world_size
    return bool(evidence.lost_nodes or (evidence.missing_nodes and (not ranks or waits)))


def _judge_post_mortem(evidence: Evidence, failures: tuple[Failure, ...]) -> Judgement:
    """Return the verdict of a job that was not watched, based on the files that it left.

    A rank that timed out while it waited for others, or that SIGTERM ended, has not failed on its own. A job that hangs
    ends like this.
    """
    own = [
        failure
        for failure in failures
        if not failure.is_collateral and failure.status not in _TERMINATED and failure.kind is not FailureKind.LAUNCHER
    ]
    proof = None if own else _post_mortem_proof(evidence)
    if proof is not None:
        return Judgement(status=Status.HANG, failures=(), proof=proof)
    if failures:
        return Judgement(status=Status.FAIL, failures=failures, proof=None)
    return Judgement(status=Status.ERROR, failures=(), proof=None, error=_no_verdict_text(evidence))


def _post_mortem_proof(evidence: Evidence) -> Proof | None:
    """Return the proof of a hang in an unwatched job's files: timeouts, or waits in different calls, or None."""
    graph = post_mortem_graph(evidence)
    waiting = [wait for wait in graph.waits if wait.kind in RANK_WAITS]
    are_closed = all(root.is_closed and root.kind in RANK_WAITS for root in graph.roots)
    calls_differ = len({_call(wait) for wait in waiting}) > 1
    if timed_out_ranks := [rank.rank for rank in evidence.ranks if timeout_message(rank)]:
        kind = HangKind.DEADLOCK if calls_differ and are_closed else None
        return Proof(kind=kind, reason=f"{_ranks_text(timed_out_ranks)} gave up waiting for the others", graph=graph)
    if not len(waiting) == evidence.world_size > 1 or not are_closed or not calls_differ:
        return None
    reason = f"each of {len(waiting)} ranks was dumped in a wait for others, and not all of them in the same call"
    return Proof(kind=HangKind.DEADLOCK, reason=reason, graph=graph)


def _call(wait: Wait) -> tuple[object, ...]:
    """Return the values that identify the call in which a rank waits, for comparison with other ranks."""
    return (wait.blocked_in, wait.user_frame if wait.collective is None else None)


def _no_verdict_text(evidence: Evidence) -> str:
    waits = post_mortem_graph(evidence).waits
    positions = "; ".join(f"rank {wait.rank} is blocked in {wait.blocked_in}" for wait in waits)
    return f"what was read shows neither a failure nor that it cannot go on{f': {positions}' if positions else ''}"


def pass_reason(evidence: Evidence) -> str | None:
    """Return a sentence on what shows that every rank ended well, or None if nothing shows it.

    The evidence is the exit code of each rank, or the exit code of a launcher that exits with 0 only if every rank did.
    Other launchers may hide the error of a rank. Under such a launcher, a rank with an unknown exit ended well if its
    interpreter exited normally. If torchrun should have started a rank, and no process of this rank was seen, the rank
    may never have run.
    """
    unseen, launcher = _ranks_without_good_end(evidence), evidence.launcher
    if evidence.ending is Ending.EXITED and (launcher is None or launcher.status is None or launcher.during_teardown):
        return None
    if evidence.ranks and not unseen:
        return "every rank ended with exit code 0"
    if launcher is None or launcher.status != 0:
        return None
    starts_ranks = evidence.launcher_reports_ranks and not evidence.is_observed
    if starts_ranks and _ranks_without_process(evidence):
        return None
    if not any(rank.pid for rank in evidence.ranks):
        return "the command ended with exit code 0; no rank was seen"
    if not evidence.launcher_reports_ranks and not all(
        rank.status_file and rank.status_file.exit_s is not None for rank in unseen
    ):
        return None
    process = "launcher" if evidence.launcher_reports_ranks else "command"
    return f"the {process} ended with exit code 0; exit of {_ranks(unseen)} not seen"


def _ranks_without_good_end(evidence: Evidence) -> list[RankEvidence]:
    """Return the ranks that are not known to have exited with code 0 on their own."""
    return [rank for rank in evidence.ranks if rank.exit is None or rank.exit.status != 0 or rank.exit.during_teardown]


def _ranks_without_process(evidence: Evidence) -> list[RankEvidence]:
    """Return the ranks that may never have run: no process of them was seen, and torchrun made no log file."""
    return [rank for rank in evidence.ranks if not (rank.pid or rank.exit or rank.status_file or rank.has_log)]


def _unseen_end_text(evidence: Evidence) -> str:
    launcher, unseen = evidence.launcher, _ranks_without_good_end(evidence)
    if launcher is None or launcher.status is None or launcher.during_teardown or not unseen:
        return "nobody saw how the run ended: the record of its processes is missing"
    missing = _ranks_without_process(evidence)
    seen = f"no process of {_ranks(missing)} was seen" if missing else f"nobody saw how {_ranks(unseen)} ended"
    return f"the command {exit_text(launcher.status)}, and {seen}"


def _ranks(ranks: Sequence[RankEvidence]) -> str:
    return _ranks_text([rank.rank for rank in ranks])


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ending_without_controller(evidence: Evidence) -> str:
    """Return a phrase that describes how a run ended after its controller had died."""
    if evidence.is_observed:
        return "the job was left alone"
    if evidence.unkillable is None:
        return "nothing shows that its guardian ended the run"
    if evidence.unkillable:
        return f"its guardian could not end all of it: {'; '.join(evidence.unkillable)}"
    return "its guardian ended the run"


def proof_of(evidence: Evidence) -> Proof | None:
    """Return the proof that the evidence of a stall contains, or None if it proves no hang."""
    if evidence.ending is not Ending.STALL or not evidence.snapshots:
        return None
    return prove(
        evidence.snapshots,
        evidence.samples,
        last_progress_s=evidence.last_progress_s or 0.0,
        limits=final_limits(evidence),
        exited_ranks=[exit.rank for exit in evidence.exits if exit.rank is not None and not exit.during_teardown],
        backend=evidence.backend,
        attended=evidence.is_observed or evidence.is_attached,
    )


def _failures(evidence: Evidence, proof: Proof | None) -> tuple[Failure, ...]:
    """Return all failures of a run in chronological order, with failures caused by other failures last."""
    # A rank that is in the last snapshot has survived the exception that it printed.
    alive = [
        rank.rank for snapshot in evidence.snapshots[-1:] for rank in snapshot.ranks if evidence.ending is Ending.STALL
    ]
    with_traceback = {
        rank.rank for rank in evidence.ranks if rank.exception is not None and rank.exception.at_s is None
    }
    survivors = with_traceback.intersection(alive).intersection(
        rank.rank for rank in evidence.ranks if rank.exit is None
    )
    exiting = {rank.rank for snapshot in evidence.snapshots[-1:] for rank in snapshot.ranks if is_shutting_down(rank)}
    others = [rank for rank in evidence.ranks if rank.rank not in survivors]
    failures = [failure for rank in others if (failure := _rank_failure(rank, is_exiting=rank.rank in exiting))]
    failures += [failure for exit in evidence.exits if (failure := _early_exit(exit, evidence, proof, failures))]
    failures += _unseen_exits(evidence, failures)
    launcher = evidence.launcher
    if not failures and launcher and launcher.status not in (0, None) and not launcher.during_teardown:
        failures.append(
            Failure(
                kind=FailureKind.LAUNCHER,
                rank=None,
                at_s=launcher.at_s,
                text=f"the launcher {exit_text(launcher.status)}",
                status=launcher.status,
            )
        )
    return tuple(sorted(failures, key=lambda failure: (failure.is_collateral, failure.at_s)))


def _rank_failure(rank: RankEvidence, *, is_exiting: bool) -> Failure | None:
    """Return a rank's failure, or None. `is_exiting`: only the interpreter still runs."""
    exit = rank.exit
    if rank.exception is not None and (
        _ended_by(rank.exception, exit) or (is_exiting and rank.exception.at_s is not None)
    ):
        exception = earliest_program_error(rank.exception)
        return Failure(
            kind=FailureKind.RAISED,
            rank=rank.rank,
            at_s=exception.at_s if exception.at_s is not None else (exit.at_s if exit else 0.0),
            text=f"{exception.type}: {exception.message}".strip(),
            # An exception in the handler of a lost connection is also collateral.
            is_collateral=_lost_a_peer(rank.exception) or any(_lost_a_peer(error) for error in rank.exception.chain),
            status=exit.status if exit else None,
            exception=exception,
        )
    if exit is None or exit.status in (0, None) or exit.during_teardown:
        return None
    error_text = " ".join(rank.error_lines)
    lost_peer = _COLLATERAL.search(error_text)
    return Failure(
        kind=FailureKind.SIGNAL if exit.status < 0 else FailureKind.CODE,
        rank=rank.rank,
        at_s=exit.at_s,
        text=f"rank {rank.rank} {exit_text(exit.status)}{f' ({lost_peer[0]})' if lost_peer else ''}",
        is_collateral=exit.status in _TERMINATED
        or bool(lost_peer)
        or received_other_collective(rank)
        or _aborted_in_collective(rank),
        status=exit.status,
    )


def received_other_collective(rank: RankEvidence) -> bool:
    """Return whether gloo aborted the rank because a peer sent it the data of another collective."""
    return any(map(_MISMATCH_ABORT.search, rank.error_lines))


def _aborted_in_collective(rank: RankEvidence) -> bool:
    """Return whether a thread of a communication library aborted the rank while it was in a collective.

    gloo and NCCL do this because of what another rank did. Their message decides, if the rank's stderr was stored; a
    job under `watch` keeps its stderr.
    """
    aborted = rank.exit is not None and rank.exit.status == -signal.SIGABRT
    frames = [frame for stack in rank.death_stacks[-1:] for frame in stack.frames if not in_probe(frame.file)]
    return aborted and rank.died_in_native_thread and not rank.error_lines and group_call(frames) is not None


def _unseen_exits(evidence: Evidence, failures: Sequence[Failure]) -> list[Failure]:
    """Return a failure for each rank whose exit was not observed, if SIGTERM ended all the others.

    Something made the sender of SIGTERM end the ranks. This may be the failure of one of the ranks whose exit was not
    seen.
    """
    only_terminated = bool(failures) and all(
        failure.exception is None and failure.status in _TERMINATED for failure in failures
    )
    whole_job = any(not sent.pid and sent.sender != "harness" for sent in evidence.signals)
    if not only_terminated or whole_job or evidence.ending is not Ending.EXITED:
        return []
    return [
        Failure(
            kind=FailureKind.UNSEEN,
            rank=rank.rank,
            at_s=rank.exit.at_s if rank.exit else 0.0,
            text=f"rank {rank.rank} {exit_text(None)}",
        )
        for rank in _ranks_without_good_end(evidence)
        if (rank.pid is None if rank.exit is None else rank.exit.status is None and not rank.exit.during_teardown)
    ]


def _lost_a_peer(error: RaisedException | EarlierError) -> bool:
    return bool(_COLLATERAL.search(f"{error.type}: {error.message}") and not _MAY_BE_OWN_PIPE.search(error.type))


def _ended_by(exception: RaisedException, exit: Exit | None) -> bool:
    """Return whether the exception ended the rank.

    A rank may also have caught an exception that it printed. If a signal killed the rank, an exception that is only
    known from the log does not count. After an uncaught exception, an atexit handler may still exit with code 0.
    """
    if exit is None or exception.is_uncaught:
        return True
    printed_only = exception.at_s is None and exit.status is not None and exit.status < 0
    return exit.status != 0 and not exit.during_teardown and not printed_only


def _early_exit(exit: Exit, evidence: Evidence, proof: Proof | None, failures: list[Failure]) -> Failure | None:
    """Return the failure of a rank that exited with code 0 while still needed by other ranks, or None if it did not.

    It was needed if another rank lost its connection to it afterwards, or still waits for it. The exit status may also
    be unknown, if the harness attached to the running job.
    """
    if (
        exit.rank is None
        or exit.during_teardown
        or not (exit.status == 0 or (exit.status is None and evidence.is_attached))
    ):
        return None
    since_s = _disconnected_s(exit, evidence)
    lost_it = [failure for failure in failures if failure.at_s + _EXIT_DELAY_S >= since_s and failure.is_collateral]
    waits = [wait for wait in proof.graph.waits if wait.kind is not WaitKind.GONE] if proof else []
    may_be_awaited = not waits or any(exit.rank in wait.peers for wait in waits)
    is_awaited = evidence.ending is Ending.STALL and may_be_awaited
    if not lost_it and not is_awaited:
        return None
    text = f"rank {exit.rank} {exit_text(exit.status)} while the others still needed it"
    if exit.status is None:
        text = f"rank {exit.rank} has ended, nobody saw how, and the others still need it"
    return Failure(
        kind=FailureKind.LEFT, rank=exit.rank, at_s=exit.at_s, text=text, is_collateral=False, status=exit.status
    )


def _disconnected_s(exit: Exit, evidence: Evidence) -> float:
    """Return when the others lost their connection to this rank, perhaps seconds before its exit."""
    rank = evidence.of_rank.get(exit.rank) if exit.rank is not None else None
    status_file = rank.status_file if rank else None
    calls = status_file.calls if status_file else ()
    destroyed_s = [call.entered_s for call in calls if call.op == _DESTROYS and call.group in ("", "0")]
    exits_s = [status_file.exit_s] if status_file and status_file.exit_s is not None else []
    return min([exit.at_s, *destroyed_s, *exits_s])


def exit_text(status: int | None) -> str:
    """Return a phrase for the way a process with this exit status ended, such as "ended with exit code 1"."""
    if status is None:
        return "ended; nobody saw how"
    if status >= 0:
        return f"ended with exit code {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was terminated by {names.get(-status, f'signal {-status}')}"
