"""`nsa-harness run --distribute=idle`: run a launch on each idle node and on pairs of nodes, to find bad hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from nsa_harness.commands.engine_job import run_on_engine
from nsa_harness.commands.run import judge_attempts
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.commands.session import INTERRUPTED, Session, run_directory, session
from nsa_harness.commands.stored_job import engine_of
from nsa_harness.core.plan import EngineChoice, Launcher, RunSpec
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.schedule import Policy, is_interrupted, is_lost_to_cluster, needs_another_attempt
from nsa_harness.core.search.hosts import Hosts, HostSearch, search_hosts
from nsa_harness.engine.interface import Engine
from nsa_harness.errors import StoredRunError, UsageError
from nsa_harness.supervisor.launch.launcher import end_dead_runs
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.record import RunRecord, write_record
from nsa_harness.supervisor.storage.rundir import RunDir
from nsa_harness.texts.words import listing, plural

_PAIR = 2
_BAD, _UNDECIDED = 1, 125
_MAX_BYTES = 1 << 20


def run_distributed(request: RunRequest, choice: EngineChoice, engine: Engine) -> int:
    """Search for bad hosts with the one launch of `request`, print the answer, and return the exit code.

    The exit code is 0 if all idle nodes are good, 1 if a host or a pair is bad, and otherwise 125.
    """
    hosts, spec = _stored_or_new(request, engine)
    end_dead_runs()
    with run_directory(request.options, request.resume_in) as run:
        before = _by_job(run, judge_attempts(run)) if request.resume_in is not None else {}
        plan = tuple(_spec_of(spec, job) for job in before)
        with session(
            run, request.options, plan or (spec,), in_parallel=request.jobs != 1, policy=request.policy,
            jobs=request.jobs, engine=choice,
        ) as running:  # fmt: skip
            run.directory.write(
                run.hosts, json_text(StoredSearch(hosts=hosts, scenario=spec.scenario), indent=1) + "\n"
            )
            search = _Search(
                session=running, request=request, choice=choice, spec=spec, hosts=hosts, outcomes=before
            )  # fmt: skip
            found = search.carry_out()
            outcomes = [one for attempts in search.outcomes.values() for one in attempts]
            report = running.write_documents(outcomes)
            running.broadcast(lambda listener: listener.on_done(report, run.path))
            lines = [*table(hosts, search.results), *answer(hosts, search.results, found)]
            for line in lines:
                print(line, file=sys.stderr if request.options.json else sys.stdout, flush=True)
            _append_hosts(run, lines)
            if running.interrupted:
                return INTERRUPTED
            is_bad = bool(found.bad or found.bad_pairs)
            word = "BAD" if is_bad else "GOOD" if found.good == hosts else "UNDECIDED"
            running.broadcast(lambda listener: listener.on_answer(word, "hosts", lines))
    return _BAD if is_bad else 0 if found.good == hosts else _UNDECIDED


@dataclass(frozen=True, kw_only=True)
class StoredSearch:
    """The contents of hosts.json: what a search compares. Its results are those of its jobs."""

    schema: int = 1
    hosts: Hosts
    scenario: str  # the name of the launch, without hosts


def _stored_or_new(request: RunRequest, engine: Engine) -> tuple[Hosts, RunSpec]:
    """Return the hosts to compare and the launch. Raise UsageError if there is not one launch, or nothing to compare.

    A search that is resumed compares the same hosts again.
    """
    specs = [spec for spec in request.specs if isinstance(spec, RunSpec)]
    stored = None if request.resume_in is None else stored_host_search(RunDir(request.resume_in))
    if stored is not None and specs:
        return stored.hosts, replace(specs[0], scenario=stored.scenario)
    if len(request.specs) != 1 or not specs:
        raise UsageError(f"--distribute runs one launch on each node, and {len(specs)} can run; name one script")
    hosts = tuple(engine.idle_nodes())
    if len(hosts) < _PAIR:
        raise UsageError(f"--distribute=idle compares nodes, and {plural(len(hosts), 'node')} of the engine is idle")
    return hosts, specs[0]


def stored_host_search(run: RunDir) -> StoredSearch | None:
    """Return the search for bad hosts that a run made, or None. Raise StoredRunError if hosts.json is damaged."""
    try:
        return type_adapter(StoredSearch).validate_json(run.directory.read_whole_file(run.hosts, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoredRunError(f"{run.hosts}: cannot be read: {str(error).partition(chr(10))[0]}") from None


def append_stored_hosts(run: RunDir, record: RunRecord, outcomes: Sequence[Outcome]) -> None:
    """Append the hosts to SUMMARY.md of a stored run, if it was a search for bad hosts."""
    stored = stored_host_search(run)
    specs = [spec for spec in record.plan if isinstance(spec, RunSpec)]
    if stored is None or not specs:
        return
    results = _results(_by_job(run, outcomes), record.policy)
    found = search_hosts(stored.hosts, results, with_pairs=_can_be_divided(specs[0]))
    _append_hosts(run, [*table(stored.hosts, results), *answer(stored.hosts, results, found)])


def _by_job(run: RunDir, outcomes: Sequence[Outcome]) -> dict[Hosts, list[Outcome]]:
    """Return the outcomes of a stored run by the hosts of their jobs, in the order of the attempts."""
    by_job: dict[Hosts, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.attempt):
        with suppress(StoredRunError):
            choice = engine_of(run.attempt(outcome.spec.scenario, outcome.attempt))
            if choice is not None and choice.only:
                by_job.setdefault(choice.only, []).append(outcome)
    return by_job


def _append_hosts(run: RunDir, lines: Sequence[str]) -> None:
    run.directory.append(run.summary, "\n".join(["", "## Hosts", "", *(f"    {line}" for line in lines), ""]))


def _results(outcomes: Mapping[Hosts, Sequence[Outcome]], policy: Policy) -> dict[Hosts, Status]:
    """Return the status of each job that needs no further attempt."""
    return {
        job: status_of(attempts)
        for job, attempts in outcomes.items()
        if not needs_another_attempt(policy, _counted(attempts))
    }


def _counted(attempts: Sequence[Outcome]) -> list[Outcome]:
    """Return the attempts without those that the user interrupted, which are made again."""
    return [outcome for outcome in attempts if not is_interrupted(outcome)]


def _can_be_divided(spec: RunSpec) -> bool:
    return spec.launcher is not Launcher.PLAIN and spec.ranks % _PAIR == 0


def _spec_of(spec: RunSpec, job: Hosts) -> RunSpec:
    return replace(spec, scenario=f"{spec.scenario}@{job_name(job)}")


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
        return _results(self.outcomes, self.request.policy)

    def carry_out(self) -> HostSearch:
        """Run jobs until nothing more can be found out, or until the user interrupts."""
        with_pairs = _can_be_divided(self.spec)
        if not with_pairs:
            print("note: no pairs of nodes are tested, because the launch cannot be divided in two", file=sys.stderr)
        with ThreadPoolExecutor(max_workers=self.request.jobs or len(self.hosts)) as pool:
            while True:
                found = search_hosts(self.hosts, self.results, with_pairs=with_pairs)
                if not found.next_jobs or self.session.interrupted:
                    return found
                specs = [_spec_of(self.spec, job) for job in found.next_jobs]
                redacted = [self.session.run.redaction.spec(spec) for spec in specs]
                self.session.broadcast(lambda listener: listener.on_plan(self.session.facts, redacted))  # noqa: B023
                self._store_plan(found.next_jobs)
                list(pool.map(self._run, found.next_jobs, specs))

    def _store_plan(self, next_jobs: Sequence[Hosts]) -> None:
        """Add jobs to the plan in run.json, so that a run that is killed can be resumed."""
        for job in next_jobs:
            self.outcomes.setdefault(job, [])
        plan = tuple(_spec_of(self.spec, job) for job in self.outcomes)
        self.session.record = replace(self.session.record, plan=plan)
        write_record(self.session.run, self.session.record)

    def _run(self, job: Hosts, spec: RunSpec) -> None:
        attempts = self.outcomes[job]
        choice = replace(self.choice, nodes=len(job), only=job)
        while not self.session.interrupted and needs_another_attempt(self.request.policy, _counted(attempts)):
            number = max((outcome.attempt for outcome in attempts), default=0) + 1
            attempts.append(run_on_engine(self.session, spec, number, choice))
            self.session.announce(attempts[-1])


def status_of(attempts: Sequence[Outcome]) -> Status:
    """Return the status of a job after all its attempts. It is an ERROR if they disagree or all were lost."""
    counted = [one for one in _counted(attempts) if not is_lost_to_cluster(one)]
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
