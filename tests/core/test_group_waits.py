"""The rules for waits that are no collective: what they name, and when they are silent."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    C10D,
    USER,
    board,
    call,
    collective,
    diagnose,
    ended,
    evidence,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    sample,
    snapshot,
    stack,
    stalled,
    task,
    whole,
)
from lockstep import line
from test_host_waits import FETCH, LOCKED, RESTS, WORKER, child, loading, pooled, rank

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.rules import group_waits as causes_of_group_wait
from nsa_harness.core.evidence.evidence import Call, ChildSample, Evidence, RankSnapshot, Source
from nsa_harness.core.evidence.host import Process, Socket
from nsa_harness.core.report import Finding
from nsa_harness.core.verdict.verdict import judge


def main_finding(seen: Evidence) -> Finding:
    return diagnose(seen, judge(seen)).findings[0]


def told(seen: Evidence) -> tuple[str, tuple[int, ...], str]:
    found = main_finding(seen)
    return found.code, found.ranks, whole(found)


def calling(number: int, op: str, *earlier: Call, **facts: Any) -> RankSnapshot:
    nothing = {"elements": 0} if op == "init_process_group" else {}
    now = call(len(earlier) + 1, op, left_s=None, **{**nothing, **facts})
    inner = frame(2000, file=C10D, function=op)
    return rank_snapshot(number, inner, frame(40), status_file=board(rank=number, calls=(*earlier, now)))


def one_sided_group() -> Evidence:
    return stalled(calling(0, "new_group"), calling(1, "all_reduce"))


def crossed_receives() -> Evidence:
    return stalled(calling(0, "recv", peer=1), calling(1, "recv", peer=0))


def unset_key() -> Evidence:
    return stalled(calling(0, "wait store.get", key="mine"), calling(1, "all_reduce"))


def locked_entrance() -> Evidence:
    flock = process(101, tasks=(task(101, syscall="flock", target="/tmp/lock", held_by=(100,)),))
    late = rank_snapshot(1, frame(12, function="download"), process=flock, status_file=board(rank=1))
    return stalled(calling(0, "init_process_group"), late)


SEND = {"local": "10.0.0.1:40", "peer": "10.0.0.2:50", "state": "ESTABLISHED", "unread_bytes": 0, "acked_bytes": 9}


def sockets(number: int, **changes: Any) -> RankSnapshot:
    facts = {"inode": 5 + number, "unacked_bytes": 2432, "retransmits": 5, "peer_rank": 1 - number, **SEND}
    if number == 1:
        facts |= {"local": SEND["peer"], "peer": SEND["local"]}
    stuck = Socket(**{**facts, **changes})
    return in_all_reduce(number, collective(6), process=process(100 + number, sockets=(stuck,)))


def cut(**changes: Any) -> Evidence:
    return stalled(sockets(0, **changes), sockets(1, **changes), at_s=400.0)


def blocked_worker() -> Evidence:
    return stalled(loading((child(300), (frame(85, function="read"), FETCH, WORKER))))


def forked() -> Evidence:
    return stalled(rank("wait4", child(300), held_by=(300,)))


def full_pipe() -> Evidence:
    return stalled(rank("write", target="pipe:[7]", held_by=(100,)))


# Groups.


def test_a_group_that_some_rank_does_not_make_names_that_rank_and_the_line_of_the_call() -> None:
    found = main_finding(one_sided_group())
    assert (found.code, found.ranks) == ("group_creation_subset", (1,))
    assert (found.facts["op"], found.facts["line"]["line"], found.facts["waiting"]) == ("new_group", 37, [0])
    assert (found.facts["later"], found.facts["elsewhere"]) == (None, {"rank": 1, "blocked_in": "all_reduce"})


def test_a_rank_that_never_comes_to_the_rendezvous_is_named_with_what_it_stands_in() -> None:
    found = main_finding(locked_entrance())
    assert (found.code, found.ranks) == ("rendezvous_missing_rank", (1,))
    assert (found.facts["line"]["line"], found.facts["waiting"]) == (40, [0])
    assert found.facts["elsewhere"] == {"rank": 1, "blocked_in": "a lock on a file in download"}


def test_a_rank_that_nobody_saw_is_missing_from_the_rendezvous() -> None:
    early = calling(0, "init_process_group", key="/default_pg/0//cpu//0/5")
    assert early.status_file is not None
    seen = stalled(replace(early, status_file=replace(early.status_file, world_size=1)))
    found = main_finding(seen)
    assert (found.code, found.ranks) == ("rendezvous_missing_rank", (5,))
    assert (found.facts["line"]["line"], found.facts["waiting"], found.facts["elsewhere"]) == (40, [0], None)


def test_the_group_that_some_ranks_did_not_make_is_named_and_not_the_later_one_in_which_it_shows() -> None:
    first, second = (call(number, "new_group", place=line(15 + number), left_s=None) for number in (1, 2))
    late = replace(second, number=1, key="/default_pg/1//cpu//1/0")  # it waits for rank 0 under another number
    boards = (board(calls=(replace(first, left_s=2.1), second)), board(calls=(late,), rank=1))
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = [rank_snapshot(rank, c10d, frame(17), status_file=made) for rank, made in enumerate(boards)]
    found = main_finding(
        stalled(*looks, ranks=tuple(rank_evidence(rank, status_file=made) for rank, made in enumerate(boards)))
    )
    assert (found.code, found.ranks, found.place) == ("group_creation_subset", (1,), line(16))
    assert (found.facts["line"]["line"], found.facts["later"]["line"]["line"]) == (16, 17)


def test_of_ranks_that_all_wait_in_making_a_group_the_one_that_made_fewer_left_one_out() -> None:
    first, second = (call(number, "new_group", place=line(15 + number), left_s=None) for number in (1, 2))
    boards = [board(calls=(replace(first, left_s=2.1), second), rank=rank, world_size=3) for rank in (1, 2)]
    boards = [board(calls=(replace(second, number=1),), world_size=3), *boards]
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = [rank_snapshot(rank, c10d, frame(17), status_file=made) for rank, made in enumerate(boards)]
    found = main_finding(
        stalled(*looks, ranks=tuple(rank_evidence(rank, status_file=made) for rank, made in enumerate(boards)))
    )
    assert (found.code, found.ranks, found.place) == ("group_creation_subset", (0,), line(16))
    assert found.facts["waiting"] == [1, 2]


def test_who_gave_up_waiting_names_the_rank_by_the_key_it_waited_for() -> None:
    message = "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1"
    gave_up = rank_evidence(0, exception=raised(0, "torch.distributed.DistStoreError", message), exit=ended(0, 1))
    code, ranks, claim = told(evidence(gave_up, rank_evidence(1)))
    assert (code, ranks) == ("rendezvous_missing_rank", (1,))
    assert claim == (
        "rank 1 never reached the creation of a process group; rank 0 waited for it and gave up: " + message
    )
    own = rank_evidence(
        0,
        exception=raised(0, "torch.distributed.DistStoreError", "wait timeout after 5000ms, keys: mine"),
        exit=ended(0, 1),
    )
    assert main_finding(evidence(own, rank_evidence(1))).code == "store_key_missing"


# Transfers and keys.


def test_two_receives_that_wait_for_each_other_are_named_both_with_their_lines() -> None:
    found = main_finding(crossed_receives())
    assert (found.code, found.ranks) == ("p2p_unmatched", (0, 1))
    assert [(wait["rank"], wait["line"]["line"], wait["transfer"]) for wait in found.facts["waits"]] == [
        (0, 40, {"op": "recv", "sends": False, "peers": [1]}),
        (1, 40, {"op": "recv", "sends": False, "peers": [0]}),
    ]
    assert found.left_open == ("this run does not show which of these ranks is wrong",)


def test_a_transfer_whose_partner_waits_elsewhere_is_explained_by_that_wait() -> None:
    seen = stalled(calling(0, "recv", peer=1), locked_in_backward(1))
    assert main_finding(seen).code == "backward_function_blocked"


def test_a_receive_against_a_collective_names_what_the_partner_is_in() -> None:
    found = main_finding(stalled(calling(0, "recv", peer=1), in_all_reduce(1, collective(6))))
    assert (found.code, found.ranks) == ("p2p_unmatched", (1,))
    assert (found.facts["waits"][1]["blocked_in"], found.facts["departed"]["waiting_rank"]) == ("all_reduce #6", 0)


def test_a_key_that_nobody_sets_is_named() -> None:
    found = main_finding(unset_key())
    assert (found.code, found.ranks) == ("store_key_missing", (1,))
    assert (found.facts["waiting_rank"], found.facts["key"], found.facts["line"]["line"]) == (0, "mine", 37)
    assert (found.facts["others_wait"], found.facts["went_past"]) == (True, 1)
    assert found.left_open == ("this run does not show which rank should have set the key",)


# The network.


def test_the_same_collective_on_all_ranks_with_bytes_that_nobody_acknowledges_is_the_network() -> None:
    found = main_finding(cut())
    assert (found.code, found.ranks, found.confidence) == ("transport", (0, 1), 0.95)
    facts = found.facts
    assert (facts["sender"], facts["local"], facts["peer"]) == (0, "10.0.0.1:40", "10.0.0.2:50")
    assert (facts["unacked_bytes"], facts["retransmits"], facts["both_sides"]) == (2432, 5, True)


@pytest.mark.parametrize(
    "changes", [{"unacked_bytes": 0}, {"retransmits": 2}, {"peer_rank": None, "in_job": True}], ids=str
)
def test_a_quiet_network_a_single_retransmit_and_the_launchers_store_prove_nothing(changes: dict[str, Any]) -> None:
    assert main_finding(cut(**changes)).code == "unknown"


def test_bytes_that_are_acknowledged_between_the_looks_are_delivered() -> None:
    looks = (snapshot(1, 398.0, sockets(0), sockets(1)), snapshot(2, 400.0, sockets(0, acked_bytes=10), sockets(1)))
    seen = replace(cut(), snapshots=looks)
    assert all(found.ranks != (0, 1) for found in diagnose(seen, judge(seen)).findings)


# Children.


def test_a_worker_of_the_data_loader_is_named_with_its_line() -> None:
    found = main_finding(blocked_worker())
    assert (found.code, found.ranks, found.confidence) == ("dataloader_worker_blocked", (0,), 0.95)
    assert found.place is not None
    assert (found.place.line, found.place.function) == (85, "read")
    assert (found.facts["child"]["pid"], found.facts["child"]["blocked_in"]) == (300, "lock")
    assert (found.facts["child_line"]["line"], found.facts["inherited_lock"]) == (85, True)


def test_a_worker_that_reads_for_too_long_is_named_as_likely() -> None:
    reading = loading((child(300, "read", target="/data"), (frame(85), FETCH, WORKER)))
    found = main_finding(stalled(reading, at_s=400.0))
    assert (found.code, found.confidence) == ("dataloader_worker_blocked", 0.8)


def test_a_worker_of_a_pool_that_was_forked_with_a_held_lock_is_a_child_like_any_other() -> None:
    found = main_finding(stalled(pooled(LOCKED, RESTS)))
    assert (found.code, found.ranks, found.place and found.place.line) == ("fork_lock", (0,), 85)


def spinning_below(*workers: Process, looked: tuple[RankSnapshot, RankSnapshot]) -> Evidence:
    """Rank 0 waits for these, each of which was on one line of its own in all samples."""
    below = tuple(ChildSample(pid=one.pid, leaf=frame(91), user_frame=frame(85)) for one in workers)
    seen = tuple(replace(sample(leaf=frame(10), user=frame(10)), child_samples=below) for _ in range(20))
    looks = snapshot(1, 88.0, looked[0]), snapshot(2, 90.0, looked[1])
    return stalled(looked[1], at_s=90.0, snapshots=looks, samples=seen)


def test_a_worker_of_the_data_loader_that_never_ends_is_named_with_its_line() -> None:
    lines, spun = (frame(91), frame(85), FETCH, WORKER), [child(300, cpu_s=9.0), child(301, cpu_s=9.0)]
    looked = loading((child(300), lines), (child(301), lines)), loading(*((one, lines) for one in spun))
    found = main_finding(spinning_below(*spun, looked=looked))
    assert (found.code, found.ranks, found.place and found.place.line) == ("infinite_loop", (0,), 85)
    facts = {"loads_data": True, "computing": {"pid": 300, "thread": ""}, "others_computing": 1, "lines": [91]}
    assert found.facts.items() >= facts.items()
    assert found.left_open == ("a call on that line may never return",)


def test_the_beat_of_a_rank_tells_nothing_of_the_loop_of_its_child() -> None:
    spun = child(300, cpu_s=9.0)
    before, after = (rank("wait4", one, held_by=(300,)) for one in (child(), spun))
    beating = rank_evidence(0, status_file=board(beat_s=90.0))
    found = main_finding(replace(spinning_below(spun, looked=(before, after)), ranks=(beating,)))
    assert whole(found).endswith("; a call on that line may never return")


def test_a_child_that_never_ends_is_named_with_its_line_though_the_rank_stands_in_a_read() -> None:
    spun = child(300, cpu_s=9.0)
    before, after = (rank("poll", one, target="pipe:[7]", held_by=(300,)) for one in (child(), spun))
    seen = spinning_below(spun, looked=(before, after))
    (found,) = diagnose(seen, judge(seen)).findings
    assert (found.code, found.ranks, found.place and found.place.line) == ("infinite_loop", (0,), 85)
    assert (found.facts["line"]["line"], found.facts["lines"]) == (10, [91])
    assert (found.facts["loads_data"], found.facts["computing"]) == (False, {"pid": 300, "thread": ""})


def test_a_forked_child_with_a_held_lock_is_named_with_the_childs_line() -> None:
    found = main_finding(forked())
    assert (found.code, found.ranks, found.place and found.place.line) == ("fork_lock", (0,), 50)


def test_a_lock_held_at_the_fork_is_told_with_the_one_other_function_that_takes_it() -> None:
    """The child's own line asks for it; whoever held it as the child was forked is where the fix belongs."""
    asks = Source(file=USER, first=49, text="def look(self):\n    with self.lock:\n        pass")
    holds = Source(file=USER, first=70, text="def write(self):\n    with self.lock, open(self.path):\n        pass")
    found = main_finding(replace(forked(), sources=(asks, holds)))
    assert (found.code, found.place and (found.place.line, found.place.function)) == ("fork_lock", (71, "write"))
    worker = Source(file=USER, first=84, text="def read(self):\n    with self.lock:\n        pass")
    found = main_finding(replace(blocked_worker(), sources=(worker, holds)))
    assert (found.code, found.place and found.place.line) == ("dataloader_worker_blocked", 71)
    several = replace(holds, first=90, text=holds.text.replace("write", "clear"))
    found = main_finding(replace(forked(), sources=(asks, holds, several)))
    assert found.place is not None
    assert found.place.line == 50, "of two it is open which"


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "python -c from multiprocessing.spawn import spawn_main"},
        {"target": "/dev/shm/sem.mp-1", "held_by": (100,)},
    ],
    ids=["another program", "a semaphore of several processes"],
)
def test_a_child_that_inherited_no_lock_is_not_said_to_have_been_forked_with_one(changes: dict[str, Any]) -> None:
    found = main_finding(stalled(rank("wait4", child(300, **changes), held_by=(300,))))
    assert found.code == "lock_cycle"


