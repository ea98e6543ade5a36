"""The guardian's journal and the watcher's: what they come to, and what is left of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attempts import CLEAN, CLEAN_END, ORIGIN, ORIGIN_NS, RANKS, at, journal, left, said, started
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Ending, Exit, Frame, Sample
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.storage.journals import Journals
from nsa_harness.supervisor.storage.rundir import AttemptDir


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path)


def read(attempt: AttemptDir, *processes: dict[str, Any], watched: tuple[dict[str, Any], ...] = ()) -> Journals:
    journal(attempt.processes, *processes)
    journal(attempt.watch, ORIGIN, *RANKS, *watched)
    return Journals(attempt=attempt)


def exit_of(pid: int, rank: int | None, status: int | None, at_s: float, by_us: bool = False) -> Exit:
    return Exit(pid=pid, rank=rank, status=status, at_s=at_s, during_teardown=by_us)


def test_exits_come_in_order_of_time_with_their_ranks(attempt: AttemptDir) -> None:
    assert list(read(attempt, *reversed(CLEAN)).exits()) == [
        exit_of(100, 0, 0, 5.0),
        exit_of(101, 1, 0, 5.1),
        exit_of(10, None, 0, 6.0),
    ]


def test_processes_that_are_no_rank_are_passed_over(attempt: AttemptDir) -> None:
    assert list(read(attempt, started(), left(555, 1, 2.0)).exits()) == []


def test_of_one_process_the_first_word_counts(attempt: AttemptDir) -> None:
    journals = read(attempt, started(), left(100, 7, 2.0), left(100, 0, 3.0))
    assert list(journals.exits()) == [exit_of(100, 0, 7, 2.0)]


# As torchrun prints it, of two ranks of which it saw the second one fail first.
SUMMARY = """\
Failures:
[1]:
  time      : 2026-11-21_12:18:48
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 100)
  error_file: <N/A>
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_12:18:48
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 101)
  error_file: <N/A>
