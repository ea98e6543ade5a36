"""The command that tests resuming by comparing an interrupted training run with an uninterrupted one.

`python -m nsa_attention.rehearse killed -- --shape ci --wrapper ddp` trains once without and once with interruptions,
and prints how much the two runs differ. Other tests damage checkpoints or change the number of ranks. The exit code is
0 if the difference is within the limit, 1 if it is larger, and 2 if the test could not be done.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .checkpoints.folder import FOLDER, checkpoints_in
from .checkpoints.load import read_weights
from .observe import say
from .options import Option, SettingsError, add_options, parse_values
from .values import one_of, whole

# Prefixes of environment variables that torchrun sets for a rank. They are removed when this program starts torchrun.
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NSA_OUT_DIR")
LAUNCH_LOG = "launch.log"
_MAX_LOSS_DIFFERENCE = 1e-4
_MAX_WEIGHT_DIFFERENCE = {1: 0.0, 2: 0.0}  # key: ranks; with more than two, DDP's buckets affect rounding
_MAX_WEIGHT_DIFFERENCE_MORE_RANKS = 1e-6


class RehearsalKind(StrEnum):
    KILLED = "killed"  # send SIGKILL to a rank after random steps, then run the same command again
    DAMAGED = "damaged"  # flip a bit in the latest checkpoint, and truncate the checkpoint before it
    OTHER_WORLD = "other_world"  # resume with half of the ranks and twice the micro-batches, then with all ranks


OPTIONS = (
    Option(name="ranks", parse=whole(1), default=2, about="number of ranks (default: 2)"),
    Option(name="steps", parse=whole(4), default=12, about="number of training steps (default: 12)"),
    Option(name="every", parse=whole(1), default=2, about="steps between checkpoints (default: 2)"),
    Option(name="kills", parse=whole(1), default=1, about="number of times to kill a rank (default: 1)"),
    Option(name="seed", parse=whole(0), default=0, about="seed for the choice of ranks and steps to kill (default: 0)"),
    Option(
        name="out_dir", parse=Path, default=None, about="output directory of the runs (default: NSA_OUT_DIR, or out)"
    ),
)


class FailedStageError(Exception):
    """Raised if one of the test's training runs did not end as expected."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The validated arguments of the command `nsa.rehearse`."""

    kind: RehearsalKind
    ranks: int
    steps: int
    every: int
    kills: int
    seed: int
    out_dir: Path
    options: tuple[str, ...]  # options that are passed to nsa.train

    @property
    def uninterrupted(self) -> Path:
        return self.out_dir / "whole"

    @property
    def interrupted(self) -> Path:
        return self.out_dir / "broken"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test of resuming, and return its exit code.

    The code is 0 if the difference is within the limit, 1 if it is larger, and 2 if the test could not be done.
    """
    try:
        rehearsal = _read_request(sys.argv[1:] if arguments is None else arguments, os.environ)
        _train(rehearsal, rehearsal.uninterrupted, rehearsal.steps)
        rehearse = {
            RehearsalKind.KILLED: _rehearse_kills,
            RehearsalKind.DAMAGED: _rehearse_damage,
            RehearsalKind.OTHER_WORLD: _rehearse_other_world,
        }
        rehearse[rehearsal.kind](rehearsal)
    except (SettingsError, FailedStageError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.rehearse: error: {line}\n")
        return 2
    return _compare_runs(rehearsal)


def _rehearse_kills(rehearsal: Rehearsal) -> None:
    """Run the same training command repeatedly, killing a random rank in every run except the last.

    Raises FailedStageError if a run has not saved its latest checkpoint before the kill.
    """
    draw = random.Random(rehearsal.seed)
    for step in sorted(draw.sample(range(1, rehearsal.steps - 1), rehearsal.kills)):
        rank = draw.randrange(rehearsal.ranks)
        _train(rehearsal, rehearsal.interrupted, rehearsal.steps, kill=(rank, step))
        checkpoints = [path.name for path in checkpoints_in(rehearsal.interrupted / FOLDER)]
        say(f"rehearse: rank {rank} killed after step {step}; checkpoints {', '.join(checkpoints) or 'none'}")
        newest = int(checkpoints[0].removeprefix("step-")) if checkpoints else 0
        if newest < step - rehearsal.every:
            raise FailedStageError(
                f"rank {rank} was killed after step {step}, but the latest checkpoint is of step {newest}"
            )
    _train(rehearsal, rehearsal.interrupted, rehearsal.steps)


def _rehearse_damage(rehearsal: Rehearsal) -> None:
    _train(rehearsal, rehearsal.interrupted, rehearsal.steps - 1)
    newest, before, *_ = checkpoints_in(rehearsal.interrupted / FOLDER)
    for checkpoint, damage in ((newest, _flip), (before, _cut)):
        damage(max(checkpoint.iterdir(), key=lambda path: path.stat().st_size))
    output = _train(rehearsal, rehearsal.interrupted, rehearsal.steps)
    messages = [line for line in output if " is damaged: " in line or "resuming from" in line or "from step 1" in line]
    for line in messages:
        say(f"rehearse: {line}")
    reports = zip((newest, before), messages, strict=False)
    if [f"{checkpoint} is damaged: " in line for checkpoint, line in reports] != [True, True]:
        raise FailedStageError(f"{newest} and {before} were damaged, but the run did not report both")


def _rehearse_other_world(rehearsal: Rehearsal) -> None:
    """Train a third of the steps with all ranks, a third with half of them, and the rest with all ranks again."""
    # The number of micro-batches is adapted, so each step uses the same sequences and the runs can be compared.
    if rehearsal.ranks % 2:
        raise FailedStageError(f"other_world: needs an even number of ranks, got {rehearsal.ranks}")
    third = rehearsal.steps // 3
    for ranks, accumulate, steps in (
        (rehearsal.ranks, 1, third),
        (rehearsal.ranks // 2, 2, 2 * third),
        (rehearsal.ranks, 1, rehearsal.steps),
    ):
        _train(rehearsal, rehearsal.interrupted, steps, ranks=ranks, accumulate=accumulate, every=1)
        say(f"rehearse: {ranks} ranks with {accumulate} micro-batches until step {steps}")


def _train(
    rehearsal: Rehearsal,
    directory: Path,
    steps: int,
    *,
    ranks: int | None = None,
    accumulate: int = 1,
    every: int | None = None,
    kill: tuple[int, int] | None = None,
) -> list[str]:
    """Launch nsa.train with torchrun, and return the lines that it printed.

    `steps` is the number of the last step, and `every` the number of steps between checkpoints. `kill` is a rank and
    the step after which this rank is killed. Raises FailedStageError if the run fails without `kill`, or succeeds
    despite it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = {
        "--steps": steps,
        "--checkpoint-every": every or rehearsal.every,
        "--accumulate": accumulate,
        "--resume": "auto",
        "--out-dir": directory,
    }
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks or rehearsal.ranks}"]
    arguments = [str(word) for pair in options.items() for word in pair]
    output = []
    # torchrun reports the killed rank as an error. This is expected, so its output goes to a separate file.
    with (
        (directory / LAUNCH_LOG).open("a") as errors,
        subprocess.Popen(
            [sys.executable, *launch, str(Path(__file__).parent), *rehearsal.options, *arguments],
            env={name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_VARIABLES)}
            | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip("\n"))
            if kill is not None and line.startswith(f"step {kill[1]} "):
                _kill(directory, kill[0])
    if (process.returncode != 0) is (kill is None):
        raise FailedStageError(f"nsa.train exited with code {process.returncode}; see {directory / LAUNCH_LOG}")
    return output