def test_a_stopped_child_is_named_by_its_number() -> None:
    found = main_finding(stalled(rank("wait4", child(300, syscall="kill", state="T"), held_by=(300,))))
    assert (found.code, found.ranks) == ("stopped_process", (0,))
    assert "its child process 300 (python train.py), which is stopped by a signal" in found.claim
    assert found.claim.endswith("the process sent it to itself")
    assert "kill -CONT 300" in found.advice


def test_a_full_pipe_is_named_and_of_a_child_too() -> None:
    found = main_finding(full_pipe())
    assert (found.code, found.place and found.place.line, found.facts["child"]) == ("pipe_full", 10, None)
    writer = child(300, "write", target="pipe:[7]", held_by=(100,))
    found = main_finding(stalled(rank("wait4", writer, held_by=(300,))))
    assert (found.code, found.ranks, found.place and found.place.line) == ("pipe_full", (0,), 50)
    assert found.facts["child"]["pid"] == 300


def test_a_child_that_reads_what_nobody_can_write_is_named_with_its_own_line_if_that_is_in_a_file() -> None:
    reader = child(300, "read", target="pipe:[7]", held_by=(300,))
    waits = rank("wait4", reader, held_by=(300,))
    found = main_finding(stalled(waits))
    assert found.place is not None
    assert (found.code, found.place.line) == ("blocked_io", 50)
    typed = tuple(replace(one, frames=(frame(1, file="<string>"),)) for one in waits.child_stacks[300])
    found = main_finding(stalled(replace(waits, child_stacks={300: typed})))
    assert found.place is not None
    assert (found.code, found.place.line) == ("blocked_io", 10)


