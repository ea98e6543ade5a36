"""Values of the core as JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from nsa_harness.supervisor.storage.adapters import json_text, type_adapter


@dataclass(frozen=True, kw_only=True)
class Inner:
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Outer:
    names: tuple[str, ...]
    by_rank: dict[int, Inner | None]
    loss: float | None


def test_what_is_written_is_read_back() -> None:
    value = Outer(names=("a", "b"), by_rank={0: Inner(at_s=1.5), 1: None}, loss=2.0)
    assert type_adapter(Outer).validate_json(json_text(value)) == value


def test_a_number_that_is_not_finite_is_null_and_the_text_is_json() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        text = json_text(Outer(names=(), by_rank={2: Inner(at_s=loss)}, loss=loss), indent=1)
        assert "NaN" not in text
        assert "Infinity" not in text
        assert json.loads(text) == {
            "names": [],
            "by_rank": {"2": {"at_s": None}},
            "loss": None,
        }


def test_an_adapter_is_made_once() -> None:
    assert type_adapter(Inner) is type_adapter(Inner)
