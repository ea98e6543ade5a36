"""`export --as misdiagnosis`: pack a wrong answer and the truth into one file that can be judged again.

The file has the form of a round of `evaluation/rounds`: recordings, truths and answers. It contains evidence and
excerpts of the program, redacted and under an invented directory, but no logs, environment or command.
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
from nsa_harness.supervisor.storage.redacted_files import learn_all_secrets, write_texts
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, find_run, refuse_if_running
from nsa_harness.supervisor.storage.sources import FILE, stored_sources, text_as_launched
from nsa_harness.texts.words import plural, ranks

SCHEMA = 1
PROJECT = "/home/ada/project"  # directory of the program in a recording
_HOME = "/home/ada"
_FOLDER = "recorded"
_LIBRARIES = re.compile(r"/[^\s\"]*?/lib/(python3\.\d+)/")
_MAX_BYTES = 64 << 20
_MAX_NOTE = 4000

Word = TypeVar("Word", Cause, Status)


@dataclass(frozen=True, kw_only=True)
class StatedTruth:
    """The truth that the user stated; None or empty for a part that the user does not know."""

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

    def values(self, project: str) -> dict[str, Any]:
        """Return the truth for JSON, its file relative to the program's directory."""
        is_inside = project and self.file and self.file.startswith("/")
        return {
            "verdict": self.verdict.value,
            "cause": self.cause and self.cause.value,
            "ranks": list(self.ranks),
            "file": os.path.relpath(self.file or "", project) if is_inside else self.file,
            "line": self.line,
        }


def record_misdiagnosis(
    stored: Path | None, stated: StatedTruth, *, to: Path | None = None, out: Path | None = None, redact: bool = True
) -> Iterator[str]:
    """Write the recording, and yield lines that describe it.

    Raises UsageError if the truth is impossible or not new.
    """
    run = find_run(stored, out or Path("reports"), redact=redact)
    with refuse_if_running(run):
        attempt = _attempt(run, stored)
        harness, outcome = _judged(run, attempt)
        evidence = _evidence(attempt)
        truth, evidence = _checked(stated, attempt, evidence, outcome)
        target = to or run.path.parent / f"{run.run_id}.{attempt.path.name}.wrong.tar.gz"
        learn_all_secrets(run)
        project = _project(evidence)
        answer, true = said(outcome_values(outcome), project), truth.values(project)
        program = f"{_FOLDER}/{attempt.path.name}.py"
        facts = {
            "harness": harness, "schema": SCHEMA, "date": datetime.now(UTC).date().isoformat(), **_environment(attempt),
            "attempt": attempt.path.name, "said": answer, "true": true,
            "note": run.redaction.text(stated.note[:_MAX_NOTE]),
        }  # fmt: skip
        texts = {
            "wrong.json": json.dumps(facts, indent=1) + "\n",
            f"{_FOLDER}/truth.json": json.dumps([_scored(attempt, evidence, true, stated.note)], indent=1) + "\n",
            "answers.jsonl": json.dumps({"program": program, **answer}, sort_keys=True) + "\n",
            "evidence.jsonl": f'{{"program": "{program}", "evidence": {evidence_text(evidence)}}}\n',
        }
        places = ((project, PROJECT), (str(Path.home()), _HOME))
        clean = {name: without_paths(run.redaction.json(text), places) for name, text in texts.items()}
        packed = {name: text.encode("utf-8", "surrogateescape") for name, text in clean.items()}
        packed["evidence.jsonl.gz"] = gzip.compress(packed.pop("evidence.jsonl"), mtime=0)
        write_texts(target, {f"{run.run_id}.wrong/{name}": data for name, data in packed.items()})
    quoted = sum(len(source.text.splitlines()) for source in evidence.sources)
    yield f"{target}: {target.stat().st_size} bytes"
    yield f"  taken     evidence of {plural(len(evidence.ranks), 'rank')}, {plural(quoted, 'line')} of your program"
    yield "  left out  logs, environment, command; secrets that are known; the folders of this machine"
    yield f"  said      {_answer_text(answer)}"
    yield f"  true      {_answer_text(true)}"
    yield f"  look      tar tzf {target.absolute()}"
    yield "  then      attach it to an issue; python -m evaluation replay FILE, in a checkout, judges it again"


