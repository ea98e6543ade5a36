"""The rules about the network between hosts, and the host that a launcher asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import board, case, diagnose, ended, evidence, mark, raised, rank_evidence, whole

from nsa_harness.core.diagnosis.rules.network import slow_link
from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.evidence.network import Link, Network, UnansweredConnection, UnresolvedHost, meeting_host
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.texts.sentences import unreachable_text

MIB = 1 << 20
BLOCKED = UnansweredConnection(rank=None, peer="10.0.0.1:29400", waited_s=39.0, attempts=6)
UNKNOWN = UnresolvedHost(host="node-7", error="Name or service not known")


@pytest.mark.parametrize(
    ("words", "environment", "host"),
    [
        (["torchrun", "--rdzv-endpoint=10.0.0.1:29400", "train.py"], {}, "10.0.0.1"),
        (["torchrun", "--rdzv_endpoint", "node7:29400", "train.py"], {"MASTER_ADDR": "other"}, "node7"),
        (["torchrun", "--master_addr=node7", "--master-port=3", "train.py"], {}, "node7"),
        (["torchrun", "--rdzv-endpoint=[fe80::1]:29400"], {}, "fe80::1"),
        (["torchrun", "--master-addr", "fe80::1"], {}, "fe80::1"),
        (["python", "train.py"], {"MASTER_ADDR": "node7"}, "node7"),
        (["python", "train.py"], {}, None),
        (["torchrun", "--master_addr"], {}, None),
        (["torchrun", "--rdzv-endpoint=:29400"], {}, None),
        (["torchrun", "--rdzv-endpoint=h1:2379,h2:2379"], {}, None),  # several servers of etcd
        (["torchrun", "--rdzv-endpoint=http://h1:2379"], {}, None),
    ],
)
def test_the_host_at_which_the_ranks_meet_is_read_as_torchrun_reads_it(
    words: list[str], environment: dict[str, str], host: str | None
) -> None:
    assert meeting_host(words, environment) == host


def launcher_failed(network: Network, **facts: Any) -> Evidence:
    nobody = rank_evidence(0, pid=None, exit=None, status_file=None)
    return evidence(nobody, launcher=ended(None, 1), exits=(ended(None, 1),), network=network, **facts)


def told(seen: Evidence) -> tuple[str, str]:
    found = diagnose(seen, judge(seen)).findings[0]
    return found.code, whole(found)


def test_a_launcher_that_failed_after_nothing_answered_names_the_address() -> None:
    code, text = told(launcher_failed(Network(unanswered=(BLOCKED,))))
    assert code == "infra"
    assert "the launcher tried to connect to 10.0.0.1:29400 for 39 s, and nothing answered (6 packets" in text
    assert "the launcher ended" in text


def test_a_host_without_an_address_is_named_and_an_unanswered_address_comes_first() -> None:
    code, text = told(launcher_failed(Network(unresolved=(UNKNOWN,))))
    assert (code, "the host node-7, which has no address on this machine (Name or service not known)" in text) == (
        "infra", True,
    )  # fmt: skip
    assert "10.0.0.1:29400" in told(launcher_failed(Network(unanswered=(BLOCKED,), unresolved=(UNKNOWN,))))[1]


def test_a_failure_of_the_launcher_without_such_a_connection_is_not_called_unreachable() -> None:
    assert told(launcher_failed(Network()))[0] == "unknown"


@pytest.mark.parametrize(
    ("message", "network", "code"),
    [
        ("connect [10.0.0.1]:29400 failed", Network(unanswered=(replace(BLOCKED, rank=0),)), "infra"),
        ("boom", Network(unanswered=(replace(BLOCKED, rank=0),)), "exception"),
        ("cannot find node-7", Network(unresolved=(UNKNOWN,)), "infra"),
        ("boom", Network(unresolved=(UNKNOWN,)), "exception"),
    ],
)
def test_an_exception_of_a_rank_follows_only_if_it_names_the_host(message: str, network: Network, code: str) -> None:
    rank = rank_evidence(0, exit=ended(0, 1), exception=raised(0, message=message))
    seen = evidence(rank, exits=(ended(0, 1),), launcher=ended(None, 1), network=network)
    assert told(seen)[0] == code


def link(**changes: Any) -> Link:
    facts: dict[str, Any] = {
        "rank": 0, "local_host": "10.0.0.1", "peer_host": "10.0.0.2", "sent_bytes": 40 * MIB, "received_bytes": MIB,
        "retransmitted": 3, "observed_s": 40.0, "busy_s": 20.0, "peer_limited_s": 0.0,
    }  # fmt: skip
    return Link(**{**facts, **changes})


OTHERS = tuple(link(rank=rank, peer_host=f"10.0.0.{rank}", busy_s=1.0) for rank in (5, 6))


def passed(*links: Link) -> Evidence:
    ranks = [rank_evidence(rank, exit=ended(rank), status_file=board(mark("exit"), rank=rank)) for rank in range(2)]
    exits = (ended(0), ended(1), ended(None))
    return evidence(*ranks, exits=exits, launcher=ended(None), ended_s=32.0, launch_s=2.0, network=Network(links=links))


def slow_links(*links: Link) -> list[str]:
    seen = passed(*links)
    return [whole(found) for found in diagnose(seen, judge(seen)).findings if found.code == "slow_link"]


def test_a_link_that_is_busy_for_most_of_the_training_and_carries_little_is_named() -> None:
    (text,) = slow_links(link(), link(rank=1, local_host="10.0.0.2", peer_host="10.0.0.1", busy_s=0.5))
    assert "the network from 10.0.0.1 to 10.0.0.2 is slow: rank 0 sent 40.0 MiB at 2.0 MiB per second" in text
    assert "67 % of the training; 3 segments had to be sent again" in text


def test_a_hanging_job_says_nothing_about_the_speed_of_its_network() -> None:
    context = case(replace(passed(link()), ending=Ending.STALL))
    hang = replace(context, judgement=replace(context.judgement, status=Status.HANG))
    assert slow_link(context) is not None
    assert slow_link(hang) is None


@pytest.mark.parametrize(
    "healthy",
    [
        link(busy_s=11.9),  # too small a share of 30 s
        link(sent_bytes=3000 * MIB),  # as fast as a network of one gigabit per second
        link(peer_limited_s=11.0),  # the peer does not read
        link(busy_s=None, peer_limited_s=None),  # an old kernel
        link(rank=None),  # the launcher's connection
    ],
    ids=["seldom busy", "fast", "the peer is slow", "old kernel", "launcher"],
)
def test_a_link_that_is_not_the_limit_is_not_named(healthy: Link) -> None:
    assert slow_links(healthy) == []


def test_the_rate_of_the_other_links_is_told_if_they_are_faster() -> None:
    (text,) = slow_links(link(), *OTHERS)
    assert "the other connections carry 40.0 MiB per second" in text
    (text,) = slow_links(link(), *(replace(other, busy_s=18.0) for other in OTHERS))
    assert "other connections" not in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (BLOCKED, "the launcher has been trying to connect to 10.0.0.1:29400 for 39 s, and nothing answers"),
        (replace(BLOCKED, rank=3), "rank 3 has been trying"),
        (UNKNOWN, "asks for the host node-7, which has no address here: Name or service not known"),
    ],
)
def test_what_cannot_be_reached_is_said_at_once(found: UnansweredConnection | UnresolvedHost, text: str) -> None:
    assert text in unreachable_text(found)


REFUSED = "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote="


@pytest.mark.parametrize(
    ("address", "nodes", "code"),
    [
        ("[127.0.0.1]:2976", {0: "n1", 1: "n2"}, "infra"),
        ("[::1]:2976", {0: "n1", 1: "n2"}, "infra"),
        ("[10.0.0.2]:2976", {0: "n1", 1: "n2"}, "unknown"),
        ("[127.0.0.1]:2976", {}, "unknown"),  # all ranks are on one host, so one of them has ended
    ],
)
def test_a_loopback_address_of_another_host_is_a_wrong_interface(
    address: str, nodes: dict[int, str], code: str
) -> None:
    error = raised(0, message=f"{REFUSED}{address}")
    ranks = (rank_evidence(0, exit=ended(0, 1), exception=error), rank_evidence(1, exit=ended(1, -15)))
    seen = evidence(*ranks, exits=(ended(0, 1), ended(1, -15)), launcher=ended(None, 1), nodes=nodes)
    found = told(seen)
    assert found[0] == code
    assert ("at a loopback address" in found[1]) == (code == "infra")
