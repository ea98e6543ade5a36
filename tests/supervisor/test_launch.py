"""The command line of a launch, and how torchrun reads it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from attempts import spec

from nsa_harness.core.plan import Launcher
from nsa_harness.protocol import STATUS_FILE_SIZE
from nsa_harness.supervisor.launch import launcher
from nsa_harness.supervisor.launch.launcher import command_line, note_probe_directory, probe_directory
from nsa_harness.supervisor.storage.rundir import AttemptDir

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


@pytest.mark.parametrize(("free_bytes", "ranks"), [(64_000, 1), (8 * STATUS_FILE_SIZE, 8)])
def test_the_status_files_go_to_a_disk_if_the_shared_memory_is_too_small(
    free_bytes: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MB of shared memory unless it is told otherwise, and some have 64 kB."""
    monkeypatch.setattr(launcher, "_free_bytes", lambda _: free_bytes)
    directory = probe_directory("tag", ranks)
    assert directory.parent == Path(tempfile.gettempdir())
    attempt = AttemptDir(tmp_path)
    note_probe_directory(attempt, directory)
    note = json.loads(attempt.watch.read_text())
    assert note["what"] == "status files"
    assert note["why"] == (
        f"/dev/shm has only {free_bytes // 1000} kB of free space, so they were written to {directory.parent}"
    )
    monkeypatch.setattr(launcher, "_free_bytes", lambda _: 1 << 30)
    assert probe_directory("tag", ranks).parent == Path("/dev/shm")
