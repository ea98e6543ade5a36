"""A bisection as a user starts it: planted differences under real ranks, the right answer and its kind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsa_harness.cli.main import run_command_line

from .conftest import COMMAND, PROGRAMS, Ran, Workspace

TWO_RANKS = ("run.ranks=2", "parallel.wrapper=ddp")


def _when(text: str, kind: str = "deadlock", layer: str = "") -> str:
    return f"fault={{kind: {kind}, rank: 1, {layer}when: {{{text}}}}}"


def _answer(ran: Ran) -> dict[str, Any]:
    return json.loads((ran.run_dir / "bisect.json").read_text())


def _items(ran: Ran) -> tuple[str, list[Any]]:
    answer = _answer(ran)["answer"]
    return answer["kind"], answer["items"]


def test_one_layer_is_found_and_proven_and_the_commands_say_the_truth(workspace: Workspace) -> None:
    small = ("model.layers=3", "model.seq_len=64", "limits.stall_s=1")
    ran = workspace.harness("bisect", "gc_baseline_full", "--gc-range", *small, *TWO_RANKS, _when("recomputed: [2]"))
    stored = _answer(ran)
    assert ran.code == 0, ran.out + ran.err
    assert _items(ran) == ("single", [2])
    assert stored["question"] == "gc.layers in [0,3)"
    assert stored["outcome_sought"]["verdict"] == "HANG"
    assert len([one for one in stored["probes"] if one["purpose"] == "right_edge"]) <= 2
    launchers = {one["purpose"]: one["launcher"] for one in reversed(stored["probes"])}  # of the first of each
    assert launchers["control_good"] == "fork"
    assert (launchers["proof_bad"], launchers["proof_good"]) == ("torchrun", "torchrun")
    assert "gc.layers=[2]" in stored["commands"]["bad"]
    assert "gc.layers=0:2" in stored["commands"]["good"]
    assert "layer 2 alone" in ran.out
    assert (ran.run_dir / "BISECT.md").read_text().strip()
    compile((ran.run_dir / "repro" / "repro.py").read_text(), "repro.py", "exec")
    again = workspace.harness("bisect", "--log", str(ran.run_dir))
    assert again.code == 0
    assert "layer 2 alone" in again.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "kind", "items"),
    [
        ("recomputed: [7]", "single", [7]),
        ('recomputed: "4:9"', "range", [4, 9]),
        ("recomputed: [3, 8]", "set", [3, 8]),
        ("recomputed_layers: 5", "count", [5]),
        ("any_recomputed: [2, 9]", "several", [2, 9]),
    ],
)
def test_what_is_planted_among_twelve_layers_is_found(
    workspace: Workspace, when: str, kind: str, items: list[int]
) -> None:
    ran = workspace.harness("bisect", "--gc-range", *TWO_RANKS, _when(when))
    assert _items(ran) == (kind, items), ran.out + ran.err
    assert ran.code == 0


@pytest.mark.slow
def test_a_threshold_in_the_length_of_the_sequence_is_found(workspace: Workspace) -> None:
    fault = _when("seq_len: 100", kind="raise", layer="layer: 0, ")
    ran = workspace.harness("bisect", "ddp_onestep", "--seq-len=64:128", fault)
    assert _items(ran) == ("threshold", [100]), ran.out + ran.err


@pytest.mark.slow
def test_one_key_of_nine_between_two_files_is_found(workspace: Workspace) -> None:
    common = "extends: base/ddp\nmodel: {layers: 4"
    workspace.scenario("good", f"{common}}}\n{_fault_in_yaml('recomputed: [2]')}")
    workspace.scenario(
        "bad",
        f"{common}, seq_len: 128, compression: mean}}\ntrain: {{steps: 2, batch: 1, seed: 3, clip: 1.0}}\n"
        f"gc: {{layers: [2]}}\nparallel: {{bucket_cap_mb: 5, gradient_as_bucket_view: true}}\n"
        f"{_fault_in_yaml('recomputed: [2]')}",
    )
    ran = workspace.harness("bisect", "--set=good,bad")
    assert _items(ran) == ("single", ["gc.layers"]), ran.out + ran.err
    assert len(_answer(ran)["probes"][1]["config"]) == 9


def _fault_in_yaml(when: str) -> str:
    return f"fault: {{kind: deadlock, rank: 1, when: {{{when}}}}}\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hang_by_lot_is_found_all_the_same_and_said_to_be_one(workspace: Workspace) -> None:
    fault = _when("recomputed: [2], chance: 0.5")
    process = workspace.start("bisect", "gc_baseline_full", "--gc-range", "model.layers=4", *TWO_RANKS, fault)
    process.wait()  # some fifty launches, on whatever machine
    ran = workspace.finished(process)
    answer = _answer(ran)["answer"]
    assert (answer["kind"], answer["items"]) == ("single", [2]), ran.out + ran.err
    assert 0.1 < answer.get("p_hang", 0.5) < 0.95


@pytest.mark.slow
def test_of_a_healthy_model_there_is_nothing_to_bisect(workspace: Workspace) -> None:
    ran = workspace.harness("bisect", "gc_baseline_full", "--gc-range", "model.layers=2", *TWO_RANKS)
    assert _items(ran) == ("none", []), ran.out + ran.err
    assert ran.code == 0
    assert "nothing to bisect" in ran.out


def _script(*words: str) -> tuple[str, ...]:
    return ("bisect", "--script", str(PROGRAMS / "layered.py"), "--ranks", "2", *words)


@pytest.mark.slow
def test_a_users_own_script_is_bisected_through_its_own_words(workspace: Workspace) -> None:
    ran = workspace.harness(*_script("--gc-range=0:8", "--arg", "--gc-layers={layers}"))
    assert _items(ran) == ("range", [5, 7]), ran.out + ran.err
    assert "-- --gc-layers=5,6" in _answer(ran)["commands"]["bad"]


@pytest.mark.slow
def test_a_program_that_takes_a_range_is_never_asked_for_anything_else(workspace: Workspace) -> None:
    """In the program only layer 5 and 6 matter; the variable is filled as its own words for a range say."""
    ran = workspace.harness(*_script("--gc-range=0:8", "--env-arg", "GC_RANGE={range}"))
    stored = _answer(ran)
    assert _items(ran) == ("range", [5, 7]), ran.out + ran.err
    assert all(one["verdict"] for one in stored["probes"]), "each of them was launched"
    assert "GC_RANGE=5:7" in stored["commands"]["bad"]


@pytest.mark.slow
def test_an_open_wait_is_proven_in_full_twice_and_a_slow_sound_probe_on_the_same_line_passes(
    workspace: Workspace,
) -> None:
    script = ("--script", str(PROGRAMS / "open_wait.py"), "--ranks", "2", "limits.open_wait_s=15")
    words = ("--gc-range=0:3", "--arg", "--gc-layers={layers}", "--", "--pair", "0,2", "--slow", "5")
    process = workspace.start("bisect", *script, *words)
    process.wait()  # some fifteen launches, on whatever machine
    ran = workspace.finished(process)
    assert _items(ran) == ("set", [0, 2]), ran.out + ran.err
    probes = _answer(ran)["probes"]
    bad = [one for one in probes if one["counts_as"] == "bad"]
    assert [one["purpose"] for one in bad if one["verdict"] == "HANG"] == ["control_bad", "proof_bad"]
    early = [one for one in bad if one["early"]]
    assert len(early) == len(bad) - 2 > 0
    assert {one["verdict"] for one in early} == {None}
    assert all((ran.run_dir / one["dir"] / "result.txt").read_text() == "ERROR\n" for one in early)
    slow = [one for one in probes if one["counts_as"] == "good" and "0" in str(one["config"]) and one["wall_s"] > 5]
    assert slow
    assert "same wait, stopped early" in ran.out


@pytest.mark.slow
def test_and_through_its_environment(workspace: Workspace) -> None:
    ran = workspace.harness(*_script("--gc-range=0:8", "--env-arg", "GC_LAYERS={layers}"))
    assert _items(ran) == ("range", [5, 7]), ran.out + ran.err
    commands = _answer(ran)["commands"]
    assert commands["bad"].startswith("GC_LAYERS=5,6 nsa-harness run ")
    for which, code in (("bad", 124), ("good", 0)):
        variable, _, *words = shlex.split(commands[which])
        repeated = workspace.harness(*words, **dict([variable.split("=", 1)]))
        assert repeated.code == code, commands[which] + repeated.out


@pytest.mark.slow
def test_a_bisection_killed_at_any_moment_goes_on_and_repeats_no_finished_probe(workspace: Workspace) -> None:
    words = ("bisect", "gc_baseline_full", "--gc-range", "model.layers=6", *TWO_RANKS, _when("recomputed: [3]"))
    reports = workspace.directory / "reports"
    seen = 0
    for _ in range(10):
        process = workspace.start(*words)
        _wait_for_a_probe_more(process, reports, seen)
        process.kill()
        process.wait()
        seen = _finished(reports)
    ran = workspace.harness(*words)
    assert _items(ran) == ("single", [3]), ran.out + ran.err
    stored = _answer(ran)["probes"]
    assert len([path for path in reports.glob("2*") if path.is_dir()]) == 1
    kept = [json.loads(line) for line in (ran.run_dir / "probes.jsonl").read_text().splitlines()]
    assert len(kept) == len(stored)
    assert [one["n"] for one in stored] == list(range(1, len(stored) + 1))


def _finished(reports: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in reports.glob("2*/probes.jsonl"))


def _wait_for_a_probe_more(process: subprocess.Popen[str], reports: Path, seen: int) -> None:
    """Until one more probe has been kept, or launched: kills fall into both."""
    while process.poll() is None and _finished(reports) <= seen:
        if seen % 2 and any(reports.glob(f"2*/p{seen + 1:02d}*/watch.jsonl")):
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)


def _sized(workspace: Workspace, *words: str, first: str = "") -> tuple[str, ...]:
    """A bisection of a program that fails from three on, quickly; its option begins like some of torchrun's."""
    (workspace.directory / "train.py").write_text(f"import os, sys\n{first}\nsys.exit(sys.argv[1] >= '--n=3')\n")
    return ("bisect", "--script", "train.py", "--ranks", "1", "--arg", "--n={value}", *words)


