"""The generated lists of this folder by name: the file, and the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from searches import SEARCHES, searches
from surface import HELP, RULE_ORDER, SPEC_HASHES, help_text, rule_order, spec_hashes

LISTS: dict[str, tuple[Path, Callable[[], str]]] = {
    "rule_order": (RULE_ORDER, rule_order),
    "searches": (SEARCHES, searches),
    "spec_hashes": (SPEC_HASHES, spec_hashes),
    "help": (HELP, help_text),
}


def freeze_list(name: str) -> str:
    path, text = LISTS[name]
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.write_text(text(), encoding="utf-8")
    now = path.read_text(encoding="utf-8").splitlines()
    return f"{path.name}: {len(now)} lines, {len(set(now) ^ set(before))} changed"
