"""DiagnosisContext: the run as every rule reads it, and the functions with which rules name places and proofs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

from nsa_harness.core.collectives.alignment import (
    Difference,
    DifferenceKind,
    Link,
    cycle,
    difference_of_stacks,
    differences,
    groups_of,
)
from nsa_harness.core.collectives.reasons import StepDifference, first_step_of_difference
from nsa_harness.core.collectives.timeline import (
    UNKNOWN_GROUP,
    Event,
    Timeline,
    timeline,
    timeline_of_stack,
    with_comparable_callers,
)
from nsa_harness.core.evidence.evidence import (
    Collective,
    Ending,
    Evidence,
    Frame,
    RaisedException,
    RankEvidence,
    RankSnapshot,
    StatusFile,
)
from nsa_harness.core.evidence.flight import missing_numbers
from nsa_harness.core.evidence.stacks import is_library, training_stack, user_frame
from nsa_harness.core.outcome.wording import Meshes
from nsa_harness.core.report import Facts, Place, Status
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.verdict.group_waits import backend_of
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import computations
from nsa_harness.core.verdict.verdict import Failure, FailureKind, Judgement
from nsa_harness.core.verdict.wait import ChildWait, Wait

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class DiagnosisContext:
    """The evidence and the judgement of a run, and values that several rules derive from them."""

    evidence: Evidence
    judgement: Judgement

    @cached_property
    def program(self) -> ProgramSource:
        """The program's stored source."""
        return ProgramSource(self.evidence.sources)

    def rank(self, rank: int | None) -> RankEvidence | None:
        return next((evidence for evidence in self.evidence.ranks if evidence.rank == rank), None)

    def board(self, rank: int | None) -> StatusFile | None:
        return next((evidence.status_file for evidence in self.evidence.ranks if evidence.rank == rank), None)

    @cached_property
    def last_snapshot(self) -> dict[int, RankSnapshot]:
        """The state of each rank in the last snapshot; empty without a snapshot."""
        return {rank.rank: rank for snapshot in self.evidence.snapshots[-1:] for rank in snapshot.ranks}

    @property
    def waits(self) -> dict[int, Wait]:
        """The wait of each rank, if the run is proven to hang; else empty."""
        return {wait.rank: wait for wait in self.judgement.proof.graph.waits} if self.judgement.proof else {}

    @property
    def first_failure(self) -> Failure | None:
        return self.judgement.failures[0] if self.judgement.failures else None

    @property
    def roots(self) -> tuple[Wait, ...]:
        """The waits of a proven hang that no other rank's wait explains."""
        return self.judgement.proof.graph.roots if self.judgement.proof else ()

    @property
    def boards(self) -> dict[int, StatusFile]:
        """The last status file of each rank that wrote one."""
        return {rank.rank: rank.status_file for rank in self.evidence.ranks if rank.status_file}

    @property
    def counts_steps(self) -> bool:
        """Whether step numbers mean something: some rank has torch's optimizer, or finished a step without it."""
        boards = self.boards.values()
        return not boards or any(board.has_optimizer or board.steps_s for board in boards)

    @cached_property
    def stacks_only(self) -> bool:
        """Whether only stacks show where the ranks wait: no rank has a status file, and no flight recorders differ."""
        if self.judgement.status is not Status.HANG or not self.last_snapshot or self.boards:
            return False
        recorded = self._recorded_timelines
        return not any(line.events for line in recorded.values()) or not differences(
            recorded, groups_of(recorded, {}), {}
        )

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """The timeline of collectives and transfers of each rank.

        If only stacks are known, a timeline has just the one call in which the last snapshot shows the rank.
        """
        if not self.stacks_only:
            return self._recorded_timelines
        taken_s = self.evidence.snapshots[-1].at_s
        return {rank: timeline_of_stack(rank, rank_stack(seen), taken_s) for rank, seen in self.last_snapshot.items()}

    @cached_property
    def _recorded_timelines(self) -> dict[int, Timeline]:
        return with_comparable_callers(
            {
                rank.rank: timeline(
                    rank.rank,
                    rank.status_file,
                    collectives_of(self.evidence, rank),
                    self.backend,
                    lost=lost_groups(self.evidence, rank),
                )
                for rank in self.evidence.ranks
            }
        )

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """The points at which the ranks diverge, at most one per group."""
        if self.stacks_only:
            difference = difference_of_stacks(self.timelines)
            return (difference,) if difference else ()
        return differences(self.timelines, self._groups, self.boards)

    @property
    def _groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return groups_of(self.timelines, self.boards, self.evidence.groups)

    @property
    def difference(self) -> Difference | None:
        """The first difference that is more than a rank that is still on its way."""
        return next((difference for difference in self.differences if difference.kind is not DifferenceKind.LATE), None)

    @cached_property
    def cycle(self) -> tuple[Link, ...]:
        return cycle(self.timelines, self._groups)

    @cached_property
    def backend(self) -> str:
        """The backend that was requested or that the ranks use. Only gloo's flight recorder has no start times."""
        backend = backend_of(self.evidence.backend, self.boards.values())
        recorded = [collective for rank in self.evidence.ranks for collective in collectives_of(self.evidence, rank)]
        if backend in ("gloo", "nccl") or not recorded:
            return backend
        return "gloo" if all(collective.started is None for collective in recorded) else backend

    @cached_property
    def step_difference(self) -> StepDifference | None:
        return first_step_of_difference({rank.rank: rank.ledger for rank in self.evidence.ranks if rank.ledger})