@pytest.mark.slow
def test_a_search_whose_budget_has_run_out_goes_on_with_a_larger_one(workspace: Workspace) -> None:
    words = _sized(workspace, "--any", "size=[1, 2, 3, 4]")
    short = workspace.harness(*words, "--budget", "0.01s")
    assert short.code == 125, short.out + short.err
    assert _items(short) == ("undecided", [])
    assert "larger --budget" in short.out
    ran = workspace.harness(*words, "--budget", "10m")
    assert (ran.code, *_items(ran)) == (0, "threshold", [3]), ran.out + ran.err
    assert ran.run_dir == short.run_dir
    assert "1 probe already finished" in ran.out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_whose_helper_is_edited_after_a_kill_begins_anew_and_says_so(workspace: Workspace) -> None:
    words = _sized(workspace, "--any", "size=[1, 2, 3, 4]", "--no-fork", first="import helper")
    helper, reports = workspace.directory / "helper.py", workspace.directory / "reports"
    helper.write_text("LIMIT = 3\n")
    _kill_after(workspace.start(*words), reports, 2)
    goes_on = workspace.start(*words)
    _kill_after(goes_on, reports, 3)
    assert "2 probes already finished" in (workspace.directory / "out.txt").read_text()
    assert len(list(reports.glob("2*"))) == 1
    (first,) = (path.name for path in reports.glob("2*"))
    helper.write_text("LIMIT = 4\n")
    ran = workspace.harness(*words)
    assert (ran.code, *_items(ran)) == (0, "threshold", [3]), ran.out + ran.err
    told = f"helper.py has changed since the search in reports/{first}; a new search starts"
    assert told in " ".join(ran.out.split())
    assert len(list(reports.glob("2*"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_searches_in_one_directory_have_a_folder_each_and_one_answer(workspace: Workspace) -> None:
    words = _sized(workspace, "--any", "size=[1, 2, 3, 4]", "--no-fork")
    reports = workspace.directory / "reports"
    with Path(workspace.directory / "first.txt").open("w") as out:
        first = subprocess.Popen([*COMMAND, *words], cwd=workspace.directory, stdout=out, stdin=subprocess.DEVNULL)
        while first.poll() is None and not _finished(reports):
            with suppress(subprocess.TimeoutExpired):
                first.wait(timeout=0.05)
        ran = workspace.harness(*words)
        assert first.wait(timeout=280) == 0
    assert ran.code == 0, ran.out + ran.err
    assert "; this is a separate one" in " ".join(ran.out.split())
    answers = [json.loads((path / "bisect.json").read_text())["answer"] for path in reports.glob("2*")]
    assert [(one["kind"], one["items"]) for one in answers] == [("threshold", [3])] * 2


def _kill_after(process: subprocess.Popen[str], reports: Path, probes: int) -> None:
    """As nothing can prevent, once so many probes have ended."""
    while process.poll() is None and _finished(reports) < probes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    process.kill()
    process.wait()


def test_what_the_screen_could_not_show_stands_in_the_log(workspace: Workspace) -> None:
    # A program that cannot be forked: the one launch that is made needs no server.
    alone = "os.environ['OMP_NUM_THREADS'] = '1'"
    words = _sized(workspace, "--any", "size=[1, 2, 3, 4]", "--budget", "0.01s", first=alone)
    with Path("/dev/full").open("w") as full:
        code = subprocess.run([*COMMAND, *words], cwd=workspace.directory, stdout=full, check=False).returncode
    assert code == 125
    log = (workspace.directory / "reports" / "latest" / "test_execution.log").read_text()
    assert "output through BisectScreen: OSError" in log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bisect",), "exactly one option"),
        (("bisect", "ddp_onestep", "--gc-range=9:4"), "expected A:B with A below B"),
        (("bisect", "ddp_onestep", "--gc-range", "--budget", "soon"), "--budget: expected a time"),
        (("bisect", "ddp_onestep", "--gc-range", "--outcome", "hung"), "--outcome: expected same, hang"),
        (("bisect", "nothere", "--gc-range"), "nothere"),
        (("bisect", "--log", "nothere"), "not a stored run"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_runs(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = run_command_line(words), capsys.readouterr().err
    assert (code, len(err.splitlines())) == (2, 1), err
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_git_bisect_run_skips_what_is_a_mistake_on_the_command_line(workspace: Workspace) -> None:
    assert workspace.harness("run", "--git-bisect", "nothere").code == 125
    assert workspace.harness("run", "nothere").code == 2
    assert workspace.harness("run", "--git-bisect", "--no-such-option").code == 125


@pytest.mark.slow
def test_a_commit_is_found_in_any_repository(workspace: Workspace) -> None:
    home = workspace.directory / "repo"
    home.mkdir()
    git = ["git", "-C", str(home), "-c", "user.email=a@b", "-c", "user.name=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(6):
        (home / "train.py").write_text(f"import sys, torch.distributed as dist\ndist.init_process_group()\n"
                                       f"dist.barrier()\nsys.exit({3 if number >= 4 else 0})\n")  # fmt: skip
        (home / "version").write_text(str(number))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", f"version {number}"], check=True)
    done = subprocess.run(
        [*COMMAND, "bisect", "--script", "train.py", "--commits=HEAD~5..HEAD"],
        cwd=home, capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    stored = json.loads((home / "reports" / "latest" / "bisect.json").read_text())
    assert stored["answer"]["kind"] == "threshold", done.stdout + done.stderr
    assert "version 4" in done.stdout
    listed = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1
    subprocess.run([*git, "bisect", "start", "HEAD", "HEAD~5"], check=True, capture_output=True)
    command = [*COMMAND, "run", "--git-bisect", "--script", "train.py", "--out", str(workspace.directory / "reports")]
    told = subprocess.run([*git, "bisect", "run", *command], cwd=home, capture_output=True, text=True, check=False)
    assert "is the first bad commit" in told.stdout, told.stdout + told.stderr
    assert "version 4" in told.stdout


@pytest.mark.slow
def test_commits_that_a_broken_one_hides_are_named_as_git_names_those_it_skipped(workspace: Workspace) -> None:
    home = workspace.directory / "repo"
    home.mkdir()
    git = ["git", "-C", str(home), "-c", "user.email=a@b", "-c", "user.name=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(6):
        broken = "raise ImportError('no flash')" if number == 3 else "pass"  # on another line than what is sought
        (home / "train.py").write_text(f"import sys\n{broken}\nsys.exit({3 if number >= 4 else 0})  # {number}\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", f"version {number}"], check=True)
    done = subprocess.run(
        [*COMMAND, "bisect", "--script", "train.py", "--commits=HEAD~5..HEAD"],
        cwd=home, capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 125, done.stdout + done.stderr
    listed = subprocess.run([*git, "log", "--format=%h %s", "-3"], check=True, capture_output=True, text=True)
    last, first, broken = listed.stdout.splitlines()
    told = " ".join(done.stdout.split())
    assert f"the first commit that fails can be any of: {broken}; {first}" in told
    assert f"fails in another way (ImportError) at {broken.split()[0]}, fails from {first.split()[0]}" in told
    assert last not in told.partition("UNDECIDED")[2]


@pytest.mark.slow
def test_ctrl_c_ends_the_probe_and_the_same_command_goes_on(workspace: Workspace) -> None:
    process = workspace.start("bisect", "gc_baseline_full", "--gc-range", "model.layers=2", *TWO_RANKS)
    reports = workspace.directory / "reports"
    while process.poll() is None and not any(reports.glob("2*/p01/watch.jsonl")):
        psutil.wait_procs([psutil.Process(process.pid)], timeout=0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "the same command continues the search" in (workspace.directory / "out.txt").read_text()
