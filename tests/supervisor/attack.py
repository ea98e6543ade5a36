"""A run directory that somebody made to harm whoever has it judged: `plant` says with what."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from attempts import ORIGIN_NS, unpack

SECRET = "xK7-not-for-your-eyes"  # of every file outside of the run
SPARSE_BYTES = 3 << 30
RECORDS = 70_000
Trick = Callable[[Path, Path], None]
CATASTROPHE = "(([a-z]+)*)+$x"  # on the line of `a` below it takes longer than the universe has


def plant(place: Path, outside: Path, tricks: Iterable[Trick]) -> Path:
    """A run below `place` with one attempt for each trick. All of `outside` holds the secret, and nobody else may."""
    outside.mkdir()
    for name in ("stdout.log", "secret.py", "log", "dump.txt", "spec.json"):
        file = outside / name
        file.write_text(f"def f():\n    token = '{SECRET}'\n[DDP] {SECRET}\n  - MISSING: {SECRET}\nERROR {SECRET}\n")
        file.chmod(0o600)
    (outside / "secret.py").write_text(f"def f():\n    token = '{SECRET}'\n    raise ValueError\n")
    os.utime(outside / "secret.py", (1, 1))  # as old as a program that was launched
    run = place / "20260101T000000-beef"
    run.mkdir()
    (run / "run.json").write_text("{}")
    for trick in tricks:
        trick(run / trick.__name__, outside)
    (run / "leads_out").symlink_to(outside)
    return run


def links(path: Path, outside: Path) -> None:
    attempt = unpack("collective_skipped", path)
    logs = next(attempt.logs.glob("*/attempt_*"))
    (logs / "1" / "stdout.log").unlink()
    (logs / "1").rmdir()
    (logs / "1").symlink_to(outside)
    for link, target in (("0/stdout.log", "stdout.log"), ("0/stderr.log", "log")):
        (logs / link).unlink(missing_ok=True)
        (logs / link).symlink_to(outside / target)
    attempt.output.unlink()
    attempt.output.symlink_to(outside / "log")
    attempt.rank(1).symlink_to(outside)
    attempt.traces.symlink_to(outside / "log")
    (attempt.dumps / "rank0.1.txt").symlink_to(outside / "dump.txt")
    attempt.evidence.symlink_to(outside)


def names_a_file(path: Path, outside: Path) -> None:
    """Of the one who reads the report: each frame of the exception lies there."""
    attempt = unpack("rank_raises", path)
    file = next(attempt.probe_files.glob("*.raised.json"))
    raised = json.loads(file.read_text())
    raised["frames"] = [{"file": str(outside / "secret.py"), "line": 2, "function": "f"}]
    file.write_text(json.dumps(raised))


def expression(path: Path, _: Path) -> None:
    attempt = unpack("onestep_passes", path)
    told = json.loads(attempt.spec.read_text())
    told["expect"]["metrics"] = [["loss", {"regex": CATASTROPHE, "lt": 1.0}]]
    attempt.spec.write_text(json.dumps(told))
    attempt.output.write_text("a" * 100_000 + "\n")


def giants(path: Path, _: Path) -> None:
    """Files that take no room on the disk."""
    attempt = unpack("rank_raises", path)
    logs = next(attempt.logs.glob("*/attempt_*"))
    names = [logs / str(rank) / f"{stream}.log" for rank in (0, 1) for stream in ("stdout", "stderr")]
    names += [attempt.output, attempt.traces, path / "training.csv", path / "profile.txt", path / "sources.json"]
    names += [attempt.probe_files / "7.board", path / "heartbeat_rank0.jsonl", attempt.dumps / "snapshot1.json"]
    attempt.dumps.mkdir(exist_ok=True)
    for name in names:
        with name.open("ab") as file:
            file.truncate(SPARSE_BYTES)


def traces(path: Path, _: Path) -> None:
    """One that no rank's log replaces."""
    attempt = unpack("rank_raises", path)
    shutil.rmtree(attempt.logs)
    attempt.logs.mkdir()
    attempt.traces.write_text("[DDP] a bucket\n")
    os.truncate(attempt.traces, SPARSE_BYTES)


def records(path: Path, _: Path) -> None:
    attempt = unpack("rank_raises", path)
    with attempt.processes.open("a") as journal:
        for pid in range(RECORDS):
            record = {"event": "exit", "t_ns": ORIGIN_NS + pid, "pid": 100_000 + pid, "rank": pid, "status": 1}
            journal.write(json.dumps(record) + "\n")
    with attempt.watch.open("a") as journal:
        for pid in range(RECORDS):
            journal.write(json.dumps({"event": "rank", "t_s": 1.0, "rank": pid, "pid": 100_000 + pid}) + "\n")


def pipes(path: Path, _: Path) -> None:
    attempt = unpack("rank_raises", path)
    for file in sorted(one for one in path.rglob("*") if one.is_file() and one != attempt.spec):
        file.unlink()
        os.mkfifo(file)
    for name in (attempt.traces, attempt.verdict, path / "sources.json", attempt.rank(0)):
        os.mkfifo(name)


TRICKS: tuple[Trick, ...] = (links, names_a_file, expression, giants, traces, records, pipes)
