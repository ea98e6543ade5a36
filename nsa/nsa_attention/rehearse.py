"""What a long run will meet, on purpose: killed ranks, damaged checkpoints, another number of ranks.

`python -m nsa_attention.rehearse killed -- --shape ci --wrapper ddp` trains once without a break and once with it, and
says how far apart the two end. Exit status: 0 as far as they may be, 1 further, 2 it could not be rehearsed.
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

# What torchrun tells a rank of itself; a stage that starts ranks of its own must not take it for its own.
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NSA_OUT_DIR")
LAUNCH_LOG = "launch.log"
_LOSS_APART = 1e-4
_WEIGHTS_APART = {1: 0.0, 2: 0.0}  # by ranks: more than two add up in an order that DDP's buckets decide
_MORE_RANKS_APART = 1e-6


class Kind(StrEnum):
    KILLED = "killed"  # a rank, by SIGKILL, in steps that are drawn; the same command goes on
    DAMAGED = "damaged"  # a bit of the newest checkpoint, and the one before it cut short
    OTHER_WORLD = "other_world"  # half of the ranks with twice the micro-batches, and back again


OPTIONS = (
    Option(name="ranks", parse=whole(1), default=2, about="ranks (default: 2)"),
    Option(name="steps", parse=whole(4), default=12, about="steps of the whole run (default: 12)"),
    Option(name="every", parse=whole(1), default=2, about="steps between checkpoints (default: 2)"),
    Option(name="kills", parse=whole(1), default=1, about="ranks to kill, one after another (default: 1)"),
    Option(name="seed", parse=whole(0), default=0, about="decides when which rank is killed (default: 0)"),
    Option(name="out_dir", parse=Path, default=None, about="where the runs go (default: NSA_OUT_DIR, or out)"),
)


class FailedStageError(Exception):
    """A stage that should have ended well did not."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One command, checked."""

    kind: Kind
    ranks: int
    steps: int
    every: int
    kills: int
    seed: int
    out_dir: Path
    options: tuple[str, ...]  # of nsa.train

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
    """The same command again and again, as a scheduler gives it, until it comes to its end."""
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
    told = [line for line in said if " is damaged: " in line or "goes on from" in line or "from step 1" in line]
    for line in told:
        say(f"rehearse: {line}")
    if [f"{one} is damaged: " in line for one, line in zip((newest, before), told, strict=False)] != [True, True]:
        raise FailedStageError(f"{newest} and {before} were damaged, and it was not said of both of them")


def _other_world(rehearsal: Rehearsal) -> None:
    """The same sequences make up each step, so that the runs can be compared."""
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
    """One launch of nsa.train; what it said. `kill`: a rank, and the step behind which it is killed."""
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
    # What torchrun says of a rank that was killed is meant, and whoever reads our own output must not take it for ours.
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
    """How far apart the two runs are, for people and for `expect.metrics`."""
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
    """By step; of a step that stands there twice the key is the negative one as well."""
    found: dict[int, float] = {}
    with (directory / "training.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = int(row["step"])
            found[-step if step in found else step] = float(row["loss"])
    return found


def _read(arguments: Sequence[str], environment: Mapping[str, str]) -> Rehearsal:
    """Raises SettingsError with every mistake of the command. Usage and help are argparse's."""
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
