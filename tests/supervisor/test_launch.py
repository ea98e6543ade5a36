"""The command line of a launch, and how torchrun reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import spec

from nsa_harness.core.plan import Launcher
from nsa_harness.supervisor.launch.launcher import command_line

PROGRAMS = [("train.py", "--n=16", "--", "-m"), ("-m", "package.train", "--node", "3", "--standalone")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_torchrun_leaves_the_words_of_a_program_to_it(program: tuple[str, ...]) -> None:
    from torch.distributed.run import get_args_parser

    words = command_line(spec(program=program, ranks=3), "python", Path("attempt"))
    read = get_args_parser().parse_args(words[words.index("torch.distributed.run") + 1 :])
    module = ("-m",) if read.module else ()
    assert (*module, read.training_script, *read.training_script_args) == program
    assert (read.nproc_per_node, read.log_dir) == ("3", "attempt/logs")


def test_a_command_of_the_users_own_is_launched_as_it_is() -> None:
    assert command_line(spec(program=("make", "train"), launcher=Launcher.PLAIN), "python", None) == ["make", "train"]


def test_a_stored_spec_that_names_the_old_training_package_runs_the_present_one() -> None:
    stored = spec(program=("-m", "nsa_harness.nsa.rehearse", "nsa_harness.nsa.rehearse"))
    assert command_line(stored, "python", None)[-2:] == ["nsa_attention.rehearse", "nsa_harness.nsa.rehearse"]
