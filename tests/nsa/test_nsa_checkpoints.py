"""Checkpoints: whole or not there, found damaged, and gone on from by any wrapper and number of ranks."""

from __future__ import annotations

import csv
import json
import pickle
import random
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Alone
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ended, fork_ranks, run_forks, wait_for
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nsa_attention import rehearse, train
from nsa_attention.checkpoints import folder as folders
from nsa_attention.checkpoints import save as saving_module
from nsa_attention.checkpoints.choose import find_checkpoint
from nsa_attention.checkpoints.folder import DamagedError, verify
from nsa_attention.checkpoints.load import _Reader, read_weights
from nsa_attention.checkpoints.rank_state import rank_file, rank_state_text, restore_rank_state
from nsa_attention.checkpoints.rows import forget_rows_after
from nsa_attention.checkpoints.save import Saver, open_saver
from nsa_attention.settings import read_settings
from nsa_attention.world import CannotRunError, World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
TINY = ("--layers", "1", "--seq-len", "32", "--data", "text")
STEPS = ("--steps", "4", "--checkpoint-every", "2")


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of it, of model and optimizer."""
    kinds = _Reader(checkpoint).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in kinds.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


def furthest(one: Path, other: Path) -> float:
    """The largest difference between two checkpoints of the same step."""
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def rows(directory: Path) -> list[tuple[int, float]]:
    with (directory / "training.csv").open(encoding="utf-8", newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


@pytest.fixture
def trained(alone: Alone, tmp_path: Path) -> Path:
    """The checkpoints of steps 2 and 4 of a run; its folder of them."""
    assert alone(*TINY, *STEPS)[0] == 0
    return tmp_path / "out" / "checkpoint"


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(alone: Alone, tmp_path: Path) -> None:
    assert alone(*TINY, *STEPS, "--out-dir", "whole")[0] == 0
    assert alone(*TINY, *STEPS[:1], "2", *STEPS[2:])[0] == 0
    status, output, _ = alone(*TINY, *STEPS, "--resume", "auto")
    assert status == 0
    assert "nsa.train resuming from out/checkpoint/step-2, written after step 2" in output.splitlines()
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    assert furthest(tmp_path / "out/checkpoint/step-4", tmp_path / "whole/checkpoint/step-4") == 0


def test_nothing_is_left_to_do_when_all_steps_are_done(alone: Alone, trained: Path) -> None:
    status, output, _ = alone(*TINY, *STEPS, "--resume", "auto")
    assert status == 0
    assert "nsa.train step 4 is finished and --steps is 4; nothing to do" in output.splitlines()
    assert len(rows(trained.parent)) == 4


@pytest.mark.parametrize("given", ["out", "out/checkpoint", "out/checkpoint/step-4"])
def test_resume_takes_a_run_a_folder_of_checkpoints_and_a_checkpoint(alone: Alone, trained: Path, given: str) -> None:
    assert trained.is_dir()
    status, output, _ = alone(*TINY, "--steps", "5", "--resume", given, "--batch", "3", "--out-dir", "more")
    assert status == 0
    lines = output.splitlines()
    assert "nsa.train resuming from out/checkpoint/step-4, written after step 4" in lines
    assert "nsa.train saved with batch 2, this run has 3" in lines
    assert [step for step, _ in rows(trained.parents[1] / "more")] == [5]


def flip(path: Path, at: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda at: flip(at / "__0_0.distcp"), "__0_0.distcp: its checksum differs from the manifest"),
    "a file cut short": (lambda at: cut(at / "__0_0.distcp"), "bytes instead of "),
    "a missing file": (lambda at: (at / ".metadata").unlink(), ".metadata: No such file or directory"),
    "a position that was edited": (lambda at: flip(at / "rank0.json"), "rank0.json: its checksum differs"),
    "no manifest": (
        lambda at: (at / "complete.json").unlink(),
        "complete.json is missing: the checkpoint was never finished",
    ),
    "an edited manifest": (lambda at: flip(at / "complete.json", 40), "complete.json is damaged"),
    "a manifest cut short": (lambda at: cut(at / "complete.json"), "complete.json is damaged"),
    "another manifest": (
        lambda at: shutil.copy(at.with_name("step-2") / "complete.json", at),
        "complete.json belongs to step 2",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_taken_and_said(alone: Alone, trained: Path, kind: str) -> None:
    harm, what = DAMAGE[kind]
    harm(trained / "step-4")
    status, output, _ = alone(*TINY, *STEPS, "--resume", "auto")
    assert status == 0
    (damaged,) = (line for line in output.splitlines() if "is damaged" in line)
    assert damaged.startswith("nsa.train out/checkpoint/step-4 is damaged: ")
    assert what in damaged
    assert "nsa.train resuming from out/checkpoint/step-2, written after step 2" in output.splitlines()
    assert "renamed to step-4.set-aside" in output
    assert [step for step, _ in rows(trained.parent)] == [1, 2, 3, 4]
    assert verify(trained / "step-4").step == 4


@settings(deadline=None)
@given(data=st.data())
def test_no_bit_of_a_checkpoint_changes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("sealed")
    aside = folders.writing_path(directory, 3)
    folders.create_empty(aside)
    for name, content in (("a", b"some content"), ("b", b"")):
        (aside / name).write_bytes(content)
    files = {path.name: folders.digest_of(path) for path in aside.iterdir()}
    manifest = folders.Manifest(step=3, world_size=1, dimensions={"dim": "8"}, settings={}, scaler={}, files=files)
    whole = folders.finish(aside, manifest)
    assert verify(whole) == manifest
    path = whole / data.draw(st.sampled_from(["a", "complete.json"]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    # White space around JSON values says nothing.
    if path.name == "complete.json" and {chr(changed), chr(content[place])} <= set(" \n\t\r"):
        return
    content[place] = changed
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        verify(whole)


def test_a_checkpoint_of_a_newer_format_is_no_damaged_one_and_none_before_it_is_taken(
    alone: Alone, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = folders.manifest_of(trained / "step-4")
    aside = (trained / "step-4").rename(folders.writing_path(trained, 4))
    with monkeypatch.context() as newer:
        newer.setattr(folders, "_FORMAT", 2)
        folders.finish(aside, manifest)
    what = "out/checkpoint/step-4 has format 2, and this version reads format 1; use a newer version\n"
    for resume in ("auto", "out", "out/checkpoint/step-4"):
        status, _, error = alone(*TINY, *STEPS, "--resume", resume)
        assert (status, error) == (2, f"nsa.train: error: --resume {resume}: {what}")
    with pytest.raises(CannotRunError, match="has format 2, and this version reads format 1"):
        read_weights(trained)
    cut(trained / "step-2" / "__0_0.distcp")  # a damaged one that was named
    status, _, error = alone(*TINY, *STEPS, "--resume", "out/checkpoint/step-2")
    assert (status, error.count("step-2 is damaged: ")) == (2, 1)


def test_no_whole_checkpoint_is_one_clear_error_and_nothing_is_written(alone: Alone, trained: Path) -> None:
    for step in ("step-2", "step-4"):
        cut(trained / step / "__0_0.distcp")
    before = sorted(trained.parent.rglob("*"))
    status, output, error = alone(*TINY, *STEPS, "--resume", "auto")
    assert (status, output) == (2, "")
    first, *each = error.splitlines()
    assert first == "nsa.train: error: --resume auto: out/checkpoint: none of 2 checkpoints is undamaged"
    assert [line.split(" is damaged: ")[0].rsplit("/")[-1] for line in each] == ["step-4", "step-2"]
    assert sorted(trained.parent.rglob("*")) == before


def test_a_damaged_one_that_was_named_is_not_replaced_by_another(alone: Alone, trained: Path) -> None:
    (trained / "step-4" / ".metadata").unlink()
    status, _, error = alone(*TINY, *STEPS, "--resume", "out/checkpoint/step-4")
    assert status == 2
    assert error == (
        "nsa.train: error: --resume out/checkpoint/step-4: out/checkpoint/step-4 is damaged: .metadata: No such file "
        "or directory; out/checkpoint/step-2 is undamaged\n"
    )


def test_auto_begins_at_the_beginning_where_no_checkpoint_is_and_a_folder_without_one_is_an_error(
    alone: Alone, tmp_path: Path
) -> None:
    (tmp_path / "out/checkpoint/step-2.writing").mkdir(parents=True)
    (tmp_path / "out/training.csv").write_text("step,loss\n1,5.5\n2,5.")
    status, output, _ = alone(*TINY, "--steps", "1", "--resume", "auto")
    assert status == 0
    assert (
        "nsa.train --resume auto: out/checkpoint contains no checkpoint; out/checkpoint/step-2.writing was never "
        "finished; starting from step 1"
    ) in output.splitlines()
    assert [step for step, _ in rows(tmp_path / "out")] == [1]
    status, _, error = alone(*TINY, "--resume", "out")
    assert status == 2
    assert error.startswith("nsa.train: error: --resume out: out/checkpoint contains no checkpoint")


def test_a_checkpoint_of_another_shape_is_an_error(alone: Alone, trained: Path) -> None:
    status, _, error = alone("--layers", "2", "--resume", "auto")
    assert status == 2
    assert error == "nsa.train: error: --resume out/checkpoint/step-4: saved with layers 1, this run has 2\n"
    assert trained.is_dir()


def test_parameters_that_were_frozen_when_it_was_saved_have_no_moments_to_go_on_with(alone: Alone) -> None:
    assert alone(*TINY, *STEPS, "--freeze", "blocks.0.mlp.up.weight")[0] == 0
    status, _, error = alone(*TINY, "--steps", "5", "--resume", "auto")
    assert status == 2
    (line,) = error.splitlines()
    assert line.startswith("nsa.train: error: out/checkpoint/step-4: rank 0: Missing key in checkpoint state_dict")
    assert "blocks.0.mlp.up.weight" in line


def test_the_last_ones_are_kept_and_those_of_another_course_are_set_aside(alone: Alone, tmp_path: Path) -> None:
    steps = ("--checkpoint-every", "1", "--keep-last", "2")
    assert alone(*TINY, "--steps", "5", *steps)[0] == 0
    names = sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir())
    assert names == ["step-4", "step-5"]
    status, output, _ = alone(*TINY, "--steps", "2", *steps)
    assert status == 0
    assert output.count("is later than step 0, after which this run continues; renamed to step-") == 2
    names = sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir())
    assert names == ["step-1", "step-2", "step-4.set-aside", "step-5.set-aside"]
    status, output, _ = alone(*TINY, "--steps", "6", "--resume", "out/checkpoint/step-5.set-aside")
    assert "nsa.train resuming from out/checkpoint/step-5.set-aside, written after step 5" in output.splitlines()


class TestTheRowsOfStepsThatAreDoneAgain:
    def test_are_cut_off_with_a_torn_one(self, tmp_path: Path) -> None:
        (tmp_path / "training.csv").write_text("step,loss\n1,5\n2,4\n3,3\n4,")
        (tmp_path / "k_stats.csv").write_text("step,layer\n1,0\n1,1\n10,0\n10,1\n")
        (tmp_path / "step_cost.csv").write_text("moment,batch\nforward,2\n")
        forget_rows_after(tmp_path, 2)
        assert (tmp_path / "training.csv").read_text() == "step,loss\n1,5\n2,4\n"
        assert (tmp_path / "k_stats.csv").read_text() == "step,layer\n1,0\n1,1\n"
        assert (tmp_path / "step_cost.csv").read_text() == "moment,batch\nforward,2\n"

    @settings(deadline=None)
    @given(steps=st.integers(0, 30), torn=st.text("0123456789,.", max_size=8), kept=st.integers(0, 40))
    def test_whatever_was_torn(
        self, tmp_path_factory: pytest.TempPathFactory, steps: int, torn: str, kept: int
    ) -> None:
        directory = tmp_path_factory.mktemp("rows")
        whole = [f"{step},0.5\n" for step in range(1, steps + 1)]
        (directory / "training.csv").write_text("".join(["step,loss\n", *whole, torn]))
        forget_rows_after(directory, kept)
        assert (directory / "training.csv").read_text() == "".join(["step,loss\n", *whole[:kept]])


def test_every_generator_of_random_numbers_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / rank_file(0)).write_text(rank_state_text(ALONE, None))
    draw = lambda: (torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), np.random.randn())  # noqa: E731
    first = draw()
    assert draw() != first
    assert restore_rank_state(tmp_path, 1, ALONE, None) == []
    assert draw() == first


class Positions:
    """Data with one order for all ranks, as far as a checkpoint sees it."""

    def __init__(self, row: int) -> None:
        self.row = row

    def state_dict(self) -> Mapping[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.row = state["row"]


def world_of(size: int, rank: int) -> World:
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"), backend="gloo")


@pytest.mark.parametrize(("saved_by", "taken_by"), [(1, 1), (2, 2), (2, 1), (2, 5), (1, 3)])
def test_data_in_one_order_for_all_ranks_goes_on_with_any_number_of_them(
    tmp_path: Path, saved_by: int, taken_by: int
) -> None:
    for rank in range(saved_by):
        (tmp_path / rank_file(rank)).write_text(rank_state_text(world_of(saved_by, rank), Positions(17)))
    for rank in range(taken_by):
        data = Positions(0)
        told = restore_rank_state(tmp_path, saved_by, world_of(taken_by, rank), data)
        assert data.row == 17
        assert (told == []) == (saved_by == taken_by)


def test_data_in_an_order_of_each_rank_goes_on_with_the_same_number_of_them_only(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / rank_file(rank)).write_text(rank_state_text(world_of(2, rank), Positions(10 + rank)))
    data = Positions(0)
    restore_rank_state(tmp_path, 2, world_of(2, 1), data)
    assert data.row == 11
    with pytest.raises(CannotRunError, match="each of 2 ranks had its own position in the data, and this run has 1"):
        restore_rank_state(tmp_path, 2, world_of(1, 0), data)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.amp.GradScaler("cpu", enabled=False)


class TestACheckpointInTheBackground:
    """A gate holds up the writing, so that what goes on beside it is seen and not timed."""

    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        made = SimpleNamespace(open=threading.Event(), entered=threading.Event(), inside=0, most=0)
        real = Saver._write_tensors

        def held(saver: Saver, aside: Path, tensors: dict[str, Any]) -> None:
            made.inside += 1
            made.most = max(made.most, made.inside)
            made.entered.set()
            assert made.open.wait(60)
            made.inside -= 1
            real(saver, aside, tensors)

        monkeypatch.setattr(Saver, "_write_tensors", held)
        return made

    @pytest.fixture
    def saver(self, tmp_path: Path) -> Saver:
        return Saver(read_settings(["--async-checkpoint", "--out-dir", str(tmp_path)], {}), ALONE, done=0)

    def test_is_of_the_moment_when_it_was_asked_for(self, gate: SimpleNamespace, saver: Saver, tmp_path: Path) -> None:
        model, optimizer, scaler = model_and_optimizer()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        saver.save(1, model, optimizer, scaler, None)
        assert gate.entered.wait(60)
        assert folders.checkpoints_in(tmp_path / "checkpoint") == []
        optimizer.step()  # training goes on while the checkpoint is held up
        with torch.no_grad():
            model.weight.zero_()
        gate.open.set()
        saver.close()
        saved = tensors_of(tmp_path / "checkpoint/step-1")
        assert all(torch.equal(saved[f"model.{name}"], value) for name, value in before.items())

    def test_is_waited_for_by_the_next_one(self, gate: SimpleNamespace, saver: Saver, tmp_path: Path) -> None:
        parts = model_and_optimizer()
        saver.save(1, *parts, None)
        assert gate.entered.wait(60)
        second = threading.Thread(target=saver.save, args=(2, *parts, None))
        second.start()
        assert folders.checkpoints_in(tmp_path / "checkpoint") == []
        gate.open.set()
        second.join(60)
        saver.close()
        assert gate.most == 1
        assert [path.name for path in folders.checkpoints_in(tmp_path / "checkpoint")] == ["step-2", "step-1"]

    def test_that_could_not_be_written_is_an_error_of_the_next_one_or_of_the_end(
        self, monkeypatch: pytest.MonkeyPatch, saver: Saver
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saving_module, "finish", full)
        parts = model_and_optimizer()
        for ask in (lambda: saver.save(2, *parts, None), saver.close):
            saver.save(1, *parts, None)
            with pytest.raises(CannotRunError) as failed:
                ask()
            assert str(failed.value) == (
                "--checkpoint-every: the checkpoint of step 1: rank 0: [Errno 28] No space left on device"
            )

    def test_that_could_not_be_written_ends_the_run_at_the_next_step(
        self, alone: Alone, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        def saves(saver: Saver, *arguments: Any) -> None:
            save(saver, *arguments)
            in_flight.append(saver._in_flight)

        def steps(run: train.Run, step: int, *, is_first: bool) -> None:
            one_step(run, step, is_first=is_first)
            done.append(step)
            if step == 4:
                in_flight[0].exception(60)

        in_flight, done, save, one_step = [], [], Saver.save, train._one_step
        monkeypatch.setattr(saving_module, "finish", full)
        monkeypatch.setattr(Saver, "save", saves)
        monkeypatch.setattr(train, "_one_step", steps)
        status, _, error = alone(*TINY, "--steps", "9", "--checkpoint-every", "3", "--async-checkpoint")
        assert (status, done) == (2, [1, 2, 3, 4])
        assert "the checkpoint of step 3: rank 0: [Errno 28] No space left" in error


def test_a_full_disk_ends_the_run_in_one_line(alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.filesystem, "_write_item", full)
    status, _, error = alone(*TINY, *STEPS)
    assert status == 2
    (line,) = error.splitlines()
    assert line.startswith("nsa.train: error: --checkpoint-every: the checkpoint of step 2: rank 0: ")
    assert "No space left on device" in line
    assert list((tmp_path / "out/checkpoint").iterdir()) == []


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as if the disk were full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["__0_0.distcp", "rank0.json", "complete.json.tmp"])
def test_no_space_is_said_with_path_and_bytes_and_nothing_half_written_is_left(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Even though torch then fails with another error, `unexpected pos 704 vs 598`."""
    write_durably, save = folders.write_durably, dcp.save

    def durably(path: Path, text: str) -> None:
        with files_of_at_most(300) if path.name == name else nullcontext():
            write_durably(path, text)

    def tensors(*arguments: Any, **options: Any) -> object:
        with files_of_at_most(50_000) if name == "__0_0.distcp" else nullcontext():
            return save(*arguments, **options)

    for module in (folders, saving_module):
        monkeypatch.setattr(module, "write_durably", durably)
    monkeypatch.setattr(dcp, "save", tensors)
    status, _, error = alone(*TINY, *STEPS)
    assert status == 2
    said = re.fullmatch(
        r"nsa.train: error: --checkpoint-every: the checkpoint of step 2: rank 0: "
        r"out/checkpoint/step-2\.writing/?(.*): File too large \((\d+) bytes to write, \d+ bytes free\)\n",
        error,
    )
    assert said, error
    assert said[1] in (name, "")
    assert int(said[2]) > (50_000 if name == "__0_0.distcp" else 300)
    assert list((tmp_path / "out/checkpoint").iterdir()) == []


