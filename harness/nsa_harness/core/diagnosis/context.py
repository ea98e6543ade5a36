"""DiagnosisContext: everything a rule may look at, and the places and proofs it can name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from nsa_harness.core.collectives.timeline import Timeline, comparable, stacked, timeline
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
from nsa_harness.core.evidence.stacks import is_library, user_frame
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
    """What a rule may look at."""

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
        """Each rank at the last look."""
        return {one.rank: one for look in self.evidence.snapshots[-1:] for one in look.ranks}

    @property
    def waits(self) -> dict[int, Wait]:
        """What each rank stands in, where the run is proven to hang."""
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
        """A number of a step means something: some rank has an optimizer, or had one that is not torch's."""
        boards = self.boards.values()
        return not boards or any(board.optimizer or board.steps_s for board in boards)

    @cached_property
    def stacks_only(self) -> bool:
        """A hang of ranks without boards whose recorders, if there are any, do not differ: the stacks alone say in what
        each of them waits.
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
            return {rank: stacked(rank, stack, at_s) for rank, stack in stacks.items()}
        return self._recorded

    @cached_property
    def _recorded(self) -> dict[int, Timeline]:
        return comparable(
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
        """Where the ranks part, at most once a group."""
        if self.stacks_only:
            found = difference_of_stacks(self.timelines)
            return (found,) if found else ()
        return differences(self.timelines, self._groups, self.boards)

    @property
    def _groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return groups_of(self.timelines, self.boards, self.evidence.groups)

    @property
    def difference(self) -> Difference | None:
        """The first one that is more than a rank on its way."""
        return next((one for one in self.differences if one.kind is not DifferenceKind.LATE), None)

    @cached_property
    def cycle(self) -> tuple[Link, ...]:
        return cycle(self.timelines, self._groups)

    @cached_property
    def backend(self) -> str:
        """Where nobody was asked, what the ranks found; a recorder that never says what has started is that of gloo."""
        backend = backend_of(self.evidence.backend, self.boards.values())
        recorded = [one for rank in self.evidence.ranks for one in collectives_of(self.evidence, rank)]
        if backend in ("gloo", "nccl") or not recorded:
            return backend
        return "gloo" if all(one.started is None for one in recorded) else backend

    @cached_property
    def step_difference(self) -> StepDifference | None:
        return first_step_of_difference({rank.rank: rank.ledger for rank in self.evidence.ranks if rank.ledger})


def collectives_of(evidence: Evidence, rank: RankEvidence) -> tuple[Collective, ...]:
    """From the file at the end and the last look before it; of one seen twice the later state counts."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    looked = next((one.collectives for one in last if one.rank == rank.rank), ())
    known = {(one.group, one.seq): one for one in rank.collectives}
    for one in looked:
        before = known.get((one.group, one.seq))
        known[one.group, one.seq] = one if before is None or one.retired else before
    return tuple(sorted(known.values(), key=lambda one: (one.created_ns, one.group, one.seq)))


def lost_groups(evidence: Evidence, rank: RankEvidence) -> frozenset[str]:
    """Groups of which a recorder of the rank lacks numbers between others. Two looks may well have some in between."""
    last = evidence.snapshots[-1].ranks if evidence.snapshots else ()
    recorders = [rank.collectives, *(one.collectives for one in last if one.rank == rank.rank)]
    return frozenset(group for one in recorders for group, _, _ in missing_numbers(one))


def layer_of(module: str | None) -> int | None:
    """The first number in a qualified module name: blocks.7.attn is in layer 7."""
    found = _LAYER.search(module or "")
    return int(found[1]) if found else None


def parameter_place(name: str | None, line: Place | None = None) -> Place:
    """The line, of a parameter: its name tells the module and the layer."""
    module = name.rpartition(".")[0] or None if name else None
    return replace(line or Place(), parameter=name, module=module, layer=layer_of(name))


def module_of(context: DiagnosisContext, rank: int | None) -> str | None:
    """In the forward or backward pass of which the rank is."""
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
    """Where a rank that could not be asked was seen last: by its beat thread, else in what it marked or called last."""
    board = context.board(rank)
    if board is None or (board.seen is not None and not is_library(board.seen.file)):
        return place_of(context, rank, board.seen if board else None)
    called = next((call for call in reversed(board.calls) if call.place), None)
    marked = place_of(context, rank, None)
    if called is None or (marked is not None and board.training is not None and board.training.at_s > called.entered_s):
        return marked
    return called.place


