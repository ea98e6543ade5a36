"""Decide which hosts are bad from the results of jobs on single hosts and on pairs, and which jobs to run next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.report import Status

Hosts = tuple[str, ...]  # of one job: a single host or a pair
_FAULTS = (Status.FAIL, Status.HANG)
_PROOF = 2  # a host is bad between hosts if it fails with this many hosts that pass with others


@dataclass(frozen=True, kw_only=True)
class HostSearch:
    """The conclusions about each host after some jobs, and the jobs that would show more.

    A host is in exactly one of `bad`, `good` and `undecided`. The two hosts of a bad pair are undecided.
    """

    bad: Hosts = ()
    bad_pairs: tuple[Hosts, ...] = ()  # each host of such a pair passes alone and with other hosts
    good: Hosts = ()
    undecided: Hosts = ()
    next_jobs: tuple[Hosts, ...] = ()  # no host is in two of them, so that they can run at the same time
    fails_everywhere: int = 0  # all jobs with this number of hosts fail, so the program is at fault: 1 or 2; 0: no


def search_hosts(hosts: Sequence[str], results: Mapping[Hosts, Status], *, with_pairs: bool = True) -> HostSearch:
    """Judge the hosts by the results so far. An ERROR is no evidence.

    `with_pairs`: whether the program can run on two hosts at once.
    """
    new: list[Hosts] = [(host,) for host in hosts if (host,) not in results]
    if new:
        return HostSearch(undecided=tuple(hosts), next_jobs=tuple(new))
    passed = [host for host in hosts if results[host,] is Status.PASS]
    failed = [host for host in hosts if results[host,] in _FAULTS]
    if not passed:
        return HostSearch(undecided=tuple(hosts), fails_everywhere=int(len(failed) > 1))
    retries = [(passed[(number + step) % len(passed)], host) for number, host in enumerate(failed) for step in (0, 1)]
    if with_pairs and (new := _not_run([*_ring(passed), *retries], results)):
        return HostSearch(undecided=tuple(hosts), next_jobs=_disjoint(new))
    bad = [
        host
        for host in failed
        if _is_always_at_fault([_result(host, other, results) for other in passed], with_pairs=with_pairs)
    ]
    pairs = {pair: status for pair, status in results.items() if len(pair) > 1}
    working = [host for host in passed if any(host in pair and pairs[pair] is Status.PASS for pair in pairs)]
    failing = [pair for pair in pairs if pairs[pair] in _FAULTS and not set(pair) - set(passed)]
    extra = []
    for host in passed if working else ():
        if host in working or not any(host in pair for pair in failing):
            continue
        proof = [other for other in working if _result(host, other, results) in _FAULTS]
        if len(proof) >= _PROOF:
            bad.append(host)
        else:
            extra += _not_run([(host, other) for other in working], results)[: _PROOF - len(proof)]
    links = [pair for pair in failing if not set(pair) - set(working)]
    doubted = {host for pair in failing if not set(pair) & set(bad) for host in pair}
    needs_pair = with_pairs and len(passed) > 1
    good = [host for host in passed if host not in {*bad, *doubted} and (host in working or not needs_pair)]
    return HostSearch(
        bad=tuple(host for host in hosts if host in bad),
        bad_pairs=tuple(links),
        good=tuple(good),
        undecided=tuple(host for host in hosts if host not in {*bad, *good}),
        next_jobs=_disjoint(extra),
        fails_everywhere=2 if failing and not working else 0,
    )


def _ring(hosts: Sequence[str]) -> Iterable[Hosts]:
    """Return the pairs of neighbours in a circle, so that each of three or more hosts is in two pairs."""
    return zip(hosts, [*hosts[1:], hosts[0]], strict=True)


def _not_run(pairs: Iterable[Hosts], results: Mapping[Hosts, Status]) -> list[Hosts]:
    """Return the pairs of two different hosts that no job has tested, each of them once."""
    known = {frozenset(job) for job in results}
    new = {frozenset(pair): pair for pair in reversed([*pairs])}
    return [pair for key, pair in reversed(new.items()) if key not in known and len(key) > 1]


def _result(host: str, other: str, results: Mapping[Hosts, Status]) -> Status | None:
    return results.get((host, other), results.get((other, host)))


def _is_always_at_fault(in_pairs: Sequence[Status | None], *, with_pairs: bool) -> bool:
    """Return whether a host that failed alone also failed in a pair, and passed in none."""
    return Status.PASS not in in_pairs and (not with_pairs or any(status in _FAULTS for status in in_pairs))


def _disjoint(pairs: Iterable[Hosts]) -> tuple[Hosts, ...]:
    """Return as many of the pairs, in their order, as have no host in common."""
    chosen: list[Hosts] = []
    for pair in pairs:
        if not any(set(pair) & set(other) for other in chosen):
            chosen.append(pair)
    return tuple(chosen)
