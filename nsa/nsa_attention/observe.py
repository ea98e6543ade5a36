"""Traces of the backward pass, printed as lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_WRAPPERS = frozenset({"_fsdp_wrapped_module"})


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its name, without the parts that FSDP1 wrappers add to names.

    For a module in a wrapper, only the wrapper is yielded, because only the wrapper is called directly.
    """
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] not in _WRAPPERS:
            yield ".".join(part for part in parts if part not in _WRAPPERS), module


def say(line: str) -> None:
    """Print a line to stdout in a single write, so that the lines of several ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def without_ending_training() -> Iterator[None]:
    """Run the `with` block or decorated function. If it cannot write a file, print the error once and continue."""
    try:
        yield
    except OSError as error:
        _say_once(f"nsa.train telemetry: {error}; rows are missing in the files, and the training goes on")


@cache
def _say_once(line: str) -> None:
    say(line)


class GradientTrace:
    """A trace of the order in which the backward pass of a step completes the gradients of the parameters.

    `buckets` returns the parameters of each DDP bucket of this step, by bucket number; without DDP it returns {}.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        order_file: Path,
        buckets: Callable[[], Mapping[int, Sequence[Tensor]]] = dict,
    ) -> None:
        self._parameters = dict(parameters)
        self._buckets = buckets
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._arrived: dict[str, None] = {}
        self._order_file = order_file
        self._last: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._recorder(name))

    def after_backward(self, step: int) -> None:
        """Print how many gradients this step has computed, and the names of the parameters without a gradient."""
        missing = [name for name in self._parameters if name not in self._arrived]
        lines = [f"[GRAD-TRACE] after_backward_step{step} arrived={len(self._arrived)} missing={len(missing)}"]
        say("\n".join(lines + [f"  - MISSING: {name}" for name in missing]))
        self._write_order(step, list(self._arrived), missing)
        self._arrived = {}

    def _recorder(self, name: str) -> Any:
        def record(_: Tensor) -> None:
            self._arrived[name] = None

        return record

    def _write_order(self, step: int, arrival_order: list[str], missing: list[str]) -> None:
        """Append the order of the gradients to a file if it differs from the order in the previous step."""
        parameters_by_bucket = {
            number: [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]
            for number, parameters in self._buckets().items()
        }
        order = (
            {"arrived": arrival_order, "buckets": ready_buckets(arrival_order, parameters_by_bucket)}
            if parameters_by_bucket
            else {"arrived": arrival_order}
        )
        if order == self._last:
            return
        self._last = order
        with without_ending_training(), self._order_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **order, "missing": missing}) + "\n")


def ready_buckets(
    arrival_order: Sequence[str], parameters_by_bucket: Mapping[int, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the DDP buckets in the order in which their last gradient arrived.

    `arrival_order` lists the names of the parameters in the order in which their gradients arrived. Buckets with a
    missing gradient come last. DDP itself reduces buckets in the order of their numbers.
    """
    arrival_index = {name: number for number, name in enumerate(arrival_order)}
    bucket_order = sorted(
        parameters_by_bucket,
        key=lambda number: (
            max(arrival_index.get(name, len(arrival_index)) for name in parameters_by_bucket[number]),
            number,
        ),
    )
    return [
        {
            "bucket": number,
            "parameters": len(parameters_by_bucket[number]),
            "last": max(parameters_by_bucket[number], key=lambda n: arrival_index.get(n, len(arrival_index))),
        }
        for number in bucket_order
    ]


class ViewGradientTrace(GradientTrace):
    """A GradientTrace for FSDP1, which computes with views of a flat parameter.

    Hooks on the model's own parameters never fire with FSDP1, so this class hooks the views in each forward pass.
    """

    def __init__(self, model: nn.Module, order_file: Path) -> None:
        """Start tracing `model`. The model must not be wrapped yet, because wrapping replaces the parameter names."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        super().__init__(((name, parameter) for parameter, name in names.items()), order_file)
        for module in model.modules():
            names_by_attribute = {
                attribute: names[parameter]
                for attribute, parameter in module.named_parameters(recurse=False)
                if parameter.requires_grad
            }
            if names_by_attribute:
                module.register_forward_pre_hook(self._watch_views(names_by_attribute))

    def _watch_views(self, names_by_attribute: dict[str, str]) -> Any:
        def watch(module: nn.Module, _: Any) -> None:
            for attribute, name in names_by_attribute.items():
                view = getattr(module, attribute)
                if view.grad_fn is not None:
                    view.register_hook(self._recorder(name))

        return watch


class ModuleBackwardTrace:
    """A trace that prints a line when the backward pass reaches a module.

    It hooks autograd nodes. PyTorch's full backward hooks would wrap a module's inputs and outputs, which breaks
    programs that change them in place.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.step = 0
        for name, module in modules:
            module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Any:
        def watch(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            # Without a graph there is no node, for example in the first forward pass of a reentrant checkpoint.
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: say(f"[MODULE-BWD] step={self.step} {name}"))

        return watch


def traced_modules(model: nn.Module, *, compiled: bool = False) -> list[tuple[str, nn.Module]]:
    """Return the modules to trace, with their names: blocks, attention, MLPs and attention branches."""
    # For compiled models only whole blocks are returned, because compiled code does not run hooks added later.
    parts = [(name, module) for name, module in named_modules(model) if name.startswith("blocks.") and _is_part(name)]
    return [(name, module) for name, module in parts if not compiled or name.count(".") == 1]


def _is_part(name: str) -> bool:
    parts = name.split(".")
    return len(parts) <= 3 or (len(parts) == 4 and parts[3] in ("cmp", "sel", "win", "gate_mlp"))
