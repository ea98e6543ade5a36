"""A report of the dtypes in a training run, compared with the expected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .observe import named_modules

HALF = (torch.bfloat16, torch.float16)
_SHOWN_DEPTH = 3  # activations are listed for modules with at most this many dots in the name
_ALWAYS_FLOAT32 = frozenset({"step"})  # optimizer state that is float32 for any parameter dtype: the step counter


@dataclass(frozen=True, kw_only=True)
class ExpectedDtypes:
    """The dtypes that the tensors of a training run should have."""

    weights: torch.dtype  # parameters, gradients and optimizer moments
    compute: torch.dtype  # matrix products
    autocast: bool  # with autocast, modules other than nn.Linear may also return the dtype of the weights

    def allowed_for(self, module: nn.Module) -> frozenset[torch.dtype]:
        """Return the dtypes that the output of `module` may have."""
        either = self.autocast and not isinstance(module, nn.Linear)
        return frozenset({self.compute, self.weights}) if either else frozenset({self.compute})


def expected_dtypes(compute: torch.dtype, *, autocast: bool) -> ExpectedDtypes:
    """Return the dtypes expected of weights, gradients and activations in a run that computes in `compute`."""
    weights = torch.float64 if compute is torch.float64 else torch.float32
    return ExpectedDtypes(weights=weights, compute=compute, autocast=autocast)


def dtype_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    activations: Mapping[str, torch.dtype],
    expected: ExpectedDtypes,
) -> str:
    """Return the text of dtypes_report.txt, a list of the dtypes of a model and of its training state.

    `activations` maps module names to the dtype of their output.
    """
    parameters = list(model.parameters())
    states = list(_states(optimizer))
    kinds: dict[str, list[Tensor]] = {
        "parameters": [*parameters],
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [value for _, _, value in states],
    }
    lines = []
    for kind, tensors in kinds.items():
        counts = Counter(str(tensor.dtype) for tensor in tensors)
        lines += [f"{kind} {dtype} {count}" for dtype, count in sorted(counts.items())]
    by_state = Counter((name, str(value.dtype)) for _, name, value in states)
    lines += [f"optimizer_state {dtype} {name} {count}" for (name, dtype), count in sorted(by_state.items())]
    lines += [f"activation {dtype} {name}" for name, dtype in activations.items() if name.count(".") <= _SHOWN_DEPTH]
    unexpected = list(unexpected_dtypes(model, optimizer, activations, expected))
    return "\n".join([*lines, *unexpected, f"surprises {len(unexpected)}"]) + "\n"


def unexpected_dtypes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    activations: Mapping[str, torch.dtype],
    expected: ExpectedDtypes,
) -> Iterator[str]:
    """Yield a message for each tensor with an unexpected dtype."""
    # FSDP1 inserts the name of its wrapper module into parameter names.
    names = {parameter: name.replace("_fsdp_wrapped_module.", "") for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        if parameter.dtype is not expected.weights:
            yield _line("parameter", parameter.dtype, name, {expected.weights})
        if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
            yield _line("gradient", parameter.grad.dtype, name, {parameter.dtype})
    for parameter, state, value in _states(optimizer):
        expected_dtype = torch.float32 if state in _ALWAYS_FLOAT32 else parameter.dtype
        if value.is_floating_point() and value.dtype is not expected_dtype:
            yield _line("optimizer", value.dtype, f"{names.get(parameter, '?')} {state}", {expected_dtype})
    modules = dict(named_modules(model))
    for name, dtype in activations.items():
        allowed_dtypes = expected.allowed_for(modules[name])
        if dtype not in allowed_dtypes:
            yield _line("activation", dtype, name, allowed_dtypes)


def _line(kind: str, dtype: torch.dtype, name: str, expected: Iterable[torch.dtype]) -> str:
    return f"surprise {kind} {dtype} {name} expected {' or '.join(sorted(map(str, expected)))}"


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    for parameter, state in optimizer.state.items():
        yield from ((parameter, name, value) for name, value in state.items() if isinstance(value, Tensor))
