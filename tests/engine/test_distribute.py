"""Which host or pair of hosts is bad, from the results of jobs, and `nsa-harness run --distribute=idle`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.commands import distribute
from nsa_harness.commands.distribute import answer, run_distributed, status_of
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.core.plan import EngineChoice, Expect, Launcher, Limits, RunSpec
from nsa_harness.core.report import Outcome, SpecSummary, Status, Verdict
from nsa_harness.core.schedule import Policy
from nsa_harness.core.search.hosts import Hosts, HostSearch, search_hosts
from nsa_harness.engine import engine_named
from nsa_harness.engine.interface import Job
from nsa_harness.engine.site import Site
from nsa_harness.errors import UsageError
from nsa_harness.supervisor.storage.rundir import RunOptions
from tools.slurm_lab import SlurmLab, wait_until

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "bad_host.py"
COMMAND = [str(Path(sys.executable).parent / "nsa-harness"), "run"]
PASS, FAIL, HANG, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.ERROR
Run = Callable[[Hosts], Status]


def names(count: int) -> Hosts:
    return tuple(f"n{number}" for number in range(1, count + 1))


def searched(hosts: Hosts, run: Run, *, with_pairs: bool = True) -> tuple[HostSearch, dict[Hosts, Status]]:
    """Run all jobs that a search asks for, and return its end and the results."""
    results: dict[Hosts, Status] = {}
    while (found := search_hosts(hosts, results, with_pairs=with_pairs)).next_jobs:
        at_once = [host for job in found.next_jobs for host in job]
        assert len(at_once) == len(set(at_once))
        assert not {frozenset(job) for job in found.next_jobs} & {frozenset(job) for job in results}
        results |= {job: run(job) for job in found.next_jobs}
    assert sorted([*found.bad, *found.good, *found.undecided]) == sorted(hosts)
    return found, results


COUNTS = st.integers(2, 40)


@given(COUNTS, st.data())
def test_any_one_host_that_fails_is_found(count: int, data: st.DataObject) -> None:
    hosts, fault = names(count), data.draw(st.sampled_from([FAIL, HANG]))
    bad = data.draw(st.sampled_from(hosts))
    found, results = searched(hosts, lambda job: fault if bad in job else PASS)
    assert (found.bad, found.bad_pairs, found.undecided) == ((bad,), (), ())
    assert len(results) <= 2 * count + 2


@given(st.integers(3, 40), st.data())
def test_any_one_host_that_fails_only_with_others_is_found(count: int, data: st.DataObject) -> None:
    hosts = names(count)
    bad = data.draw(st.sampled_from(hosts))
    found, _ = searched(hosts, lambda job: HANG if bad in job and len(job) == 2 else PASS)
    assert (found.bad, found.bad_pairs, found.undecided) == ((bad,), (), ())


@given(st.integers(4, 40), st.data())
def test_any_one_tested_connection_that_fails_is_named_as_a_pair(count: int, data: st.DataObject) -> None:
    hosts = names(count)
    first = data.draw(st.integers(0, count - 1))
    link = {hosts[first], hosts[(first + 1) % count]}
    found, _ = searched(hosts, lambda job: HANG if set(job) == link else PASS)
    assert (found.bad, [set(pair) for pair in found.bad_pairs], set(found.undecided)) == ((), [link], link)


@given(st.sampled_from([*combinations(names(3), 2)]))
def test_with_three_hosts_every_connection_is_tested(link: Hosts) -> None:
    found, _ = searched(names(3), lambda job: FAIL if set(job) == set(link) else PASS)
    assert found.bad == ()
    assert [set(pair) for pair in found.bad_pairs] == [set(link)]


@given(COUNTS, st.sampled_from([FAIL, HANG]), st.sampled_from([1, 2]))
def test_nobody_is_accused_if_all_fail_alike(count: int, fault: Status, least: int) -> None:
    found, _ = searched(names(count), lambda job: fault if len(job) >= least else PASS)
    assert (found.bad, found.bad_pairs, found.good, found.fails_everywhere) == ((), (), (), least)


@given(COUNTS)
def test_healthy_hosts_are_good_and_each_is_in_two_pairs(count: int) -> None:
    found, results = searched(names(count), lambda _: PASS)
    assert found == HostSearch(good=names(count))
    pairs = [job for job in results if len(job) == 2]
    for host in names(count):
        assert sum(host in pair for pair in pairs) == min(2, count - 1)


@given(COUNTS, st.data())
def test_no_host_that_every_job_passes_with_is_ever_accused(count: int, data: st.DataObject) -> None:
    hosts = names(count)
    statuses = st.sampled_from([PASS, FAIL, HANG, ERROR])
    found, results = searched(hosts, lambda _: data.draw(statuses))
    for host in found.bad:
        assert any(status in (FAIL, HANG) for job, status in results.items() if host in job)
        assert PASS not in [status for job, status in results.items() if host in job and len(job) == 2]
    for host in found.good:
        assert results[host,] is PASS


def test_an_error_is_no_evidence() -> None:
    found, _ = searched(names(3), lambda job: ERROR if "n2" in job else PASS)
    assert (found.bad, found.good, found.undecided) == ((), ("n1", "n3"), ("n2",))


def test_a_host_that_failed_once_needs_a_second_job_to_be_bad() -> None:
    found, _ = searched(names(3), lambda job: FAIL if job == ("n2",) else ERROR if "n2" in job else PASS)
    assert (found.bad, found.good, found.undecided) == ((), ("n1", "n3"), ("n2",))


def test_a_host_that_fails_alone_and_passes_in_a_pair_is_undecided() -> None:
    found, _ = searched(names(3), lambda job: FAIL if "n2" in job and "n3" not in job else PASS)
    assert (found.bad, found.undecided) == ((), ("n2",))


def test_without_pairs_the_jobs_on_single_hosts_decide() -> None:
    found, results = searched(names(3), lambda job: FAIL if "n2" in job else PASS, with_pairs=False)
    assert (found.bad, found.good, len(results)) == (("n2",), ("n1", "n3"), 3)


def sentences(hosts: Hosts, run: Run) -> list[str]:
    found, results = searched(hosts, run)
    return list(answer(hosts, results, found))


def test_the_answer_names_the_host_with_its_jobs_or_says_that_it_is_the_program() -> None:
    assert sentences(names(2), lambda job: FAIL if "n2" in job else PASS) == [
        "n2 is bad: every job with it fails (n2: FAIL, n1+n2: FAIL), and other nodes pass without it (n1: PASS)"
    ]
    assert sentences(names(3), lambda job: HANG if "n2" in job and len(job) == 2 else PASS) == [
        "n2 is bad: it passes alone, but fails with other nodes (n2: PASS, n1+n2: HANG, n2+n3: HANG), and they pass"
        " without it"
    ]
    assert sentences(names(4), lambda job: HANG if job == ("n1", "n2") else PASS) == [
        "the connection between n1 and n2 is bad: they fail together (n1+n2: HANG), but pass alone and with other nodes"
    ]
    assert sentences(names(2), lambda _: FAIL) == [
        "no host is accused, because the program fails on every node (n1: FAIL, n2: FAIL); look at the program"
    ]
    assert sentences(names(2), lambda _: PASS) == [
        "no host is bad: all 2 idle nodes pass (n1: PASS, n2: PASS, n1+n2: PASS)"
    ]


# Runs with an engine that needs no cluster.

SPEC = RunSpec(
    scenario="train", about="", ranks=2, launcher=Launcher.TORCHRUN, program=("train.py",), env=(), cwd=None,
    backend="gloo", device="cpu", subject="", limits=Limits(), expect=Expect(), fault=None, notes=(), not_covered=(),
    spec_hash="1",
)  # fmt: skip
SITE = Site(hosts={"n1": None, "n2": "10.0.0.2", "n3": None}, launcher="env HOST_NAME={host}")


def outcome(status: Status, name: str = "train", number: int = 1) -> Outcome:
    verdict = Verdict(status=status, kind=None, cause="infra" if status is ERROR else None, summary="")
    return Outcome(spec=SpecSummary(scenario=name, about=""), verdict=verdict, ending_text="", dir=name, attempt=number)


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        ("n2", 1, "n2 is bad: every job with it fails (n2: FAIL, n1+n2: FAIL, n3+n2: FAIL)"),
        ("", 0, "no host is bad: all 3 idle nodes pass"),
        ("n", 125, "no host is accused, because the program fails on every node"),
    ],
)
def test_the_answer_is_printed_and_stored_and_decides_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: str, code: int, text: str
) -> None:
    def run(_session: object, spec: RunSpec, number: int, choice: EngineChoice) -> Outcome:
        assert choice.nodes == len(choice.only)
        is_bad = bool(bad) and any(node.startswith(bad) for node in choice.only)
        if number == 1 and choice.only == ("n3",):
            return outcome(ERROR, spec.scenario)  # of the cluster, so it is repeated
        return outcome(FAIL if is_bad else PASS, spec.scenario, number)

    monkeypatch.setattr(distribute, "run_on_engine", run)
    request = RunRequest(
        specs=(SPEC,), options=RunOptions(command="nsa-harness run", out=tmp_path),
        policy=Policy(retries_infra=1), jobs=2,
    )  # fmt: skip
    assert run_distributed(request, EngineChoice(name="hosts"), engine_named("hosts", SITE)) == code
    assert text in capsys.readouterr().out
    assert text in (tmp_path / "latest" / "SUMMARY.md").read_text()


def test_one_idle_node_cannot_be_compared(tmp_path: Path) -> None:
    request = RunRequest(specs=(SPEC,), options=RunOptions(command="nsa-harness run", out=tmp_path))
    with pytest.raises(UsageError, match="1 node of the engine is idle"):
        run_distributed(request, EngineChoice(name="local"), engine_named("local", Site()))


def test_attempts_that_disagree_are_no_evidence() -> None:
    assert status_of([outcome(ERROR), outcome(FAIL)]) is FAIL
    assert status_of([outcome(PASS), outcome(FAIL)]) is ERROR
    assert status_of([replace(outcome(PASS), expected=False)]) is FAIL


def test_a_job_runs_only_on_its_nodes(tmp_path: Path) -> None:
    job = Job(
        name="x", directory=tmp_path, nodes=1, ranks_per_node=1, agent=("env",), torchrun=(), as_module=False,
        program=("true",), env={}, cwd=tmp_path, limit_s=None, only=("n2",), site=SITE,
    )  # fmt: skip
    assert "\n#SBATCH --nodelist=n2\n" in engine_named("slurm", SITE).render(job).text
    text = engine_named("hosts", SITE).render(job).text
    assert "env HOST_NAME=n2 bash -s 1 10.0.0.2 1 &" in text
    assert "HOST_NAME=n1" not in text


def test_no_word_for_a_host_is_empty_because_ssh_would_lose_it(tmp_path: Path) -> None:
    job = Job(
        name="x", directory=tmp_path, nodes=3, ranks_per_node=1, agent=("env",), torchrun=("torchrun",),
        as_module=False, program=("train.py",), env={}, cwd=tmp_path, limit_s=None, site=SITE,
    )  # fmt: skip
    text = engine_named("hosts", SITE).render(job).text
    assert "HOST_NAME=n1 bash -s 1 none 0 &" in text
    node = text.partition("<<'END_OF_NODE'\n")[2].partition("exec env")[0]
    for address, local in (("none", ""), ("10.0.0.2", "--local-addr=10.0.0.2")):
        script = f'{node}\necho ${{address:+"--local-addr=$address"}}'
        command = ["bash", "-c", script, "bash", "1", address, "0"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == local


def run_program(directory: Path, bad: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, str(PROGRAM), "--distribute=idle", "--jobs=2", *words, "--", bad], cwd=directory,
        capture_output=True, text=True, check=False, timeout=380, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--distribute=idle is the only form, and it needs --engine slurm"),
        (["--engine", "local", "--nodes", "1"], "--distribute chooses the nodes of each job; remove --nodes"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(tmp_path: Path, words: list[str], text: str) -> None:
    result = run_program(tmp_path, "", *words)
    assert (result.returncode, text in result.stderr) == (2, True), result.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bad_one_of_two_hosts_is_named(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("hosts: {h1: 127.0.0.1, h2: 127.0.0.1}\nlauncher: env HOST_NAME={host}\n")
    result = run_program(tmp_path, "h2", "--engine", "hosts", "--site", "site.yaml")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "h2 is bad: every job with it fails (h2: FAIL, h1+h2: FAIL)" in result.stdout


WAITS_ON_H2 = """\
import os
import pathlib
import time

