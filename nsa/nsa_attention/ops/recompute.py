"""Linear layers that save less for the backward pass than those of torch, with the same results.

For the gradient of its weight, a linear layer saves its input. If the input can be computed from tensors that are saved
anyway, saving these tensors instead takes no memory. An `Origin` defines this computation, which runs again in the
backward pass.

Dimensions: B batch, T tokens, M model width, G groups, D key width, E value width.

Compiled code uses the layers of torch: there the compiler decides what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..config import Implementation
from .kernels import autocast_disabled
from .rotary import rotate

# torch.compile of torch 2.11 cannot trace `is_autocast_available`.
_AUTOCAST_DEVICES = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


class Origin(NamedTuple):
    """The computation of a tensor: `function(*sources)` equals `tensor` up to rounding."""

    tensor: Tensor
    version: int  # of the tensor; in-place changes increase it
    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the computed tensor, and not what a hook has returned instead or changed."""
        return tensor is self.tensor and tensor._version == self.version

    def then(self, tensor: Tensor, function: Callable[..., Tensor], *more_sources: Tensor) -> Origin:
        """Return the origin of a `tensor` that is the result of `function(self.tensor, *more_sources)`."""
        chain = partial(_chain, self.function, len(self.sources), function)
        return Origin(tensor, tensor._version, chain, (*self.sources, *more_sources))


def origin_of(tensor: Tensor, function: Callable[..., Tensor], *sources: Tensor) -> Origin | None:
    """Return the origin of a tensor, or None if no origin is needed.

    `function` may not refer to tensors, because saved-tensor hooks would not see them.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return Origin(tensor, tensor._version, function, sources)


def _chain(first: Callable[..., Tensor], count: int, second: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    return second(first(*sources[:count]), *sources[count:])


class RecomputingLinear(nn.Linear):
    """A linear layer that does not save its input for the backward pass if the caller provides its origin."""

    def forward(self, x: Tensor, origin: Origin | None = None) -> Tensor:
        return linear(x, [self.weight], self.bias, origin)


def call_linear(module: nn.Module, x: Tensor, origin: Origin | None) -> Tensor:
    """Call a linear layer that the user may have replaced by any other module."""
    result: Tensor = module(x, origin) if isinstance(module, RecomputingLinear) else module(x)
    return result


def linear(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None, origin: Origin | None = None) -> Tensor:
    """Return `functional.linear` of `x` and the concatenated weights.

    The concatenation is not saved for the backward pass, and the input `x` is not saved if `origin` is its origin.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return functional.linear(x, weights[0] if len(weights) == 1 else torch.cat(list(weights)), bias)
    x_or_half = in_autocast_dtype(x)
    if origin is not None and origin.is_of(x):
        function, sources = origin.function, origin.sources
    else:
        function, sources = _identity, (x_or_half,)
    result: Tensor = _Linear.apply(x_or_half, bias, function, [source.detach() for source in sources], *weights)
    return result


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return `x` in the dtype that autocast would convert it to for a matrix product, or `x` itself."""
    if x.dtype is torch.float64 or not _is_autocast_enabled(x):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _is_autocast_enabled(x: Tensor) -> bool:
    return x.device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(x.device.type)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        function: Callable[..., Tensor],
        sources: list[Tensor],
        *weights: Tensor,
    ) -> Tensor:
        ctx.function, ctx.weights, ctx.is_cast = function, len(weights), _is_autocast_enabled(x)
        ctx.save_for_backward(*weights, *sources)
        if bias is not None and ctx.is_cast:
            bias = bias.to(x.dtype)
        with _without_autocast(x):
            return functional.linear(x, _joined(weights, x, is_cast=ctx.is_cast), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, _, _, *needs_weights = ctx.needs_input_grad
        saved = ctx.saved_tensors  # read once: under checkpointing, each access unpacks the tensors
        weights, sources = saved[: ctx.weights], saved[ctx.weights :]
        rows, dx, dbias = grad.flatten(0, -2), None, None
        dweights: Sequence[Tensor | None] = [None] * len(weights)
        with _without_autocast(grad):
            if needs_x:
                dx = (rows @ _joined(weights, grad, is_cast=ctx.is_cast)).unflatten(0, grad.shape[:-1])
            if any(needs_weights):
                inputs = ctx.function(*sources).to(grad.dtype).flatten(0, -2)
                dweights = (rows.t() @ inputs).split([weight.shape[0] for weight in weights])
            if needs_bias:
                dbias = rows.sum(0)
        return dx, dbias, None, None, *dweights


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return autocast_disabled(x) if _is_autocast_enabled(x) else nullcontext()


def _joined(weights: Sequence[Tensor], like: Tensor, *, is_cast: bool) -> Tensor:
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return weight.to(like.dtype) if is_cast else weight


def project_heads(x_BTM: Tensor, weight: Tensor, *, groups: int) -> Tensor:
    """Return the projection of the tokens, one head per group, [B, G, T, D]."""
    return functional.linear(x_BTM, weight.to(x_BTM.dtype)).unflatten(-1, (groups, -1)).transpose(1, 2)


def project_and_rotate(
    x_BTM: Tensor, k_weight: Tensor, v_weight: Tensor, cos_sin: Tensor, *, groups: int
) -> list[Tensor]:
    """Return the keys [B, G, T, D], with rotary embeddings, and the values [B, G, T, E] of the tokens.

    This is for the operator of the Triton kernels.
    """
    with _without_autocast(x_BTM):
        keys, values = (project_heads(x_BTM, weight, groups=groups) for weight in (k_weight, v_weight))
        return [rotate(keys, cos_sin, Implementation.TRITON), values]


def _identity(x: Tensor) -> Tensor:
    return x