def last_line(context: DiagnosisContext, rank: int | None) -> str:
    """The line the beat thread saw last, and how long before the end; a killed rank cannot be asked."""
    known, board = context.rank(rank), context.board(rank)
    if known is None or board is None or board.seen is None or board.beat_s is None or known.exit is None:
        return ""
    before_s = max(0.0, known.exit.at_s - board.beat_s)
    place = Place(file=board.seen.file, line=board.seen.line)
    return f"; its last line seen, {before_s:.2f} s before the end, is{at(place)[3:]}"


def last_seen(context: DiagnosisContext, rank: int | None) -> str:
    board = context.board(rank)
    mark = board.training or board.newest if board else None
    if mark is None and context.evidence.ending is Ending.POST_MORTEM:
        return "and no file says where it was"
    if mark is None and rank is not None and context.evidence.attached:
        return "before it was looked at"
    if mark is None:
        return "before its first mark" if rank is not None else "while its ranks were running"
    name = f" {mark.name}" if mark.name else ""
    return f"last seen in {mark.kind}{name}, step {mark.step}"


def loop_place(context: DiagnosisContext, root: Wait) -> Place | None:
    """The loop's user line that most samples show; the rank's own where its child has none."""
    own = [one.user for one in context.evidence.samples if one.rank == root.rank]
    below = [one.user for one in computations(root, context.evidence.samples)[0]] if root.computing else []
    lines = Counter(user for user in below or own if user)
    return place_of(context, root.rank, lines.most_common(1)[0][0] if lines else root.user)


def hung_roots(context: DiagnosisContext) -> Sequence[Wait]:
    return context.roots if context.judgement.status is Status.HANG else ()


def standing(
    stands: Callable[[Wait], bool], *, anywhere: bool = False
) -> Callable[[DiagnosisContext], tuple[Wait, tuple[int, ...]] | None]:
    """Finds the first root of a hang that stands so, and the ranks of those that stand in the same on the same line.

    `anywhere`: the ranks of all that stand so.
    """

    def found(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
        roots = [root for root in hung_roots(context) if stands(root)]
        alike = (one.rank for one in roots if anywhere or (one.kind, one.user) == (roots[0].kind, roots[0].user))
        return (roots[0], tuple(alike)) if roots else None

    return found


def failed_as(*kinds: FailureKind) -> Callable[[DiagnosisContext], tuple[Failure] | None]:
    """Finds what failed first, where that was of itself and so."""

    def found(context: DiagnosisContext) -> tuple[Failure] | None:
        first = context.first_failure
        return (first,) if first and not first.collateral and first.kind in kinds else None

    return found


failed_first = failed_as(*FailureKind)  # of itself, however


def raised_first(context: DiagnosisContext) -> tuple[Failure, Raised] | None:
    """What failed first, of itself and with an exception."""
    first = context.first_failure
    return (first, first.raised) if first and first.raised and not first.collateral else None


def raised_at(context: DiagnosisContext, rank: int | None, raised: Raised) -> Place | None:
    return place_of(context, rank, user_frame(raised.frames))


def dump_proof(context: DiagnosisContext, wait: Wait) -> tuple[str, ...]:
    looked = context.looked.get(wait.rank)
    return (looked.proof,) if looked and looked.proof else ()


def ledger_proof(context: DiagnosisContext, rank: int) -> tuple[str, ...]:
    return (f"rank{rank}/calls.txt",) if context.board(rank) else ()


def raised_alike(one: Failure, other: Failure) -> bool:
    """The same kind of exception in the same line of the program: neither is the other's victim."""
    if one.raised is None or other.raised is None or one.collateral or other.collateral:
        return False
    if one.raised.type != other.raised.type:
        return False
    return user_frame(one.raised.frames) == user_frame(other.raised.frames)


def ranks_of(failures: Sequence[Failure]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in failures if one.rank is not None))


def at(place: Place | None) -> str:
    if place is None or place.file is None:
        return ""
    return f" at {'/'.join(place.file.split('/')[-2:])}:{place.line}"


def function_of(wait: Wait) -> str:
    """Return the name of the program's function that waits; "" if none is known."""
    return wait.user.function if wait.user else ""


def process_facts(child: ChildWait | None) -> Facts | None:
    """Return what a sentence may say of a process below a rank."""
    return (
        None if child is None else {"pid": child.pid, "command": child.command, "blocked_in": child.deepest.kind.value}
    )


def in_function(wait: Wait) -> str:
    return f" in {wait.user.function}" if wait.user else ""


def shorten(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


_GIB, _MIB = 1 << 30, 1 << 20


def bytes_text(amount: float) -> str:
    if amount >= _GIB:
        return f"{amount / _GIB:.1f} GiB"
    return f"{amount / _MIB:.1f} MiB" if amount >= _MIB / 10 else f"{amount / 1024:.1f} KiB"
