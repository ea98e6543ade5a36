"""A job on several nodes: what its nodes saw becomes one evidence, and no clock of two nodes is ever compared."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    LIMITS,
    board,
    call,
    collective,
    diagnose,
    ended,
    evidence,
    in_all_reduce,
    locked_in_backward,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    snapshot,
    task,
)
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Ending, Evidence, RankSnapshot
from nsa_harness.core.evidence.host import Gpu, Socket
from nsa_harness.core.evidence.nodes import (
    PID_SPAN,
    clock_skew,
    evidence_of_snapshots,
    merge,
    relocated,
    with_peers,
)
from nsa_harness.core.report import HangKind, Status
from nsa_harness.core.verdict.node_states import (
    LOST_S,
    NodeState,
    Requests,
    SeenNode,
    Step,
    exceeds_limits,
    next_step,
    quiet_s,
)
from nsa_harness.core.verdict.verdict import judge, proof_of
from nsa_harness.texts.sentences import skew_text

WALL_S = 1_700_000_000.0  # wall clock at second 0 of the first node's times


def looks(*ranks: RankSnapshot, shift_s: float = 0.0, **changes: Any) -> Evidence:
    """Two snapshots of one node's ranks, which made their last progress 10 s before the second one."""
    moved = [snapshot(1, 18.0 + shift_s, *ranks), snapshot(2, 20.0 + shift_s, *ranks)]
    facts = {"last_progress_s": 10.0 + shift_s, "limits": LIMITS, "exited_ranks": (), "backend": "gloo"}
    return evidence_of_snapshots("n", moved, (), **{**facts, **changes})


def alone(rank: int) -> RankSnapshot:
    """A rank that waits in the 6th all_reduce."""
    return in_all_reduce(rank, collective(6))


# The proof.


def test_a_rank_that_waits_for_itself_on_another_node_is_a_deadlock_of_the_job() -> None:
    stuck = replace(locked_in_backward(3), collectives=(collective(5, retired=True),))
    proof = proof_of(merge({"n1": looks(alone(0), alone(1)), "n2": looks(alone(2), stuck)}))
    assert proof is not None
    assert (proof.kind, [root.rank for root in proof.graph.roots]) == (HangKind.DEADLOCK, [3])
    assert {wait.rank: wait.peers for wait in proof.graph.waits} == {0: (3,), 1: (3,), 2: (3,), 3: ()}


@given(st.floats(-1e6, 1e6), st.permutations(["n1", "n2", "n3"]))
def test_neither_the_clocks_of_the_nodes_nor_their_order_change_what_is_proven(
    shift_s: float, order: list[str]
) -> None:
    stuck = replace(locked_in_backward(3), collectives=(collective(5, retired=True),))
    nodes = {"n1": looks(alone(0)), "n2": looks(alone(2), stuck, shift_s=shift_s), "n3": looks(alone(1))}
    proof = proof_of(merge({name: nodes[name] for name in order}))
    assert proof is not None
    assert (proof.kind, proof.is_closed, [root.rank for root in proof.graph.roots]) == (HangKind.DEADLOCK, True, [3])


@given(st.floats(-1e6, 1e6), st.floats(-1.5, 1.5), st.floats(0.0, 300.0))
def test_the_job_was_quiet_for_no_longer_than_any_of_its_nodes(shift_s: float, wrong_s: float, quiet_s: float) -> None:
    """The wall clocks of the nodes differ by so little that their snapshots do not show it."""
    clocks = (0.0, wrong_s - shift_s)
    ranks = [rank_snapshot(rank, status_file=board(zero_ns=round(clocks[rank] * 1e9))) for rank in (0, 1)]
    other = looks(ranks[1], shift_s=shift_s, last_progress_s=shift_s + 20.0 - quiet_s)
    whole = merge({"n1": looks(ranks[0], last_progress_s=-280.0), "n2": other})
    assert whole.last_progress_s is not None
    assert whole.snapshots[-1].at_s - whole.last_progress_s <= min(300.0, quiet_s) + 1e-6


def test_only_snapshots_that_every_node_took_count() -> None:
    short = replace(looks(rank_snapshot(1)), snapshots=looks(rank_snapshot(1)).snapshots[1:])
    assert [one.number for one in merge({"n1": looks(rank_snapshot(0)), "n2": short}).snapshots] == [2]


