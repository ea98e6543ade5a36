"""Build the Outcome of an attempt from its evidence, judgement and diagnosis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from statistics import median

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import DiagnosisContext, meshes
from nsa_harness.core.diagnosis.engine import Diagnosis
from nsa_harness.core.evidence.evidence import Ending, Evidence, RankEvidence, RankSnapshot
from nsa_harness.core.evidence.host import sigterm_reaction
from nsa_harness.core.evidence.stacks import recomputed_frame
from nsa_harness.core.evidence.steps import step_p90_s, step_s
from nsa_harness.core.outcome.callstacks import call_stacks
from nsa_harness.core.outcome.expectations import criteria, is_expected, missed_expectations
from nsa_harness.core.outcome.last_shared import last_shared_call
from nsa_harness.core.outcome.memory import memory_at
from nsa_harness.core.outcome.reproduction import after_slow
from nsa_harness.core.outcome.rerun_findings import rerun_findings
from nsa_harness.core.outcome.wording import Meshes, coordinates, number_of, rank_names, shorten
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import (
    RUNS_ON,
    UNWATCHED,
    Artifact,
    Culprit,
    Facts,
    Finding,
    Outcome,
    RankStatus,
    RankSummary,
    SpecSummary,
    Status,
    StepCost,
    Timing,
    Usage,
    Verdict,
)
from nsa_harness.core.verdict.motion import rank_stack, task_of
from nsa_harness.core.verdict.verdict import Judgement, exit_text
from nsa_harness.core.verdict.wait import Wait, WaitKind
from nsa_harness.core.verdict.wait_graph import post_mortem_graph, wait_graph_between

_DTYPES = {"torch.float32": "fp32", "torch.float64": "fp64", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def own_exit_status(rank: RankEvidence) -> int | None:
    return rank.exit.status if rank.exit and not rank.exit.during_teardown else None


def passed_checks(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Yield a phrase for each check that passed, such as "losses finite on every rank"."""
    losses = [rank.last_loss for rank in evidence.ranks]
    if losses and all(loss is not None and math.isfinite(loss) for loss in losses):
        yield "losses finite on every rank"
    traces = [rank.traces for rank in evidence.ranks]
    if traces and all(trace.missing_count == 0 for trace in traces):
        yield f"{traces[0].gradient_count} of {traces[0].gradient_count} gradients on every rank"
    buckets = evidence.bucket_order
    if buckets is not None and buckets.difference is None:
        yield f"{number_of(buckets.count, 'bucket')} of DDP ready in the same order on every rank"
    status_files = [rank.status_file for rank in evidence.ranks]
    known_files = [status_file for status_file in status_files if status_file is not None]
    complete = len({status_file.enqueued for status_file in known_files}) == 1 and all(
        b.enqueued == b.completed for b in known_files
    )
    if len(known_files) == len(status_files) and complete and known_files[0].enqueued:
        yield f"{known_files[0].completed} of {known_files[0].enqueued} collectives completed, the same on every rank"
    if (
        verdict.status is not Status.HANG
        and evidence.ranks
        and all(own_exit_status(rank) == 0 for rank in evidence.ranks)
    ):
        yield "every rank exited 0"
    if evidence.is_attached and (snapshots := _complete_snapshots(evidence)):
        yield f"stacks of every rank, in {number_of(snapshots, 'look')}"
    is_over = evidence.ending is not Ending.NOT_LAUNCHED and not _runs_on(evidence)
    if is_over and not evidence.leftovers and evidence.unkillable == ():
        yield "no process left"
    if evidence.is_attached:
        yield from _checked_by_kernel(evidence)


def _checked_by_kernel(evidence: Evidence) -> Iterator[str]:
    """Yield a phrase for each passed check that relies on process data from the operating system."""
    processes = [rank.process for snapshot in evidence.snapshots[-1:] for rank in snapshot.ranks]
    alive = [process for process in processes if process is not None and process.state not in "ZX"]
    if evidence.ranks and len(alive) == len(evidence.ranks):
        yield "every rank is alive"
    if alive and not any(process.state in "Tt" or process.is_frozen for process in alive):
        yield "none is stopped, frozen or held by a debugger"
    if evidence.memory is not None and evidence.memory.oom_kills == 0:
        yield "nothing was killed for want of memory"