def collectives_of(evidence: Evidence, rank: RankEvidence) -> tuple[Collective, ...]:
    """Return the rank's collectives from its file at exit and from the last snapshot, each in its later state."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    in_snapshot = next((snapshot.collectives for snapshot in last if snapshot.rank == rank.rank), ())
    known = {(collective.group, collective.seq): collective for collective in rank.collectives}
    for collective in in_snapshot:
        before = known.get((collective.group, collective.seq))
        known[collective.group, collective.seq] = collective if before is None or collective.retired else before
    return tuple(
        sorted(known.values(), key=lambda collective: (collective.created_ns, collective.group, collective.seq))
    )


def lost_groups(evidence: Evidence, rank: RankEvidence) -> frozenset[str]:
    """Return the groups for which a flight recorder of the rank lacks sequence numbers."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    recorders = [rank.collectives, *(snapshot.collectives for snapshot in last if snapshot.rank == rank.rank)]
    return frozenset(group for collectives in recorders for group, _, _ in missing_numbers(collectives))


def layer_of(module: str | None) -> int | None:
    """Return the first number in a qualified module name: 7 for blocks.7.attn."""
    number = _LAYER.search(module or "")
    return int(number[1]) if number else None


def parameter_place(name: str | None, line: Place | None = None) -> Place:
    """Return `line` with the parameter `name`, and with the module and layer that this name contains."""
    module = name.rpartition(".")[0] or None if name else None
    return replace(line or Place(), parameter=name, module=module, layer=layer_of(name))


def module_of(context: DiagnosisContext, rank: int | None) -> str | None:
    """Return the module whose forward or backward pass the rank is in, or None."""
    board = context.board(rank)
    mark = board.latest_training_event if board else None
    return mark.name if mark and mark.kind in ("forward", "backward") else None


def place_of(context: DiagnosisContext, rank: int | None, frame: Frame | None) -> Place | None:
    module = module_of(context, rank)
    if frame is None:
        return Place(module=module, layer=layer_of(module)) if module else None
    return Place(file=frame.file, line=frame.line, function=frame.function, module=module, layer=layer_of(module))


def wait_place(context: DiagnosisContext, wait: Wait) -> Place | None:
    return place_of(context, wait.rank, wait.user)