def test_the_other_end_of_a_connection_may_be_a_rank_of_another_node() -> None:
    ends = ("10.0.0.1:4711", "10.0.0.2:4712")

    def connected(rank: int, local: str, peer: str) -> RankSnapshot:
        socket = Socket(
            inode=7, local=local, peer=peer, state="ESTABLISHED", unacked_bytes=0, unread_bytes=0, retransmits=0
        )
        return rank_snapshot(rank, process=process(100 + rank, sockets=(socket,)))

    found = with_peers([connected(0, *ends), connected(1, *reversed(ends))])
    assert [(one.process.sockets[0].peer_rank, one.process.sockets[0].in_job) for one in found if one.process] == [
        (1, True),
        (0, True),
    ]


def test_a_gpu_has_the_name_of_its_node() -> None:
    card = Gpu(index=0, name="", utilisation=1.0, used_bytes=1, total_bytes=2, ecc_errors=0, pids=(100,))
    parts = {name: looks(rank_snapshot(rank)) for rank, name in enumerate(("n1", "n2"))}
    parts = {
        name: replace(part, snapshots=tuple(replace(one, gpus=(card,)) for one in part.snapshots))
        for name, part in parts.items()
    }
    assert [gpu.node for gpu in merge(parts).snapshots[-1].gpus] == ["n1", "n2"]


def test_a_process_id_is_changed_only_where_two_nodes_have_it() -> None:
    holder = task(100, held_by=(100, 300))
    same = rank_snapshot(2, pid=100, process=process(100, tasks=(holder,)))
    whole = merge({"n1": looks(rank_snapshot(0)), "n2": looks(same), "n3": looks(rank_snapshot(7))})
    pids = {rank.rank: rank.pid for rank in whole.snapshots[-1].ranks}
    assert pids == {0: 100, 2: 100 + PID_SPAN, 7: 107}
    (moved,) = (rank.process for rank in whole.snapshots[-1].ranks if rank.rank == 2)
    assert moved is not None
    assert moved.tasks[0].held_by == (100 + PID_SPAN, 300 + PID_SPAN)


# Clocks.


def met(at_s: float, took_s: float, wall_s: float | None = WALL_S) -> Evidence:
    """One rank of a node: when it met the others in a barrier, and its wall clock at second 0."""
    zero_ns = None if wall_s is None else round(wall_s * 1e9)
    entrance = call(1, "barrier", entered_s=at_s, left_s=at_s + took_s)
    return evidence(rank_evidence(0, status_file=board(calls=(entrance,), zero_ns=zero_ns)))


@pytest.mark.parametrize(
    ("own", "offset_s", "text"),
    [
        (met(4.0, 0.02, WALL_S + 6.0), 6.0, "its clock agrees within 0.020 s"),  # it was started 6 s later
        (met(4.0, 0.02, WALL_S + 66.0), 6.01, "its clock is 60.010 s ahead (± 0.020 s), which was corrected"),
        (met(4.0, 0.02, WALL_S - 54.0), 5.97, "its clock is 59.990 s behind (± 0.020 s), which was corrected"),
        (met(4.0, 0.02, None), 5.99, "its clock agrees within 0.020 s"),
        (evidence(), 0.0, "its clock was not compared"),
    ],
)
def test_the_wall_clocks_are_corrected_by_calls_in_which_all_ranks_meet(
    own: Evidence, offset_s: float, text: str
) -> None:
    skew = clock_skew(met(9.99, 0.02), own)
    assert (pytest.approx(skew.offset_s, abs=1e-6), skew_text(skew)) == (offset_s, text)


def test_times_and_places_of_a_node_move_with_its_clock() -> None:
    whole = merge({"n1": met(10.0, 0.02), "n2": replace(met(4.0, 0.02, WALL_S + 6.0), ended_s=50.0)})
    assert whole.ended_s == pytest.approx(56.0)
    file = relocated(board(calls=(call(left_s=None),), steps_s=((1, 2.0),), zero_ns=0), 5.0, None)
    assert (file.created_s, file.calls[0].entered_s, file.calls[0].left_s, file.steps_s, file.zero_ns) == (
        5.5, 7.0, None, ((1, 7.0),), -5_000_000_000,
    )  # fmt: skip


# The end.


