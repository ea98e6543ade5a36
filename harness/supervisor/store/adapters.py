"""Values of the core as JSON: written by the standard library, read by pydantic.

Making pydantic's adapter of a large type takes as long as a launch may cost, so each is made when it is first needed,
and a run that is not suspected needs none.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
_MADE: dict[Any, TypeAdapter[Any]] = {}


def adapter(of: type[Value]) -> TypeAdapter[Value]:
    """What checks and makes values of this type."""
    if of not in _MADE:
        _MADE[of] = TypeAdapter(of)
    made: TypeAdapter[Value] = _MADE[of]
    return made


def mistakes(error: ValidationError) -> list[str]:
    """ "outcomes.0.ranks: Input should be a valid integer"; the place and what is wrong there."""
    return [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]


def plain(value: DataclassInstance) -> dict[str, Any]:
    """The value as JSON takes it; a number that is not finite is null."""
    return {key: _plain(item) for key, item in asdict(value).items()}


def json_text(value: DataclassInstance, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
