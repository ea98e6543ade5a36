"""Hangs inside a framework that runs the training: which of its functions each rank is in, and what it called last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import C10D, SITE, USER, board, call, case, diagnose, frame, mark, rank_snapshot, stack, stalled

from nsa_harness.core.evidence.evidence import Evidence, Frame, ModuleCall, StatusFile, StepForwards
from nsa_harness.core.evidence.frameworks import framework_frames, phase_frame
from nsa_harness.core.outcome.callstacks import call_stacks
from nsa_harness.core.report import Finding, Place
from nsa_harness.core.source_code.collection import program_sources
from nsa_harness.core.source_code.hooks import hooks
from nsa_harness.core.verdict.verdict import judge

FIT, BARRIER = frame(18, function="main"), frame(5356, file=C10D, function="barrier")
TRAINING_STEP = Place(file=FIT.file, line=12, function="training_step")


def inside(line: int, function: str, file: str = "lightning/loops/fit.py") -> Frame:
    return frame(line, file=f"{SITE}/{file}", function=function)


RUN, CALL_HOOK = inside(9, "FitLoop.run"), inside(30, "Trainer.call_callback_hooks")
ADVANCES = (BARRIER, inside(14, "FitLoop.advance"), RUN, FIT)
SAVES = (BARRIER, inside(9, "Checkpoint._save"), inside(7, "Checkpoint.on_train_epoch_end"), CALL_HOOK, RUN, FIT)


def hung(*stacks: tuple[Frame, ...], status_file: StatusFile | None = None) -> Evidence:
    ranks = (
        rank_snapshot(rank, stacks=(stack(*frames, tid=100 + rank),), status_file=status_file)
        for rank, frames in enumerate(stacks)
    )
    return stalled(*ranks)


def noted(seen: Evidence) -> Finding | None:
    return next((one for one in diagnose(seen, judge(seen)).findings if one.code == "framework_phase"), None)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (ADVANCES, "FitLoop.advance"),
        (SAVES, "Checkpoint.on_train_epoch_end"),
        ((BARRIER, inside(88, "Strategy.barrier"), *SAVES[1:]), "Checkpoint.on_train_epoch_end"),
        ((BARRIER, inside(88, "Strategy.barrier", "fabric/sync.py"), *ADVANCES[1:]), "FitLoop.advance"),
        ((BARRIER, RUN, FIT), None),
        ((BARRIER, frame(30, function="on_train_epoch_end"), CALL_HOOK, RUN, FIT), None),
        ((BARRIER, FIT), None),
    ],
    ids=[
        "a loop",
        "a hook",
        "below a hook",
        "of another package",
        "only dispatchers",
        "the program's own hook",
        "no framework",
    ],
)
def test_the_phase_is_the_innermost_function_of_the_framework_that_names_one(
    frames: tuple[Frame, ...], phase: str | None
) -> None:
    found = phase_frame(framework_frames(frames))
    assert (found and found.function) == phase


def test_ranks_in_different_functions_of_a_framework_are_told_with_these_functions() -> None:
    found = noted(hung(ADVANCES, SAVES))
    assert found is not None
    assert (found.facts["framework"], found.facts["called_at"]["line"]) == ("lightning", FIT.line)
    assert [(one["ranks"], one["function"], one["line"]["line"]) for one in found.facts["positions"]] == [
        ([0], "FitLoop.advance", 14),
        ([1], "Checkpoint.on_train_epoch_end", 7),
    ]
    assert found.facts["last_callbacks"] == []


@pytest.mark.parametrize("second", [ADVANCES, (BARRIER, FIT), (*SAVES[:-1], frame(19, function="main"))])
def test_nothing_is_noted_of_ranks_in_one_function_or_called_from_different_lines(second: tuple[Frame, ...]) -> None:
    assert noted(hung(ADVANCES, second)) is None


def test_a_rank_in_a_function_of_the_program_that_the_framework_called_is_told_with_it() -> None:
    own_hook = frame(30, function="Save.on_train_epoch_end")
    found = noted(hung(ADVANCES, (BARRIER, inside(40, "Strategy.barrier"), own_hook, CALL_HOOK, RUN, FIT)))
    assert found is not None
    assert [(one["ranks"], one["function"], one["line"]["line"]) for one in found.facts["positions"]] == [
        ([0], "FitLoop.advance", 14),
        ([1], "Save.on_train_epoch_end", 30),
    ]
    both = (
        (BARRIER, frame(30, function="Save.on_epoch"), RUN, FIT),
        (BARRIER, frame(40, function="Save.on_step"), RUN, FIT),
    )
    assert noted(hung(*both)) is None, "the stacks show both"


def test_of_a_decorator_that_calls_the_program_and_a_framework_inside_it_the_inner_one_counts() -> None:
    around = inside(5, "run_main", "hydra/main.py"), frame(50, function="<module>")
    found = noted(hung((*ADVANCES, *around), (*SAVES, *around)))
    assert found is not None
    assert found.facts["framework"] == "lightning"


HOOKS = """\
import lightning as L
from lightning.pytorch import Callback
from torch.nn import Module

