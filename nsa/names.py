"""Names of modules as the model wrote them, whatever wrappers stand in between."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_WRAPPERS = frozenset({"_fsdp_wrapped_module"})


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module under its own name. Of a wrapper and what it wraps only the wrapper: it is the one that is called."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] not in _WRAPPERS:
            yield ".".join(part for part in parts if part not in _WRAPPERS), module