def _complete_snapshots(evidence: Evidence) -> int:
    return sum(
        len(snapshot.ranks) == len(evidence.ranks) and all(rank_stack(rank) for rank in snapshot.ranks)
        for snapshot in evidence.snapshots
    )


def _runs_on(evidence: Evidence) -> bool:
    """Return whether the job continues to run after the attempt, because nsa-harness only observed it."""
    return evidence.ending is Ending.DETACHED or (evidence.is_observed and not evidence.teardown_s)


_FILES = frozenset({WaitKind.IO, WaitKind.FILE_LOCK, WaitKind.LOADER, WaitKind.CHILD, WaitKind.PIPE})


def ruled_out_causes(evidence: Evidence, judgement: Judgement, codes: Collection[str] = ()) -> Iterator[str]:
    """Yield the kinds of causes, such as "network", that a proven hang rules out."""
    if judgement.status is not Status.HANG or judgement.proof is None:
        return
    kinds = {wait.kind for wait in judgement.proof.graph.waits}
    if not kinds & {WaitKind.COMPUTE, WaitKind.COMPILE}:
        yield "slow (no rank computes)"
    if WaitKind.TRANSPORT not in kinds:
        yield "network (the ranks are not all in the same collective)"
    if not kinds & _FILES and Cause.INPUT_BOUND not in codes:
        yield "data and files (no rank is blocked in a read or write)"
    if not any(rank.exception for rank in evidence.ranks):
        yield "errors (no rank raised, none died)"


