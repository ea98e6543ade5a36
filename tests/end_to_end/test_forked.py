"""A forked launch ends as a started one does: the same verdict, culprit, line, exit codes and numbers; nothing left."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nsa_harness import protocol
from nsa_harness.commands.attempt import run_one
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.recording.recording import Activation
from nsa_harness.core.report import Outcome
from nsa_harness.fork_server import agent
from nsa_harness.supervisor.launch.fork_client import ForkServer, unforkable_reason
from nsa_harness.supervisor.launch.machine import machine_facts
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.recordings import load_recordings
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run

from .conftest import PROGRAMS, Undisturbed, forget_the_test
from .jobs import until

PROGRAM = PROGRAMS / "forked.py"
# What a program sees of its start and two starts never share; the imports of the server leave one filter behind.
UNLIKE = ("drawn", "seed", "filters")


RECORDER = """\
import json, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(9):
    dist.all_reduce(torch.ones(1))
print("ENTRIES", len(json.loads(_dump_fr_trace_json())["entries"]))
"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """One attempt and its files."""

    outcome: Outcome
    attempt: AttemptDir

    @property
    def spec(self) -> RunSpec:
        return load_spec(self.attempt.spec)

    @property
    def evidence(self) -> dict[str, Any]:
        return evidence_in(self.attempt.evidence)

    @property
    def ends(self) -> list[Any]:
        return ends_of(self.attempt.evidence)

    @property
    def told(self) -> list[Any]:
        found = [(one.code, one.claim, one.ranks, one.place) for one in self.outcome.findings]
        return [self.outcome.verdict.status, self.outcome.verdict.cause, self.outcome.verdict.kind, found]

    def said(self, word: str) -> list[str]:
        lines = self.attempt.output.read_text().splitlines()
        return sorted(line for line in lines if re.match(rf"(\[rank\d\] )?{word} ", line))


def evidence_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    evidence: dict[str, Any] = json.loads(path.read_text())
    return evidence


def ends_of(folder: Path) -> list[Any]:
    """Exit codes, the launcher's last, and what each rank computed and raised."""
    evidence = evidence_in(folder)
    ranks = [
        (
            one["exit"]["status"],
            one["last_loss"],
            one["raised"] and (one["raised"]["type"], one["raised"]["frames"]),
        )
        for one in evidence["ranks"]
    ]
    return [*ranks, evidence["launcher"]["status"]]


@dataclass(kw_only=True)
class Launches:
    """Attempts in one run directory, each forked from the same server or started anew."""

    home: Path
    server: ForkServer

    def launch(self, spec: RunSpec, launcher: Launcher | None, name: str) -> Done:
        forget_the_test()
        attempt = AttemptDir(self.home / name)
        outcome = run_one(
            replace(spec, launcher=launcher or spec.launcher),
            attempt,
            number=1,
            probe="full",
            facts=machine_facts(),
            notify=lambda _: None,
            interruption=Undisturbed(),
            log=self.home / "test_execution.log",
            server=self.server,
        )
        return Done(outcome=outcome, attempt=attempt)

    def both(self, spec: RunSpec, name: str) -> tuple[Done, Done]:
        """Started anew, and forked."""
        anew, forked = self.launch(spec, None, f"{name}-anew"), self.launch(spec, Launcher.FORK, f"{name}-forked")
        assert forked.spec.launcher is Launcher.FORK, forked.spec.notes
        return anew, forked


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Launches:
    return Launches(home=create_run(tmp_path_factory.mktemp("forked")).path, server=server)


def script(way: str, *overrides: str) -> RunSpec:
    return only(
        plan_launches(question(*overrides, script=Script(file=str(PROGRAM), ranks=2, args=(way,))), machine_facts())
    )


def scenario(*words: str) -> RunSpec:
    return only(plan_launches(question(*words), machine_facts()))


def question(*words: str, script: Script | None = None) -> Invocation:
    return Invocation(arguments=words, script=script, working_dir=Path.cwd(), environ={})


def only(plan: Any) -> RunSpec:
    (spec,) = plan.specs
    assert isinstance(spec, RunSpec)
    return spec


