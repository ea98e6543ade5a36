"""What the modules of a stranger's model are called, learnt without being told which module is the model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .status_file import StatusFileWriter

# Wrappers add these; the user's own names have none of them.
WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

DEPTH = 2  # named parts below a numbered block whose backward is marked
# What never waits and never takes long: the mark of what comes next in the backward pass says as much.
POINTWISE = frozenset({"torch.nn.modules.normalization", "torch.nn.modules.dropout"})


class Known:
    """One module: its marks, made when it is first called, because most modules of a large model share few calls."""

    __slots__ = (
        "_board",
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

    def __init__(self, board: StatusFileWriter, module: Callable[[], Any], name: str) -> None:
        self._board = board
        self.module = module
        self.name = name
        self.forward = 0
        self.silent = self.silent_backward = self.learns = False
        self.since = 0  # the step in which it was called first
        self.without_gradients = False  # what it returned inside a training pass had none to give

    def prepare(self) -> None:
        module = self.module()
        self.since = self._board.step
        self.silent = _is_small(module) and (_is_pointwise(module) or is_detail(self.name))
        self.silent_backward = self.silent or is_deep(self.name)
        self.learns = next(module.parameters(), None) is not None  # a loss without parameters has no mode of its own
        self.forward = self._board.what("forward", self.name)
        self.on_backward = functools.partial(self._board.mark, self._board.what("backward", self.name))


class ModuleNames:
    """Qualified names by identity. A weak reference beside each tells a module from a later one at the same address."""

    def __init__(self, board: StatusFileWriter) -> None:
        self._board = board
        self._known: dict[int, Known] = {}
        self.ready: dict[int, Known] = {}  # by identity, of modules called before; a dead one leaves at once
        self._roots: list[Callable[[], Any]] = []
        self.at_next_forward: Callable[[], None] | None = None  # called once, as any module's forward begins

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
        """Every living module of the trees: its name, the module, whether it was called."""
        for known in list(self._known.values()):
            module = known.module()
            if module is not None:
                yield known.name, module, bool(known.forward)

    def fresh(self) -> list[Any]:
        """The modules that were called for the first time in the step that is in progress."""
        step = self._board.step
        called = (known.module() for known in list(self.ready.values()) if known.since == step)
        return [module for module in called if module is not None]

    def kept_out(self) -> set[int]:
        """By identity, the parameters of what a program chose not to train: it runs without gradients inside a training
        pass, or is not in training mode, as all that lies below it."""
        every = ((known, known.module()) for known in list(self._known.values()))
        chosen = [one for known, one in every if one is not None and (known.without_gradients or not one.training)]
        return {id(parameter) for one in chosen for parameter in one.parameters()}

    def models(self) -> list[Any]:
        """The roots that still live."""
        return [model for model in (root() for root in self._roots) if model is not None]

    def _learn(self, root: Any) -> None:
        """A module called for the first time is the root of a tree. The first tree has bare names, others a prefix."""
        members = dict(root.named_modules())
        inside = {id(member) for member in members.values()}
        others = [other for other in (ref() for ref in self._roots) if other is not None and id(other) not in inside]
        prefix = f"{type(root).__name__}." if others else ""
        self._roots = [*(weakref.ref(other) for other in others), weakref.ref(root)]
        for path, member in members.items():
            bare = strip(path)
            name = prefix + bare if bare else type(member).__name__
            self.ready.pop(id(member), None)
            self._known[id(member)] = Known(self._board, self._reference(member), name)

    def _reference(self, module: Any) -> Callable[[], Any]:
        key = id(module)

        def forget(reference: Any) -> None:
            known = self._known.get(key)
            if known is not None and known.module is reference:
                del self._known[key]
                self.ready.pop(key, None)

        return weakref.ref(module, forget)


def is_detail(name: str) -> bool:
    """Below a named part of a numbered block: "blocks.3.attn.query". The part itself, "blocks.3.attn", is none."""
    *above, parent, _leaf = ["", *name.split(".")]
    return not parent.isdigit() and any(part.isdigit() for part in above)


def is_deep(name: str) -> bool:
    """Further below a numbered block than a part of a part: "blocks.3.attn.cmp.inner"."""
    parts = name.split(".")
    below = next((count for count, part in enumerate(reversed(parts)) if part.isdigit()), 0)
    return below > DEPTH


def _is_pointwise(module: Any) -> bool:
    return type(module).__module__ in POINTWISE


def _is_small(module: Any) -> bool:
    """One of torch's own leaves: a Linear, a norm, an activation."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def strip(path: str) -> str:
    """A module path without what DDP, FSDP, checkpoint and compile wrapped around it."""
    parts = [part for part in path.split(".") if part not in WRAPPER_PARTS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
