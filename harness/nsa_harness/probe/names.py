"""Qualified names of the modules of any model, read from the modules that the program calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .status_file import StatusFileWriter

# Parts that wrappers add to module paths; the user's own names do not contain them.
WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

DEPTH = 2  # named parts below a numbered block that get a backward event
# Modules that never wait and never run long: the next event of the backward pass shows as much.
POINTWISE = frozenset({"torch.nn.modules.normalization", "torch.nn.modules.dropout"})


class Known:
    """One module, and its progress events, which are made when it is first called."""

    __slots__ = (
        "_status_file",
        "forward",
        "learns",
        "module",
        "name",
        "on_backward",
        "silent",
        "silent_backward",
        "since",
        "without_gradients",
    )

    def __init__(self, status_file: StatusFileWriter, module: Callable[[], Any], name: str) -> None:
        self._status_file = status_file
        self.module = module
        self.name = name
        self.forward = 0
        self.silent = self.silent_backward = self.learns = False
        self.since = 0  # the step of its first call
        self.without_gradients = False  # its output inside a training pass had no grad_fn

    def prepare(self) -> None:
        module = self.module()
        self.since = self._status_file.step
        self.silent = _is_small(module) and (_is_pointwise(module) or is_detail(self.name))
        self.silent_backward = self.silent or is_deep(self.name)
        # A loss without parameters does not follow the training mode.
        self.learns = next(module.parameters(), None) is not None
        self.forward = self._status_file.what("forward", self.name)
        self.on_backward = functools.partial(
            self._status_file.progress_event, self._status_file.what("backward", self.name)
        )


class ModuleNames:
    """The modules of the program by id(). Weak references detect a new module at the same address."""

    def __init__(self, status_file: StatusFileWriter) -> None:
        self._status_file = status_file
        self._known: dict[int, Known] = {}
        self.ready: dict[int, Known] = {}  # id(module) -> a called module; a collected module is removed at once
        self._roots: list[Callable[[], Any]] = []
        self.at_next_forward: Callable[[], None] | None = None  # called at the begin of the next forward

    def of(self, module: Any) -> Known:
        known = self._known.get(id(module))
        if known is None or known.module() is not module:
            self._learn(module)
            known = self._known[id(module)]
        if not known.forward:
            known.prepare()
        self.ready[id(module)] = known
        return known

    def known(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield each living module with its name and whether it was called."""
        for known in list(self._known.values()):
            module = known.module()
            if module is not None:
                yield known.name, module, bool(known.forward)

    def fresh(self) -> list[Any]:
        """Return the modules that were first called in the step in progress."""
        step = self._status_file.step
        called = (known.module() for known in list(self.ready.values()) if known.since == step)
        return [module for module in called if module is not None]

    def excluded(self) -> set[int]:
        """Return the identities of parameters that the program chose not to train.

        Their module, or a module around it, runs without gradients inside a training pass, or is not in training mode.
        """
        every = ((known, known.module()) for known in list(self._known.values()))
        chosen = [
            module for known, module in every if module is not None and (known.without_gradients or not module.training)
        ]
        return {id(parameter) for module in chosen for parameter in module.parameters()}

    def models(self) -> list[Any]:
        """Return the outermost called modules that are still alive."""
        return [model for model in (root() for root in self._roots) if model is not None]

    def _learn(self, root: Any) -> None:
        """Add a module and all modules below it at its first call. Further models get their class as a name prefix."""
        members = dict(root.named_modules())
        inside = {id(member) for member in members.values()}
        others = [other for other in (ref() for ref in self._roots) if other is not None and id(other) not in inside]
        prefix = f"{type(root).__name__}." if others else ""
        self._roots = [*(weakref.ref(other) for other in others), weakref.ref(root)]
        for path, member in members.items():
            bare = strip(path)
            name = prefix + bare if bare else type(member).__name__
            self.ready.pop(id(member), None)
            self._known[id(member)] = Known(self._status_file, self._reference(member), name)

    def _reference(self, module: Any) -> Callable[[], Any]:
        key = id(module)

        def forget(reference: Any) -> None:
            known = self._known.get(key)
            if known is not None and known.module is reference:
                del self._known[key]
                self.ready.pop(key, None)

        return weakref.ref(module, forget)


def is_detail(name: str) -> bool:
    """Whether the module is below a named part of a numbered block, as "blocks.3.attn.query"; not the part itself."""
    *above, parent, _leaf = ["", *name.split(".")]
    return not parent.isdigit() and any(part.isdigit() for part in above)


def is_deep(name: str) -> bool:
    """Whether the module is more than DEPTH parts below a numbered block, as "blocks.3.attn.cmp.inner"."""
    parts = name.split(".")
    below = next((count for count, part in enumerate(reversed(parts)) if part.isdigit()), 0)
    return below > DEPTH


def _is_pointwise(module: Any) -> bool:
    return type(module).__module__ in POINTWISE


def _is_small(module: Any) -> bool:
    """Whether the module is one of torch's own leaves: a Linear, a norm, an activation."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def strip(path: str) -> str:
    """Return a module path without the parts that DDP, FSDP, checkpoint and compile add."""
    parts = [part for part in path.split(".") if part not in WRAPPER_PARTS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
