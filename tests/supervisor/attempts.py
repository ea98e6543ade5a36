"""Attempt directories to read: written here piece by piece, or unpacked from tests/evidence."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from nsa_harness.core.plan import Expect, Launcher, Limits, RunSpec
from nsa_harness.supervisor.storage.rundir import AttemptDir

STORED = Path(__file__).parents[1] / "evidence"
STORED_CASES = sorted(path.name for path in STORED.iterdir() if path.is_dir()) if STORED.is_dir() else []

ORIGIN_NS = 1_000_000_000_000


def at(seconds: float) -> int:
    return ORIGIN_NS + int(seconds * 1e9)


def spec(**changes: Any) -> RunSpec:
    facts: dict[str, Any] = {
        "scenario": "ddp_onestep",
        "about": "One DDP step",
        "ranks": 2,
        "launcher": Launcher.TORCHRUN,
        "program": ("train.py",),
        "env": (),
        "cwd": None,
        "backend": "gloo",
        "device": "cpu",
        "subject": "train.py",
        "limits": Limits(deadline_s=600.0),
        "expect": Expect(),
        "fault": None,
        "notes": (),
        "not_covered": (),
        "spec_hash": "9c1e",
    }
    return RunSpec(**{**facts, **changes})


def journal(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def started(pid: int = 10) -> dict[str, Any]:
    return {"event": "started", "t_ns": at(0.0), "pid": pid, "guardian": 9}


def left(pid: int, status: int | None, seconds: float, rank: int | None = None) -> dict[str, Any]:
    return {"event": "exit", "t_ns": at(seconds), "pid": pid, "rank": rank, "status": status}


def said(event: str, seconds: float = 0.0, **facts: Any) -> dict[str, Any]:
    return {"event": event, "t_s": seconds, **facts}


ORIGIN = said("origin", origin_ns=ORIGIN_NS)
RANKS = said("rank", 0.1, rank=0, pid=100), said("rank", 0.1, rank=1, pid=101)
CLEAN = (started(), left(100, 0, 5.0, 0), left(101, 0, 5.1, 1), left(10, 0, 6.0))
CLEAN_END = said("ending", 6.1, ending="exited", last_progress_s=4.9, error=None)


def clean(path: Path) -> AttemptDir:
    """An attempt of two ranks without a probe that ended well."""
    path.mkdir(exist_ok=True)
    attempt = AttemptDir(path)
    journal(attempt.processes, *CLEAN, {"event": "ended", "t_ns": at(6.2), "outlived": [], "left": []})
    journal(attempt.watch, ORIGIN, *RANKS, said("peaks", 6.1, rss_bytes={"0": 7, "1": 8}), CLEAN_END)
    return attempt


def unpack(case: str, target: Path) -> AttemptDir:
    """A stored attempt as it lay on disk when it was recorded; what is long is kept compressed."""
    shutil.copytree(STORED / case, target)
    for packed in target.rglob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return AttemptDir(target)
