"""kill -9 at random moments of every command: nothing is left, the report is right, and the run can be gone on with.

    python tests/chaos/chaos.py --trials 60 --seed 1 --out FOLDER

One line a trial, and results.jsonl in the folder; a trial that stands there is not made again. A trial is a function of
the seed and its number: which command, who is killed, and how long after that one was first seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
HARNESS = str(Path(sys.executable).with_name("nsa-harness"))
PROGRAM = str(HERE / "ranks_at_work.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TAG = "_NSA_HARNESS_RUN"
COMMANDS = ("run", "watch", "plan", "bisect")
VICTIMS = ("controller", "guardian", "torchrun", "rank", "py-spy", "controller and guardian")
LATEST_S = 6.0  # after the victim was first seen; a launch takes about that long
COMMAND_S, GONE_S = 400.0, 30.0
_DEADLINE_S = {"healthy": 120, "hangs": 20}

# What may be said of an attempt that nobody disturbed, and besides that of one in which this one was killed.
NATURAL = {
    "healthy": {("PASS", None)},
    "hangs": {("FAIL", "slow")},
    "bisect": {("PASS", None), ("FAIL", "bad_exit")},
}
DISTURBED: dict[str, set[tuple[str, str | None]]] = {
    "controller": {("ERROR", "interrupted")},
    "guardian": set(),
    "torchrun": {("FAIL", "killed")},
    "rank": {("FAIL", "killed")},
    "py-spy": set(),
    "controller and guardian": {("ERROR", "interrupted")},
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    number: int
    command: str
    mode: str
    victim: str
    after_s: float


@dataclass(kw_only=True)
class Result:
    trial: Trial
    killed: bool  # else the command was over before
    wrong: list[str]
    took_s: float


def trial_of(seed: int, number: int) -> Trial:
    """Every pair of a command and a victim in turn, so that few trials meet many of them."""
    draw = random.Random(f"{seed} {number}")
    pairs = [(command, victim) for victim in VICTIMS for command in COMMANDS]
    random.Random(seed).shuffle(pairs)
    command, victim = pairs[number % len(pairs)]
    mode = "bisect" if command == "bisect" else draw.choice(("healthy", "hangs"))
    return Trial(number=number, command=command, mode=mode, victim=victim, after_s=draw.uniform(0.0, LATEST_S))


def attempted(trial: Trial, home: Path) -> Result:
    """One trial in a folder of its own."""
    began = time.monotonic()
    home.mkdir(parents=True)
    _write_scenarios(home, trial)
    with (home / "output.txt").open("wb") as output:
        controller = subprocess.Popen(
            words_of(trial), cwd=home, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    killed = _kill(trial, home, controller)
    wrong = list(_mistakes(trial, home, controller, killed=killed))
    for process in _of_runs(home):
        process.kill()
    return Result(trial=trial, killed=killed, wrong=wrong, took_s=round(time.monotonic() - began, 1))


def words_of(trial: Trial) -> list[str]:
    return {
        "run": [HARNESS, "run", "one"],
        "plan": [HARNESS, "run", "-t", "chaos"],
        "watch": [
            HARNESS, "watch", "--on-hang=kill", f"limits.deadline_s={_DEADLINE_S.get(trial.mode)}", "--",
            *TORCHRUN, PROGRAM, trial.mode,
        ],
        "bisect": [HARNESS, "bisect", "one", "--any", "value=[1,2,3,4]", "--arg", "{value}", "--no-fork"],
    }[trial.command]  # fmt: skip


def _write_scenarios(home: Path, trial: Trial) -> None:
    (home / "scenarios").mkdir()
    args = "" if trial.command == "bisect" else f", args: [{trial.mode}]"
    for name in ("one", "two"):
        (home / "scenarios" / f"{name}.yaml").write_text(
            f"about: a trial of kill -9\ntags: [chaos]\nrun: {{ranks: 2, program: {PROGRAM}{args}}}\n"
            f"limits: {{deadline_s: {_DEADLINE_S.get(trial.mode, 120)}}}\n"
        )


def _kill(trial: Trial, home: Path, controller: subprocess.Popen[bytes]) -> bool:
    """False where the command was over before its victim was seen, or before its time had come."""
    victims: list[psutil.Process] = []

    def seen() -> bool:
        victims[:] = _victims(trial, home, controller)
        return bool(victims) or controller.poll() is not None

    _wait(seen, COMMAND_S)
    # py-spy lives for a moment: whoever waits kills none.
    end = time.monotonic() + (0.0 if trial.victim == "py-spy" else trial.after_s)
    _wait(lambda: time.monotonic() >= end or controller.poll() is not None, LATEST_S + 1.0)
    victims = victims if trial.victim == "py-spy" else _victims(trial, home, controller)
    for process in victims:
        _send(process, signal.SIGSTOP)  # all of them at once
    for process in victims:
        _send(process, signal.SIGKILL)
    return bool(victims)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def _victims(trial: Trial, home: Path, controller: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if controller.poll() is not None:
        return []
    us = [psutil.Process(controller.pid)]
    if trial.victim == "controller":
        return us
    if trial.victim == "py-spy":
        return [one for one in us[0].children() if "py-spy" in _said(one)][:1]
    guardians = [one for one in us[0].children() if " guardian " in _said(one)]
    if trial.victim == "guardian":
        return guardians[:1]
    if trial.victim == "controller and guardian":
        return [*us, *guardians] if guardians else []
    ranks = [(one, _environment(one).get("RANK")) for one in _of_runs(home)]
    if trial.victim == "rank":
        return [one for one, rank in ranks if rank == str(trial.number % 2) and PROGRAM in _said(one)][:1]
    return [one for one, rank in ranks if rank is None and "torch.distributed.run" in _said(one)][:1]


def _said(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) + " "
    except psutil.Error:
        return ""


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _runs(home: Path) -> list[Path]:
    return sorted((home / "reports").glob("2*"))


def _of_runs(home: Path) -> list[psutil.Process]:
    """Living processes of any run of this folder."""
    names = tuple(f"{run.name}-" for run in _runs(home))
    found = [one for one in psutil.process_iter() if names and _environment(one).get(TAG, "").startswith(names)]
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def _boards(home: Path) -> list[Path]:
    return [path for run in _runs(home) for path in Path("/dev/shm").glob(f"nsa-harness-{run.name}-*")]


def _mistakes(trial: Trial, home: Path, controller: subprocess.Popen[bytes], *, killed: bool) -> Iterator[str]:
    try:
        controller.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        controller.kill()
        yield f"the command did not end in {COMMAND_S:g} s"
        return
    us = killed and "controller" in trial.victim
    if trial.command == "watch" and us:  # the job is somebody else's, and runs on
        if trial.mode == "hangs":
            if not _of_runs(home) and _runs(home) and _attempts(home):
                yield "the observed job was ended"
            for process in _of_runs(home):
                _send(process, signal.SIGKILL)
        _wait(lambda: not _of_runs(home), COMMAND_S)
    if not _wait(lambda: not _of_runs(home), GONE_S):
        yield f"survivors: {[_said(one) for one in _of_runs(home)]}"
    _wait(lambda: not _boards(home), GONE_S)  # so that nobody is swept who is about to leave
    _harness(home, "watch", "--quiet", "--out", "next", "--", "true")
    if _boards(home):
        yield f"boards after the next start: {[path.name for path in _boards(home)]}"
    yield from _of_report(trial, home, killed=killed)
    if us and trial.command in ("run", "plan", "bisect") and _runs(home):
        yield from _of_going_on(trial, home)


def _attempts(home: Path) -> list[Path]:
    return [path for run in _runs(home) for path in run.glob("*/processes.jsonl")]


def _of_report(trial: Trial, home: Path, *, killed: bool) -> Iterator[str]:
    if not any((run / "run.json").exists() or any(run.glob("*/spec.json")) for run in _runs(home)):
        return  # killed before there was anything to tell of
    told = _harness(home, "report", "--json")
    try:
        outcomes = json.loads(told.stdout)["outcomes"]
    except (ValueError, KeyError):
        yield f"report: code {told.returncode}, {told.stderr[-300:]}"
        return
    may_be = NATURAL[trial.mode] | (DISTURBED[trial.victim] if killed else set())
    if trial.command == "watch" and trial.mode == "hangs" and "controller" in trial.victim:
        may_be |= {("FAIL", "killed")}  # the trial ends the job that was left alone
    said = [(one["verdict"], one["cause"]) for one in outcomes]
    yield from (f"report says {one}" for one in said if one not in may_be)
    if killed and len([one for one in said if one not in NATURAL[trial.mode]]) > 1:
        yield f"one was killed, and the report says {said}"


def _of_going_on(trial: Trial, home: Path) -> Iterator[str]:
    if trial.command == "bisect":
        again = _harness(home, *words_of(trial)[1:])
        if again.returncode != 0:
            yield f"the same command: code {again.returncode}, {again.stdout[-300:]}{again.stderr[-300:]}"
        return
    run = _runs(home)[-1]
    if not (run / "run.json").exists():
        return
    again = _harness(home, "run", "--resume", str(run))
    told = json.loads((run / "report.json").read_text())
    ran = {one["scenario"] for one in told["outcomes"]}
    wanted = {"one"} if trial.command == "run" else {"one", "two"}
    if ran != wanted or told.get("not_run"):
        yield f"--resume: code {again.returncode}, ran {sorted(ran)}, {again.stderr[-300:]}"


def _harness(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HARNESS, *words], cwd=home, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def _wait(happened: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def made(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    return {one["trial"]["number"]: one for one in map(json.loads, path.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 at random moments of every command")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, default=None, metavar="SECONDS", help="start no trial after this")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results, began = asked.out / "results.jsonl", time.monotonic()
    for number in range(asked.trials):
        if number in made(results):
            continue
        if asked.until is not None and time.monotonic() - began > asked.until:
            break
        trial = trial_of(asked.seed, number)
        result = attempted(trial, asked.out.resolve() / f"{number:03}-{os.urandom(3).hex()}")
        with results.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
        verdict = "; ".join(result.wrong) or ("ok" if result.killed else "ok, over before")
        print(
            f"{number:3} {trial.command:7} {trial.mode:8} {trial.victim:24} {result.took_s:6.1f} s  {verdict}",
            flush=True,
        )
    every = made(results).values()
    wrong = [one for one in every if one["wrong"]]
    print(f"{len(every)} trials, {sum(one['killed'] for one in every)} kills, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
