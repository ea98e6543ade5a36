"""The entry point of `nsa-harness`. Heavy modules are imported only when a command runs, so --help is fast."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, NoReturn

import typer

from nsa_harness.cli import catalog, experiments, machine, stored
from nsa_harness.cli import run as cli_run
from nsa_harness.cli import watch as cli_watch
from nsa_harness.cli.ci import app as ci_app
from nsa_harness.cli.options import GroupedCommand, option_defaults
from nsa_harness.cli.streams import lost_output, open_standard_streams
from nsa_harness.errors import HarnessError, UsageError

# Options whose value must follow `=`. Typer would read the next argument as the value of a bare option, so `--resume`
# is rewritten to `--resume=auto` first.
_AUTO_WITHOUT_VALUE = ("--gc-range", "--layers", "--seq-len", "--world-size", "--env", "--resume", "--locked")
_DEBUG = "NSA_HARNESS_DEBUG"
# Environment variables of removed options. They are accepted and ignored while the schema number is 1.
_REMOVED_VARIABLES = {f"NSA_HARNESS_{name}" for name in ("SHARDS", "TORCH", "GPUS", "BACKEND", "CPU", "RUNNER")}
# Options that other tools have: what a command of nsa-harness has instead.
_TIME_LIMITS = ("--timeout", "--time-limit", "--max-time", "--deadline")
_DEADLINE_KEY = "The setting limits.deadline_s=SECONDS limits each run"
_INSTEAD_OF_TIME_LIMIT = {
    "run": f"{_DEADLINE_KEY}:\n  nsa-harness run FILE limits.deadline_s=TIME",
    "bisect": f"{_DEADLINE_KEY}, and --budget TIME limits the search.",
    "why": "--budget TIME starts no new run after this time.",
    "claim": f"{_DEADLINE_KEY}, and --budget TIME limits all runs together.",
    "watch": "--deadline SECONDS reports a longer job; with --on-hang=kill it is also ended.",
    "attach": "--for SECONDS limits the observation.",
}
_COMMANDS_WITHOUT_VERDICT = ("list", "explain", "schema")
_COMMANDS_WITH_REPORTS = ("run", "lock", "bisect", "claim", "why", "ready", "watch", "attach")
_NOT_JUDGED = 125  # exit code of ERROR: there is no verdict
_USAGE = 2  # exit code of a usage error

_EXAMPLES = {
    "run": """
# a script with arguments
nsa-harness run train.py --ranks 2 -- --steps 5
# a module, ten times
nsa-harness run -m pkg.train --repeat 10
# a scenario with one setting changed
nsa-harness run ddp_onestep train.steps=3
# all scenarios with a tag, two at a time
nsa-harness run -t plan --jobs 2
# after an edit: is the failure fixed?
nsa-harness run --verify reports/latest
# as a job of Slurm on two nodes
nsa-harness run train.py --ranks 16 --engine slurm --nodes 2
# which idle node is bad?
nsa-harness run train.py --ranks 16 --engine slurm --distribute=idle""",
    "ready": """
# the smallest model: minutes on a laptop
nsa-harness ready ci
# your own checklist
nsa-harness ready production --checklist my.readiness.yaml""",
    "why": """
# the latest run: which line made its ranks diverge?
nsa-harness why
# only the recorded run, without experiments
nsa-harness why reports/latest --no-experiment
# what would be launched?
nsa-harness why --dry-run
# the change that let the run go on, as a diff
nsa-harness why --patch reports/latest""",
    "watch": """
nsa-harness watch -- torchrun --nproc-per-node 8 train.py
# end the job after a proven HANG
nsa-harness watch --on-hang=kill -- python train.py
# in a Slurm job: an agent on each node, and one report
srun nsa-harness watch --shared DIR -- torchrun --nnodes=2 train.py
# send a message about a suspected stall, a HANG or a FAIL
nsa-harness watch --notify 'exec ./page.sh' -- python train.py""",
    "attach": """
# a process ID: torchrun, a rank, or a process above them
nsa-harness attach 4711
# observe for up to five minutes
nsa-harness attach 4711 --for 300""",
    "read": """
# every file below a directory
nsa-harness read ./logs
nsa-harness read slurm-4711.out /tmp/nccl_trace_rank_*
# also write a report
nsa-harness read logs stacks/rank3.txt --out reports""",
    "top": """
# the latest run below ./reports
nsa-harness top
# another run
nsa-harness top /data/reports/20261128T140531-8394""",
    "serve": """
# in a browser on this machine
nsa-harness serve
# in a browser elsewhere, after ssh -L 8008:127.0.0.1:8008 HOST
nsa-harness serve --port 8008""",
    "fit": """
# how the cost grows in the latest sweep
nsa-harness fit
# predict a step with sequences of 8192 tokens
nsa-harness fit --tokens 8192
# also check the prediction with a run at half the size
nsa-harness fit SWEEP CHECK --tokens 8192""",
    "history": """
# all scenarios and scripts
nsa-harness history
# one script: what changed when its verdict changed?
nsa-harness history train.py""",
    "compare": """
