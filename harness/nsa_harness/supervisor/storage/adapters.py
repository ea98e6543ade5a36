"""Converts objects to and from JSON.

Building a pydantic adapter for a large type can take as long as a whole launch. So each adapter is built when it is
first used, and a run without a suspected stall needs none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from nsa_harness.core.evidence.evidence import Evidence, RankSnapshot, Snapshot
from nsa_harness.core.raw_bytes import readable_json
from nsa_harness.core.stored_keys import to_stored

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")


class _Adapter(TypeAdapter[Any]):  # type: ignore[misc]  # final for type checkers only
    """A pydantic adapter that also accepts stored paths and arguments that are not UTF-8."""

    def validate_json(self, data: str | bytes | bytearray, /, **options: Any) -> Any:
        if not isinstance(data, str) and b"\\udc" in data:
            data = data.decode("utf-8", errors="replace")
        return super().validate_json(readable_json(data) if isinstance(data, str) else data, **options)


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def type_adapter(value_type: type[Value]) -> TypeAdapter[Value]:
    """Return the pydantic adapter for a type, which is built only once per type."""
    if value_type not in _ADAPTERS:
        annotated_type: Any = Annotated[Evidence, BeforeValidator(_unpack)] if value_type is Evidence else value_type
        _ADAPTERS[value_type] = _Adapter(annotated_type)
    result: TypeAdapter[Value] = _ADAPTERS[value_type]
    return result


def read_snapshot(data: bytes) -> Snapshot:
    """Return a stored snapshot. Raise ValueError if `data` is not one.

    Of a large file, one rank is read at a time: to read it whole takes ten times its size.
    """
    if len(data) >= _LARGE_BYTES:
        with suppress(ValueError, RecursionError):  # the whole file is read below, with the same error as a small one
            return _read_rank_by_rank(data.decode("utf-8"))
    return type_adapter(Snapshot).validate_json(data)


_LARGE_BYTES = 1 << 24
_RANKS = re.compile(r'"ranks"\s*:\s*\[\s*')  # only numbers stand before it in a stored snapshot
_BETWEEN = re.compile(r"\s*,\s*")


def _read_rank_by_rank(text: str) -> Snapshot:
    adapter = type_adapter(RankSnapshot)
    begin, ranges = _rank_ranges(text)
    ranks = [_with_shared_parts(adapter.validate_json(text[start:end])) for start, end in ranges]
    rest: Snapshot = type_adapter(Snapshot).validate_json(_without_ranks(text, begin, ranges))
    return replace(rest, ranks=tuple(ranks))


def map_ranks(text: str, function: Callable[[str], str]) -> str:
    """Return a stored snapshot with a function applied to the JSON text of each rank, and to the rest without ranks.

    Raise ValueError if the text is not a snapshot. The result is the same object if the function changes nothing.
    """
    begin, ranges = _rank_ranges(text)
    rest = _without_ranks(text, begin, ranges)
    changed = {
        at: new for at, (start, end) in enumerate(ranges) if (new := function(text[start:end])) != text[start:end]
    }
    new_rest = function(rest)
    if not changed and new_rest == rest:
        return text
    beginning = _RANKS.search(new_rest)
    if beginning is None:
        raise ValueError("no ranks")
    ranks = (changed.get(at, text[start:end]) for at, (start, end) in enumerate(ranges))
    return f"{new_rest[: beginning.end()]}{', '.join(ranks)}{new_rest[beginning.end() :]}"


def _rank_ranges(text: str) -> tuple[int, list[tuple[int, int]]]:
    """Return where the list of ranks begins in a stored snapshot, and where each rank begins and ends."""
    beginning = _RANKS.search(text)
    if beginning is None:
        raise ValueError("no ranks")
    decoder, ranges, at = json.JSONDecoder(), [], beginning.end()
    while text[at : at + 1] == "{":
        _, end = decoder.raw_decode(text, at)
        ranges.append((at, end))
        separator = _BETWEEN.match(text, end)
        at = separator.end() if separator else end
    return beginning.end(), ranges


def _without_ranks(text: str, begin: int, ranges: Sequence[tuple[int, int]]) -> str:
    return text[:begin] + text[ranges[-1][1] :].lstrip() if ranges else text


def _with_shared_parts(rank: RankSnapshot) -> RankSnapshot:
    """Return an equal snapshot that shares the lines of its stacks and calls with other ranks.

    The copies of the dataclasses are smaller than the instances that pydantic makes.
    """
    calls = rank.status_file.calls if rank.status_file else ()
    calls = tuple(replace(call, place=_first_equal(call.place), chain=_first_equal(call.chain)) for call in calls)
    process = rank.process and replace(rank.process, tasks=tuple(map(replace, rank.process.tasks)))
    return replace(
        rank,
        stacks=tuple(replace(stack, frames=_first_equal(stack.frames)) for stack in rank.stacks),
        status_file=rank.status_file and replace(rank.status_file, calls=calls),
        collectives=tuple(replace(one, frames=_first_equal(one.frames)) for one in rank.collectives),
        process=process,
    )


@lru_cache(maxsize=1 << 14)
def _first_equal(value: Any) -> Any:
    """Return the first value, of the latest ones, that is equal to this one."""
    return value


def error_texts(error: ValidationError) -> list[str]:
    """Return one message per validation error, such as "outcomes.0.ranks: Input should be a valid integer"."""
    return [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]


def json_object(value: DataclassInstance) -> dict[str, Any]:
    """Return a dataclass instance as a dict of JSON types, with NaN and infinity replaced by None."""
    return {key: json_value(item) for key, item in to_stored(value).items()}


def json_value(value: Any, *, keeps_names: bool = False) -> Any:
    """Return a value converted to JSON types. NaN and infinity become None, or strings if `keeps_names`."""
    if isinstance(value, dict):
        return {str(key): json_value(item, keeps_names=keeps_names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, keeps_names=keeps_names) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if keeps_names else None
    return value


def json_text(value: DataclassInstance, indent: int | None = None) -> str:
    return json.dumps(json_object(value), indent=indent)


def stored_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as JSON text. Only one rank at a time is converted, which saves memory."""
    text = json_text(replace(snapshot, ranks=()))
    return text.replace('"ranks": []', f'"ranks": [{", ".join(map(json_text, snapshot.ranks))}]', 1)


