"""The commands that work with stored runs, such as `nsa-harness report`, `export` and `history`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.options import REPORT, NoRedact, Out, StoredRun, Strict, Verbose, argument, option
from nsa_harness.errors import UsageError

JsonDocument = Annotated[bool, option("--json", "Print the answer as JSON.")]
HtmlPage = Annotated[Path | None, option("--html FILE", "Also write the answer to this file, as an HTML page.")]
TRUTH = "The correct answer (with --as misdiagnosis)"
_PROMPT = "Print the worst failure as text to paste, at most 6 kB."


def report(
    run_path: StoredRun = None,
    out: Out = None,
    as_json: Annotated[bool, option("--json", "Print report.json to stdout.", REPORT)] = False,
    strict: Strict = False,
    prompt: Annotated[bool, option("--prompt", _PROMPT, REPORT, hidden=True)] = False,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Judge a stored run again, from its files.

    Prints the answer and writes the report again. The exit code is the one that `run` returned.
    """
    from nsa_harness.commands.run import ReportFormat, rejudge

    if as_json and prompt:
        raise UsageError("--json and --prompt cannot be combined; choose one of them")
    report_format = ReportFormat.JSON if as_json else ReportFormat.PROMPT if prompt else ReportFormat.LINES
    raise typer.Exit(
        rejudge(run_path, report_format=report_format, strict=strict, out=out, redact=not no_redact, verbose=verbose)
    )


class ExportForm(StrEnum):
    BUNDLE = "bundle"
    MISDIAGNOSIS = "misdiagnosis"
    PROMPT = "prompt"


_FORM = (
    "bundle: all files in one archive; misdiagnosis: a wrong answer and the correct one; prompt: the worst failure as"
    " text, on stdout."
)
_TO = "File to write. Default: ./RUN.tar.gz; for a misdiagnosis RUN.ATTEMPT.wrong.tar.gz next to the run."
To = Annotated[Path | None, option("--to FILE", _TO)]
Line = Annotated[str | None, option("--line FILE:LINE", "The line that has to be changed.", TRUTH)]
CauseCode = Annotated[str | None, option("--cause CAUSE", "The true cause, a code from docs/findings.md.", TRUTH)]
Ranks = Annotated[list[int] | None, option("--rank N", "A rank that is at fault; may be repeated.", TRUTH)]
Verdict = Annotated[str | None, option("--verdict V", "The true verdict, if the reported one is wrong.", TRUTH)]
Note = Annotated[str, option("--note TEXT", "How you found out.", TRUTH)]


def export(
    run_path: Annotated[
        Path | None, argument("[RUN]", "A run directory, or one attempt in it. Default: the latest run.")
    ] = None,
    form: Annotated[ExportForm, option("--as", _FORM)] = ExportForm.BUNDLE,
    to: To = None,
    line: Line = None,
    cause: CauseCode = None,
    rank: Ranks = None,
    verdict: Verdict = None,
    note: Note = "",
    out: Out = None,
    no_redact: NoRedact = False,
) -> None:
    """Export a stored run, without secrets, to share it.

    A bundle has all files of the run except its launch settings. A misdiagnosis has a wrong answer, its evidence and
    the correct answer, and is meant for a bug report. A prompt is text to paste; its exit code is that of `report`.
    """
    truth_options = {"--line": line, "--cause": cause, "--rank": rank, "--verdict": verdict, "--note": note}
    options_in_use = [name for name, value in truth_options.items() if value]
    if form is ExportForm.MISDIAGNOSIS:
        wrong(run_path, line, cause, rank, verdict, note, to, out, no_redact)
    elif options_in_use:
        raise UsageError(f"{options_in_use[0]} states the correct answer; it needs --as misdiagnosis")
    elif form is ExportForm.BUNDLE:
        bundle(run_path, to, out, no_redact)
    elif to is not None:
        raise UsageError("--to has no effect with --as prompt, which prints to stdout; redirect it with > FILE")
    else:
        report(run_path, out, prompt=True, no_redact=no_redact)


def bundle(run_path: StoredRun = None, to: To = None, out: Out = None, no_redact: NoRedact = False) -> None:
    """Pack a stored run into one file: the earlier name of `export`."""
    from nsa_harness.supervisor.storage.redacted_files import write_bundle
    from nsa_harness.supervisor.storage.rundir import find_run

    run = find_run(run_path, out or Path("reports"), redact=not no_redact)
    target = to or Path(f"{run.run_id}.tar.gz")
    print(f"{target}: {write_bundle(run, target)} files; check them before you share them")