def rank_statuses(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> Iterator[RankStatus]:
    """Yield what each rank waited for or did last, unless the run is a PASS without waits."""
    waits = judgement.proof.graph.waits if judgement.proof else _unproven_waits(evidence, judgement)
    if not waits:
        if judgement.status is not Status.PASS:
            yield from (_last_status(evidence, rank, culprit) for rank in evidence.ranks)
        return
    places = meshes(evidence)
    for wait in sorted(waits, key=lambda wait: wait.rank):
        yield RankStatus(
            rank=wait.rank,
            blocked_in=wait.blocked_in,
            waits_for=_waits_for(wait, places),
            no_progress_s=_no_progress_s(evidence, wait.rank),
            is_culprit=_is_culprit(wait.rank, culprit),
            coordinates=coordinates(wait.rank, places),
        )


def _unproven_waits(evidence: Evidence, judgement: Judgement) -> Sequence[Wait]:
    """Return what the ranks of a job that was only observed wait for. This does not prove a hang."""
    last_two = evidence.snapshots[-2:]
    if evidence.ending is Ending.POST_MORTEM and judgement.status is Status.ERROR:
        return post_mortem_graph(evidence).waits
    if evidence.ending is not Ending.DETACHED or judgement.status is not Status.ERROR or len(last_two) < 2:
        return ()
    return wait_graph_between(last_two[0], last_two[1], (), evidence.backend).waits


_OUTSIDE = {
    WaitKind.STORE: "a key of the store",
    WaitKind.FILE_LOCK: "another process",
    WaitKind.PIPE: "a reader of the pipe",
    WaitKind.LOADER: "a data loader worker",
    WaitKind.COMPILE: "nobody",
    WaitKind.COMPUTE: "nobody",
    WaitKind.GONE: "nobody",
    WaitKind.LOCK: "its own process",
    WaitKind.STOPPED: "SIGCONT",
    WaitKind.SLEEP: "the clock",
    WaitKind.CHILD: "a child process",
}


def _last_status(evidence: Evidence, rank: RankEvidence, culprit: Culprit | None) -> RankStatus:
    event = rank.status_file.latest_training_event or rank.status_file.latest_event if rank.status_file else None
    # A module without a name has a number, which is not shown.
    place = f"{event.kind} {'' if event.name.isdigit() else event.name}".strip() if event else "nothing recorded"
    place = _SHUTDOWN if event and event.kind == "exit" else place
    exited = rank.exit is not None and not rank.exit.during_teardown
    blocked_in = _after_its_end(rank, rank.exit.status, place) if rank.exit and exited else place
    return RankStatus(
        rank=rank.rank,
        blocked_in=_ending_from_files(rank) if evidence.ending is Ending.POST_MORTEM else blocked_in,
        waits_for="",
        no_progress_s=None if exited else _no_progress_s(evidence, rank.rank),
        is_culprit=_is_culprit(rank.rank, culprit),
        coordinates=coordinates(rank.rank, meshes(evidence)),
    )


def _after_its_end(rank: RankEvidence, status: int | None, place: str) -> str:
    """Return how a rank ended, and where it was before. Its shutdown says nothing, so its exception is shown then."""
    if place != _SHUTDOWN:
        return f"{exit_text(status)} · last in {place}"
    if rank.exception is not None:
        return f"raised {rank.exception.type} · {exit_text(status)}"
    return f"{exit_text(status)} during interpreter shutdown" if (status or 0) < 0 else exit_text(status)


_SHUTDOWN = "its exit"


def _ending_from_files(rank: RankEvidence) -> str:
    exception_text = f"raised {rank.exception.type}" if rank.exception else ""
    ending = exit_text(rank.exit.status) if rank.exit else ""
    last_line = f"last line: {shorten(rank.last_line, _MAX_LAST_LINE)}" if rank.last_line and not exception_text else ""
    return " · ".join(filter(None, (exception_text, ending, last_line))) or "not known: no file names this rank"


_MAX_LAST_LINE = 100  # characters


def _waits_for(wait: Wait, places: Meshes) -> str:
    if wait.peers:
        return rank_names(wait.peers, places)
    if wait.child is not None:
        return f"process {wait.child.deepest.pid}"
    if wait.kind is WaitKind.NOTHING:
        return ""
    return _OUTSIDE.get(wait.kind, "outside the job")


def _no_progress_s(evidence: Evidence, rank: int) -> float | None:
    status_file = evidence.of_rank[rank].status_file if rank in evidence.of_rank else None
    if status_file is None or status_file.latest_event is None:
        return _idle_s(evidence, rank) if evidence.is_attached else None
    return max(0.0, evidence.ended_s - status_file.latest_event.at_s)


def _idle_s(evidence: Evidence, rank: int) -> float | None:
    snapshot = evidence.snapshots[-1].of_rank.get(rank) if evidence.snapshots else None
    task = task_of(snapshot, rank_stack(snapshot)) if snapshot else None
    return task.idle_s if task else None


def _is_culprit(rank: int, culprit: Culprit | None) -> bool:
    return culprit is not None and rank in culprit.ranks


def summarize_rank(rank: RankEvidence) -> RankSummary:
    traces = rank.traces
    gradients = (
        None
        if traces.gradient_count is None
        else f"{traces.gradient_count} of {traces.gradient_count + (traces.missing_count or 0)}"
    )
    return RankSummary(
        rank=rank.rank,
        loss=rank.last_loss,
        gradients=gradients,
        buckets=_buckets(traces.buckets),
        longest_gap_s=max(rank.status_file.gaps_s.values(), default=None) if rank.status_file else None,
        peak_rss_bytes=rank.peak_rss_bytes,
        step_s=step_s(rank.status_file) if rank.status_file else None,
        step_p90_s=step_p90_s(rank.status_file) if rank.status_file else None,
        own_s=median(times.min_own_s for times in rank.health.step_times)
        if rank.health and rank.health.step_times
        else None,
    )


def _buckets(buckets: Sequence[tuple[int, str]]) -> str | None:
    if not buckets:
        return None
    elements = sum(count for count, _ in buckets)
    dtype = Counter(name for _, name in buckets).most_common(1)[0][0]
    return f"{len(buckets)} · {elements / 1e6:.1f} M {_DTYPES.get(dtype, dtype)}"


def ending_text(evidence: Evidence) -> str:
    if evidence.ending is Ending.NOT_LAUNCHED:
        return "nothing was started"
    if evidence.ending is Ending.POST_MORTEM:
        return UNWATCHED
    leftover_text = _leftover_text(evidence.unkillable)
    if _runs_on(evidence):
        was_running = evidence.is_attached or evidence.ending is Ending.DETACHED
        return RUNS_ON if was_running or evidence.launcher is None else "not by us"
    if evidence.ending is Ending.EXITED and not evidence.leftovers:
        return f"by itself, {leftover_text}"
    return f"SIGTERM, {evidence.teardown_s:.1f} s, {leftover_text}"


def _leftover_text(unkillable: tuple[str, ...] | None) -> str:
    if unkillable is None:
        return "nobody saw whether a process is left"
    return (
        f"{number_of(len(unkillable), 'process', 'processes')} left: {shorten('; '.join(unkillable))}"
        if unkillable
        else "no process left"
    )


def outcome_of(
    spec: RunSpec,
    evidence: Evidence,
    judgement: Judgement,
    diagnosis: Diagnosis,
    *,
    findings: Sequence[Finding],
    attempt: int,
    directory: str,
    artifacts: Sequence[Artifact],
    metrics: Mapping[str, float],
    repeat: str | None,
    other_misses: Sequence[Facts] = (),
) -> Outcome:
    """Return everything that the reports show about one attempt, with the program's own `metrics`.

    `other_misses`: the facts of expectations that were not met, besides those that follow from the evidence.
    """
    codes = frozenset(finding.code for finding in findings)
    misses = missed_expectations(spec.expect, evidence, metrics, codes, other_misses)
    misses = misses if judgement.status is Status.PASS else ()
    context = diagnosis.context or DiagnosisContext(evidence=evidence, judgement=judgement)
    verdict = _verdict(judgement, diagnosis, findings, misses)
    # Proofs are paths in the attempt's directory; reports name them from the run's directory.
    all_findings = tuple(
        replace(finding, proof=tuple(f"{directory}/{path}" for path in finding.proof))
        for finding in (*misses, *findings, *rerun_findings(spec, evidence))
    )
    culprit = diagnosis.culprit
    return Outcome(
        spec=summarize_spec(spec),
        attempt=attempt,
        verdict=verdict,
        expected=is_expected(spec.expect, verdict.status, verdict.cause, codes),
        phase=_phase(evidence, culprit),
        culprit=culprit,
        victims=_victims(evidence, culprit),
        last_step={rank.rank: _steps_done(rank) for rank in evidence.ranks},
        exit_codes={rank.rank: own_exit_status(rank) for rank in evidence.ranks},
        findings=all_findings,
        trouble=evidence.trouble,
        timing=_timing(evidence, judgement, culprit),
        usage=_usage(evidence, metrics),
        dir=directory,
        passed_checks=tuple(passed_checks(evidence, verdict)),
        ruled_out_causes=tuple(ruled_out_causes(evidence, judgement, codes)),
        rank_statuses=tuple(rank_statuses(evidence, judgement, culprit)),
        rank_summaries=tuple(map(summarize_rank, evidence.ranks)),
        metrics=dict(metrics),
        artifacts=tuple(artifacts),
        proof_reason=judgement.proof.reason if judgement.proof and verdict.status is Status.HANG else None,
        ending_text=ending_text(evidence),
        repeat_command=repeat,
        next_command=after_slow(spec, evidence, codes),
        missing_gradients=_missing_gradients(evidence),
        last_agreed=last_shared_call(context) if verdict.status is Status.HANG else None,
        raised=_raised(judgement) if verdict.status is Status.FAIL else "",
        stacks=tuple(
            replace(stack, proof=stack.proof and f"{directory}/{stack.proof}")
            for stack in call_stacks(evidence, judgement, culprit)
        ),
        divergence=diagnosis.divergence,
        cost=_cost(evidence),
        memory=tuple(memory_at(evidence, judgement)),
        signals=dict(signal_reactions(evidence, judgement)),
        nccl=evidence.nccl,
    )


def signal_reactions(evidence: Evidence, judgement: Judgement) -> Iterator[tuple[int, str]]:
    """Yield each hung rank with a phrase about how it handles signals, found without sending one."""
    if judgement.status is not Status.HANG or not evidence.snapshots:
        return
    for rank in evidence.snapshots[-1].ranks:
        reaction = sigterm_reaction(rank.process) if rank.process else ""
        if reaction:
            parts = (reaction, _how_stacks_were_read(rank), _reaction_to_signals(evidence, rank.pid))
            yield rank.rank, "; ".join(part for part in parts if part)


def _how_stacks_were_read(rank: RankSnapshot) -> str:
    if not rank.stacks:
        return "its stacks could not be read"
    source = rank.stacks[0].source
    return (
        "faulthandler answered from its signal handler"
        if source == "faulthandler"
        else f"its stacks were read by {source}"
    )


def _reaction_to_signals(evidence: Evidence, pid: int) -> str:
    signals = {signals.signal for signals in evidence.signals if signals.pid == pid and signals.sender == "harness"}
    if "SIGKILL" in signals:
        return "our SIGTERM did not end it in time, and SIGKILL followed"
    return "it ended at our SIGTERM" if "SIGTERM" in signals and evidence.unkillable == () else ""


def _cost(evidence: Evidence) -> StepCost | None:
    """Return the cost of a training step from the program's tables, or None if it is unknown."""
    row = next((row for row in evidence.program_records if "step_cost" in row), None)
    if row is None:
        return None

    def number(name: str) -> float | None:
        value = row.get(name)
        return float(value) if isinstance(value, float | int) else None

    def whole(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    return StepCost(
        tokens=whole("seq_len") or 0,
        layers=whole("layers") or 0,
        batch=whole("batch") or 0,
        seconds=number("seconds"),
        error=number("error") or 0.0,
        cpu_s=number("cpu_s"),
        cpu_error=number("cpu_error") or 0.0,
        steps=whole("steps") or 0,
        nodes=whole("nodes"),
        bytes=whole("saved_bytes"),
        peak_bytes=whole("peak_bytes"),
        implementations=tuple(name for name in str(row.get("implementations", "")).split(", ") if name),
        until_tokens=whole("until_tokens"),
    )


def skipped_outcome(skip: Skip) -> Outcome:
    """Return the outcome for a scenario that cannot run on this machine."""
    verdict = Verdict(status=Status.SKIP, kind=None, cause=Cause.MISSING_NEED, summary=skip.reason)
    return Outcome(spec=summarize_spec(skip), verdict=verdict, ending_text="nothing was started")


def unjudged_outcome(
    spec: RunSpec | Skip, *, attempt: int, directory: str, error: str, cause: Cause = Cause.HARNESS_ERROR
) -> Outcome:
    """Return an outcome with the verdict ERROR, for an attempt that could not be judged because of `error`."""
    verdict = Verdict(status=Status.ERROR, kind=None, cause=cause, summary=error)
    spec_summary = SpecSummary(scenario=spec.scenario, about=spec.about)
    if isinstance(spec, RunSpec):
        spec_summary = replace(summarize_spec(spec), notes=(), not_covered=())
    return Outcome(
        spec=spec_summary,
        verdict=verdict,
        attempt=attempt,
        expected=False,
        dir=directory,
        ending_text="see processes.jsonl",
    )


def summarize_spec(spec: RunSpec | Skip) -> SpecSummary:
    """Return the summary of a run specification that a report stores."""
    shared = {field.name: getattr(spec, field.name) for field in fields(SpecSummary) if hasattr(spec, field.name)}
    if isinstance(spec, Skip):
        return SpecSummary(**shared)
    return replace(SpecSummary(**shared), settings=_settings(spec), criteria=criteria(spec.expect, spec.limits))


def _settings(spec: RunSpec) -> tuple[tuple[str, str], ...]:
    """Return the scenario's settings and its planted fault as sorted (name, value) pairs."""
    fault_values = asdict(spec.fault) if spec.fault else {}
    if not fault_values.get("parameters"):
        fault_values.pop("value", None)  # it is only used with parameters
    fault = {f"fault.{key}": str(value) for key, value in fault_values.items() if value is not None}
    return tuple(sorted({**dict(spec.settings), **fault}.items()))


def _missing_gradients(evidence: Evidence) -> tuple[str, ...] | None:
    traces = [rank.traces for rank in evidence.ranks]
    if not traces or any(trace.missing_count is None for trace in traces):
        return None
    return tuple(sorted({name for trace in traces for name in trace.missing_parameters}))


def _raised(judgement: Judgement) -> str:
    """Return the first failure's exception, such as "rank 1: ValueError: bad batch", or "" if it has none."""
    exception = judgement.failures[0].exception if judgement.failures else None
    return (
        f"rank {exception.rank}: {shorten(f'{exception.type}: {exception.message}').rstrip(': ')}" if exception else ""
    )


def _steps_done(rank: RankEvidence) -> int | None:
    """Return the number of optimizer steps that the rank finished, or None if it is unknown."""
    if rank.status_file is None or not (rank.status_file.has_optimizer or rank.status_file.steps_s):
        return None
    return rank.status_file.steps_s[-1][0] if rank.status_file.steps_s else 0


def _verdict(
    judgement: Judgement, diagnosis: Diagnosis, findings: Sequence[Finding], misses: Sequence[Finding]
) -> Verdict:
    if misses:  # their sentences and the summary are added later
        return Verdict(status=Status.FAIL, kind=None, cause=Cause.EXPECTATION_MISSED, summary="")
    if judgement.status is Status.PASS:
        return Verdict(status=Status.PASS, kind=None, cause=None, summary=judgement.pass_reason or "")
    kind = judgement.proof.kind if judgement.status is Status.HANG and judgement.proof else None
    return Verdict(status=judgement.status, kind=kind, cause=diagnosis.cause, summary=findings[0].claim)


def _phase(evidence: Evidence, culprit: Culprit | None) -> str | None:
    """Return the kind of the latest training event of the ranks at fault, or of the first rank that stopped."""
    events = [
        (event.at_s, rank.rank, event.kind)
        for rank in evidence.ranks
        if rank.status_file
        and (event := rank.status_file.latest_training_event or rank.status_file.latest_event)
        and (culprit is None or not culprit.ranks or rank.rank in culprit.ranks)
    ]
    if not events:
        return None
    _, first, kind = min(events)
    ranks = evidence.snapshots[-1].ranks if evidence.snapshots and evidence.ending is Ending.STALL else ()
    stack = next((rank_stack(rank) for rank in ranks if rank.rank == first), None)
    return "recomputation in backward" if stack and recomputed_frame(stack.frames) else kind


def _victims(evidence: Evidence, culprit: Culprit | None) -> tuple[int, ...]:
    if culprit is None or not culprit.ranks:
        return ()
    return tuple(rank.rank for rank in evidence.ranks if rank.rank not in culprit.ranks)


def _timing(evidence: Evidence, judgement: Judgement, culprit: Culprit | None) -> Timing:
    last = evidence.last_progress_s
    failed_s = judgement.failures[0].at_s if judgement.failures else None
    since = failed_s if failed_s is not None else _last_event_s(evidence, culprit)
    hangs = judgement.status is Status.HANG
    return Timing(
        launch_s=evidence.launch_s,
        wall_s=evidence.ended_s + evidence.teardown_s,
        no_progress_s=evidence.ended_s - last if last is not None and hangs else None,
        detected_s=evidence.ended_s - since if since is not None and judgement.status is not Status.PASS else None,
        teardown_s=evidence.teardown_s,
    )


def _last_event_s(evidence: Evidence, culprit: Culprit | None) -> float | None:
    """Return the time of the culprit's last progress event, in seconds, or None if it is unknown."""
    ranks = culprit.ranks if culprit else ()
    snapshot_ranks = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    status_files = {
        **{rank.rank: rank.status_file for rank in evidence.ranks},
        **{rank.rank: rank.status_file for rank in snapshot_ranks if rank.status_file},
    }
    events = [
        status_file.latest_event.at_s
        for rank, status_file in status_files.items()
        if rank in ranks and status_file and status_file.latest_event
    ]
    return max(events, default=None)


def _usage(evidence: Evidence, metrics: Mapping[str, float]) -> Usage:
    rss = [rank.peak_rss_bytes for rank in evidence.ranks if rank.peak_rss_bytes is not None]
    gpu = [rank.peak_gpu_bytes for rank in evidence.ranks if rank.peak_gpu_bytes is not None]
    return Usage(
        peak_rss_bytes=max(rss, default=None),
        peak_gpu_bytes=max(gpu, default=None),
        tokens_per_s=metrics.get("tokens_per_s"),
    )
