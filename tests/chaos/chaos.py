"""kill -9 at random moments of every command: nothing is left, the report is right, and the run can be gone on with.

    python tests/chaos/chaos.py --trials 60 --seed 1 --out FOLDER --store tests/chaos/result.json

One line a trial, and results.jsonl in the folder; a trial that stands there is not made again. A trial is a function of
the seed and its number: which command, who is killed, and how long after that one was first seen. `--store` keeps what
came of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
# How long a victim lives in a launch of a healthy program, about, and how many launches a command makes in which it may
# be killed. py-spy lives for a moment: whoever waits kills none.
LIVES_S = {"controller": 7.0, "guardian": 6.0, "torchrun": 5.0, "rank": 3.0, "py-spy": 0.0}
LAUNCHES = {"run": 1, "watch": 1, "plan": 2, "bisect": 5}
COMMAND_S, GONE_S = 400.0, 30.0
OK, OVER = "ok", "ok, over before"
_LIMITS = {"healthy": {"deadline_s": 120}, "hangs": {"stall_s": 3, "deadline_s": 14}}

# What may be said of an attempt that nobody disturbed, and besides that of one in which this one was killed.
NATURAL: dict[str, set[tuple[str, str | None]]] = {
    "healthy": {("PASS", None)},
    "hangs": {("FAIL", "slow")},
    "fails": {("PASS", None), ("FAIL", "bad_exit")},
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
    forked: bool  # the launches of a search
    victim: str
    after_s: float


@dataclass(kw_only=True)
class Result:
    trial: Trial
    commit: str
    killed: bool  # else the command was over before
    wrong: list[str]
    took_s: float


def make_trial(seed: int, number: int) -> Trial:
    """Every pair of a command and a victim in turn, so that few trials meet many of them."""
    draw = random.Random(f"{seed} {number}")
    pairs = [(command, victim) for victim in VICTIMS for command in COMMANDS]
    random.Random(seed).shuffle(pairs)
    command, victim = pairs[number % len(pairs)]
    mode = "fails" if command == "bisect" else draw.choice(("healthy", "hangs"))
    mode = "hangs" if victim == "py-spy" else mode  # which nothing else asks for
    return Trial(
        number=number,
        command=command,
        mode=mode,
        forked=command == "bisect" and draw.random() < 0.5,
        victim=victim,
        after_s=round(draw.uniform(0.0, longest_s(command, mode, victim)), 3),
    )


def longest_s(command: str, mode: str, victim: str) -> float:
    return LAUNCHES[command] * LIVES_S[victim.partition(" and ")[0]] * (2 if mode == "hangs" else 1)


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
    return Result(trial=trial, commit=_commit(), killed=killed, wrong=wrong, took_s=round(time.monotonic() - began, 1))


def _commit() -> str:
    words = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def words_of(trial: Trial) -> list[str]:
    return {
        "run": [HARNESS, "run", "one"],
        "plan": [HARNESS, "run", "-t", "chaos"],
        "watch": [
            HARNESS, "watch", "--on-hang=kill", *(f"limits.{name}={value}" for name, value in _limits(trial).items()),
            "--", *TORCHRUN, PROGRAM, trial.mode,
        ],
        "bisect": [
            HARNESS, "bisect", "one", "--any", "value=[1,2,3]", "--arg", f"{trial.mode}:{{value}}",
            "--fork" if trial.forked else "--no-fork",
        ],
    }[trial.command]  # fmt: skip


def _limits(trial: Trial) -> dict[str, int]:
    return _LIMITS["hangs" if trial.mode == "hangs" else "healthy"]


def _write_scenarios(home: Path, trial: Trial) -> None:
    (home / "scenarios").mkdir()
    args = "" if trial.command == "bisect" else f", args: [{trial.mode}]"
    for name in ("one", "two"):
        (home / "scenarios" / f"{name}.yaml").write_text(
            f"about: a trial of kill -9\ntags: [chaos]\nrun: {{ranks: 2, program: {PROGRAM}{args}}}\n"
            f"limits: {json.dumps(_limits(trial))}\n"
        )


def _kill(trial: Trial, home: Path, controller: subprocess.Popen[bytes]) -> bool:
    """False where the command was over before its victim was seen, or before its time had come."""
    victims: list[psutil.Process] = []

    def seen() -> bool:
        victims[:] = _victims(trial, home, controller)
        return bool(victims) or controller.poll() is not None

    _wait(seen, COMMAND_S)
    if trial.after_s:
        end = time.monotonic() + trial.after_s
        _wait(lambda: time.monotonic() >= end or controller.poll() is not None, trial.after_s + 1.0)
        _wait(seen, COMMAND_S)  # between two launches there may be none
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
    try:
        us = [psutil.Process(controller.pid)]
    except psutil.Error:
        return []
    if trial.victim == "controller":
        return us
    if trial.victim == "py-spy":
        return [one for one in us[0].children() if "py-spy" in _said(one)][:1]
    guardians = _guardians(us[0], forked=trial.forked)
    if trial.victim == "guardian":
        return guardians[:1]
    if trial.victim == "controller and guardian":
        return [*us, *guardians] if guardians else []
    ranks = [(one, _environment(one).get("RANK")) for one in _of_runs(home)]
    if trial.victim == "rank":
        return [one for one, rank in ranks if rank == str(_rank(trial)) and PROGRAM in _said(one)][:1]
    return [one for one, rank in ranks if rank is None and "torch.distributed.run" in _said(one)][:1]


def _guardians(controller: psutil.Process, *, forked: bool) -> list[psutil.Process]:
    """A forked one has the looks of its server, whose child it is."""
    try:
        children = controller.children()
        if forked:
            return [one for server in children if "/server.py" in _said(server) for one in server.children()]
    except psutil.Error:
        return []
    return [one for one in children if " guardian " in _said(one)]


def _rank(trial: Trial) -> int:
    return trial.number % 2


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
    natural = NATURAL[trial.mode] | ({("PASS", None)} if trial.command == "bisect" else set())
    may_be = natural | (DISTURBED[trial.victim] if killed else set())
    if trial.command == "watch" and trial.mode == "hangs" and "controller" in trial.victim:
        may_be |= {("FAIL", "killed")}  # the trial ends the job that was left alone
    yield from _false_passes(home)
    said = [(one["verdict"], one["cause"]) for one in outcomes]
    yield from (f"report says {one}" for one in said if one not in may_be)
    if killed and len([one for one in said if one not in natural]) > 1:
        yield f"one was killed, and the report says {said}"
    if killed and trial.victim == "rank":
        blamed = [one["culprit"]["ranks"] for one in outcomes if (one["verdict"], one["cause"]) == ("FAIL", "killed")]
        yield from (f"rank {_rank(trial)} was killed, and rank {one} named" for one in blamed if one != [_rank(trial)])


def _false_passes(home: Path) -> Iterator[str]:
    for journal in _attempts(home):
        result = journal.with_name("result.txt")
        ends: list[dict[str, Any]] = list(map(json.loads, journal.read_text().splitlines()))
        killed = [one["rank"] for one in ends if one["event"] == "exit" and one.get("status") == -signal.SIGKILL]
        if any(rank is not None for rank in killed) and result.exists() and result.read_text().startswith("PASS"):
            yield f"rank {killed} of {journal.parent.name} was killed, and it says PASS"


def _of_going_on(trial: Trial, home: Path) -> Iterator[str]:
    if trial.command == "bisect":
        again = _harness(home, *words_of(trial)[1:])
        if again.returncode != 0:
            yield f"the same command: code {again.returncode}, {again.stdout[-300:]}{again.stderr[-300:]}"
        return
    run = _runs(home)[-1]
    if not (run / "run.json").exists():
        return
    again = _harness(home, "run", f"--resume={run}")
    told = json.loads((run / "report.json").read_text()) if (run / "report.json").exists() else {"outcomes": []}
    # Of what was cut short there is a second attempt, which counts.
    ended = {one["scenario"]: (one["verdict"], one["cause"]) for one in told["outcomes"] if one["final"]}
    wanted = {"one"} if trial.command == "run" else {"one", "two"}
    if again.returncode not in (0, 1) or ended.keys() != wanted or not set(ended.values()) <= NATURAL[trial.mode]:
        yield f"--resume: code {again.returncode}, ended {ended}, {again.stderr[-300:]}"


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


def stored(seed: int, results: dict[int, dict[str, Any]]) -> str:
    """What came of each trial, in the order of their numbers; of one that was made again, the last."""
    trials = [
        {**one["trial"], "commit": one["commit"], "outcome": "; ".join(one["wrong"]) or _passed(one)}
        for _, one in sorted(results.items())
    ]
    lines = ",\n".join(f"    {json.dumps(one)}" for one in trials)
    return f'{{\n  "seed": {seed},\n  "trials": [\n{lines}\n  ]\n}}\n'


def _passed(result: dict[str, Any]) -> str:
    return OK if result["killed"] else OVER


def line_of(result: Result) -> str:
    one = result.trial
    verdict = "; ".join(result.wrong) or (OK if result.killed else OVER)
    return f"{one.number:3} {one.command:7} {one.mode:8} {one.victim:24} {result.took_s:6.1f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 at random moments of every command")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, default=None, metavar="FILE", help="write what came of them all")
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side")
    parser.add_argument("--until", type=float, default=None, metavar="SECONDS", help="start no trial after this")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results, began = asked.out / "results.jsonl", time.monotonic()
    writing = threading.Lock()

    def make(number: int) -> None:
        if asked.until is not None and time.monotonic() - began > asked.until:
            return
        result = attempted(make_trial(asked.seed, number), asked.out.resolve() / f"{number:03}-{os.urandom(3).hex()}")
        with writing, results.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
            print(line_of(result), flush=True)

    wanted = [number for number in range(asked.trials) if number not in made(results)]
    # The next start clears what it finds dead, also of another trial: then nobody could tell who would have done it.
    alone = [number for number in wanted if " and " in make_trial(asked.seed, number).victim]
    for jobs, numbers in ((asked.jobs, [one for one in wanted if one not in alone]), (1, alone)):
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(make, numbers))
    if asked.store is not None:
        asked.store.write_text(stored(asked.seed, made(results)))
    every = made(results).values()
    wrong = [one for one in every if one["wrong"]]
    print(f"{len(every)} trials, {sum(one['killed'] for one in every)} kills, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