def test_a_child_that_sleeps_past_the_deadline_is_what_starves() -> None:
    sleeper = child(300, "clock_nanosleep", wakes_at_s=9000.0, timed=True)
    found = main_finding(stalled(rank("wait4", sleeper, held_by=(300,))))
    assert (found.code, found.facts["child"]["pid"], found.facts["until_s"]) == ("starved", 300, 9000.0)
    unread = child(300, "clock_nanosleep", wakes_at_s=None, timed=True)
    found = main_finding(stalled(rank("wait4", unread, held_by=(300,)), at_s=400.0))
    assert (found.code, found.facts["child"]["pid"], found.facts["until_s"]) == ("starved", 300, None)


def test_a_child_that_never_ends_is_an_open_wait_that_says_what_it_stands_in() -> None:
    code, _, claim = told(stalled(rank("wait4", child(300, "read", target="/data"), held_by=(300,)), at_s=400.0))
    assert code == "blocked_io"
    assert claim.endswith("its child process 300 (python train.py) is blocked in a read or write")


# Files, many ranks, the mesh.


def test_two_ranks_that_wait_for_each_others_file_locks_are_a_cycle() -> None:
    ranks = [
        rank_snapshot(
            number,
            frame(12),
            process=process(
                100 + number,
                tasks=(task(100 + number, syscall="flock", target=f"/lock{number}", held_by=(101 - number,)),),
            ),
        )
        for number in (0, 1)
    ]
    found = main_finding(stalled(*ranks))
    assert (found.code, found.ranks, found.facts["line"]["line"]) == ("lock_cycle", (0, 1), 12)
    assert (found.facts["variant"], found.facts["file"], found.facts["file_held_by"]) == ("file", "/lock0", [1])


