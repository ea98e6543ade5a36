"""Decide whether two runs of nsa.train should compute the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.experiment.trial import ComputedNumber
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.scenario.program import Table
from nsa_harness.subject.files import is_launched_by

# Keys that decide how the ranks cooperate, which kernels run, what is stored or recomputed, and the environment. A key
# that ends in a dot stands for all keys below it.
_HOW = ("parallel.", "gc.", "run.env.", "needs.", "trace.", "limits.", "model.impl", "model.compile")
# A key below one of these that does change the numbers: the hook rounds gradients before they are averaged.
_WHAT = ("parallel.comm_hook",)

_COLUMNS = ("loss", "grad_norm")
# The relative difference that rounding can cause between two sound implementations, in the loss and the gradient norm
# of the first ten steps. The table has six digits.
_TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_COARSEST = max(_TOLERANCES.values())


def decides_only_how(key: str) -> bool:
    """Return whether this scenario key decides only how numbers are computed, and therefore should not change them."""
    return key not in _WHAT and any(key == how or (how.endswith(".") and key.startswith(how)) for how in _HOW)


def tolerance(spec: RunSpec) -> float:
    """Return the relative difference that rounding can cause with the run's dtype, or the largest if unknown."""
    words = spec.program
    dtype = words[words.index("--dtype") + 1] if is_launched_by(spec) and "--dtype" in words[:-1] else ""
    return _TOLERANCES.get(dtype, _COARSEST)


def computed_numbers(table: Table) -> tuple[ComputedNumber, ...]:
    """Return the loss and the gradient norm at each training step."""
    return tuple(_numbers(table))


def _numbers(table: Table) -> Iterator[ComputedNumber]:
    for row in table("training.csv") or ():
        step = row.get("step")
        if isinstance(step, float) and step.is_integer():
            values = {name: row.get(name) for name in _COLUMNS}
            yield from (
                ComputedNumber(step=int(step), name=name, value=value)
                for name, value in values.items()
                if isinstance(value, float)
            )
