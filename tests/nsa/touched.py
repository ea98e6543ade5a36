"""How much a computation touches: a count that no clock disturbs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERS = ("index", "index_select", "gather", "embedding")
SCATTERS = ("index_put_",)


class Touched(TorchDispatchMode):
    """Counts the elements that operations read and write; of a gather or scatter those that it takes or sets."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.names = 0, set()

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        output = function(*arguments, **(options or {}))
        name = function._schema.name.removeprefix("aten::")
        self.names.add(name)
        if not function.is_view and name not in ("_unsafe_view", "detach", "alias"):
            source = arguments[0] if name in (*GATHERS, *SCATTERS) else None
            tensors = [one for one in tree_leaves((arguments, output)) if isinstance(one, Tensor) and one is not source]
            self.elements += sum(one.numel() for one in tensors)
        return output
