"""List the files that nsa.train writes, and explain why a file might be absent."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_harness.core.evidence.evidence import Evidence
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import CountedIn, ProgramFile

# Where a checkout keeps the program, the present layout first. Checkouts of older commits have it directly in `nsa`.
IN_CHECKOUT = ("nsa/nsa_attention", "nsa")

_TELEMETRY = (
    ("training.csv", CountedIn.ROWS),
    ("k_stats{}.csv", CountedIn.ROWS),
    ("gate_health.csv", CountedIn.ROWS),
    ("fallback_counters{}.csv", CountedIn.ROWS),
    ("step_cost.csv", CountedIn.ROWS),
    ("dtypes_report{}.txt", CountedIn.LINES),
)
SHARDED = "_fsdp"  # part of some file names if the model is sharded


def is_launched_by(spec: RunSpec) -> bool:
    """Return whether the run specification launches nsa.train."""
    return bool({"--trace-grads", "--no-trace-grads"} & set(spec.program))


def program_files(spec: RunSpec, evidence: Evidence) -> tuple[ProgramFile, ...]:
    """Return the files that nsa.train writes, with reasons why each could be absent if it was launched."""
    ours = is_launched_by(spec)
    return tuple(
        ProgramFile(pattern=pattern, counted_in=counted_in, after=after, absent=absent if ours else None)
        for pattern, counted_in, after, absent in _reasons(spec, evidence)
    )


def _reasons(spec: RunSpec, evidence: Evidence) -> Iterator[tuple[str, CountedIn, str, str]]:
    """Yield, for each file that nsa.train writes, its pattern, counted unit, preceding file and reason for absence."""
    words, steps = spec.program, "heartbeat_rank*.jsonl"
    has_steps = any(rank.status_file and rank.status_file.steps_s for rank in evidence.ranks)
    late = "the program did not write it" if has_steps else "not reached: no optimizer step was done"
    off = "switched off: trace.telemetry is false" if _value(spec, "--telemetry") == "off" else ""
    dumps_memory = _value(spec, "--mem-dump-every") not in (None, "0")
    is_sharded = _value(spec, "--wrapper") in ("fsdp", "fsdp1")

    def switched(on: bool, key: str) -> str:
        return late if on else f"switched off: trace.{key}"

    yield "traces.log", CountedIn.LINES, "output.log", "no trace was switched on"
    for name, counted_in in _TELEMETRY:
        yield name.format(SHARDED * is_sharded), counted_in, steps, off or late
    yield "loader_rank*.json", CountedIn.FILES, steps, off or "not reached: it was not asked for data"
    if _value(spec, "--eval-every") not in (None, "0"):
        yield "evaluation.csv", CountedIn.ROWS, steps, "not reached: no evaluation was done"
    yield "grad_order_rank*.jsonl", CountedIn.LINES, steps, switched("--trace-grads" in words, "grads is false")
    for ending, counted_in in (("txt", CountedIn.LINES), ("json", CountedIn.FILES)):
        pattern = f"mem{SHARDED * is_sharded}_rank*.{ending}"
        yield pattern, counted_in, steps, off or switched(dumps_memory, "mem_dump_every is 0")
    profile_reason = switched("--profile-memory" in words, "profile_memory is false")
    yield "mem_profile_rank*.txt", CountedIn.LINES, steps, profile_reason
    snapshot = switched("--mem-snapshot" in words, "mem_snapshot is false")
    yield "mem_snapshot_rank*.pickle", CountedIn.FILES, steps, off or snapshot
    yield "tensorboard/*", CountedIn.FILES, steps, off or switched("--tensorboard" in words, "tensorboard is false")


def _value(spec: RunSpec, option: str) -> str | None:
    words = spec.program
    return words[words.index(option) + 1] if option in words[:-1] else None
