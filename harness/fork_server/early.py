"""Names that were bound too early: what a module took from torch.distributed before the probe has covered it.

A program imports these modules later than the probe, and they take what it has covered. Preloaded ones must be told.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SOURCE = "torch.distributed.distributed_c10d"


@dataclass(frozen=True, kw_only=True)
class Early:
    """`holder` is a module's namespace or a table in it; under `key`, or as the key itself, it has the function."""

    holder: dict[Any, Any]
    key: Any
    name: str  # in torch.distributed


def bound_early(modules: Iterable[str]) -> list[Early]:
    """What these modules hold of torch.distributed's own functions."""
    # By its exact type: to ask an object of torch's for its class may make it warn (torch 2.11: reduce_op).
    functions = vars(sys.modules[_SOURCE]).items()
    names = {function: name for name, function in functions if type(function) is types.FunctionType}
    found = []
    for module in (sys.modules[name] for name in modules):
        space = vars(module)
        for key, value in space.items():
            if type(value) is types.FunctionType and value in names:
                found.append(Early(holder=space, key=key, name=names[value]))
            elif type(value) is dict:
                keys = (one for one in value if type(one) is types.FunctionType and one in names)
                found += [Early(holder=value, key=one, name=names[one]) for one in keys]
    return found


def bind_again(early: Iterable[Early]) -> None:
    """As an import at this moment would."""
    now = vars(sys.modules[_SOURCE])
    for one in early:
        if isinstance(one.key, str):
            one.holder[one.key] = now[one.name]
        else:
            one.holder[now[one.name]] = one.holder.pop(one.key)
