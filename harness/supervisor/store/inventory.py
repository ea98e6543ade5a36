"""The artifacts of an attempt: what is there and how much of it, why the rest is not, and its folder repro/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Artifact
from nsa_harness.core.reproduction import Reproduction
from nsa_harness.supervisor.store.reading import opened
from nsa_harness.supervisor.store.rundir import AttemptDir, write_document

_SCRIPT, _COMMAND = "repro/repro.py", "repro/command.txt"


def write_reproduction(attempt: AttemptDir, made: Reproduction | None) -> tuple[Artifact, ...]:
    """Write what there is; the files as artifacts, each with its reason where it is not there."""
    return tuple(_written(attempt, made))


def _written(attempt: AttemptDir, made: Reproduction | None) -> Iterator[Artifact]:
    # What an earlier judgement wrote may not fit this one.
    for path in (_SCRIPT, _COMMAND):
        with suppress(OSError):
            (attempt.path / path).unlink()
    why_not = "the run neither failed nor hung" if made is None else _no_folder(attempt)
    if made is None or why_not:
        yield from (Artifact(path=path, count=None, absent=why_not) for path in (_SCRIPT, _COMMAND))
        return
    if made.script is None:
        yield Artifact(path=_SCRIPT, count=None, absent=made.why_not)
    else:
        write_document(attempt.path / _SCRIPT, made.script)
        yield Artifact(path=_SCRIPT, count=made.script.count("\n"), absent=None)
    write_document(attempt.path / _COMMAND, made.command)
    yield Artifact(path=_COMMAND, count=made.command.count("\n"), absent=None)


def _no_folder(attempt: AttemptDir) -> str:
    """A link may lead anywhere: a stored run may come from somebody else."""
    if attempt.repro.is_symlink():
        return "repro is a link, which is not followed"
    try:
        attempt.repro.mkdir(exist_ok=True)
    except OSError as error:
        return f"repro cannot be made: {error.strerror}"
    return ""


_MAX_COUNTED_BYTES = 64 << 20


def inventory(attempt: AttemptDir, spec: RunSpec, evidence: Evidence) -> tuple[Artifact, ...]:
    return tuple(_artifacts(attempt, spec, evidence))


def _artifacts(attempt: AttemptDir, spec: RunSpec, evidence: Evidence) -> Iterator[Artifact]:
    reached = any(rank.board and rank.board.steps_s for rank in evidence.ranks)
    subject = any("--trace-grads" in word or "--no-trace-grads" in word for word in spec.program)
    not_ours = "written by nsa.train only"
    not_reached = "not reached: no optimizer step was done"
    absent_telemetry = not_ours if not subject else not_reached if not reached else "the program did not write it"
    reasons: tuple[tuple[str, Callable[[Path], int], str], ...] = (
        ("output.log", _lines, "it stays the job's own" if evidence.observed else "the program was not started"),
        ("traces.log", _lines, "no trace was switched on" if subject else not_ours),
        ("heartbeat_rank*.jsonl", _lines, not_reached),
        ("training.csv", _rows, absent_telemetry),
        ("k_stats.csv", _rows, absent_telemetry),
        ("gate_health.csv", _rows, absent_telemetry),
        ("fallback_counters.csv", _rows, absent_telemetry),
        ("dtypes_report.txt", _lines, absent_telemetry),
        ("mem_rank*.txt", _lines, "switched off: trace.mem_dump_every is 0" if subject else not_ours),
        ("mem_profile_rank*.txt", _lines, "switched off: trace.profile_memory is false" if subject else not_ours),
        ("dumps/rank*.txt", _one, _no_dumps(evidence)),
        ("profile.txt", _lines, _no_dumps(evidence)),
        ("step_ledger.txt", _lines, "no rank has both finished steps and a flight recorder"),
        ("rank*/flight.json", _one, "torch.distributed was not used, or the rank died before its exit"),
        ("rank*/raised.json", _one, "no rank raised"),
        ("rank*/stacks.txt", _one, "no rank died of a fatal signal"),
        ("env.json", _one, "it could not be written"),
    )
    for pattern, count, reason in reasons:
        found = sorted(attempt.path.glob(pattern))
        if found:
            yield Artifact(path=pattern, count=sum(map(count, found)), absent=None)
        else:
            yield Artifact(path=pattern, count=None, absent=reason)


def _no_dumps(evidence: Evidence) -> str:
    if evidence.ending is Ending.EXITED:
        return "nothing was suspected"
    return "the run was over before stacks could be taken"


def _one(_: Path) -> int:
    return 1


def _rows(path: Path) -> int:
    """Lines below the head of a table."""
    return max(0, _lines(path) - 1)


def _lines(path: Path) -> int:
    try:
        if path.stat().st_size > _MAX_COUNTED_BYTES:
            return path.stat().st_size // 80
        with opened(path) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