def test_telemetry_that_cannot_be_written_is_said_and_ends_no_training(alone: Alone, trained: Path) -> None:
    options = (
        "--steps",
        "7",
        "--resume",
        "auto",
        "--mem-dump-every",
        "1",
        "--eval-every",
        "1",
        "--eval-data",
        "synthetic",
    )
    appended = [trained.parent / name for name in ("training.csv", "heartbeat_rank0.jsonl")]
    before = [path.read_bytes() for path in appended]
    with files_of_at_most(0):
        status, output, error = alone(*TINY, *options)
    assert (status, error) == (0, "")
    assert "step 7 loss" in output
    (line,) = (line for line in output.splitlines() if "telemetry" in line)
    assert line == (
        "nsa.train telemetry: [Errno 27] File too large; rows are missing in the files, and the training goes on"
    )
    assert [path.read_bytes() for path in appended] == before


def test_an_error_of_a_step_is_not_hidden_by_one_of_the_last_checkpoint(tmp_path: Path) -> None:
    in_background = read_settings(["--async-checkpoint", "--out-dir", str(tmp_path)], {})

    def save_and_fail() -> None:
        with open_saver(in_background, ALONE, 0) as saver:
            saver.save(1, *model_and_optimizer(), None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    assert verify(tmp_path / "checkpoint/step-1").step == 1


def test_the_state_of_a_scaler_goes_on(alone: Alone, tmp_path: Path) -> None:
    half = (*TINY, "--dtype", "float16", "--checkpoint-every", "1")
    assert alone(*half, "--steps", "2")[0] == 0
    scaler = verify(tmp_path / "out/checkpoint/step-2").scaler
    assert scaler["_growth_tracker"] + 65536 / scaler["scale"] > 1  # it has counted two steps, or backed off
    assert alone(*half, "--steps", "3", "--resume", "auto")[0] == 0
    assert verify(tmp_path / "out/checkpoint/step-3").scaler["_growth_tracker"] != 1


def test_weights_are_read_from_the_newest_whole_checkpoint(trained: Path) -> None:
    cut(trained / "step-4" / "rank0.json")
    _, weights = read_weights(trained.parent)
    saved = tensors_of(trained / "step-2")
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in weights.items())
    with pytest.raises(CannotRunError, match=r"step-4 is damaged: rank0\.json: "):
        read_weights(trained / "step-4")


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a checkpoint ran code",)


