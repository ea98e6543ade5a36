"""Gradients as a backward pass leaves them in a model: before anything reduces or uses them, and whoever does.

An optimizer of torch's shows what it is given. A program may step by hand, or sum the gradients of all ranks first, so
that a rank that has none of its own goes unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

from .fingerprint import PARAMETERS_LIMIT, Unreadable, all_zero, largest, sample
from .names import ModuleNames

MODELS_LIMIT = 8
NAMES_LIMIT = 8
FIRST_PASSES = 16  # every one of these is looked at, so that the first gradients of a model are seen as they come
SAMPLE_BYTES = 128 << 10  # of all parameters of a model
VALUES_BYTES = 64  # of a parameter without a gradient
HUGE = 1e20  # nobody begins with such a number, nor with none at all; memory that was never written may hold either


class _Model:
    """What was seen of one model, at each pass that left gradients in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.looks = 0
        self.still = 0  # parameters whose gradients were all zero at every look; 0 once one was not
        # Had none at any look, though the program did nothing to keep it out; by identity, with its first values.
        self.never: dict[int, bytes] | None = None
        self.never_names: list[str] = []
        self.unset: list[str] = []  # held what no program begins with, and had a gradient
        self.unset_value = ""


class GradientSamples:
    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()
        self._all: list[_Model] = []  # as the program ends, its models may be gone

    def look(self, passes: int, called: Container[int], owners: Callable[[], dict[int, tuple[str, bool]]]) -> None:
        """After pass number `passes`, at the models `called` before it: others may hold zeros that somebody set.

        `owners` gives each parameter's name, and whether its module was called.
        """
        for model in self._names.models():
            if id(model) not in called:
                continue
            # One that is lazy and was never used has no size, and asking for it raises.
            wanted = (one for one in model.parameters() if one.requires_grad)
            every = [one for one in wanted if one.grad is not None or (not hasattr(one, "materialize") and one.numel())]
            every = every[:: -(-len(every) // PARAMETERS_LIMIT) or 1]
            reached = [one for one in every if one.grad is not None]
            if not reached:
                continue  # this pass was not about that model
            seen = self._models.get(model)
            if seen is None:
                if len(self._all) == MODELS_LIMIT:
                    continue
                seen = self._models[model] = _Model(type(model).__name__)
                self._all.append(seen)
                if passes <= FIRST_PASSES:
                    self._look_at_values(seen, reached, owners)
            self._take(seen, every, reached, owners)

    def records(self, *, by_hand: bool) -> Iterator[dict[str, Any]]:
        """What no optimizer of torch's has been asked for is told only where the program has none."""
        for seen in self._all:
            yield {
                "at": "gradients",
                "model": seen.name,
                "looks": seen.looks,
                "still": seen.still,
                "never": len(seen.never or ()) if by_hand else 0,
                "never_names": seen.never_names[:NAMES_LIMIT] if by_hand else [],
                "unset": seen.unset[:NAMES_LIMIT],
                "unset_value": seen.unset_value,
            }

    def _take(
        self, seen: _Model, every: list[Any], reached: list[Any], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        seen.looks += 1
        if seen.looks == 1 or seen.still:
            seen.still = all_zero([one.grad for one in reached])
        missing = [one for one in every if one.grad is None and (seen.never is None or id(one) in seen.never)]
        if missing:
            # An average of the weights, or a copy of them, takes its values from elsewhere.
            known, kept_out, before = owners(), self._names.kept_out(), seen.never or {}
            values = {id(one): _values(one) for one in missing if id(one) not in kept_out}
            called = {one: value for one, value in values.items() if known.get(one, ("", False))[1]}
            seen.never = {one: value for one, value in called.items() if before.get(one, value) == value}
            seen.never_names = [known[one][0] for one in seen.never]
        else:
            seen.never = {}

    def _look_at_values(
        self, seen: _Model, reached: list[Any], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        limit_bytes = max(256, SAMPLE_BYTES // len(reached))
        for one in reached:
            try:
                value = largest(sample(getattr(one, "_local_tensor", one), limit_bytes), str(one.dtype))
            except Unreadable:
                continue
            if value != value or HUGE < value < float("inf"):
                seen.unset.append(owners().get(id(one), (f"a parameter of {tuple(one.shape)}", True))[0])
                seen.unset_value = seen.unset_value or f"{value:.2g}"


def _values(parameter: Any) -> bytes:
    """A few of its numbers; off the host, how often they were written in place."""
    try:
        return sample(getattr(parameter, "_local_tensor", parameter), VALUES_BYTES)
    except Unreadable:
        return str(parameter._version).encode()
