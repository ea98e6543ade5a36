"""What a step costs, counted where it arises: the nodes of its graph, and the bytes that these keep.

Both are the same in every run of a shape, whatever else the machine does: what grows, and how, shows in one step.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .config import NSAConfig

# What a layer of this model keeps of one token, in multiples of its width: about 25 here, and room for another's.
_SAVED_WIDTHS_PER_TOKEN = 32
_LOGIT_COPIES = 4  # the logits, their float32 form, the log-softmax, a gradient
_PARAMETER_COPIES = 4  # themselves, their gradients, two moments of the optimizer


def graph_nodes(loss: Tensor) -> int:
    """Nodes that a backward pass from here would visit. Takes about a microsecond each, and changes nothing."""
    # The set keeps each node alive: of one that is gone the next could have the address.
    visited, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
    return len(visited)


class SavedTensorCounter:
    """While this is entered, counts what the forward pass keeps for the backward pass: each storage once.

    Parameters and buffers do not count, as they are there anyway. torch does not notice what is changed in place while
    hooks look on, so this is for one step, and for those who ask. Inside a checkpointed layer torch keeps nothing.
    """

    def __init__(self, model: nn.Module, seq_len: int) -> None:
        self._model_storages = {
            tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
        }
        widths = {size for parameter in model.parameters() for size in parameter.shape}
        self._seq_len = None if seq_len in widths else seq_len  # None: a width and the length cannot be told apart
        self._bytes_by_storage: dict[int, int] = {}
        self._square_storages: set[int] = set()
        self._hooks = saved_tensors_hooks(self._count, lambda tensor: tensor)

    def __enter__(self) -> SavedTensorCounter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, where)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._model_storages:
            self._bytes_by_storage[address] = storage.nbytes()
            if self._seq_len is not None and tuple(tensor.shape).count(self._seq_len) > 1:
                self._square_storages.add(address)
        return tensor

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes_by_storage.values())

    @property
    def square_bytes(self) -> int | None:
        """Of tensors with a row and a column for each token; None where the shape does not tell."""
        return (
            None if self._seq_len is None else sum(self._bytes_by_storage[address] for address in self._square_storages)
        )


def expected_bytes(config: NSAConfig, parameter_bytes: int, batch: int) -> int:
    """Memory of a healthy step of this shape: parameters, gradients, optimizer, and activations that grow with T.

    In float32 and without checkpointing: what any healthy run of the shape stays below, or close to.
    """
    per_token = 4 * (_SAVED_WIDTHS_PER_TOKEN * config.dim * config.layers + _LOGIT_COPIES * config.vocab)
    return _PARAMETER_COPIES * parameter_bytes + batch * config.seq_len * per_token