class Net(L.LightningModule):
    def training_step(self, batch):
        return self.loss(batch)
    def loss(self, batch):
        return self.net(batch)

class Stop(Callback):
    def _reset(self):
        self.best = 0
    def on_train_batch_end(self, trainer, loss):
        if loss < self.best:
            return
        if trainer.global_rank == 1:
            trainer.should_stop = True

class Block(Module):
    def on_train_end(self):
        pass
"""


def test_the_functions_that_the_framework_may_call_are_kept_and_told_with_their_condition_on_the_rank() -> None:
    (other,) = hooks({USER: HOOKS.replace("Callback", "Hook"), "/own/b.py": "import lightning\nloss(1)"}, "torch")
    assert other.hook == "Block.on_train_end"
    kept = tuple(program_sources(hung(ADVANCES, SAVES), lambda file: HOOKS if file == USER else ""))
    assert [one.hook for one in kept if one.hook] == ["Net.training_step", "Stop.on_train_batch_end"]
    found = noted(replace(hung(ADVANCES, SAVES), sources=kept))
    assert found is not None
    assert found.facts["hooks"] == ["Net.training_step", "Stop.on_train_batch_end"]
    ((condition),) = found.facts["conditions"]
    assert (condition["function"], condition["text"]) == ("Stop.on_train_batch_end", "if trainer.global_rank == 1")
    assert HOOKS.splitlines()[condition["line"]["line"] - 1].strip() == "if trainer.global_rank == 1:"


def test_without_a_framework_no_function_counts_as_one_that_it_calls() -> None:
    kept = program_sources(hung((BARRIER, FIT), (BARRIER, FIT)), lambda file: HOOKS if file == USER else "")
    assert not any(one.hook for one in kept)


def called(**changes: Any) -> StatusFile:
    modules = {
        "modules": (ModuleCall(name="net", place=TRAINING_STEP), ModuleCall(name="net.loss", place=None)),
        "forwards": (StepForwards(step=2, is_complete=True, calls=(0, 1)),),
    }
    return board(mark(), **{**modules, **changes})


def test_the_functions_of_the_program_that_the_framework_called_last_are_told() -> None:
    hook = Place(file=FIT.file, line=31, function="on_train_batch_end")
    chain = (frame(31, function="on_train_batch_end"), FIT, frame(40, function="<module>"))
    below, before = call(2, place=hook, chain=chain), call(1, place=hook, chain=(frame(15, function="main"),))
    for status_file, function in (
        (called(), "training_step"),
        (called(calls=(before,)), "training_step"),
        (called(calls=(below,)), "on_train_batch_end"),
    ):
        found = noted(hung(ADVANCES, SAVES, status_file=status_file))
        assert found is not None
        assert [(one["ranks"], one["function"]) for one in found.facts["last_callbacks"]] == [([0, 1], function)]


def test_stacks_that_differ_only_inside_of_the_framework_are_shown_with_its_functions() -> None:
    def shown(seen: Evidence) -> list[list[str | None]]:
        context = case(seen)
        return [[place.function for place in one.frames] for one in call_stacks(seen, context.judgement, None)]

    assert shown(hung(ADVANCES, SAVES)) == [["FitLoop.advance", "main"], ["Checkpoint.on_train_epoch_end", "main"]]
    own_hook = (BARRIER, frame(30, function="Save.on_train_end"), CALL_HOOK, RUN, FIT)
    assert shown(hung(ADVANCES, own_hook)) == [["FitLoop.advance", "main"], ["Save.on_train_end", "main"]]
    assert shown(hung(ADVANCES, (*SAVES[:-1], frame(19, function="main")))) == [["main"], ["main"]]
    assert shown(hung(ADVANCES, ADVANCES)) == [["main"]]
    assert shown(hung(ADVANCES, (BARRIER, RUN, FIT))) == [["main"]]