started = pathlib.Path("started-" + os.environ["HOST_NAME"])
started.touch()
while os.environ["HOST_NAME"] == "h2" and not os.path.exists("go"):
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_search_is_resumed_and_its_report_keeps_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("hosts: {h1: 127.0.0.1, h2: 127.0.0.1}\nlauncher: env HOST_NAME={host}\n")
    (tmp_path / "waits.py").write_text(WAITS_ON_H2)
    words = ["waits.py", "--ranks=1", "--engine=hosts", "--site=site.yaml", "--distribute=idle", "--jobs=2"]
    latest = tmp_path / "reports" / "latest"
    with subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as command:
        wait_until(lambda: (latest / "waits@h1" / "result.txt").exists(), "h1 did not end", 300)
        wait_until((tmp_path / "started-h2").exists, "h2 did not start", 300)
        command.send_signal(signal.SIGINT)
        output = command.communicate(timeout=300)[0]
    assert command.returncode == 130, output
    assert f"--resume=reports/{latest.resolve().name}" in output
    (tmp_path / "go").touch()
    resumed = subprocess.run([*COMMAND, "--resume"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    attempts = sorted(path.name for path in latest.iterdir() if path.name.startswith("waits"))
    assert attempts == ["waits@h1", "waits@h2", "waits@h2~2"]
    hosts = (latest / "SUMMARY.md").read_text().partition("## Hosts")[2]
    assert "no host is bad: all 2 idle nodes pass (h1: PASS, h2: PASS)" in hosts
    again = subprocess.run([COMMAND[0], "report"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (latest / "SUMMARY.md").read_text().partition("## Hosts")[2] == hosts, again.stdout + again.stderr


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bad_node_of_a_cluster_is_named(tmp_path: Path, cluster: SlurmLab) -> None:
    assert engine_named("slurm", Site()).idle_nodes() == cluster.names
    result = run_program(tmp_path, "n2", "--engine", "slurm")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "n2 is bad: every job with it fails (n2: FAIL, n1+n2: FAIL), and other nodes pass" in result.stdout
    assert cluster.slurm("squeue", "--noheader") == ""
