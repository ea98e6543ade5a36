"""Finds the qualified names of the modules that the program calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .status_file import StatusFileWriter

# Path components that wrappers such as FSDP and torch.compile add. The user's own module names do not contain them.
WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

DEPTH = 2  # levels of modules below a numbered block that get a backward event
# Modules that never wait and never run for long, so they need no event.
POINTWISE = frozenset({"torch.nn.modules.normalization", "torch.nn.modules.dropout"})


class NamedModule:
    """A module of the program, with its qualified name and the progress events recorded for it."""

    __slots__ = (
        "_status_file",
        "first_step",
        "forward_event",
        "has_parameters",
        "is_ddp",
        "module",
        "name",
        "skips_backward",
        "skips_events",
        "without_gradients",
        "write_backward_event",
    )

    def __init__(self, status_file: StatusFileWriter, module: Callable[[], Any], name: str) -> None:
        self._status_file = status_file
        self.module = module
        self.name = name
        self.forward_event = 0
        self.skips_events = self.skips_backward = self.has_parameters = self.is_ddp = False
        self.first_step = 0  # the step of its first call
        self.without_gradients = False  # its output had no grad_fn inside a forward that trains

    def prepare(self) -> None:
        """Prepare the progress events that will be recorded whenever the module is called."""
        module = self.module()
        self.first_step = self._status_file.step
        self.skips_events = _is_small(module) and (_is_pointwise(module) or is_detail(self.name))
        self.skips_backward = self.skips_events or is_deep(self.name)
        # A loss module without parameters often stays in training mode, so it does not show how the program runs.
        self.has_parameters = next(module.parameters(), None) is not None
        self.is_ddp = any(base.__name__ == "DistributedDataParallel" for base in type(module).__mro__)
        self.forward_event = self._status_file.event_code("forward", self.name)
        self.write_backward_event = functools.partial(
            self._status_file.write_training_event, self._status_file.event_code("backward", self.name)
        )


class ModuleNames:
    """The modules of the program's models, by id(), with their names. Weak references detect reused addresses."""

    def __init__(self, status_file: StatusFileWriter) -> None:
        self._status_file = status_file
        self._modules: dict[int, NamedModule] = {}
        self.called: dict[int, NamedModule] = {}  # id(module) -> a called module; removed when the module is collected
        self._roots: list[Callable[[], Any]] = []
        self.at_next_forward: Callable[[], None] | None = None  # called when the next forward begins
        # Called with each module whose forward with gradients begins outside of DDP and of any other module.
        self.at_outermost: Callable[[Any], None] | None = None
        self.called_ddps: set[int] = set()  # ids of the DDP models that were called with gradients in this iteration

    def find(self, module: Any) -> NamedModule:
        """Return the record of a module that was called. Register the model that contains the module if necessary."""
        entry = self._modules.get(id(module))
        if entry is None or entry.module() is not module:
            self._add_model(module)
            entry = self._modules[id(module)]
        if not entry.forward_event:
            entry.prepare()
        self.called[id(module)] = entry
        return entry

    def modules(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the name of each known module, the module, and whether it was called."""
        for entry in list(self._modules.values()):
            module = entry.module()
            if module is not None:
                yield entry.name, module, bool(entry.forward_event)

    def new_modules(self) -> list[Any]:
        """Return the modules that were called for the first time in the current step."""
        step = self._status_file.step
        modules = (entry.module() for entry in list(self.called.values()) if entry.first_step == step)
        return [module for module in modules if module is not None]

    def excluded_parameters(self) -> set[int]:
        """Return the ids of the parameters that the program deliberately does not train.

        Their module, or a module around it, runs without gradients during training, or is not in training mode.
        """
        every = ((entry, entry.module()) for entry in list(self._modules.values()))
        modules = [
            module for entry, module in every if module is not None and (entry.without_gradients or not module.training)
        ]
        return {id(parameter) for module in modules for parameter in module.parameters()}

    def models(self) -> list[Any]:
        """Return the outermost modules that the program has called."""
        return [model for model in (root() for root in self._roots) if model is not None]

    def _add_model(self, root: Any) -> None:
        members = dict(root.named_modules())
        inside = {id(member) for member in members.values()}
        others = [other for other in (ref() for ref in self._roots) if other is not None and id(other) not in inside]
        prefix = f"{type(root).__name__}." if others else ""
        self._roots = [*(weakref.ref(other) for other in others), weakref.ref(root)]
        for path, member in members.items():
            bare = strip(path)
            name = prefix + bare if bare else type(member).__name__
            self.called.pop(id(member), None)
            self._modules[id(member)] = NamedModule(self._status_file, self._reference(member), name)

    def _reference(self, module: Any) -> Callable[[], Any]:
        key = id(module)

        def forget(reference: Any) -> None:
            entry = self._modules.get(key)
            if entry is not None and entry.module is reference:
                del self._modules[key]
                self.called.pop(key, None)

        return weakref.ref(module, forget)


def is_detail(name: str) -> bool:
    """Return whether `name` is that of a named part of a block, such as "blocks.3.attn.query"."""
    *above, parent, _leaf = ["", *name.split(".")]
    return not parent.isdigit() and any(part.isdigit() for part in above)


def is_deep(name: str) -> bool:
    """Return whether a module is more than two levels below a block, such as "blocks.3.attn.cmp.inner"."""
    parts = name.split(".")
    below = next((count for count, part in enumerate(reversed(parts)) if part.isdigit()), 0)
    return below > DEPTH


def _is_pointwise(module: Any) -> bool:
    return type(module).__module__ in POINTWISE


def _is_small(module: Any) -> bool:
    """Return whether the module is one of torch's own, such as Linear, and has no children."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def strip(path: str) -> str:
    """Return a module path without the names of wrappers, such as those of DDP, FSDP and torch.compile."""
    parts = [part for part in path.split(".") if part not in WRAPPER_PARTS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