def test_a_checkpoint_from_elsewhere_runs_no_code(
    alone: Alone, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "step-4"
    content = json.loads((checkpoint / "complete.json").read_text())["manifest"]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Foreign()))
    # As whoever wants to be trusted would seal it.
    files = {path.name: folders.digest_of(path) for path in checkpoint.iterdir() if path.name != "complete.json"}
    aside = checkpoint.rename(folders.writing_path(trained, 4))
    del content["format"]
    folders.finish(aside, folders.Manifest(**{**content, "files": files}))
    assert verify(checkpoint).step == 4
    with pytest.raises(CannotRunError, match=r"builtins\.print is not allowed in a checkpoint"):
        read_weights(checkpoint)
    status, output, error = alone(*TINY, *STEPS[2:], "--steps", "6", "--resume", "auto")
    assert status == 2
    assert "builtins.print is not allowed in a checkpoint" in error
    assert "ran code" not in output + capsys.readouterr().out


def killed_at(directory: Path, operation: int) -> tuple[int, int]:
    """How the program ended, and the last step of which it said that it was saved."""
    (rank,) = run_forks(1, str(SAVES), str(directory), str(operation), boards=None, cwd=directory)
    assert rank.status in (0, -signal.SIGKILL), rank
    return rank.status, sum(line.startswith("saved ") for line in rank.out.splitlines())


