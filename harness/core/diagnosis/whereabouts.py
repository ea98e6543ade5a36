"""Which step and which collective a finding speaks of."""

from __future__ import annotations

from nsa_harness.core.diagnosis.case import Case, hung_roots
from nsa_harness.core.diagnosis.entries import first_entries, number_of, reference
from nsa_harness.core.diagnosis.progress import late_for, stands_in, step_in_progress, step_of_entry
from nsa_harness.core.diagnosis.refused import REFUSALS, step_of
from nsa_harness.core.diagnosis.rules.p2p import departures
from nsa_harness.core.divergence.ledger import Skipped
from nsa_harness.core.report import CollectiveRef
from nsa_harness.core.verdict.wait import WaitKind


def whereabouts(case: Case, code: str) -> tuple[int | None, CollectiveRef | None]:
    """The step and the collective that the finding of this code speaks of; None where it names none."""
    if case.first_failure is not None and code in REFUSALS:
        return step_of(case, case.first_failure), None
    if code == "slow" and (late := late_for(case)) is not None:
        return late.step, CollectiveRef(group=late.call.group, seq=None, op=late.call.op)
    analysis, difference, unlike = case.analysis, case.step_difference, case.unlike
    if code == "cross_group_deadlock" and analysis.cycle:
        entry = analysis.cycle[0].entry
        return step_of_entry(case, entry), reference(entry)
    if code == "p2p_unmatched":
        return _step_of_departure(case), None
    if code == "uneven_inputs" and case.finished is not None:
        # The step that the others are in: the first one for which this rank had nothing.
        return case.finished.step + 1, next((reference(entry) for entry in first_entries(case)), None)
    if (
        code in ("shape_mismatch", "dtype_mismatch", "root_mismatch", "collective_order_mismatch")
        and unlike is not None
    ):
        call = unlike.call(unlike.differ[0])
        return unlike.step, CollectiveRef(group=unlike.group, seq=number_of(case, unlike), op=call.op)
    if code == "rank_conditional_collective" and unlike is not None and unlike.left_out:
        call = next(call for rank, call in unlike.calls if rank not in unlike.differ)
        return unlike.step, CollectiveRef(group=unlike.group, seq=number_of(case, unlike), op=call.op)
    if code == "swallowed_exception" and case.given_up is not None:
        return case.given_up.step, next((reference(entry) for entry in first_entries(case)), None)
    if (
        code in ("rank_conditional_collective", "rank0_only_collective", "swallowed_exception")
        and case.skipped is not None
    ):
        call = case.skipped.call
        return _step_of_skipped(case, case.skipped), CollectiveRef(group=call.group, seq=None, op=call.op)
    if code in ("no_sync_mismatch", "rank_conditional_collective") and difference is not None:
        return difference.step, CollectiveRef(group=difference.group, seq=None, op=difference.op)
    if code in ("rank_conditional_collective", "shape_mismatch", "dtype_mismatch"):
        return None, next((reference(entry) for entry in first_entries(case)), None)
    return None, None


def _step_of_departure(case: Case) -> int | None:
    """Of a transfer that one rank left out: the step of its last call in order, if that was not between two steps."""
    left_out = departures(case, [root for root in hung_roots(case) if root.kind is WaitKind.POINT_TO_POINT])
    if len(left_out) != 1:
        return None
    ((rank, found),) = left_out.items()
    done_s = dict(case.boards[rank].steps_s).get(found.after.step)
    return None if done_s is not None and done_s <= found.after.entered_s else found.after.step


def _step_of_skipped(case: Case, skipped: Skipped) -> int:
    """Whoever still stands in the call knows by its lines whether that is the end of a step or the next one's start."""
    ranks = (case.rank(rank) for rank in skipped.callers)
    standing = [rank for rank in ranks if rank and rank.board and stands_in(rank.board, skipped.call)]
    steps = {step_in_progress(case, rank) for rank in standing} - {None}
    return skipped.step + 1 if steps == {skipped.step + 1} else skipped.step
