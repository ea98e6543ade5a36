"""`nsa-harness report`, `export` and `fit`: commands on stored runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsa_harness.cli.options import REPORT, NoRedact, Out, StoredRun, Strict, Verbose, argument, option
from nsa_harness.errors import UsageError

TRUTH = "What is true (with --as misdiagnosis)"
_PROMPT = "The worst failure as a text to paste, 6 kB at most."


def report(
    stored: StoredRun = None,
    out: Out = None,
    as_json: Annotated[bool, option("--json", "Print report.json on stdout.", REPORT)] = False,
    strict: Strict = False,
    prompt: Annotated[bool, option("--prompt", _PROMPT, REPORT, hidden=True)] = False,
    verbose: Verbose = False,
    no_redact: NoRedact = False,
) -> None:
    """Judge a stored run again, from its files."""
    from nsa_harness.commands.run import ReportFormat, rejudge

    if as_json and prompt:
        raise UsageError("--json and --prompt are two forms of one report; ask for one of them")
    telling = ReportFormat.JSON if as_json else ReportFormat.PROMPT if prompt else ReportFormat.LINES
    raise typer.Exit(rejudge(stored, telling=telling, strict=strict, out=out, redact=not no_redact, verbose=verbose))


class Form(StrEnum):
    BUNDLE = "bundle"
    MISDIAGNOSIS = "misdiagnosis"
    PROMPT = "prompt"


_FORM = "bundle: all files; misdiagnosis: a wrong answer with the truth; prompt: the worst failure as text, on stdout."
_TO = "File to write. Default: ./RUN.tar.gz, or RUN.ATTEMPT.wrong.tar.gz next to the run."
To = Annotated[Path | None, option("--to FILE", _TO)]
Line = Annotated[str | None, option("--line FILE:LINE", "The line that must be changed.", TRUTH)]
CauseCode = Annotated[str | None, option("--cause CAUSE", "A code of docs/findings.md.", TRUTH)]
Ranks = Annotated[list[int] | None, option("--rank N", "A rank at fault; may be repeated.", TRUTH)]
Verdict = Annotated[str | None, option("--verdict V", "PASS, FAIL or HANG, if the verdict is wrong.", TRUTH)]
Note = Annotated[str, option("--note TEXT", "How you know.", TRUTH)]


def export(
    stored: Annotated[
        Path | None, argument("[RUN]", "A run directory, or one attempt in it. Default: the latest run.")
    ] = None,
    form: Annotated[Form, option("--as", _FORM)] = Form.BUNDLE,
    to: To = None,
    line: Line = None,
    cause: CauseCode = None,
    rank: Ranks = None,
    verdict: Verdict = None,
    note: Note = "",
    out: Out = None,
    no_redact: NoRedact = False,
) -> None:
    """Export a stored run, without secrets, to pass it on.

    A bundle has all its files but those that repeat the run. A misdiagnosis keeps a wrong answer with the truth, for an
    issue and to be judged again. A prompt is text to paste, and exits like `report`.
    """
    truth = {"--line": line, "--cause": cause, "--rank": rank, "--verdict": verdict, "--note": note}
    given = [name for name, value in truth.items() if value]
    if form is Form.MISDIAGNOSIS:
        wrong(stored, line, cause, rank, verdict, note, to, out, no_redact)
    elif given:
        raise UsageError(f"{given[0]} says what is true instead; it goes with --as misdiagnosis")
    elif form is Form.BUNDLE:
        bundle(stored, to, out, no_redact)
    elif to is not None:
        raise UsageError("--to names a file, and --as prompt prints; send its output to a file with >")
    else:
        report(stored, out, prompt=True, no_redact=no_redact)


def bundle(stored: StoredRun = None, to: To = None, out: Out = None, no_redact: NoRedact = False) -> None:
    """Pack a stored run to pass it on: the earlier name of `export`."""
    from nsa_harness.supervisor.storage.redacted_files import write_bundle
    from nsa_harness.supervisor.storage.rundir import find_run

    run = find_run(stored, out or Path("reports"), redact=not no_redact)
    target = to or Path(f"{run.run_id}.tar.gz")
    print(f"{target}: {write_bundle(run, target)} files; look at them before you pass them on")


def wrong(
    stored: StoredRun = None,
    line: Line = None,
    cause: CauseCode = None,
    rank: Ranks = None,
    verdict: Verdict = None,
    note: Note = "",
    to: To = None,
    out: Out = None,
    no_redact: NoRedact = False,
) -> None:
    """Keep a wrong answer with the truth in one file: the earlier name of `export --as misdiagnosis`."""
    from nsa_harness.commands.misdiagnosis import StatedTruth, record_misdiagnosis

    truth = StatedTruth(line=line, cause=cause, ranks=tuple(rank or ()), verdict=verdict, note=note)
    for text in record_misdiagnosis(stored, truth, to=to, out=out, redact=not no_redact):
        print(text)


def fit(
    stored: Annotated[
        list[Path] | None, argument("[RUN...]", "Run directories with a sweep. Default: the latest run.")
    ] = None,
    tokens: Annotated[int | None, option("--tokens N", "Predict a step with sequences of N tokens.", min=2)] = None,
    layers: Annotated[int | None, option("--layers N", "Predict a step with N layers.", min=1)] = None,
    out: Out = None,
) -> None:
    """Predict the cost of a larger step from stored sweeps.

    Shows how a step's time, memory and graph grow. Exits with 1 if a run at half the size contradicts the prediction,
    and with 125 if the runs do not decide it.
    """
    from nsa_harness.commands.fit import RequestedSize
    from nsa_harness.commands.fit import fit as answered

    answer = answered(stored or (), RequestedSize(tokens=tokens, layers=layers), out or Path("reports"))
    print("\n".join(answer.lines).lstrip("\n"))
    raise typer.Exit(answer.code)