SAVES = Path(__file__).with_name("saves_until_killed.py")
# Making the folder, the tensors, the manifest, the two names, and what is no longer kept.
OPERATIONS = 3 * 11 + 7


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param((3, 19, 22), id="some"),
        pytest.param(range(1, OPERATIONS), id="each", marks=pytest.mark.slow),
    ],
)
def test_killed_before_whatever_it_does_to_the_disk_a_run_keeps_what_was_saved(
    tmp_path: Path, operations: Iterable[int]
) -> None:
    for operation in operations:
        directory = tmp_path / str(operation)
        directory.mkdir()
        status, saved = killed_at(directory, operation)
        assert status == -signal.SIGKILL
        if saved:
            newest, manifest, _ = find_checkpoint(directory)
            assert manifest.step in (saved, saved + 1)
            assert torch.equal(read_weights(newest)[1]["weight"].round(), torch.full((3, 4), float(manifest.step)))
        else:
            assert [path.name for path in folders.checkpoints_in(directory / "checkpoint")] in ([], ["step-1"])


def spread(directory: Path, ranks: int, *options: str) -> list[str]:
    """A run on so many ranks; what rank 0 said."""
    directory.mkdir(exist_ok=True)
    done = run_forks(
        ranks,
        str(ROOT / "nsa" / "nsa_attention"),
        *TINY,
        "--checkpoint-every",
        "2",
        *options,
        boards=None,
        cwd=directory,
    )
    assert [rank.status for rank in done] == [0] * ranks, done
    return done[0].out.splitlines()


