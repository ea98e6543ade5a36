"""The files that nsa.train writes beside those of every program, and why one is not there."""

from __future__ import annotations

from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import CountedIn, ProgramFile

FOLDER = "nsa"  # where it lies in our package, and in a checkout

_TELEMETRY = (
    ("training.csv", CountedIn.ROWS),
    ("k_stats.csv", CountedIn.ROWS),
    ("gate_health.csv", CountedIn.ROWS),
    ("fallback_counters.csv", CountedIn.ROWS),
    ("step_cost.csv", CountedIn.ROWS),
    ("dtypes_report.txt", CountedIn.LINES),
)


def is_launched_by(spec: RunSpec) -> bool:
    """nsa.train is the program: the harness spells out every option of it."""
    return bool({"--trace-grads", "--no-trace-grads"} & set(spec.program))


def program_files(spec: RunSpec, evidence: Evidence) -> tuple[ProgramFile, ...]:
    """Of another program there is no reason to give: what it happens to write by these names is listed."""
    ours = is_launched_by(spec)
    reached = any(rank.board and rank.board.steps_s for rank in evidence.ranks)
    no_table = "the program did not write it" if reached else "not reached: no optimizer step was done"
    steps = "heartbeat_rank*.jsonl"
    reasons = (
        ("traces.log", CountedIn.LINES, "output.log", "no trace was switched on"),
        *((pattern, counted_in, steps, no_table) for pattern, counted_in in _TELEMETRY),
        ("mem_rank*.txt", CountedIn.LINES, steps, "switched off: trace.mem_dump_every is 0"),
        ("mem_profile_rank*.txt", CountedIn.LINES, steps, "switched off: trace.profile_memory is false"),
    )
    return tuple(
        ProgramFile(pattern=pattern, counted_in=counted_in, after=after, absent=absent if ours else None)
        for pattern, counted_in, after, absent in reasons
    )
