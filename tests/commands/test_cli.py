"""The command line as a user meets it: processes, exit codes, what stands on stdout and what on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_harness.cli import main as cli
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.scenario import json_schema
from nsa_harness.core.scenario.yaml_tree import parse_yaml
from nsa_harness.core.schedule import Policy
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, LaunchPlan, plan_launches

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN = "import sys; sys.argv[0] = 'nsa-harness'; from nsa_harness.cli.main import main; main()"
HEAVY = ("torch", "pydantic", "ruamel.yaml", "rich", "jinja2", "psutil")


def nsa_harness(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**clean, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", **environ},
        check=False,
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("NSA_", "TORCH_BACKEND"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same plan on every machine
    return tmp_path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """What `run` would launch: the stage behind the command line is replaced, everything before it is real."""
    taken: list[RunRequest] = []

    def take(request: RunRequest) -> int:
        taken.append(request)
        return 124

    monkeypatch.setattr("nsa_harness.commands.run.run_all", take)
    return taken


def program_of(request: RunRequest) -> str:
    (spec,) = request.specs
    assert isinstance(spec, RunSpec)
    return " ".join(spec.program)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from nsa_harness.cli.main import run_command_line
assert run_command_line(["--help"]) == 0
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_version_is_the_packages() -> None:
    from nsa_harness import __version__

    assert nsa_harness("--version").stdout == f"nsa-harness {__version__}\n"


def test_list_names_every_scenario_by_folder_with_its_aliases() -> None:
    lines = nsa_harness("list", "-v", COLUMNS="400").stdout.splitlines()
    assert lines[:2] == [
        "scenarios/",
        "  ddp_onestep             One DDP step with all traces enabled [plan, ddp; also ddp_onestep_trace]",
    ]
    entries = json.loads(nsa_harness("list", "--json").stdout)
    families = {entry["name"].partition("@")[0] for entry in entries}
    assert {line.split()[0] for line in lines if line[:3].strip() and not line.endswith("/")} == families
    members = {entry["name"].partition("@")[2] for entry in entries} - {""}
    told = {member for line in lines if line.strip().startswith("@") for member in line.strip()[1:].split(", @")}
    assert told == members


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("words", [["list"], ["list", "-v"]])
def test_the_list_fits_the_terminal(columns: int, words: list[str]) -> None:
    lines = nsa_harness(*words, COLUMNS=str(columns)).stdout.splitlines()
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


def test_the_list_is_short_and_begins_with_the_users_own_scenarios(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (here / "scenarios").mkdir()
    (here / "scenarios" / "mine.yaml").write_text("name: mine\nabout: My own run\nrun: {program: train.py}\n")
    assert cli.run_command_line(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["scenarios/", "  mine  My own run"]
    assert "shipped with nsa-harness" in lines[3]
    assert str(REPOSITORY) not in "".join(lines)
    assert len(lines) < 20
    assert cli.run_command_line(["list", "-v"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["scenarios/", "  mine                    My own run"]


def test_scenario_files_run_in_the_order_given(here: Path, requests: list[RunRequest]) -> None:
    for name, priority in (("b", 1), ("c", 0), ("a", 9)):
        text = f"name: {name}\nabout: order\npriority: {priority}\nrun: {{command: ['true']}}\n"
        (here / f"{name}.yaml").write_text(text)
    cli.run_command_line(["run", "b.yaml", "c.yaml", "a.yaml"])
    assert [spec.scenario for spec in requests[0].specs] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["run", "main.py", "--timeout", "5"], "  nsa-harness run main.py limits.deadline_s=5\n"),
        (["run", "main.py", "--deadline=5", "--", "--timeout"], "  nsa-harness run main.py limits.deadline_s=5\n"),
        (["run", "ddp_gloo", "--timeout"], "  nsa-harness run train.py limits.deadline_s=300\n"),
        (["bisect", "train.py", "--timeout=5"], "limits.deadline_s=SECONDS"),
        (["watch", "--timeout", "5", "--", "true"], "--deadline SECONDS"),
        (["attach", "1", "--timeout", "5"], "--for SECONDS"),
    ],
)
def test_a_time_limit_of_another_name_is_answered_with_ours(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command_line(words) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert "Possible options" not in error


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_on_a_terminal_breaks_between_words_and_keeps_a_command_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.run_command_line(["run", "a_script_with_a_long_name.py", "--timeout=60"]) == 2
    *words, command = terminal.getvalue().splitlines()
    assert max(map(len, words)) <= 50
    assert " ".join(words).startswith(
        "`nsa-harness run` has no option --timeout. The setting limits.deadline_s=SECONDS"
    )
    assert command == "  nsa-harness run a_script_with_a_long_name.py limits.deadline_s=60"


def test_a_timeout_of_the_users_program_is_passed_on(here: Path, requests: list[RunRequest]) -> None:
    (here / "train.py").write_text("print()\n")
    cli.run_command_line(["run", "train.py", "--", "--timeout", "5"])
    assert program_of(requests[0]).endswith("train.py --timeout 5")


@pytest.mark.parametrize("columns", [40, 60, 100])
@pytest.mark.parametrize("command", ["", "run", "watch", "claim", "list"])
def test_help_wraps_at_any_width(columns: int, command: str) -> None:
    lines = nsa_harness(*command.split(), "--help", COLUMNS=str(columns)).stdout.splitlines()
    assert [line for line in lines if len(line) > columns and " " in line.strip() and not line.endswith(":")] == []
    assert [line for line in lines if re.search(r"(?<=[\w])-$", line)] == []
    assert not [line for line in lines if line.endswith("...") and not line.endswith(("]...", "COMMAND..."))]


def test_options_of_a_command_stand_in_groups_and_their_variables_are_told_once() -> None:
    told = nsa_harness("run", "--help").stdout
    parts = [line for line in told.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert parts == [
        "Arguments:",
        "Your program:",
        "Which scenarios:",
        "How often:",
        "Where it runs:",
        "Report:",
        "Options:",
    ]
    assert told.count("NSA_HARNESS_") == 1
    assert "Usage: nsa-harness attach [OPTIONS] [PID] [limits.KEY=SECONDS]..." in nsa_harness("attach", "-h").stdout


def test_the_committed_schema_is_current() -> None:
    committed = (REPOSITORY / "scenarios" / "scenario.schema.json").read_text()
    assert json.loads(committed) == json_schema()
    assert nsa_harness("schema").stdout == committed


def test_explain_tells_where_each_value_comes_from_and_reads_back() -> None:
    done = nsa_harness("explain", "ddp_onestep", "gc.layers=[1,3]", "run.env.A=0", NSA_DDP_STATIC_GRAPH="1")
    assert done.returncode == 0, done.stderr
    origins = {
        line.split(":")[0].strip(): line.split("  # ")[-1] for line in done.stdout.splitlines() if "  # " in line
    }
    assert origins["layers"] == "command line"
    assert origins["static_graph"] == "environment NSA_DDP_STATIC_GRAPH"
    assert origins["ranks"].startswith("scenarios/base/ddp.yaml:")
    assert origins["steps"].startswith("scenarios/ddp_onestep.yaml:")
    assert origins["seed"] == "default"
    root = parse_yaml(done.stdout, "explained").root
    assert root is not None
    scenario = check_scenario(root, PROGRAM).scenario
    assert scenario is not None
    assert (scenario.gc.layers, scenario.run.env["A"], scenario.parallel.static_graph) == ("1,3", "0", True)


def test_a_dry_run_prints_the_command_and_writes_nothing(here: Path) -> None:
    question = Invocation(arguments=("ddp_onestep",), working_dir=here, environ={})
    plan: LaunchPlan = plan_launches(question, machine_facts())
    assert isinstance(plan.specs[0], RunSpec)
    done = nsa_harness("run", "ddp_onestep", "train.steps=7", "run.env.GREETING=a b", "--dry-run")
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[:2] == ["env", "GREETING=a b"]
    assert command[command.index("--steps") + 1] == "7"
    assert "torch.distributed.run" in command
    assert list(here.iterdir()) == []


def test_a_dry_run_in_json_is_one_plan_event_a_scenario() -> None:
    done = nsa_harness("run", "ddp_onestep", "fault_raise", "--dry-run", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(event["schema"], event["event"], event["scenario"]) for event in events] == [
        (1, "plan", "ddp_onestep"),
        (1, "plan", "fault_raise"),
    ]
    assert all(event["command"][0] == sys.executable for event in events)


@pytest.mark.usefixtures("here")
def test_run_hands_over_what_was_asked_and_returns_its_exit_code(requests: list[RunRequest]) -> None:
    code = cli.run_command_line(["run", "fault_raise", "ddp_onestep_trace", "--out", "elsewhere", "--strict", "--json"])
    assert code == 124
    (request,) = requests
    assert [spec.scenario for spec in request.specs] == ["fault_raise", "ddp_onestep"]
    given = request.options
    assert (given.out, given.strict, given.json, given.probe) == (Path("elsewhere"), True, True, "full")


@pytest.mark.usefixtures("here")
def test_an_option_is_also_an_environment_variable(requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_HARNESS_PROBE", "board")
    monkeypatch.setenv("NSA_HARNESS_OUT", "there")
    cli.run_command_line(["run", "ddp_onestep"])
    assert (requests[0].options.probe, requests[0].options.out) == ("board", Path("there"))


@pytest.mark.usefixtures("here")
def test_the_command_line_wins_over_the_environment_and_the_environment_over_yaml(
    requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_GC_RANGE", "0:2")
    monkeypatch.setenv("NSA_TRACE_DDP_BUCKETS", "0")
    cli.run_command_line(["run", "ddp_onestep", "gc.layers=[3]"])
    assert " --gc 3 " in program_of(requests[0])
    assert " --no-trace-buckets " in program_of(requests[0])
    (spec,) = requests[0].specs
    assert isinstance(spec, RunSpec)
    assert spec.notes[-1] == "NSA_TRACE_DDP_BUCKETS=0 in the environment set trace.buckets"
    assert not any("NSA_GC_RANGE" in note for note in spec.notes)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_summary_of_a_command_fits_its_line(columns: int) -> None:
    lines = nsa_harness("--help", COLUMNS=str(columns)).stdout.partition("Commands:\n")[2].splitlines()
    summaries = [line[11:].strip() for line in lines]
    assert len(summaries) == 23
    assert [one for one in summaries if len(one) > 60 or not one.endswith(".") or "..." in one] == []


@pytest.mark.parametrize("command", ["run", "watch", "attach", "bisect", "export", "claim", "fit", "read", "ready"])
def test_help_ends_in_examples_that_fit_the_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command_line([command, "-h"]) == 0
    short = capsys.readouterr().out
    assert cli.run_command_line([command, "--help"]) == 0
    assert capsys.readouterr().out == short
    lines = [line.strip() for line in short.split("Examples:")[1].strip().splitlines()]
    assert all(
        line.startswith(("# ", f"nsa-harness {command}", "srun nsa-harness")) and len(line) <= 78 for line in lines
    )
    assert sum(line.startswith("nsa-harness") for line in lines) >= 2
    assert not lines[-1].startswith("#")


def test_a_script_takes_the_words_behind_the_dashes(here: Path, requests: list[RunRequest]) -> None:
    (here / "train me.py").write_text("print()\n")
    words = ["run", "--script", "train me.py", "--ranks", "3", "limits.deadline_s=9", "--", "--resume", "--", "x"]
    cli.run_command_line(words)
    (spec,) = requests[0].specs
    assert isinstance(spec, RunSpec)
    assert spec.scenario == "train_me"
    assert spec.program == ("train me.py", "--resume", "--", "x")
    assert (spec.ranks, spec.limits.deadline_s, spec.backend) == (3, 9.0, "any")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train.py"], ("train.py",)),
        (["./pkg/train.py", "--ranks", "3"], ("./pkg/train.py",)),
        (["-m", "pkg.train"], ("-m", "pkg.train")),
    ],
)
def test_a_program_is_run_by_its_name(
    here: Path, requests: list[RunRequest], words: list[str], program: tuple[str, ...]
) -> None:
    (here / "pkg").mkdir()
    for file in ("train.py", "pkg/train.py"):
        (here / file).write_text("print()\n")
    cli.run_command_line(["run", *words, "--", "--steps", "5"])
    (spec,) = requests[0].specs
    assert isinstance(spec, RunSpec)
    assert (spec.scenario, spec.program) == ("train", (*program, "--steps", "5"))


@pytest.mark.parametrize(("word", "works"), [("train", "run train.py"), ("pkg.train", "run -m pkg.train")])
def test_a_wrong_guess_ends_in_the_line_that_works(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, works: str
) -> None:
    (here / "pkg").mkdir()
    for file in ("train.py", "pkg/train.py"):
        (here / file).write_text("print()\n")
    assert cli.run_command_line(["run", word]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"nsa-harness {works}")


def test_a_wrong_nsa_name_in_the_environment_does_not_stop_a_foreign_script(
    here: Path, requests: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_GC_RANGE", "theirs, not ours")
    (here / "train.py").write_text("print()\n")
    cli.run_command_line(["run", "--script", "train.py"])
    assert len(requests) == 1


def test_a_stored_spec_runs_exactly_as_it_stands(here: Path, requests: list[RunRequest]) -> None:
    import dataclasses

    cli.run_command_line(["run", "ddp_onestep"])
    (spec,) = requests[0].specs
    assert isinstance(spec, RunSpec)
    (here / "spec.json").write_text(json.dumps(dataclasses.asdict(spec)))
    cli.run_command_line(["run", "spec.json"])
    assert requests[1].specs == (spec,)


def test_a_file_outside_the_catalog_runs_beside_a_name(here: Path, requests: list[RunRequest]) -> None:
    (here / "mine.yaml").write_text("extends: base/ddp\nmatrix: {gc.layers: [none, all]}\n")
    cli.run_command_line(["run", "mine.yaml", "ddp_onestep"])
    assert [spec.scenario for spec in requests[0].specs] == [
        "mine@gc.layers=none",
        "mine@gc.layers=all",
        "ddp_onestep",
    ]


def test_two_scenarios_of_one_name_cannot_share_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "x.yaml").write_text("about: x\n")
    assert cli.run_command_line(["run", "a/x.yaml", "b/x.yaml"]) == 2
    message = 'two of the selected scenarios are named "x"; run them separately\n'
    assert capsys.readouterr().err == message


def test_an_error_with_json_is_also_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command_line(["run", "ddp_onestp", "--json"]) == 2
    said = capsys.readouterr()
    event = json.loads(said.out)
    assert (event["schema"], event["event"]) == (1, "error")
    assert event["message"] + "\n" == said.err


def test_a_bare_option_that_may_take_a_value_means_auto() -> None:
    assert cli._split(["run", "x", "--resume", "--", "--resume"]) == (["run", "x", "--resume=auto"], ("--resume",))


def test_the_traceback_is_there_for_those_who_ask() -> None:
    quiet = nsa_harness("run", "ddp_onestp")
    loud = nsa_harness("run", "ddp_onestp", NSA_HARNESS_DEBUG="1")
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert "UsageError" in loud.stderr


def test_a_terminal_without_our_characters_still_gets_the_text() -> None:
    done = nsa_harness("run", "ddp_onestep", "--dry-run", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "ddp_onestep: 2 ranks" in done.stdout


def test_a_fault_of_the_harness_itself_is_one_line_and_exit_125(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("nsa_harness.core.scenario.scenario.json_schema", broken)
    assert cli.run_command_line(["schema"]) == 125
    assert capsys.readouterr().err == (
        "nsa-harness itself failed: ZeroDivisionError: planted; set NSA_HARNESS_DEBUG=1 to see the traceback\n"
    )


@pytest.mark.usefixtures("here")
class TestTheOptionsOfAPlan:
    def test_a_matrix_makes_one_launch_for_each_combination(self, requests: list[RunRequest]) -> None:
        words = ["run", "ddp_onestep", "--matrix", "gc.layers=0:2,[1,3]", "--matrix", "gc.mode=reentrant,non_reentrant"]
        assert cli.run_command_line(words) == 124
        assert [spec.scenario for spec in requests[0].specs] == [
            f"ddp_onestep@gc.layers={layers},gc.mode={mode}"
            for layers in ("0:2", "1+3")
            for mode in ("reentrant", "non_reentrant")
        ]

    def test_attempts_and_jobs_reach_the_request(self, requests: list[RunRequest]) -> None:
        words = ["run", "ddp_onestep", "--repeat=3", "--retries=2", "--maxfail=1", "--jobs=4"]
        assert cli.run_command_line(words) == 124
        assert requests[0].policy == Policy(repeat=3, retries=2, maxfail=1)
        assert requests[0].jobs == 4
        cli.run_command_line(["run", "ddp_onestep", "--jobs", "auto"])
        assert requests[1].jobs is None

    def test_the_shards_together_are_the_plan(self, requests: list[RunRequest]) -> None:
        for part in (None, "1/3", "2/3", "3/3"):
            cli.run_command_line(["run", "*", *(["--shard", part] if part else [])])
        whole, *parts = [[spec.scenario for spec in request.specs] for request in requests]
        assert sorted(name for part in parts for name in part) == sorted(whole)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ["--matrix", "gc.mode"],
                "--matrix: expected KEY=A,B such as gc.mode=reentrant,non_reentrant, got gc.mode",
            ),
            (["--matrix", "gc.mode="], "--matrix: gc.mode: no value after `=`"),
            (
                ["--matrix", "gc.mode=reentrant,reentrant"],
                "--matrix: matrix.gc.mode: reentrant appears twice; keep one",
            ),
            (
                ["--matrix", "gc.mode=x,reentrant"],
                '--matrix: gc.mode: expected one of non_reentrant, reentrant, got "x"',
            ),
            (["--shard", "5/4"], "--shard: expected K/N with K from 1 to N, such as 2/4, got '5/4'"),
            (["--shard", "2/2"], "--shard: 2/2 of 1 scenarios is empty; ask for fewer shards"),
            (["--jobs", "0"], "--jobs: expected a number of runs or auto, got '0'"),
            (["--lf"], "--lf repeats what did not end as expected in the latest run; remove ddp_onestep"),
            (["--resume"], "--resume continues a stored run with its own scenarios; remove ddp_onestep"),
        ],
    )
    def test_a_wrong_value_is_said_and_nothing_is_written(
        self, here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
    ) -> None:
        assert cli.run_command_line(["run", "ddp_onestep", *words]) == 2
        assert capsys.readouterr().err.removeprefix("command line: ") == f"{message}\n"
        assert not list(here.iterdir())

    @pytest.mark.parametrize("option", ["--lf", "--resume", "--resume=20200101T000000-dead"])
    def test_there_must_be_a_run_to_go_on_from(self, capsys: pytest.CaptureFixture[str], option: str) -> None:
        assert cli.run_command_line(["run", option]) == 2
        assert "not a stored run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "offered"), [("run ddp_one", "ddp_onestep"), ("run -t pla", "plan"), ("run nothing_like_it", "")]
)
def test_a_shell_completes_scenarios_and_tags(typed: str, offered: str) -> None:
    words = f"nsa-harness {typed}"
    done = nsa_harness(_NSA_HARNESS_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert done.stdout.split() == offered.split()


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_stdout_does_not_replace_the_exit_code(buffered: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    command = [sys.executable, "-m", "nsa_harness", "explain", "no_such_scenario"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
