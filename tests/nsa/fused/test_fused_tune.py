"""`tune`, for users of the operator: it launches every kernel, stores what it measured, and says if there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_attention import MissingImplementationError, tile_tuning, tune
from nsa_attention.ops.fused import launch, tuning
from nsa_attention.ops.fused.launch import Tile

SHAPE: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16}
PASSES = ("forward", "backward_queries", "backward_keys")
LENGTHS = {"block_size": 8, "block_count": 3, "compress_size": 4, "compress_stride": 2, "window": 8}


def test_without_a_gpu_it_says_that_there_is_nothing_to_tune() -> None:
    with pytest.raises(MissingImplementationError, match=r"^tune: there is nothing to tune on cpu: .* run on CUDA$"):
        tune(**SHAPE, tokens=64, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(MissingImplementationError, match="torch finds no CUDA device"):
            tune(**SHAPE, tokens=64)


def test_all_wrong_sizes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"^tune: heads: .*, got 0; tokens: expected at least 1, got -1$"):
        tune(0, 1, 16, tokens=[64, -1])
    with pytest.raises(ValueError, match=r"^tune: tokens: expected at least 1, got 0$"):
        tune(2, 1, 16, tokens=[])


def test_it_launches_the_kernels_of_every_length_and_of_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tile_tuning, "_require_gpu", lambda *_: None)  # the interpreter instead
    monkeypatch.setattr(tuning, "_tiles", {})
    monkeypatch.setattr(tuning, "_compiled_for", {})
    state, before = torch.random.get_rng_state(), launch.launches.copy()
    result = tune(**SHAPE, tokens=(5, 20), dtype=torch.float32, device="cpu", file=tmp_path / "tuning.json", **LENGTHS)
    ran = launch.launches - before
    assert ran["ranked_blocks"] == ran["selected_forward"] == 3  # two lengths, and one row of packed sequences
    assert ran["rotated"] == 6  # of all keys together, and of one branch alone
    both_passes = {f"{part}_{kernel}" for part in ("spanned", "selected") for kernel in PASSES}
    assert both_passes | {"mix_forward"} <= set(ran)
    assert {key.tokens for key in tuning._tiles} == {8, 32}  # powers of two
    options = {"dtype": torch.float32, "device": "cpu", "file": tmp_path / "tuning.json"}
    tune(**SHAPE, tokens=20, deterministic=False, **options, **LENGTHS)
    assert launch.launches["spanned_statistics"] - before["spanned_statistics"] == 4
    assert torch.equal(state, torch.random.get_rng_state())
    assert (result.measured, result.file) == (0, None)  # in the interpreter nothing is measured


def test_what_was_measured_is_stored_and_read_by_the_next_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensor = torch.empty(1, 1, 1, 1)
    key = replace(tuning.TuningKey.of("any", tensor, tensor, tensor, "any"), device="a GPU")
    file, table = tmp_path / "new" / "tuning.json", {key: Tile(rows=16, keys=16)}
    monkeypatch.setattr(tuning, "_tiles", {})
    first = tile_tuning.measure_tiles(lambda: tuning._tiles.update(table), lambda: None, torch.device("cpu"), file)
    assert (first.measured, first.file) == (1, file)
    assert str(first).endswith(f"; kept in {file}")
    monkeypatch.setattr(tuning, "_tiles", {})
    second = tile_tuning.measure_tiles(lambda: None, lambda: None, torch.device("cpu"), file)
    assert second.measured == 0
    assert tuning._tiles == table


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensor = torch.empty(1, 1, 1, 1)
    key = replace(tuning.TuningKey.of("any", tensor, tensor, tensor, "any"), device="a GPU")
    monkeypatch.setattr(tuning, "_tiles", {key: Tile(rows=16, keys=16)})
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "tuning.json"
    result = tile_tuning.measure_tiles(lambda: None, lambda: None, torch.device("cpu"), blocked)
    assert result.file is None
    assert f"; not kept: {blocked}: " in str(result)
