"""Profile of a slow run: the lines that its samples show, its pace, and when it would have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_harness.core.evidence.evidence import Evidence, Frame, RankEvidence, Sample, StatusFile
from nsa_harness.core.evidence.stacks import in_probe
from nsa_harness.core.evidence.steps import step_s

PROFILE_FILE = "profile.txt"
_AT_WORK = {"burning", "moving"}
_MAX_LINES = 12
_TORCH_DISTRIBUTED, _TORCH_DATA = "torch/distributed/", "torch/utils/data/"


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A line of the program, the number of its samples, and the innermost frame below it in most of them."""

    user: Frame
    seen: int
    leaf: Frame | None


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of the slowest rank. `step_s` is None if fewer than two steps were done."""

    done: int  # steps
    step_s: float | None  # median time between two finished steps
    running_s: float  # since the last step was done, or since the process began
    planned: int | None  # total number of steps, if the program announced it

    @property
    def left_s(self) -> float | None:
        """The time until the last planned step is done, if no step takes longer than the current one already has."""
        if self.planned is None or self.step_s is None or self.planned <= self.done:
            return None
        each_s = max(self.step_s, self.running_s)
        return max(each_s * (self.planned - self.done) - self.running_s, 0.0)


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    rank: int
    samples: int
    working: int  # samples in which the rank used CPU or moved data
    computing: int  # working samples outside calls that wait for other ranks
    fetching: int  # working samples in a data loader
    cpu_share: float | None  # of one core, from the first sample to the last
    lines: tuple[HotLine, ...]  # most often seen first
    nodes: int | None  # autograd nodes of the first backward pass, if the probe could count them


def profiles(evidence: Evidence) -> tuple[RankProfile, ...]:
    """Return a profile of each rank that was sampled with a stack."""
    sampled = []
    for rank in evidence.ranks:
        samples = [sample for sample in evidence.samples if sample.rank == rank.rank and sample.user_frame is not None]
        samples = [sample for sample in samples if sample.at_s > _began_s(rank.status_file)] or samples
        if samples:
            sampled.append(_profile(rank, samples))
    return tuple(sampled)


def busiest(made: Sequence[RankProfile]) -> RankProfile | None:
    """Return the rank that the others wait for: the one with most working samples outside calls that wait for ranks."""
    working = [profile for profile in made if profile.working]
    return min(working, key=lambda profile: (-profile.computing, -profile.working, profile.rank)) if working else None


def pace(evidence: Evidence) -> Pace | None:
    """Return the pace of the rank with the fewest steps; None if no rank has a status file."""
    boards = [rank for rank in evidence.ranks if rank.status_file is not None]
    if not boards:
        return None
    slowest = min(boards, key=lambda rank: (_done(rank.status_file), rank.rank))
    assert slowest.status_file is not None
    times = [at_s for _, at_s in slowest.status_file.steps_s]
    since_s = times[-1] if times else slowest.status_file.created_s
    return Pace(
        done=_done(slowest.status_file),
        step_s=step_s(slowest.status_file),
        running_s=max(evidence.ended_s - since_s, 0.0),
        planned=slowest.planned_steps,
    )


def _began_s(board: StatusFile | None) -> float:
    """Return when the first step was done. Samples before that show work that happens only once."""
    return board.steps_s[0][1] if board and board.steps_s and board.steps_s[0][0] == 1 else 0.0


def _profile(rank: RankEvidence, samples: Sequence[Sample]) -> RankProfile:
    working = [sample for sample in samples if sample.motion in _AT_WORK]
    users = Counter(sample.user_frame for sample in working or samples if sample.user_frame is not None)
    lines = tuple(
        HotLine(user=user, seen=seen, leaf=_usual_leaf(user, working or samples))
        for user, seen in users.most_common(_MAX_LINES)
    )
    nodes = rank.status_file.autograd_nodes if rank.status_file else None
    spent = [(sample.at_s, sample.cpu_s) for sample in samples if sample.cpu_s is not None]
    lasted_s = spent[-1][0] - spent[0][0] if spent else 0.0
    return RankProfile(
        rank=rank.rank,
        samples=len(samples),
        working=len(working),
        computing=sum(not _meets_others(sample) for sample in working),
        fetching=sum(sample.leaf is not None and _TORCH_DATA in sample.leaf.file for sample in working),
        cpu_share=(spent[-1][1] - spent[0][1]) / lasted_s if lasted_s else None,
        lines=lines,
        nodes=nodes,
    )


def _meets_others(sample: Sample) -> bool:
    """Return whether the innermost Python frame is in torch.distributed, or in the probe around a collective."""
    return sample.leaf is not None and (_TORCH_DISTRIBUTED in sample.leaf.file or in_probe(sample.leaf.file))


def _usual_leaf(user: Frame, samples: Sequence[Sample]) -> Frame | None:
    leaves = Counter(sample.leaf for sample in samples if sample.user_frame == user and sample.leaf is not None)
    return leaves.most_common(1)[0][0] if leaves else None


def _done(board: StatusFile | None) -> int:
    return board.steps_s[-1][0] if board and board.steps_s else 0
