"""The command line: its commands, its exit codes, and its errors. Imports nothing heavy until a command runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, NoReturn

import typer

from nsa_harness.cli import catalog, experiments, machine, stored
from nsa_harness.cli import run as cli_run
from nsa_harness.cli import watch as cli_watch
from nsa_harness.cli.ci import app as ci_app
from nsa_harness.cli.options import GroupedCommand
from nsa_harness.errors import HarnessError, UsageError

# Options that take a value only after `=`. Typer would take the next word, so such a bare option becomes `=auto` first.
_BARE_MEANS_AUTO = ("--gc-range", "--layers", "--seq-len", "--world-size", "--env", "--resume")
_DEBUG = "NSA_HARNESS_DEBUG"
# Options that are gone; their variables are still accepted, as long as the schema number is 1.
_GONE = {f"NSA_HARNESS_{name}" for name in ("SHARDS", "TORCH", "GPUS", "BACKEND", "CPU", "RUNNER")}
_NOT_JUDGED = 125
_USAGE = 2

_EXAMPLES = {
    "run": """
nsa-harness run train.py --ranks 2 -- --steps 5    a script with arguments
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
nsa-harness attach 4711 --for 300   observe for five minutes""",
    "read": """
nsa-harness read ./logs                          every file below it
nsa-harness read slurm-4711.out /tmp/nccl_trace_rank_*
nsa-harness read logs stacks/rank3.txt --out reports""",
    "fit": """
nsa-harness fit                              the latest sweep
nsa-harness fit --tokens 8192                the cost of such a step
nsa-harness fit SWEEP CHECK --tokens 8192    and check by a half-size run""",
    "export": """
nsa-harness export                                the latest run, as one file
nsa-harness export reports/latest --as prompt     the worst failure, as text
nsa-harness export --as misdiagnosis --line train.py:41 --rank 0""",
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


app = typer.Typer(
    name="nsa-harness",
    help="Run training scenarios, distinguish a hang from a slow run, and report the rank, line and collective.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "run": cli_run.run,
    "bisect": experiments.bisect,
    "claim": experiments.claim,
    "ready": experiments.ready,
    "watch": cli_watch.watch,
    "attach": cli_watch.attach,
    "read": cli_watch.read,
    "fit": stored.fit,
    "doctor": machine.doctor,
    "selftest": machine.selftest,
    "list": catalog.list_scenarios,
    "explain": catalog.explain,
    "report": stored.report,
    "export": stored.export,
    "schema": catalog.schema,
}
for _name, _command in _COMMANDS.items():
    _examples = f"Examples:\n\n\b{_EXAMPLES[_name]}" if _name in _EXAMPLES else None
    app.command(_name, cls=GroupedCommand, epilog=_examples)(_command)
# The earlier names of export, as long as the schema number is 1.
app.command(cls=GroupedCommand, hidden=True)(stored.bundle)
app.command(cls=GroupedCommand, hidden=True)(stored.wrong)
app.add_typer(ci_app)


def main() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    from nsa_harness.supervisor.launch.umask import keep_private

    keep_private()
    code = run_command_line(sys.argv[1:])
    _flush_output()
    sys.exit(_NOT_JUDGED if code == _USAGE and _for_git_bisect(sys.argv[1:]) else code)


def _flush_output() -> None:
    """Flush stdout and stderr. If that fails, drop the output: at exit Python would replace the exit code by 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _for_git_bisect(argv: Sequence[str]) -> bool:
    """Whether a usage error must exit with 125: git would take another code for a bad commit."""
    return "--git-bisect" in argv or os.environ.get("NSA_HARNESS_GIT_BISECT", "") not in ("", "0")


def run_command_line(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error of the user goes to stderr without a traceback."""
    words, program_args = _split(argv)
    try:
        _check_environment(os.environ)
        app(args=words, prog_name="nsa-harness", obj=program_args)
    except SystemExit as ended:
        if ended.code == _USAGE and (hint := _hint_for_foreign_options(argv)):
            print(hint, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    except HarnessError as error:
        if os.environ.get(_DEBUG) == "1":
            raise
        return _report_error(str(error), error.exit_code, as_json="--json" in words)
    except Exception as error:  # a bug of nsa-harness is reported in one line, and is never a verdict
        if os.environ.get(_DEBUG) == "1":
            raise
        text = f"nsa-harness itself failed: {type(error).__name__}: {error}; {_DEBUG}=1 shows where"
        return _report_error(text, _NOT_JUDGED, as_json="--json" in words)
    return 0


def _hint_for_foreign_options(argv: Sequence[str]) -> str | None:
    """Return the line that works, if options of a program or a launcher were typed as options of nsa-harness."""
    if "--" in argv or argv[:1] not in (["run"], ["watch"]):
        return None
    params = typer.main.get_command(app).commands[argv[0]].params  # type: ignore[attr-defined]
    known = {name for param in params for name in param.opts}
    typed = [word.partition("=")[0] for word in argv[1:] if word.startswith("--")]
    if all(name in known or get_close_matches(name, known) for name in typed):
        return None
    if argv[0] == "watch":
        command = "COMMAND..." if argv[1].startswith("-") else shlex.join(argv[1:])
        return f"the command follows `--`: nsa-harness watch -- {command}"
    file = next((word for word in argv if word.endswith(".py")), "FILE.py")
    return f"options of the program follow `--`, and --ranks says how many: nsa-harness run {file} --ranks 2 -- ..."


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the words for nsa-harness, and the words after the first `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [f"{word}=auto" if word in _BARE_MEANS_AUTO else word for word in argv[:end]], tuple(argv[end + 1 :])


def _report_error(text: str, code: int, *, as_json: bool) -> int:
    print(text, file=sys.stderr)
    if as_json:
        event = {"schema": 1, "event": "error", "t_s": None, "run_id": None, "scenario": None, "message": text}
        print(json.dumps(event), flush=True)
    return code


def _check_environment(environ: os._Environ[str]) -> None:
    """Refuse a name NSA_HARNESS_<OPTION> of no option: a typing error must not go unnoticed."""
    given = sorted(name for name in environ if name.startswith("NSA_HARNESS_") and name != _DEBUG)
    if not given:
        return
    from nsa_harness.errors import did_you_mean

    known = sorted({_DEBUG, *_option_variables()})
    accepted = {*known, *_GONE}
    unknown = [name for name in given if name not in accepted]
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
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.obj and context.invoked_subcommand not in ("run", "bisect", "claim", "watch", "doctor"):
        raise UsageError(f"`--` passes words on to a program; {context.invoked_subcommand} starts none")
