"""What of nsa.train a mitigation has to leave as it is: the numbers it computes, and the keys that decide only how.

Of a key that is not listed here a difference in the numbers is told and proves nothing: it may be what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.experiment.trial import Number
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.scenario.program import Table
from nsa_harness.subject.files import is_launched_by

# How the ranks work together, which kernels compute, what is kept and what is computed again, where and in what
# surroundings. A key that ends in a dot stands for all below it.
_HOW = (
    "parallel.",
    "gc.",
    "run.env.",
    "needs.",
    "trace.",
    "limits.",
    "model.impl",
    "model.compile",
)
# Below one of them, and meant to change it: the hook rounds the gradients before they are averaged.
_WHAT = ("parallel.comm_hook",)

_COLUMNS = ("loss", "grad_norm")
# By which share rounding alone sets two sound implementations apart, in the loss and the norm of the first ten steps;
# the table has six digits of each.
_TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_COARSEST = max(_TOLERANCES.values())


def decides_only_how(key: str) -> bool:
    """Two runs that differ in this key alone have to compute the same."""
    return key not in _WHAT and any(key == one or (one.endswith(".") and key.startswith(one)) for one in _HOW)


def tolerance(spec: RunSpec) -> float:
    """Of a launch's numbers against another one's, as a share; of a program that is not ours the coarsest."""
    words = spec.program
    dtype = words[words.index("--dtype") + 1] if is_launched_by(spec) and "--dtype" in words[:-1] else ""
    return _TOLERANCES.get(dtype, _COARSEST)


def computed(table: Table) -> tuple[Number, ...]:
    """The loss and the norm of the gradients in each step, as its table of the training has them."""
    return tuple(_numbers(table))


def _numbers(table: Table) -> Iterator[Number]:
    for row in table("training.csv") or ():
        step = row.get("step")
        if isinstance(step, float) and step.is_integer():
            values = {name: row.get(name) for name in _COLUMNS}
            yield from (
                Number(step=int(step), name=name, value=value)
                for name, value in values.items()
                if isinstance(value, float)
            )
