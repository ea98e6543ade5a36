"""Read the texts of recorded values: numbers, lengths, and the rank that has the usual value."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence

from nsa_harness.core.recording.explanation import Candidate, RankValues
from nsa_harness.core.recording.source_statements import Path, path_of

_SIZE = re.compile(r"(?:\w+ \[)?(\d+)(?: items\b|[,\]])")  # at the begin of a container's or a tensor's text


def lengths_of(candidate: Candidate) -> tuple[str, dict[int, int]]:
    """Return the name and the lengths of a candidate's sequence, by rank, or no lengths if they are all the same."""
    name = candidate.name.removeprefix("len(").removesuffix(")")
    pairs = [pair for value in candidate.values if value.name == name for pair in value.values]
    lengths = {rank: length for rank, text in pairs if (length := length_of(text)) is not None}
    return name, lengths if len(lengths) == len(pairs) and len({*lengths.values()}) > 1 else {}


def length_of(text: str) -> int | None:
    """Return the number of items of a sequence or tensor from its recorded text, or None for any other value."""
    if match := _SIZE.match(text):
        return int(match[1])
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return len(value) if isinstance(value, (list, tuple)) else None


def begins_length(candidate: Candidate) -> bool:
    """Return whether the statement gets only numbers and lengths that are the same on all ranks."""
    name, _ = lengths_of(candidate)
    for value in candidate.values:
        texts = {text for _, text in value.values}
        sizes = {length for text in texts if (length := length_of(text)) is not None}
        is_number = len(texts) > 1 and all(map(is_scalar, texts)) and not is_rank_number(value, path_of(value.name))
        if value.name not in (name, candidate.name) and (is_number or len(sizes) > 1):
            return False
    return True


def is_scalar(text: str) -> bool:
    try:
        return not isinstance(ast.literal_eval(text), (list, tuple, dict, set))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text.lstrip("-") in ("inf", "nan")


def reference_of(values: Sequence[RankValues], ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the rank whose value most ranks have, and the other ranks. The lowest rank wins a tie."""
    pairs = values[0].values if values else ()
    involved = sorted({*ranks, *(rank for rank, _ in pairs)}) or [0]
    counts = Counter(text for _, text in pairs)
    reference = min(pairs, key=lambda pair: (-counts[pair[1]], pair[0]))[0] if pairs else involved[0]
    return reference, tuple(rank for rank in involved if rank != reference)


def is_rank_number(value: RankValues, path: Path) -> bool:
    """Return whether a value is the number of the rank, without which the ranks cannot work."""
    is_named_rank = bool(path) and str(path[-1][1]).lower() in (
        "rank",
        "local_rank",
        "global_rank",
        "world_rank",
        "is_main",
    )
    return is_named_rank or (len(value.values) > 1 and all(text == str(rank) for rank, text in value.values))
