"""`export --as misdiagnosis`: pack the wrong diagnosis of a run and the correct one into one file.

The file has the same format as the files in `evaluation/rounds`: evidence, true answers and given answers. It contains
the redacted evidence and excerpts of the program, with made-up directory names, but no logs, environment or command.
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
from nsa_harness.core.source_code.collection import excerpts, program_lines
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.errors import StoredRunError, UsageError, did_you_mean
from nsa_harness.render.documents.report_json import from_json, outcome_values
from nsa_harness.supervisor.storage.adapters import evidence_text, type_adapter
from nsa_harness.supervisor.storage.redacted_files import learn_all_secrets, write_texts
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, find_run, refuse_if_running
from nsa_harness.supervisor.storage.sources import FILE, stored_sources, text_as_launched
from nsa_harness.texts.words import plural, ranks

SCHEMA = 1
PROJECT = "/home/ada/project"  # replaces the directory of the program in the file
_HOME = "/home/ada"
_FOLDER = "recorded"
_LIBRARIES = re.compile(r"/[^\s\"]*?/lib/(python3\.\d+)/")
_MAX_BYTES = 64 << 20
_MAX_NOTE = 4000

Word = TypeVar("Word", Cause, Status)


@dataclass(frozen=True, kw_only=True)
class StatedTruth:
    """The correct diagnosis of a run according to the user. A field that the user does not know is None or empty."""

    line: str | None = None
    cause: str | None = None
    ranks: tuple[int, ...] = ()
    verdict: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Truth:
    """The correct diagnosis that the user stated, once it is checked against the evidence."""

    verdict: Status
    cause: Cause | None
    ranks: tuple[int, ...]
    file: str | None
    line: int | None

    def values(self, project: str) -> dict[str, Any]:
        is_inside = project and self.file and self.file.startswith("/")
        return {
            "verdict": self.verdict.value,
            "cause": self.cause and self.cause.value,
            "ranks": list(self.ranks),
            "file": os.path.relpath(self.file or "", project) if is_inside else self.file,
            "line": self.line,
        }


def record_misdiagnosis(
    run_path: Path | None,
    stated_truth: StatedTruth,
    *,
    to: Path | None = None,
    out: Path | None = None,
    redact: bool = True,
) -> Iterator[str]:
    """Write the wrong diagnosis of a run and the correct one to a file, and yield lines that describe this file.

    `run_path`: a run, or one attempt of it. `to`: the file to write; by default, a new file next to the run. Raises
    UsageError if the stated truth does not fit the run, or if it equals the answer that was given.
    """
    run = find_run(run_path, out or Path("reports"), redact=redact)
    with refuse_if_running(run):
        attempt = _attempt(run, run_path)
        harness, outcome = _stored_outcome(run, attempt)
        evidence = _evidence(attempt)
        truth, evidence = _check_truth(stated_truth, attempt, evidence, outcome)
        target = to or run.path.parent / f"{run.run_id}.{attempt.path.name}.wrong.tar.gz"
        learn_all_secrets(run)
        project = _project(evidence)
        answer, true = answer_values(outcome_values(outcome), project), truth.values(project)
        program = f"{_FOLDER}/{attempt.path.name}.py"
        facts = {
            "harness": harness, "schema": SCHEMA, "date": datetime.now(UTC).date().isoformat(), **_environment(attempt),
            "attempt": attempt.path.name, "said": answer, "true": true,
            "note": run.redaction.text(stated_truth.note[:_MAX_NOTE]),
        }  # fmt: skip
        texts = {
            "wrong.json": json.dumps(facts, indent=1) + "\n",
            f"{_FOLDER}/truth.json": json.dumps([_truth_entry(attempt, evidence, true, stated_truth.note)], indent=1)
            + "\n",
            "answers.jsonl": json.dumps({"program": program, **answer}, sort_keys=True) + "\n",
            "evidence.jsonl": f'{{"program": "{program}", "evidence": {evidence_text(evidence)}}}\n',
        }
        places = ((project, PROJECT), (str(Path.home()), _HOME))
        clean = {name: without_paths(run.redaction.json(text), places) for name, text in texts.items()}
        members = {name: text.encode("utf-8", "surrogateescape") for name, text in clean.items()}
        members["evidence.jsonl.gz"] = gzip.compress(members.pop("evidence.jsonl"), mtime=0)
        write_texts(target, {f"{run.run_id}.wrong/{name}": data for name, data in members.items()})
    excerpt_lines = sum(len(source.text.splitlines()) for source in evidence.sources)
    yield f"{target}: {target.stat().st_size} bytes"
    contents = f"evidence of {plural(len(evidence.ranks), 'rank')}, {plural(excerpt_lines, 'line')} of your program"
    yield f"  contains  {contents}"
    yield "  omitted   logs, environment, command, known secrets, directory names of this machine"
    yield f"  reported  {_answer_text(answer)}"
    yield f"  correct   {_answer_text(true)}"
    yield f"  check     tar tzf {target.absolute()}"
    yield "  next      attach it to an issue; in a checkout, `python -m evaluation replay FILE` judges it again"


def answer_values(outcome: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Extract the diagnosis from an outcome as `evaluation` scores it, with paths relative to `directory`."""
    culprit, findings = outcome.get("culprit") or {}, outcome.get("findings") or []
    place = culprit.get("place") or (findings[0].get("place") if findings else None) or {}
    timing = outcome.get("timing") or {}
    return {
        "verdict": outcome["verdict"],
        "kind": outcome.get("kind"),
        "cause": outcome.get("cause"),
        "ranks": list(culprit.get("ranks") or []),
        "file": os.path.relpath(place["file"], directory) if place.get("file") else None,
        "line": place.get("line"),
        "confidence": findings[0]["confidence"] if findings and outcome.get("cause") else None,
        "beside": [finding["code"] for finding in findings],
        "summary": outcome["summary"],
        "detected_s": timing.get("detected_s"),
        "quiet_s": timing.get("quiet_s"),
    }


