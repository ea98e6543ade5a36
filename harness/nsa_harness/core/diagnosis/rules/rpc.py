"""The rule about ranks that wait for each other's answers in torch.distributed.rpc."""

from __future__ import annotations

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, place_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.evidence import RankSnapshot, Stack
from nsa_harness.core.evidence.stacks import user_frame
from nsa_harness.core.report import Facts, Status
from nsa_harness.core.verdict.motion import rank_stack, task_of
from nsa_harness.core.verdict.rpc_waits import handlers, remote_call

_Threads = list[tuple[RankSnapshot, Stack]]


def _blocked_calls(context: DiagnosisContext) -> tuple[_Threads, _Threads] | None:
    """Find the threads that wait for the answer of a remote call, and the threads that serve a remote call.

    Return None if the run does not hang, if one of the two does not exist, or if the function that serves a call does
    anything but wait for a lock or for another call.
    """
    if context.judgement.status is not Status.HANG:
        return None
    ranks = context.last_snapshot
    callers = [(rank, stack) for rank in ranks.values() for stack in rank.stacks if remote_call(rank, stack)]
    serving = list(handlers(ranks))
    tasks = (task_of(rank, stack) for rank, stack in serving)
    may_answer = any(task is not None and task.syscall not in ("", "futex") for task in tasks)
    return (callers, serving) if callers and serving and not may_answer else None


@rule_if(_blocked_calls)
def rpc_deadlock(context: DiagnosisContext, callers: _Threads, serving: _Threads) -> Explanation:
    """Explain a hang in which ranks wait for answers of remote calls while the threads that serve them are blocked."""
    facts_of = {(rank.rank, stack.tid): _handler_facts(context, rank, stack) for rank, stack in serving}
    is_explained = all(facts["lock_taken_at"] or facts["calls"] for facts in facts_of.values())
    is_closed = all(root.is_closed for root in context.roots)
    holders = [(rank, stack) for rank, stack in callers if (rank.rank, stack.tid) not in facts_of] or callers
    rank, stack = holders[0]
    is_proven = is_explained and is_closed and len(context.last_snapshot) == 2  # of two ranks, each calls the other
    return Explanation(
        cause=Cause.RPC_DEADLOCK,
        evidence=EvidenceKind.CLOSED if is_proven else EvidenceKind.STACKS,
        facts={
            "callers": ranks_by_facts((rank.rank, _caller_facts(context, rank, stack)) for rank, stack in holders),
            "handlers": ranks_by_facts((rank, facts) for (rank, _), facts in facts_of.items()),
        },
        ranks=tuple(sorted({rank.rank for rank, _ in holders})),
        place=place_of(context, rank.rank, user_frame(stack.frames)),
        proof=tuple(rank.proof for rank in context.last_snapshot.values() if rank.proof),
    )


def _caller_facts(context: DiagnosisContext, rank: RankSnapshot, stack: Stack) -> Facts:
    return {"call": remote_call(rank, stack), "line": place_of(context, None, user_frame(stack.frames))}


def _handler_facts(context: DiagnosisContext, rank: RankSnapshot, stack: Stack) -> Facts:
    """Return the facts about a thread that serves a remote call.

    `lock_taken_at` and `thread`: where a thread that waits for a remote call itself took the lock for which the handler
    waits. `thread` is "" for the training thread. `calls`: the remote call in which the handler itself waits.
    """
    frame = user_frame(stack.frames)
    owners = [other for other in rank.stacks if other is not stack and remote_call(rank, other)]
    takers = ((other, context.program.lock_taken_by(frame, other.frames)) for other in owners if frame)
    owner, taken_at = next(((other, place) for other, place in takers if place), (None, None))
    is_training = owner is not None and owner == rank_stack(rank)
    return {
        "function": frame.function if frame else "",
        "line": place_of(context, None, frame),
        "calls": remote_call(rank, stack),
        "lock_taken_at": taken_at,
        "thread": "" if owner is None or is_training else owner.thread or str(owner.tid),
    }
