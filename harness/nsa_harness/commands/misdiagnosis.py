"""`wrong`: what was judged, and what is true, as one file that can be judged again.

It has the form that `tools/strangers.py` scores: recordings, truths, and what was said of them. In go evidence and
excerpts of the program, redacted and under an invented folder; logs, the environment and the command stay out.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import ValidationError

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import Evidence, Source
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.source_code.collection import excerpts, places_of
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.errors import StoredRunError, UsageError, did_you_mean
from nsa_harness.render.documents.report_json import from_json, outcome_values
from nsa_harness.supervisor.storage.adapters import adapter, evidence_text
from nsa_harness.supervisor.storage.redacted_files import know_all, write_texts
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, at_rest, find_run
from nsa_harness.supervisor.storage.sources import FILE, stored_sources, text_as_launched
from nsa_harness.texts.words import plural, ranks

SCHEMA = 1
PROJECT = "/home/ada/project"  # where a recording has the program
_HOME = "/home/ada"
_FOLDER = "recorded"
_LIBRARIES = re.compile(r"/[^\s\"]*?/lib/(python3\.\d+)/")
_MAX_BYTES = 64 << 20
_MAX_NOTE = 4000

Word = TypeVar("Word", Cause, Status)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is true, as it was typed; None or empty where nothing was said of it."""

    line: str | None = None
    cause: str | None = None
    ranks: tuple[int, ...] = ()
    verdict: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Truth:
    verdict: Status
    cause: Cause | None
    ranks: tuple[int, ...]
    file: str | None
    line: int | None


def record_wrong(
    stored: Path | None, claim: Claim, *, to: Path | None = None, out: Path | None = None, redact: bool = True
) -> Iterator[str]:
    """Writes the recording and tells what it holds. Raises UsageError where that cannot be, or is not new."""
    run = find_run(stored, out or Path("reports"), redact=redact)
    with at_rest(run):
        attempt = _attempt(run, stored)
        harness, outcome = _judged(run, attempt)
        evidence = _evidence(attempt)
        truth, evidence = _checked(claim, attempt, evidence, outcome)
        target = to or run.path.parent / f"{run.run_id}.{attempt.path.name}.wrong.tar.gz"
        know_all(run)
        project = _project(evidence)
        said_then = said(outcome_values(outcome), project)
        program = f"{_FOLDER}/{attempt.path.name}.py"
        texts = {
            "wrong.json": _json({"harness": harness, **_facts(run, attempt, said_then, truth, claim, project)}),
            f"{_FOLDER}/truth.json": _json([_scored(attempt, evidence, truth, claim, project)]),
            "answers.jsonl": json.dumps({"program": program, **said_then}, sort_keys=True) + "\n",
            "evidence.jsonl": f'{{"program": "{program}", "evidence": {evidence_text(evidence)}}}\n',
        }
        places = ((project, PROJECT), (str(Path.home()), _HOME))
        clean = {name: without_paths(run.redaction.json(text), places) for name, text in texts.items()}
        packed = {name: text.encode("utf-8", "surrogateescape") for name, text in clean.items()}
        packed["evidence.jsonl.gz"] = gzip.compress(packed.pop("evidence.jsonl"), mtime=0)
        write_texts(target, {f"{run.run_id}.wrong/{name}": data for name, data in packed.items()})
    yield from _told(target, evidence, said_then, truth, project)


