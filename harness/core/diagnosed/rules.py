"""All rules of the diagnosis by phase, and the one answer of a case.

A rule is a function with `@rule` in one of these modules; nothing else has to name it.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.diagnosed import (
    of_autograd,
    of_divergence,
    of_ending,
    of_failure,
    of_gradients,
    of_group_wait,
    of_hang,
    of_left_out,
    of_native,
    of_order,
    of_reduction,
    of_run,
    of_silence,
    of_threads,
    of_transfer,
)
from harness.core.diagnosed.case import Case, Explanation
from harness.core.diagnosed.phases import Phase, Rule, in_order

_MODULES = (
    of_autograd,
    of_divergence,
    of_ending,
    of_failure,
    of_gradients,
    of_group_wait,
    of_hang,
    of_left_out,
    of_native,
    of_order,
    of_reduction,
    of_run,
    of_silence,
    of_threads,
    of_transfer,
)
RULES = tuple(one for module in _MODULES for one in vars(module).values() if isinstance(one, Rule))
IN_PHASE = {phase: in_order(one for one in RULES if one.phase is phase) for phase in Phase}


def cause_of(case: Case) -> Explanation:
    """Of a run that did not pass. The last rule of the fallback answers every case."""
    rules = (one for phase in Phase if phase is not Phase.SILENT for one in IN_PHASE[phase])
    return next(answer for one in rules if (answer := one(case)) is not None)


def beside(case: Case) -> Iterator[Explanation]:
    """What is noted beside any verdict."""
    yield from (answer for one in IN_PHASE[Phase.SILENT] if (answer := one(case)) is not None)