@pytest.mark.parametrize(
    "wrapper", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "fsdp1", "manual"))]
)
def test_two_ranks_go_on_bit_for_bit_and_one_rank_within_rounding(tmp_path: Path, wrapper: str) -> None:
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    spread(whole, 2, "--wrapper", wrapper, "--steps", "4")
    shutil.copytree(whole / "out/checkpoint/step-2", tmp_path / "from/step-2")
    said = spread(resumed, 2, "--wrapper", wrapper, "--steps", "4", "--resume", "../from", "--async-checkpoint")
    assert "nsa.train resuming from ../from/step-2, written after step 2" in said
    last = "out/checkpoint/step-4"
    assert furthest(whole / last, resumed / last) == 0
    said = spread(alone, 1, "--accumulate", "2", "--steps", "4", "--resume", "../from")
    assert "nsa.train saved by 2 ranks, this run has 1: the random number generators start again from the seed" in said
    assert furthest(whole / last, alone / last) < 1e-6
    assert [loss for _, loss in rows(alone / "out")] == pytest.approx(
        [loss for _, loss in rows(whole / "out")][2:], abs=1e-4
    )


@pytest.mark.slow
def test_four_ranks_go_on_to_a_millionth_and_two_of_them_keep_the_loss(tmp_path: Path) -> None:
    whole, resumed, half = (tmp_path / name for name in ("whole", "resumed", "half"))
    spread(whole, 4, "--wrapper", "ddp", "--steps", "6")
    shutil.copytree(whole / "out/checkpoint/step-2", tmp_path / "from/step-2")
    spread(resumed, 4, "--wrapper", "ddp", "--steps", "6", "--resume", "../from")
    assert furthest(whole / "out/checkpoint/step-6", resumed / "out/checkpoint/step-6") < 1e-6
    spread(half, 2, "--wrapper", "fsdp", "--accumulate", "2", "--steps", "6", "--resume", "../from")
    losses = [loss for _, loss in rows(whole / "out")]
    assert [loss for _, loss in rows(half / "out")] == pytest.approx(losses[2:], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mark", ["step-4.writing", "step-4.writing/__1_0.distcp", "step-4.writing/.metadata", "step-4.writing/rank1.json"]
)
def test_a_run_of_two_ranks_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(
    tmp_path: Path, mark: str
) -> None:
    options = (*TINY, "--wrapper", "ddp", "--checkpoint-every", "2", "--steps", "6")
    ranks = fork_ranks(2, str(ROOT / "nsa" / "nsa_attention"), *options, boards=None, cwd=tmp_path)
    written = tmp_path / "out/checkpoint"
    # What lies there for a moment only may be gone before anybody looks: then it is whole.
    wait_for(lambda: (written / mark).exists() or (written / "step-4").exists(), mark)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        ended(rank)
    _, manifest, _ = find_checkpoint(tmp_path / "out")
    assert manifest.step >= 2
    spread(tmp_path, 2, "--wrapper", "ddp", "--steps", "6", "--resume", "auto")
    spread(tmp_path / "whole", 2, "--wrapper", "ddp", "--steps", "6")
    assert rows(tmp_path / "out") == rows(tmp_path / "whole/out")
    assert furthest(tmp_path / "out/checkpoint/step-6", tmp_path / "whole/out/checkpoint/step-6") == 0


def test_a_rehearsal_tells_all_its_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse.main(["drowned", "--ranks", "0", "--", "--shape", "ci"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        'nsa.rehearse: error: kind: expected killed, damaged or other_world, got "drowned"',
        'nsa.rehearse: error: --ranks: expected a whole number of at least 1, got "0"',
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", rehearse.RehearsalKind)
def test_a_rehearsal_ends_as_the_run_without_a_break(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    options = ("--steps", "9", "--kills", "3", "--out-dir", str(tmp_path), "--", *TINY, "--wrapper", "ddp")
    assert rehearse.main([kind, *options]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("rehearse: each of 9 steps has one row; loss_apart=0.0 ")
