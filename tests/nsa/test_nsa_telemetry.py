"""Tables, heartbeat, dumps and the audit of dtypes: what they say is what happened."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Alone, Program
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nsa_attention.branches import BlockSelector, GateMLP
from nsa_attention.config import CI
from nsa_attention.dtypes import expected_dtypes, unexpected_dtypes
from nsa_attention.memory import AllocatorHistory, memory_dump, peak_rss_bytes, rss_bytes
from nsa_attention.model import TinyLM
from nsa_attention.parallelize import freeze
from nsa_attention.samples import Observer, gate_rows, selection_row
from nsa_attention.telemetry import TABLES, StepParts, StepResult, Telemetry
from nsa_attention.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
PLAIN = expected_dtypes(torch.float32, autocast=False)


@pytest.fixture
def model() -> TinyLM:
    return TinyLM.from_config(replace(CI, layers=2))


def backward(model: nn.Module) -> None:
    model(torch.randint(256, (1, 64))).logsumexp(-1).mean().backward()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def beats(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (directory / f"heartbeat_rank{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# What was selected.


def test_selection_statistics_count_different_blocks() -> None:
    # Four queries, l' = 2: blocks 0 0 1 1. Row 1 repeats a block, row 2 has an empty place in the middle.
    indices = torch.tensor([[[[0, -1, -1], [0, 0, -1], [0, -1, 1], [1, 0, -1]]]])
    row = selection_row("3", indices, select_len=2)
    assert (row.layer, row.least, row.most, row.blocks) == ("3", 1, 2, 2)
    assert row.mean == pytest.approx(1.5)
    assert row.forced_share == 1.0
    assert row.empty_share == pytest.approx(5 / 12)
    # Queries 0 and 1 have block 0, which reaches up to both. Of queries 2 and 3 it ends 1 and 2 tokens back.
    assert (row.distance_mean, row.distance_max) == (pytest.approx(3 / 6), 2)
    # Query 1 has all of its blocks from query 0, query 2 one of two, query 3 both.
    assert row.overlap == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert row.entropy_bits is None  # nothing was chosen freely


def test_a_choice_that_is_not_forced_lowers_the_forced_share() -> None:
    indices = torch.tensor([[[[0, 4, 3, 2]]]]).expand(1, 1, 10, 4)[:, :, 9:]
    indices = torch.cat([torch.full((1, 1, 9, 4), -1), indices], 2)
    row = selection_row("0", indices, select_len=2)
    assert row.forced_share == pytest.approx(3 / 4)
    assert (row.distance_max, row.distance_mean) == (8, pytest.approx((8 + 4 + 2) / 4))
    assert row.overlap == 0.0
    assert row.entropy_bits == 0.0  # one free choice


def test_a_layer_that_always_chooses_the_same_block_has_no_entropy_and_one_that_does_not_has() -> None:
    same = torch.tensor([0, 2, 9, 10]).expand(1, 1, 22, 4)[:, :, 20:]
    different = same.clone()
    different[:, :, 1, 1] = 3
    empty = torch.full((1, 1, 20, 4), -1)
    row, other = (selection_row("0", torch.cat([empty, some], 2), select_len=2) for some in (same, different))
    assert (row.entropy_bits, row.overlap) == (0.0, 0.5)
    assert other.entropy_bits == pytest.approx(1.0)
    assert other.overlap == pytest.approx((0 + 3 / 4) / 2)


def test_nothing_selected_is_no_number() -> None:
    row = selection_row("0", torch.full((1, 1, 3, 2), -1), select_len=2)
    assert (row.least, row.most, row.empty_share) == (0, 0, 1.0)
    assert (row.distance_mean, row.distance_max, row.overlap, row.entropy_bits) == (None, None, None, None)


def test_neighbours_in_a_packed_row_are_those_of_one_sequence() -> None:
    indices = torch.tensor([[[[0], [0], [0], [0]]]])
    packed = selection_row("0", indices, select_len=1, positions_T=torch.tensor([0, 1, 0, 1]))
    assert (packed.overlap, packed.blocks, packed.distance_max) == (1.0, 2, 1)


Choices = list[list[int]]


@st.composite
def choices(draw: st.DrawFn) -> tuple[Choices, int]:
    tokens, places, select_len = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = [draw(st.lists(st.integers(-1, t // select_len), min_size=places, max_size=places)) for t in range(tokens)]
    return rows, select_len


@given(choices())
def test_the_numbers_of_a_selection_are_what_a_loop_counts(case: tuple[Choices, int]) -> None:
    """Against sets and a loop over the queries."""
    chosen, select_len = case
    row = selection_row("0", torch.tensor([[chosen]]), select_len=select_len)
    sets = [{block for block in blocks if block >= 0} for blocks in chosen]
    back = [max(0, t - (b * select_len + select_len - 1)) for t, blocks in enumerate(sets) for b in blocks]
    shared = [len(now & before) / len(now) for before, now in pairwise(sets) if now]
    free = Counter(
        b for t, blocks in enumerate(sets) for b in blocks if b not in (0, t // select_len, t // select_len - 1)
    )
    bits = -sum(count / free.total() * math.log2(count / free.total()) for count in free.values())
    assert row.distance_mean == (pytest.approx(sum(back) / len(back)) if back else None)
    assert row.distance_max == (max(back) if back else None)
    assert row.overlap == (pytest.approx(sum(shared) / len(shared)) if shared else None)
    assert row.entropy_bits == (pytest.approx(bits, abs=1e-12) if free else None)


# Gates.


def test_a_closed_gate_shows_in_the_table() -> None:
    gates = torch.cat([torch.full((1, 8), 0.001), torch.full((1, 8), 0.5), torch.full((1, 8), 0.999)])
    closed, half, opened = gate_rows("0", gates, ["cmp", "sel", "win"])
    assert (closed.branch, closed.saturated_share, closed.shut_share, closed.open_share) == ("cmp", 1.0, 1.0, 0.0)
    assert (half.branch, half.saturated_share, half.deviation) == ("sel", 0.0, 0.0)
    assert (opened.shut_share, opened.open_share) == (0.0, 1.0)
    assert [row.collapsed for row in (closed, half, opened)] == [True, False, False]


def test_a_gate_that_a_few_tokens_open_has_not_collapsed() -> None:
    gates = torch.full((1, 100), 0.001)
    gates[0, :2] = 0.02
    (row,) = gate_rows("0", gates, ["cmp"])
    assert (row.shut_share, row.collapsed) == (pytest.approx(0.98), False)


def test_an_observer_leaves_no_hook_behind(model: TinyLM) -> None:
    observer = Observer(model)
    observer.watch()
    backward(model)
    observer.release()
    assert [row.layer for row in observer.selections()] == ["0", "1"]
    assert [(row.layer, row.branch) for row in observer.gates()][:3] == [("0", "cmp"), ("0", "sel"), ("0", "win")]
    assert observer.activation_dtypes()["blocks.0.attn.sel"] is torch.float32
    assert "blocks.0.attn.sel.chooser" not in observer.activation_dtypes()  # whole numbers
    watched = [module for module in model.modules() if isinstance(module, BlockSelector | GateMLP | nn.Linear)]
    assert all(not module._forward_hooks for module in watched)


def test_packed_documents_are_sampled_each_by_itself(model: TinyLM) -> None:
    """Two documents in a row count as the same two in rows of their own: blocks, distances, overlap, entropy."""
    tokens = torch.randint(256, (2, 64))
    rows = []
    for lengths in (None, (64, 64)):
        observer = Observer(model)
        observer.watch(dtypes=False)
        model(tokens) if lengths is None else model(tokens, lengths)
        observer.release()
        rows.append(observer.selections())
    assert rows[0] == rows[1]
    assert rows[0][0].blocks == 2


# Files.


@pytest.fixture
def telemetry(model: TinyLM, tmp_path: Path) -> Iterator[Telemetry]:
    result = Telemetry(tmp_path, ALONE, model, mem_dump_every=2, steps=2)
    yield result
    result.close()


def test_tables_are_on_disk_before_the_run_ends(telemetry: Telemetry, model: TinyLM, tmp_path: Path) -> None:
    for step in (1, 2):
        telemetry.begin(step)
        backward(model)
        parts = StepParts(fetch_s=0.25, forward_s=0.1)
        result = StepResult(
            step=step, phase="step", tokens=64, seconds=0.5, loss=2.0, mean_loss=2.5, grad_norm=1.0, parts=parts
        )
        telemetry.end(result)
    training = rows(tmp_path / "training.csv")
    expected = [("1", "2.5", "128", "0.1", "0.25"), ("2", "2.5", "128", "0.1", "0.25")]
    columns = ("step", "loss", "tokens_per_s", "forward_s", "fetch_s")
    assert [tuple(row[name] for name in columns) for row in training] == expected
    assert int(training[0]["peak_rss_bytes"]) > 10**7
    assert [(row["step"], row["layer"]) for row in rows(tmp_path / "k_stats.csv")] == [("1", "0"), ("1", "1")]
    gates = rows(tmp_path / "gate_health.csv")
    assert (len(gates), {row["collapsed"] for row in gates}) == (6, {"0"})
    counters = {row["part"]: row for row in rows(tmp_path / "fallback_counters.csv")}
    assert set(counters) == {"cmp", "chooser", "sel", "win", "gate_mlp"}
    assert {row["implementation"] for part, row in counters.items() if part in ("cmp", "sel", "win")} == {"fused_cpu"}
    assert {counters[part]["implementation"] for part in ("chooser", "gate_mlp")} == {"eager"}
    assert {row["count"] for row in counters.values()} == {"2"}  # two layers, as of the sampled step
    told = beats(tmp_path)
    assert [(beat["step"], beat["phase"], beat["loss"]) for beat in told] == [
        (0, "start", None),
        (1, "step", 2.0),
        (2, "step", 2.0),
    ]
    assert [(beat["grad_norm"], beat["fetch_s"]) for beat in told] == [(None, None), (1.0, 0.25), (1.0, 0.25)]
    names = [f"mem_rank0_step{step}.{ending}" for step in (0, 2) for ending in ("json", "txt")]
    assert sorted(path.name for path in tmp_path.glob("mem_*")) == names


def test_the_heartbeat_has_the_mean_gate_of_each_branch_as_last_sampled(
    telemetry: Telemetry, model: TinyLM, tmp_path: Path
) -> None:
    for step in (1, 2):
        telemetry.begin(step)
        backward(model)
        telemetry.end(StepResult(step=step, phase="step", tokens=64, seconds=0.5))
    before, sampled, after = (beat["gates"] for beat in beats(tmp_path))
    of_table = {
        branch: [float(row["mean"]) for row in rows(tmp_path / "gate_health.csv") if row["branch"] == branch]
        for branch in ("cmp", "sel", "win")
    }
    assert before is None
    assert sampled == after == {name: pytest.approx(sum(all_) / 2, rel=1e-4) for name, all_ in of_table.items()}


def test_only_the_first_rank_writes_the_common_tables(model: TinyLM, tmp_path: Path) -> None:
    second = replace(ALONE, rank=1)
    telemetry = Telemetry(tmp_path, second, model, mem_dump_every=0, steps=1)
    telemetry.begin(1)
    telemetry.end(StepResult(step=1, phase="step", tokens=1, seconds=1.0))
    telemetry.close()
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat_rank1.jsonl"]


def test_a_sharded_run_has_the_names_of_the_reports(model: TinyLM, tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, ALONE, model, mem_dump_every=1, steps=1, sharded=True)
    telemetry.begin(1)
    backward(model)
    telemetry.end(StepResult(step=1, phase="step", tokens=1, seconds=1.0))
    telemetry.audit_dtypes(torch.optim.AdamW(model.parameters()), PLAIN)
    telemetry.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dtypes_report_fsdp.txt",
        "fallback_counters_fsdp.csv",
        "gate_health.csv",
        "heartbeat_rank0.jsonl",
        "k_stats_fsdp.csv",
        "mem_fsdp_rank0_step0.json",
        "mem_fsdp_rank0_step0.txt",
        "mem_fsdp_rank0_step1.json",
        "mem_fsdp_rank0_step1.txt",
        "step_cost.csv",
        "training.csv",
    ]
    assert [beat["backend"] for beat in beats(tmp_path)] == ["FSDP", "FSDP"]


def test_two_sharded_ranks_write_what_one_process_does(two_ranks: Program, tmp_path: Path) -> None:
    done = two_ranks("--wrapper", "fsdp", "--dtype", "bfloat16", "--layers", "1", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert tuple(rows(tmp_path / "out" / "k_stats_fsdp.csv")[0]) == TABLES["k_stats.csv"]
    said = [beats(tmp_path / "out", rank)[-1] for rank in (0, 1)]
    assert [(beat["backend"], beat["process_group"], beat["rank"]) for beat in said] == [
        ("FSDP", "gloo", 0),
        ("FSDP", "gloo", 1),
    ]
    assert all(beat["fetch_s"] > 0 and beat["grad_norm"] > 0 for beat in said)
    report = (tmp_path / "out" / "dtypes_report_fsdp.txt").read_text(encoding="utf-8")
    assert "activation torch.bfloat16 blocks.0.attn\n" in report
    assert report.endswith("surprises 0\n")


def test_without_telemetry_nothing_is_written(alone: Alone, tmp_path: Path) -> None:
    status, said, _ = alone("--layers", "1", "--telemetry", "off")
    assert (status, list((tmp_path / "out").iterdir())) == (0, [])
    assert said.splitlines()[-1].startswith("step 1 loss 5.5")


def test_what_is_part_of_telemetry_needs_it(alone: Alone) -> None:
    status, _, error = alone("--telemetry", "off", "--mem-dump-every", "1", "--tensorboard")
    left_out = "has no effect with --telemetry off; remove one of the two options"
    names = ("--mem-dump-every", "--tensorboard")
    assert (status, error) == (2, "".join(f"nsa.train: error: {name}: {left_out}\n" for name in names))


# TensorBoard.


def test_tensorboard_that_is_not_installed_is_one_error(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    status, _, error = alone("--layers", "1", "--tensorboard")
    assert status == 2
    assert error.startswith("nsa.train: error: --tensorboard: ")
    assert error.endswith("; install the extra nsa-harness[tensorboard], or omit the option\n")
    assert error.count("\n") == 1


class FakeWriter:
    written: list[tuple[str, float, int]]
    closed = False

    def __init__(self, directory: str) -> None:
        self.directory, self.written = directory, []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_the_numbers_of_the_tables(
    model: TinyLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeWriter] = []

    def writer() -> Callable[[str], FakeWriter]:
        return lambda directory: made.append(FakeWriter(directory)) or made[-1]  # type: ignore[func-returns-value]

    monkeypatch.setattr("nsa_attention.telemetry._event_writer", writer)
    telemetry = Telemetry(tmp_path, ALONE, model, 0, steps=1, tensorboard=True)
    telemetry.begin(1)
    backward(model)
    telemetry.end(
        StepResult(step=1, phase="step", tokens=8, seconds=2.0, mean_loss=5.5, grad_norm=0.5, parts=StepParts())
    )
    telemetry.close()
    (one,) = made
    numbers = {name: value for name, value, _ in one.written}
    assert one.directory == str(tmp_path / "tensorboard")
    assert {"gates/cmp", "gates/sel", "gates/win", "memory/rss_bytes"} < set(numbers)
    assert (numbers["train/loss"], numbers["train/grad_norm"], numbers["speed/tokens_per_s"]) == (5.5, 0.5, 4.0)
    assert {step for _, _, step in one.written} == {1}
    assert one.closed


def test_tensorboard_reads_its_event_files(alone: Alone, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert alone("--layers", "1", "--steps", "2", "--tensorboard")[0] == 0
    events = reader.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    losses = [(one.step, one.value) for one in events.Scalars("train/loss")]
    table = [(int(row["step"]), float(row["loss"])) for row in rows(tmp_path / "out" / "training.csv")]
    assert losses == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in table]


# dtypes.


def test_the_dtype_audit_counts_what_is_there(telemetry: Telemetry, model: TinyLM, tmp_path: Path) -> None:
    freeze(model, "blocks.0.mlp.*")
    model.blocks[1].mlp.double()
    telemetry.begin(1)
    optimizer = torch.optim.AdamW([model.norm.weight])
    model.norm.weight.grad = torch.zeros_like(model.norm.weight)
    optimizer.step()
    telemetry.audit_dtypes(optimizer, PLAIN)
    report = (tmp_path / "dtypes_report.txt").read_text(encoding="utf-8").splitlines()
    assert report[:2] == ["parameters torch.float32 53", "parameters torch.float64 3"]
    assert "gradients torch.float32 1" in report
    assert "optimizer torch.float32 3" in report
    assert [line for line in report if line.startswith("optimizer_state ")] == [
        f"optimizer_state torch.float32 {name} 1" for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert report[-4:] == [
        *(
            f"surprise parameter torch.float64 blocks.1.mlp.{name}.weight expected torch.float32"
            for name in ("gate", "up", "down")
        ),
        "surprises 3",
    ]


@pytest.mark.parametrize("autocast", [True, False])
def test_a_float32_leak_in_a_bfloat16_model_is_named_by_its_module(model: TinyLM, autocast: bool) -> None:
    """One layer leaves autocast, as a custom operation that casts to float32 does; its norms may be in float32."""
    activations = {"blocks.0.mlp.up": torch.float32, "blocks.0.mlp_norm": torch.float32, "head": torch.bfloat16}
    expected = expected_dtypes(torch.bfloat16, autocast=autocast)
    found = list(unexpected_dtypes(model, torch.optim.AdamW(model.parameters()), activations, expected))
    leak = "surprise activation torch.float32 {} expected torch.bfloat16".format
    assert found == [leak("blocks.0.mlp.up"), *([] if autocast else [leak("blocks.0.mlp_norm")])]


def test_gradients_and_moments_in_another_dtype_than_their_parameter_are_named(model: TinyLM) -> None:
    optimizer = torch.optim.AdamW([model.norm.weight])
    model.norm.weight.grad = torch.zeros_like(model.norm.weight)
    optimizer.step()
    state = optimizer.state[model.norm.weight]
    state["exp_avg"], state["step"] = state["exp_avg"].bfloat16(), state["step"].double()
    model.head.weight.data = model.head.weight.data.bfloat16()
    assert list(unexpected_dtypes(model, optimizer, {}, PLAIN)) == [
        "surprise parameter torch.bfloat16 embed.weight expected torch.float32",
        "surprise optimizer torch.float64 norm.weight step expected torch.float32",
        "surprise optimizer torch.bfloat16 norm.weight exp_avg expected torch.float32",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_healthy_run_has_no_surprise_in_any_dtype(alone: Alone, tmp_path: Path, dtype: str) -> None:
    assert alone("--layers", "1", "--batch", "1", "--dtype", dtype)[0] == 0
    report = (tmp_path / "out" / "dtypes_report.txt").read_text(encoding="utf-8")
    assert report.endswith("surprises 0\n")
    assert f"activation torch.{dtype} blocks.0.mlp.up\n" in report


# Memory.


def test_a_memory_dump_names_the_largest_tensors() -> None:
    kept = torch.zeros(1234, 567)
    dump = memory_dump(torch.device("cpu"), step=3, rank=1)
    assert f"{kept.numel() * 4} 1 (1234, 567) torch.float32 cpu" in dump.text()
    record = json.loads(json.dumps(dump.record()))
    shapes = {one["tensor"]: (one["bytes"], one["count"]) for one in record["largest"]}
    assert shapes["(1234, 567) torch.float32 cpu"] == (kept.numel() * 4, 1)
    assert (record["step"], record["rank"], record["allocated_bytes"], record["allocator"]) == (3, 1, None, {})
    assert 0 < rss_bytes() <= peak_rss_bytes() * 1.01


class FakeAllocator:
    """As much of torch.cuda.memory as a snapshot takes."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.asked.append(("record", enabled, max_entries))

    def _dump_snapshot(self, path: str) -> None:
        Path(path).write_bytes(b"snapshot")


