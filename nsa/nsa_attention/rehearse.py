"""Tests of resuming: kill ranks, damage checkpoints, or change the number of ranks, and compare the results.

`python -m nsa_attention.rehearse killed -- --shape ci --wrapper ddp` trains once without and once with interruptions,
and prints how much the two runs differ. The exit code is 0 if the difference is within the limit, 1 if it is larger,
and 2 if the test could not be done.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .checkpoints.folder import FOLDER, checkpoints_in
from .checkpoints.load import read_weights
from .observe import say
from .settings import Option, SettingsError
from .values import one_of, whole

# Prefixes of environment variables that torchrun sets for a rank. They are removed when this program starts torchrun.
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NSA_OUT_DIR")
LAUNCH_LOG = "launch.log"
_LOSS_APART = 1e-4
_WEIGHTS_APART = {1: 0.0, 2: 0.0}  # by number of ranks; with more than two, DDP's buckets affect rounding
_MORE_RANKS_APART = 1e-6


class Kind(StrEnum):
    KILLED = "killed"  # send SIGKILL to a rank after random steps, then run the same command again
    DAMAGED = "damaged"  # flip a bit in the latest checkpoint, and truncate the checkpoint before it
    OTHER_WORLD = "other_world"  # resume with half of the ranks and twice the micro-batches, then with all ranks


OPTIONS = (
    Option(name="ranks", parse=whole(1), default=2, about="ranks (default: 2)"),
    Option(name="steps", parse=whole(4), default=12, about="steps of the whole run (default: 12)"),
    Option(name="every", parse=whole(1), default=2, about="steps between checkpoints (default: 2)"),
    Option(name="kills", parse=whole(1), default=1, about="ranks to kill, one after another (default: 1)"),
    Option(name="seed", parse=whole(0), default=0, about="decides when which rank is killed (default: 0)"),
    Option(name="out_dir", parse=Path, default=None, about="where the runs go (default: NSA_OUT_DIR, or out)"),
)


class FailedStageError(Exception):
    """A training run of the test did not end as expected."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Parsed and checked arguments of the command."""

    kind: Kind
    ranks: int
    steps: int
    every: int
    kills: int
    seed: int
    out_dir: Path
    options: tuple[str, ...]  # options that are passed to nsa.train

    @property
    def whole(self) -> Path:
        return self.out_dir / "whole"

    @property
    def broken(self) -> Path:
        return self.out_dir / "broken"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        rehearsal = _read(sys.argv[1:] if arguments is None else arguments, os.environ)
        _train(rehearsal, rehearsal.whole, rehearsal.steps)
        {Kind.KILLED: _killed, Kind.DAMAGED: _damaged, Kind.OTHER_WORLD: _other_world}[rehearsal.kind](rehearsal)
    except (SettingsError, FailedStageError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.rehearse: error: {line}\n")
        return 2
    return _compared(rehearsal)


def _killed(rehearsal: Rehearsal) -> None:
    """Repeat the same training command, as a scheduler would, and kill a random rank in each run but the last."""
    draw = random.Random(rehearsal.seed)
    for step in sorted(draw.sample(range(1, rehearsal.steps - 1), rehearsal.kills)):
        rank = draw.randrange(rehearsal.ranks)
        _train(rehearsal, rehearsal.broken, rehearsal.steps, kill=(rank, step))
        left = [path.name for path in checkpoints_in(rehearsal.broken / FOLDER)]
        say(f"rehearse: rank {rank} killed after step {step}; checkpoints {', '.join(left) or 'none'}")
        newest = int(left[0].removeprefix("step-")) if left else 0
        if newest < step - rehearsal.every:
            raise FailedStageError(
                f"rank {rank} was killed after step {step}, and the newest checkpoint is of {newest}"
            )
    _train(rehearsal, rehearsal.broken, rehearsal.steps)


def _damaged(rehearsal: Rehearsal) -> None:
    _train(rehearsal, rehearsal.broken, rehearsal.steps - 1)
    newest, before, *_ = checkpoints_in(rehearsal.broken / FOLDER)
    for checkpoint, harm in ((newest, _flip), (before, _cut)):
        harm(max(checkpoint.iterdir(), key=lambda path: path.stat().st_size))
    said = _train(rehearsal, rehearsal.broken, rehearsal.steps)
    told = [line for line in said if " is damaged: " in line or "resuming from" in line or "from step 1" in line]
    for line in told:
        say(f"rehearse: {line}")
    if [f"{one} is damaged: " in line for one, line in zip((newest, before), told, strict=False)] != [True, True]:
        raise FailedStageError(f"{newest} and {before} were damaged, and it was not said of both of them")


def _other_world(rehearsal: Rehearsal) -> None:
    """Train one third of the steps each with all ranks, with half of them, and with all ranks again.

    The number of micro-batches is adapted, so each step uses the same sequences and the runs can be compared.
    """
    if rehearsal.ranks % 2:
        raise FailedStageError(f"other_world: half of {rehearsal.ranks} ranks is no number of ranks; give an even one")
    third = rehearsal.steps // 3
    for ranks, accumulate, steps in (
        (rehearsal.ranks, 1, third),
        (rehearsal.ranks // 2, 2, 2 * third),
        (rehearsal.ranks, 1, rehearsal.steps),
    ):
        _train(rehearsal, rehearsal.broken, steps, ranks=ranks, accumulate=accumulate, every=1)
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
    """Launch nsa.train with torchrun, wait for its end, and return the lines that it printed.

    `steps` is the number of its last step, and `every` the number of steps between checkpoints. `kill` is a rank and
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
    words = [str(word) for pair in options.items() for word in pair]
    said = []
    # torchrun reports the killed rank as an error. This is expected, so its output goes to a separate file.
    with (
        (directory / LAUNCH_LOG).open("a") as errors,
        subprocess.Popen(
            [sys.executable, *launch, str(Path(__file__).parent), *rehearsal.options, *words],
            env={name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCH)}
            | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip("\n"))
            if kill is not None and line.startswith(f"step {kill[1]} "):
                _kill(directory, kill[0])
    if (process.returncode != 0) is (kill is None):
        raise FailedStageError(f"nsa.train ended with status {process.returncode}: {directory / LAUNCH_LOG}")
    return said


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


def _compared(rehearsal: Rehearsal) -> int:
    """Print how much the losses and weights of the two runs differ, and return the exit code, 0 or 1.

    nsa-harness reads the printed numbers as metrics (`expect.metrics`).
    """
    ours, theirs = (_losses(directory) for directory in (rehearsal.whole, rehearsal.broken))
    if not list(ours) == list(theirs) == list(range(1, rehearsal.steps + 1)):
        say(f"rehearse: training.csv has steps {list(theirs)}, without a break {list(ours)}")
        return 1
    loss_apart = max(abs(ours[step] - theirs[step]) for step in ours)
    (_, one), (_, other) = (read_weights(directory) for directory in (rehearsal.whole, rehearsal.broken))
    weights_apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    say(f"rehearse: each of {len(ours)} steps is there once; loss_apart={loss_apart} weights_apart={weights_apart}")
    if rehearsal.kind is Kind.OTHER_WORLD:
        return int(loss_apart > _LOSS_APART)
    return int(weights_apart > _WEIGHTS_APART.get(rehearsal.ranks, _MORE_RANKS_APART))


def _losses(directory: Path) -> dict[int, float]:
    """Return the loss of each step in training.csv. A second row of a step has the negative step as its key."""
    found: dict[int, float] = {}
    with (directory / "training.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = int(row["step"])
            found[-step if step in found else step] = float(row["loss"])
    return found


def _read(arguments: Sequence[str], environment: Mapping[str, str]) -> Rehearsal:
    """Parse the command-line arguments. NSA_OUT_DIR in `environment` is the default of --out-dir.

    Raises SettingsError with one line per wrong value. For usage errors and --help, argparse exits.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.rehearse",
        description="Train without a break and with one, and say how far apart the two runs end.",
        epilog="Behind -- come options of nsa.train, such as --shape ci --wrapper fsdp.",
    )
    parser.add_argument("kind", help=", ".join(Kind))
    for option in OPTIONS:
        parser.add_argument(option.flag, default=None, help=option.about)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given = vars(parser.parse_args(arguments[:cut]))
    values = {option.name: option.default for option in OPTIONS}
    values["out_dir"] = Path(environment.get("NSA_OUT_DIR") or "out")
    mistakes = []
    parsers: dict[str, Callable[[str], object]] = {"kind": one_of(Kind)}
    for name, parse in (parsers | {option.name: option.parse for option in OPTIONS}).items():
        try:
            if given[name] is not None:
                values[name] = parse(given[name])
        except ValueError as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return Rehearsal(options=tuple(arguments[cut + 1 :]), **values)


if __name__ == "__main__":
    sys.exit(main())