@pytest.mark.slow  # the quick bisection compares hangs of forked ranks with those of torchrun too
def test_a_hang_has_the_same_proof_and_line(launches: Launches) -> None:
    anew, forked = launches.both(scenario("fault_deadlock", "limits.stall_s=1"), "fault_deadlock")
    assert anew.outcome.verdict.status == "HANG"
    assert forked.told == anew.told


@pytest.fixture(scope="module")
def raised_anew(launches: Launches) -> Done:
    """Asked to be forked, and started by torchrun for what its environment declares."""
    return launches.launch(replace(script("raises"), env=(("TORCH_LOGS", "-all"),)), Launcher.FORK, "declared")


def test_what_cannot_be_forked_is_started_anew_and_says_so(raised_anew: Done) -> None:
    assert raised_anew.spec.launcher is Launcher.TORCHRUN
    assert raised_anew.spec.notes[-1] == "launched without forking: TORCH_LOGS is read when a program starts"
    assert raised_anew.outcome.verdict.cause == "exception"


def test_a_rank_that_raises_is_blamed_for_the_same_line(launches: Launches, raised_anew: Done) -> None:
    forked = launches.launch(script("raises"), Launcher.FORK, "raises")
    assert forked.spec.launcher is Launcher.FORK, forked.spec.notes
    assert forked.told == raised_anew.told
    # Rank 0 loses its partner and is ended by torchrun for that, whichever comes first.
    assert forked.ends[1:] == raised_anew.ends[1:]
    assert forked.attempt.output.stat().st_mode & 0o077 == 0, "what a program prints is nobody else's"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit3", "words"])
def test_a_rank_that_fails_is_blamed_for_the_same_line(launches: Launches, way: str) -> None:
    anew, forked = launches.both(script(way), way)
    assert anew.outcome.verdict.status == "FAIL"
    assert forked.told == anew.told
    # Rank 0 loses its partner and is ended by torchrun for that, whichever comes first.
    assert forked.ends[1:] == anew.ends[1:]


@pytest.mark.slow
def test_a_forked_rank_is_recorded_like_a_started_one(launches: Launches) -> None:
    spec = replace(script("raises"), env=((protocol.ENV_RECORD, "{}"),))
    kept = []
    for done in launches.both(spec, "recorded"):
        recordings, notes = load_recordings(done.attempt, 2)
        assert notes == ()
        assert not list(done.attempt.probe_files.glob("*.record")), "they contain secrets"
        kept.append([[_lines(one) for one in each.threads[0].activations] for each in recordings])
    assert kept[0] == kept[1]
    assert all(lines for rank in kept[0] for lines in rank)


def _lines(activation: Activation) -> list[object]:
    """The lines that were executed, with those in the functions that they called."""
    return [[execution.line, *map(_lines, execution.calls)] for execution in activation.executions]


@pytest.mark.parametrize("way", ["os_exit", "abort"])
@pytest.mark.slow
def test_a_rank_that_leaves_at_once_is_blamed_for_the_same_line(launches: Launches, way: str) -> None:
    anew, forked = launches.both(script(way), way)
    assert forked.told[:2] == anew.told[:2]
    assert [end[0] for end in forked.ends[:-1]][1] == [end[0] for end in anew.ends[:-1]][1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_workers_of_a_loader_load_the_same(launches: Launches, way: str) -> None:
    anew, forked = launches.both(script(way), way)
    assert forked.said("LOADED") == anew.said("LOADED") != []
    assert forked.ends == anew.ends


@pytest.mark.slow
def test_a_forked_rank_sees_nothing_of_the_server(launches: Launches) -> None:
    anew, forked = ([json.loads(line.partition("FACTS ")[2]) for line in one.said("FACTS")] for one in facts(launches))
    assert len(forked) == 2
    for one, other in zip(anew, forked, strict=True):
        assert {k: v for k, v in other.items() if k not in UNLIKE} == {k: v for k, v in one.items() if k not in UNLIKE}
    first, second = forked
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))
    assert first["seed"] != second["seed"]


