"""Large jobs: the rank at fault is found, ranks that stand alike are one class, and the cost grows with the ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.scale_job import write_job
from benchmarks.scale_plot import plot, table
from benchmarks.scale_schedule import Fault, SimulatedJob, mesh_of, simulate
from nsa_harness.commands.run import ReportFormat, rejudge
from nsa_harness.core.collectives.groups import groups_of
from nsa_harness.core.collectives.timeline import Timeline
from nsa_harness.core.collectives.wait_cycles import cycle
from nsa_harness.core.evidence.evidence import Collective, RankSnapshot, Snapshot, StatusFile
from nsa_harness.core.evidence.reduced import bounded_snapshot, history_calls
from nsa_harness.core.verdict.components import components, final_nodes
from nsa_harness.core.verdict.wait_graph import wait_graph_between
from nsa_harness.supervisor.storage.adapters import stored_snapshot

_ENDINGS = {
    Fault.SKIPS: ("HANG", "cross_group_deadlock"),
    Fault.CROSSED: ("HANG", "cross_group_deadlock"),
    Fault.RAISES: ("FAIL", "exception"),
    Fault.SLOW: ("FAIL", "slow"),
}


def judged(parent: Path, ranks: int, fault: Fault) -> tuple[Path, dict[str, Any], SimulatedJob]:
    """Write and judge the run of a simulated job, and return its directory, its outcome and the job."""
    job = simulate(ranks, fault, steps=4)
    run = write_job(parent, job)
    rejudge(run.path, report_format=ReportFormat.LINES, strict=False, out=None, redact=True, verbose=False)
    return run.path, json.loads(run.report.read_text())["outcomes"][0], job


@pytest.mark.parametrize("fault", Fault)
def test_the_planted_rank_is_found(fault: Fault, tmp_path: Path) -> None:
    _, outcome, job = judged(tmp_path, 16, fault)
    assert (outcome["verdict"], outcome["cause"]) == _ENDINGS[fault]
    assert outcome["culprit"]["ranks"] == [job.culprit]


@pytest.mark.parametrize("fault", [Fault.SKIPS, Fault.CROSSED])
def test_a_skipped_and_a_postponed_call_leave_the_same_evidence_so_neither_is_certain(
    fault: Fault, tmp_path: Path
) -> None:
    _, outcome, job = judged(tmp_path, 16, fault)
    finding = next(finding for finding in outcome["findings"] if finding["code"] == "cross_group_deadlock")
    assert finding["confidence"] < 0.9
    assert f"rank {job.culprit} first made the call" in finding["claim"]
    assert "skipped or postponed" in finding["claim"]


def test_a_report_of_many_ranks_shows_classes_of_ranks_and_mesh_coordinates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, outcome, job = judged(tmp_path, 128, Fault.SKIPS)
    coordinates = " ".join(f"{axis}={at}" for axis, at in job.mesh.coordinates(job.culprit).items())
    screen, summary = capsys.readouterr().out, (run / "SUMMARY.md").read_text()
    assert outcome["culprit"]["ranks"] == [job.culprit]
    waiting = len(job.mesh.members("dp", job.culprit)) - 1
    for text in (screen, summary):
        assert f"{job.culprit} ({coordinates})" in text
        assert f"{128 - waiting - 1} of 128 ranks" in text
    rows = re.findall(r"^\|\s*(\d+)[ |(]", summary, re.MULTILINE)
    assert len(rows) < 10, "no table has a row for each rank"
    assert len(summary) < 20_000
    assert (run / "report.html").stat().st_size < 200_000


@pytest.mark.slow
def test_the_planted_rank_among_1024_is_found(tmp_path: Path) -> None:
    run, outcome, job = judged(tmp_path, 1024, Fault.SKIPS)
    assert outcome["culprit"]["ranks"] == [job.culprit]
    assert (run / "report.html").stat().st_size < 3_000_000
    assert (run / "SUMMARY.md").stat().st_size < 40_000


# The cost, counted in calls of functions, which no load of the machine changes.


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """Count the calls of Python functions, including the resumptions of generators, in the `with` block."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield lambda: count
    finally:
        sys.setprofile(before)


def calls_of(action: Callable[[], object]) -> int:
    with counted_calls() as count:
        action()
    return count()


def test_the_calls_of_a_judgement_grow_with_the_ranks_and_not_with_their_pairs(tmp_path: Path) -> None:
    small = calls_of(lambda: judged(tmp_path / "small", 32, Fault.SKIPS))
    large = calls_of(lambda: judged(tmp_path / "large", 128, Fault.SKIPS))
    assert large < 5 * small


