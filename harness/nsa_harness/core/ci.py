"""The nightly: its jobs, as GitHub's `matrix: include` takes them, and their reports as one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Report, Status, counts, exit_code
from nsa_harness.core.scenario.yaml_tree import shown
from nsa_harness.errors import UsageError, did_you_mean

# The labels of the runners stand here and nowhere else. `--runner` replaces those of the GPU runners; the nightly takes
# it from the repository variable NSA_GPU_RUNNER.
CPU_RUNNER = ("ubuntu-latest",)
GPU_RUNNER = "self-hosted,linux,gpu-{gpus}"

TORCH_VERSIONS = ("2.11", "2.13")  # the oldest and the newest that is supported
BACKENDS = ("gloo", "nccl", "auto")
GPUS = (1, 2)
SHARDS = 2
MOST_GPUS = 16
MOST_JOBS = 256  # GitHub starts no more from one matrix

AROUND_RUN_S = 60.0  # of one scenario, beyond its deadline: launch, stacks, the end of its processes, the judgement
AROUND_JOB_MINUTES = 50  # of one job, beyond its run: the steps' own limits for install, doctor, tests and upload
MOST_MINUTES = 360  # GitHub ends a hosted job then, whatever it asked for
NOT_JUDGED = 125
_WORST_FIRST = (Status.HANG, Status.FAIL, Status.PASS, Status.ERROR, Status.SKIP)  # as the exit code weighs them

T = TypeVar("T")
Launch = RunSpec | Skip


@dataclass(frozen=True, kw_only=True)
class RunnerKind:
    """What decides which scenarios a runner can run."""

    backend: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What runners of one kind would launch, shard by shard, and the scenarios left out of it."""

    shards: tuple[tuple[Launch, ...], ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What was asked for; the product of all of it is the matrix."""

    tags: tuple[str, ...]
    shards: int
    torch: tuple[str, ...]
    gpus: tuple[int, ...]
    backends: tuple[str, ...]
    runner: str

    def kinds(self) -> Iterator[RunnerKind]:
        yield from (RunnerKind(backend=backend, gpus=gpus) for gpus in self.gpus for backend in self.backends)


@dataclass(frozen=True, kw_only=True)
class MatrixJob:
    """One entry of `include`; its fields are the keys."""

    name: str  # also a folder and the name of an artifact
    tags: str  # with spaces between them, as NSA_HARNESS_TAG takes them
    expression: str  # for -k: without the scenarios that name another backend; empty where there is none
    shard: str  # "2/4"
    backend: str
    torch: str
    gpus: int
    runner: tuple[str, ...]
    tests: str  # pytest's marker expression; empty where another job has run these tests
    run_minutes: int
    timeout_minutes: int


@dataclass(frozen=True, kw_only=True)
class JobMatrix:
    jobs: tuple[MatrixJob, ...]
    left_out: tuple[str, ...]  # each a sentence: what has no job, and why


def axes(
    *,
    tags: Sequence[str],
    shards: int | None,
    torch: str | None,
    gpus: str | None,
    backends: str | None,
    runner: str | None,
    cpu: bool,
) -> Axes:
    """The options, parsed. Raises UsageError with every mistake."""
    mistakes: list[str] = []
    if cpu and gpus is not None:
        mistakes.append(
            f"--cpu is the matrix without GPUs; --gpus {shown(gpus)} cannot go with it; give one of the two"
        )
    template = runner or GPU_RUNNER
    wanted = Axes(
        tags=tuple(dict.fromkeys(tags)) or ("plan",),
        shards=SHARDS if shards is None else shards,
        torch=_listed("--torch", torch, TORCH_VERSIONS[-1:] if cpu else TORCH_VERSIONS, _version, mistakes),
        gpus=(0,) if cpu else _listed("--gpus", gpus, GPUS, _gpu_count, mistakes),
        backends=_listed("--backend", backends, BACKENDS[:1] if cpu else BACKENDS[:2], _backend, mistakes),
        runner=template,
    )
    mistakes += [
        f"--runner {shown(template)}: {shown(label)} is no label; expected labels of letters, digits and _ . - "
        "with commas between them; {gpus} stands for the number of GPUs"
        for label in (part.strip() for part in template.split(","))
        if not re.fullmatch(r"(?:[A-Za-z0-9_.-]|\{gpus\})+", label)
    ]
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return wanted


def of_another_backend(launches: Sequence[Launch], backend: str) -> tuple[str, ...]:
    """The scenarios that name a backend other than this one: run over it they would ask another question."""
    named = {launch.scenario: dict(launch.settings).get("needs.backend", backend) for launch in launches}
    return tuple(name for name, own in named.items() if own != backend)


def without(names: Sequence[str]) -> str | None:
    """The -k expression that leaves these scenarios out, and those whose names contain one of theirs."""
    return " and ".join(f"not {name}" for name in names) or None


def matrix(wanted: Axes, offers: Mapping[RunnerKind, Offer]) -> JobMatrix:
    """The jobs, without those that could only skip.

    Raises UsageError where no job is left, where a job cannot end in time, and where there are too many.
    """
    jobs: list[MatrixJob] = []
    left_out: list[str] = []
    for kind in wanted.kinds():
        offer = offers[kind]
        if offer.left_out:
            left_out.append(f"{_shown_kind(kind)} leaves out what names another backend: {', '.join(offer.left_out)}")
        for number, launches in enumerate(offer.shards, start=1):
            if reason := _only_skips(launches):
                left_out.append(f"shard {number}/{wanted.shards} of {_shown_kind(kind)} has no job: {reason}")
                continue
            jobs += (_job(wanted, kind, offer, number, version) for version in wanted.torch)
    _check(jobs, left_out)
    return JobMatrix(jobs=tuple(_with_tests(jobs)), left_out=tuple(left_out))


def _only_skips(launches: Sequence[Launch]) -> str | None:
    """Why these launches are worth no job, or None."""
    skips = [launch for launch in launches if isinstance(launch, Skip)]
    if len(skips) < len(launches):
        return None
    reasons = dict.fromkeys(f"{skip.scenario}: {skip.reason}" for skip in skips)
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"every scenario in it would be SKIP: {next(iter(reasons))}{more}"


def _job(wanted: Axes, kind: RunnerKind, offer: Offer, number: int, version: str) -> MatrixJob:
    tags, gpus = "+".join(wanted.tags), f"{kind.gpus}gpu" if kind.gpus else "cpu"
    minutes = _run_minutes(offer.shards[number - 1])
    return MatrixJob(
        name=f"{tags}-{number}of{wanted.shards}-{kind.backend}-{gpus}-torch{version}",
        tags=" ".join(wanted.tags),
        expression=without(offer.left_out) or "",
        shard=f"{number}/{wanted.shards}",
        backend=kind.backend,
        torch=version,
        gpus=kind.gpus,
        runner=_labels(wanted.runner, kind.gpus),
        tests="",
        run_minutes=minutes,
        timeout_minutes=minutes + AROUND_JOB_MINUTES,
    )


def _run_minutes(launches: Sequence[Launch]) -> int:
    """Longer than the harness itself can take: every run ends at its deadline, and one after the other."""
    limits = [launch.limits.deadline_s for launch in launches if isinstance(launch, RunSpec)]
    return math.ceil(sum((limit or 0.0) + AROUND_RUN_S for limit in limits) / 60)


def _check(jobs: Sequence[MatrixJob], left_out: Sequence[str]) -> None:
    if not jobs:
        raise UsageError("\n".join(["no job is left: a nightly of nothing would prove nothing", *left_out]))
    if len(jobs) > MOST_JOBS:
        raise UsageError(f"{len(jobs)} jobs, and GitHub starts {MOST_JOBS} at most; take fewer shards or versions")
    longest = max(jobs, key=lambda job: job.timeout_minutes)
    if longest.timeout_minutes > MOST_MINUTES:
        raise UsageError(
            f"{longest.name}: its scenarios may take {longest.run_minutes} minutes by their own deadlines, and with "
            f"{AROUND_JOB_MINUTES} for the other steps GitHub's limit of {MOST_MINUTES} ends it first; "
            "take more --shards, or lower limits.deadline_s"
        )


def _with_tests(jobs: Sequence[MatrixJob]) -> Iterator[MatrixJob]:
    """The tests that need a GPU run once for each torch version and number of GPUs, in the first job that can."""
    done: set[tuple[str, int]] = set()
    for job in jobs:
        where = (job.torch, job.gpus)
        marker = {0: "", 1: "gpu"}.get(job.gpus, "gpu or multi_gpu")
        yield job if where in done else replace(job, tests=marker)
        done.add(where)


def _labels(template: str, gpus: int) -> tuple[str, ...]:
    if not gpus:
        return CPU_RUNNER
    return tuple(label.strip().replace("{gpus}", str(gpus)) for label in template.split(","))


def _listed(
    option: str, text: str | None, default: tuple[T, ...], parse: Callable[[str], T], mistakes: list[str]
) -> tuple[T, ...]:
    """The values of a list with commas, each once; what is wrong goes to `mistakes`."""
    if text is None:
        return default
    values: list[T] = []
    for word in (part.strip() for part in text.split(",")):
        try:
            values.append(parse(word))
        except ValueError as error:
            mistakes.append(f"{option} {shown(text)}: {error}")
    return tuple(dict.fromkeys(values))


def _version(word: str) -> str:
    oldest = tuple(map(int, TORCH_VERSIONS[0].split(".")))
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3}){1,2}", word):
        raise ValueError(f"expected versions such as {','.join(TORCH_VERSIONS)}, got {shown(word)}")
    if tuple(map(int, word.split("."))) < oldest:
        raise ValueError(f"the harness needs torch {TORCH_VERSIONS[0]} or newer, got {shown(word)}")
    return word


def _gpu_count(word: str) -> int:
    if not re.fullmatch(r"\d{1,2}", word) or int(word) > MOST_GPUS:
        raise ValueError(f"expected numbers from 0 to {MOST_GPUS} such as 1,2, got {shown(word)}")
    return int(word)


def _backend(word: str) -> str:
    if word not in BACKENDS:
        hint = did_you_mean(word, BACKENDS)
        raise ValueError(f"expected {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {shown(word)}{hint}")
    return word


def _shown_kind(kind: RunnerKind) -> str:
    gpus = {0: "no GPU", 1: "1 GPU"}.get(kind.gpus, f"{kind.gpus} GPUs")
    return f"{kind.backend} with {gpus}"


@dataclass(frozen=True, kw_only=True)
class StoredReport:
    """A report and the job that left it."""

    job: str
    file: str
    report: Report


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A file that holds no report, or a place where one should be; never counted as anything else."""

    file: str
    why: str


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """Every run of one job together. Without a report there is no machine, and the exit code is 125."""

    job: str
    outcomes: tuple[Outcome, ...]
    machines: tuple[MachineFacts, ...]
    interrupted: bool
    exit_code: int
    remark: str  # why this job is red; empty when it is not

    @property
    def red(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, kw_only=True)
class NightSummary:
    """All jobs together. `reasons` says why the exit code is not 0, the worst first; empty when it is."""

    jobs: tuple[JobSummary, ...]
    missing: tuple[str, ...]  # jobs of the matrix that left no report
    unread: tuple[Unread, ...]
    exit_code: int
    reasons: tuple[str, ...]

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        """Every outcome that counts, with its job."""
        for job in self.jobs:
            yield from ((job.job, outcome) for outcome in job.outcomes if outcome.final)


@dataclass(frozen=True, kw_only=True)
class SkipReason:
    """The same scenario skipped for the same reason, on all its jobs."""

    scenario: str
    reason: str
    jobs: tuple[str, ...]


def night_summary(
    reports: Sequence[StoredReport], unread: Sequence[Unread] = (), expected_jobs: Sequence[str] = ()
) -> NightSummary:
    """`expected_jobs`: the names in the matrix, or nothing where it is unknown which jobs there should be."""
    by_job: dict[str, list[Report]] = {name: [] for name in expected_jobs}
    for item in reports:
        by_job.setdefault(item.job, []).append(item.report)
    jobs = [_job_summary(name, found) for name, found in by_job.items()]
    missing = tuple(job.job for job in jobs if not job.machines)
    code = exit_code(_together([item.report for item in reports]))
    reasons = tuple(_reasons(jobs, missing, unread))
    # What is missing or cannot be read was not judged, however well the rest went.
    return NightSummary(
        jobs=tuple(jobs),
        missing=missing,
        unread=tuple(unread),
        exit_code=NOT_JUDGED if reasons and code == 0 else code,
        reasons=reasons,
    )


def surprises(summary: NightSummary) -> tuple[tuple[str, Outcome], ...]:
    """What nobody expected, worst first."""
    found = [item for item in summary.outcomes() if _surprising(item[1])]
    return tuple(sorted(found, key=lambda item: _WORST_FIRST.index(item[1].verdict.status)))


def skip_reasons(summary: NightSummary) -> tuple[SkipReason, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for job, outcome in summary.outcomes():
        if outcome.verdict.status is Status.SKIP:
            found.setdefault((outcome.spec.scenario, outcome.verdict.summary), []).append(job)
    return tuple(
        SkipReason(scenario=scenario, reason=reason, jobs=tuple(jobs)) for (scenario, reason), jobs in found.items()
    )


def _surprising(outcome: Outcome) -> bool:
    return not outcome.expected or outcome.verdict.status is Status.ERROR


def _job_summary(name: str, reports: Sequence[Report]) -> JobSummary:
    whole = _together(reports)
    return JobSummary(
        job=name,
        outcomes=whole.outcomes,
        machines=tuple(dict.fromkeys(report.machine for report in reports)),
        interrupted=whole.interrupted,
        exit_code=exit_code(whole),
        remark=_remark(whole, left_a_report=bool(reports)),
    )


def _remark(whole: Report, *, left_a_report: bool) -> str:
    if not left_a_report:
        return "left no report"
    if not whole.outcomes:
        return "judged nothing" + (", interrupted" if whole.interrupted else "")
    if whole.interrupted:
        return "interrupted"
    if _all_skipped(whole.outcomes):
        return "everything was skipped"
    found = counts([outcome for outcome in whole.outcomes if _surprising(outcome)])
    return ", ".join(_unexpected(status, number) for status, number in found.items() if number)


def _unexpected(status: Status, number: int) -> str:
    return f"{number} ERROR" if status is Status.ERROR else f"{number} unexpected {status.value}"


def _together(reports: Sequence[Report]) -> Report:
    """One report, so that one rule gives every exit code."""
    return Report(
        run_id="",
        harness="",
        machine=MachineFacts(host="", cpus=0, gpus=(), torch=None),
        command="",
        interrupted=any(report.interrupted for report in reports),
        outcomes=tuple(outcome for report in reports for outcome in report.outcomes),
    )


def _all_skipped(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.verdict.status is Status.SKIP for outcome in outcomes if outcome.final)


def _reasons(jobs: Sequence[JobSummary], missing: Sequence[str], unread: Sequence[Unread]) -> Iterator[str]:
    whole = [outcome for job in jobs for outcome in job.outcomes]
    found = counts([outcome for outcome in whole if _surprising(outcome)])
    yield from (_unexpected(status, found[status]) for status in _WORST_FIRST if found[status])
    if not jobs:
        yield "no report at all"
    elif whole and _all_skipped(whole):
        yield "everything was skipped"
    else:
        yield from _counted([job for job in jobs if job.remark == "everything was skipped"], "skipped everything")
    yield from _counted([job for job in jobs if job.interrupted], "interrupted")
    yield from _counted([job for job in jobs if job.machines and not job.outcomes], "judged nothing")
    yield from _counted(missing, "left no report")
    if unread:
        yield f"{len(unread)} file{'s' if len(unread) > 1 else ''} unreadable"


def _counted(jobs: Sequence[object], what: str) -> Iterator[str]:
    if jobs:
        yield f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} {what}"