def facts(launches: Launches) -> tuple[Done, Done]:
    """With one variable that the server has another value of."""
    return launches.both(replace(script("facts"), env=(("HOME", str(launches.home)),)), "facts")


@pytest.mark.slow
def test_a_program_may_close_files_take_signals_and_fork_itself(launches: Launches) -> None:
    anew, forked = launches.both(script("ways"), "ways")
    assert forked.said("DID") == anew.said("DID") != []
    assert forked.outcome.verdict.status == "PASS"


@pytest.mark.slow
def test_one_process_without_torchrun_is_forked_as_well(launches: Launches) -> None:
    anew, forked = launches.both(scenario("single_no_gc"), "alone")
    assert anew.spec.launcher is Launcher.PLAIN
    assert forked.told == anew.told
    assert forked.ends == anew.ends


@pytest.mark.slow
def test_two_at_once_do_not_disturb_each_other(launches: Launches) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(launches.launch, script("fork"), Launcher.FORK, f"side{n}") for n in range(2)]
    first, second = (one.result() for one in made)
    assert (first.ends, first.outcome.verdict.status) == (second.ends, "PASS")
    assert {first.spec.launcher, second.spec.launcher} == {Launcher.FORK}


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_many_in_a_row_leave_nothing_behind(launches: Launches, count: int) -> None:
    spec = script("raises")
    launches.launch(spec, Launcher.FORK, f"first{count}")
    ours = psutil.Process()
    before = dict(held(ours))
    for number in range(count):
        assert launches.launch(spec, Launcher.FORK, f"row{count}-{number}").spec.launcher is Launcher.FORK
    # A file or process of the first launch may still have been open.
    until(
        lambda: all(files <= before.get(pid, 0) for pid, files in held(ours)),
        "the processes and files of the launches are gone",
    )
    assert [path.name for path in Path("/dev/shm").glob(f"nsa-harness-{launches.home.name}*")] == []


def held(process: psutil.Process) -> list[Any]:
    """Open files of this process and of its servers, and how many processes there are below, zombies too."""
    family = [process, *process.children(recursive=True)]
    return [(one.pid, one.num_fds()) for one in family]


CONTROLLER = """
import sys
from tests.end_to_end.test_forked import *
with ForkServer() as server:
    Launches(home=Path(sys.argv[1]), server=server).launch(scenario("fault_deadlock"), Launcher.FORK, "killed")
"""