def said(outcome: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the answer of an outcome of report.json in the form that is scored. `folder`: the program's directory."""
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
        "beside": [finding["code"] for finding in findings],
        "summary": outcome["summary"],
        "detected_s": timing.get("detected_s"),
        "quiet_s": timing.get("quiet_s"),
    }


def without_paths(text: str, places: Sequence[tuple[str, str]]) -> str:
    """Replace the directories of the recording machine; a library stays recognizable as a library."""
    text = _LIBRARIES.sub(r"/usr/lib/\1/", text)
    for path, instead in places:
        text = text.replace(path, instead) if len(path) > 1 else text
    return text


# The stored run.


def _attempt(run: RunDir, stored: Path | None) -> AttemptDir:
    attempts = list(run.attempts())
    inside = [
        attempt
        for attempt in attempts
        if stored is not None and stored.resolve().is_relative_to(attempt.path.resolve())
    ]
    chosen = inside or attempts
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise StoredRunError(f"{run.path}: nothing was launched in it, so nothing was judged")
    names = ", ".join(str(run.path / attempt.path.name) for attempt in attempts[:10])
    raise UsageError(f"{run.path} has {len(attempts)} attempts; name the one that was judged wrongly: {names}")


def _judged(run: RunDir, attempt: AttemptDir) -> tuple[str, Outcome]:
    """Return the version that judged the attempt, and its outcome."""
    try:
        text = run.door.whole(run.report, _MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise StoredRunError(f"{run.report}: {error}; nsa-harness report {run.path} makes it") from None
    report = from_json(text, str(run.report))
    for outcome in report.outcomes:
        if outcome.dir == attempt.path.name:
            return report.harness, outcome
    raise StoredRunError(f"{run.report} says nothing of {attempt.path.name}; nsa-harness report {run.path} judges it")


def _evidence(attempt: AttemptDir) -> Evidence:
    files = attempt.door.files(attempt.evidence, "*.json")
    if not files:
        raise StoredRunError(f"{attempt.path} holds no evidence; nsa-harness report {attempt.path.parent} makes it")
    try:
        evidence = adapter(Evidence).validate_json(attempt.door.whole(files[0], _MAX_BYTES))
        there = attempt.door.exists(attempt.path / FILE)
        return replace(evidence, sources=stored_sources(attempt)) if there else evidence
    except (OSError, ValueError, ValidationError) as error:
        raise StoredRunError(f"{files[0]} cannot be read: {str(error).splitlines()[0]}") from None


def _project(evidence: Evidence) -> str:
    """Return the common directory of the program's files that the evidence names, or "" without any."""
    files = (*places_of(evidence), *(source.file for source in evidence.sources))
    absolute = sorted({str(PurePosixPath(file).parent) for file in files if file.startswith("/")})
    return os.path.commonpath(absolute) if absolute else ""


def _environment(attempt: AttemptDir) -> dict[str, Any]:
    try:
        environment = json.loads(attempt.door.whole(attempt.env, _MAX_BYTES))
        git = environment.get("git") or {}
        return {"packages": environment.get("packages"), "commit": git.get("commit"), "dirty": git.get("dirty")}
    except (OSError, ValueError, RecursionError, AttributeError):
        return {"packages": None, "commit": None, "dirty": None}


# The truth.


def _checked(stated: StatedTruth, attempt: AttemptDir, evidence: Evidence, outcome: Outcome) -> tuple[_Truth, Evidence]:
    """Check what the user stated. Return it as the truth, and the evidence with the source around its line."""
    verdict = _word("--verdict", stated.verdict, Status) or outcome.verdict.status
    cause = _word("--cause", stated.cause, Cause)
    if strangers := [rank for rank in stated.ranks if not 0 <= rank < evidence.world_size]:
        raise UsageError(f"--rank {strangers[0]}: there are ranks 0 to {evidence.world_size - 1}")
    file, line, sources = _line(stated.line, attempt, evidence)
    truth = _Truth(verdict=verdict, cause=cause, ranks=tuple(sorted(set(stated.ranks))), file=file, line=line)
    if _same(truth, outcome):
        raise UsageError("that is what was said; --line, --cause, --rank and --verdict say what is true instead")
    return truth, replace(evidence, node="node", sources=(*evidence.sources, *sources))


def _word(option: str, given: str | None, known: type[Word]) -> Word | None:
    if given is None:
        return None
    for word in known:
        if word.value.lower() == given.lower():
            return word
    more = did_you_mean(given, [word.value for word in known]) or (
        f"; known: {', '.join(known)}" if known is Status else "; docs/findings.md has all"
    )
    raise UsageError(f"{option} {given}: there is none of this name{more}")


def _line(
    given: str | None, attempt: AttemptDir, evidence: Evidence
) -> tuple[str | None, int | None, tuple[Source, ...]]:
    """Return the file and line, and excerpts if they are new: from the recording, or from the unchanged file itself."""
    if given is None:
        return None, None, ()
    name, _, number = given.rpartition(":")
    if not name or not number.isascii() or not number.isdigit() or not 1 <= int(number) < 10**7:
        raise UsageError(f"--line: expected FILE:LINE, such as train.py:41, got {given!r}")
    line, here = int(number), str(Path(name).resolve())
    places = places_of(evidence)
    file = _file(name, here, sorted({*(source.file for source in evidence.sources), *places}))
    if ProgramSource(evidence.sources).excerpt_at(file, line) is not None or line in places.get(file, ()):
        return file, line, ()
    text = text_as_launched(file if file == here else "", attempt.door.changed_ns(attempt.spec) / 1e9 or None)
    if text and line <= len(text.splitlines()):
        found = excerpts(file, text, {line})
        return file, line, tuple(replace(one, text=attempt.redaction.text(one.text, code=True)) for one in found)
    of_file = [source for source in evidence.sources if source.file == file]
    spans = {(source.first, source.first + len(source.text.splitlines()) - 1) for source in of_file}
    spans |= {(at, at) for at in places.get(file, ())}
    recorded = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in sorted(spans))
    raise UsageError(
        f"--line {given}: of {file} was recorded: {recorded or 'nothing'}; "
        "name one of these, or stand where the file lies, unchanged"
    )


