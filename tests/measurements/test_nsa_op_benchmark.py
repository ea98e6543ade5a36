"""The benchmark of the whole operation: what it tells of a recorded result, and that its path runs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import nsa_op
from benchmarks.nsa_op_report import break_even, table
from benchmarks.roofline import Shape, floors_ms, pairs


def length(tokens: int, ours: tuple[float, float], flash: tuple[float, float]) -> dict[str, Any]:
    rows = [
        {"name": name, "forward_ms": [ms[0]] * 3, "backward_ms": [ms[1]] * 3, "peak_bytes": 2**21, "output_bytes": 1}
        for name, ms in (
            ("nsa", ours),
            ("nsa.selected", (9.0, 9.0)),
            ("torch.flash", flash),
            ("torch.cudnn", (199.0, 299.0)),
        )
    ]
    rows.append({"name": "flash-attn 3", "missing": "cannot be imported: no"})
    return {"shape": {"tokens": tokens}, "rows": rows, "floors_ms": {"whole": {"forward": 1.0, "backward": 3.0}}}


RESULT = {
    "device": "NVIDIA H200",
    "lengths": [
        length(4096, (2.0, 4.0), (1.0, 3.0)),
        length(8192, (4.0, 6.0), (6.0, 8.0)),
        length(65536, (20.0, 50.0), (90.0, 200.0)),
    ],
}


def test_the_table_gives_medians_shares_of_the_floor_and_the_ratio_to_the_best_dense_one() -> None:
    rows = table(RESULT).splitlines()
    assert rows[2] == "| 4096 | 2.00 | 50% | 4.00 | 75% | 1.00 (torch.flash) | 3.00 | 0.67x | 2 |"
    assert rows[4] == "| 65536 | 20.00 | 5% | 50.00 | 6% | 90.00 (torch.flash) | 200.00 | 4.14x | 2 |"


def test_goals_that_are_missed_are_told_by_how_much() -> None:
    text = table(RESULT)
    assert "goal at 65536: forward 27.0 ms met, backward 58.0 ms met" in text
    assert "stretch at 65536: forward 22.0 ms met, backward 46.0 ms missed by 9%" in text
    assert "not measured: flash-attn 3: cannot be imported: no" in text


def test_the_break_even_length_lies_between_the_lengths_around_it() -> None:
    assert break_even(RESULT) == pytest.approx(4096 + 4096 / 3)
    assert break_even({"lengths": RESULT["lengths"][1:]}) == 8192
    assert break_even({"lengths": RESULT["lengths"][:1]}) is None


def test_a_length_at_which_ours_failed_is_a_row_that_says_so() -> None:
    failed = {"shape": {"tokens": 1024}, "rows": [{"name": "nsa", "missing": "out of memory"}], "floors_ms": None}
    text = table({"device": "x", "lengths": [failed]})
    assert "| 1024 | not measured |" in text
    assert "not measured: nsa: out of memory" in text


def test_parts_and_given_choices_are_told_as_shares_and_ratios() -> None:
    here = length(65536, (20.0, 50.0), (90.0, 190.0))
    for name, forward, backward in (
        ("nsa.selected, random choices", 10.0, 20.0),
        ("nsa.selected, neighbours share 95%", 5.0, 10.0),
        ("nsa, neighbours share 95%", 15.0, 25.0),
        ("native-sparse-attention-triton selected, neighbours share 95%", 20.0, 40.0),
    ):
        here["rows"].append(here["rows"][0] | {"name": name, "forward_ms": [forward], "backward_ms": [backward]})
    here["floors_ms"]["selected"] = {"forward": 3.0, "backward": 6.0}
    text = table({"device": "x", "lengths": [here]})
    assert "| 65536 | selected | 9.00 | 33% | 9.00 | 67% |" in text
    assert "| 65536 | neighbours share 95% | 5.00 | 10.00 | 0.50x | 15.00 | 25.00 | 7.00x | 4.00x |" in text


def test_pairs_are_those_that_a_query_sees() -> None:
    shape = Shape(tokens=20, block_len=4, block_stride=2, select_len=5, select_count=3, window=6)
    assert pairs(shape) == {
        "dense": sum(t + 1 for t in range(20)),
        "compressed": sum(len([i for i in range(9) if i * 2 + 3 <= t]) for t in range(20)),
        "selected": sum((min(3, t // 5 + 1) - 1) * 5 + t % 5 + 1 for t in range(20)),
        "sliding": sum(min(6, t + 1) for t in range(20)),
    }


def test_a_part_that_is_none_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        nsa_op.main(["--device", "cpu", "--shared", "2"])
    assert stopped.value.code == 2
    assert "--shared: 2: expected a part of all, from 0 to 1" in capsys.readouterr().err


def test_a_device_whose_peak_is_unknown_has_no_floor() -> None:
    assert floors_ms(Shape(tokens=64), "some other GPU") is None


def test_the_whole_path_runs_on_a_cpu_and_says_what_was_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "op.json"
    words = ["--device", "cpu", "--tokens", "64", "--heads", "2", "--groups", "1", "--width", "8", "--repeats", "1"]
    assert nsa_op.main([*words, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["lengths"][0]["rows"]}
    given = ("nsa.selected, neighbours share 95%", "nsa, neighbours share 95%", "nsa.selected, random choices")
    for part in ("nsa", "nsa.compressed", "nsa.selected", "nsa.sliding", "nsa.mix", "torch.flash", *given):
        assert len(rows[part]["forward_ms"]) == len(rows[part]["backward_ms"]) == 1, part
    assert rows["nsa.importance"]["backward_ms"] == []
    assert rows["flash-attn 2"]["missing"].startswith("cannot be imported")
    assert rows["native-sparse-attention-triton selected, random choices"]["missing"].startswith("cannot be imported")
    assert "| 64 |" in capsys.readouterr().out
    assert nsa_op.main(["--table", str(out)]) == 0
    assert "| 64 |" in capsys.readouterr().out
