"""No number is typed by hand where a cause is named: what was seen and what its row asks make it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import CERTAIN, LIKELY, EvidenceKind, confidence

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "harness" / "nsa_harness" / "core"
WEIGHING = CORE / "diagnosis" / "confidence.py"  # the one place that turns what was seen into a number
_PARTS = ("diagnosis", "verdict", "collectives", "comparison", "experiment")
SAYING = (*(CORE / part for part in _PARTS), CORE.parent / "subject")
SOURCES = sorted(
    {*(CORE / "outcome").glob("*.py"), *(path for place in SAYING for path in place.rglob("*.py"))} - {WEIGHING}
)
_GIVEN, _KEPT = ("confidence", "evidence"), ("confidence", "certain", "likely", "sure")


def typed_by_hand(source: str) -> Iterator[str]:
    """Float literals that are given, or kept, as how sure something is."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg=str(name), value=value):
                said, words = name, _GIVEN
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                said, words = ast.unparse(target).lower(), _KEPT
            case ast.Call(
                func=ast.Name(id="Finding" | "Explanation" | "explained" | "confidence"), args=[_, *_] as given
            ):
                value, said, words = ast.Tuple(elts=given), "confidence", _GIVEN
            case _:
                continue
        numbers = [one for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, float)]
        if numbers and any(word in said for word in words):
            yield f"{said} = {ast.unparse(value)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_number_is_typed_by_hand_for_how_sure_a_cause_is(path: Path) -> None:
    assert list(typed_by_hand(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "explained(cause, claim, confidence=0.9)",
        "explained(cause, claim, confidence=0.95 if clear else 0.85)",
        "replace(found, confidence=max(one, 0.7))",
        "Finding(code, claim, (), None, 0.95, (), advice)",
        "_CERTAIN, _LIKELY = 0.95, 0.8",
        "_UNSURE: float = 0.75",
    ],
)
def test_a_number_that_is_typed_by_hand_is_noticed(source: str) -> None:
    assert list(typed_by_hand(source))


def test_one_function_makes_every_finding() -> None:
    calls = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    }
    assert calls == {"explanation.py"}


@pytest.mark.parametrize("cause", Cause)
def test_certain_is_only_what_the_row_holds_for_a_proof(cause: Cause) -> None:
    by = cause.row.certain_by
    for seen in EvidenceKind:
        assert (confidence(seen, by) >= CERTAIN) is (seen in by), f"{cause}: {seen}"
        assert confidence(seen, by, left_open=True) <= LIKELY < CERTAIN


def test_what_proves_nothing_is_as_sure_as_it_was_whatever_is_left_open() -> None:
    weak = [seen for seen in EvidenceKind if confidence(seen, EvidenceKind) < CERTAIN]
    assert weak
    assert all(confidence(one, (), left_open=True) == confidence(one, EvidenceKind) for one in weak)


def test_every_frozen_judgement_has_the_number_of_a_grade() -> None:
    known = {confidence(seen, by) for seen in EvidenceKind for by in ((), tuple(EvidenceKind))}
    lines = (ROOT / "tests" / "frozen" / "facts.jsonl").read_text().splitlines()
    findings = [json.loads(line).get("findings", ()) for line in lines]
    given = {found["confidence"] for several in findings if not isinstance(several, str) for found in several}
    assert given
    assert given <= known
