"""DiagnosisContext: everything a rule may look at, and the places and proofs it can name."""

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
    Raised,
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
    """The evidence and the judgement of a run, and what follows from them."""

    evidence: Evidence
    judgement: Judgement

    @cached_property
    def program(self) -> ProgramSource:
        """The program's stored source."""
        return ProgramSource(self.evidence.sources)

    def rank(self, rank: int | None) -> RankEvidence | None:
        return next((one for one in self.evidence.ranks if one.rank == rank), None)

    def board(self, rank: int | None) -> StatusFile | None:
        return next((one.board for one in self.evidence.ranks if one.rank == rank), None)

    @cached_property
    def looked(self) -> dict[int, RankSnapshot]:
        """The state of each rank in the last snapshot."""
        return {one.rank: one for look in self.evidence.snapshots[-1:] for one in look.ranks}

    @property
    def waits(self) -> dict[int, Wait]:
        """The wait of each rank, if the run is proven to hang; else empty."""
        return {one.rank: one for one in self.judgement.proof.graph.waits} if self.judgement.proof else {}

    @property
    def first_failure(self) -> Failure | None:
        return self.judgement.failures[0] if self.judgement.failures else None

    @property
    def roots(self) -> tuple[Wait, ...]:
        return self.judgement.proof.graph.roots if self.judgement.proof else ()

    @property
    def boards(self) -> dict[int, StatusFile]:
        return {rank.rank: rank.board for rank in self.evidence.ranks if rank.board}

    @property
    def counts_steps(self) -> bool:
        """Whether step numbers mean something: a rank has an optimizer, or had one that is not torch's."""
        boards = self.boards.values()
        return not boards or any(board.optimizer or board.steps_s for board in boards)

    @cached_property
    def stacks_only(self) -> bool:
        """Whether only the stacks show what the ranks wait in: no rank has a status file, and the flight recorders, if
        there are any, do not differ.
        """
        if self.judgement.status is not Status.HANG or not self.looked or self.boards:
            return False
        recorded = self._recorded
        return not any(line.events for line in recorded.values()) or not differences(
            recorded, groups_of(recorded, {}), {}
        )

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        if self.stacks_only:
            at_s = self.evidence.snapshots[-1].at_s
            stacks = {rank: rank_stack(one) for rank, one in self.looked.items()}
            return {rank: timeline_of_stack(rank, stack, at_s) for rank, stack in stacks.items()}
        return self._recorded

    @cached_property
    def _recorded(self) -> dict[int, Timeline]:
        return with_comparable_callers(
            {
                rank.rank: timeline(
                    rank.rank,
                    rank.board,
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
            found = difference_of_stacks(self.timelines)
            return (found,) if found else ()
        return differences(self.timelines, self._groups, self.boards)

    @property
    def _groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return groups_of(self.timelines, self.boards, self.evidence.groups)

    @property
    def difference(self) -> Difference | None:
        """The first difference that is more than a rank that is still on its way."""
        return next((one for one in self.differences if one.kind is not DifferenceKind.LATE), None)

    @cached_property
    def cycle(self) -> tuple[Link, ...]:
        return cycle(self.timelines, self._groups)

    @cached_property
    def backend(self) -> str:
        """The backend that was requested or that the ranks use. A recorder without start times is that of gloo."""
        backend = backend_of(self.evidence.backend, self.boards.values())
        recorded = [one for rank in self.evidence.ranks for one in collectives_of(self.evidence, rank)]
        if backend in ("gloo", "nccl") or not recorded:
            return backend
        return "gloo" if all(one.started is None for one in recorded) else backend

    @cached_property
    def step_difference(self) -> StepDifference | None:
        return first_step_of_difference({rank.rank: rank.ledger for rank in self.evidence.ranks if rank.ledger})


def collectives_of(evidence: Evidence, rank: RankEvidence) -> tuple[Collective, ...]:
    """Return the collectives from the file at the end and from the last snapshot, each in its later state."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    looked = next((one.collectives for one in last if one.rank == rank.rank), ())
    known = {(one.group, one.seq): one for one in rank.collectives}
    for one in looked:
        before = known.get((one.group, one.seq))
        known[one.group, one.seq] = one if before is None or one.retired else before
    return tuple(sorted(known.values(), key=lambda one: (one.created_ns, one.group, one.seq)))


def lost_groups(evidence: Evidence, rank: RankEvidence) -> frozenset[str]:
    """Return the groups of which a recorder of the rank lacks numbers. Between two snapshots numbers may be missing."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    recorders = [rank.collectives, *(one.collectives for one in last if one.rank == rank.rank)]
    return frozenset(group for one in recorders for group, _, _ in missing_numbers(one))


def layer_of(module: str | None) -> int | None:
    """Return the first number in a qualified module name: 7 for blocks.7.attn."""
    found = _LAYER.search(module or "")
    return int(found[1]) if found else None


def parameter_place(name: str | None, line: Place | None = None) -> Place:
    """Return the line with the parameter, and the module and layer that its name shows."""
    module = name.rpartition(".")[0] or None if name else None
    return replace(line or Place(), parameter=name, module=module, layer=layer_of(name))


def module_of(context: DiagnosisContext, rank: int | None) -> str | None:
    """Return the module whose forward or backward pass the rank is in, or None."""
    board = context.board(rank)
    mark = board.training if board else None
    return mark.name if mark and mark.kind in ("forward", "backward") else None


def place_of(context: DiagnosisContext, rank: int | None, frame: Frame | None) -> Place | None:
    module = module_of(context, rank)
    if frame is None:
        return Place(module=module, layer=layer_of(module)) if module else None
    return Place(file=frame.file, line=frame.line, function=frame.function, module=module, layer=layer_of(module))


def wait_place(context: DiagnosisContext, wait: Wait) -> Place | None:
    return place_of(context, wait.rank, wait.user)


def last_place(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return where a rank that shows no stack was last: by its heartbeat, else by its last progress event or call."""
    board = context.board(rank)
    if board is None or (board.seen is not None and not is_library(board.seen.file)):
        return place_of(context, rank, board.seen if board else None)
    called = next((call for call in reversed(board.calls) if call.place), None)
    marked = place_of(context, rank, None)
    if called is None or (marked is not None and board.training is not None and board.training.at_s > called.entered_s):
        return marked
    return called.place


def last_line(context: DiagnosisContext, rank: int | None) -> Facts | None:
    """Return the line that the beat thread saw last, and how long before the end; a killed rank cannot be asked."""
    known, board = context.rank(rank), context.board(rank)
    if known is None or board is None or board.seen is None or board.beat_s is None or known.exit is None:
        return None
    place = Place(file=board.seen.file, line=board.seen.line)
    return {"line": place, "before_end_s": max(0.0, known.exit.at_s - board.beat_s)}


def last_seen(context: DiagnosisContext, rank: int | None) -> Facts:
    """Return the last progress event of a rank; if there is none, why: a key of [unseen] in causes.toml."""
    board = context.board(rank)
    mark = board.training or board.newest if board else None
    if mark is not None:
        return {"in": mark.kind, "name": mark.name, "step": mark.step}
    if context.evidence.ending is Ending.POST_MORTEM:
        return {"unseen": "no_file"}
    if rank is None:
        return {"unseen": "launcher"}
    return {"unseen": "not_inspected" if context.evidence.attached else "no_progress"}


def loop_place(context: DiagnosisContext, root: Wait) -> Place | None:
    """Return the line of the loop that most samples show; the rank's own line if its child has none."""
    own = [one.user for one in context.evidence.samples if one.rank == root.rank]
    below = [one.user for one in computations(root, context.evidence.samples)[0]] if root.computing else []
    lines = Counter(user for user in below or own if user)
    return place_of(context, root.rank, lines.most_common(1)[0][0] if lines else root.user)


def hung_roots(context: DiagnosisContext) -> Sequence[Wait]:
    return context.roots if context.judgement.status is Status.HANG else ()


def standing(
    stands: Callable[[Wait], bool], *, anywhere: bool = False
) -> Callable[[DiagnosisContext], tuple[Wait, tuple[int, ...]] | None]:
    """Find the first root of a hang that `stands` accepts, with the ranks of those in the same wait on the same line.

    `anywhere`: with the ranks of all roots that it accepts.
    """

    def found(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
        roots = [root for root in hung_roots(context) if stands(root)]
        alike = (one.rank for one in roots if anywhere or (one.kind, one.user) == (roots[0].kind, roots[0].user))
        return (roots[0], tuple(alike)) if roots else None

    return found


def failed_as(*kinds: FailureKind) -> Callable[[DiagnosisContext], tuple[Failure] | None]:
    """Find the first failure, if it is of one of these kinds and no consequence of another failure."""

    def found(context: DiagnosisContext) -> tuple[Failure] | None:
        first = context.first_failure
        return (first,) if first and not first.collateral and first.kind in kinds else None

    return found


failed_first = failed_as(*FailureKind)


def raised_first(context: DiagnosisContext) -> tuple[Failure, Raised] | None:
    """Find the first failure, if it is an exception and no consequence of another failure."""
    first = context.first_failure
    return (first, first.raised) if first and first.raised and not first.collateral else None


def raised_at(context: DiagnosisContext, rank: int | None, raised: Raised) -> Place | None:
    return place_of(context, rank, user_frame(raised.frames))


def call_facts(context: DiagnosisContext, rank: int, event: Event) -> Facts:
    """Return what a sentence may say of a collective that the rank entered. A stack alone shows no group."""
    group = "" if event.group == UNKNOWN_GROUP else event.group
    return {"op": event.op, "number": event.seq, "group": group, "line": event_place(context, rank, event)}


def event_place(context: DiagnosisContext, rank: int, event: Event) -> Place | None:
    """Return the line that entered the collective: of its call, or of the rank's stack if it is still open."""
    if event.called:
        return event.place
    if event.done:
        return None
    if rank in context.waits:
        return wait_place(context, context.waits[rank])
    known = context.rank(rank)
    return place_of(context, rank, user_frame(known.raised.frames) if known and known.raised else None)


def flight_proof(context: DiagnosisContext, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the recorder files of these ranks, as far as they were read."""
    known = (context.rank(rank) for rank in ranks)
    return tuple(f"rank{rank.rank}/flight.json" for rank in known if rank and collectives_of(context.evidence, rank))


def dump_proof(context: DiagnosisContext, wait: Wait) -> tuple[str, ...]:
    looked = context.looked.get(wait.rank)
    return (looked.proof,) if looked and looked.proof else ()


def ledger_proof(context: DiagnosisContext, rank: int) -> tuple[str, ...]:
    return (f"rank{rank}/calls.txt",) if context.board(rank) else ()


def raised_alike(one: Failure, other: Failure) -> bool:
    """Return whether both raised the same type on the same line, so that neither is a consequence of the other."""
    if one.raised is None or other.raised is None or one.collateral or other.collateral:
        return False
    if one.raised.type != other.raised.type:
        return False
    return user_frame(one.raised.frames) == user_frame(other.raised.frames)


def ranks_of(failures: Sequence[Failure]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in failures if one.rank is not None))


def function_of(wait: Wait) -> str:
    """Return the name of the program's function that waits; "" if none is known."""
    return wait.user.function if wait.user else ""


def process_facts(child: ChildWait | None) -> Facts | None:
    """Return what a sentence may say of a process below a rank."""
    return (
        None if child is None else {"pid": child.pid, "command": child.command, "blocked_in": child.deepest.kind.value}
    )


def ranks_by_facts(facts: Iterable[tuple[int, Facts]]) -> tuple[Facts, ...]:
    """Return each of these facts once, with the ranks that have it: ({"ranks": (0, 2), "gradients": 4}, ...)."""
    ranks: dict[str, list[int]] = {}
    by_text: dict[str, Facts] = {}
    for rank, fact in facts:
        by_text[repr(fact)] = fact
        ranks.setdefault(repr(fact), []).append(rank)
    return tuple({"ranks": tuple(ranks[text]), **fact} for text, fact in by_text.items())


def meshes(evidence: Evidence) -> Meshes:
    """Return the mesh coordinates of each rank that reported them."""
    return {rank.rank: rank.board.mesh for rank in evidence.ranks if rank.board and rank.board.mesh}


def step_in_progress(context: DiagnosisContext, rank: RankEvidence) -> int | None:
    """Return the step from 1, or None without a status file. Between two steps the line that it is at decides."""
    board = rank.board
    if board is None:
        return None
    between = board.training is not None and board.training.kind == "step"
    # Where no forward or batch of a step was marked, its number is only known when it is done.
    done = board.steps_s[-1][0] if between and board.steps_s else board.step
    return done + 1 if between and _stands_before(frames_of(context, rank), board.stepped_from) else done


def frames_of(context: DiagnosisContext, rank: RankEvidence) -> Sequence[Frame]:
    """Return its frames, innermost first: of its failure or exit, else of the last snapshot, else of its heartbeat."""
    looked, board = context.looked.get(rank.rank), rank.board
    stack = training_stack(looked.stacks, looked.pid) if looked else None
    known = (
        rank.raised.frames
        if rank.raised and not hung_roots(context)
        else (),  # a rank that hangs has printed it, and went on
        board.left_from if board else (),
        rank.death_stacks[-1].frames if rank.death_stacks and rank.exit else (),
        stack.frames if stack else (),
        (board.seen,) if board and board.seen else (),
    )
    return next(filter(None, known), ())


def own_frames(context: DiagnosisContext, rank: int) -> list[Frame]:
    """Return the frames of the program, outermost first."""
    known = context.rank(rank)
    frames = frames_of(context, known) if known else ()
    return [one for one in reversed(frames) if not is_library(one.file)]


def _stands_before(stands: Sequence[Frame], stepped: Sequence[Frame]) -> bool:
    """Return whether the rank is before the line that leads to the optimizer, in the outermost function they share."""
    own = [frame for frame in stands if not is_library(frame.file)]
    for there in reversed(stepped):
        here = next((frame for frame in reversed(own) if _same_function(frame, there)), None)
        if here is not None and here.line != there.line:
            return here.line < there.line
    return False


def _same_function(frame: Frame, other: Frame) -> bool:
    """Compare file and function; py-spy names a method with its class, the probe without."""
    functions = {one.function.rpartition(".")[2] for one in (frame, other)}
    return len(functions) == 1 and PurePath(frame.file).name == PurePath(other.file).name