"""


def test_a_rank_that_nobody_looked_at_ended_first_where_the_agent_saw_it_fail_first(attempt: AttemptDir) -> None:
    attempt.output.write_text(SUMMARY)
    journals = read(attempt, started(), left(100, 1, 5.0), left(10, 1, 6.0))
    assert list(journals.exits()) == [exit_of(101, 1, 3, 5.0), exit_of(100, 0, 1, 5.0), exit_of(10, None, 1, 6.0)]


@pytest.mark.parametrize("event", ["signal", "abandoned"])
def test_what_ends_after_we_began_to_end_it_was_ended_by_us(attempt: AttemptDir, event: str) -> None:
    killing = {"event": event, "t_ns": at(3.0), "signal": "SIGTERM", "pids": [100]}
    journals = read(attempt, started(), left(100, -9, 2.0), killing, left(101, -15, 3.5), left(10, 1, 3.6))
    assert [(one.pid, one.during_teardown) for one in journals.exits()] == [(100, False), (101, True), (10, True)]


@pytest.mark.parametrize("pids", [7, ["x"], [None], [1e300], {"pid": 7}])
def test_a_signal_sent_to_what_is_no_process_is_left_out(attempt: AttemptDir, pids: object) -> None:
    journals = read(attempt, started(), {"event": "signal", "t_ns": at(3.0), "signal": "SIGTERM", "pids": pids})
    assert journals.signals() == ()
    assert [one.what for one in journals.trouble] == ["processes.jsonl"]


def test_an_end_that_nobody_saw_is_taken_from_torchruns_summary(attempt: AttemptDir) -> None:
    attempt.output.write_text("  rank      : 1 (local_rank: 1)\n  exitcode  : -11 (pid: 101)\n  error_file: <N/A>\n")
    journals = read(attempt, started(), left(100, None, 2.0), left(101, None, 2.0))
    assert list(journals.exits()) == [exit_of(100, 0, None, 2.0), exit_of(101, 1, -11, 2.0)]


def test_a_plain_launch_is_launcher_and_rank_in_one(attempt: AttemptDir) -> None:
    journal(attempt.processes, started(100), left(100, 3, 2.0))
    journal(attempt.watch, ORIGIN, RANKS[0])
    journals = Journals(attempt=attempt)
    assert journals.launcher_pid == 100
    assert list(journals.exits()) == [exit_of(100, 0, 3, 2.0)]


@pytest.mark.parametrize("ending", list(Ending))
def test_the_watchers_word_on_the_ending_counts(attempt: AttemptDir, ending: Ending) -> None:
    assert read(attempt, *CLEAN, watched=(said("ending", 6.0, ending=str(ending)),)).ending() is ending


def test_without_the_watchers_word_the_guardians_files_tell(attempt: AttemptDir) -> None:
    assert read(attempt, *CLEAN).ending() is Ending.EXITED
    assert read(attempt, started()).ending() is Ending.CONTROLLER_DIED
    attempt.interruption_note.write_text("")
    assert read(attempt, *CLEAN).ending() is Ending.CONTROLLER_DIED


@pytest.mark.parametrize("ending", ["finished", None, ["stall"], {"a": 1}, 7])
def test_an_ending_of_no_known_kind_is_not_believed(attempt: AttemptDir, ending: object) -> None:
    assert read(attempt, *CLEAN, watched=(said("ending", 6.0, ending=ending),)).ending() is Ending.EXITED


def test_of_several_words_of_one_kind_the_last_counts(attempt: AttemptDir) -> None:
    journals = read(attempt, watched=(said("ending", 1.0, ending="stall"), CLEAN_END))
    assert journals.last_record("ending") == CLEAN_END
    assert journals.last_record("started") == {}


def test_the_teardown_lasts_from_the_first_signal_to_the_end(attempt: AttemptDir) -> None:
    signals = [{"event": "signal", "t_ns": at(seconds), "signal": "SIGTERM", "pids": []} for seconds in (3.0, 4.0)]
    ended = {"event": "ended", "t_ns": at(4.5), "outlived": ["7 sleep"], "left": ["8 dd"]}
    journals = read(attempt, started(), *signals, ended)
    assert journals.teardown_s() == 1.5
    assert (journals.leftovers(), journals.unkillable()) == (("7 sleep",), ("8 dd",))
    assert read(attempt, started(), ended).teardown_s() == 0.0
    assert read(attempt, started(), *signals).teardown_s() == 0.0


def test_what_is_left_is_what_the_last_guardian_saw(attempt: AttemptDir) -> None:
    first = {"event": "ended", "t_ns": at(4.5), "outlived": ["7 sleep"], "left": ["8 dd"]}
    second = {"event": "ended", "t_ns": at(5.5), "outlived": ["7 sleep"], "left": []}
    journals = read(attempt, started(), first, second)
    assert (journals.leftovers(), journals.unkillable()) == (("7 sleep",), ())


def test_where_no_guardian_lived_to_look_nobody_knows_what_is_left(attempt: AttemptDir) -> None:
    assert read(attempt, *CLEAN).unkillable() is None
    assert read(attempt, {"event": "ended", "t_ns": at(5.5), "outlived": []}).unkillable() is None


def test_the_first_word_of_a_full_disk_counts(attempt: AttemptDir) -> None:
    full = [{"event": "full", "t_ns": at(seconds), "why": why} for seconds, why in ((3.0, "here"), (4.0, "there"))]
    assert read(attempt, *CLEAN, *full).full_disk_text() == "here"
    assert read(attempt, *CLEAN).full_disk_text() is None


def test_a_run_that_its_guardian_had_to_end_was_abandoned_however_much_left_before(attempt: AttemptDir) -> None:
    abandoned = {"event": "abandoned", "t_ns": at(5.5)}
    assert read(attempt, *CLEAN[:2], abandoned).ending() is Ending.CONTROLLER_DIED


def test_the_limits_are_those_in_force_at_the_end(attempt: AttemptDir) -> None:
    facts = {"stall_s": 6.0, "busy_s": 61.0, "open_wait_s": 301.0, "start_s": 121.0, "deadline_s": 9.0}
    assert read(attempt, watched=(said("limits", 5.0, **facts),)).limits(Limits(), []) == Limits(**facts)


def test_limits_that_were_not_written_down_are_chosen_again(attempt: AttemptDir) -> None:
    chosen = Limits(stall_s=20.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=9.0)
    assert read(attempt).limits(Limits(deadline_s=9.0), []) == chosen


@pytest.mark.parametrize("garbled", [{"stall_s": "soon"}, {"busi_s": 3.0, "stall_s": 20.0, "deadline_s": 9.0}])
def test_limits_that_are_garbled_are_whole_numbers_again(attempt: AttemptDir, garbled: dict[str, Any]) -> None:
    limits = read(attempt, watched=(said("limits", 5.0, **garbled),)).limits(Limits(deadline_s=9.0), [])
    assert limits == Limits(stall_s=20.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=9.0)


def test_samples_are_read_back_and_a_garbled_one_is_trouble(attempt: AttemptDir) -> None:
    facts = {"rank": 0, "at_s": 3.0, "motion": "burning", "cpu_s": 1.5}
    leaf = {"file": "a.py", "line": 3, "function": "f"}
    journals = read(
        attempt,
        watched=(
            said("sample", leaf=leaf, user=None, **facts),
            said("sample", leaf={"file": "a.py"}, user=None, **facts),
        ),
    )
    assert list(journals.samples()) == [
        Sample(**facts, user_frame=None, leaf=Frame(file="a.py", line=3, function="f")),
    ]
    assert [one.what for one in journals.trouble] == ["sample of the watcher"]


def test_only_the_newest_samples_are_kept(attempt: AttemptDir) -> None:
    many = tuple(
        said("sample", rank=0, at_s=float(number), motion="burning", leaf=None, user=None, cpu_s=None)
        for number in range(250)
    )
    assert [one.at_s for one in read(attempt, watched=many).samples()] == [float(number) for number in range(50, 250)]


def test_a_board_that_cannot_be_read_is_trouble(attempt: AttemptDir) -> None:
    attempt.probe_files.mkdir()
    (attempt.probe_files / "7.board").write_bytes(b"not a board")
    journals = read(attempt)
    assert journals.pids == {0: 100, 1: 101}
    assert [one.what for one in journals.trouble] == ["7.board"]


def test_a_record_of_the_wrong_form_is_trouble_and_the_others_count(attempt: AttemptDir) -> None:
    wrong = {"event": "exit", "t_ns": "soon", "pid": 100, "status": 0}
    journals = read(attempt, wrong, *CLEAN)
    assert len(list(journals.exits())) == 3
    assert journals.trouble == [Trouble(what="processes.jsonl", why=journals.trouble[0].why)]
    assert "t_ns" in journals.trouble[0].why


def test_a_process_of_no_rank_is_no_rank(attempt: AttemptDir) -> None:
    nobody = {"event": "rank", "rank": None, "pid": 7}
    assert read(attempt, *CLEAN, watched=(nobody,)).pids == {0: 100, 1: 101}


def test_without_any_journal_nothing_is_known(attempt: AttemptDir) -> None:
    journals = Journals(attempt=attempt)
    assert (journals.ending(), list(journals.exits()), journals.pids, journals.teardown_s()) == (
        Ending.CONTROLLER_DIED,
        [],
        {},
        0.0,
    )


def test_without_an_origin_the_guardians_first_word_is_the_origin(attempt: AttemptDir) -> None:
    journal(attempt.processes, *CLEAN)
    assert Journals(attempt=attempt).origin_ns == ORIGIN_NS


_NOISE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=1)
)
_RECORDS = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["t_ns", "pid", "rank", "status", "t_s", "origin_ns", "ending", "outlived", "left", "stall_s", "rss_bytes"]
        ),
        _NOISE,
    ).flatmap(
        lambda facts: st.sampled_from(
            ["origin", "rank", "started", "exit", "signal", "ended", "ending", "limits", "sample", "peaks", "trouble"]
        ).map(lambda event: {"event": event, **facts})
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(_RECORDS, _RECORDS)
def test_journals_of_any_content_are_read_without_an_error(
    attempt: AttemptDir, processes: list[dict[str, Any]], watched: list[dict[str, Any]]
) -> None:
    attempt.processes.write_text("".join(json.dumps(one) + "\n" for one in processes))
    attempt.watch.write_text("".join(json.dumps(one) + "\n" for one in watched))
    journals = Journals(attempt=attempt)
    assert all(isinstance(one.pid, int) for one in journals.exits())
    assert isinstance(journals.ending(), Ending)
    assert isinstance(journals.teardown_s(), float)
    assert all(isinstance(one, str) for one in (*journals.leftovers(), *(journals.unkillable() or ())))
    assert journals.limits(Limits(), []).busy_s is not None
    assert all(isinstance(one, Sample) for one in journals.samples())


def test_who_left_a_job_without_a_guardian_is_read_from_the_watch(attempt: AttemptDir) -> None:
    record = {"event": "left", "t_s": 4.5, "rank": 1, "status": None}
    attempt.watch.write_text("".join(json.dumps(one) + "\n" for one in (record, {**record, "rank": 0, "pid": 7})))
    journals = Journals(attempt=attempt)
    assert list(journals.exits()) == [exit_of(0, 1, None, 4.5), exit_of(7, 0, None, 4.5)]
    assert journals.trouble == []
