"""The command line: parse, call, print, choose the exit code. Imports nothing heavy until a command runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from nsa_harness.cli import bisect as cli_bisect
from nsa_harness.cli import claim as cli_claim
from nsa_harness.cli import fit as cli_fit
from nsa_harness.cli import health as cli_health
from nsa_harness.cli import ready as cli_ready
from nsa_harness.cli import run as cli_run
from nsa_harness.cli import watch as cli_watch
from nsa_harness.cli.ci import app as ci_app
from nsa_harness.cli.help import GroupedCommand
from nsa_harness.errors import HarnessError, UsageError

# Options that take a value only after `=`. Typer would eat the next word, so a bare one becomes `=auto` first.
_BARE_MEANS_AUTO = ("--gc-range", "--layers", "--seq-len", "--world-size", "--env", "--resume")
_DEBUG = "NSA_HARNESS_DEBUG"
_NOT_JUDGED = 125
_USAGE = 2

_EXAMPLES = {
    "run": """
nsa-harness run train.py --ranks 2 -- --steps 5    your script and its words
nsa-harness run -m pkg.train --repeat 10           a module, ten times
nsa-harness run ddp_onestep train.steps=3          a scenario, one key changed
nsa-harness run -t plan --jobs 2                   all scenarios with a tag
nsa-harness run --verify reports/latest            after an edit: is it fixed?""",
    "ready": """
nsa-harness ready ci                                  on a laptop, in minutes
nsa-harness ready production --checklist ours.readiness.yaml""",
    "watch": """
nsa-harness watch -- torchrun --nproc-per-node 8 train.py
nsa-harness watch --on-hang=kill -- python train.py""",
    "attach": """
nsa-harness attach 4711             torchrun, a rank, or what started them
nsa-harness attach 4711 --for 300   look for five minutes""",
    "read": """
nsa-harness read ./logs                          all that is below it
nsa-harness read slurm-4711.out /tmp/nccl_trace_rank_*
nsa-harness read logs stacks/rank3.txt --out reports""",
    "fit": """
nsa-harness fit                              the newest sweep
nsa-harness fit --tokens 8192                what such a step will cost
nsa-harness fit SWEEP CHECK --tokens 8192    the same, held against a run at half the size""",
    "wrong": """
nsa-harness wrong reports/latest --line train.py:41 --cause rank0_only_collective --rank 0
nsa-harness wrong reports/latest/ddp --verdict PASS --note 'it was still loading'""",
    "schema": """
nsa-harness schema report > report.schema.json    of report.json
nsa-harness schema events                         of a line of events.jsonl and --json""",
    "bisect": """
nsa-harness bisect fault_gc_layer --gc-range
nsa-harness bisect train.py --gc-range=0:8 --arg '--gc-layers={layers}'""",
    "claim": """