def test_ranks_that_stand_in_the_same_are_named_together_and_a_thousand_in_one_line() -> None:
    locked = [locked_in_backward(number) for number in range(1000)]
    code, ranks, claim = told(stalled(*locked))
    assert (code, len(ranks)) == ("backward_function_blocked", 1000)
    assert claim.startswith("ranks 0-999 wait for a lock inside the backward pass in hook")


def test_a_rank_is_told_with_its_place_in_the_mesh() -> None:
    placed = replace(locked_in_backward(1), status_file=board(rank=1, mesh=(("dp", 0), ("tp", 1))))
    seen = stalled(in_all_reduce(0, collective(6)), placed)
    assert main_finding(seen).claim.startswith("rank 1 (dp=0 tp=1) waits for a lock inside the backward pass")


def test_a_compiler_that_never_ends_is_told_from_a_loop() -> None:
    compiler = frame(700, file="/site-packages/torch/_inductor/compile_fx.py", function="compile_fx_inner")
    before = rank_snapshot(0, frame(39), compiler)
    looks = snapshot(1, 398.0, before), snapshot(2, 400.0, replace(before, process=process(cpu_s=9.0)))

    samples = tuple(sample(leaf=frame(39)) for _ in range(20))
    seen = replace(stalled(before, at_s=400.0), snapshots=looks, samples=samples)
    code, _, claim = told(seen)
    assert (code, claim.split(" without")[0]) == ("infinite_loop", "rank 0 compiles")


