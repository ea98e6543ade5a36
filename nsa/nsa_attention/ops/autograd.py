"""The backward pass of attention operators for autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def register_attention_gradients(operator: Any, backward: Callable[..., tuple[Tensor, ...]], tensors: int) -> None:
    """Register the backward pass of an attention operator.

    The first `tensors` arguments of `operator` are tensors or None, beginning with queries, keys and values; the others
    are numbers and strings. It returns the output and the log-sum-exp, which has no gradient. `backward` gets the
    gradient of the output, these tensors, the two results and the other arguments, and returns the gradients of
    queries, keys and values.
    """

    def save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.numbers = inputs[tensors:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        others = (None,) * (tensors - 3 + len(ctx.numbers))
        if grad is None:
            return None, None, None, *others
        return *backward(grad, *ctx.saved_tensors, *ctx.numbers), *others

    operator.register_autograd(differentiate, setup_context=save_context)