def wrong(
    run_path: StoredRun = None,
    line: Line = None,
    cause: CauseCode = None,
    rank: Ranks = None,
    verdict: Verdict = None,
    note: Note = "",
    to: To = None,
    out: Out = None,
    no_redact: NoRedact = False,
) -> None:
    """Pack a wrong answer and the correct one: the earlier name of `export --as misdiagnosis`."""
    from nsa_harness.commands.misdiagnosis import StatedTruth, record_misdiagnosis

    truth = StatedTruth(line=line, cause=cause, ranks=tuple(rank or ()), verdict=verdict, note=note)
    for text in record_misdiagnosis(run_path, truth, to=to, out=out, redact=not no_redact):
        print(text)


def fit(
    run_paths: Annotated[
        list[Path] | None,
        argument("[RUN...]", "Runs with a sweep over sequence lengths or layers. Default: the latest run."),
    ] = None,
    tokens: Annotated[int | None, option("--tokens N", "Predict a step with sequences of N tokens.", min=2)] = None,
    layers: Annotated[int | None, option("--layers N", "Predict a step with N layers.", min=1)] = None,
    out: Out = None,
) -> None:
    """Predict the cost of a larger step from stored sweeps.

    Shows how the time, memory and autograd graph of a step grow. Exits with 1 if a run at half the size contradicts the
    prediction, and with 125 if the runs are not enough to decide.
    """
    from nsa_harness.commands.fit import RequestedSize
    from nsa_harness.commands.fit import fit as fit_runs

    answer = fit_runs(run_paths or (), RequestedSize(tokens=tokens, layers=layers), out or Path("reports"))
    print("\n".join(answer.lines).lstrip("\n"))
    raise typer.Exit(answer.code)


def history(
    target: Annotated[
        str | None, argument("[SCENARIO|FILE.py]", "A scenario or script. Default: an overview of all of them.")
    ] = None,
    last: Annotated[int, option("--last N", "List the latest N runs.", min=1)] = 20,
    as_json: JsonDocument = False,
    html: HtmlPage = None,
    out: Out = None,
) -> None:
    """Show how the runs of a scenario or script went over time.

    Shows verdicts, times and memory, and what changed whenever the verdict changed: commit, packages, variables, host.
    """
    from nsa_harness.commands.history import history as history_of

    parent = out or Path("reports")
    for line in history_of(target, parent, most=last, as_json=as_json, html=html, width=_columns()):
        print(line)


def compare(
    before: Annotated[Path, argument("BEFORE", "A run directory or run id.")],
    after: Annotated[Path | None, argument("[AFTER]", "The run to compare it with. Default: the latest run.")] = None,
    as_json: JsonDocument = False,
    html: HtmlPage = None,
    out: Out = None,
) -> None:
    """Compare two stored runs.

    Shows verdicts, times, memory, loss, the calls of a step, and what changed in the surroundings.
    Exits with 1 if the second run is worse: not as expected, or worse by more than the repeats of these runs vary.
    """
    from nsa_harness.commands.history import compare_runs

    lines, code = compare_runs(
        before, after or Path("latest"), out or Path("reports"), as_json=as_json, html=html, width=_columns()
    )
    print("\n".join(lines))
    raise typer.Exit(code)


def top(run_path: StoredRun = None, out: Out = None) -> None:
    """Show what the ranks of a run in progress are doing.

    It shows the step, the rate, and who waits for whom. q leaves, and the run goes on. Without a terminal, the current
    state is printed once.
    """
    from nsa_harness.commands.live import top as show

    show(run_path, out or Path("reports"))


def serve(
    run_path: StoredRun = None,
    port: Annotated[int, option("--port N", "TCP port. Default: a free one.", min=0, max=65535)] = 0,
    out: Out = None,
) -> None:
    """Show the page of a run in progress in a browser.

    The page stays up to date while the run is active. Only whoever has the printed URL can open it. Ctrl-C ends it.
    """
    from nsa_harness.commands.live import serve as show

    show(run_path, out or Path("reports"), port)


def prune(
    named: Annotated[list[Path] | None, argument("[RUN...]", "Runs to keep, or to pin or unpin.")] = None,
    keep: Annotated[int, option("--keep N", "Keep the latest N runs.", min=0)] = 50,
    yes: Annotated[bool, option("--yes", "Remove the runs. Without it, they are only listed.")] = False,
    pin: Annotated[bool | None, option("--pin/--unpin", "Pin the named runs, so that they are always kept.")] = None,
    out: Out = None,
) -> None:
    """Remove old runs.

    Runs that are named, pinned, in use, or that a claim refers to are kept.
    """
    from nsa_harness.commands.history import pin as pin_runs
    from nsa_harness.commands.history import prune as prune_runs

    parent = out or Path("reports")
    if pin is not None and not named:
        raise UsageError("--pin and --unpin need the runs: nsa-harness prune --pin RUN")
    lines = (
        prune_runs(named or (), parent, keep=keep, is_confirmed=yes)
        if pin is None
        else pin_runs(named or (), parent, is_pinned=pin)
    )
    for line in lines:
        print(line)


def _columns() -> int:
    from nsa_harness.render.terminal.stream import output_size

    return output_size(sys.stdout, os.environ)[0]
