"""The choice of an implementation for each part of the attention operation, with the reason for it.

Dimensions: B batch, H query heads, G groups, T tokens, S keys, R new tokens, D key width, E value width, c branches.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Implementation, LayerConfig, implementation_mistake
from .backends import (
    Backend,
    SelectedAttention,
    SlidingAttention,
    SlidingBackend,
    TiledBackend,
    flash_attn_sliding,
    torch_flash_sliding,
)
from .blockwise import minimum_tokens, reason_blockwise_is_slower
from .cached_attention import CachedAttentionConfig, CachedRows, outputs_of_branches
from .dense import DenseBackend
from .fused import MAX_HEADS_PER_GROUP, MAX_WIDTH
from .kernels import KERNELS, BlockwiseKernel, EagerKernel, FusedCpuKernel, fused_cpu_reason
from .mixing import gated_sum
from .per_token import PerTokenLoop

_MIN_CAPABILITY = (8, 0)
_HALF = (torch.float16, torch.bfloat16)
# The result of triton_import_reason, once it is known, and the modules of ops/fused by name. Neither is a functools
# cache, because torch.compile ignores those while tracing, and it cannot trace an import.
_import_reasons: list[str | None] = []
_fused_modules: dict[str, Any] = {}


@dataclass(frozen=True)
class UsedImplementation:
    """The implementation that was chosen, with the reason for the choice."""

    name: str
    reason: str
    until_tokens: int | None = None  # sequences of at least this length use a different implementation


class MissingImplementationError(Exception):
    """Raised if the requested implementation cannot be used. The message gives the reason."""


_EAGER, _FUSED_CPU, _BLOCKWISE = (
    TiledBackend(KERNELS[kernel.name]) for kernel in (EagerKernel, FusedCpuKernel, BlockwiseKernel)
)
_DENSE = DenseBackend(KERNELS[EagerKernel.name])
PLAIN_SUM = UsedImplementation("eager", "the only one for the sum of separate branches")


def count_run(runs: Counter[UsedImplementation], used: UsedImplementation) -> None:
    """Count one use of an attention implementation in `runs`, except in compiled code, which is traced only once."""
    if not torch.compiler.is_compiling():
        runs[used] += 1


def implementation_for(
    requested: Implementation, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor
) -> tuple[Backend, UsedImplementation]:
    """Return the backend for a branch with these tensors, and the reason for choosing it.

    Raises MissingImplementationError if an implementation requested by name does not support the tensors.
    """
    if requested is Implementation.EAGER:
        return _EAGER, UsedImplementation("eager", "asked for")
    if requested is Implementation.DENSE:
        return _DENSE, UsedImplementation("dense", "asked for")
    if requested is Implementation.TRITON:
        _raise_if_unavailable("triton", triton_reason(q_BHTD, k_BGSD, v_BGSE))
        return _triton(), UsedImplementation("triton", "asked for")
    # These implementations compute only the sliding branch. The other branches still fail if they are not available.
    if requested is Implementation.FLASH:
        _raise_if_unavailable("flash", flash_reason(q_BHTD, v_BGSE))
    if requested is Implementation.TORCH:
        _raise_if_unavailable("torch", torch_flash_reason(q_BHTD, v_BGSE))
    return _fastest(q_BHTD, k_BGSD, v_BGSE)


def implementation_for_select(
    requested: Implementation, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor
) -> tuple[Backend, UsedImplementation]:
    """Return the backend for block selection, and the reason for choosing it."""
    backend, used = implementation_for(requested, q_BHTD, k_BGSD, v_BGSE)
    return (
        (_EAGER, UsedImplementation("eager", "auto: the only one on a CPU"))
        if backend is _FUSED_CPU
        else (backend, used)
    )


def implementation_for_selected(
    requested: Implementation,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    select_count: int,
    select_len: int,
    longest: int | None = None,
) -> tuple[SelectedAttention, UsedImplementation]:
    """Return the implementation of attention to the selected blocks, and the reason for choosing it.

    On a CPU, long sequences use the blockwise kernel. `longest` is the length in tokens of the longest packed sequence;
    None means one sequence per row. The loop over tokens runs on every device, but only if it is requested. Raises the
    same errors as `implementation_for`.
    """
    if requested is Implementation.PER_TOKEN:
        return PerTokenLoop(), UsedImplementation(PerTokenLoop.name, "asked for")
    backend, used = implementation_for(requested, q_BHTD, k_BGTD, v_BGTE)
    if backend is not _FUSED_CPU:
        return backend, used
    tokens = q_BHTD.shape[2] if longest is None else longest
    until_tokens = minimum_tokens(select_count, select_len)
    if torch.compiler.is_compiling():  # a reason that contains the length would compile each length anew
        is_long = tokens >= until_tokens
        return (_BLOCKWISE, UsedImplementation("blockwise", used.reason)) if is_long else (backend, used)
    if reason := reason_blockwise_is_slower(tokens, select_count, select_len):
        return backend, UsedImplementation(used.name, f"{used.reason}: {reason}", until_tokens)
    return _BLOCKWISE, UsedImplementation("blockwise", f"{used.reason}: {tokens} tokens")


def implementation_for_sliding(
    requested: Implementation, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor
) -> tuple[SlidingAttention, UsedImplementation]:
    """Return the implementation of sliding-window attention, and the reason for choosing it."""
    backend, used = implementation_for(requested, q_BHTD, k_BGSD, v_BGSE)
    if requested is Implementation.FLASH:
        return SlidingBackend(flash_attn_sliding(_flash_attn())), UsedImplementation("flash_attn", "asked for")
    if requested is Implementation.TORCH:
        return SlidingBackend(torch_flash_sliding(_varlen_attn())), UsedImplementation("torch_flash", "asked for")
    return backend, used


class CombinedOperator(NamedTuple):
    """An operator for all three branches and their gated sum."""

    attend: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]  # ops/fused/gated_attention.py
    sum: Callable[[Sequence[Tensor], Tensor], Tensor]  # the gated sum of the branch outputs, without gradients
    used: UsedImplementation


def combined_operator(
    requested: Implementation, q_BHTD: Tensor, *pairs: tuple[Tensor, Tensor]
) -> CombinedOperator | None:
    """Return the fused operator for all three branches, or None if there is none.

    `pairs` are the keys and values of the branches. The operator exists only in Triton. Raises
    MissingImplementationError if `requested` does not support the tensors.
    """
    if requested not in (Implementation.AUTO, Implementation.TRITON):
        return None  # another implementation in some branch
    for pair in pairs:
        _, used = implementation_for(requested, q_BHTD, *pair)
        if used.name != "triton":
            return None
    return CombinedOperator(_fused_module("gated_attention").gated_attention, _fused_module("mix").weighted_sum, used)


def require_implementation(requested: Implementation, config: LayerConfig) -> None:
    """Raise MissingImplementationError if no branch of a layer would use the requested implementation."""
    if mistake := implementation_mistake(config, requested):
        raise MissingImplementationError(mistake)


def _raise_if_unavailable(implementation: str, reason: str | None) -> None:
    if reason is not None:
        raise MissingImplementationError(f"--impl {implementation}: {reason}; use --impl auto")


CachedAttention = Callable[[Tensor, Tensor, CachedRows, CachedAttentionConfig], Tensor]


def implementation_for_cached(
    requested: Implementation, example_tensors: tuple[Tensor, Tensor, Tensor], *, is_paged: bool
) -> tuple[CachedAttention, UsedImplementation]:
    """Return the function for attention to cached keys and values, and the reason for choosing it.

    `example_tensors` are queries, keys and values of the same dtype, device and widths. The function returns the gated
    sum of the branches, [1, R, H, E]. Raises MissingImplementationError if the requested implementation cannot read the
    cache or does not support the tensors.
    """
    plain = (Implementation.AUTO, Implementation.EAGER)
    if not is_paged and requested not in plain:
        raise MissingImplementationError(
            f"--impl {requested}: only plain torch reads a cache without pages; "
            "use --impl auto or eager, or --cache paged"
        )
    if requested not in (*plain, Implementation.TRITON):
        _raise_if_unavailable(requested, "pages are read by plain torch or by the fused kernels")
    _, used = implementation_for_select(requested, *example_tensors)
    if not is_paged or used.name != "triton":
        return _attend_in_torch, used if is_paged else UsedImplementation("eager", used.reason)
    attend: CachedAttention = _fused_module("cached").attend_pages
    return attend, used


def _attend_in_torch(q_1HRD: Tensor, gates_c1HR: Tensor, rows: CachedRows, config: CachedAttentionConfig) -> Tensor:
    return gated_sum(outputs_of_branches(q_1HRD, rows, config), gates_c1HR)


def example_tensors(config: LayerConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized queries, keys and values of one token, in the shapes of a model."""
    return (
        torch.empty(1, config.heads, 1, config.d_k, device=device, dtype=dtype),
        torch.empty(1, config.groups, 1, config.d_k, device=device, dtype=dtype),
        torch.empty(1, config.groups, 1, config.d_v, device=device, dtype=dtype),
    )


