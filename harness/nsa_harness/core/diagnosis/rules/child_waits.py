"""A rule about ranks that wait for a child process whose own wait never ends, such as at a barrier of processes."""

from __future__ import annotations

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import (
    DiagnosisContext,
    dump_proof,
    hung_roots,
    place_of,
    process_facts,
    wait_place,
)
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.stacks import A_LOCK, ThreadWait, process_wait, training_stack
from nsa_harness.core.verdict.wait import ChildWait, Wait, WaitKind


def _waiting_child(context: DiagnosisContext) -> tuple[Wait, ChildWait, ThreadWait] | None:
    """Return the wait of a rank, the child process behind it, and what the child waits for, or None.

    If a child waits for a child itself, the innermost one counts. A child that reads or writes something other than a
    queue does not count.
    """
    for root in hung_roots(context):
        if root.kind not in (WaitKind.IO, WaitKind.CHILD) or root.child is None or root.computing:
            continue
        child, snapshot = root.child.deepest, context.last_snapshot.get(root.rank)
        stack = training_stack(snapshot.child_stacks.get(child.pid, ()), child.pid) if snapshot else None
        wait = process_wait(stack.frames) if stack else A_LOCK
        has_line = child.user_frame is not None and not child.user_frame.file.startswith("<")
        if has_line and (child.kind is WaitKind.LOCK or wait is not A_LOCK):
            return root, child, wait
    return None


@rule_if(_waiting_child)
def child_waits(context: DiagnosisContext, root: Wait, child: ChildWait, wait: ThreadWait) -> Explanation:
    """Explain a hang in which a rank waits for a child process that waits for a lock, a barrier or a queue."""
    rank_is_at_fault = wait.call == "Queue.put" and not root.is_closed
    return Explanation(
        cause=Cause.LOCK_CYCLE,
        evidence=EvidenceKind.CLOSED if root.is_closed else EvidenceKind.KERNEL,
        facts={
            "variant": "child",
            "waits_for": wait.awaited_item,
            "ended_by": wait.ended_by,
            "is_lock": wait is A_LOCK,
            "living": None,
            "line": wait_place(context, root),
            "child": process_facts(child),
            "closed": root.is_closed,
            "no_progress_s": context.evidence.ended_s - (context.evidence.last_progress_s or 0.0),
        },
        ranks=(root.rank,),
        place=wait_place(context, root) if rank_is_at_fault else place_of(context, None, child.user_frame),
        proof=dump_proof(context, root),
    )
