"""A framework runs the program's training: only its call, and no callback of the program, is on the stacks of a hang.

The framework is written into a directory that is named like one of installed packages.
"""

from __future__ import annotations

from .conftest import Workspace

FRAMEWORK = """\
import torch
import torch.distributed as dist

class Callback:
    def on_train_batch_end(self, trainer, index):
        pass

class Checkpoint(Callback):
    def on_train_end(self, trainer):
        dist.barrier()

class Trainer:
    def __init__(self, callbacks):
        self.callbacks, self.should_stop, self.rank = [*callbacks, Checkpoint()], False, dist.get_rank()
    def call_hooks(self, name, *arguments):
        for callback in self.callbacks:
            getattr(callback, name, lambda *_: None)(self, *arguments)
    def advance(self, index):
        dist.all_reduce(torch.ones(4))
        self.call_hooks("on_train_batch_end", index)
    def fit(self, batches):
        for index in range(batches):
            self.advance(index)
            if self.should_stop:
                break
        self.call_hooks("on_train_end")
"""
PROGRAM = """\
import torch.distributed as dist
from minitrainer import Callback, Trainer

class Stop(Callback):
    def on_train_batch_end(self, trainer, index):
        if trainer.rank == 1 and index == 5:
            trainer.should_stop = True

def main():
    dist.init_process_group("gloo")
    Trainer([Stop()]).fit(8)

main()
"""


def test_a_hang_inside_of_a_framework_names_its_functions_and_the_callback_that_depends_on_the_rank(
    workspace: Workspace,
) -> None:
    installed = workspace.directory / "lib" / "site-packages"
    (installed / "minitrainer").mkdir(parents=True)
    (installed / "minitrainer" / "__init__.py").write_text(FRAMEWORK)
    (workspace.directory / "train.py").write_text(PROGRAM)
    ran = workspace.harness("run", "train.py", "--ranks=2", "limits.stall_s=3", PYTHONPATH=str(installed))

    assert (ran.code, ran.outcome["verdict"]) == (124, "HANG")
    (note,) = [finding for finding in ran.outcome["findings"] if finding["code"] == "framework_phase"]
    facts = note["facts"]
    assert (facts["framework"], facts["called_at"]["line"]) == ("minitrainer", 11)
    assert [(one["ranks"], one["function"]) for one in facts["positions"]] == [
        ([0], "Trainer.advance"),
        ([1], "Checkpoint.on_train_end"),
    ]
    (condition,) = facts["conditions"]
    assert (condition["function"], condition["line"]["line"]) == ("Stop.on_train_batch_end", 6)
    shown = [stack["frames"][0]["function"] for stack in ran.outcome["detail"]["stacks"]]
    assert sorted(shown) == ["Checkpoint.on_train_end", "Trainer.advance"]