def _fastest(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> tuple[Backend, UsedImplementation]:
    if q_BHTD.device.type == "cpu":
        # Triton's interpreter would be thousands of times slower, so `auto` never chooses it.
        reason = fused_cpu_reason(q_BHTD, v_BGSE)
        if reason is None:
            return _FUSED_CPU, UsedImplementation("fused_cpu", "auto: fastest on a CPU")
        return _EAGER, UsedImplementation("eager", f"auto: {reason}")
    reason = triton_reason(q_BHTD, k_BGSD, v_BGSE)
    if reason is None:
        return _triton(), UsedImplementation("triton", "auto: fused kernels for this GPU")
    return _EAGER, UsedImplementation("eager", f"auto: {reason}")


def triton_reason(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor) -> str | None:
    """Return the reason why the Triton kernels do not support these tensors, or None if they do."""
    widest, heads = max(q_BHTD.shape[-1], v_BGSE.shape[-1]), q_BHTD.shape[1] // max(1, k_BGSD.shape[1])
    if reason := triton_import_reason():
        return reason
    if reason := _device_reason(q_BHTD.device, q_BHTD.dtype):
        return reason
    if widest > MAX_WIDTH:
        return f"keys or values of width {widest}, and the kernels take up to {MAX_WIDTH}"
    if len(dtypes := {str(tensor.dtype) for tensor in (q_BHTD, k_BGSD, v_BGSE)}) > 1:
        return f"queries, keys and values are {', '.join(sorted(dtypes))}"
    if heads > MAX_HEADS_PER_GROUP:
        return f"{heads} query heads share a key head, and the kernels take up to {MAX_HEADS_PER_GROUP}"
    return None


def rotates_in_triton(requested: Implementation, x_BHTD: Tensor) -> bool:
    """Return whether a Triton kernel applies rotary embeddings to `x_BHTD`."""
    if requested in (Implementation.EAGER, Implementation.DENSE):
        return False
    # Only an explicit request uses Triton's interpreter on a CPU, as in `_fastest`.
    can_use_device = x_BHTD.device.type != "cpu" or requested is Implementation.TRITON
    return can_use_device and triton_reason(x_BHTD, x_BHTD, x_BHTD) is None


def triton_import_reason() -> str | None:
    """Return the reason why Triton cannot be imported, or None if it can."""
    # Finding the package is not enough, so it is imported.
    if not _import_reasons:
        _import_reasons.append(_try_to_import_triton())
    return _import_reasons[0]


def _fused_module(name: str) -> Any:
    if name not in _fused_modules:
        _fused_modules[name] = importlib.import_module(f".fused.{name}", __package__)
    return _fused_modules[name]


def _try_to_import_triton() -> str | None:
    try:
        _fused_modules["backend"] = importlib.import_module(".fused.backend", __package__)
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot be imported ({error}); pip install triton"
    return None


def _device_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return f"the GPU has compute capability {'.'.join(map(str, capability))} and the kernels need 8.0"
        return None
    if device.type != "cpu":
        return f"the kernels run on CUDA and the device is {device.type}"
    if not _fused_module("launch").is_interpreting():
        return "the kernels run on CUDA and the device is cpu; TRITON_INTERPRET=1 interprets them, very slowly"
    if dtype is torch.bfloat16:
        return "Triton's interpreter cannot compute in bfloat16"
    return None


def _triton() -> Backend:
    backend: Backend = _fused_module("backend").FusedBackend()
    return backend


def flash_reason(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why flash-attn does not support these tensors, or None if it does."""
    if q.device.type != "cuda":
        return f"flash-attn runs on CUDA only and the device is {q.device.type}"
    try:
        _flash_attn()  # a build without CUDA support is found but cannot be imported
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"flash-attn cannot be imported ({error}); install it"
    return _flash_tensors_reason("flash-attn", q, v)


def torch_flash_reason(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why PyTorch's flash attention does not support these tensors, or None if it does."""
    if q.device.type != "cuda":
        return f"torch's varlen_attn runs on CUDA only and the device is {q.device.type}"
    try:
        _varlen_attn()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no varlen_attn ({error})"
    return _flash_tensors_reason("torch's varlen_attn", q, v)


def _flash_tensors_reason(name: str, q: Tensor, v: Tensor) -> str | None:
    if q.dtype not in _HALF:
        return f"{name} computes in float16 and bfloat16 and the tensors are {q.dtype}; use --dtype bfloat16"
    if q.shape[-1] != v.shape[-1]:
        return f"{name} needs keys and values of one width, got {q.shape[-1]} and {v.shape[-1]}"
    return None


def _flash_attn() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func
    return function


def _varlen_attn() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return function