def _kill(directory: Path, rank: int) -> None:
    beats = (directory / f"heartbeat_rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    with suppress(ProcessLookupError):
        os.kill(json.loads(beats[-1])["pid"], signal.SIGKILL)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _compare_runs(rehearsal: Rehearsal) -> int:
    """Print the differences between the interrupted and the uninterrupted run, and return the exit code."""
    # nsa-harness reads the printed numbers as metrics (`expect.metrics`).
    directories = (rehearsal.uninterrupted, rehearsal.interrupted)
    losses, interrupted_losses = map(_losses, directories)
    if not list(losses) == list(interrupted_losses) == list(range(1, rehearsal.steps + 1)):
        say(f"rehearse: training.csv has steps {list(interrupted_losses)}, and {list(losses)} without interruption")
        return 1
    loss_apart = max(abs(losses[step] - interrupted_losses[step]) for step in losses)
    (_, weights), (_, interrupted_weights) = map(read_weights, directories)
    weights_apart = max(float((weights[name] - interrupted_weights[name]).abs().max()) for name in weights)
    say(f"rehearse: each of {len(losses)} steps has one row; loss_apart={loss_apart} weights_apart={weights_apart}")
    if rehearsal.kind is RehearsalKind.OTHER_WORLD:
        return int(loss_apart > _MAX_LOSS_DIFFERENCE)
    return int(weights_apart > _MAX_WEIGHT_DIFFERENCE.get(rehearsal.ranks, _MAX_WEIGHT_DIFFERENCE_MORE_RANKS))


def _losses(directory: Path) -> dict[int, float]:
    """Return the loss of each step in training.csv. A repeated step has the key -step."""
    losses: dict[int, float] = {}
    with (directory / "training.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = int(row["step"])
            losses[-step if step in losses else step] = float(row["loss"])
    return losses


def _read_request(arguments: Sequence[str], environment: Mapping[str, str]) -> Rehearsal:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.rehearse",
        description="Train without and with interruptions, and print how much the results differ.",
        epilog="Options after -- are passed to nsa.train, such as --shape ci --wrapper fsdp.",
    )
    parser.add_argument("kind", help=", ".join(RehearsalKind))
    add_options(parser, OPTIONS)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    raw_values = vars(parser.parse_args(arguments[:separator]))
    mistakes: list[str] = []
    try:
        kind = one_of(RehearsalKind)(raw_values["kind"])
    except ValueError as error:
        mistakes.append(f"kind: {error}")
    values = parse_values(OPTIONS, raw_values, mistakes)
    values["out_dir"] = values["out_dir"] or Path(environment.get("NSA_OUT_DIR") or "out")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return Rehearsal(kind=kind, options=tuple(arguments[separator + 1 :]), **values)


if __name__ == "__main__":
    sys.exit(main())
