"""Rules about the network between the hosts of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, exception_place, failed_ranks, first_own_failure
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.network import Link, Network, host_of
from nsa_harness.core.report import Facts, Status
from nsa_harness.core.verdict.verdict import Failure, FailureKind

# A link is slow if a rank had data to send for at least this share of the training, and sent less than a network of
# one gigabit per second carries. If the peer did not read for half of this time, the link is not the limit.
_BUSY_SHARE = 0.4
_SLOW_BYTES_PER_S = 125e6
_PEER_LIMITED_SHARE = 0.5
_MIN_BUSY_S = 2.0
# gloo's message if nothing listens at the address that a rank of another host has given out.
_LOOPBACK = re.compile(r"Connection refused, remote=\[(?:127\.|::1)")
_RATIO = 3.0  # a link is slower than the others if they carry at least this many times as much


def _unreachable_facts(network: Network) -> Facts | None:
    """Return facts about the connection that was tried for the longest time, or else a host without an address."""
    longest = max(network.unanswered, key=lambda one: one.waited_s, default=None)
    if longest is not None:
        return {
            "variant": "unanswered",
            "by_rank": longest.rank,
            "peer": longest.peer,
            "waited_s": longest.waited_s,
            "attempts": longest.attempts,
        }
    if network.unresolved:
        return {"variant": "unresolved", "host": network.unresolved[0].host, "error": network.unresolved[0].error}
    return None


@rule_if(first_own_failure)
def unreachable(context: DiagnosisContext, first: Failure) -> Explanation | None:
    """Explain a failure after a process tried to reach a host that does not answer or has no address."""
    facts = _unreachable_facts(context.evidence.network)
    if facts is None or not _may_follow(first, facts):
        return None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.KERNEL,
        facts={**facts, "failure": first.text, "open_files": None},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, first.exception) if first.exception else None,
        proof=("watch.jsonl",),
    )


def _may_follow(first: Failure, facts: Facts) -> bool:
    """Return whether this failure can be the effect of a host that could not be reached."""
    if first.exception is None:
        return first.kind is FailureKind.LAUNCHER
    host = host_of(str(facts["peer"])) if "peer" in facts else str(facts["host"])
    return host in first.exception.message


def _loopback_failure(context: DiagnosisContext) -> tuple[Failure] | None:
    """Return the first failure of a rank of several hosts that could not connect to a loopback address, or None."""
    has_other_hosts = len(set(context.evidence.nodes.values())) > 1 or context.evidence.network.links
    failures = context.judgement.failures if has_other_hosts else ()
    failed = [one for one in failures if one.exception and _LOOPBACK.search(one.exception.message)]
    return (failed[0],) if failed else None


@rule_if(_loopback_failure)
def loopback(context: DiagnosisContext, first: Failure) -> Explanation:
    """Explain a failure in which a rank on another host gave out an address that only its own host can reach."""
    assert first.exception is not None
    return Explanation(
        cause=Cause.INFRA,
        evidence=EvidenceKind.EFFECT,
        facts={"variant": "loopback", "message": first.text, "open_files": None},
        ranks=failed_ranks([first]),
        place=exception_place(context, first.rank, first.exception),
        proof=(first.exception.proof,),
    )


def slow_link(context: DiagnosisContext) -> Explanation | None:
    """Report that the network carries data to another host so slowly that the ranks wait for it most of the time."""
    evidence = context.evidence
    if context.judgement.status is Status.HANG:
        return None  # the time in which nothing was delivered says nothing about the speed
    trained_s = evidence.ended_s - (evidence.launch_s or 0.0)
    links = [link for link in evidence.network.links if link.rank is not None and link.bytes_per_s is not None]
    slow = [link for link in links if _is_slow(link, trained_s)]
    if not slow:
        return None
    slowest = min(slow, key=_rate)
    others = _others(links, slowest)
    if len(others) > 1 and median(map(_rate, others)) < _RATIO * _rate(slowest):
        others = []  # the whole network is slow, and not this link alone
    return Explanation(
        cause=Cause.SLOW_LINK,
        evidence=EvidenceKind.EFFECT,
        facts={
            "local_host": slowest.local_host,
            "peer_host": slowest.peer_host,
            "bytes_per_s": _rate(slowest),
            "busy_percent": min(100.0, 100 * (slowest.busy_s or 0.0) / trained_s),
            "sent_bytes": slowest.sent_bytes,
            "retransmitted": slowest.retransmitted,
            "other_bytes_per_s": median(map(_rate, others)) if len(others) > 1 else None,
        },
        ranks=tuple(sorted({link.rank for link in slow if link.rank is not None and _pair(link) == _pair(slowest)})),
        proof=("watch.jsonl",),
    )


def _is_slow(link: Link, trained_s: float) -> bool:
    busy_s = link.busy_s or 0.0
    is_busy = busy_s >= max(_MIN_BUSY_S, _BUSY_SHARE * trained_s)
    return is_busy and _rate(link) < _SLOW_BYTES_PER_S and (link.peer_limited_s or 0.0) < _PEER_LIMITED_SHARE * busy_s


def _others(links: Sequence[Link], slowest: Link) -> list[Link]:
    """Return the links between other pairs of hosts that carried enough data for a rate."""
    return [link for link in links if _pair(link) != _pair(slowest) and (link.busy_s or 0.0) > 0.0]


def _pair(link: Link) -> frozenset[str]:
    return frozenset((link.local_host, link.peer_host))


def _rate(link: Link) -> float:
    return link.bytes_per_s or 0.0
