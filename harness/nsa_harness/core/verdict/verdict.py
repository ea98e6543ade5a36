"""Return the verdict of a run, PASS, FAIL, HANG or ERROR, from its evidence.

Verdict and diagnosis never see the planted fault, the scenario's name or the expected result.
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
from nsa_harness.core.evidence.stacks import in_function
from nsa_harness.core.report import HangKind, Status
from nsa_harness.core.verdict.limits import final_limits, last_progress_s
from nsa_harness.core.verdict.motion import Motion
from nsa_harness.core.verdict.proof import LOOP_LINES, Proof, prove
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import RANK_WAITS, post_mortem_graph

_GROUPS = "torch/distributed/distributed_c10d.py"


def is_shutting_down(rank: RankSnapshot) -> bool:
    """Whether the interpreter is exiting: it joins the last threads or runs exit hooks.

    The probe records a progress event as this begins. Without a probe the stack shows it.
    """
    if rank.status_file is not None and any(event.kind == "exit" for event in rank.status_file.events):
        return True
    main = _main_thread(rank)
    if main is None or not main.frames:
        return False
    joins = in_function(main.frames[-1:], "/threading.py", ("_shutdown",))
    return (joins or in_function(main.frames, _GROUPS, ("destroy_process_group",))) is not None


def _main_thread(rank: RankSnapshot) -> Stack | None:
    by_id = next((stack for stack in rank.stacks if stack.tid == rank.pid), None)
    return by_id or next((stack for stack in rank.stacks if stack.tid is None and stack.thread == "MainThread"), None)


_MOVED_SAMPLES = 2  # one moved byte may be a library's heartbeat


def moving_ranks(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Return the ranks that made progress in these samples, or computed on more lines than a loop has."""
    return tuple(rank for rank in sorted({sample.rank for sample in samples}) if _moves(rank, samples))


def ranks_with_progress(evidence: Evidence) -> list[int]:
    """Return the ranks that made progress while the job was observed."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    return sorted({*moving_ranks(evidence.samples), *_ranks_with_new_events(last, evidence)})


def observation_sentence(evidence: Evidence) -> str:
    """Return the result of observing a job that goes on: one sentence that begins with MOVING or SUSPECT."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    blind = [rank.rank for rank in last if rank.status_file is None]
    has, own = ("has", "its own") if len(blind) == 1 else ("have", "theirs")
    missing = f"; {_ranks_text(blind)} {has} no probe, so no step, module or collective of {own} is known"
    moving = ranks_with_progress(evidence)
    if moving:
        does = "moves" if len(moving) == 1 else "move"
        return f"MOVING: {_ranks_text(moving)} {does}{missing if blind else ''}"
    if not last:
        return "SUSPECT: no rank could be looked at"
    motions = {sample.rank: sample.motion for sample in evidence.samples}
    states = ", ".join(f"rank {rank.rank} {motions.get(rank.rank, 'unseen')}" for rank in last)
    return f"SUSPECT: nothing moves, and it is not proven that nothing can: {states}{missing if blind else ''}"


def _moves(rank: int, samples: Sequence[Sample]) -> bool:
    own = [sample for sample in samples if sample.rank == rank]
    moved = [sample for sample in own if sample.motion == Motion.MOVING]
    burning = [sample for sample in own if sample.motion == Motion.BURNING]
    below = [child for sample in burning for child in sample.child_samples]
    lines = [
        _lines(burning),
        *(_lines([child for child in below if child.pid == pid]) for pid in {child.pid for child in below}),
    ]
    return len(moved) >= _MOVED_SAMPLES or any(len(line) > LOOP_LINES for line in lines)


def _lines(seen: Sequence[Sample] | Sequence[ChildSample]) -> set[tuple[str, int]]:
    return {(sample.leaf.file, sample.leaf.line) for sample in seen if sample.leaf}