def test_all_nodes_ended_well() -> None:
    nodes = {name: evidence(rank_evidence(rank, exit=ended(rank))) for rank, name in enumerate(("n1", "n2"))}
    whole = merge(nodes)
    assert (judge(whole).status, whole.nodes) == (Status.PASS, {0: "n1", 1: "n2"})


def test_one_launcher_whose_end_nobody_saw_is_no_pass() -> None:
    unseen = evidence(rank_evidence(1), launcher=None)
    assert judge(merge({"n1": evidence(rank_evidence(0, exit=ended(0))), "n2": unseen})).status is Status.ERROR


def test_the_first_failure_is_the_first_in_time_on_any_node() -> None:
    died = evidence(rank_evidence(3, exit=ended(3, -9, at_s=8.0)), launcher=ended(None, 1, at_s=8.5))
    lost = raised(0, message="Connection closed by peer", at_s=8.1)
    other = evidence(rank_evidence(0, exit=ended(0, 1, at_s=9.0), exception=lost), launcher=ended(None, 1, at_s=9.5))
    whole = merge({"n1": other, "n2": died})
    failures = judge(whole).failures
    assert [(one.rank, one.is_collateral) for one in failures] == [(3, False), (0, True)]
    found = diagnose(whole, judge(whole))
    assert (found.cause, found.culprit and found.culprit.ranks) == ("killed", (3,))
    assert found.findings[0].claim.startswith("rank 3 (n2) was killed by SIGKILL")
    assert found.findings[0].proof == ("nodes/n2/processes.jsonl",)


def test_what_a_rank_raises_while_the_nodes_are_ended_one_after_the_other_is_no_failure() -> None:
    stuck = replace(locked_in_backward(1), collectives=(collective(5, retired=True),))
    lost = raised(0, message="Connection closed by peer", at_s=20.5, is_uncaught=True)
    by_us = {rank: ended(rank, -15, at_s=21.0, by_us=True) for rank in (0, 1)}
    nodes = {"n1": looks(alone(0)), "n2": looks(stuck)}
    ranks = {"n1": rank_evidence(0, exit=by_us[0], exception=lost), "n2": rank_evidence(1, exit=by_us[1])}
    whole = merge({name: replace(node, ranks=(ranks[name],)) for name, node in nodes.items()})
    assert judge(whole).status is Status.HANG
    early = replace(ranks["n1"], exception=replace(lost, at_s=17.0))
    both = {"n1": replace(nodes["n1"], ranks=(early,)), "n2": replace(nodes["n2"], ranks=(ranks["n2"],))}
    assert judge(merge(both)).status is Status.FAIL


def lost_node(**changes: Any) -> Evidence:
    lost = evidence(rank_evidence(1), ending=Ending.CONTROLLER_DIED, launcher=None, is_observed=True)
    error = raised(0, message="Connection closed by peer", at_s=8.1)
    facts = {"exit": ended(0, 1, at_s=9.0), "exception": error}
    return merge({"n1": evidence(rank_evidence(0, **{**facts, **changes})), "n2": lost})


def test_a_lost_node_is_named_and_is_neither_a_failure_nor_a_hang() -> None:
    seen = lost_node()
    found = diagnose(seen, judge(seen))
    assert (judge(seen).status, found.cause) == (Status.ERROR, "node_lost")
    assert found.findings[0].claim == (
        "n2, with 1 of the 1 ranks, stopped reporting before the job had ended: the node or its agent was lost"
    )


def test_a_rank_that_failed_by_itself_is_the_reason_even_if_a_node_is_lost_later() -> None:
    assert judge(lost_node(exception=raised(0, "ValueError", "bad shard"))).status is Status.FAIL


def test_a_node_that_never_came_is_named_if_its_name_is_known() -> None:
    waiting = evidence(ending=Ending.DETACHED, is_observed=True)
    named = merge({"n1": waiting}, 2, ("n1", "n2"))
    unknown = merge({"n1": waiting}, 2)
    (finding,) = diagnose(named, judge(named)).findings
    assert finding.claim == "n2 never came: nsa-harness was not started there, so the ranks could not start"
    (finding,) = diagnose(unknown, judge(unknown)).findings
    assert finding.claim.startswith("another node never came")
    assert merge({"n1": waiting}, 1).missing_nodes == ()
    some = merge({"n1": replace(waiting, ranks=(rank_evidence(0), rank_evidence(1, pid=None)), world_size=2)}, 2)
    assert diagnose(some, judge(some)).cause == "node_lost"