def last_place(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return the last known place of a rank without a stack: from its heartbeat, its last progress event or call."""
    board = context.board(rank)
    if board is None or (board.heartbeat_frame is not None and not is_library(board.heartbeat_frame.file)):
        return place_of(context, rank, board.heartbeat_frame if board else None)
    called = next((call for call in reversed(board.calls) if call.place), None)
    marked = place_of(context, rank, None)
    if called is None or (
        marked is not None
        and board.latest_training_event is not None
        and board.latest_training_event.at_s > called.entered_s
    ):
        return marked
    return called.place


def last_line(context: DiagnosisContext, rank: int | None) -> Facts | None:
    """Return the last line that the heartbeat thread recorded, and how long before the rank's exit that was."""
    evidence, board = context.rank(rank), context.board(rank)
    if (
        evidence is None
        or board is None
        or board.heartbeat_frame is None
        or board.beat_s is None
        or evidence.exit is None
    ):
        return None
    place = Place(file=board.heartbeat_frame.file, line=board.heartbeat_frame.line)
    return {"line": place, "before_end_s": max(0.0, evidence.exit.at_s - board.beat_s)}


def last_seen(context: DiagnosisContext, rank: int | None) -> Facts:
    """Return the last progress event of a rank, or the reason why there is none: a key of [unseen] in causes.toml."""
    board = context.board(rank)
    mark = board.latest_training_event or board.latest_event if board else None
    if mark is not None:
        return {"in": mark.kind, "name": mark.name, "step": mark.step}
    if context.evidence.ending is Ending.POST_MORTEM:
        return {"unseen": "no_file"}
    if rank is None:
        return {"unseen": "launcher"}
    return {"unseen": "not_inspected" if context.evidence.is_attached else "no_progress"}


def loop_place(context: DiagnosisContext, root: Wait) -> Place | None:
    """Return the line in which most samples show the loop of the rank, or of the thread or child that it waits for."""
    own = [sample.user_frame for sample in context.evidence.samples if sample.rank == root.rank]
    below = [child.user_frame for child in computations(root, context.evidence.samples)[0]] if root.computing else []
    lines = Counter(user for user in below or own if user)
    return place_of(context, root.rank, lines.most_common(1)[0][0] if lines else root.user)


def hung_roots(context: DiagnosisContext) -> Sequence[Wait]:
    """Return the roots of a run that is judged a HANG, else nothing."""
    return context.roots if context.judgement.status is Status.HANG else ()


def standing(
    matches: Callable[[Wait], bool], *, anywhere: bool = False
) -> Callable[[DiagnosisContext], tuple[Wait, tuple[int, ...]] | None]:
    """Find the first root of a hang that `matches` accepts, and the ranks with the same kind of wait on the same line.

    `anywhere`: return the ranks of all roots that `matches` accepts.
    """

    def find(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
        roots = [root for root in hung_roots(context) if matches(root)]
        ranks = (root.rank for root in roots if anywhere or (root.kind, root.user) == (roots[0].kind, roots[0].user))
        return (roots[0], tuple(ranks)) if roots else None

    return find


def first_failure_of(*kinds: FailureKind) -> Callable[[DiagnosisContext], tuple[Failure] | None]:
    """Find the first failure, if it has one of these kinds and is not a consequence of another failure."""

    def find(context: DiagnosisContext) -> tuple[Failure] | None:
        first = context.first_failure
        return (first,) if first and not first.collateral and first.kind in kinds else None

    return find


first_own_failure = first_failure_of(*FailureKind)


def first_own_exception(context: DiagnosisContext) -> tuple[Failure, RaisedException] | None:
    """Find the first failure, if it is an exception and not a consequence of another failure."""
    first = context.first_failure
    return (first, first.raised) if first and first.raised and not first.collateral else None


def exception_place(context: DiagnosisContext, rank: int | None, raised: RaisedException) -> Place | None:
    return place_of(context, rank, user_frame(raised.frames))


def call_facts(context: DiagnosisContext, rank: int, event: Event) -> Facts:
    """Return the facts about a collective that the rank entered. A stack shows the call but not its group."""
    group = "" if event.group == UNKNOWN_GROUP else event.group
    return {"op": event.op, "number": event.seq, "group": group, "line": event_place(context, rank, event)}


def event_place(context: DiagnosisContext, rank: int, event: Event) -> Place | None:
    """Return the line that entered the collective: from the recorded call, or from the stack if the call is open."""
    if event.called:
        return event.place
    if event.done:
        return None
    if rank in context.waits:
        return wait_place(context, context.waits[rank])
    evidence = context.rank(rank)
    return place_of(context, rank, user_frame(evidence.exception.frames) if evidence and evidence.exception else None)


def flight_proof(context: DiagnosisContext, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the paths of these ranks' flight recorder files, without those that recorded nothing."""
    evidence = (context.rank(rank) for rank in ranks)
    return tuple(f"rank{rank.rank}/flight.json" for rank in evidence if rank and collectives_of(context.evidence, rank))


def dump_proof(context: DiagnosisContext, wait: Wait) -> tuple[str, ...]:
    """Return the path of the rank's stack dump in the last snapshot, if there is one."""
    snapshot = context.last_snapshot.get(wait.rank)
    return (snapshot.proof,) if snapshot and snapshot.proof else ()


def ledger_proof(context: DiagnosisContext, rank: int) -> tuple[str, ...]:
    return (f"rank{rank}/calls.txt",) if context.board(rank) else ()


def is_same_exception(failure: Failure, other: Failure) -> bool:
    """Return whether both ranks raised the same type on the same line: then neither failure caused the other."""
    if failure.raised is None or other.raised is None or failure.collateral or other.collateral:
        return False
    if failure.raised.type != other.raised.type:
        return False
    return user_frame(failure.raised.frames) == user_frame(other.raised.frames)


def failed_ranks(failures: Sequence[Failure]) -> tuple[int, ...]:
    return tuple(sorted(failure.rank for failure in failures if failure.rank is not None))


def function_of(wait: Wait) -> str:
    """Return the name of the program's function that waits; "" if none is known."""
    return wait.user.function if wait.user else ""


def process_facts(child: ChildWait | None) -> Facts | None:
    """Return the facts about a child process of a rank."""
    return (
        None if child is None else {"pid": child.pid, "command": child.command, "blocked_in": child.deepest.kind.value}
    )


def ranks_by_facts(facts: Iterable[tuple[int, Facts]]) -> tuple[Facts, ...]:
    """Group the ranks that have equal facts: ({"ranks": (0, 2), "gradients": 4}, {"ranks": (1,), "gradients": 3})."""
    ranks: dict[str, list[int]] = {}
    by_text: dict[str, Facts] = {}
    for rank, fact in facts:
        by_text[repr(fact)] = fact
        ranks.setdefault(repr(fact), []).append(rank)
    return tuple({"ranks": tuple(ranks[text]), **fact} for text, fact in by_text.items())


def meshes(evidence: Evidence) -> Meshes:
    """Return the mesh coordinates of each rank that reported them."""
    return {rank.rank: rank.status_file.mesh for rank in evidence.ranks if rank.status_file and rank.status_file.mesh}


def step_in_progress(context: DiagnosisContext, rank: RankEvidence) -> int | None:
    """Return the number (from 1) of the step that the rank is in, or None without a status file.

    Between two steps the stack decides: a rank above the line that leads to `optimizer.step` has begun the next step.
    """
    board = rank.status_file
    if board is None:
        return None
    between = board.latest_training_event is not None and board.latest_training_event.kind == "step"
    # If a step recorded no forward pass and no batch, only its end shows its number.
    done = board.steps_s[-1][0] if between and board.steps_s else board.step
    return done + 1 if between and _is_before_optimizer(frames_of(context, rank), board.optimizer_chain) else done


def frames_of(context: DiagnosisContext, rank: RankEvidence) -> Sequence[Frame]:
    """Return the rank's frames, innermost first: at its failure or exit, in the last snapshot, or at its heartbeat."""
    snapshot, board = context.last_snapshot.get(rank.rank), rank.status_file
    stack = training_stack(snapshot.stacks, snapshot.pid) if snapshot else None
    stacks = (
        rank.exception.frames
        if rank.exception and not hung_roots(context)
        else (),  # a rank that hangs printed this traceback and continued
        board.exit_chain if board else (),
        rank.death_stacks[-1].frames if rank.death_stacks and rank.exit else (),
        stack.frames if stack else (),
        (board.heartbeat_frame,) if board and board.heartbeat_frame else (),
    )
    return next(filter(None, stacks), ())


def own_frames(context: DiagnosisContext, rank: int) -> list[Frame]:
    """Return the rank's frames without those of libraries, outermost first."""
    evidence = context.rank(rank)
    frames = frames_of(context, evidence) if evidence else ()
    return [frame for frame in reversed(frames) if not is_library(frame.file)]


def _is_before_optimizer(stack: Sequence[Frame], stepped: Sequence[Frame]) -> bool:
    """Return whether `stack` is above the path `stepped` to `optimizer.step`, in the outermost function they share."""
    own = [frame for frame in stack if not is_library(frame.file)]
    for there in reversed(stepped):
        here = next((frame for frame in reversed(own) if _same_function(frame, there)), None)
        if here is not None and here.line != there.line:
            return here.line < there.line
    return False


def _same_function(frame: Frame, other: Frame) -> bool:
    """Return whether both frames are in one function. py-spy prefixes a method with its class; the probe does not."""
    functions = {either.function.rpartition(".")[2] for either in (frame, other)}
    return len(functions) == 1 and PurePath(frame.file).name == PurePath(other.file).name