def without_paths(text: str, places: Sequence[tuple[str, str]]) -> str:
    """Return `text` with each path of `places` replaced, and library directories by /usr/lib/pythonX.Y."""
    text = _LIBRARIES.sub(r"/usr/lib/\1/", text)
    for path, instead in places:
        text = text.replace(path, instead) if len(path) > 1 else text
    return text


# The stored run.


def _attempt(run: RunDir, run_path: Path | None) -> AttemptDir:
    """Return the attempt that `run_path` names, or else the only attempt of the run."""
    attempts = list(run.attempts())
    inside = [
        attempt
        for attempt in attempts
        if run_path is not None and run_path.resolve().is_relative_to(attempt.path.resolve())
    ]
    candidates = inside or attempts
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise StoredRunError(f"{run.path}: this run launched nothing, so there is no answer to correct")
    names = ", ".join(str(run.path / attempt.path.name) for attempt in attempts[:10])
    raise UsageError(f"{run.path} has {len(attempts)} attempts; name the attempt with the wrong answer: {names}")


def _stored_outcome(run: RunDir, attempt: AttemptDir) -> tuple[str, Outcome]:
    try:
        text = run.directory.read_whole_file(run.report, _MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise StoredRunError(f"{run.report}: {error}; `nsa-harness report {run.path}` writes it") from None
    report = from_json(text, str(run.report))
    for outcome in report.outcomes:
        if outcome.dir == attempt.path.name:
            return report.harness, outcome
    raise StoredRunError(
        f"{run.report} has no answer for {attempt.path.name}; `nsa-harness report {run.path}` judges it"
    )


def _evidence(attempt: AttemptDir) -> Evidence:
    files = attempt.directory.list_files(attempt.evidence, "*.json")
    if not files:
        raise StoredRunError(
            f"{attempt.path} contains no evidence; `nsa-harness report {attempt.path.parent}` collects it"
        )
    try:
        evidence = type_adapter(Evidence).validate_json(attempt.directory.read_whole_file(files[0], _MAX_BYTES))
        has_sources = attempt.directory.exists(attempt.path / FILE)
        return replace(evidence, sources=stored_sources(attempt)) if has_sources else evidence
    except (OSError, ValueError, ValidationError) as error:
        raise StoredRunError(f"{files[0]} cannot be read: {str(error).splitlines()[0]}") from None


def _project(evidence: Evidence) -> str:
    """Return the common parent directory of the program's files, or "" if it is unknown."""
    files = (*program_lines(evidence), *(source.file for source in evidence.sources))
    absolute = sorted({str(PurePosixPath(file).parent) for file in files if file.startswith("/")})
    return os.path.commonpath(absolute) if absolute else ""


def _environment(attempt: AttemptDir) -> dict[str, Any]:
    try:
        environment = json.loads(attempt.directory.read_whole_file(attempt.env, _MAX_BYTES))
        git = environment.get("git") or {}
        return {"packages": environment.get("packages"), "commit": git.get("commit"), "dirty": git.get("dirty")}
    except (OSError, ValueError, RecursionError, AttributeError):
        return {"packages": None, "commit": None, "dirty": None}


# The truth.


def _check_truth(
    stated_truth: StatedTruth, attempt: AttemptDir, evidence: Evidence, outcome: Outcome
) -> tuple[_Truth, Evidence]:
    """Return the user's diagnosis and the evidence with its source line. Raise UsageError if it does not fit."""
    verdict = _word("--verdict", stated_truth.verdict, Status) or outcome.verdict.status
    cause = _word("--cause", stated_truth.cause, Cause)
    if unknown_ranks := [rank for rank in stated_truth.ranks if not 0 <= rank < evidence.world_size]:
        raise UsageError(f"--rank {unknown_ranks[0]}: the run has ranks 0 to {evidence.world_size - 1}")
    file, line, sources = _line(stated_truth.line, attempt, evidence)
    truth = _Truth(verdict=verdict, cause=cause, ranks=tuple(sorted(set(stated_truth.ranks))), file=file, line=line)
    if _is_reported(truth, outcome):
        raise UsageError(
            "this is the answer that was reported; state the correct one with --line, --cause, --rank or --verdict"
        )
    return truth, replace(evidence, node="node", sources=(*evidence.sources, *sources))


def _word(option: str, text: str | None, choices: type[Word]) -> Word | None:
    """Return the member of `choices` that is named `text`, ignoring case. Raise UsageError if there is none."""
    if text is None:
        return None
    for word in choices:
        if word.value.lower() == text.lower():
            return word
    hint = did_you_mean(text, [word.value for word in choices]) or (
        f"; known: {', '.join(choices)}" if choices is Status else "; docs/findings.md lists them"
    )
    raise UsageError(f"{option} {text}: unknown name{hint}")


def _line(
    location: str | None, attempt: AttemptDir, evidence: Evidence
) -> tuple[str | None, int | None, tuple[Source, ...]]:
    """Return the file and line that --line names, and the source excerpts of this file that the evidence lacks.

    Excerpts are read from the file itself if it has not changed since the launch. Raises UsageError if the line is
    neither in the evidence nor in such a file.
    """
    if location is None:
        return None, None, ()
    name, _, number = location.rpartition(":")
    if not name or not number.isascii() or not number.isdigit() or not 1 <= int(number) < 10**7:
        raise UsageError(f"--line: expected FILE:LINE, such as train.py:41, got {location!r}")
    line, local_file = int(number), str(Path(name).resolve())
    places = program_lines(evidence)
    file = _file(name, local_file, sorted({*(source.file for source in evidence.sources), *places}))
    if ProgramSource(evidence.sources).excerpt_at(file, line) is not None or line in places.get(file, ()):
        return file, line, ()
    text = text_as_launched(
        file if file == local_file else "", attempt.directory.modified_ns(attempt.spec) / 1e9 or None
    )
    if text and line <= len(text.splitlines()):
        sources = excerpts(file, text, {line})
        return (
            file,
            line,
            tuple(replace(source, text=attempt.redaction.text(source.text, code=True)) for source in sources),
        )
    sources_of_file = [source for source in evidence.sources if source.file == file]
    spans = {(source.first, source.first + len(source.text.splitlines()) - 1) for source in sources_of_file}
    spans |= {(at, at) for at in places.get(file, ())}
    lines_text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in sorted(spans))
    raise UsageError(
        f"--line {location}: the evidence of {file} has only these lines: {lines_text or 'none'}; "
        "name one of them, or run this in the directory of the unchanged file"
    )