def test_the_history_of_the_allocator_is_kept_from_the_start_and_dumped(tmp_path: Path) -> None:
    fake = FakeAllocator()
    history = AllocatorHistory(torch.device("cuda"), fake)
    history.dump(tmp_path / "snapshot.pickle")
    history.close()
    assert fake.asked == [("record", "all", 100_000), ("record", None, 0)]
    assert (tmp_path / "snapshot.pickle").read_bytes() == b"snapshot"


def test_a_cpu_has_no_allocator_to_look_into(alone: Alone) -> None:
    status, _, error = alone("--layers", "1", "--mem-snapshot")
    assert (status, error) == (
        2,
        "nsa.train: error: --mem-snapshot: the snapshot records the CUDA allocator, but the device is cpu; omit the "
        "option, or use --mem-dump-every, which works on a CPU too\n",
    )


def test_a_snapshot_lies_beside_each_dump_and_at_the_end(
    model: TinyLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AllocatorHistory(torch.device("cuda"), FakeAllocator())
    monkeypatch.setattr("nsa_attention.telemetry.AllocatorHistory", lambda _: made)
    telemetry = Telemetry(tmp_path, ALONE, model, mem_dump_every=2, steps=3, mem_snapshot=True)
    for step in (1, 2, 3):
        telemetry.end(StepResult(step=step, phase="step", tokens=1, seconds=1.0))
    telemetry.close()
    names = [f"mem_snapshot_rank0_step{step}.pickle" for step in (0, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("mem_snapshot*")) == names


@pytest.mark.gpu
def test_a_real_snapshot_has_the_lines_that_allocated(program: Program, tmp_path: Path) -> None:
    done = program("--layers", "1", "--steps", "2", "--device", "cuda", "--mem-snapshot", "--mem-dump-every", "1")
    assert done.returncode == 0, done.stderr
    (tmp_path / "read.py").write_text(
        "import pickle, sys\nfound = pickle.load(open(sys.argv[1], 'rb'))\n"
        "names = {f['filename'] for s in found['segments'] for b in s['blocks'] for f in b.get('frames', ())}\n"
        "print(any(name.endswith('attention.py') for name in names))\n"
    )
    snapshot = tmp_path / "out" / "mem_snapshot_rank0_step2.pickle"
    read = subprocess.run([sys.executable, tmp_path / "read.py", snapshot], capture_output=True, text=True, check=True)
    assert read.stdout == "True\n"
    last = beats(tmp_path / "out")[-1]
    assert last["reserved_bytes"] >= last["allocated_bytes"] > 0
