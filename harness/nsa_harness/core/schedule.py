"""Decide whether to run a scenario again, and which runs can run in parallel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.experiment.repeats import repetitions, with_flakiness
from nsa_harness.core.report import Outcome, Status


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The command-line options on repetitions, retries and the maximum number of failures."""

    repeat: int = 1  # attempts of each scenario, whatever their outcome
    retries: int = 0  # further attempts while the last attempt is not as expected
    maxfail: int | None = None  # scenarios not as expected after which nothing more is started
    retries_infra: int = 0  # attempts of each scenario that are repeated because the cluster ended them


ONCE = Policy()


def needs_another_attempt(policy: Policy, attempts: Sequence[Outcome]) -> bool:
    """Return whether a scenario must be run again. Every attempt counts, except for diagnostic reruns."""
    repeated = repetitions(attempts)
    lost_attempts = [outcome for outcome in repeated if is_lost_to_cluster(outcome)][: policy.retries_infra]
    counted_attempts = [outcome for outcome in repeated if outcome not in lost_attempts]
    if len(counted_attempts) < policy.repeat:
        return True
    return len(counted_attempts) < policy.repeat + policy.retries and not is_as_expected(counted_attempts[-1])


def failed_enough(policy: Policy, scenarios: Iterable[Sequence[Outcome]]) -> bool:
    """Return whether enough scenarios, given as their attempts, have failed to reach --maxfail."""
    if policy.maxfail is None:
        return False
    finished_scenarios = [
        attempts for attempts in scenarios if attempts and not needs_another_attempt(policy, attempts)
    ]
    counting = [outcome for attempts in finished_scenarios for outcome in with_flakiness(attempts) if outcome.final]
    return sum(not is_as_expected(outcome) for outcome in counting) >= policy.maxfail


def is_as_expected(outcome: Outcome) -> bool:
    """Return whether a run ended as its scenario expects. An ERROR is never expected."""
    return outcome.expected and outcome.verdict.status is not Status.ERROR


def is_lost_to_cluster(outcome: Outcome) -> bool:
    """Return whether the failure of a node, a limit or another user ended the attempt, and not its program."""
    return outcome.verdict.status is Status.ERROR and outcome.verdict.cause == Cause.INFRA


def is_interrupted(outcome: Outcome) -> bool:
    return outcome.verdict.cause == Cause.INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class Load:
    """The ranks, GPUs and memory that one run needs."""

    ranks: int
    gpus: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """The machine's resources for all runs in parallel, in which None means that a resource is not limited."""

    jobs: int | None  # runs at the same time
    cores: int | None  # a core for each rank
    gpus: int
    memory_bytes: int | None


def first_that_fits(waiting: Sequence[Load], running: Collection[Load], room: Room) -> int | None:
    """Return the index of the first waiting run for which there are enough resources, or None if there is none."""
    if not waiting:
        return None
    if not running:
        return 0
    if room.jobs is not None and len(running) >= room.jobs:
        return None
    return next((place for place, load in enumerate(waiting) if _fits([*running, load], room)), None)


def _fits(loads: Sequence[Load], room: Room) -> bool:
    cores = sum(load.ranks for load in loads)
    memory_bytes = sum(load.memory_bytes for load in loads)
    return (
        (room.cores is None or cores <= room.cores)
        and sum(load.gpus for load in loads) <= room.gpus
        and (room.memory_bytes is None or memory_bytes <= room.memory_bytes)
    )


def parallel_runs(load: Load, room: Room) -> tuple[int, str]:
    """Return how many runs with this load fit in parallel, at least 1, and the resource that limits them, or ""."""
    bounds = [] if room.jobs is None else [(room.jobs, "")]
    if load.gpus:
        bounds.append((room.gpus // load.gpus, "devices"))
    elif room.cores is not None:
        bounds.append((room.cores // load.ranks, "cores"))
    if room.memory_bytes is not None and load.memory_bytes:
        bounds.append((room.memory_bytes // load.memory_bytes, "memory"))
    return min(((max(1, count), resource) for count, resource in bounds), default=(1, ""))


def free_devices(used_devices: Collection[int], count: int, gpus: int) -> tuple[int, ...]:
    """Return the first `count` GPUs that are not in use, or all GPUs if too few of them are free."""
    free = tuple(device for device in range(gpus) if device not in used_devices)[:count]
    return free if len(free) == count else tuple(range(gpus))
