"""Values of the core as JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from builders import board, in_all_reduce, stalled

from nsa_harness.core.evidence.evidence import Snapshot
from nsa_harness.supervisor.storage import adapters
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


SNAPSHOT = stalled(in_all_reduce(0), in_all_reduce(1)).snapshots[-1]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_large_snapshot_is_read_rank_by_rank_as_it_would_be_at_once(
    monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    stored = adapters.json_text(SNAPSHOT, indent).encode()
    whole = adapters.read_snapshot(stored)
    monkeypatch.setattr(adapters, "_LARGE_BYTES", 0)
    monkeypatch.setattr(
        adapters.type_adapter(Snapshot), "validate_json", _without_ranks(adapters.type_adapter(Snapshot))
    )
    assert adapters.read_snapshot(stored) == whole
    assert [rank.rank for rank in whole.ranks] == [0, 1]


def _without_ranks(adapter: Any) -> Callable[..., Snapshot]:
    read = adapter.validate_json

    def validate_json(data: str, **options: Any) -> Snapshot:
        assert json.loads(data)["ranks"] == []
        return read(data, **options)

    return validate_json


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"ranks"', '"bands"'),
        lambda text: text.replace('"pid"', '"pit"', 1),
        lambda text: text.replace("[", "[" * 100_000, 1),
    ],
    ids=["cut", "no ranks", "a wrong rank", "deep"],
)
def test_a_large_snapshot_that_is_damaged_has_the_error_of_a_small_one(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], str]
) -> None:
    damaged = damage(adapters.json_text(SNAPSHOT)).encode()
    messages = []
    for large_bytes in (1 << 24, 0):
        monkeypatch.setattr(adapters, "_LARGE_BYTES", large_bytes)
        with pytest.raises(ValueError, match=r".") as caught:
            adapters.read_snapshot(damaged)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_ranks_share_the_members_of_a_large_group() -> None:
    """Each of 16,384 ranks knows the group of all ranks. Lists of their own would take 4 GB."""
    members = tuple(range(0, 64, 2))
    ranks = tuple(replace(rank, status_file=board(groups={"0": members})) for rank in SNAPSHOT.ranks)
    stored = json_text(replace(SNAPSHOT, ranks=ranks)).encode()
    first, second = (rank.status_file for rank in adapters.read_snapshot(stored).ranks)
    assert first is not None
    assert second is not None
    assert first.groups == {"0": members}
    assert first.groups["0"] is second.groups["0"]


@pytest.mark.parametrize("indent", [None, 1])
def test_the_text_of_each_rank_and_of_the_rest_is_mapped(indent: int | None) -> None:
    stored = json_text(SNAPSHOT, indent)
    parts = []

    def noted(text: str) -> str:
        parts.append(json.loads(text))
        return text.replace("MainThread", "$SECRET_1").replace('"number"', '"numero"')

    mapped = json.loads(adapters.map_ranks(stored, noted))
    whole = json.loads(stored)
    assert parts == [*whole["ranks"], {**whole, "ranks": []}]
    assert mapped == json.loads(stored.replace("MainThread", "$SECRET_1").replace('"number"', '"numero"', 1))
    assert adapters.map_ranks(stored, str) is stored
