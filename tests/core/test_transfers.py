"""Transfers between two ranks: who left its half out of a round, and who turned to another partner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    C10D,
    USER,
    Diagnosis,
    board,
    call,
    collective,
    diagnose,
    frame,
    in_all_reduce,
    rank_evidence,
    rank_snapshot,
    stalled,
)
from lockstep import line

from nsa_harness.core.collectives.call_history import call_with_changed_peer
from nsa_harness.core.collectives.call_patterns import last_transfer_of_loop, pattern_break
from nsa_harness.core.collectives.timeline import Timeline, timeline
from nsa_harness.core.evidence.evidence import Call, Evidence, Source, StatusFile
from nsa_harness.core.report import Finding, Status
from nsa_harness.core.verdict.verdict import judge

SEND = ("send", 30)
RECV = ("recv", 31)
MEET = ("barrier", 32)
AFTER = ("barrier", 80)


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def main(seen: Evidence) -> Finding:
    return diagnosed(seen).findings[0]


def rounds(*made: tuple[str, int], **changes: Any) -> StatusFile:
    """A rank that made these calls one after the other; the last one is still open."""
    calls = [
        call(number, op, place=line(at), peer=None if op == "barrier" else changes.get("peer", 0))
        for number, (op, at) in enumerate(made, start=1)
    ]
    return board(calls=(*calls[:-1], replace(calls[-1], left_s=None)), rank=changes.get("rank", 0))


def went(*made: tuple[str, int]) -> Timeline:
    return timeline(0, rounds(*made), (), "gloo")


def test_the_call_that_a_rank_left_out_is_the_one_that_was_due_in_its_round() -> None:
    found = pattern_break(went(SEND, MEET, SEND, MEET, MEET))
    assert found is not None
    assert (found.expected.op, found.expected.place, found.expected.call and found.expected.call.number) == (
        "send",
        line(30),
        3,
    )
    assert (found.actual.call and found.actual.call.number, found.times) == (5, 1)


def test_a_rank_that_keeps_its_rounds_or_had_none_did_not_depart() -> None:
    assert pattern_break(went(SEND, MEET, SEND, MEET, SEND)) is None
    assert pattern_break(went(SEND, MEET, SEND, MEET, MEET, SEND)) is None, "it is back in them"
    assert pattern_break(went(SEND, MEET)) is None
    assert pattern_break(went(SEND, AFTER)) is None
    assert pattern_break(Timeline(rank=0, events=(), is_complete=True)) is None


def in_steps(made: StatusFile, *steps: int) -> StatusFile:
    return replace(made, calls=tuple(replace(one, step=step) for one, step in zip(made.calls, steps, strict=True)))


def test_a_rank_that_goes_on_where_a_step_was_due_to_begin_left_no_call_out() -> None:
    made = in_steps(rounds(SEND, MEET, SEND, MEET, SEND), 1, 1, 2, 2, 2)
    assert pattern_break(timeline(0, made, (), "gloo")) is None


def test_a_rank_that_went_on_to_what_it_never_did_before_left_its_rounds_behind_the_last_transfer() -> None:
    assert last_transfer_of_loop(went(SEND, SEND, MEET)) == went(SEND, SEND, MEET).events[1]
    assert last_transfer_of_loop(went(SEND, MEET, SEND, MEET, AFTER)) == went(SEND, MEET, SEND, MEET, AFTER).events[2]
    assert last_transfer_of_loop(went(SEND, MEET, SEND, MEET)) is None, "that it did before"
    assert last_transfer_of_loop(went(MEET, MEET, AFTER)) is None, "no transfer"
    assert last_transfer_of_loop(went(SEND, MEET)) is None, "too little to be rounds"
    assert last_transfer_of_loop(Timeline(rank=0, events=(), is_complete=True)) is None


def departed(found: Finding) -> tuple[str, str, int]:
    """How the culprit left its usual transfers: what it did, the operation and its line."""
    facts = found.facts["departed"]
    return facts["did"], facts["op"], facts["line"]["line"]


def unmatched(*made: tuple[str, int], last: tuple[str, int] = RECV) -> Evidence:
    """Rank 1 waits in a receive of its third round, or in `last`; rank 0 stands in the last of these calls."""
    waits = rounds(RECV, MEET, RECV, MEET, last, rank=1)
    stands = rounds(*made, peer=1)
    wait = rank_snapshot(1, frame(3000, file="/x/torch/distributed/distributed_c10d.py"), frame(31), status_file=waits)
    looks = (in_all_reduce(0, collective(3, "barrier"), status_file=stands), wait)
    return stalled(*looks, ranks=(rank_evidence(0, status_file=stands), rank_evidence(1, status_file=waits)))


def test_the_rank_that_left_out_its_half_of_a_transfer_is_blamed_and_not_the_one_that_waits() -> None:
    found = main(unmatched(SEND, MEET, SEND, MEET, MEET))
    assert (found.code, found.ranks, found.place, found.confidence) == ("p2p_unmatched", (0,), line(30), 0.9)
    assert departed(found) == ("skipped", "send", 30)


def test_the_step_of_a_transfer_that_was_left_out_is_that_of_the_call_in_its_place() -> None:
    seen = unmatched(SEND, MEET, SEND, MEET, MEET)
    ranks = tuple(
        replace(rank, status_file=in_steps(rank.status_file, 1, 1, 2, 2, 3)) for rank in seen.ranks if rank.status_file
    )
    found = diagnosed(replace(seen, ranks=ranks))
    assert found.culprit is not None
    assert (found.cause, found.culprit.ranks, found.culprit.step) == ("p2p_unmatched", (0,), 3)


LOOP = """\
def step(peer):
    while True:
        if done():
            break
        if batch.ok:
            send(peer)
        barrier()
    barrier()"""
SOURCES = (Source(file=USER, first=25, text=LOOP),)  # so that `send` stands in line 30


def test_what_decided_that_a_transfer_was_left_out_is_its_place() -> None:
    found = main(replace(unmatched(SEND, MEET, SEND, MEET, MEET), sources=SOURCES))
    assert (found.ranks, found.place) == ((0,), line(29))


def test_of_a_rank_that_went_on_from_its_rounds_that_is_told_with_what_let_it_out() -> None:
    seen = unmatched(("recv", 28), SEND, AFTER)
    found = main(seen)
    assert (found.code, found.ranks, found.place, found.confidence) == ("p2p_unmatched", (0,), line(30), 0.9)
    assert departed(found) == ("left its rounds", "send", 30)
    assert main(replace(seen, sources=SOURCES)).place == line(27)


@pytest.mark.parametrize("made", [(("recv", 28), SEND, AFTER), (SEND, MEET, SEND, MEET, AFTER)])
def test_the_rounds_say_nothing_if_the_rank_that_waits_has_left_them_too(made: tuple[tuple[str, int], ...]) -> None:
    found = main(unmatched(*made, last=("recv", 82)))
    assert (found.code, found.ranks, found.confidence) == ("p2p_unmatched", (0,), 0.8)
    assert found.facts["departed"]["did"] == "went past"


def partners(*peers: int, rank: int) -> StatusFile:
    calls = [call(number, "recv", place=line(31), peer=peer) for number, peer in enumerate(peers, start=1)]
    return board(calls=(*calls[:-1], replace(calls[-1], left_s=None)), rank=rank)


def test_the_rank_whose_transfer_turned_to_another_partner_is_blamed() -> None:
    boards = (partners(2, 2, 2, rank=0), partners(0, 0, 0, rank=1), partners(1, 1, 0, rank=2))
    leaf = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    looks = tuple(rank_snapshot(rank, leaf, frame(31), status_file=one) for rank, one in enumerate(boards))
    found = main(stalled(*looks, ranks=tuple(rank_evidence(rank, status_file=one) for rank, one in enumerate(boards))))
    assert (found.code, found.ranks, found.place, found.confidence) == ("p2p_unmatched", (2,), line(31), 0.9)
    assert departed(found) == ("took another peer", "recv", 31)


@pytest.mark.parametrize("peers", [(1, 1, 1), (1, 0, 2), (1, 0)], ids=["the same", "each round another", "only once"])
def test_a_partner_that_was_never_the_usual_one_proves_nothing(peers: tuple[int, ...]) -> None:
    assert call_with_changed_peer(partners(*peers, rank=2)) is None


def test_without_rounds_before_the_rank_that_went_past_is_named_as_likely() -> None:
    found = main(unmatched(MEET))
    assert (found.code, found.ranks, found.confidence) == ("p2p_unmatched", (0,), 0.8)
    assert found.facts["departed"]["waiting_rank"] == 1


def sending(rank: int, *posted: Call) -> Any:
    made = board(calls=(*posted, call(9, "send", peer=1 - rank, left_s=None, place=line(40))), rank=rank)
    return rank_snapshot(rank, frame(3000, file=C10D), frame(40), status_file=made)


def test_two_sends_to_each_other_never_end_unless_a_receive_was_posted_before() -> None:
    assert main(stalled(sending(0), sending(1))).code == "p2p_unmatched"
    posted = [call(8, "irecv", peer=1 - rank) for rank in range(2)]
    assert judge(stalled(*(sending(rank, posted[rank]) for rank in range(2)))).status is not Status.HANG


def exchanging(*body: str) -> Source:
    """The last of these lines is the one in which both sides stand."""
    text = "\n".join(("def exchange(self, rows):", *(f"    {line}" for line in body)))
    return Source(file=USER, first=40 - len(body), text=text)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (("partner = random.choice(self.peers)", "dist.send(rows, partner)"), "partner = random.choice(self.peers)"),
        (("parts = split(rows)", "for part in parts:", "    dist.send(part, 1)"), "parts = split(rows)"),
        (("rows = rows.contiguous()", "dist.send(rows, 1)"), "dist.send(rows, 1)"),
    ],
    ids=["another partner", "another number of them", "nothing that differs"],
)
def test_of_sides_that_do_not_fit_what_makes_them_unlike_is_told(body: tuple[str, ...], told: str) -> None:
    kept = exchanging(*body)
    looks = [sending(rank) for rank in (0, 1)]
    ranks = tuple(rank_evidence(rank, status_file=look.status_file) for rank, look in enumerate(looks))
    found = main(replace(stalled(*looks, ranks=ranks), sources=(kept,)))
    assert found.place is not None
    assert kept.text.splitlines()[(found.place.line or 0) - kept.first].strip() == told


def test_two_halves_that_pass_each_other_by_are_unmatched_as_likely() -> None:
    c10d = frame(3000, file="/x/torch/distributed/distributed_c10d.py")
    halves = (call(9, "wait isend", peer=1, left_s=None), call(9, "recv", peer=0, left_s=None))
    looks = [
        rank_snapshot(rank, c10d, frame(40), status_file=board(calls=(half,), rank=rank))
        for rank, half in enumerate(halves)
    ]
    found = main(stalled(*looks, at_s=400.0))
    assert (found.code, found.ranks, found.confidence) == ("p2p_unmatched", (0, 1), 0.75)