# the latest run, with an earlier one
nsa-harness compare reports/20261128T140531-8394""",
    "lock": """
# write train.comm.lock beside train.py, and commit it
nsa-harness lock train.py --ranks 2
# does a step still communicate like this?
nsa-harness run train.py --ranks 2 --locked""",
    "prune": """
# which runs would go?
nsa-harness prune --keep 20
# remove them
nsa-harness prune --keep 20 --yes""",
    "export": """
# the latest run as one archive
nsa-harness export
# the worst failure as text
nsa-harness export reports/latest --as prompt
# a wrong answer, with the line and rank really at fault
nsa-harness export --as misdiagnosis --line train.py:41 --rank 0""",
    "schema": """
# of report.json
nsa-harness schema report > report.schema.json
# of one line of events.jsonl, and of `run --json`
nsa-harness schema events""",
    "bisect": """
# which checkpointed layers make a scenario fail
nsa-harness bisect fault_gc_layer --gc-range
# the same for your own script
nsa-harness bisect train.py --gc-range=0:8 --arg '--gc-layers={layers}'""",
    "claim": """
# one key with two values
nsa-harness claim ddp_onestep parallel.find_unused_parameters=false,true
# one argument of a script, with and without the change
nsa-harness claim train.py --ranks 2 --arg=--fp16,--bf16 -- --steps 5
# two scenarios, and the claim in your own words
nsa-harness claim before.yaml after.yaml --text 'the new loader fixes it'
# two commits, for at most 20 minutes
nsa-harness claim ddp_onestep --commits main~3..main --budget 20m
# all earlier claims
nsa-harness claim --list""",
}


app = typer.Typer(
    name="nsa-harness",
    help="Run PyTorch training under torchrun, tell a hang from a slow run, and report its cause, rank and line.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "run": cli_run.run,
    "bisect": experiments.bisect,
    "claim": experiments.claim,
    "why": experiments.why,
    "ready": experiments.ready,
    "watch": cli_watch.watch,
    "attach": cli_watch.attach,
    "read": cli_watch.read,
    "top": stored.top,
    "serve": stored.serve,
    "history": stored.history,
    "compare": stored.compare,
    "lock": cli_run.lock,
    "prune": stored.prune,
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
# Earlier names of `export`, accepted while the schema number is 1.
app.command(cls=GroupedCommand, hidden=True)(stored.bundle)
app.command(cls=GroupedCommand, hidden=True)(stored.wrong)
app.add_typer(ci_app)


def main() -> NoReturn:
    """Run the command line of this process, and exit with the resulting exit code."""
    open_standard_streams()
    from nsa_harness.supervisor.launch.umask import keep_private

    keep_private()
    code = run_command_line(sys.argv[1:])
    if reason := lost_output():
        print(f"standard output could not be written completely: {reason}", file=sys.stderr)
        # The result of a command that launches runs is also in its run directory.
        code = code or (0 if sys.argv[1:2] and sys.argv[1] in _COMMANDS_WITH_REPORTS else _NOT_JUDGED)
    # `git bisect run` would take the code of a usage error for a bad commit.
    sys.exit(_NOT_JUDGED if code == _USAGE and _is_for_git_bisect(sys.argv[1:]) else code)


def _is_for_git_bisect(argv: Sequence[str]) -> bool:
    """Return whether this command was started by `git bisect run`."""
    return "--git-bisect" in argv or os.environ.get("NSA_HARNESS_GIT_BISECT", "") not in ("", "0")


def run_command_line(argv: Sequence[str]) -> int:
    """Run the command in `argv` and return its exit code. Errors go to stderr, with a traceback only for debugging."""
    own_args, program_args = _split(argv)
    try:
        _check_environment(os.environ)
        _answer_time_limits(own_args)
        app(
            args=own_args, prog_name="nsa-harness", obj=program_args, terminal_width=_help_columns(),
            default_map=_project_defaults(own_args),
        )  # fmt: skip
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # for this, typer has the exit code of a FAIL
            return 0 if own_args[:1] and own_args[0] in _COMMANDS_WITHOUT_VERDICT else _NOT_JUDGED
        if ended.code == _USAGE and (hint := _hint_for_foreign_options(argv)):
            print(hint, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    except HarnessError as error:
        if os.environ.get(_DEBUG) == "1":
            raise
        return _report_error(str(error), error.exit_code, as_json="--json" in own_args)
    except OSError as error:
        if os.environ.get(_DEBUG) == "1":
            raise
        if lost_output():  # `main` reports the reason
            return _NOT_JUDGED
        if error.errno == errno.ENAMETOOLONG:  # only a name that the user typed can be too long
            from nsa_harness.core.scenario.yaml_tree import visible

            name = f"the name {visible(os.fsdecode(error.filename), 60)}" if error.filename else "a name"
            return _report_error(f"{name} is too long for a file", _USAGE, as_json="--json" in own_args)
        return _report_bug(error, as_json="--json" in own_args)
    except Exception as error:  # a bug in nsa-harness: its exit code must not look like a verdict
        if os.environ.get(_DEBUG) == "1":
            raise
        return _report_bug(error, as_json="--json" in own_args)
    return 0


def _project_defaults(own_args: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the defaults that the project's pyproject.toml sets. Help and completion do not read it."""
    if own_args[:1] and own_args[0] in _COMMANDS and not {"-h", "--help"} & set(own_args):
        from pathlib import Path

        return option_defaults(typer.main.get_command(app), Path.cwd())
    return {}


