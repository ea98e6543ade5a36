"""Caveats: checks whether anything in a run contradicts an explanation.

A rule assesses only its own evidence. The functions in this module check the rest of the run in the same way for every
rule. One open question turns a certain cause into a likely one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Caveat
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.diagnosis.context import DiagnosisContext, is_same_exception
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.evidence.evidence import Ending, RankSnapshot
from nsa_harness.core.evidence.exit_messages import timeout_message
from nsa_harness.core.evidence.stacks import in_probe, native_wait, user_frame
from nsa_harness.core.report import Fact, Status
from nsa_harness.core.verdict.verdict import FailureKind
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import reachable_ranks

_RACE_S = 1.0  # two failures less than this many seconds apart may be independent
_BETWEEN_FILES = ("torch/distributed/", "torch/nn/parallel/")
_SHOWN_BY_KERNEL = frozenset({WaitKind.STOPPED, WaitKind.GONE})  # kinds of waits that the kernel proves without a stack

Check = Callable[[DiagnosisContext, Explanation], "OpenQuestion | None"]


def with_caveat(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation with the first caveat that applies to this run, if any."""
    explanation = _with_moments_question(context, explanation)
    if explanation.confidence < CERTAIN or context.judgement.status not in (Status.FAIL, Status.HANG):
        return explanation
    caveats = explanation.cause.row.caveats
    questions = (_CAVEAT_CHECKS[caveat](context, explanation) for caveat in Caveat if caveat in caveats)
    unwatched_question = OpenQuestion(code="unwatched") if context.evidence.ending is Ending.POST_MORTEM else None
    return replace(explanation, caveat=next(filter(None, questions), unwatched_question))


def with_reason(explanation: Explanation, findings: Sequence[Explanation]) -> Explanation:
    """Return the explanation with its reason, if a certain finding can be this reason according to the cause table."""
    for finding in findings:
        if finding.cause.row.reason_of == explanation.cause.value and finding.confidence >= CERTAIN:
            return replace(explanation, reason=finding.cause)
    return explanation