nsa-harness claim ddp_onestep parallel.find_unused_parameters=false,true
nsa-harness claim train.py --ranks 2 --arg=--fp16,--bf16 -- --steps 5
nsa-harness claim before.yaml after.yaml --text 'the new loader fixes it'
nsa-harness claim ddp_onestep --commits main~3..main --budget 20m
nsa-harness claim --list""",
}


def _epilog(command: str) -> str:
    return f"Examples:\n\n\b{_EXAMPLES[command]}"


app = typer.Typer(
    name="nsa-harness",
    help="Run training scenarios, tell a hang from a slow run, and say which rank, line and collective it was.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand, epilog=_epilog("run"))(cli_run.run)
app.command(cls=GroupedCommand, epilog=_epilog("bisect"))(cli_bisect.bisect)
app.command(cls=GroupedCommand, epilog=_epilog("claim"))(cli_claim.claim)
app.command(cls=GroupedCommand, epilog=_epilog("ready"))(cli_ready.ready)
app.command(cls=GroupedCommand, epilog=_epilog("watch"))(cli_watch.watch)
app.command(cls=GroupedCommand, epilog=_epilog("attach"))(cli_watch.attach)
app.command(cls=GroupedCommand, epilog=_epilog("read"))(cli_watch.read)
app.command(cls=GroupedCommand, epilog=_epilog("fit"))(cli_fit.fit)
app.command(cls=GroupedCommand)(cli_health.doctor)
app.command(cls=GroupedCommand)(cli_health.selftest)
app.add_typer(ci_app)


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    from nsa_harness.supervisor.launch.umask import keep_private

    keep_private()
    code = run_command_line(sys.argv[1:])
    sys.exit(_NOT_JUDGED if code == _USAGE and _for_git_bisect(sys.argv[1:]) else code)


def _for_git_bisect(argv: Sequence[str]) -> bool:
    """git would take a mistake on our command line for a bad commit; 125 makes it skip."""
    return "--git-bisect" in argv or os.environ.get("NSA_HARNESS_GIT_BISECT", "") not in ("", "0")


def run_command_line(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Errors of the user go to stderr without a traceback."""
    words, passed_on = _split(argv)
    try:
        _check_environment(os.environ)
        app(args=words, prog_name="nsa-harness", obj=passed_on)
    except SystemExit as ended:
        if ended.code == _USAGE and (hint := _of_another_program(argv)):
            print(hint, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    except HarnessError as error:
        if os.environ.get(_DEBUG) == "1":
            raise
        return _say(str(error), error.exit_code, as_json="--json" in words)
    except Exception as error:  # a fault of ours: said in a line, never folded into a verdict
        if os.environ.get(_DEBUG) == "1":
            raise
        text = f"nsa-harness itself failed: {type(error).__name__}: {error}; {_DEBUG}=1 shows where"
        return _say(text, _NOT_JUDGED, as_json="--json" in words)
    return 0


def _of_another_program(argv: Sequence[str]) -> str | None:
    """The line that works, where options of a program or a launcher were given as ours."""
    if "--" in argv or argv[:1] not in (["run"], ["watch"]):
        return None
    params = typer.main.get_command(app).commands[argv[0]].params  # type: ignore[attr-defined]
    ours = {name for param in params for name in param.opts}
    foreign = [word for word in (word.partition("=")[0] for word in argv[1:]) if word.startswith("--")]
    if all(word in ours or get_close_matches(word, ours) for word in foreign):
        return None
    if argv[0] == "watch":
        command = "COMMAND..." if argv[1].startswith("-") else shlex.join(argv[1:])
        return f"the command follows `--`: nsa-harness watch -- {command}"
    file = next((word for word in argv if word.endswith(".py")), "FILE.py")
    return f"options of the program follow `--`, and --ranks says how many: nsa-harness run {file} --ranks 2 -- ..."


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The harness's own words, and what stands behind the first `--`."""
    words = list(argv)
    behind: tuple[str, ...] = ()
    if "--" in words:
        at = words.index("--")
        words, behind = words[:at], tuple(words[at + 1 :])
    return [f"{word}=auto" if word in _BARE_MEANS_AUTO else word for word in words], behind


def _say(text: str, code: int, *, as_json: bool) -> int:
    print(text, file=sys.stderr)
    if as_json:
        event = {"schema": 1, "event": "error", "t_s": None, "run_id": None, "scenario": None, "message": text}
        print(json.dumps(event), flush=True)
    return code


def _check_environment(environ: os._Environ[str]) -> None:
    """Every option is also NSA_HARNESS_<OPTION>; a slip in such a name must not vanish."""
    given = sorted(name for name in environ if name.startswith("NSA_HARNESS_") and name != _DEBUG)
    if not given:
        return
    from nsa_harness.errors import did_you_mean

    known = sorted({_DEBUG, *_option_variables()})
    unknown = [name for name in given if name not in known]
    if unknown:
        hints = {name: did_you_mean(name, known) or f"; known: {', '.join(known)}" for name in unknown}
        raise UsageError(
            "\n".join(f"environment {name}: no option has this name{hint}" for name, hint in hints.items())
        )


def _option_variables() -> set[str]:
    def below(command: object) -> Iterator[object]:
        yield from (param.envvar for param in getattr(command, "params", ()))
        for inner in getattr(command, "commands", {}).values():
            yield from below(inner)

    return {variable for variable in below(typer.main.get_command(app)) if isinstance(variable, str)}


def _version(wanted: bool) -> None:
    if wanted:
        from nsa_harness import __version__

        typer.echo(f"nsa-harness {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    if context.obj and context.invoked_subcommand not in ("run", "bisect", "claim", "watch", "doctor"):
        raise UsageError(f"`--` passes words on to a program; {context.invoked_subcommand} starts none")


@app.command("list", cls=GroupedCommand)
def list_scenarios(
    as_json: Annotated[bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="A JSON list.")] = False,
) -> None:
    """List every scenario by folder, with what it asks, its tags and other names."""
    from nsa_harness.cli.text import catalog_json, catalog_lines
    from nsa_harness.supervisor.launch.planning import every_scenario

    items, notes = every_scenario(Path.cwd())
    _print([catalog_json(items)] if as_json else catalog_lines(items, shutil.get_terminal_size().columns))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@app.command(cls=GroupedCommand)
def explain(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="SCENARIO|KEY=VALUE", help="As for `run`; or the code of a cause.")
    ],
) -> None:
    """Show a scenario's resolved YAML and where each value comes from; or what a cause means and what to try."""
    from nsa_harness.cli.text import cause_lines, explanation, kind_lines
    from nsa_harness.core.diagnosis.causes import Cause
    from nsa_harness.core.report import HangKind
    from nsa_harness.supervisor.launch.machine import machine_facts

    cause = next((one for one in Cause if [one.value] == words), None)
    kind = next((one for one in HangKind if [one.value] == words), None)
    if kind is not None:
        _print(kind_lines(kind, shutil.get_terminal_size().columns))
        return
    if cause is not None:
        _print(cause_lines(cause, shutil.get_terminal_size().columns))
        return
    try:
        _print(explanation(cli_run.question_of(context, words), machine_facts()))
    except UsageError as error:
        causes = [one.value for one in Cause if words[0] in one.value]
        raise UsageError(f"{error}\ncauses of that name: {', '.join(causes)}" if causes else str(error)) from None


