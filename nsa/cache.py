"""What decoding keeps of the tokens it has read: per layer and branch, no more than later tokens can look at.

Dimensions: B batch, G groups, C new tokens, S compressed blocks, D width of a vector, p pairs of a rotary position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.config import Attention, NSAConfig
from nsa.rope import rotate, turns
from nsa.world import CannotRunError

FIRST_CAPACITY = 64


class Rows:
    """Vectors [B, G, count, D] that only become more. Full storage doubles, so each is copied O(1) times."""

    def __init__(self) -> None:
        self.count = 0
        self._storage: Tensor | None = None  # None: nothing was added yet, so dtype and device are not known

    @property
    def capacity(self) -> int:
        return 0 if self._storage is None else self._storage.shape[2]

    def add(self, fresh_BGCD: Tensor) -> None:
        end = self.count + fresh_BGCD.shape[2]
        if self._storage is None or end > self.capacity:
            self._storage = self._grown(fresh_BGCD, end)
        self._storage[:, :, self.count : end] = fresh_BGCD
        self.count = end

    def all(self) -> Tensor:
        """A view of what was added; copies nothing."""
        assert self._storage is not None, "something is added before anything is read"
        return self._storage[:, :, : self.count]

    def _grown(self, like: Tensor, end: int) -> Tensor:
        batch, groups, _, width = like.shape
        storage = like.new_empty(batch, groups, _capacity(end), width)
        if self._storage is not None:
            storage[:, :, : self.count] = self.all()
        return storage


class Tail:
    """The newest vectors, as many as later tokens need: constant memory."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None  # [B, G, r, D]; None: nothing was added yet

    def joined(self, fresh_BGCD: Tensor) -> Tensor:
        """What is kept, and the new ones behind it."""
        return fresh_BGCD if self.kept is None else torch.cat((self.kept, fresh_BGCD), 2)

    def keep(self, joined_BGCD: Tensor, start: int) -> None:
        """Keep these from `start` on. A copy: a view would hold the memory of a whole prompt."""
        self.kept = joined_BGCD[:, :, start:].clone()


class BlockRows:
    """A vector for each complete block of l tokens, and the tokens from where the next block begins: at most l - 1."""

    def __init__(self, config: NSAConfig) -> None:
        self.length, self.stride = config.block_len, config.block_stride
        self.done, self.pending = Rows(), Tail()

    def add(self, fresh_BGCD: Tensor, compress: Callable[[Tensor], Tensor], turns_2Tp: Tensor | None = None) -> None:
        """Take C tokens and `compress` the blocks they complete; with `turns`, rotate those to their last tokens."""
        joined = self.pending.joined(fresh_BGCD)
        blocks_BGSD = compress(joined)
        if turns_2Tp is not None:
            first_end = self.done.count * self.stride + self.length - 1
            blocks_BGSD = rotate(blocks_BGSD, turns_2Tp[:, first_end :: self.stride][:, : blocks_BGSD.shape[2]])
        self.done.add(blocks_BGSD)
        self.pending.keep(joined, blocks_BGSD.shape[2] * self.stride)


class NSAMemory:
    """Of one layer. A branch that the layer does not have leaves its part empty."""

    def __init__(self, config: NSAConfig) -> None:
        self.cmp_k, self.cmp_v = BlockRows(config), BlockRows(config)
        self.sel_k, self.sel_v = Rows(), Rows()
        self.means = BlockRows(config)  # of the selected branch's own keys: they rank its blocks where cmp is absent
        self.win_k, self.win_v = Tail(), Tail()


class VanillaMemory:
    """Of one layer of the dense control: every key and value."""

    def __init__(self) -> None:
        self.k, self.v = Rows(), Rows()


class Cache:
    """Of a model: one memory per layer, and the rotary positions up to here. Belongs to the sequences of one batch."""

    def __init__(self, config: NSAConfig) -> None:
        """Raises CannotRunError for attention stock."""
        self.memories = [_memory(config) for _ in range(config.layers)]
        self.tokens = 0
        self.batch: int | None = None  # None: no token was read yet
        self._turns: Tensor | None = None

    def turns(self, frequencies: Tensor, end: int) -> Tensor:
        """Cosine and sine, [2, at least `end`, p], as the parallel forward has them."""
        if self._turns is None or end > self._turns.shape[1]:
            self._turns = turns(frequencies, _capacity(end))
        return self._turns


def _memory(config: NSAConfig) -> NSAMemory | VanillaMemory:
    if config.attention is Attention.STOCK:
        raise CannotRunError(
            f"shape {config.name}: attention stock is torch's own layer, which gives no keys to decode from; "
            "use attention nsa or vanilla"
        )
    return VanillaMemory() if config.attention is Attention.VANILLA else NSAMemory(config)


def _capacity(end: int) -> int:
    return max(FIRST_CAPACITY, 1 << (end - 1).bit_length())
