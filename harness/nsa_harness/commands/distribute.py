"""`nsa-harness run --distribute=idle`: run a launch on each idle node and on pairs of nodes, to find bad hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from nsa_harness.commands.engine_job import run_on_engine
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.commands.session import INTERRUPTED, Session, run_directory, session
from nsa_harness.core.plan import EngineChoice, Launcher, RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.schedule import is_lost_to_cluster, needs_another_attempt
from nsa_harness.core.search.hosts import Hosts, HostSearch, search_hosts
from nsa_harness.engine.interface import Engine
from nsa_harness.errors import UsageError
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.texts.words import listing, plural

_PAIR = 2
_BAD, _UNDECIDED = 1, 125


def run_distributed(request: RunRequest, choice: EngineChoice, engine: Engine) -> int:
    """Search for bad hosts with the one launch of `request`, print the answer, and return the exit code.

    The exit code is 0 if all idle nodes are good, 1 if a host or a pair is bad, and otherwise 125.
    """
    specs = [spec for spec in request.specs if isinstance(spec, RunSpec)]
    if len(request.specs) != 1 or not specs:
        raise UsageError(f"--distribute runs one launch on each node, and {len(specs)} can run; name one script")
    hosts = tuple(engine.idle_nodes())
    if len(hosts) < _PAIR:
        raise UsageError(f"--distribute=idle compares nodes, and {plural(len(hosts), 'node')} of the engine is idle")
    end_dead_runs()
    # The plan stays empty, because a resumed run could not continue the search.
    with (
        run_directory(request.options) as run,
        session(run, request.options, (), in_parallel=request.jobs != 1, jobs=request.jobs, engine=choice) as running,
    ):
        search = _Search(session=running, request=request, choice=choice, spec=specs[0], hosts=hosts)
        found = search.carry_out()
        report = running.write_documents([one for attempts in search.outcomes.values() for one in attempts])
        running.broadcast(lambda listener: listener.on_done(report, run.path))
        lines = [*table(hosts, search.results), *answer(hosts, search.results, found)]
        for line in lines:
            print(line, file=sys.stderr if request.options.json else sys.stdout, flush=True)
        run.directory.append(run.summary, "\n".join(["", "## Hosts", "", *(f"    {line}" for line in lines), ""]))
        if running.interrupted:
            return INTERRUPTED
        is_bad = bool(found.bad or found.bad_pairs)
        word = "BAD" if is_bad else "GOOD" if found.good == hosts else "UNDECIDED"
        running.broadcast(lambda listener: listener.on_answer(word, "hosts", lines))
    return _BAD if is_bad else 0 if found.good == hosts else _UNDECIDED


@dataclass(kw_only=True)
class _Search:
    """The jobs of a search for bad hosts, and their outcomes so far."""

    session: Session
    request: RunRequest
    choice: EngineChoice
    spec: RunSpec
    hosts: Hosts
    outcomes: dict[Hosts, list[Outcome]] = field(default_factory=dict)

    @property
    def results(self) -> dict[Hosts, Status]:
        return {job: status_of(outcomes) for job, outcomes in self.outcomes.items() if outcomes}

    def carry_out(self) -> HostSearch:
        """Run jobs until nothing more can be found out, or until the user interrupts."""
        with_pairs = self.spec.launcher is not Launcher.PLAIN and self.spec.ranks % _PAIR == 0
        if not with_pairs:
            print("note: no pairs of nodes are tested, because the launch cannot be divided in two", file=sys.stderr)
        with ThreadPoolExecutor(max_workers=self.request.jobs or len(self.hosts)) as pool:
            while True:
                found = search_hosts(self.hosts, self.results, with_pairs=with_pairs)
                if not found.next_jobs or self.session.interrupted:
                    return found
                specs = [
                    replace(self.spec, scenario=f"{self.spec.scenario}@{job_name(job)}") for job in found.next_jobs
                ]
                redacted = [self.session.run.redaction.spec(spec) for spec in specs]
                self.session.broadcast(lambda listener: listener.on_plan(self.session.facts, redacted))  # noqa: B023
                self.outcomes |= {job: [] for job in found.next_jobs}
                list(pool.map(self._run, found.next_jobs, specs))

    def _run(self, job: Hosts, spec: RunSpec) -> None:
        attempts = self.outcomes[job]
        choice = replace(self.choice, nodes=len(job), only=job)
        while not self.session.interrupted and needs_another_attempt(self.request.policy, attempts):
            attempts.append(run_on_engine(self.session, spec, len(attempts) + 1, choice))
            self.session.announce(attempts[-1])


def status_of(attempts: Sequence[Outcome]) -> Status:
    """Return the status of a job after all its attempts. It is an ERROR if they disagree or all were lost."""
    counted = [one for one in attempts if not is_lost_to_cluster(one)]
    found = {
        Status.FAIL if one.verdict.status is Status.PASS and not one.expected else one.verdict.status for one in counted
    }
    return found.pop() if len(found) == 1 else Status.ERROR


def job_name(job: Hosts) -> str:
    return "+".join(host.replace("/", "_") for host in job)


def table(hosts: Hosts, results: dict[Hosts, Status]) -> Iterator[str]:
    """Yield a line for each host, with the result of each of its jobs."""
    width = max(map(len, ("node", *hosts)))
    yield f"{'node':{width}}  alone      in pairs"
    for host in hosts:
        pairs = [
            f"{status.value} with {next(other for other in job if other != host)}"
            for job, status in results.items()
            if len(job) == _PAIR and host in job
        ]
        alone = results[host,].value if (host,) in results else "-"
        yield f"{host:{width}}  {alone:9}  {', '.join(pairs) or '-'}"


def answer(hosts: Hosts, results: dict[Hosts, Status], found: HostSearch) -> Iterator[str]:
    """Yield a sentence for each bad host and each bad pair, or one that says why no host is accused."""

    def jobs(*names: str, size: int = 0) -> str:
        """Return the results of the jobs with all these hosts, as in "n1+n2: FAIL"."""
        chosen = [job for job in results if set(names) <= set(job) and size in (0, len(job))]
        chosen = [job for job in chosen if results[job] is not Status.ERROR]  # which proves nothing
        return ", ".join(f"{job_name(job)}: {results[job].value}" for job in chosen)

    for host in found.bad:
        if results[host,] is Status.PASS:
            yield f"{host} is bad: it passes alone, but fails with other nodes ({jobs(host)}), and they pass without it"
            continue
        others = listing([f"{other}: PASS" for other in hosts if results[other,] is Status.PASS])
        yield f"{host} is bad: every job with it fails ({jobs(host)}), and other nodes pass without it ({others})"
    for first, second in found.bad_pairs:
        proof = f"they fail together ({jobs(first, second)}), but pass alone and with other nodes"
        yield f"the connection between {first} and {second} is bad: {proof}"
    if found.fails_everywhere == 1:
        yield f"no host is accused, because the program fails on every node ({jobs(size=1)}); look at the program"
    elif found.fails_everywhere == _PAIR:
        reason = f"the program fails on every pair of nodes that pass alone ({jobs(size=_PAIR)})"
        yield f"no host is accused, because {reason}; look at the program and the settings of the network"
    elif found.good == hosts:
        yield f"no host is bad: all {len(hosts)} idle nodes pass ({jobs()})"
    elif not found.bad and not found.bad_pairs:
        yield f"no host is accused, but {listing(found.undecided)} could not be decided"