def test_a_rank_that_hangs_by_itself_is_not_explained_by_a_call_it_left_out() -> None:
    """It has a batch to fetch that the others have not: that is no skipped collective."""
    caller = in_all_reduce(0, collective(6), status_file=board(rank=0, calls=(call(1, left_s=None),)))
    loader = loading((child(300), (frame(85), FETCH, WORKER)))

    loader = replace(loader, rank=1, status_file=board(mark("data", "fetch", position=3), rank=1))
    assert main_finding(stalled(caller, loader)).code == "dataloader_worker_blocked"


def test_every_rule_for_waits_has_a_run_above_that_it_answers() -> None:
    runs = (
        one_sided_group(), crossed_receives(), unset_key(), locked_entrance(), cut(), blocked_worker(), forked(),
        full_pipe(),
    )  # fmt: skip
    reached = {main_finding(seen).code for seen in runs}
    named = re.findall(r"Cause\.([A-Z_]+)", inspect.getsource(causes_of_group_wait))
    assert {Cause[name] for name in named} <= reached
    assert {"dataloader_worker_blocked", "fork_lock", "pipe_full"} <= reached


def test_stacks_of_workers_are_told_by_their_thread() -> None:
    seen = replace(loading((child(300), ())), child_stacks={300: (stack(tid=300),)})
    assert main_finding(stalled(seen, at_s=400.0)).code == "unknown"
