"""The two files that hold the frozen judgements: their facts, and the sentences in them.

facts.jsonl has one line for each judgement, and behind them one line of defaults. A value that equals its default is
left out; a long value that an earlier judgement has too is written as that judgement's number, for instance "=12".
sentences.jsonl has one line for each text, with the places where it occurs: "1-3,7" are numbers of judgements, and the
key before them counts the entries of the lists on the way.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

SENTENCES = {
    "outcome.summary",
    "outcome.findings[].claim",
    "outcome.findings[].advice",
    "outcome.findings[].left_open[]",
    "outcome.detail.checked[]",
    "outcome.detail.ended",
    "outcome.detail.last_agreed",
    "outcome.detail.raised",
    "outcome.detail.ruled_out[]",
    "outcome.detail.signals.*",
    "outcome.detail.standings[].stands_in",
    "outcome.detail.standings[].waits_for",
    "outcome.detail.why",
    "outcome.trouble[].why",
    "reproduction[]",
}
_OPEN = ("outcome.detail.signals",)  # objects whose keys are data
_BESIDE = ("deepening", "reproduction", "severity")  # the keys of a judgement other than its outcome
_NO_DEFAULT = ("verdict", "cause")
_LONG = 40  # characters of a value that is worth a reference

Path = tuple[str | int, ...]


def split(judgements: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines of facts.jsonl and of sentences.jsonl."""
    facts: list[dict[str, Any]] = []
    places: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for number, judgement in enumerate(judgements, 1):
        facts.append(_without_sentences(judgement, ()))
        for path, text in _sentences(judgement, ()):
            places[text].append((number, path))
    lines = [{"text": text, "at": _at(found)} for text, found in places.items()]
    lines.sort(key=lambda line: (min(line["at"]), line["text"]))
    return [canonical(line) for line in _packed(facts)], [canonical(line) for line in lines]


def joined(facts: Sequence[str], sentences: Sequence[str]) -> list[dict[str, Any]]:
    """Return the judgements that were split into these lines."""
    judgements = _unpacked([json.loads(line) for line in facts])
    for line in map(json.loads, sentences):
        for number, path in _places(line["at"]):
            _put(judgements[number - 1], path, line["text"])
    return judgements


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _kind(path: Path) -> str:
    """The path without the entries of its lists: outcome.findings[].claim."""
    kind = "".join("[]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    return next((f"{name}.*" for name in _OPEN if kind.startswith(f"{name}.")), kind)


def _is_sentence(value: Any, path: Path) -> bool:
    return isinstance(value, str) and _kind(path) in SENTENCES


def _steps(value: Any) -> list[tuple[str | int, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())


def _sentences(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if _is_sentence(value, path):
        yield path, value
    for step, inner in _steps(value):
        yield from _sentences(inner, (*path, step))


def _without_sentences(value: Any, path: Path) -> Any:
    """The value without its sentences; in a list, null keeps the place of each."""
    inner = {step: one for step, one in _steps(value) if not _is_sentence(one, (*path, step))}
    match value:
        case dict():
            return {step: _without_sentences(one, (*path, step)) for step, one in inner.items()}
        case list():
            return [_without_sentences(inner.get(step), (*path, step)) for step in range(len(value))]
    return value


def _put(value: Any, path: Path, text: str) -> None:
    for step, following in pairwise(path):
        if isinstance(value, dict):
            value = value.setdefault(step, [] if isinstance(following, int) else {})
        else:
            value = value[step]
    value[path[-1]] = text


def _at(places: Sequence[tuple[int, Path]]) -> dict[str, Any]:
    """By kind of path: the judgements, or by entries of the lists the judgements."""
    entries: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for number, path in places:
        # A key that is data counts like the entry of a list.
        data = next((len(name.split(".")) for name in _OPEN if _kind(path) == f"{name}.*"), None)
        steps = tuple(step for index, step in enumerate(path) if isinstance(step, int) or index == data)
        entries[_kind(path)][number].append(steps)
    found: dict[str, Any] = {}
    for kind, by_number in sorted(entries.items()):
        alike: dict[str, list[int]] = defaultdict(list)
        for number, each in by_number.items():
            alike[_entries_text(each)].append(number)
        texts = {steps: _ranges(numbers) for steps, numbers in alike.items()}
        found[kind] = texts.get("", texts)
    return found


def _entries_text(entries: Sequence[Path]) -> str:
    if all(len(one) == 1 for one in entries):
        return _ranges([int(one[0]) for one in entries])
    return ",".join(".".join(map(str, one)) for one in sorted(entries))


def _places(at: Mapping[str, Any]) -> Iterator[tuple[int, Path]]:
    for kind, texts in at.items():
        for entries, numbers in texts.items() if isinstance(texts, dict) else [("", texts)]:
            for number in _numbers(numbers):
                for steps in _entries(entries):
                    yield number, _path(kind, steps)


def _entries(text: str) -> list[Sequence[str]]:
    if "." in text:
        return [one.split(".") for one in text.split(",")]
    return [(str(one),) for one in _numbers(text)] if text else [()]


def _path(kind: str, steps: Sequence[str]) -> Path:
    left = list(steps)
    path: list[str | int] = []
    for word in re.findall(r"\[\]|[^.\[\]]+", kind):
        path.append(int(left.pop(0)) if word == "[]" else left.pop(0) if word == "*" else word)
    return tuple(path)


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _packed(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    flat = [dict(_flat(one)) for one in facts]
    counts = Counter((key, canonical(value)) for one in flat for key, value in one.items() if key not in _NO_DEFAULT)
    default = {key: json.loads(text) for (key, text), count in counts.items() if 2 * count > len(flat)}
    seen: dict[tuple[str, str], int] = {}
    lines = []
    for number, one in enumerate(flat, 1):
        line: dict[str, Any] = {"without": missing} if (missing := sorted(default.keys() - one.keys())) else {}
        for key, value in one.items():
            text = canonical(value)
            first = seen.setdefault((key, text), number)
            if key not in default or default[key] != value:
                line[key] = f"={first}" if first < number and len(text) > _LONG else value
        lines.append(line)
    return [*lines, default]


def _unpacked(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    *packed, default = lines
    full: list[dict[str, Any]] = []
    for line in packed:
        missing = line.pop("without", ())
        one = {**{key: value for key, value in default.items() if key not in missing}, **line}
        full.append({key: _referred(full, key, value) for key, value in one.items()})
    return [_nested(json.loads(canonical(one))) for one in full]


def _referred(full: Sequence[dict[str, Any]], key: str, value: Any) -> Any:
    is_reference = isinstance(value, str) and value.startswith("=")
    return full[int(value[1:]) - 1][key] if is_reference else value


def _flat(judgement: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of the outcome, those of its detail, and what the judgement holds beside the outcome."""
    for key, value in judgement["outcome"].items():
        if key == "detail":
            yield from ((f"detail.{inner}", one) for inner, one in value.items())
        else:
            yield key, value
    yield from ((key, judgement[key]) for key in _BESIDE)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    detail = {key.removeprefix("detail."): value for key, value in flat.items() if key.startswith("detail.")}
    outcome = {key: value for key, value in flat.items() if key not in _BESIDE and not key.startswith("detail.")}
    return {"outcome": {**outcome, "detail": detail}, **{key: flat[key] for key in _BESIDE}}
