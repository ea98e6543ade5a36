"""The profile of a slow run: the program lines that take most of the time, and the pace of the training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankEvidence, Sample, StatusFile
from nsa_harness.core.evidence.stacks import in_probe
from nsa_harness.core.evidence.steps import step_s

PROFILE_FILE = "profile.txt"
_WORKING_MOTIONS = {"burning", "moving"}
_MAX_LINES = 12
_TORCH_DISTRIBUTED, _TORCH_DATA = "torch/distributed/", "torch/utils/data/"


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A program line that appears in many stack samples."""

    frame: Frame
    sample_count: int
    leaf: Frame | None  # innermost frame in most of these samples


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The training speed of the slowest rank in a run."""

    steps_done: int  # finished steps
    step_s: float | None  # median seconds per step; None if fewer than two steps were finished
    running_s: float  # seconds since the last step was finished, or since the process started
    steps_planned: int | None  # total number of steps; None if the program did not announce it

    @property
    def left_s(self) -> float | None:
        """The estimated number of seconds until the last planned step is finished, or None if unknown."""
        if self.steps_planned is None or self.step_s is None or self.steps_planned <= self.steps_done:
            return None
        each_s = max(self.step_s, self.running_s)
        return max(each_s * (self.steps_planned - self.steps_done) - self.running_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """A profile of one rank, based on its stack samples."""

    rank: int
    samples: int
    working: int  # samples in which the rank used CPU or moved data
    computing: int  # working samples outside calls that wait for other ranks
    fetching: int  # working samples in a data loader
    cpu_share: float | None  # CPU seconds per second, from the first sample to the last
    lines: tuple[HotLine, ...]  # in descending order of their samples
    nodes: int | None  # autograd nodes of the first backward pass; None if they were not counted


def profiles(evidence: Evidence) -> tuple[RankProfile, ...]:
    """Return a profile of each rank that has stack samples."""
    rank_profiles = []
    for rank in evidence.ranks:
        samples = [sample for sample in evidence.samples_of_rank.get(rank.rank, ()) if sample.user_frame is not None]
        samples = [sample for sample in samples if sample.at_s > _first_step_end_s(rank.status_file)] or samples
        if samples:
            rank_profiles.append(_profile(rank, samples))
    return tuple(rank_profiles)


def busiest(rank_profiles: Sequence[RankProfile]) -> RankProfile | None:
    """Return the profile of the rank that works the most outside collectives, or None if no rank works."""
    working = [profile for profile in rank_profiles if profile.working]
    return min(working, key=lambda profile: (-profile.computing, -profile.working, profile.rank)) if working else None


def pace(evidence: Evidence) -> Pace | None:
    """Return the pace of the rank with the fewest finished steps, or None if no rank has a status file."""
    ranks_with_status = [rank for rank in evidence.ranks if rank.status_file is not None]
    if not ranks_with_status:
        return None
    slowest = min(ranks_with_status, key=lambda rank: (_steps_done(rank.status_file), rank.rank))
    assert slowest.status_file is not None
    times = [at_s for _, at_s in slowest.status_file.steps_s]
    since_s = times[-1] if times else slowest.status_file.created_s
    return Pace(
        steps_done=_steps_done(slowest.status_file),
        step_s=step_s(slowest.status_file),
        running_s=max(evidence.ended_s - since_s, 0.0),
        steps_planned=slowest.planned_steps,
    )


def _first_step_end_s(status_file: StatusFile | None) -> float:
    """Return the time at which the first step ended, in seconds since the launch, or 0.0 if unknown."""
    return status_file.steps_s[0][1] if status_file and status_file.steps_s and status_file.steps_s[0][0] == 1 else 0.0


def _profile(rank: RankEvidence, samples: Sequence[Sample]) -> RankProfile:
    working = [sample for sample in samples if sample.motion in _WORKING_MOTIONS]
    counts = Counter(sample.user_frame for sample in working or samples if sample.user_frame is not None)
    lines = tuple(
        HotLine(frame=line, sample_count=sample_count, leaf=_usual_leaf(line, working or samples))
        for line, sample_count in counts.most_common(_MAX_LINES)
    )
    nodes = rank.status_file.autograd_nodes if rank.status_file else None
    cpu_times = [(sample.at_s, sample.cpu_s) for sample in samples if sample.cpu_s is not None]
    duration_s = cpu_times[-1][0] - cpu_times[0][0] if cpu_times else 0.0
    return RankProfile(
        rank=rank.rank,
        samples=len(samples),
        working=len(working),
        computing=sum(not _is_waiting_for_ranks(sample) for sample in working),
        fetching=sum(sample.leaf is not None and _TORCH_DATA in sample.leaf.file for sample in working),
        cpu_share=(cpu_times[-1][1] - cpu_times[0][1]) / duration_s if duration_s else None,
        lines=lines,
        nodes=nodes,
    )


def _is_waiting_for_ranks(sample: Sample) -> bool:
    """Return whether the sample shows the rank waiting for other ranks."""
    return sample.leaf is not None and (_TORCH_DISTRIBUTED in sample.leaf.file or in_probe(sample.leaf.file))


def _usual_leaf(user: Frame, samples: Sequence[Sample]) -> Frame | None:
    leaves = Counter(sample.leaf for sample in samples if sample.user_frame == user and sample.leaf is not None)
    return leaves.most_common(1)[0][0] if leaves else None


def _steps_done(status_file: StatusFile | None) -> int:
    return status_file.steps_s[-1][0] if status_file and status_file.steps_s else 0