def said(outcome: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The answer of an outcome as report.json has it, in the form that is scored. `folder`: of the program."""
    culprit, findings = outcome.get("culprit") or {}, outcome.get("findings") or []
    place = culprit.get("place") or (findings[0].get("place") if findings else None) or {}
    timing = outcome.get("timing") or {}
    return {
        "verdict": outcome["verdict"],
        "kind": outcome.get("kind"),
        "cause": outcome.get("cause"),
        "ranks": list(culprit.get("ranks") or []),
        "file": os.path.relpath(place["file"], folder) if place.get("file") else None,
        "line": place.get("line"),
        "confidence": findings[0]["confidence"] if findings and outcome.get("cause") else None,
        "beside": [one["code"] for one in findings],
        "summary": outcome["summary"],
        "detected_s": timing.get("detected_s"),
        "quiet_s": timing.get("quiet_s"),
    }


def without_paths(text: str, places: Sequence[tuple[str, str]]) -> str:
    """Names no directory of the machine it was recorded on; what is a library stays one."""
    text = _LIBRARIES.sub(r"/usr/lib/\1/", text)
    for path, instead in places:
        text = text.replace(path, instead) if len(path) > 1 else text
    return text


# What lies in the run.


def _attempt(run: RunDir, stored: Path | None) -> AttemptDir:
    attempts = list(run.attempts())
    inside = [one for one in attempts if stored is not None and _within(stored, one.path)]
    chosen = inside or attempts
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise StoredRunError(f"{run.path}: nothing was launched in it, so nothing was judged")
    names = ", ".join(str(run.path / one.path.name) for one in attempts[:10])
    raise UsageError(f"{run.path} has {len(attempts)} attempts; name the one that was judged wrongly: {names}")


def _within(stored: Path, attempt: Path) -> bool:
    return stored.resolve().is_relative_to(attempt.resolve())


def _judged(run: RunDir, attempt: AttemptDir) -> tuple[str, Outcome]:
    """What was said, and by which version."""
    try:
        text = run.door.whole(run.report, _MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise StoredRunError(f"{run.report}: {error}; nsa-harness report {run.path} makes it") from None
    report = from_json(text, str(run.report))
    found = [one for one in report.outcomes if one.dir == attempt.path.name]
    if not found:
        raise StoredRunError(
            f"{run.report} says nothing of {attempt.path.name}; nsa-harness report {run.path} judges it"
        )
    return report.harness, found[0]


def _evidence(attempt: AttemptDir) -> Evidence:
    files = attempt.door.files(attempt.evidence, "*.json")
    if not files:
        raise StoredRunError(f"{attempt.path} holds no evidence; nsa-harness report {attempt.path.parent} makes it")
    try:
        evidence = adapter(Evidence).validate_json(attempt.door.whole(files[0], _MAX_BYTES))
        there = attempt.door.there(attempt.path / FILE)
        return replace(evidence, sources=stored_sources(attempt)) if there else evidence
    except (OSError, ValueError, ValidationError) as error:
        raise StoredRunError(f"{files[0]} cannot be read: {str(error).splitlines()[0]}") from None


# What is true.


def _checked(claim: Claim, attempt: AttemptDir, evidence: Evidence, outcome: Outcome) -> tuple[_Truth, Evidence]:
    """The truth, and the evidence with the source around its line."""
    verdict = _word("--verdict", claim.verdict, Status) or outcome.verdict.status
    cause = _word("--cause", claim.cause, Cause)
    if strangers := [rank for rank in claim.ranks if not 0 <= rank < evidence.world_size]:
        raise UsageError(f"--rank {strangers[0]}: there are ranks 0 to {evidence.world_size - 1}")
    file, line, found = _line(claim.line, attempt, evidence)
    truth = _Truth(verdict=verdict, cause=cause, ranks=tuple(sorted(set(claim.ranks))), file=file, line=line)
    if _same(truth, outcome):
        raise UsageError("that is what was said; --line, --cause, --rank and --verdict say what is true instead")
    return truth, replace(evidence, node="node", sources=(*evidence.sources, *found))


def _word(option: str, given: str | None, known: type[Word]) -> Word | None:
    if given is None:
        return None
    found = next((one for one in known if one.value.lower() == given.lower()), None)
    if found is None:
        more = did_you_mean(given, [one.value for one in known]) or (
            f"; known: {', '.join(known)}" if known is Status else "; docs/findings.md has all"
        )
        raise UsageError(f"{option} {given}: there is none of this name{more}")
    return found


def _line(
    given: str | None, attempt: AttemptDir, evidence: Evidence
) -> tuple[str | None, int | None, tuple[Source, ...]]:
    """Of what was recorded of the program; else of the file itself, as long as it is as it was launched."""
    if given is None:
        return None, None, ()
    name, _, number = given.rpartition(":")
    if not name or not number.isascii() or not number.isdigit() or not 1 <= int(number) < 10**7:
        raise UsageError(f"--line: expected FILE:LINE, such as train.py:41, got {given!r}")
    line, here = int(number), str(Path(name).resolve())
    places = places_of(evidence)
    file = _file(name, here, sorted({*(one.file for one in evidence.sources), *places}))
    if ProgramSource(evidence.sources).excerpt_at(file, line) is not None or line in places.get(file, ()):
        return file, line, ()
    text = text_as_launched(file if file == here else "", attempt.door.changed_ns(attempt.spec) / 1e9 or None)
    if text and line <= len(text.splitlines()):
        kept = (replace(one, text=attempt.redaction.text(one.text, code=True)) for one in excerpts(file, text, {line}))
        return file, line, tuple(kept)
    held = [(one.first, one.first + len(one.text.splitlines()) - 1) for one in evidence.sources if one.file == file]
    spans = sorted({*held, *((at, at) for at in places.get(file, ()))})
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) or "nothing"
    raise UsageError(
        f"--line {given}: of {file} was recorded: {told}; name one of these, or stand where the file lies, unchanged"
    )


def _file(name: str, here: str, known: Sequence[str]) -> str:
    exact = [one for one in known if one in (name, here)]
    ends = exact or [one for one in known if one.endswith(f"/{name.removeprefix('./')}")]
    if len(ends) == 1:
        return ends[0]
    if len(ends) > 1:
        raise UsageError(f"--line {name}: {len(ends)} files end so: {', '.join(ends)}; say more of the path")
    if Path(here).is_file():
        return here
    names = [PurePosixPath(one).name for one in known]
    more = did_you_mean(PurePosixPath(name).name, names) or f"; recorded: {', '.join(sorted(set(names))) or 'none'}"
    raise UsageError(f"--line {name}: no file of the program that was recorded{more}")


def _same(truth: _Truth, outcome: Outcome) -> bool:
    """Whatever was claimed had been said."""
    verdict, culprit = outcome.verdict, outcome.culprit
    place = culprit.place if culprit else None
    return (
        truth.verdict is verdict.status
        and truth.cause in (None, verdict.cause)
        and truth.ranks in ((), culprit.ranks if culprit else ())
        and (truth.line is None or (place is not None and (place.file, place.line) == (truth.file, truth.line)))
    )


# What is written.


def _project(evidence: Evidence) -> str:
    """The folder of all files of the program that the evidence names."""
    folders = {
        str(PurePosixPath(one).parent) for one in (*places_of(evidence), *(one.file for one in evidence.sources))
    }
    absolute = sorted(one for one in folders if one.startswith("/"))
    return os.path.commonpath(absolute) if absolute else ""


def _facts(
    run: RunDir, attempt: AttemptDir, said_then: Mapping[str, Any], truth: _Truth, claim: Claim, project: str
) -> dict[str, Any]:
    try:
        environment = json.loads(attempt.door.whole(attempt.env, _MAX_BYTES))
        git = environment.get("git") or {}
    except (OSError, ValueError, RecursionError, AttributeError):
        environment, git = {}, {}
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "packages": environment.get("packages"),
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "attempt": attempt.path.name,
        "said": dict(said_then),
        "true": {
            "verdict": truth.verdict.value,
            "cause": truth.cause and truth.cause.value,
            "ranks": list(truth.ranks),
            "file": truth.file and _relative(truth.file, project),
            "line": truth.line,
        },
        "note": run.redaction.text(claim.note[:_MAX_NOTE]),
    }


def _scored(attempt: AttemptDir, evidence: Evidence, truth: _Truth, claim: Claim, project: str) -> dict[str, Any]:
    """As the truths of strangers stand in their truth.json."""
    healthy = truth.verdict is Status.PASS and truth.cause is None
    lines = [{"file": _relative(truth.file, project), "from": truth.line, "to": truth.line}] if truth.file else []
    return {
        "program": f"{attempt.path.name}.py",
        "ranks": evidence.world_size,
        "args": [],
        "healthy": healthy,
        "verdict": truth.verdict.value,
        "family": "none" if healthy else truth.cause.value if truth.cause else "",
        "also": [],
        "guilty": [list(truth.ranks)] if truth.ranks else [],
        "lines": lines,
        "why": claim.note[:_MAX_NOTE],
    }


def _relative(file: str, project: str) -> str:
    return os.path.relpath(file, project) if project and file.startswith("/") else file


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def _told(target: Path, evidence: Evidence, said_then: Mapping[str, Any], truth: _Truth, project: str) -> Iterator[str]:
    quoted = sum(len(one.text.splitlines()) for one in evidence.sources)
    yield f"{target}: {target.stat().st_size} bytes"
    yield f"  taken     evidence of {plural(len(evidence.ranks), 'rank')}, {plural(quoted, 'line')} of your program"
    yield "  left out  logs, environment, command; secrets that are known; the folders of this machine"
    place = f"{said_then['file']}:{said_then['line']}" if said_then["line"] else ""
    yield f"  said      {_answer(said_then['verdict'], said_then['cause'], said_then['ranks'], place)}"
    where = f"{_relative(truth.file, project)}:{truth.line}" if truth.file else ""
    yield f"  true      {_answer(truth.verdict.value, truth.cause, truth.ranks, where)}"
    yield f"  look      tar tzf {target.absolute()}"
    yield "  then      attach it to an issue; tools/strangers.py replay FILE, in a checkout, judges it again"


def _answer(verdict: str, cause: str | None, who: Sequence[int], place: str) -> str:
    return " · ".join(part for part in (verdict, cause, ranks(who) if who else "", place) if part)
