"""Machine-independent cost of a training step: autograd nodes, and bytes saved for backward.

Both numbers are the same in every run of a configuration, so a single step per sequence length shows how they grow.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .config import NSAConfig

# Elements that a layer saves per token, in multiples of the model width: about 25, plus a margin.
_SAVED_WIDTHS_PER_TOKEN = 32
_LOGIT_COPIES = 4  # the logits, their float32 copy, the log-softmax and a gradient
_PARAMETER_COPIES = 4  # the parameters, their gradients and two moments of the optimizer


def graph_nodes(loss: Tensor) -> int:
    """Return the number of autograd nodes that `loss.backward()` would visit."""
    # The set must keep each node alive: a new node could otherwise reuse the address of a collected one.
    visited, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
    return len(visited)


class SavedTensorCounter:
    """A context manager that counts the bytes autograd saves for the backward pass.

    Each storage counts once; parameters and buffers do not count. Inside a checkpointed layer PyTorch saves nothing.
    While saved-tensor hooks are active, PyTorch does not detect in-place changes of saved tensors, so use this for
    single steps only.
    """

    def __init__(self, model: nn.Module, seq_len: int) -> None:
        self._model_storages = {
            tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
        }
        widths = {size for parameter in model.parameters() for size in parameter.shape}
        self._seq_len = None if seq_len in widths else seq_len  # None: some parameter has a dimension of this size
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
        """Return the total size of the saved tensors in bytes."""
        return sum(self._bytes_by_storage.values())

    @property
    def square_bytes(self) -> int | None:
        """Return the bytes in saved tensors that grow quadratically with the sequence length, or None if unknown.

        The result is None if a dimension of a parameter equals the sequence length.
        """
        return (
            None if self._seq_len is None else sum(self._bytes_by_storage[address] for address in self._square_storages)
        )


def expected_bytes(config: NSAConfig, parameter_bytes: int, batch: int) -> int:
    """Estimate the memory that a training step needs, in bytes.

    The estimate covers parameters, gradients, optimizer state and activations, in float32 and without gradient
    checkpointing. The activations grow linearly with the sequence length.
    """
    per_token = 4 * (_SAVED_WIDTHS_PER_TOKEN * config.dim * config.layers + _LOGIT_COPIES * config.vocab)
    return _PARAMETER_COPIES * parameter_bytes + batch * config.seq_len * per_token
