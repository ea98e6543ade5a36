"""Adds to an explanation where the ranks took different ways, if their coverage shows it.

A rule finds the line of a skipped call from call stacks and the source. If the ranks recorded which lines they
executed, the branch after which only some of them executed new lines is better evidence.
"""

from __future__ import annotations

from dataclasses import replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.diagnosis.context import DiagnosisContext, program_frames
from nsa_harness.core.diagnosis.explanation import Explanation
from nsa_harness.core.recording.first_executions import OwnRun
from nsa_harness.core.report import Facts

# Causes in which ranks take different ways through the program, so that the line is a branch.
_CAUSES = frozenset({
    Cause.RANK_CONDITIONAL_COLLECTIVE, Cause.RANK0_ONLY_COLLECTIVE, Cause.UNEVEN_INPUTS, Cause.EARLY_EXIT,
    Cause.COLLECTIVE_ORDER_MISMATCH, Cause.STORE_KEY_MISSING, Cause.SWALLOWED_EXCEPTION,
})  # fmt: skip


def with_parting(context: DiagnosisContext, explanation: Explanation) -> Explanation:
    """Return the explanation with the branch at which the ranks parted as its line, if their coverage shows it.

    The line of a certain explanation stays. If the ranks parted at the end of a loop, the line stays too, because it
    may show why the number of iterations differs.
    """
    run = parting(context) if explanation.cause in _CAUSES else None
    if run is None or run.branch is None:
        return explanation
    facts: Facts = {"ranks": run.ranks, "line": run.entry, "branch": run.branch}
    keeps_place = explanation.place is not None and (run.is_loop or explanation.confidence >= CERTAIN)
    return replace(
        explanation,
        place=explanation.place if keeps_place else run.branch,
        facts={**explanation.facts, "parting": facts},
    )


def parting(context: DiagnosisContext) -> OwnRun | None:
    """Return the last statements that only some ranks executed and that can be why they parted, or None.

    They count if other ranks went another way from the same branch at the same time, if the rank is still below one of
    the statements, or if they change what the rank does next. Earlier statements do not count.
    """
    recent = [
        run
        for run in context.own_runs
        if run.branch is not None and run.is_main_thread and run.at_s >= _since_s(context, run.rank)
    ]
    for run in reversed(recent):
        has_other_way = any(other.branch == run.branch and not set(other.ranks) & set(run.ranks) for other in recent)
        stack = {(frame.file, frame.line) for frame in program_frames(context, run.rank)}
        is_inside = any((place.file, place.line) in stack for place in run.statements)
        if has_other_way or is_inside or run.is_detour:
            return run
    return None


def _since_s(context: DiagnosisContext, rank: int) -> float:
    """Return the time from which a statement can be why the rank parted from the others.

    This is its last collective or, if this is earlier, the end of its last step but one: ranks that have parted can
    still make matching calls for a while.
    """
    status_file = context.status_files.get(rank)
    steps_s = status_file.steps_s if status_file else ()
    last_call_s = max(context.shared_calls_s.get(rank, ()), default=0.0)
    return min(last_call_s, steps_s[-2][1] if len(steps_s) > 1 else last_call_s)
