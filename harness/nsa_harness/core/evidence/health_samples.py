"""What can be wrong in a rank that says nothing: its numbers between the steps, and what was printed as it ended."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_harness.core.report import Place


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the process held as a step ended."""

    step: int
    anonymous_bytes: int  # resident, without files and shared segments
    gpu_bytes: int | None  # given out by torch's allocator; None = CUDA was not in use


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """How long the program's main thread had waited for data loaders as a step ended, of the time that had passed."""

    step: int
    waited_s: float
    passed_s: float
    place: Place | None = None  # of the longest wait so far


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some neighbouring parameters of a replica."""

    checksum: str
    size: float  # root of the sum of squares, over a sample; nan where one is not finite
    total: float


@dataclass(frozen=True, kw_only=True)
class ReplicaSample:
    """A replica's parameters at one moment."""

    # "made": as DDP had made the replicas equal, or before the first step; "begun": before a forward; "stepped": after
    # the optimizer; "over": as the program ended.
    at: str
    round: int  # backward passes followed by a step so far: the same number on every rank
    steps: int  # optimizer steps so far, of all optimizers
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One DistributedDataParallel of a rank, or a model outside of it."""

    number: int
    ranks: tuple[int, ...]  # whose parameters are due to be equal
    names: tuple[tuple[str, str], ...]  # of each part: its first parameter and its last
    looks: tuple[ReplicaSample, ...]  # in order of time
    parts: tuple[Part, ...]  # of the last look
    hook: str = ""  # a communication hook that may leave replicas unequal on purpose
    wrapped: bool = True  # in DDP, which means them to be equal
    broadcast: bool = False  # every parameter, before the first step
    reduced: bool = False  # every gradient of the first step, over all ranks, by the program itself


@dataclass(frozen=True, kw_only=True)
class OverwrittenFile:
    """A file that the rank began anew, and that is there at the end."""

    path: str
    place: Place | None
    step: int


@dataclass(frozen=True, kw_only=True)
class Unwaited:
    """A line that called a collective asynchronously, and never asked any of its handles whether it is done."""

    op: str
    place: Place | None
    calls: int


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """Batches whose training pass an exception ended, at one line, and which were not tried again."""

    type: str
    place: Place | None  # where it was raised
    batches: int
    step: int  # of the first


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Gradients of one model as each backward pass left them, before anything reduced or used them."""

    model: str
    looks: int  # that found any
    still: int = 0  # parameters whose gradients were all zero at every look
    never: tuple[str, ...] = ()  # had none at any look, though their module was called; no optimizer of torch's stepped
    never_count: int = 0
    unset: tuple[str, ...] = ()  # held what no program begins with, as their first gradient came
    unset_value: str = ""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The first time that something was not finite."""

    step: int
    value: str  # "nan" or "inf"
    names: tuple[str, ...] = ()  # of parameters
    place: Place | None = None  # of the backward that was given the loss


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A line whose allocations were more after a later step than after an earlier one."""

    place: Place
    first_step: int
    last_step: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class HealthSamples:
    """All looks of one rank."""

    steps: int = 0  # the last one that was looked at
    looks: int = 0  # at parameters
    memory: tuple[Memory, ...] = ()
    fetched: tuple[Fetched, ...] = ()
    loss: Broken | None = None
    bad_losses: int = 0
    bad_in_a_row: int = 0  # up to the last one
    losses: int = 0
    parameters: Broken | None = None  # kept only while they are still broken at the last look
    never: tuple[str, ...] = ()  # had no gradient at any look, though their module was called
    never_count: int = 0
    never_place: Place | None = None  # the line that uses the first of them
    still_count: int = 0  # parameters of an optimizer whose gradients were all zero, each at every look
    still_looks: int = 0  # so many
    replicas: tuple[Replica, ...] = ()
    wrote: tuple[OverwrittenFile, ...] = ()
    unwaited: tuple[Unwaited, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    arrived: tuple[Arrived, ...] = ()
    grown: tuple[Grown, ...] = ()  # what grew most first; only of a launch that asked
    open_group: bool | None = None  # a process group was still open at the end; None = no orderly end


@dataclass(frozen=True, kw_only=True)
class LastMessages:
    """One thing that went wrong after or beside the program, as the interpreter or torch printed it."""

    kind: str  # "atexit", "left", "process group"; "thread", "child process"
    name: str  # what was left, or who died
    error: str  # "RuntimeError: disk full"; "" where there is none
    place: Place | None  # the user's line
    entered: Place | None = None  # in the function that the thread or child began in
