"""docs/internals/nsa/telemetry.md against what a real run writes: every file, every column, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from nsa_attention.settings import read_settings
from nsa_attention.telemetry import TABLES, file_name
from nsa_attention.train import train
from nsa_attention.world import join_ranks

PAGE = (ROOT / "docs" / "internals" / "nsa" / "telemetry.md").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return {title.replace("\\", ""): text for title, text in zip(parts[::2], parts[1::2], strict=True)}


def first_cells(text: str) -> list[list[str]]:
    """Of each table in it the first cells of its rows, without their marks of code."""
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [[row.split("|")[1].strip().strip("`") for row in table.splitlines()[2:]] for table in tables]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a CPU has, but for TensorBoard, which need not be there."""
    directory = tmp_path_factory.mktemp("run") / "out"
    words = ["--layers", "1", "--steps", "2", "--mem-dump-every", "2", "--profile-memory", "--trace-grads"]
    settings = read_settings([*words, "--step-cost", "--out-dir", str(directory)], {})
    with join_ranks("cpu", "auto", needs_group=False) as world:
        train(settings, world)
    return directory


@pytest.mark.parametrize("name", TABLES)
def test_the_columns_of_each_table_are_documented_in_their_order(out: Path, name: str) -> None:
    (documented,) = first_cells(sections()[name])
    assert documented == (out / name).read_text(encoding="utf-8").splitlines()[0].split(",")
    if file_name(name, sharded=True) != name:
        assert f"`{file_name(name, sharded=True)}`" in sections()[name]


def test_the_keys_of_a_heartbeat_are_documented_in_their_order(out: Path) -> None:
    (documented,) = first_cells(sections()["heartbeat_rank<r>.jsonl"])
    for line in (out / "heartbeat_rank0.jsonl").read_text(encoding="utf-8").splitlines():
        assert documented == list(json.loads(line))


def test_the_keys_of_a_memory_dump_are_documented_in_their_order(out: Path) -> None:
    _, documented = first_cells(sections()["Memory"])
    assert documented == list(json.loads((out / "mem_rank0_step2.json").read_text(encoding="utf-8")))


def test_the_lines_of_the_audit_are_documented_in_their_order(out: Path) -> None:
    (documented,) = first_cells(sections()["dtypes_report.txt"])
    written = (out / "dtypes_report.txt").read_text(encoding="utf-8").splitlines()
    kinds = list(dict.fromkeys(line.partition(" ")[0] for line in written))
    assert kinds == [kind for kind in documented if kind != "surprise"]  # a healthy run has none


def test_every_file_is_documented_and_no_other(out: Path) -> None:
    memory, _ = first_cells(sections()["Memory"])
    (others,) = first_cells(sections()["Other files"])
    titles = [title for title in sections() if "." in title]
    documented = [*titles, *memory, *others]
    expressions = [re.escape(name).replace("<r>", r"\d+").replace("<k>", r"\d+") for name in documented]
    written = [path.name for path in out.iterdir()]
    assert [name for name in written if not any(re.fullmatch(one, name) for one in expressions)] == []
    unseen = [
        name
        for name, one in zip(documented, expressions, strict=True)
        if not any(re.fullmatch(one, w) for w in written)
    ]
    assert unseen == ["mem_snapshot_rank<r>_step<k>.pickle", "evaluation.csv", "tensorboard/"]  # CUDA's, and asked for