def _with_moments_question(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Add an open question if the stacks of the ranks could have been taken at different moments."""
    has_timeout = any(timeout_message(rank) for rank in context.evidence.ranks)
    if context.evidence.ending is not Ending.POST_MORTEM or not context.stacks_only or has_timeout:
        return explanation
    return replace(explanation, left_open=(*explanation.left_open, OpenQuestion(code="different_moments")))


def _question(caveat: Caveat, **facts: Fact) -> OpenQuestion:
    return OpenQuestion(code=caveat.value, facts=facts)


def _every_party_at_fault(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if the explanation blames all the ranks that disagree, so none is known to be right."""
    ranks_at_fault = set(explanation.ranks)
    parties = [rank.rank for rank in context.evidence.ranks] if explanation.parties is None else explanation.parties
    is_every_party = len(ranks_at_fault) > 1 and ranks_at_fault.issuperset(parties)
    return _question(Caveat.EVERY_PARTY_AT_FAULT) if is_every_party else None


def _independent_hang(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if a rank hangs independently of the ranks at fault."""
    if context.judgement.status is not Status.HANG or not explanation.ranks:
        return None
    # Roots that wait for no rank at fault, directly or indirectly.
    independent_roots = (
        root for root in context.roots if reachable_ranks(root.rank, context.roots).isdisjoint(explanation.ranks)
    )
    independent_root = next((root for root in independent_roots if root.kind is not WaitKind.GONE), None)
    if independent_root is None:
        return None
    return _question(Caveat.INDEPENDENT_HANG, rank=independent_root.rank, blocked_in=independent_root.blocked_in)


def _ranks_in_unknown_state(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if the state of some rank is unknown in a hang."""
    if context.judgement.status is not Status.HANG:
        return None
    others = (rank.rank for rank in context.evidence.ranks if rank.rank not in explanation.ranks)
    waits = context.waits
    unknown_ranks = [rank for rank in others if not _is_seen(waits.get(rank), context.last_snapshot.get(rank))]
    return _question(Caveat.RANK_IN_UNKNOWN_STATE, unseen=tuple(unknown_ranks)) if unknown_ranks else None


def _is_seen(wait: Wait | None, snapshot: RankSnapshot | None) -> bool:
    """Return whether the evidence shows what a rank was doing."""
    if wait is None:
        return False
    return wait.kind in _SHOWN_BY_KERNEL or (
        snapshot is not None and (bool(snapshot.stacks) or snapshot.status_file is not None)
    )


def _independent_failure(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if a second rank failed on its own within a second of the first."""
    first = context.first_failure
    if first is None or first.is_collateral:
        return None
    others = [failure for failure in context.judgement.failures if failure.rank not in (*explanation.ranks, first.rank)]
    soon_after = [failure for failure in others if not failure.is_collateral and failure.at_s - first.at_s < _RACE_S]
    other = next(
        (
            failure
            for failure in soon_after
            if failure.kind is not FailureKind.LEFT and not is_same_exception(failure, first)
        ),
        None,
    )
    return None if other is None else _question(Caveat.INDEPENDENT_FAILURE, rank=other.rank, failure=other.text)


def _raised_in_collective(context: DiagnosisContext, _: Explanation) -> OpenQuestion | None:
    """Return an open question if the run's first failure was raised in a collective."""
    first = context.first_failure
    status_file = context.status_file(first.rank) if first else None
    if first is not None and first.exception is not None:
        files = [frame.file for frame in first.exception.frames[:1]]
        in_collective = any(in_probe(file) or any(word in file for word in _BETWEEN_FILES) for file in files)
    else:
        in_collective = status_file is not None and any(call.left_s is None for call in status_file.calls)
    return _question(Caveat.RAISED_IN_COLLECTIVE) if in_collective else None


def _no_program_line(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if the hang is not on a line of the program."""
    if context.judgement.status is not Status.HANG or (
        explanation.place is not None and explanation.place.file is not None
    ):
        return None
    return _question(Caveat.NO_PROGRAM_LINE)


def _exception_only_at_fault(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if a rank at fault, but no other rank, caught an exception in a forward pass."""
    types_elsewhere = {
        exception.type
        for rank, status_file in context.status_files.items()
        if rank not in explanation.ranks
        for exception in status_file.caught_exceptions
    }
    status_files = [(rank, context.status_files[rank]) for rank in explanation.ranks if rank in context.status_files]
    own_exceptions = [
        (rank, exception)
        for rank, status_file in status_files
        for exception in status_file.caught_exceptions
        if exception.left_forward
    ]
    rank, own_exception = next(
        ((rank, exception) for rank, exception in own_exceptions if exception.type not in types_elsewhere), (None, None)
    )
    return (
        _question(Caveat.CAUGHT_EXCEPTION, rank=rank, exception=own_exception.type, line=own_exception.place)
        if own_exception
        else None
    )


def _wait_without_name(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if nothing shows that the rank at fault, or its thread at fault, waits for a lock of
    Python.

    Neither its innermost line in a library, nor its native frames, nor the source of its line show it. The wait may
    then be one of native code, which ends without any thread of Python.
    """
    root = next((root for root in context.roots if root.rank in explanation.ranks), None)
    if root is None or root.kind is not WaitKind.LOCK or root.rank not in context.last_snapshot:
        return None
    stacks = [stack for stack in context.last_snapshot[root.rank].stacks if native_wait(stack) is None and stack.frames]
    lines = [(stack, line) for stack in stacks if (line := user_frame(stack.frames)) and explanation.place]
    unnamed = any(
        (line.file, line.line) == (explanation.place.file, explanation.place.line)
        and not context.program.locks_taken_at(stack.frames[0])
        for stack, line in lines
        if explanation.place
    )
    return _question(Caveat.WAIT_WITHOUT_NAME) if unnamed else None


def _wait_without_holder(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if the rank waits on a condition, event, queue or future, which nobody holds."""
    root = next((root for root in context.roots if root.rank in explanation.ranks), None)
    leaf = root.leaf if root else None
    waits = leaf is not None and leaf.function.rpartition(".")[2] in ("wait", "get", "put", "result")
    return _question(Caveat.WAIT_WITHOUT_HOLDER) if waits else None


def _missing_heartbeat(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if a rank without a heartbeat could be running Python code as well as native code."""
    status_files = [context.status_files.get(rank) for rank in explanation.ranks]
    computes_elsewhere = any(root.computing for root in context.roots if root.rank in explanation.ranks)
    is_missing = computes_elsewhere or any(
        status_file is None or status_file.beat_s is None for status_file in status_files
    )
    return _question(Caveat.MISSING_HEARTBEAT) if is_missing else None


def _exit_between_steps(context: DiagnosisContext, explanation: Explanation) -> OpenQuestion | None:
    """Return an open question if a rank could have exited only because it had fewer steps to run."""
    status_files = [status_file for rank in explanation.ranks if (status_file := context.status_files.get(rank))]
    if any(status_file.exit_chain for status_file in status_files):
        return None
    between_steps = [
        status_file
        for status_file in status_files
        if status_file.latest_training_event is not None and status_file.latest_training_event.kind in ("step", "data")
    ]
    return _question(Caveat.EXIT_BETWEEN_STEPS) if between_steps else None


_CAVEAT_CHECKS: dict[Caveat, Check] = {
    Caveat.EVERY_PARTY_AT_FAULT: _every_party_at_fault,
    Caveat.INDEPENDENT_HANG: _independent_hang,
    Caveat.RANK_IN_UNKNOWN_STATE: _ranks_in_unknown_state,
    Caveat.INDEPENDENT_FAILURE: _independent_failure,
    Caveat.RAISED_IN_COLLECTIVE: _raised_in_collective,
    Caveat.NO_PROGRAM_LINE: _no_program_line,
    Caveat.CAUGHT_EXCEPTION: _exception_only_at_fault,
    # The evidence of a run can rule out neither an unknown setter nor a lock that was taken twice.
    Caveat.UNKNOWN_SETTER: lambda *_: _question(Caveat.UNKNOWN_SETTER),
    Caveat.WAIT_WITHOUT_NAME: _wait_without_name,
    Caveat.WAIT_WITHOUT_HOLDER: _wait_without_holder,
    Caveat.LOCK_TAKEN_TWICE: lambda *_: _question(Caveat.LOCK_TAKEN_TWICE),
    Caveat.MISSING_HEARTBEAT: _missing_heartbeat,
    Caveat.EXIT_BETWEEN_STEPS: _exit_between_steps,
}
