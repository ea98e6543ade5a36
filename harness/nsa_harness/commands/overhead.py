"""`doctor --overhead`: runs a command bare and under the harness, in turn, and measures both."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nsa_harness.commands.run import run_all
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.doctor.overhead import Overhead, TimedPair, pairs_wanted
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.errors import UsageError
from nsa_harness.render.listener import Listener
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, planned
from nsa_harness.supervisor.storage.rundir import RunOptions

_RANKS = re.compile(r"--nproc[-_]per[-_]node=(\d+)")
_FAR_S = 1e6  # a command of unknown length is measured, not judged


def measured(command: Sequence[str], say: Callable[[str], None]) -> Overhead:
    """Wall times of pairs, after one bare run to warm the caches. Raises UsageError for a command that fails."""
    with tempfile.TemporaryDirectory(prefix="nsa-overhead-") as directory:
        spec = _spec(command, Path(directory))
        wanted = pairs_wanted(_bare_s(command, spec))
        say(f"overhead: {wanted} pairs of {shlex.join(command)}")
        pairs = [_pair(number, command, spec, Path(directory)) for number in range(wanted)]
    return Overhead(command=shlex.join(command), pairs=tuple(pairs))


def ranks_of(command: Sequence[str]) -> int:
    """Of a torchrun command; one for any other."""
    match = _RANKS.search(re.sub(r"(--nproc[-_]per[-_]node) ", r"\1=", " ".join(command)))
    return int(match[1]) if match else 1


def _spec(command: Sequence[str], directory: Path) -> RunSpec:
    """By the path of every scenario: a file that holds the command."""
    file = directory / "overhead.yaml"
    limits = dict.fromkeys(("stall_s", "busy_s", "open_wait_s", "start_s", "deadline_s"), _FAR_S)
    run = {"command": list(command), "ranks": ranks_of(command)}
    file.write_text(json.dumps({"about": "measured by doctor --overhead", "run": run, "limits": limits}))
    question = Invocation(words=(str(file),), working_dir=Path.cwd(), environ={})
    (spec,) = planned(question, machine_facts()).specs
    assert isinstance(spec, RunSpec)
    return spec


def _pair(number: int, command: Sequence[str], spec: RunSpec, directory: Path) -> TimedPair:
    """One of each; which comes first alternates, so that a machine that grows slower favours neither."""
    if number % 2:
        (harness_s, after_s), bare_s = _harness_s(spec, directory), _bare_s(command, spec)
    else:
        bare_s, (harness_s, after_s) = _bare_s(command, spec), _harness_s(spec, directory)
    return TimedPair(bare_s=bare_s, harness_s=harness_s, after_s=after_s)


def _bare_s(command: Sequence[str], spec: RunSpec) -> float:
    # The harness gives several ranks one thread each, as torchrun does; a bare command must not differ in that.
    threads = {"OMP_NUM_THREADS": "1"} if spec.ranks > 1 else {}
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            command, env={**threads, **os.environ}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise UsageError(f"--overhead: {command[0]} cannot be started: {error.strerror or error}") from None
    took_s = time.perf_counter() - begun
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = f": {last[0]}" if last else ""
        raise UsageError(f"--overhead: the command ends with {done.returncode} without the harness{why}; mend it first")
    return took_s


def _harness_s(spec: RunSpec, directory: Path) -> tuple[float, float]:
    """Wall time until the report is written, and the part of it after the command's end."""
    heard = _Heard()
    options = RunOptions(out=directory, command="nsa-harness doctor --overhead")
    request = RunRequest(specs=(spec,), options=options)
    begun = time.perf_counter()
    run_all(request, heard)
    took_s = time.perf_counter() - begun
    if heard.last is None or heard.last.verdict.status is not Status.PASS:
        what = "it was interrupted" if heard.last is None else heard.last.verdict.summary
        raise UsageError(
            f"--overhead: the command passes bare and not under the harness, so nothing is measured: {what}"
        )
    return took_s, max(0.0, took_s - heard.last.timing.wall_s)


class _Heard(Listener):
    """In place of the terminal: keeps the outcome."""

    def __init__(self) -> None:
        self.last: Outcome | None = None

    def outcome(self, outcome: Outcome, run_dir: Path) -> None:  # noqa: ARG002
        self.last = outcome