def evidence_text(evidence: Evidence) -> str:
    """Return evidence as compact JSON text, in which long lists of similar objects are stored by columns."""
    return json.dumps(_pack(_document(evidence)), separators=(",", ":"))


def _document(evidence: Evidence) -> dict[str, Any]:
    if len(evidence.ranks) >= _MIN_RANKS_FOR_ADAPTER:
        with suppress(ValueError):  # a string with a byte that is not UTF-8
            document: dict[str, Any] = json.loads(
                type_adapter(Evidence).dump_json(evidence, by_alias=True, warnings=False)
            )
            return document
    return json_object(evidence)


# pydantic writes the same document as `json_object` in a third of the time, but first its adapter has to be built.
_MIN_RANKS_FOR_ADAPTER = 16


_COLUMNS = "by columns"
_MIN_ROWS = 16


def _pack(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    keys = list(value[0]) if len(value) >= _MIN_ROWS and isinstance(value[0], dict) else []
    if not keys or any(not isinstance(row, dict) or list(row) != keys for row in value):
        return [_pack(item) for item in value]
    return {_COLUMNS: {key: _column([row[key] for row in value]) for key in keys}, "rows": len(value)}


def _column(items: list[Any]) -> dict[str, Any]:
    """Return `items`, one column of a table, in a compact form that stores repeated values once."""
    kinds = set(map(type, items))
    texts = items if len(kinds) == 1 and kinds <= _COMPARABLE else [json.dumps(item) for item in items]
    index_of = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    if len(index_of) * 2 > len(items):
        return {"each": [_pack(item) for item in items]}
    distinct = list(index_of) if texts is items else [_pack(json.loads(text)) for text in index_of]
    return {"of": distinct} if len(index_of) == 1 else {"of": distinct, "at": [index_of[text] for text in texts]}


_COMPARABLE = frozenset({str, int, bool, type(None)})  # two values of one of these types are equal if their JSON is


def _unpack(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _COLUMNS not in value:
        return {key: _unpack(item) for key, item in value.items()}
    columns = {key: _items(column, value["rows"]) for key, column in value[_COLUMNS].items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _items(column: dict[str, Any], rows: int) -> list[Any]:
    if "each" in column:
        return [_unpack(item) for item in column["each"]]
    distinct = [_unpack(item) for item in column["of"]]
    return [distinct[index] for index in column.get("at", [0] * rows)]