@app.command(cls=GroupedCommand)
def report(
    stored: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory; the newest one unless given.")
    ] = None,
    out: cli_run.Out = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="NSA_HARNESS_JSON", help="report.json on stdout.", **cli_run.REPORT)
    ] = False,
    strict: cli_run.Strict = False,
    prompt: Annotated[
        bool,
        typer.Option(
            "--prompt",
            envvar="NSA_HARNESS_PROMPT",
            help="The worst failure as a text to paste, 6 kB at most.",
            **cli_run.REPORT,
        ),
    ] = False,
    verbose: cli_run.Verbose = False,
    no_redact: cli_run.NoRedact = False,
) -> None:
    """Judge a stored run again, from its files."""
    from nsa_harness.commands.run import ReportFormat, rejudge

    if as_json and prompt:
        raise UsageError("--json and --prompt are two forms of one report; ask for one of them")
    telling = ReportFormat.JSON if as_json else ReportFormat.PROMPT if prompt else ReportFormat.LINES
    raise typer.Exit(rejudge(stored, telling=telling, strict=strict, out=out, redact=not no_redact, verbose=verbose))


@app.command(cls=GroupedCommand)
def bundle(
    stored: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory; the newest one unless given.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(envvar="NSA_HARNESS_TO", metavar="FILE", help="In place of ./RUN.tar.gz.")
    ] = None,
    out: cli_run.Out = None,
    no_redact: cli_run.NoRedact = False,
) -> None:
    """Pack a stored run to pass it on: all its files, without secrets and without what repeats it."""
    from nsa_harness.supervisor.storage.redacted_files import write_bundle
    from nsa_harness.supervisor.storage.rundir import find_run

    run = find_run(stored, out or Path("reports"), redact=not no_redact)
    target = to or Path(f"{run.run_id}.tar.gz")
    print(f"{target}: {write_bundle(run, target)} files; look at them before you pass them on")


@app.command(cls=GroupedCommand, epilog=_epilog("wrong"))
def wrong(
    stored: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory, or one attempt in it; the newest run.")
    ] = None,
    line: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_LINE", metavar="FILE:LINE", help="The line that is to be changed."),
    ] = None,
    cause: Annotated[
        str | None, typer.Option(envvar="NSA_HARNESS_CAUSE", metavar="CAUSE", help="A code of docs/findings.md.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(envvar="NSA_HARNESS_RANK", metavar="N", help="A guilty rank; once for each.")
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(envvar="NSA_HARNESS_VERDICT", metavar="V", help="PASS, FAIL or HANG, where it is another one."),
    ] = None,
    note: Annotated[str, typer.Option(envvar="NSA_HARNESS_NOTE", metavar="TEXT", help="How you know.")] = "",
    to: Annotated[
        Path | None,
        typer.Option(envvar="NSA_HARNESS_TO", metavar="FILE", help="In place of RUN.ATTEMPT.wrong.tar.gz beside it."),
    ] = None,
    out: cli_run.Out = None,
    no_redact: cli_run.NoRedact = False,
) -> None:
    """Keep a wrong answer with the truth in one file, without secrets: for an issue, and to judge it again."""
    from nsa_harness.commands.misdiagnosis import Claim, record_wrong

    claim = Claim(line=line, cause=cause, ranks=tuple(rank or ()), verdict=verdict, note=note)
    _print(record_wrong(stored, claim, to=to, out=out, redact=not no_redact))


@app.command(cls=GroupedCommand, epilog=_epilog("schema"))
def schema(
    document: Annotated[
        str, typer.Argument(metavar="[DOCUMENT]", help="plan, report, bisect or events; scenario files unless given.")
    ] = "scenario",
) -> None:
    """Print the JSON schema of scenario or plan files, for editors, or of what programs read."""
    from nsa_harness.errors import did_you_mean
    from nsa_harness.render.documents.schemas import Document, json_schema

    if document not in list(Document):
        known = ", ".join(Document)
        raise UsageError(f"no schema of {document!r}{did_you_mean(document, list(Document))}; known: {known}")
    print(json.dumps(json_schema(Document(document)), indent=2))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