def runs(process: psutil.Process) -> bool:
    """One that has ended may wait for ever for whoever adopted it to take note."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    home = create_run(tmp_path).path
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CONTROLLER, str(home)]
    controller = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    heartbeat = home / "killed" / "heartbeat_rank0.jsonl"
    until(lambda: heartbeat.exists() and heartbeat.read_text() != "", "rank 0 trains", limit_s=200)
    # A short-lived child of the controller may come and go; what stays is the server with all below it, and the keeper.
    until(lambda: len(psutil.Process(controller.pid).children()) == 2, "server and keeper are its only children")
    family = psutil.Process(controller.pid).children(recursive=True)
    assert len(family) >= 6  # server, guardian, agent, two ranks; keeper
    os.kill(controller.pid, signal.SIGKILL)
    controller.wait()
    until(lambda: not any(map(runs, family)), "every process is gone")
    assert (home / "killed" / "interrupted").exists()
    assert list(Path("/dev/shm").glob(f"nsa-harness-{home.name}*")) == []


@pytest.mark.slow
def test_a_launch_goes_on_when_the_server_was_killed(tmp_path: Path) -> None:
    with ForkServer() as server:
        launches = Launches(home=create_run(tmp_path).path, server=server)
        spec = script("raises")
        others = psutil.Process().children()
        server.with_launcher(replace(spec, launcher=Launcher.FORK))
        (process,) = (one for one in psutil.Process().children() if one not in others)
        process.kill()
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the server is gone")
        done = launches.launch(spec, Launcher.FORK, "without")
    assert done.outcome.verdict.cause == "exception"
    assert [one["what"] for one in done.evidence["trouble"]] == ["fork"]


@pytest.mark.slow
def test_a_stored_spec_that_was_forked_is_repeated_by_torchrun(launches: Launches) -> None:
    forked = launches.launch(script("raises"), Launcher.FORK, "stored")
    assert "-m torch.distributed.run --standalone --nproc-per-node=2" in forked.attempt.command.read_text()
    again = Launches(home=launches.home, server=None).launch(forked.spec, None, "again")  # type: ignore[arg-type]
    assert again.spec.launcher is Launcher.TORCHRUN
    assert again.told == forked.told


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cuda"}, "device cuda"),
        ({"backend": "nccl"}, "backend nccl"),
        ({"env": (("OMP_NUM_THREADS", "2"),)}, "OMP_NUM_THREADS"),
        ({"launcher": Launcher.PLAIN, "program": ("bash", "run.sh")}, "a user's own command"),
        ({"program": ("train.sh",)}, "train.sh"),
    ],
)
def test_a_spec_that_a_fork_would_change_says_why(change: dict[str, Any], why: str) -> None:
    assert why in (unforkable_reason(replace(script("raises"), **change)) or "")
    assert unforkable_reason(script("raises")) is None


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_nobody_reads_without_a_gpu_stands_in_the_way_of_no_fork(name: str) -> None:
    assert unforkable_reason(replace(script("raises"), env=((name, "1"),), device="cpu", backend="gloo")) is None


def test_a_forked_process_has_the_level_of_debugging_that_it_was_launched_with(
    launches: Launches, tmp_path: Path
) -> None:
    file = tmp_path / "level.py"
    file.write_text("import torch.distributed as dist\nprint('LEVEL', dist.get_debug_level())\n")
    spec = only(plan_launches(question(script=Script(file=str(file), ranks=1, args=())), machine_facts()))
    for level in ("INFO", "DETAIL"):
        asked = replace(spec, env=(("TORCH_DISTRIBUTED_DEBUG", level),))
        done = launches.launch(asked, Launcher.FORK, f"level-{level}")
        assert done.spec.launcher is Launcher.FORK, done.spec.notes
        assert done.said("LEVEL") == [f"[rank0] LEVEL DebugLevel.{level}"]


def test_a_forked_launch_skips_the_delays_of_torchruns_rendezvous() -> None:
    module = SimpleNamespace(**vars(importlib.import_module(agent._RENDEZVOUS)))
    assert vars(module).keys() >= {"_delay", "get_method_name"}
    delays: list[float] = []
    module._delay = delays.append
    agent._shorten_rendezvous(module)
    module._delay(seconds=(0, 0.3))
    module._delay(seconds=1)
    assert delays == [1]

    def record() -> str:
        return module.get_method_name()

    assert record() == "test_a_forked_launch_skips_the_delays_of_torchruns_rendezvous"


def test_a_forked_process_has_the_size_of_the_flight_recorder_that_it_was_launched_with(
    launches: Launches, tmp_path: Path
) -> None:
    file = tmp_path / "recorder.py"
    file.write_text(RECORDER)
    spec = only(plan_launches(question(script=Script(file=str(file), ranks=1, args=())), machine_facts()))
    done = launches.launch(replace(spec, env=(("TORCH_FR_BUFFER_SIZE", "7"),)), Launcher.FORK, "recorder")
    assert done.spec.launcher is Launcher.FORK, done.spec.notes
    assert done.said("ENTRIES") == ["[rank0] ENTRIES 7"]


def test_a_script_that_sets_what_torch_reads_at_its_import_is_not_forked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import os\nos.environ.setdefault('OMP_NUM_THREADS', '2')\nimport torch\n")
    why = unforkable_reason(replace(script("raises"), program=(str(file),)))
    assert why == "train.py sets OMP_NUM_THREADS, which is read when torch is imported"


def test_a_file_that_shadows_an_imported_module_is_not_forked(launches: Launches, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import queue\n")
    (tmp_path / "queue.py").write_text("")
    forget_the_test()
    asked = replace(script("raises"), program=(str(tmp_path / "train.py"),), launcher=Launcher.FORK)
    assert "queue.py would shadow a module" in launches.server.with_launcher(asked).notes[-1]
