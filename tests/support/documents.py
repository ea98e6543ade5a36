"""Reading the repository's documents: their text, tables and code blocks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), REPOSITORY / "nsa" / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
SAMPLE = REPOSITORY / "reports" / "sample"


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def rows(name: str, *head: str) -> list[list[str]]:
    """The cells of every table in a document whose head begins with these words."""
    found: list[list[str]] = []
    inside = False
    for line in text(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[: len(head)] == list(head):
            inside = True
        elif not cells:
            inside = False
        elif inside and not set(line) <= set("|-: "):
            found.append(cells)
    return found


def words(cell: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", cell)


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.M | re.S)


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