def _ranks_with_new_events(last: Sequence[RankSnapshot], evidence: Evidence) -> set[int]:
    """Return the ranks with a progress event since the first snapshot."""
    begun_s = evidence.samples[0].at_s if evidence.samples else evidence.ended_s
    return {rank.rank for rank in last if rank.status_file and last_progress_s(rank.status_file) > begun_s}


# A rank prints these messages after its peer has exited, so they are never the first failure if there is another.
_COLLATERAL = re.compile(
    r"Connection (?:closed by|reset by) peer|Socket (?:unexpectedly )?closed|Timed out waiting|Broken pipe"
    r"|failed to recv, got 0 bytes|Connection refused|Watchdog caught collective operation timeout"
    r"|failed to pass monitoredBarrier|successfully reached monitoredBarrier, but received errors"
    r"|ncclRemoteError|Detected mismatch between collectives on ranks"
)
_MAY_BE_OWN_PIPE = re.compile(r"(?:Connection\w*|BrokenPipe|EOF|OS|URL)Error$")  # a program may also break its own pipe
# gloo aborts the rank that received a message of another collective. That rank called the right one.
_MISMATCH_ABORT = re.compile(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size")


# Peers notice a closed connection at once; the end of the process that had it is recorded a little later.
_EXIT_DELAY_S = 0.5
_DESTROYS = "destroy_process_group"
# The second value is the signal as a shell, or the program's own handler, reports it.
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class FailureKind(StrEnum):
    RAISED = "raised"
    SIGNAL = "signal"
    CODE = "code"
    LEFT = "left"  # ended with 0 or an unknown status while other ranks still needed it
    LAUNCHER = "launcher"
    UNSEEN = "unseen"  # ended with an unknown status while the other ranks were ended by SIGTERM


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One process that ended wrongly. `collateral` means that another rank's failure caused it."""

    kind: FailureKind
    rank: int | None
    at_s: float
    text: str
    is_collateral: bool
    status: int | None = None
    exception: RaisedException | None = None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    status: Status
    failures: tuple[Failure, ...]  # in order of time; the failure that explains the others is first
    proof: Proof | None
    pass_reason: str | None = None  # the evidence that a PASS rests on
    error: str | None = None  # why the harness could not judge


def judge(evidence: Evidence) -> Judgement:
    """Return the verdict. A rank that died explains the ranks that wait for it, so FAIL takes precedence over HANG."""
    proof = _proof(evidence)
    failures = _failures(evidence, proof)
    if evidence.ending is Ending.POST_MORTEM:
        return _judge_post_mortem(evidence, failures)
    if evidence.launcher_error:
        return Judgement(status=Status.ERROR, failures=failures, proof=None, error=evidence.launcher_error)
    if failures or evidence.ending is Ending.DEADLINE:
        return Judgement(status=Status.FAIL, failures=failures, proof=proof)
    if proof is not None:
        return Judgement(status=Status.HANG, failures=(), proof=proof)
    if evidence.ending in (Ending.EXITED, Ending.RESTARTED) and (shown := pass_reason(evidence)):
        return Judgement(status=Status.PASS, failures=(), proof=None, pass_reason=shown)
    words = {
        Ending.STALL: "the run was ended as a stall, and the evidence on disk does not prove one",
        Ending.EARLY: "ended early, and nothing is proven of it: it stood as another run did that was proven to hang",
        Ending.EXITED: _unseen_end_text(evidence),
        Ending.INTERRUPTED: "interrupted before it ended",
        Ending.CONTROLLER_DIED: f"the harness died before the run ended; {_ending_without_controller(evidence)}",
        Ending.NOT_LAUNCHED: "the launcher could not be started",
        Ending.RESTARTED: "the job started its ranks anew, and nothing shows why",
        Ending.DETACHED: observation_sentence(evidence),
    }
    return Judgement(status=Status.ERROR, failures=(), proof=None, error=words[evidence.ending])


def _judge_post_mortem(evidence: Evidence, failures: tuple[Failure, ...]) -> Judgement:
    """Return the verdict of a post-mortem.

    A rank that gave up waiting for others, or was ended by SIGTERM, has not failed on its own: that is how a hang ends.
    """
    own = [failure for failure in failures if not failure.is_collateral and failure.status not in _TERMINATED]
    proof = None if own else _post_mortem_proof(evidence)
    if proof is not None:
        return Judgement(status=Status.HANG, failures=(), proof=proof)
    if failures:
        return Judgement(status=Status.FAIL, failures=failures, proof=None)
    return Judgement(status=Status.ERROR, failures=(), proof=None, error=_no_verdict_text(evidence))


def _post_mortem_proof(evidence: Evidence) -> Proof | None:
    """Return the proof that ranks gave up waiting for others, or were dumped while they waited in different calls."""
    graph = post_mortem_graph(evidence)
    waiting = [wait for wait in graph.waits if wait.kind in RANK_WAITS]
    closed = all(root.closed and root.kind in RANK_WAITS for root in graph.roots)
    differ = len({_call(wait) for wait in waiting}) > 1
    if gave_up := [rank.rank for rank in evidence.ranks if timeout_message(rank)]:
        kind = HangKind.DEADLOCK if differ and closed else None
        return Proof(kind=kind, reason=f"{_ranks_text(gave_up)} gave up waiting for the others", graph=graph)
    if not len(waiting) == evidence.world_size > 1 or not closed or not differ:
        return None
    reason = f"each of {len(waiting)} ranks was dumped in a wait for others, and not all of them in the same call"
    return Proof(kind=HangKind.DEADLOCK, reason=reason, graph=graph)


def _call(wait: Wait) -> tuple[object, ...]:
    """Return what identifies a call: its number in the recorder, else its line."""
    return (wait.blocked_in, wait.user_frame if wait.collective is None else None)


def _no_verdict_text(evidence: Evidence) -> str:
    waits = post_mortem_graph(evidence).waits
    seen = "; ".join(f"rank {wait.rank} is blocked in {wait.blocked_in}" for wait in waits)
    return f"what was read shows neither a failure nor that it cannot go on{f': {seen}' if seen else ''}"


def pass_reason(evidence: Evidence) -> str | None:
    """Return a sentence with the evidence that every rank ended well, or None.

    The evidence is each rank's own exit code, or that of a launcher that exits with 0 only if every rank did. If a
    rank's exit was not seen, below a program that may catch any error, the end of its interpreter is enough.
    """
    unseen, launcher = _ranks_without_good_end(evidence), evidence.launcher
    if evidence.ending is Ending.EXITED and (launcher is None or launcher.status is None or launcher.during_teardown):
        return None
    if evidence.ranks and not unseen:
        return "every rank ended with exit code 0"
    if launcher is None or launcher.status != 0:
        return None
    if not any(rank.pid for rank in evidence.ranks):
        return "the command ended with exit code 0; no rank was seen"
    if not evidence.launcher_reports_ranks and not all(
        rank.status_file and rank.status_file.exit_s is not None for rank in unseen
    ):
        return None
    who = "launcher" if evidence.launcher_reports_ranks else "command"
    return f"the {who} ended with exit code 0; exit of {_ranks(unseen)} not seen"


def _ranks_without_good_end(evidence: Evidence) -> list[RankEvidence]:
    """Return the ranks that are not known to have exited with 0 on their own."""
    return [rank for rank in evidence.ranks if rank.exit is None or rank.exit.status != 0 or rank.exit.during_teardown]


def _unseen_end_text(evidence: Evidence) -> str:
    launcher, unseen = evidence.launcher, _ranks_without_good_end(evidence)
    if launcher is None or launcher.status is None or launcher.during_teardown or not unseen:
        return "nobody saw how the run ended: the record of its processes is missing"
    return f"the command {exit_text(launcher.status)}, and nobody saw how {_ranks(unseen)} ended"


def _ranks(ranks: Sequence[RankEvidence]) -> str:
    return _ranks_text([rank.rank for rank in ranks])


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _ending_without_controller(evidence: Evidence) -> str:
    """Return a clause about how a run ended after its controller died, from the records of its reaper."""
    if evidence.is_observed:
        return "the job was left alone"
    if evidence.unkillable is None:
        return "nothing shows that its guardian ended the run"
    if evidence.unkillable:
        return f"its guardian could not end all of it: {'; '.join(evidence.unkillable)}"
    return "its guardian ended the run"


def _proof(evidence: Evidence) -> Proof | None:
    if evidence.ending is not Ending.STALL or not evidence.snapshots:
        return None
    return prove(
        evidence.snapshots,
        evidence.samples,
        last_progress_s=evidence.last_progress_s or 0.0,
        limits=final_limits(evidence),
        gone=[exit.rank for exit in evidence.exits if exit.rank is not None and not exit.during_teardown],
        backend=evidence.backend,
        attended=evidence.is_observed or evidence.is_attached,
    )


def _failures(evidence: Evidence, proof: Proof | None) -> tuple[Failure, ...]:
    # A rank that is in the last snapshot survived the exception that it printed.
    alive = [
        rank.rank for snapshot in evidence.snapshots[-1:] for rank in snapshot.ranks if evidence.ending is Ending.STALL
    ]
    printed = {rank.rank for rank in evidence.ranks if rank.exception is not None and rank.exception.at_s is None}
    survived = [rank.rank for rank in evidence.ranks if rank.rank in printed.intersection(alive) and rank.exit is None]
    over = {rank.rank for snapshot in evidence.snapshots[-1:] for rank in snapshot.ranks if is_shutting_down(rank)}
    ended = [rank for rank in evidence.ranks if rank.rank not in survived]
    failures = [failure for rank in ended if (failure := _rank_failure(rank, over=rank.rank in over))]
    failures += [failure for exit in evidence.exits if (failure := _left_early(exit, evidence, proof, failures))]
    failures += _unseen_ends(evidence, failures)
    launcher = evidence.launcher
    if not failures and launcher and launcher.status not in (0, None) and not launcher.during_teardown:
        failures.append(
            Failure(
                kind=FailureKind.LAUNCHER,
                rank=None,
                at_s=launcher.at_s,
                text=f"the launcher {exit_text(launcher.status)}",
                is_collateral=False,
                status=launcher.status,
            )
        )
    return tuple(sorted(failures, key=lambda failure: (failure.is_collateral, failure.at_s)))


def _rank_failure(rank: RankEvidence, *, over: bool) -> Failure | None:
    """Return the failure of a rank. `over`: the program has finished and the interpreter is exiting."""
    exit = rank.exit
    if rank.exception is not None and (_ended_by(rank.exception, exit) or (over and rank.exception.at_s is not None)):
        raised = earliest_program_error(rank.exception)
        return Failure(
            kind=FailureKind.RAISED,
            rank=rank.rank,
            at_s=raised.at_s if raised.at_s is not None else (exit.at_s if exit else 0.0),
            text=f"{raised.type}: {raised.message}".strip(),
            # If a handler raises or fails after a peer was lost, that is also a consequence.
            is_collateral=_lost_a_peer(rank.exception) or any(_lost_a_peer(error) for error in rank.exception.chain),
            status=exit.status if exit else None,
            exception=raised,
        )
    if exit is None or exit.status in (0, None) or exit.during_teardown:
        return None
    error_text = " ".join(rank.error_lines)
    lost = _COLLATERAL.search(error_text)
    return Failure(
        kind=FailureKind.SIGNAL if exit.status < 0 else FailureKind.CODE,
        rank=rank.rank,
        at_s=exit.at_s,
        text=f"rank {rank.rank} {exit_text(exit.status)}{f' ({lost[0]})' if lost else ''}",
        is_collateral=exit.status in _TERMINATED or bool(lost or _MISMATCH_ABORT.search(error_text)),
        status=exit.status,
    )


def _unseen_ends(evidence: Evidence, failures: Sequence[Failure]) -> list[Failure]:
    """Return a failure for each rank with an unknown end, if all known failures are only SIGTERMs.

    The process that sent SIGTERM had a reason, which may be one of these ranks.
    """
    only_asked = bool(failures) and all(
        failure.exception is None and failure.status in _TERMINATED for failure in failures
    )
    whole_job = any(not sent.pid and sent.sender != "harness" for sent in evidence.signals)
    if not only_asked or whole_job or evidence.ending is not Ending.EXITED:
        return []
    return [
        Failure(
            kind=FailureKind.UNSEEN,
            rank=rank.rank,
            at_s=rank.exit.at_s if rank.exit else 0.0,
            text=f"rank {rank.rank} {exit_text(None)}",
            is_collateral=False,
        )
        for rank in _ranks_without_good_end(evidence)
        if (rank.pid is None if rank.exit is None else rank.exit.status is None and not rank.exit.during_teardown)
    ]


def _lost_a_peer(error: RaisedException | EarlierError) -> bool:
    return bool(_COLLATERAL.search(f"{error.type}: {error.message}") and not _MAY_BE_OWN_PIPE.search(error.type))


def _ended_by(raised: RaisedException, exit: Exit | None) -> bool:
    """Whether the exception ended the rank. A printed exception may have been caught before a signal came."""
    if exit is None:
        return True
    printed_only = raised.at_s is None and exit.status is not None and exit.status < 0
    return exit.status != 0 and not exit.during_teardown and not printed_only


def _left_early(exit: Exit, evidence: Evidence, proof: Proof | None, failures: list[Failure]) -> Failure | None:
    """Return the failure of a rank that exited with 0 although others still needed it.

    Another rank lost its connection to it afterwards, or still waits for it. In a job that was attached to, the exit
    status may be unknown.
    """
    if (
        exit.rank is None
        or exit.during_teardown
        or not (exit.status == 0 or (exit.status is None and evidence.is_attached))
    ):
        return None
    left_s = _left_s(exit, evidence)
    needed = [failure for failure in failures if failure.at_s + _EXIT_DELAY_S >= left_s and failure.is_collateral]
    waits = [wait for wait in proof.graph.waits if wait.kind is not WaitKind.GONE] if proof else []
    awaited = not waits or any(exit.rank in wait.peers for wait in waits)
    waited = evidence.ending is Ending.STALL and awaited
    if not needed and not waited:
        return None
    text = f"rank {exit.rank} {exit_text(exit.status)} while the others still needed it"
    if exit.status is None:
        text = f"rank {exit.rank} has ended, nobody saw how, and the others still need it"
    return Failure(
        kind=FailureKind.LEFT, rank=exit.rank, at_s=exit.at_s, text=text, is_collateral=False, status=exit.status
    )


def _left_s(exit: Exit, evidence: Evidence) -> float:
    """Return when the others lost the rank. Destroying a group closes its connections, seconds before the exit."""
    status_file = next((rank.status_file for rank in evidence.ranks if rank.rank == exit.rank), None)
    calls = status_file.calls if status_file else ()
    destroyed = [call.entered_s for call in calls if call.op == _DESTROYS and call.group in ("", "0")]
    exits_s = [status_file.exit_s] if status_file and status_file.exit_s is not None else []
    return min([exit.at_s, *destroyed, *exits_s])


def exit_text(status: int | None) -> str:
    """Return how a process ended, as text to put after its name."""
    if status is None:
        return "ended; nobody saw how"
    if status >= 0:
        return f"ended with exit code {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was terminated by {names.get(-status, f'signal {-status}')}"