def _file(name: str, local_file: str, evidence_files: Sequence[str]) -> str:
    """Return the full path of the file that the user named. Raise UsageError if the name is ambiguous or unknown."""
    exact = [file for file in evidence_files if file in (name, local_file)]
    matches = exact or [file for file in evidence_files if file.endswith(f"/{name.removeprefix('./')}")]
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        raise UsageError(f"--line {name}: {len(matches)} files match: {', '.join(matches)}; give more of the path")
    if Path(local_file).is_file():
        return local_file
    names = [PurePosixPath(file).name for file in evidence_files]
    hint = did_you_mean(PurePosixPath(name).name, names) or f"; its files: {', '.join(sorted(set(names))) or 'none'}"
    raise UsageError(f"--line {name}: the evidence has no such file{hint}")


def _is_reported(truth: _Truth, outcome: Outcome) -> bool:
    """Return whether the reported outcome already agrees with the diagnosis stated by the user."""
    verdict, culprit = outcome.verdict, outcome.culprit
    place = culprit.place if culprit else None
    return (
        truth.verdict is verdict.status
        and truth.cause in (None, verdict.cause)
        and truth.ranks in ((), culprit.ranks if culprit else ())
        and (truth.line is None or (place is not None and (place.file, place.line) == (truth.file, truth.line)))
    )


# The texts of the file.


def _truth_entry(attempt: AttemptDir, evidence: Evidence, true: Mapping[str, Any], note: str) -> dict[str, Any]:
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
    """Return a diagnosis as one line of text: its verdict, cause, ranks and location."""
    place = f"{answer['file']}:{answer['line']}" if answer["line"] else ""
    culprits = ranks(answer["ranks"]) if answer["ranks"] else ""
    return " · ".join(part for part in (answer["verdict"], answer["cause"], culprits, place) if part)
