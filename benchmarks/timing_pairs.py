"""Measure how much nsa-harness slows down a command, by running it with and without nsa-harness.

    python benchmarks/timing_pairs.py -- COMMAND...           print the overhead of nsa-harness for this command
    python benchmarks/timing_pairs.py --json -- COMMAND...    print every sample as JSON

The command runs alternately without and with nsa-harness, after a first run that warms the caches: three to seven
pairs, as many as fit into two minutes. All limits are set so high that they never apply. Other benchmarks import helper
functions from this module, so importing it does not import nsa_harness.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from nsa_harness.core.plan import RunSpec

FEWEST_PAIRS, MOST_PAIRS = 3, 7
BUDGET_S = 120.0
_RANKS = re.compile(r"--nproc[-_]per[-_]node=(\d+)")
_FAR_S = 1e6

T = TypeVar("T")


def alternate(number: int, sides: Sequence[T]) -> Sequence[T]:
    """Return `sides` in order if the measurement has an odd number, and reversed if the number is even."""
    return sides if number % 2 else sides[::-1]


def percent_more(
    statistic: Callable[[Sequence[float]], float], changed: Sequence[float], before: Sequence[float]
) -> float:
    """Return the percentage by which `statistic` of `changed` exceeds that of `before`."""
    return 100 * (statistic(changed) / statistic(before) - 1)


class HookTables:
    """PyTorch's global hooks, from which nsa-harness's own hooks can be removed and restored."""

    def __init__(self) -> None:
        from torch.nn.modules import module
        from torch.optim import optimizer

        self._tables: list[Any] = [
            module._global_forward_pre_hooks,
            module._global_forward_hooks,
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        ]
        self._entries = [dict(table) for table in self._tables]
        self.are_complete = all(self._entries)

    def turn(self, *, on: bool) -> None:
        """Install nsa-harness's hooks if `on` is true, and remove them otherwise."""
        for table, entries in zip(self._tables, self._entries, strict=True):
            table.clear()
            if on:
                table.update(entries)


