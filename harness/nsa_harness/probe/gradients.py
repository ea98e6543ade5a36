"""Gradients as a backward pass leaves them in a model, before any code reduces or uses them.

Hooks of torch's optimizers see only the gradients that an optimizer is given. A program may step by hand, or sum the
gradients of all ranks first, which hides a rank without gradients of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

from .fingerprint import PARAMETERS_LIMIT, Unreadable, all_zero, largest, sample
from .names import ModuleNames

MODELS_LIMIT = 8
NAMES_LIMIT = 8
FIRST_PASSES = 16  # all are sampled, so that a model's first gradients are seen as they arrive
SAMPLE_BYTES = 128 << 10  # per sample of all parameters of a model
VALUES_BYTES = 64  # per parameter without a gradient
HUGE = 1e20  # no program initialises a parameter with such a value or nan; uninitialised memory may contain either


class _Model:
    """The samples of one model, taken at each pass that left gradients in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = 0
        self.still = 0  # parameters, if all gradients were zero in every sample; 0 once a gradient was not
        # Parameters without a gradient in any sample that the program did not exclude; by identity, with first values.
        self.never: dict[int, bytes] | None = None
        self.never_names: list[str] = []
        self.unset: list[str] = []  # parameters with a gradient and an uninitialised value
        self.unset_value = ""


class GradientSamples:
    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()
        self._all: list[_Model] = []  # kept, as the models may be gone at exit

    def take(self, passes: int, called: Container[int], owners: Callable[[], dict[int, tuple[str, bool]]]) -> None:
        """Sample the models `called` before pass number `passes`: other models may have zeros that the program set.

        `owners` returns each parameter's name and whether its module was called.
        """
        for model in self._names.models():
            if id(model) not in called:
                continue
            # A lazy parameter that was never used has no size: numel() would raise.
            wanted = (each for each in model.parameters() if each.requires_grad)
            every = [
                each for each in wanted if each.grad is not None or (not hasattr(each, "materialize") and each.numel())
            ]
            every = every[:: -(-len(every) // PARAMETERS_LIMIT) or 1]
            reached = [each for each in every if each.grad is not None]
            if not reached:
                continue  # this pass did not reach the model
            seen = self._models.get(model)
            if seen is None:
                if len(self._all) == MODELS_LIMIT:
                    continue
                seen = self._models[model] = _Model(type(model).__name__)
                self._all.append(seen)
                if passes <= FIRST_PASSES:
                    self._check_values(seen, reached, owners)
            self._add_sample(seen, every, reached, owners)

    def records(self, *, by_hand: bool) -> Iterator[dict[str, Any]]:
        """Yield a record per model. `by_hand`: the program uses no optimizer of torch's, so missing gradients count."""
        for seen in self._all:
            yield {
                "at": "gradients",
                "model": seen.name,
                "looks": seen.samples,
                "still": seen.still,
                "never": len(seen.never or ()) if by_hand else 0,
                "never_names": seen.never_names[:NAMES_LIMIT] if by_hand else [],
                "unset": seen.unset[:NAMES_LIMIT],
                "unset_value": seen.unset_value,
            }

    def _add_sample(
        self, seen: _Model, every: list[Any], reached: list[Any], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        seen.samples += 1
        if seen.samples == 1 or seen.still:
            seen.still = all_zero([each.grad for each in reached])
        missing = [each for each in every if each.grad is None and (seen.never is None or id(each) in seen.never)]
        if missing:
            # A parameter whose values change without a gradient is a copy or an average of other weights.
            known, excluded, before = owners(), self._names.excluded(), seen.never or {}
            values = {id(each): _values(each) for each in missing if id(each) not in excluded}
            called = {key: value for key, value in values.items() if known.get(key, ("", False))[1]}
            seen.never = {key: value for key, value in called.items() if before.get(key, value) == value}
            seen.never_names = [known[key][0] for key in seen.never]
        else:
            seen.never = {}

    def _check_values(
        self, seen: _Model, reached: list[Any], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        limit_bytes = max(256, SAMPLE_BYTES // len(reached))
        for each in reached:
            try:
                value = largest(sample(getattr(each, "_local_tensor", each), limit_bytes), str(each.dtype))
            except Unreadable:
                continue
            if value != value or HUGE < value < float("inf"):
                seen.unset.append(owners().get(id(each), (f"a parameter of {tuple(each.shape)}", True))[0])
                seen.unset_value = seen.unset_value or f"{value:.2g}"


def _values(parameter: Any) -> bytes:
    """Return the first values of a parameter, or its version counter if it is not in host memory."""
    try:
        return sample(getattr(parameter, "_local_tensor", parameter), VALUES_BYTES)
    except Unreadable:
        return str(parameter._version).encode()