def snapshot_of(ranks: int, absent: int) -> Snapshot:
    """A snapshot in which the last `absent` ranks have not entered the collective that the others wait in."""
    group = tuple(range(ranks))

    def state(rank: int) -> RankSnapshot:
        entered = rank < ranks - absent
        status_file = StatusFile(
            pid=100 + rank,
            rank=rank,
            world_size=ranks,
            created_s=0.0,
            beat_s=1.0,
            exit_s=None,
            ended_by_exception=False,
            events=(),
            gaps_s={},
            steps_s=(),
            calls=(),
            enqueued=1 + entered,
            completed=1,
            collectives_changed_s=1.0,
            groups={"0": group},
        )
        numbers = range(1, 3 if entered else 2)
        collectives = tuple(
            Collective(group="0", seq=seq, op="barrier", sizes=(), dtypes=(), retired=seq == 1, created_ns=seq)
            for seq in numbers
        )
        return RankSnapshot(
            rank=rank,
            pid=100 + rank,
            process=None,
            status_file=status_file,
            collectives=collectives,
            is_from_dump=True,
        )

    return Snapshot(number=1, at_s=1.0, ranks=tuple(state(rank) for rank in range(ranks)))


def test_half_of_the_ranks_may_wait_for_the_other_half_without_an_edge_for_each_pair() -> None:
    small, large = (snapshot_of(ranks, ranks // 2) for ranks in (128, 512))
    count = calls_of(lambda: wait_graph_between(small, small, (), "gloo"))
    assert calls_of(lambda: wait_graph_between(large, large, (), "gloo")) < 5 * count


def test_ranks_that_wait_in_one_collective_share_the_ranks_for_which_they_wait() -> None:
    snapshot = snapshot_of(64, 16)
    graph = wait_graph_between(snapshot, snapshot, (), "gloo")
    waits = [wait for wait in graph.waits if wait.collective is not None]
    assert len(waits) == 48
    assert {wait.peers for wait in waits} == {tuple(range(48, 64))}
    assert len({id(wait.peers) for wait in waits}) == 1


def test_groups_and_cycles_are_found_without_comparing_all_pairs() -> None:
    def action(ranks: int) -> Callable[[], object]:
        status_files = {rank.rank: rank.status_file for rank in snapshot_of(ranks, 0).ranks if rank.status_file}
        timelines = {rank: Timeline(rank=rank, events=(), is_complete=True) for rank in range(ranks)}
        return lambda: cycle(timelines, groups_of(timelines, status_files))

    assert calls_of(action(512)) < 5 * calls_of(action(128))


def test_the_components_of_a_graph_are_the_sets_of_nodes_that_reach_each_other() -> None:
    edges = {1: [2], 2: [3], 3: [1, 4], 4: [5], 5: [4], 6: [5], 7: []}
    number = components(edges)
    assert number[1] == number[2] == number[3] != number[4] == number[5] != number[6]
    assert final_nodes(edges) == {4, 5, 7}


def test_a_long_chain_of_nodes_needs_no_deep_recursion() -> None:
    edges = {node: [node + 1] for node in range(50_000)} | {50_000: []}
    assert final_nodes(edges) == {50_000}


# Bounds.


def test_a_snapshot_of_a_thousand_ranks_is_bounded() -> None:
    text = stored_snapshot(bounded_snapshot(snapshot_of(1000, 1)))
    assert len(text) < 10_000 * 1000
    assert text.count('"0-999"') == 1000, "the members of a large group are stored as a short text"


def test_the_history_of_each_rank_shrinks_with_the_number_of_ranks() -> None:
    assert [history_calls(ranks) for ranks in (1, 256, 1024, 65_536)] == [1024, 1024, 256, 32]


def test_the_page_shows_the_recorded_results() -> None:
    repository = Path(__file__).resolve().parents[2]
    sizes = json.loads((repository / "benchmarks" / "results" / "scale.json").read_text())["sizes"]
    assert table(sizes) in (repository / "docs" / "scaling.md").read_text()
    assert (repository / "docs" / "images" / "scale.svg").read_text() == plot(sizes)
    assert all(size["is_right"] for size in sizes)


def test_a_mesh_has_axes_of_nearly_equal_sizes() -> None:
    assert mesh_of(8).sizes == {"pp": 2, "dp": 2, "ep": 1, "tp": 2}
    assert mesh_of(16384).world_size == 16384
    assert mesh_of(1024).coordinates(682) == {"pp": 2, "dp": 5, "ep": 1, "tp": 2}
    with pytest.raises(ValueError, match="power of two"):
        mesh_of(12)
