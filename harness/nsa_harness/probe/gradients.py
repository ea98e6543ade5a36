"""Samples a model's gradients directly after a backward pass.

Hooks of torch's optimizers are not enough. A program may update parameters without an optimizer. It may also sum the
gradients over all ranks before the step, which hides a rank whose own gradients are missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

from .fingerprint import PARAMETERS_LIMIT, Unreadable, all_zero, largest, sample_bytes
from .names import ModuleNames

MODELS_LIMIT = 8
NAMES_LIMIT = 8
FIRST_PASSES = 16  # each of the first passes is sampled, to check the values of a model that gets its first gradients
SAMPLE_BYTES = 128 << 10  # per sample of all parameters of a model
VALUES_BYTES = 64  # per parameter without a gradient
HUGE = 1e20  # no program initialises a parameter to such a value or to NaN; uninitialised memory may contain either


CUTTING = frozenset(
    {"_all_gather_base", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "gather"}
)
CUTS_LIMIT = 8  # lines that are inspected
NODES_LIMIT = 20_000  # nodes of the autograd graph that are inspected per line
_cuts: dict[str, set[int]] = {}  # line and operation -> ids of the parameters behind the tensors that it was given


def note_cut(place: str, tensors: list[Any]) -> None:
    """Record the parameters whose gradients a collective without autograd does not pass on.

    Such a collective returns tensors without a graph. `place`: its line and name. Its first call is inspected.
    """
    if place in _cuts or len(_cuts) >= CUTS_LIMIT:
        return
    seen = {tensor.grad_fn for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None}
    queue = list(seen)
    parameters = _cuts[place] = set()
    while queue and len(seen) < NODES_LIMIT:
        node = queue.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            parameters.add(id(leaf))
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        queue += fresh


def cut_of(parameters: set[int]) -> str:
    """Return the line and name of a collective that was given results of all these parameters, or ""."""
    return next((place for place, behind in _cuts.items() if parameters and parameters <= behind), "")


class _Model:
    """A model and the problems found in its gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = 0
        self.zero_gradients = 0  # number of gradients if all were zero in every sample; 0 once a gradient was not zero
        # Parameters that had no gradient in any sample and that the program does train: id -> first values.
        self.missing_gradients: dict[int, bytes] | None = None
        self.missing_names: list[str] = []
        self.uninitialised: list[str] = []  # parameters with a gradient and an uninitialised value
        self.uninitialised_value = ""


class GradientSamples:
    """Samples of the gradients of this process's models, taken after backward passes."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()
        self._all: list[_Model] = []  # results for the records at exit, when the models may be gone

    def take(
        self, passes: int, called_models: Container[int], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        """Sample the gradients of the models in `called_models` after backward pass number `passes`.

        `called_models` are the ids of these models. Other models are skipped, because the program may have set their
        gradients to zero. `owners` returns, by parameter id, the parameter's name and whether its module was called.
        """
        for model in self._names.models():
            if id(model) not in called_models:
                continue
            # numel() raises for a lazy parameter that was never used: it has no size yet.
            trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
            parameters = [
                parameter
                for parameter in trainable
                if parameter.grad is not None or (not hasattr(parameter, "materialize") and parameter.numel())
            ]
            parameters = parameters[:: -(-len(parameters) // PARAMETERS_LIMIT) or 1]
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
            if not with_gradient:
                continue  # this pass did not reach the model
            result = self._models.get(model)
            if result is None:
                if len(self._all) == MODELS_LIMIT:
                    continue
                result = self._models[model] = _Model(type(model).__name__)
                self._all.append(result)
                if passes <= FIRST_PASSES:
                    self._check_values(result, with_gradient, owners)
            self._add_sample(result, parameters, with_gradient, owners)

    def records(self, *, by_hand: bool) -> Iterator[dict[str, Any]]:
        """Yield a record per sampled model. `by_hand`: no optimizer hook has looked for missing gradients."""
        for result in self._all:
            yield {
                "at": "gradients",
                "model": result.name,
                "looks": result.samples,
                "still": result.zero_gradients,
                "never": len(result.missing_gradients or ()) if by_hand else 0,
                "never_names": result.missing_names[:NAMES_LIMIT] if by_hand else [],
                "unset": result.uninitialised[:NAMES_LIMIT],
                "unset_value": result.uninitialised_value,
            }

    def _add_sample(
        self,
        result: _Model,
        parameters: list[Any],
        with_gradient: list[Any],
        owners: Callable[[], dict[int, tuple[str, bool]]],
    ) -> None:
        result.samples += 1
        if result.samples == 1 or result.zero_gradients:
            result.zero_gradients = all_zero([parameter.grad for parameter in with_gradient])
        missing = [
            parameter
            for parameter in parameters
            if parameter.grad is None
            and (result.missing_gradients is None or id(parameter) in result.missing_gradients)
        ]
        if missing:
            # A parameter whose values change without a gradient is a copy or average of other weights, and not missing.
            owner_of, excluded_ids, before = owners(), self._names.excluded_parameters(), result.missing_gradients or {}
            values = {id(parameter): _values(parameter) for parameter in missing if id(parameter) not in excluded_ids}
            called_values = {key: value for key, value in values.items() if owner_of.get(key, ("", False))[1]}
            result.missing_gradients = {
                key: value for key, value in called_values.items() if before.get(key, value) == value
            }
            result.missing_names = [owner_of[key][0] for key in result.missing_gradients]
        else:
            result.missing_gradients = {}

    def _check_values(
        self, result: _Model, with_gradient: list[Any], owners: Callable[[], dict[int, tuple[str, bool]]]
    ) -> None:
        limit_bytes = max(256, SAMPLE_BYTES // len(with_gradient))
        for parameter in with_gradient:
            try:
                value = largest(
                    sample_bytes(getattr(parameter, "_local_tensor", parameter), limit_bytes), str(parameter.dtype)
                )
            except Unreadable:
                continue
            if value != value or HUGE < value < float("inf"):
                result.uninitialised.append(
                    owners().get(id(parameter), (f"a parameter of {tuple(parameter.shape)}", True))[0]
                )
                result.uninitialised_value = result.uninitialised_value or f"{value:.2g}"


def _values(parameter: Any) -> bytes:
    """Return the leading bytes of a parameter or, if it is not in host memory, its version counter."""
    try:
        return sample_bytes(getattr(parameter, "_local_tensor", parameter), VALUES_BYTES)
    except Unreadable:
        return str(parameter._version).encode()
