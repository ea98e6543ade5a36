"""The only place that picks an implementation; the choice carries its name and the reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from nsa.config import Implementation
from nsa.ops.kernels import KERNELS, EagerKernel, FusedCpuKernel, fused_cpu_reason
from nsa.ops.tiles import Kernel


@dataclass(frozen=True)
class Choice:
    """What runs, and why that."""

    name: str
    reason: str


_EAGER, _FUSED_CPU = KERNELS[EagerKernel.name], KERNELS[FusedCpuKernel.name]


def choose_kernel(wanted: Implementation, q: Tensor, v: Tensor) -> tuple[Kernel, Choice]:
    """The tile kernel for these tensors: what was asked for, or the fastest that can take them."""
    if wanted is Implementation.EAGER:
        return _EAGER, Choice("eager", "asked for")
    reason = fused_cpu_reason(q, v)
    if reason is None:
        return _FUSED_CPU, Choice("fused_cpu", "auto: fastest on a CPU")
    return _EAGER, Choice("eager", f"auto: {reason}")


class FlashMissingError(Exception):
    """flash-attn was asked for by name and cannot be used."""


def flash_function(device_type: str) -> Callable[..., Tensor]:
    """flash-attn's attention. Raises FlashMissingError with the reason.

    Finding the package is no proof: a build without its CUDA part is found and fails when it is imported.
    """
    advice = "use --impl auto, or NSA_USE_FA2=0"
    if device_type != "cuda":
        raise FlashMissingError(f"--impl flash: flash-attn runs on CUDA only and the device is {device_type}; {advice}")
    try:
        function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise FlashMissingError(
            f"--impl flash: flash-attn cannot be imported ({error}); install it, or {advice}"
        ) from error
    return function