# What the coordinator does.


def state(node: str = "n1", **changes: Any) -> NodeState:
    ranks = (int(node[1:]),)
    facts = {"ranks": ranks, "living_ranks": ranks, "quiet_s": 9.0, "stall_s": 8.0, "check_s": 5.0}
    return NodeState(node=node, **{**facts, **changes})


def seen(*states: NodeState, unseen_s: float = 0.0) -> list[SeenNode]:
    return [SeenNode(state=one, unseen_s=unseen_s if one.node == "n2" else 0.0) for one in states]


ASKED = Requests(look=3, first=2)


@pytest.mark.parametrize(
    ("nodes", "requests", "step"),
    [
        (seen(state("n1"), state("n2")), Requests(), Step.BEGIN),
        (seen(state("n1"), state("n2", quiet_s=1.0)), Requests(), Step.WAIT),
        (seen(state("n1"), state("n2", is_ending=True)), Requests(), Step.WAIT),
        (seen(state("n1")), Requests(), Step.WAIT),  # the other node has not come
        (seen(state("n1"), state("n2", ranks=(), living_ranks=(), quiet_s=None)), Requests(), Step.WAIT),
        (seen(state("n1"), state("n2", living_ranks=(), quiet_s=None)), Requests(), Step.BEGIN),  # its ranks are over
        (seen(state("n1"), state("n2", ended=True, living_ranks=())), Requests(), Step.BEGIN),
        (seen(state("n1", look=3), state("n2", look=2)), ASKED, Step.WAIT),
        (seen(state("n1", look=3), state("n2", look=3)), ASKED, Step.JUDGE),
        (seen(state("n1", look=3), state("n2", look=3, quiet_s=0.1)), ASKED, Step.CANCEL),
        (seen(state("n1", look=3), state("n2", look=2), unseen_s=LOST_S + 1), ASKED, Step.JUDGE),  # n2 is lost
        (seen(state("n1"), state("n2")), Requests(look=3, first=4, hang=1), Step.WAIT),
        (seen(state("n1"), state("n2", restarts=1)), Requests(look=3, first=4, hang=1), Step.RETRACT),
        (seen(state("n1", ended=True), state("n2", ended=True)), Requests(), Step.FINISH),
        (seen(state("n1", ended=True), state("n2"), unseen_s=LOST_S + 1), Requests(), Step.FINISH),
        (seen(state("n1", ended=True), state("n2")), Requests(), Step.BEGIN),
        ([], Requests(), Step.WAIT),
    ],
)
def test_the_state_of_all_nodes_decides_what_is_done(nodes: list[SeenNode], requests: Requests, step: Step) -> None:
    assert next_step(nodes, requests, min_nodes=2) is step


def test_before_every_node_has_reached_its_limit_only_a_closed_wait_counts() -> None:
    nodes = seen(state("n1"), state("n2", stall_s=30.0))
    assert (exceeds_limits(nodes), exceeds_limits(nodes[:1]), quiet_s(nodes)) == (False, True, 9.0)


@given(st.lists(st.sampled_from(["n1", "n2", "read n1", "read n2"]), max_size=120))
def test_whatever_the_order_in_which_files_become_visible_a_request_follows_all_answers(order: list[str]) -> None:
    """Nodes answer when they see a request, and the coordinator sees their states late, in any order."""
    own = {name: state(name) for name in ("n1", "n2")}
    visible = dict(own)
    requests, clock = Requests(), itertools.count()
    asked: dict[int, int] = {}
    answered: dict[tuple[str, int], int] = {}
    for event in order:
        if event.startswith("read"):
            visible[event[5:]] = own[event[5:]]
        elif own[event].look < requests.look:
            own[event] = replace(own[event], look=requests.look)
            answered[event, requests.look] = next(clock)
        step = next_step(seen(*visible.values()), requests, min_nodes=2)
        if step is Step.BEGIN:
            requests = Requests(look=1, first=1)
        elif step is Step.JUDGE:
            requests = replace(requests, look=requests.look + 1)
        assert step in (Step.WAIT, Step.BEGIN, Step.JUDGE)
        asked.setdefault(requests.look, next(clock))
    for (name, look), when in answered.items():
        assert when > asked[look]
        assert all(answered[other, look - 1] < asked[look] for other in own if look > 1), name
