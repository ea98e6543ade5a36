"""What a run says of its backward pass, in lines: which gradients arrived, and which modules it reached."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_WRAPPERS = frozenset({"_fsdp_wrapped_module"})


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module under its own name. Of a wrapper and what it wraps only the wrapper: it is the one that is called."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] not in _WRAPPERS:
            yield ".".join(part for part in parts if part not in _WRAPPERS), module


def say(line: str) -> None:
    """One line in one write, so that lines of several ranks and threads never mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class GradientTrace:
    """Which parameters got a gradient in this step, in the order of their arrival, and which buckets that made ready.

    `buckets`: takes the parameters of each of DDP's buckets in this step, by its number.
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
        """Say what arrived and name what is missing, then start over."""
        missing = [name for name in self._parameters if name not in self._arrived]
        lines = [f"[GRAD-TRACE] after_backward_step{step} arrived={len(self._arrived)} missing={len(missing)}"]
        say("\n".join(lines + [f"  - MISSING: {name}" for name in missing]))
        self._write_order(step, list(self._arrived), missing)
        self._arrived = {}

    def _recorder(self, name: str) -> Any:
        def record(_: Tensor) -> None:
            self._arrived[name] = None

        return record

    def _write_order(self, step: int, arrived: list[str], missing: list[str]) -> None:
        """The order is written when it differs from the step before; it is the same in most steps."""
        parameters_by_bucket = {
            number: [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]
            for number, parameters in self._buckets().items()
        }
        order = (
            {"arrived": arrived, "buckets": ready_buckets(arrived, parameters_by_bucket)}
            if parameters_by_bucket
            else {"arrived": arrived}
        )
        if order == self._last:
            return
        self._last = order
        with self._order_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **order, "missing": missing}) + "\n")


def ready_buckets(arrived: Sequence[str], parameters_by_bucket: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    """The buckets in the order in which they became ready: with the last of their gradients to arrive.

    DDP reduces them by their numbers all the same. One with a parameter whose gradient never arrived comes last.
    """
    arrival_index = {name: number for number, name in enumerate(arrived)}
    ordered = sorted(
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
        for number in ordered
    ]


class ViewGradientTrace(GradientTrace):
    """The same for FSDP1, which computes with views of one flat parameter: the model's own never get a hook called."""

    def __init__(self, model: nn.Module, order_file: Path) -> None:
        """`model` is still unwrapped: later the names are gone."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        super().__init__(((name, parameter) for parameter, name in names.items()), order_file)
        for module in model.modules():
            owned = {
                attribute: names[parameter]
                for attribute, parameter in module.named_parameters(recurse=False)
                if parameter.requires_grad
            }
            if owned:
                module.register_forward_pre_hook(self._watch_views(owned))

    def _watch_views(self, owned: dict[str, str]) -> Any:
        def watch(module: nn.Module, _: Any) -> None:
            for attribute, name in owned.items():
                view = getattr(module, attribute)
                if view.grad_fn is not None:
                    view.register_hook(self._recorder(name))

        return watch


class ModuleBackwardTrace:
    """A line when the backward pass reaches the output of a module.

    The hooks sit on the graph's nodes. A module's full backward hook wraps its inputs and outputs, which breaks
    programs that write to them in place.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.step = 0
        for name, module in modules:
            module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Any:
        def watch(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            # No node: a forward pass without a graph, such as the first one of a reentrant checkpoint.
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: say(f"[MODULE-BWD] step={self.step} {name}"))

        return watch


def traced_modules(model: nn.Module, *, compiled: bool = False) -> list[tuple[str, nn.Module]]:
    """The modules that a reader of a stuck backward pass wants to see: blocks, their halves and the branches.

    Compiled code runs no hooks that come later, so of compiled layers only the whole is seen.
    """
    parts = [(name, module) for name, module in named_modules(model) if name.startswith("blocks.") and _is_part(name)]
    return [(name, module) for name, module in parts if not compiled or name.count(".") == 1]


def _is_part(name: str) -> bool:
    parts = name.split(".")
    return len(parts) <= 3 or (len(parts) == 4 and parts[3] in ("cmp", "sel", "win", "gate_mlp"))
