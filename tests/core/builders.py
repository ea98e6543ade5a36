"""Evidence values with everything unremarkable filled in: a test says only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nsa_harness.core.diagnosis import engine
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.explanation import Explanation, Rule
from nsa_harness.core.evidence.evidence import (
    Call,
    Collective,
    Ending,
    Evidence,
    Exit,
    Frame,
    ProgressEvent,
    RaisedException,
    RankEvidence,
    RankSnapshot,
    Sample,
    Snapshot,
    Stack,
    StatusFile,
)
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.evidence.host import Process, Task
from nsa_harness.core.plan import Expect, Launcher, Limits, RunSpec
from nsa_harness.core.report import Culprit, Divergence, Finding, Place, Trouble
from nsa_harness.core.verdict.verdict import Judgement, judge
from nsa_harness.texts import sentences
from nsa_harness.texts.sentences import in_words

SITE = "/usr/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
ENGINE = f"{SITE}/torch/autograd/graph.py"
USER = "/home/ada/train.py"
LIMITS = Limits(stall_s=5.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=600.0)
UNTRACED = RankTraces(gradient_count=None, missing_count=None, missing_parameters=(), buckets=())


def frame(line: int = 10, *, file: str = USER, function: str = "step") -> Frame:
    return Frame(file=file, line=line, function=function)


ALL_REDUCE = frame(3252, file=C10D, function="all_reduce")
IN_LOCK = ("? (libc.so.6)", "PyThread_acquire_lock_timed (libpython3.11.so.1.0)")  # native frames
BACKWARD = frame(841, file=ENGINE, function="_engine_run_backward")


def stack(*frames: Frame, tid: int | None = 100, thread: str = "MainThread") -> Stack:
    """A thread; the default is the main thread of process 100. Frames innermost first."""
    return Stack(thread=thread, tid=tid, active=False, frames=frames, source="py-spy")


def task(tid: int = 100, **changes: Any) -> Task:
    facts = {"comm": "python", "state": "S", "wchan": "", "syscall": "futex", "wakes_at_s": None, "timed": False}
    return Task(**{"tid": tid, "cpu_s": 1.0, **facts, **changes})


def process(pid: int = 100, **changes: Any) -> Process:
    facts = {"parent": 1, "command": "python train.py", "state": "S", "cpu_s": 1.0, "io_bytes": 7, "rss_bytes": 4096}
    # A stopped process has stopped itself, unless a test says otherwise.
    syscall = "kill" if changes.get("state") == "T" else "futex"
    only = task(pid, cpu_s=changes.get("cpu_s", 1.0), syscall=syscall)
    return Process(**{"pid": pid, "tasks": (only,), **facts, **changes})


def mark(kind: str = "forward", name: str = "", **changes: Any) -> ProgressEvent:
    return ProgressEvent(**{"tid": 100, "kind": kind, "name": name, "step": 1, "at_s": 3.0, "count": 1, **changes})


def board(*marks: ProgressEvent, **changes: Any) -> StatusFile:
    facts: dict[str, Any] = {
        "pid": 100,
        "rank": 0,
        "world_size": 2,
        "created_s": 0.5,
        "beat_s": None,
        "exit_s": None,
        "ended_by_exception": False,
        "gaps_s": {},
        "steps_s": (),
        "calls": (),
        "enqueued": 0,
        "completed": 0,
        "collectives_changed_s": None,
    }
    return StatusFile(**{"events": marks, **facts, **changes})


def call(number: int = 1, op: str = "all_reduce", **changes: Any) -> Call:
    facts = {"group": "0", "elements": 4, "dtype": "torch.float32", "step": 1, "entered_s": 2.0, "left_s": 2.1}
    return Call(**{"number": number, "op": op, "place": Place(file=USER, line=37, function="step"), **facts, **changes})


def collective(seq: int = 1, op: str = "all_reduce", **changes: Any) -> Collective:
    facts = {"group": "0", "sizes": ((4,),), "dtypes": ("float32",), "retired": False, "created_ns": seq}
    return Collective(**{"seq": seq, "op": op, **facts, **changes})


def rank_snapshot(rank: int = 0, *frames: Frame, **changes: Any) -> RankSnapshot:
    """A rank whose main thread stands in `frames`, in a futex without a timeout. Rank r is process 100 + r."""
    pid = 100 + rank
    facts = {"process": process(pid), "stacks": (stack(*frames, tid=pid),) if frames else (), "pid": pid}
    return RankSnapshot(**{"rank": rank, **facts, **changes})


def snapshot(number: int, at_s: float, *ranks: RankSnapshot) -> Snapshot:
    return Snapshot(number=number, at_s=at_s, ranks=ranks)


def twice(*ranks: RankSnapshot, at_s: float = 20.0, apart_s: float = 2.0) -> tuple[Snapshot, Snapshot]:
    """Two looks at ranks that did nothing in between."""
    return snapshot(1, at_s - apart_s, *ranks), snapshot(2, at_s, *ranks)


def sample(rank: int = 0, motion: str = "burning", leaf: Frame | None = None, user: Frame | None = None) -> Sample:
    return Sample(rank=rank, at_s=10.0, motion=motion, leaf=leaf, user_frame=user, cpu_s=1.0)


def ended(rank: int | None, status: int | None = 0, *, at_s: float = 30.0, by_us: bool = False) -> Exit:
    return Exit(pid=99 if rank is None else 100 + rank, rank=rank, status=status, at_s=at_s, during_teardown=by_us)


def raised(rank: int, type: str = "RuntimeError", message: str = "boom", **changes: Any) -> RaisedException:
    facts = {"at_s": 9.0, "frames": (frame(88),), "proof": f"rank{rank}/raised.json"}
    return RaisedException(**{"rank": rank, "type": type, "message": message, **facts, **changes})


def rank_evidence(rank: int, **changes: Any) -> RankEvidence:
    facts: dict[str, Any] = {
        "pid": 100 + rank,
        "exit": None,
        "exception": None,
        "status_file": None,
        "collectives": (),
        "death_stacks": (),
        "peak_rss_bytes": None,
        "peak_gpu_bytes": None,
        "traces": UNTRACED,
        "last_loss": None,
        "error_lines": (),
    }
    return RankEvidence(**{"rank": rank, **facts, **changes})


def evidence(*ranks: RankEvidence, **changes: Any) -> Evidence:
    """A run that ended by itself, its launcher with 0; the exits are those of the ranks."""
    launcher = ended(None)
    exits = sorted((rank.exit for rank in ranks if rank.exit), key=lambda exit: exit.at_s)
    facts: dict[str, Any] = {
        "node": "node7",
        "world_size": len(ranks),
        "backend": "gloo",
        "ending": Ending.EXITED,
        "limits": LIMITS,
        "ended_s": 31.0,
        "launch_s": 2.0,
        "teardown_s": 0.5,
        "launcher": launcher,
        "launcher_error": None,
        "exits": tuple(exits),
        "snapshots": (),
        "samples": (),
        "last_progress_s": 10.0,
        "leftovers": (),
        "unkillable": (),
        "metrics": {},
        "trouble": (),
    }
    return Evidence(**{"ranks": ranks, **facts, **changes})


def stalled(*ranks: RankSnapshot, at_s: float = 20.0, **changes: Any) -> Evidence:
    """A run that was ended as a stall, with two equal looks at its ranks."""
    known = tuple(rank_evidence(rank.rank, status_file=rank.status_file) for rank in ranks)
    facts = {"ending": Ending.STALL, "snapshots": twice(*ranks, at_s=at_s), "ended_s": at_s}
    return evidence(*known, **{"launcher": ended(None, 1, by_us=True), **facts, **changes})


def case(seen: Evidence) -> DiagnosisContext:
    return DiagnosisContext(evidence=seen, judgement=judge(seen))


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A diagnosis with its findings in words."""

    cause: str | None
    culprit: Culprit | None
    findings: tuple[Finding, ...]
    divergence: Divergence | None = None


