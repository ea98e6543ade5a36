"""`nsa-harness read`: judge a dead job from the logs and dumps that it left."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.commands.judge import judge_evidence
from nsa_harness.commands.session import report_of, write_report
from nsa_harness.core.evidence.job_files import JobFileKind
from nsa_harness.core.evidence.post_mortem import MissingData, PostMortem, read_post_mortem
from nsa_harness.core.outcome.values import shown_values
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Outcome, Report, Status, Trouble, exit_code
from nsa_harness.core.scenario.observed_job import job_name, observed_spec, with_ranks
from nsa_harness.core.source_code.collection import program_sources
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.errors import UsageError
from nsa_harness.render.documents.report_json import to_json
from nsa_harness.render.terminal.answer import ANSWER_LABEL_WIDTH
from nsa_harness.render.terminal.layout import command, labelled
from nsa_harness.render.terminal.stream import output_size
from nsa_harness.render.terminal.terminal import Terminal
from nsa_harness.render.text import escape
from nsa_harness.subject.playbook import PLAYBOOK
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.job_files import JobFiles, read_job_files
from nsa_harness.supervisor.storage.record import RunRecord
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import RunDir, create_run
from nsa_harness.supervisor.storage.sources import edited_sources, text_as_launched, with_source_text
from nsa_harness.texts import words

_MAX_FILE_LINES = 6  # lines about files that could not be used; the rest is only counted


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """A request to judge a dead job: the files to read, and the options of `nsa-harness read`."""

    paths: tuple[Path, ...]
    out: Path | None  # None: write no files
    json: bool
    verbose: bool
    command: str  # the command line of the user
    redact: bool = True


def read(request: ReadRequest) -> int:
    """Report how a dead job ended, and return its exit code. Raise UsageError if none of the files can be used."""
    job_files = read_job_files(request.paths)
    useful: Counter[JobFileKind] = Counter(
        file.kind for file in job_files.files if file.kind is not JobFileKind.NOTHING
    )
    if not useful:
        raise UsageError(_nothing_usable(job_files))
    run = create_run(request.out, redact=request.redact) if request.out else None
    redaction = run.redaction if run else Redaction(is_on=request.redact)
    redaction.suspect_environment(os.environ)
    post_mortem = read_post_mortem(job_files.files, socket.gethostname())
    # After a FAIL the printed error is enough, so no file is reported as missing.
    missing = post_mortem.missing if judge(post_mortem.evidence).status is not Status.FAIL else ()
    outcome = redaction.value(_outcome(request, job_files, post_mortem, useful, missing))
    report = _report(request, run, redaction, outcome)
    if run is not None:
        write_report(run, report)
    if request.json:
        sys.stdout.write(to_json(report, PLAYBOOK))
    else:
        _print_answer(request, report, run, missing)
    return exit_code(report)


def _nothing_usable(job_files: JobFiles) -> str:
    """Return an error message that explains why none of the files can be used."""
    lines = [f"{gap.what}: {gap.why}" for gap in job_files.trouble]
    lines += [f"{file.name}: {file.reason}" for file in job_files.files]
    reasons = [escape(line) for line in lines[:_MAX_FILE_LINES]]
    more = [f"and {len(lines) - _MAX_FILE_LINES} more"] if len(lines) > _MAX_FILE_LINES else []
    error = "read: none of these files is a log or a dump of a job; expected logs of torchrun or Slurm,"
    return "\n".join([f"{error} flight recorder dumps, or stacks of py-spy, faulthandler or pystack", *reasons, *more])


def _outcome(
    request: ReadRequest,
    job_files: JobFiles,
    post_mortem: PostMortem,
    useful: Mapping[JobFileKind, int],
    missing: Sequence[MissingData],
) -> Outcome:
    absent = (Trouble(what=file.name, why=f"missing; next time: {' · '.join(file.how)}") for file in missing)
    evidence = replace(post_mortem.evidence, trouble=(*job_files.trouble, *post_mortem.evidence.trouble, *absent))
    since_s = job_files.latest_change_ns / 1e9

    # Paths in a log are not trusted: only Python files that are older than the log are opened.
    def source(file: str) -> str:
        return text_as_launched(file, since_s) if file.endswith(".py") else ""

    evidence = replace(evidence, sources=tuple(program_sources(evidence, source)))
    evidence = replace(evidence, trouble=(*evidence.trouble, *edited_sources(evidence, since_s, "the log")))
    program = [post_mortem.script or request.paths[0].resolve().name]
    spec = observed_spec(job_name(program), "read from the files that it left", program, Limits(), "")
    spec = with_ranks(spec, evidence.world_size)
    file_counts = " · ".join(words.plural(count, kind.value) for kind, count in sorted(useful.items()))
    spec = replace(spec, backend=evidence.backend, notes=(f"read: {file_counts}",))
    outcome = judge_evidence(spec, evidence, attempt=1, directory="", artifacts=(), metrics={}, repeat=None)
    outcome = replace(outcome, values=shown_values(outcome, evidence.sources, (), with_definitions=True))
    return with_source_text(_with_files(outcome, post_mortem), evidence.sources)


def _with_files(outcome: Outcome, post_mortem: PostMortem) -> Outcome:
    """Return the outcome with the proofs of its findings and stacks given as paths of the files that were read."""
    files = {proof: os.path.abspath(name) for proof, name in post_mortem.files.items()}

    def files_read(proofs: Sequence[str]) -> Iterator[str]:
        return (files[proof.lstrip("/")] for proof in proofs if proof.lstrip("/") in files)

    findings = tuple(
        replace(finding, proof=tuple(dict.fromkeys(files_read(finding.proof)))) for finding in outcome.findings
    )
    stacks = tuple(replace(stack, proof=next(files_read([stack.proof or ""]), None)) for stack in outcome.stacks)
    return replace(outcome, findings=findings, stacks=stacks)


def _report(request: ReadRequest, run: RunDir | None, redaction: Redaction, outcome: Outcome) -> Report:
    facts = machine_facts()
    if run is not None:
        record = RunRecord(
            command=request.command,
            harness=__version__,
            machine=facts,
            controller=os.getpid(),
            plan=(),
            plan_text=shipped_plan(),
        )
        return report_of(run, record, [outcome])
    report = Report(
        run_id="",
        harness=__version__,
        machine=facts,
        command=redaction.command_text(request.command),
        interrupted=False,
        outcomes=(outcome,),
    )
    return redaction.value(report)


def _print_answer(request: ReadRequest, report: Report, run: RunDir | None, missing: Sequence[MissingData]) -> None:
    (outcome,) = report.outcomes
    width = output_size(sys.stdout, os.environ)[0]
    if not request.verbose:
        absent = {file.name for file in missing}
        for line in _file_lines([gap for gap in outcome.trouble if gap.what not in absent], missing, width):
            print(line)
    screen = Terminal(sys.stdout, version=__version__, playbook=PLAYBOOK, verbose=request.verbose)
    where = run.path if run else Path()
    screen.on_outcome(outcome, where)
    if run is not None:
        screen.on_done(report, where)
    screen.close()


def _file_lines(unusable: Sequence[Trouble], missing: Sequence[MissingData], width: int) -> Iterator[str]:
    """Yield notes about unused files, and instructions for getting the missing ones next time."""
    for number, gap in enumerate(unusable[:_MAX_FILE_LINES]):
        yield from labelled("note" if number == 0 else "", escape(words.trouble(gap)), width, ANSWER_LABEL_WIDTH)
    if len(unusable) > _MAX_FILE_LINES:
        yield from labelled("", f"{len(unusable) - _MAX_FILE_LINES} more with -v", width, ANSWER_LABEL_WIDTH)
    yield from labelled("missing", " · ".join(file.name for file in missing), width, ANSWER_LABEL_WIDTH)
    if missing:
        yield from command(
            "next time", "nsa-harness watch -- COMMAND, or for each of these:", width, ANSWER_LABEL_WIDTH
        )
        for file in missing:
            yield from command("", escape(file.how[0]), width, ANSWER_LABEL_WIDTH)