def _answer_time_limits(own_args: Sequence[str]) -> None:
    """Raise UsageError for an option such as --timeout, with what the command has instead."""
    instead = _INSTEAD_OF_TIME_LIMIT.get(own_args[0]) if own_args else None
    typed = [word.partition("=")[0] for word in own_args]
    for name in _TIME_LIMITS:
        if instead is not None and name in typed and name not in instead:
            file = next((word for word in own_args if word.endswith(".py")), "train.py")
            _, _, value = " ".join(own_args).replace("=", " ").partition(f"{name} ")
            seconds = value.split(" ")[0] if value[:1].isdigit() else "300"
            answer = instead.replace("FILE", file).replace("TIME", seconds) if own_args[0] == "run" else instead
            raise UsageError(f"`nsa-harness {own_args[0]}` has no option {name}. {answer}")


def _help_columns() -> int:
    """Return the number of columns for --help. Longer lines than those of a small terminal are hard to read."""
    return max(min(shutil.get_terminal_size().columns, 80) - 2, 30)


def _hint_for_foreign_options(argv: Sequence[str]) -> str | None:
    """Return a hint if an option seems to be meant for the user's program, or else None."""
    if "--" in argv or argv[:1] not in (["run"], ["watch"]):
        return None
    params = typer.main.get_command(app).commands[argv[0]].params  # type: ignore[attr-defined]
    own_options = {name for param in params for name in param.opts}
    typed_options = [word.partition("=")[0] for word in argv[1:] if word.startswith("--")]
    if all(name in own_options or get_close_matches(name, own_options) for name in typed_options):
        return None
    if argv[0] == "watch":
        command = "COMMAND..." if argv[1].startswith("-") else shlex.join(argv[1:])
        return f"your command must follow `--`: nsa-harness watch -- {command}"
    file = next((word for word in argv if word.endswith(".py")), "FILE.py")
    example = f"nsa-harness run {file} --ranks 2 -- ..."
    return f"options of your program must follow `--`; --ranks sets the number of ranks: {example}"


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the arguments at the first `--`. Those after it are for the user's program."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [f"{word}=auto" if word in _AUTO_WITHOUT_VALUE else word for word in argv[:end]], tuple(argv[end + 1 :])


def _report_bug(error: Exception, *, as_json: bool) -> int:
    text = f"nsa-harness itself failed: {type(error).__name__}: {error}; set {_DEBUG}=1 to see the traceback"
    return _report_error(text, _NOT_JUDGED, as_json=as_json)


def _report_error(text: str, code: int, *, as_json: bool) -> int:
    """Print an error to stderr, with `as_json` also as an event to stdout, and return `code`."""
    from nsa_harness.render.terminal.layout import paragraph

    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    for line in text.split("\n"):
        is_command = not columns or line.startswith(" ")
        print(line if is_command else "\n".join(paragraph(line, columns)), file=sys.stderr)
    if as_json:
        event = {"schema": 1, "event": "error", "t_s": None, "run_id": None, "scenario": None, "message": text}
        with suppress(OSError):  # `main` reports that stdout is full
            print(json.dumps(event), flush=True)
    return code


def _check_environment(environ: os._Environ[str]) -> None:
    """Raise UsageError if a variable NSA_HARNESS_<NAME> does not correspond to any option."""
    variables = sorted(name for name in environ if name.startswith("NSA_HARNESS_") and name != _DEBUG)
    if not variables:
        return
    from nsa_harness.errors import did_you_mean

    option_variables = sorted({_DEBUG, *_option_variables()})
    valid = {*option_variables, *_REMOVED_VARIABLES}
    unknown = [name for name in variables if name not in valid]
    if unknown:
        hints = {
            name: did_you_mean(name, option_variables) or f"; known: {', '.join(option_variables)}" for name in unknown
        }
        raise UsageError(
            "\n".join(f"environment variable {name}: no option has this name{hint}" for name, hint in hints.items())
        )


def _option_variables() -> set[str]:
    def below(command: object) -> Iterator[object]:
        yield from (param.envvar for param in getattr(command, "params", ()))
        for inner in getattr(command, "commands", {}).values():
            yield from below(inner)

    return {variable for variable in below(typer.main.get_command(app)) if isinstance(variable, str)}


def _version(is_requested: bool) -> None:
    if is_requested:
        from nsa_harness import __version__

        typer.echo(f"nsa-harness {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.obj and context.invoked_subcommand not in ("run", "bisect", "claim", "watch", "doctor", "lock"):
        raise UsageError(
            f"`--` passes arguments to a program, but `nsa-harness {context.invoked_subcommand}` starts no program"
        )
