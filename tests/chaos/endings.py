"""Endings that kill -9 of one process does not reach: pairs, stopped guards, and a run whose folders are taken away.

    python tests/chaos/endings.py --trials 300 --seed 1 --out FOLDER --store tests/chaos/endings.json

As in chaos.py, a trial is a function of the seed and its number, and a trial that stands in the folder is not made
again. The last lines are a table: each kind, how many trials met it, and how many of them went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import chaos
import psutil
from chaos import HARNESS, OK, OVER, PROGRAM

# What is done to whom, and to which folder of the run. "forks": the launches of a search have a fork server.
KINDS = (
    "kill controller and py-spy",
    "kill guardian and py-spy",
    "kill controller and fork server",
    "kill guardian and fork server",
    "stop guardian",
    "stop guardian, kill controller",
    "stop keeper, kill controller",
    "stop guardian and keeper, kill controller",
    "replace attempt",
    "replace attempt, kill controller",
    "delete run",
    "delete run, kill controller",
)
COMMAND_S, GONE_S = 120.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    number: int
    kind: str
    after_s: float  # from the moment at which everybody was seen


def make_trial(seed: int, number: int) -> Trial:
    longest_s = 0.0 if "py-spy" in KINDS[number % len(KINDS)] else 4.0  # py-spy lives for a moment
    after_s = round(random.Random(f"{seed} {number}").uniform(0.0, longest_s), 3)
    return Trial(number=number, kind=KINDS[number % len(KINDS)], after_s=after_s)


def words_of(trial: Trial) -> list[str]:
    if "fork server" in trial.kind:
        return [HARNESS, "bisect", "one", "--any", "value=[1,2,3]", "--arg", "hangs:{value}", "--fork"]
    return [HARNESS, "run", "one"]


@dataclass(kw_only=True)
class Ending:
    """One trial in a folder of its own."""

    trial: Trial
    home: Path

    def attempted(self) -> tuple[bool, list[str]]:
        """Return whether the trial met its moment, and what went wrong."""
        (self.home / "scenarios").mkdir(parents=True)
        forks = "fork server" in self.trial.kind
        hangs = forks or "py-spy" in self.trial.kind
        args, limits = "" if forks else f", args: [{'hangs' if hangs else 'healthy'}]", '{"deadline_s": 60}'
        (self.home / "scenarios" / "one.yaml").write_text(
            f"about: an ending\nrun: {{ranks: 2, program: {PROGRAM}{args}}}\n"
            f"limits: {'{stall_s: 3, deadline_s: 12}' if hangs else limits}\n"
        )
        with (self.home / "output.txt").open("wb") as output:
            self.controller = subprocess.Popen(
                words_of(self.trial),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        met = self._act()
        wrong = list(self._mistakes(met=met))
        for process in [*chaos._of_runs(self.home), *(one for one in self.all if one.is_running())]:
            chaos._send(process, signal.SIGKILL)
        return met, wrong

    def _act(self) -> bool:
        self.all: list[psutil.Process] = []
        self.names: set[str] = set()  # of runs, of which one may be deleted
        self.before: set[str] = set()
        chaos._wait(lambda: bool(self._named()) or self._is_over(), COMMAND_S)
        end = time.monotonic() + self.trial.after_s
        chaos._wait(lambda: time.monotonic() >= end or self._is_over(), self.trial.after_s + 1.0)
        named: dict[str, psutil.Process] = {}

        def seen() -> bool:
            named.clear()
            named.update(self._named())
            return bool(named) or self._is_over()

        chaos._wait(seen, COMMAND_S)
        if self._is_over():
            return False
        self.all = [*_below(self.controller.pid), *chaos._of_runs(self.home)]
        self.names = {path.name for path in chaos._runs(self.home)}
        acts = [act.partition(" ")[::2] for act in self.trial.kind.split(", ")]
        for verb, whom in acts:
            victims = [named[name] for name in whom.split(" and ") if name in named]
            if verb in ("stop", "kill"):
                for process in victims:
                    chaos._send(process, signal.SIGSTOP)
            if verb == "kill":
                for process in victims:
                    chaos._send(process, signal.SIGKILL)
            if verb in ("replace", "delete"):
                self._take_away(whom)
        return True

    def _take_away(self, which: str) -> None:
        (run,) = chaos._runs(self.home)
        if which == "run":
            shutil.rmtree(run, ignore_errors=True)
            return
        (attempt,) = (path.parent for path in run.glob("*/spec.json"))
        attempt.rename(self.home / "scratch")
        attempt.symlink_to(self.home / "scratch")
        self.before = self._in_scratch()

    def _in_scratch(self) -> set[str]:
        """The files in the target of the link, without those that torchrun and the ranks write there."""
        files = {str(path.relative_to(self.home / "scratch")) for path in (self.home / "scratch").rglob("*")}
        return {file for file in files if not file.startswith("logs")}

    def _is_over(self) -> bool:
        return self.controller.poll() is not None

    def _named(self) -> dict[str, psutil.Process]:
        """Everybody that the trial needs, by name; empty while somebody is missing."""
        children = _below(self.controller.pid, recursive=False)
        forks = "fork server" in self.trial.kind
        servers = [one for one in children if "/server.py" in chaos._said(one)]
        guardians = [one for server in servers for one in _below(server.pid, recursive=False)] if forks else [
            one for one in children if " guardian " in chaos._said(one)
        ]  # fmt: skip
        found = {
            "controller": [psutil.Process(self.controller.pid)] if not self._is_over() else [],
            "guardian": guardians,
            "keeper": [one for one in children if chaos._said(one).endswith(" keeper ")],
            "fork server": servers,
            "py-spy": [one for one in children if "py-spy" in chaos._said(one)],
        }
        wanted = {name for name in found if name in self.trial.kind} | {"controller", "guardian"}
        if not all(found[name] for name in wanted) or not any(_below(one.pid) for one in guardians):
            return {}
        if "attempt" in self.trial.kind and not list(self.home.glob("reports/2*/*/spec.json")):
            return {}
        return {name: found[name][0] for name in wanted}

    def _mistakes(self, *, met: bool) -> Iterator[str]:
        if self.trial.kind == "kill guardian and fork server":  # the search would go on for minutes
            chaos._wait(self._is_over, 5.0)
            self.controller.send_signal(signal.SIGINT)
        try:
            self.controller.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            self.controller.kill()
            yield f"the command did not end in {COMMAND_S:g} s"
        # A run whose guards were all stopped or killed waits for the next start.
        waits = "stop guardian and keeper" in self.trial.kind and met
        if not waits and not chaos._wait(lambda: not chaos._of_runs(self.home), GONE_S):
            yield f"ranks survive: {[chaos._said(one) for one in chaos._of_runs(self.home)]}"
        names = self.names | {path.name for path in chaos._runs(self.home)}
        chaos._harness(self.home, "watch", "--quiet", "--out", "next", "--", "true")
        boards = [path.name for name in names for path in Path("/dev/shm").glob(f"nsa-harness-{name}-*")]
        if boards:
            yield f"boards after the next start: {boards}"
        if not chaos._wait(lambda: not any(map(_lives, self.all)) and not chaos._of_runs(self.home), GONE_S):
            yield f"survivors: {[chaos._said(one) or one.pid for one in self.all if _lives(one)]}"
        said = (self.home / "output.txt").read_text(errors="replace")
        if "itself failed" in said or "Traceback" in said:
            yield f"it says {said[-300:]}"
        if "attempt" in self.trial.kind and met:
            if written := sorted(self._in_scratch() - self.before):
                yield f"written through the link: {written[:5]}"
            if "kill" not in self.trial.kind and "the directory of this attempt" not in said:
                yield f"the replaced folder is not told: {said[-300:]}"


def _below(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def stored(seed: int, results: dict[int, dict[str, object]]) -> str:
    lines = ",\n".join(f"    {json.dumps(results[number])}" for number in sorted(results))
    return f'{{\n  "seed": {seed},\n  "trials": [\n{lines}\n  ]\n}}\n'


def table(results: dict[int, dict[str, object]]) -> Iterator[str]:
    yield f"{'kind':44} trials  met  wrong"
    for kind in KINDS:
        said = [one["outcome"] for one in results.values() if one["kind"] == kind]
        wrong = sum(one not in (OK, OVER) for one in said)
        yield f"{kind:44} {len(said):6} {len(said) - said.count(OVER):4} {wrong:6}"
    wrong = sum(one["outcome"] not in (OK, OVER) for one in results.values())
    met = sum(one["outcome"] != OVER for one in results.values())
    yield f"{'all':44} {len(results):6} {met:4} {wrong:6}"


def main() -> int:
    parser = argparse.ArgumentParser(description="endings: pairs of kills, stopped guards, folders taken away")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, default=None, metavar="FILE", help="write what came of them all")
    parser.add_argument("--until", type=float, default=None, metavar="SECONDS", help="start no trial after this")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    lines, began = asked.out / "results.jsonl", time.monotonic()
    results = {}
    if lines.exists():
        results = {one["number"]: one for one in map(json.loads, lines.read_text().splitlines())}
    for number in range(asked.trials):
        if number in results or (asked.until is not None and time.monotonic() - began > asked.until):
            continue
        trial, start_s = make_trial(asked.seed, number), time.monotonic()
        home = asked.out.resolve() / f"{number:03}-{os.urandom(3).hex()}"
        met, wrong = Ending(trial=trial, home=home).attempted()
        outcome = "; ".join(wrong) or (OK if met else OVER)
        results[number] = {**asdict(trial), "commit": chaos._commit(), "outcome": outcome}
        with lines.open("a") as file:
            file.write(json.dumps(results[number]) + "\n")
        print(f"{number:3} {trial.kind:44} {time.monotonic() - start_s:6.1f} s  {outcome}", flush=True)
    if asked.store is not None:
        asked.store.write_text(stored(asked.seed, results))
    print("\n".join(table(results)))
    return int(any(one["outcome"] not in (OK, OVER) for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
