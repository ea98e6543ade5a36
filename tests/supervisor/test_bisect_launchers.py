"""Where a fork shows what torchrun does not, torchrun decides; and what is printed was launched as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_bisect_subjects import FACTS, _launches, _script, typed  # noqa: F401

from nsa_harness.commands import bisect, scheduler
from nsa_harness.commands.bisect import Bisection
from nsa_harness.commands.bisect_report import NOTHING_YET
from nsa_harness.core.plan import Launcher, RunSpec
from nsa_harness.core.report import HangKind
from nsa_harness.core.search.question import ProbeResult, Purpose, Round, spans_of
from nsa_harness.core.search.report import ProbeReport, contradicted_fork
from nsa_harness.supervisor.experiments.journal import open_search, search_state
from nsa_harness.supervisor.experiments.launches import Templates
from nsa_harness.supervisor.experiments.subjects import SubjectOptions
from nsa_harness.supervisor.launch.planning import Invocation
from nsa_harness.supervisor.storage.rundir import RunOptions, create_run

GOOD, BAD, DIFFERENT, UNRESOLVED = ProbeResult
FORK, TORCHRUN = Launcher.FORK.value, Launcher.TORCHRUN.value
Rule = Callable[[frozenset[int], str], ProbeResult]


@contextmanager
def searched(question: Invocation, rule: Rule, **changes: Any) -> Iterator[Bisection]:
    """A search among eight layers whose launches end by rule."""
    options = SubjectOptions(gc_range="0:8")
    launches = _launches(_script(question), options, Templates(args=("--layers={layers}",)))
    given = RunOptions(out=question.working_dir / "reports", command="")
    request = replace(launches.request, options=given, **changes)
    launches.request = request
    with (
        open_search(request.options, search_state("", "", {}), dict) as folder,
        bisect._open(request, folder, launches, FACTS) as search,
    ):

        def launched(spec: RunSpec, blank: ProbeReport) -> ProbeReport:
            launcher = search._with_launcher(spec, in_full=blank.in_full).launcher.value
            counts = rule(blank.indices, launcher)
            kind, verdict = (HangKind.STARVED, "HANG") if counts is BAD else (None, "PASS")
            found = replace(blank, launcher=launcher, counts_as=counts, kind=kind, verdict=verdict, cause="held")
            return replace(found, wall_s=60.0 if counts is BAD else 2.0, longest_quiet_s=0.5)

        search._launch = launched  # type: ignore[method-assign]
        if search.server is not None:
            search.server.settled = lambda spec: spec  # type: ignore[method-assign]
        yield search


def stored(search: Bisection) -> dict[str, Any]:
    return json.loads((search.run.path / "bisect.json").read_text())


def test_where_both_launchers_show_the_same_forks_search_and_torchrun_proves(typed: Invocation) -> None:  # noqa: F811
    with searched(typed, lambda places, _: BAD if {2, 5} <= places else GOOD) as search:
        assert search.carry_out() == 0
    found = stored(search)
    assert (found["answer"]["kind"], found["answer"]["items"]) == ("set", [2, 5])
    assert [one["purpose"] for one in found["probes"] if one["launcher"] == TORCHRUN] == ["proof_bad", "proof_good"]
    assert search.notes == []


def test_a_fork_that_torchrun_contradicts_is_discounted_and_the_search_goes_on_under_torchrun(
    typed: Invocation,  # noqa: F811
) -> None:
    def rule(places: frozenset[int], launcher: str) -> ProbeResult:
        culprits = {5} if launcher == TORCHRUN else {2}
        return BAD if culprits <= places else GOOD

    with searched(typed, rule) as search:
        assert search.carry_out() == 0
    found = stored(search)
    assert (found["answer"]["kind"], found["answer"]["items"], found["answer"]["confidence"]) == ("single", [5], 1.0)
    assert len(search.notes) == 1
    assert "from now on all probes run under torchrun" in search.notes[0]
    asked = [number for number, one in enumerate(found["probes"]) if one["purpose"] == "repeat"]
    assert [found["probes"][number]["launcher"] for number in asked] == [TORCHRUN, FORK] * 3
    assert {one["launcher"] for one in found["probes"][asked[-1] + 1 :]} == {TORCHRUN}
    assert {one["counts_as"] for one in found["probes"] if one["launcher"] == FORK} == {"unresolved"}
    assert "--layers=5" in found["commands"]["bad"]


def test_an_end_that_only_a_fork_shows_otherwise_is_asked_for_under_torchrun(typed: Invocation) -> None:  # noqa: F811
    """Start-up took the time of a deadline, or what is read at the start comes too late for a fork."""
    with searched(typed, lambda places, launcher: BAD if launcher == FORK or 3 in places else GOOD) as search:
        assert search.carry_out() == 0
    assert stored(search)["answer"]["items"] == [3]


def test_what_torchrun_confirms_is_no_matter_of_the_launcher(typed: Invocation) -> None:  # noqa: F811
    """It passes with all, whoever launches it: nothing to bisect, and that is asked under torchrun once."""
    with searched(typed, lambda *_: GOOD) as search:
        search.carry_out()
    found = stored(search)
    assert found["answer"]["kind"] == "none"
    assert [one["launcher"] for one in found["probes"] if one["purpose"] == "repeat"] == [TORCHRUN]


def test_a_run_that_changes_under_one_launcher_is_flaky_and_torchrun_decides_nothing(
    typed: Invocation,  # noqa: F811
) -> None:
    """The first fork of the good end fails by chance."""
    forked: list[frozenset[int]] = []

    def rule(places: frozenset[int], launcher: str) -> ProbeResult:
        forked.extend([places] if launcher == FORK else [])
        return BAD if (launcher == FORK and len(forked) == 1) or 5 in places else GOOD

    with searched(typed, rule) as search:
        search.probe(Round(subsets=(frozenset(),), purpose=Purpose.CONTROL_GOOD, open=(0, 8), probes_left=0))
        assert search.forks
        assert [one.launcher for one in search.probes] == [FORK, TORCHRUN, FORK]
        assert [one.counts_as for one in search.probes] == [BAD, GOOD, GOOD]


def test_a_program_that_fails_in_half_of_its_runs_is_flaky_although_its_first_runs_differ_by_launcher(
    typed: Invocation,  # noqa: F811
) -> None:
    results = iter([BAD, GOOD, BAD, BAD])  # fork, torchrun, fork, and torchrun fails as well

    with searched(typed, lambda *_: next(results)) as search:
        search.probe(Round(subsets=(frozenset(),), purpose=Purpose.CONTROL_GOOD, open=(0, 8), probes_left=0))
        assert search.forks
        assert [one.launcher for one in search.probes] == [FORK, TORCHRUN, FORK, TORCHRUN]


def of(
    n: int, places: set[int], launcher: str, counts_as: ProbeResult, purpose: Purpose = Purpose.ALONE
) -> ProbeReport:
    return ProbeReport(
        n=n, subset=spans_of(places), purpose=purpose, open=(0, 8), left=0, in_full=launcher == TORCHRUN,
        launcher=launcher, verdict="PASS", kind=None, cause=None, summary="", place=None, culprits=(), phase=None,
        counts_as=counts_as, wall_s=1.0, longest_quiet_s=None, dir=None, spec_hash=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("new", "before", "asked"),
    [
        (of(2, {1}, TORCHRUN, GOOD), of(1, {1}, FORK, BAD), 1),
        (of(2, {1}, FORK, BAD), of(1, {1}, TORCHRUN, GOOD), 2),
        (of(2, {1, 2}, TORCHRUN, GOOD), of(1, {1}, FORK, BAD), 1),  # more of what fails passes
        (of(2, {1}, TORCHRUN, BAD), of(1, {1, 2}, FORK, GOOD), 1),
        (of(2, {1}, TORCHRUN, GOOD), of(1, {1, 2}, FORK, BAD), None),  # less of it may
        (of(2, {1}, TORCHRUN, DIFFERENT), of(1, {1}, FORK, BAD), 1),
        (of(2, {1, 2}, TORCHRUN, DIFFERENT), of(1, {1}, FORK, BAD), None),
        (of(2, {1}, TORCHRUN, UNRESOLVED), of(1, {1}, FORK, BAD), None),
        (of(2, {1}, FORK, GOOD, Purpose.CONTROL_BAD), of(1, {1}, FORK, BAD, Purpose.CONTROL_BAD), None),
        (of(2, {1}, FORK, GOOD), of(1, {1}, FORK, BAD), None),  # the same launcher: flaky, or not in order
        (of(2, {1}, TORCHRUN, GOOD), of(1, {1}, TORCHRUN, BAD), None),
        (of(1, set(), FORK, BAD, Purpose.CONTROL_GOOD), None, 1),
        (of(1, {1}, FORK, GOOD, Purpose.CONTROL_BAD), None, 1),
        (of(1, {1}, FORK, BAD, Purpose.CONTROL_BAD), None, None),
        (of(1, {1}, TORCHRUN, GOOD, Purpose.CONTROL_BAD), None, None),
    ],
)
def test_which_fork_torchrun_is_asked_about(new: ProbeReport, before: ProbeReport | None, asked: int | None) -> None:
    found = contradicted_fork(new, [new] if before is None else [before, new])
    assert (found.n if found else None) == asked


def test_a_command_is_printed_only_where_its_last_launch_did_what_is_said_of_it(
    typed: Invocation,  # noqa: F811
) -> None:
    """Without layer 2 torchrun passes once and fails from then on: no command is said to pass."""
    asked: list[str] = []

    def rule(places: frozenset[int], launcher: str) -> ProbeResult:
        if 2 in places:
            return BAD
        asked.append(launcher)
        return DIFFERENT if asked.count(TORCHRUN) else GOOD

    with searched(typed, rule) as search:
        search._confirm_commands(replace(NOTHING_YET, failing=frozenset({2}), passing=frozenset({1})))
        report = bisect.report_so_far(search, replace(NOTHING_YET, failing=frozenset({2}), passing=frozenset({1})))
    assert report.commands.bad is not None
    assert report.commands.good is None
    assert [one.launcher for one in search.probes] == [TORCHRUN, TORCHRUN]
    assert search.notes == ["no command for layer 1: when launched again under torchrun, it counted as different"]


def test_a_command_whose_hang_only_a_limit_proves_names_the_limit_that_did(typed: Invocation) -> None:  # noqa: F811
    with searched(typed, lambda places, _: BAD if 5 in places else GOOD) as search:
        assert search.carry_out() == 0
    commands = stored(search)["commands"]
    assert commands["bad"] == "nsa-harness run train.py --ranks 2 limits.open_wait_s=60 -- --layers=5"
    assert commands["good"] == "nsa-harness run train.py --ranks 2 -- --layers=0,1,2,3,4,6,7"
    declared = replace(_script(typed), arguments=("limits.open_wait_s=20",))
    launches = _launches(declared, SubjectOptions(gc_range="0:8"), Templates(args=("--layers={layers}",)))
    launches.longest_quiet_s = 0.5
    command = launches.command({5}, None, starved=True)
    assert command == "nsa-harness run train.py --ranks 2 limits.open_wait_s=20 -- --layers=5"


def test_an_undecided_search_without_a_budget_says_that_it_has_no_command(typed: Invocation) -> None:  # noqa: F811
    with searched(typed, lambda places, _: BAD if 5 in places else GOOD, budget_s=0.1) as search:
        search.probes = [of(1, {5}, FORK, BAD)]
        search._confirm_commands(replace(NOTHING_YET, failing=frozenset({5})))
    assert search.notes == ["no command for layer 5: the budget was used up before it could be launched under torchrun"]


def test_what_torchrun_launched_answers_once_more_after_a_search_began_anew(tmp_path: Path) -> None:
    journal = bisect.Journal(create_run(tmp_path))
    for one in (of(1, {1}, FORK, BAD), of(2, {1}, TORCHRUN, GOOD)):
        journal.append(one)
    assert journal.take(frozenset({1}), in_full=True) is None
    journal.restart_without_forks()
    assert journal.take(frozenset({1}), in_full=True) == of(2, {1}, TORCHRUN, GOOD)
    assert journal.take(frozenset({1}), in_full=False) is None


def test_no_more_probes_run_side_by_side_than_the_machine_holds_and_that_is_said(
    typed: Invocation,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with searched(typed, lambda places, _: BAD if 5 in places else GOOD, jobs=4) as search:
        search.facts = replace(FACTS, cpus=6)
        assert search._question().at_once == 3
        assert search.notes == ["--jobs 4: only 3 at a time, limited by the cores of this machine"]
        monkeypatch.setattr(scheduler, "memory_bytes", lambda: (64, 50))
        search.outcomes["p01"] = SimpleNamespace(usage=SimpleNamespace(peak_rss_bytes=12))  # type: ignore[assignment]
        assert search._at_once() == 2
        assert search.notes[1:] == ["--jobs 4: only 2 at a time, limited by the memory of this machine"]