def diagnose(seen: Evidence, judgement: Judgement, own_rules: tuple[Rule, ...] = ()) -> Diagnosis:
    diagnosis = engine.diagnose(seen, judgement, own_rules)
    words = in_words(diagnosis)
    assert words.trouble == ()
    return Diagnosis(
        cause=diagnosis.cause,
        culprit=diagnosis.culprit,
        findings=words.findings,
        divergence=diagnosis.divergence,
    )


def finding_of(explanation: Explanation) -> Finding:
    """The explanation in words, for a job without a mesh."""
    only = engine.Diagnosis(
        cause=None, culprit=None, explanations=(explanation,), divergence=None, meshes={}, counts_steps=True
    )
    (finding,) = in_words(only).findings
    return finding


def worded(finding: Finding) -> Finding:
    """A finding that no rule made, with its sentences."""
    trouble: list[Trouble] = []
    found = sentences.with_claim(finding, trouble)
    assert trouble == []
    return found


def whole(found: Finding) -> str:
    """The claim with what the evidence leaves open of it."""
    return "; ".join((found.claim, *found.left_open))


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


def locked_in_backward(rank: int) -> RankSnapshot:
    """A rank that waits for a lock inside the backward pass."""
    hook = replace(stack(frame(29, function="hook"), BACKWARD, tid=100 + rank), native=IN_LOCK)
    return rank_snapshot(rank, stacks=(hook,))


def in_all_reduce(rank: int, *collectives: Collective, calls: Sequence[Call] = (), **changes: Any) -> RankSnapshot:
    facts = {"collectives": collectives, "status_file": board(calls=tuple(calls)) if calls else None}
    return rank_snapshot(rank, ALL_REDUCE, frame(40), **{**facts, **changes})