@dataclass(frozen=True, kw_only=True)
class TimedPair:
    """The durations of two runs, one without and one with nsa-harness."""

    bare_s: float
    harness_s: float  # from the start until the report is written
    after_s: float  # the part after the command's end: collecting evidence, judging, writing the report

    @property
    def more_s(self) -> float:
        """Return the additional time, in seconds, of the run with nsa-harness."""
        return self.harness_s - self.bare_s


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """The measured overhead that nsa-harness adds to a command."""

    command: str
    pairs: tuple[TimedPair, ...]

    def median(self, name: str) -> float:
        """Return the median of the field `name` of `TimedPair`."""
        return statistics.median(getattr(pair, name) for pair in self.pairs)

    @property
    def more_percent(self) -> float:
        """Return the overhead of nsa-harness in percent."""
        return 100.0 * (self.median("harness_s") / self.median("bare_s") - 1)

    @property
    def is_certain(self) -> bool:
        """Whether all pairs of runs agree on whether nsa-harness makes the command slower or faster."""
        return all(pair.more_s > 0 for pair in self.pairs) or all(pair.more_s < 0 for pair in self.pairs)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report for the terminal."""
        yield f"overhead of the harness, {len(self.pairs)} pairs, in turn: {self.command}"
        yield f"  bare           {self.median('bare_s'):8.3f} s   {self._spread('bare_s')}"
        yield f"  with harness   {self.median('harness_s'):8.3f} s   {self._spread('harness_s')}"
        more_s = self.median("harness_s") - self.median("bare_s")
        yield f"  difference     {more_s:+8.3f} s   {self._spread('more_s', '+')}   {self.more_percent:+.1f} %"
        yield f"  of which       {self.median('after_s'):8.3f} s   after the command's end: evidence, verdict, report"
        if not self.is_certain:
            yield "  within the noise: the pairs disagree about which of the two is faster"

    def values(self) -> dict[str, object]:
        """Return all measurements and the medians, ready to be stored as JSON."""
        return {
            "command": self.command,
            "pairs": [vars(pair) for pair in self.pairs],
            **{f"{name}_median": self.median(name) for name in ("bare_s", "harness_s", "after_s")},
            "more_percent": self.more_percent,
            "within_noise": not self.is_certain,
        }

    def _spread(self, name: str, sign: str = "") -> str:
        values = [getattr(pair, name) for pair in self.pairs]
        return f"({min(values):{sign}.3f} to {max(values):{sign}.3f})"


def measure_pairs(command: Sequence[str], say: Callable[[str], None]) -> Overhead:
    """Measure the duration of a command with and without nsa-harness. Raise SystemExit if the command fails."""
    with tempfile.TemporaryDirectory(prefix="nsa-overhead-") as directory:
        spec = _spec(command, Path(directory))
        count = number_of_pairs(_bare_s(command, spec))
        say(f"overhead: {count} pairs of {shlex.join(command)}")
        pairs = [_pair(number, command, spec, Path(directory)) for number in range(count)]
    return Overhead(command=shlex.join(command), pairs=tuple(pairs))


def number_of_pairs(first_s: float) -> int:
    """Return the number of pairs of runs to measure, given the duration of one run."""
    return max(FEWEST_PAIRS, min(MOST_PAIRS, int(BUDGET_S / (2 * max(first_s, 0.001)))))


def ranks_of(command: Sequence[str]) -> int:
    """Return the number of ranks of a torchrun command, or 1 for any other command."""
    match = _RANKS.search(re.sub(r"(--nproc[-_]per[-_]node) ", r"\1=", " ".join(command)))
    return int(match[1]) if match else 1


def _spec(command: Sequence[str], directory: Path) -> RunSpec:
    """Return a specification for running the command under nsa-harness."""
    from nsa_harness.supervisor.launch.machine import machine_facts
    from nsa_harness.supervisor.launch.planning import Invocation, plan_launches

    file = directory / "overhead.yaml"
    limits = dict.fromkeys(("stall_s", "busy_s", "open_wait_s", "start_s", "deadline_s"), _FAR_S)
    run = {"command": list(command), "ranks": ranks_of(command)}
    file.write_text(json.dumps({"about": "measured by benchmarks/timing_pairs.py", "run": run, "limits": limits}))
    invocation = Invocation(arguments=(str(file),), working_dir=Path.cwd(), environ={})
    (spec,) = plan_launches(invocation, machine_facts()).specs
    return cast("RunSpec", spec)


def _pair(number: int, command: Sequence[str], spec: RunSpec, directory: Path) -> TimedPair:
    bare_s = harness_s = after_s = 0.0
    for side in alternate(number, ("harness", "bare")):
        if side == "bare":
            bare_s = _bare_s(command, spec)
        else:
            harness_s, after_s = _harness_s(spec, directory)
    return TimedPair(bare_s=bare_s, harness_s=harness_s, after_s=after_s)


def _bare_s(command: Sequence[str], spec: RunSpec) -> float:
    # nsa-harness, like torchrun, gives each of several ranks one thread. Without it, the command must have the same.
    threads = {"OMP_NUM_THREADS": "1"} if spec.ranks > 1 else {}
    started = time.perf_counter()
    try:
        result = subprocess.run(
            command, env={**threads, **os.environ}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise SystemExit(f"{command[0]} cannot be started: {error.strerror or error}") from None
    took_s = time.perf_counter() - started
    if result.returncode != 0:
        last_line = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        reason = f": {last_line[0]}" if last_line else ""
        raise SystemExit(f"the command ends with {result.returncode} without nsa-harness{reason}; fix it first")
    return took_s


def _harness_s(spec: RunSpec, directory: Path) -> tuple[float, float]:
    """Return the duration, in seconds, of a run under nsa-harness, and of its part after the command ended."""
    from nsa_harness.commands.run import run_all
    from nsa_harness.commands.scheduler import RunRequest
    from nsa_harness.core.report import Outcome, Status
    from nsa_harness.render.listener import Listener
    from nsa_harness.supervisor.storage.rundir import RunOptions

    outcomes: list[Outcome] = []

    class Silent(Listener):  # instead of the terminal
        def on_outcome(self, outcome: Outcome, run_dir: Path) -> None:  # noqa: ARG002
            outcomes.append(outcome)

    options = RunOptions(command="benchmarks/timing_pairs.py", out=directory)
    request = RunRequest(specs=(spec,), options=options)
    started = time.perf_counter()
    run_all(request, Silent())
    took_s = time.perf_counter() - started
    if not outcomes or outcomes[-1].verdict.status is not Status.PASS:
        reason = outcomes[-1].verdict.summary if outcomes else "it was interrupted"
        raise SystemExit(f"the command passes bare and not under nsa-harness, so nothing is measured: {reason}")
    return took_s, max(0.0, took_s - outcomes[-1].timing.wall_s)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what nsa-harness costs a command.")
    parser.add_argument("--json", action="store_true", help="print every sample as JSON")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)
    overhead = measure_pairs(options.command, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(overhead.values(), indent=1) if options.json else "\n".join(overhead.lines()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