def _file(name: str, here: str, known: Sequence[str]) -> str:
    exact = [file for file in known if file in (name, here)]
    ends = exact or [file for file in known if file.endswith(f"/{name.removeprefix('./')}")]
    if len(ends) == 1:
        return ends[0]
    if len(ends) > 1:
        raise UsageError(f"--line {name}: {len(ends)} files end so: {', '.join(ends)}; say more of the path")
    if Path(here).is_file():
        return here
    names = [PurePosixPath(file).name for file in known]
    more = did_you_mean(PurePosixPath(name).name, names) or f"; recorded: {', '.join(sorted(set(names))) or 'none'}"
    raise UsageError(f"--line {name}: no file of the program that was recorded{more}")


def _same(truth: _Truth, outcome: Outcome) -> bool:
    """Whether the outcome already contains everything that the user states."""
    verdict, culprit = outcome.verdict, outcome.culprit
    place = culprit.place if culprit else None
    return (
        truth.verdict is verdict.status
        and truth.cause in (None, verdict.cause)
        and truth.ranks in ((), culprit.ranks if culprit else ())
        and (truth.line is None or (place is not None and (place.file, place.line) == (truth.file, truth.line)))
    )


# The text.


def _scored(attempt: AttemptDir, evidence: Evidence, true: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Return the truth in the form of truth.json in `evaluation/rounds`."""
    healthy = true["verdict"] == Status.PASS and true["cause"] is None
    return {
        "program": f"{attempt.path.name}.py",
        "ranks": evidence.world_size,
        "args": [],
        "healthy": healthy,
        "verdict": true["verdict"],
        "family": "none" if healthy else true["cause"] or "",
        "also": [],
        "guilty": [true["ranks"]] if true["ranks"] else [],
        "lines": [{"file": true["file"], "from": true["line"], "to": true["line"]}] if true["file"] else [],
        "why": note[:_MAX_NOTE],
    }


def _answer_text(answer: Mapping[str, Any]) -> str:
    place = f"{answer['file']}:{answer['line']}" if answer["line"] else ""
    who = ranks(answer["ranks"]) if answer["ranks"] else ""
    return " · ".join(part for part in (answer["verdict"], answer["cause"], who, place) if part)
