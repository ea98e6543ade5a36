"""What a step costs, counted where it arises: the nodes of its graph, and the bytes that these keep.

Both are the same in every run of a shape, whatever else the machine does: what grows, and how, shows in one step.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .config import NSAConfig

# What a layer of this model keeps of one token, in multiples of its width: about 25 here, and room for another's.
_WIDTHS_KEPT = 32
_OF_LOGITS = 4  # the logits, their float32 form, the log-softmax, a gradient
_OF_PARAMETERS = 4  # themselves, their gradients, two moments of the optimizer


def graph_nodes(loss: Tensor) -> int:
    """Nodes that a backward pass from here would visit. Takes about a microsecond each, and changes nothing."""
    # The set keeps each node alive: of one that is gone the next could have the address.
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return len(seen)


class KeptTensors:
    """While this is entered, counts what the forward pass keeps for the backward pass: each storage once.

    Parameters and buffers do not count, as they are there anyway. torch does not notice what is changed in place while
    hooks look on, so this is for one step, and for those who ask. Inside a checkpointed layer torch keeps nothing.
    """

    def __init__(self, model: nn.Module, seq_len: int) -> None:
        self._own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
        widths = {size for parameter in model.parameters() for size in parameter.shape}
        self._side = None if seq_len in widths else seq_len  # None: a width and the length cannot be told apart
        self._bytes: dict[int, int] = {}
        self._square: set[int] = set()
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> KeptTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, where)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._own:
            self._bytes[address] = storage.nbytes()
            if self._side is not None and tuple(tensor.shape).count(self._side) > 1:
                self._square.add(address)
        return tensor

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def square_bytes(self) -> int | None:
        """Of tensors with a row and a column for each token; None where the shape does not tell."""
        return None if self._side is None else sum(self._bytes[address] for address in self._square)


def expected_bytes(config: NSAConfig, parameter_bytes: int, batch: int) -> int:
    """Memory of a healthy step of this shape: parameters, gradients, optimizer, and activations that grow with T.

    In float32 and without checkpointing: what any healthy run of the shape stays below, or close to.
    """
    per_token = 4 * (_WIDTHS_KEPT * config.dim * config.layers + _OF_LOGITS * config.vocab)
    return _OF_PARAMETERS * parameter_bytes + batch * config.seq_len * per_token
