"""The view of a run that every diagnosis rule receives (DiagnosisContext), and helpers for the rules."""

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
    difference_of_stacks,
    differences,
)
from nsa_harness.core.collectives.groups import groups_of
from nsa_harness.core.collectives.reasons import StepDifference, first_step_of_difference, shared_calls_s
from nsa_harness.core.collectives.timeline import (
    UNKNOWN_GROUP,
    Event,
    Timeline,
    timeline,
    timeline_of_stack,
    with_comparable_callers,
)
from nsa_harness.core.collectives.wait_cycles import Link, cycle
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
from nsa_harness.core.recording.first_executions import OwnRun, own_runs
from nsa_harness.core.report import Facts, Place, Status
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.verdict.group_waits import job_backend
from nsa_harness.core.verdict.motion import rank_stack
from nsa_harness.core.verdict.proof import computations
from nsa_harness.core.verdict.verdict import Failure, FailureKind, Judgement, received_other_collective
from nsa_harness.core.verdict.wait import ChildWait, Wait

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class DiagnosisContext:
    """Everything a diagnosis rule can use: the evidence of a run, its verdict and values derived from both."""

    evidence: Evidence
    judgement: Judgement

    @cached_property
    def program(self) -> ProgramSource:
        """The program's stored source code."""
        return ProgramSource(self.evidence.sources)

    def rank(self, rank: int | None) -> RankEvidence | None:
        """Return the evidence of one rank, or None if there is none."""
        return self.evidence.of_rank.get(rank) if rank is not None else None

    def status_file(self, rank: int | None) -> StatusFile | None:
        """Return the last status file of one rank, or None if the rank wrote none."""
        evidence = self.rank(rank)
        return evidence.status_file if evidence else None

    @cached_property
    def last_snapshot(self) -> dict[int, RankSnapshot]:
        """A dict from each rank to its state in the last snapshot. The dict is empty if there is no snapshot."""
        return {rank.rank: rank for snapshot in self.evidence.snapshots[-1:] for rank in snapshot.ranks}

    @cached_property
    def waits(self) -> dict[int, Wait]:
        """A dict from each rank to its wait in a proven hang. The dict is empty if no hang is proven."""
        return {wait.rank: wait for wait in self.judgement.proof.graph.waits} if self.judgement.proof else {}

    @property
    def first_failure(self) -> Failure | None:
        """The first failure of the run, or None if no process failed."""
        return self.judgement.failures[0] if self.judgement.failures else None

    @property
    def roots(self) -> tuple[Wait, ...]:
        """The waits that started a proven hang, which no other rank's wait explains; () if no hang is proven."""
        return self.judgement.proof.graph.roots if self.judgement.proof else ()

    @cached_property
    def status_files(self) -> dict[int, StatusFile]:
        """A dict from each rank to its last status file. Ranks that wrote none are missing."""
        return {rank.rank: rank.status_file for rank in self.evidence.ranks if rank.status_file}

    @property
    def counts_steps(self) -> bool:
        """Whether the status files count training steps. The value is also True if there are no status files."""
        status_files = self.status_files.values()
        return not status_files or any(status_file.has_optimizer or status_file.steps_s for status_file in status_files)

    @cached_property
    def stacks_only(self) -> bool:
        """Whether call stacks are the only evidence of where the ranks hang."""
        if self.judgement.status is not Status.HANG or not self.last_snapshot or self.status_files:
            return False
        recorded_timelines = self._recorded_timelines
        return not any(events_of_rank.events for events_of_rank in recorded_timelines.values()) or not differences(
            recorded_timelines, groups_of(recorded_timelines, {}), {}
        )

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """The calls of each rank in their order; only the call in its last stack if nothing else is known."""
        if not self.stacks_only:
            return self._recorded_timelines
        taken_s = self.evidence.snapshots[-1].at_s
        return {
            rank: timeline_of_stack(rank, rank_stack(snapshot), taken_s)
            for rank, snapshot in self.last_snapshot.items()
        }

    @cached_property
    def _recorded_timelines(self) -> dict[int, Timeline]:
        return with_comparable_callers(
            {
                rank.rank: timeline(
                    rank.rank,
                    rank.status_file,
                    collectives_of(self.evidence, rank),
                    self.backend,
                    groups_with_gaps=groups_with_gaps(self.evidence, rank),
                )
                for rank in self.evidence.ranks
            }
        )

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """The points at which the ranks' collective calls diverge, at most one per process group."""
        if self.stacks_only:
            difference = difference_of_stacks(self.timelines)
            return (difference,) if difference else ()
        mismatched = [rank.rank for rank in self.evidence.ranks if received_other_collective(rank)]
        return differences(self.timelines, self._groups, self.status_files, self._are_alternatives, mismatched)

    def _are_alternatives(self, event: Event, other: Event) -> bool:
        """Return whether one condition in the program could decide which of the two calls is made."""
        path, other_path = ((*reversed(each.chain),) or (each.place,) for each in (event, other))
        return self.program.are_alternatives(path, other_path)

    @cached_property
    def _groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return groups_of(self.timelines, self.status_files, self.evidence.groups)

    @cached_property
    def difference(self) -> Difference | None:
        """The first point at which a rank skipped a call or made a different one, or None if there is none."""
        return next((difference for difference in self.differences if difference.kind is not DifferenceKind.LATE), None)

    @cached_property
    def cycle(self) -> tuple[Link, ...]:
        """A cycle of ranks that wait for each other in different process groups, or an empty tuple if there is none."""
        return cycle(self.timelines, self._groups)

    @cached_property
    def own_runs(self) -> tuple[OwnRun, ...]:
        """The statements that only some ranks executed, by first execution; () if a rank has no coverage."""
        coverages = {rank.rank: rank.coverage for rank in self.evidence.ranks if rank.coverage is not None}
        if len(coverages) < max(2, len(self.evidence.ranks)):
            return ()
        return own_runs(coverages, self.program, self.shared_calls_s)

    @cached_property
    def shared_calls_s(self) -> dict[int, tuple[float, ...]]:
        """A dict from each rank to the times at which it finished a collective, as far as they are recorded."""
        return {rank: shared_calls_s(status_file) for rank, status_file in self.status_files.items()}

    @cached_property
    def backend(self) -> str:
        """The torch.distributed backend of the run, such as "gloo" or "nccl"."""
        backend = job_backend(self.evidence.backend, self.status_files.values())
        collectives = [collective for rank in self.evidence.ranks for collective in collectives_of(self.evidence, rank)]
        if backend in ("gloo", "nccl") or not collectives:
            return backend
        return "gloo" if all(collective.started is None for collective in collectives) else backend

    @cached_property
    def step_difference(self) -> StepDifference | None:
        """The first step in which the ranks called different numbers of collectives, or None if there is none."""
        return first_step_of_difference({rank.rank: rank.ledger for rank in self.evidence.ranks if rank.ledger})


def collectives_of(evidence: Evidence, rank: RankEvidence) -> tuple[Collective, ...]:
    """Return the recorded collectives of a rank, in the order of their creation."""
    last = evidence.snapshots[-1].of_rank.get(rank.rank) if evidence.snapshots else None
    in_snapshot = last.collectives if last else ()
    by_number = {(collective.group, collective.seq): collective for collective in rank.collectives}
    for collective in in_snapshot:
        at_exit = by_number.get((collective.group, collective.seq))
        by_number[collective.group, collective.seq] = collective if at_exit is None or collective.retired else at_exit
    return tuple(
        sorted(by_number.values(), key=lambda collective: (collective.created_ns, collective.group, collective.seq))
    )


def groups_with_gaps(evidence: Evidence, rank: RankEvidence) -> frozenset[str]:
    """Return the process groups for which the rank's flight recorder is missing some calls."""
    last = evidence.snapshots[-1].of_rank.get(rank.rank) if evidence.snapshots else None
    recorders = [rank.collectives, *([last.collectives] if last else [])]
    return frozenset(group for collectives in recorders for group, _, _ in missing_numbers(collectives))


def layer_of(module: str | None) -> int | None:
    """Return the layer number in a module name, such as 7 for `blocks.7.attn`, or None if it has none."""
    number = _LAYER.search(module or "")
    return int(number[1]) if number else None


def parameter_place(name: str | None, line: Place | None = None) -> Place:
    """Return the place of a parameter: its module and layer, together with the program line `line`."""
    module = name.rpartition(".")[0] or None if name else None
    return replace(line or Place(), parameter=name, module=module, layer=layer_of(name))


def module_of(context: DiagnosisContext, rank: int | None) -> str | None:
    """Return the name of the module whose forward or backward pass the rank is in, or None if it is in none."""
    status_file = context.status_file(rank)
    event = status_file.latest_training_event if status_file else None
    return event.name if event and event.kind in ("forward", "backward") else None


def place_of(context: DiagnosisContext, rank: int | None, frame: Frame | None) -> Place | None:
    """Return a place with the line of `frame` and the module that `rank` is in, or None if both are unknown."""
    module = module_of(context, rank)
    if frame is None:
        return Place(module=module, layer=layer_of(module)) if module else None
    return Place(file=frame.file, line=frame.line, function=frame.function, module=module, layer=layer_of(module))


def wait_place(context: DiagnosisContext, wait: Wait) -> Place | None:
    """Return the program line on which the rank waits, or None if it is unknown."""
    return place_of(context, wait.rank, wait.user_frame)


def last_known_place(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return the last recorded location of a rank whose stack is unknown, or None if none was recorded."""
    status_file = context.status_file(rank)
    if status_file is None or (
        status_file.heartbeat_frame is not None and not is_library(status_file.heartbeat_frame.file)
    ):
        return place_of(context, rank, status_file.heartbeat_frame if status_file else None)
    last_call = next((call for call in reversed(status_file.calls) if call.place), None)
    module_place = place_of(context, rank, None)
    if last_call is None or (
        module_place is not None
        and status_file.latest_training_event is not None
        and status_file.latest_training_event.at_s > last_call.entered_s
    ):
        return module_place
    return last_call.place


def last_call_before_exit(context: DiagnosisContext, rank: int | None) -> Place | None:
    """Return the line of the rank's last collective call, or None if anything was recorded after the call."""
    status_file = context.status_files.get(rank) if rank is not None else None
    if status_file is None or status_file.exit_chain or not status_file.calls or status_file.beat_s is None:
        return None
    # A training event after the call means that the rank had already left it.
    event_s = status_file.latest_training_event.at_s if status_file.latest_training_event is not None else 0.0
    return status_file.calls[-1].place if status_file.calls[-1].entered_s > max(status_file.beat_s, event_s) else None


def last_heartbeat_facts(context: DiagnosisContext, rank: int | None) -> Facts | None:
    """Return the line of a rank's last heartbeat and the seconds from then until its exit, or None if not recorded."""
    evidence, status_file = context.rank(rank), context.status_file(rank)
    if (
        evidence is None
        or status_file is None
        or status_file.heartbeat_frame is None
        or status_file.beat_s is None
        or evidence.exit is None
    ):
        return None
    place = Place(file=status_file.heartbeat_frame.file, line=status_file.heartbeat_frame.line)
    return {"line": place, "before_end_s": max(0.0, evidence.exit.at_s - status_file.beat_s)}


def last_progress_facts(context: DiagnosisContext, rank: int | None) -> Facts:
    """Return facts about what a rank was last seen doing, or only `unseen`: the reason, a key of [unseen]."""
    status_file = context.status_file(rank)
    event = status_file.latest_training_event or status_file.latest_event if status_file else None
    if event is not None:
        return {"in": event.kind, "name": event.name, "step": event.step}
    if context.evidence.ending is Ending.POST_MORTEM:
        return {"unseen": "no_file"}
    if rank is None:
        return {"unseen": "launcher"}
    return {"unseen": "not_inspected" if context.evidence.is_attached else "no_progress"}


def loop_place(context: DiagnosisContext, root: Wait) -> Place | None:
    """Return the line of an endless loop that most samples of the computing thread or process show, or None."""
    own = [sample.user_frame for sample in context.evidence.samples_of_rank.get(root.rank, ())]
    below = [child.user_frame for child in computations(root, context.evidence.samples)[0]] if root.computing else []
    lines = Counter(user for user in below or own if user)
    return place_of(context, root.rank, lines.most_common(1)[0][0] if lines else root.user_frame)


def hung_roots(context: DiagnosisContext) -> Sequence[Wait]:
    """Return the waits that started a hang. The result is empty unless the verdict is HANG."""
    return context.roots if context.judgement.status is Status.HANG else ()


def root_where(
    matches: Callable[[Wait], bool], *, all_matching: bool = False
) -> Callable[[DiagnosisContext], tuple[Wait, tuple[int, ...]] | None]:
    """Return a function for `@rule_if` that finds a hang started by a wait that satisfies `matches`.

    It returns the first such wait, and the ranks that wait in the same way on the same line (with `all_matching`: the
    ranks of all such waits).
    """

    def find(context: DiagnosisContext) -> tuple[Wait, tuple[int, ...]] | None:
        roots = [root for root in hung_roots(context) if matches(root)]
        ranks = (
            root.rank
            for root in roots
            if all_matching or (root.kind, root.user_frame) == (roots[0].kind, roots[0].user_frame)
        )
        return (roots[0], tuple(ranks)) if roots else None

    return find


def first_failure_of(*kinds: FailureKind) -> Callable[[DiagnosisContext], tuple[Failure] | None]:
    """Return a function for `@rule_if` that finds a first failure of these kinds that no other rank caused."""

    def find(context: DiagnosisContext) -> tuple[Failure] | None:
        first = context.first_failure
        return (first,) if first and not first.is_collateral and first.kind in kinds else None

    return find


first_own_failure = first_failure_of(*FailureKind)


def first_own_exception(context: DiagnosisContext) -> tuple[Failure, RaisedException] | None:
    """Return the run's first failure and its exception, or None if another rank's failure caused it."""
    first = context.first_failure
    return (first, first.exception) if first and first.exception and not first.is_collateral else None


def exception_place(context: DiagnosisContext, rank: int | None, error: RaisedException) -> Place | None:
    """Return the innermost program line in the exception's traceback, or None if it has none."""
    return place_of(context, rank, user_frame(error.frames))


def call_facts(context: DiagnosisContext, rank: int, event: Event) -> Facts:
    """Return facts about a collective call: its operation, number, group and line."""
    group = "" if event.group == UNKNOWN_GROUP else event.group
    return {"op": event.op, "number": event.seq, "group": group, "line": event_place(context, rank, event)}


def event_place(context: DiagnosisContext, rank: int, event: Event) -> Place | None:
    """Return the program line on which `rank` made the collective call `event`, or None if it is unknown."""
    if event.from_python:
        return event.place
    if event.is_done:
        return None
    if rank in context.waits:
        return wait_place(context, context.waits[rank])
    evidence = context.rank(rank)
    return place_of(context, rank, user_frame(evidence.exception.frames) if evidence and evidence.exception else None)


def flight_proof(context: DiagnosisContext, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the paths of the ranks' flight recorder files, omitting ranks without recorded calls."""
    evidence = (context.rank(rank) for rank in ranks)
    return tuple(f"rank{rank.rank}/flight.json" for rank in evidence if rank and collectives_of(context.evidence, rank))


def dump_proof(context: DiagnosisContext, wait: Wait) -> tuple[str, ...]:
    """Return a tuple with the path of the waiting rank's stack dump. The tuple is empty if there is no dump."""
    snapshot = context.last_snapshot.get(wait.rank)
    return (snapshot.proof,) if snapshot and snapshot.proof else ()


def ledger_proof(context: DiagnosisContext, rank: int) -> tuple[str, ...]:
    """Return a tuple with the path of the file that lists the rank's calls, or () if there is no such file."""
    return (f"rank{rank}/calls.txt",) if context.status_file(rank) else ()


def is_same_exception(failure: Failure, other: Failure) -> bool:
    """Return whether two ranks raised the same exception on the same line, so that neither failure caused the other."""
    if failure.exception is None or other.exception is None or failure.is_collateral or other.is_collateral:
        return False
    if failure.exception.type != other.exception.type:
        return False
    return user_frame(failure.exception.frames) == user_frame(other.exception.frames)


def failed_ranks(failures: Sequence[Failure]) -> tuple[int, ...]:
    """Return the ranks of `failures` in ascending order."""
    return tuple(sorted(failure.rank for failure in failures if failure.rank is not None))


def waiting_function(wait: Wait) -> str:
    """Return the name of the program function that is waiting, or "" if it is unknown."""
    return wait.user_frame.function if wait.user_frame else ""


def process_facts(child: ChildWait | None) -> Facts | None:
    """Return facts about the child process that a rank waits for, or None if `child` is None."""
    if child is None:
        return None
    return {"pid": child.pid, "command": child.command, "blocked_in": child.deepest.kind.value}


def ranks_by_facts(facts: Iterable[tuple[int, Facts]]) -> tuple[Facts, ...]:
    """Merge equal facts: return for example ({"ranks": (0, 2), "gradients": 4}, {"ranks": (1,), "gradients": 3})."""
    ranks_by_text: dict[str, list[int]] = {}
    facts_by_text: dict[str, Facts] = {}
    for rank, fact in facts:
        facts_by_text[repr(fact)] = fact
        ranks_by_text.setdefault(repr(fact), []).append(rank)
    return tuple({"ranks": tuple(ranks_by_text[text]), **fact} for text, fact in facts_by_text.items())


def meshes(evidence: Evidence) -> Meshes:
    """Return the node of each rank, if several nodes were observed, and its recorded device mesh coordinates."""
    places = {rank.rank: rank.status_file.mesh for rank in evidence.ranks if rank.status_file and rank.status_file.mesh}
    return {**places, **{rank: (("", node), *places.get(rank, ())) for rank, node in evidence.nodes.items()}}


def step_in_progress(context: DiagnosisContext, rank: RankEvidence) -> int | None:
    """Return the number of the step that the rank is in, counted from 1, or None if it is unknown."""
    status_file = rank.status_file
    if status_file is None:
        return None
    between = status_file.latest_training_event is not None and status_file.latest_training_event.kind == "step"
    # A step without a recorded forward pass or batch does not set `step`, so count the finished steps.
    step = status_file.steps_s[-1][0] if between and status_file.steps_s else status_file.step
    return (
        step + 1
        if between and _is_above_optimizer_step(rank_frames(context, rank), status_file.optimizer_chain)
        else step
    )


def rank_frames(context: DiagnosisContext, rank: RankEvidence) -> Sequence[Frame]:
    """Return the last known stack of a rank, innermost frame first. The result is empty if no stack was recorded."""
    snapshot, status_file = context.last_snapshot.get(rank.rank), rank.status_file
    stack = training_stack(snapshot.stacks, snapshot.pid) if snapshot else None
    stacks = (
        # In a hang, the rank only printed this traceback and continued.
        rank.exception.frames if rank.exception and not hung_roots(context) else (),
        status_file.exit_chain if status_file else (),
        rank.death_stacks[-1].frames if rank.death_stacks and rank.exit else (),
        stack.frames if stack else (),
        (status_file.heartbeat_frame,) if status_file and status_file.heartbeat_frame else (),
    )
    return next(filter(None, stacks), ())


def program_frames(context: DiagnosisContext, rank: int) -> list[Frame]:
    """Return the last known stack of a rank, outermost frame first, without library frames."""
    evidence = context.rank(rank)
    frames = rank_frames(context, evidence) if evidence else ()
    return [frame for frame in reversed(frames) if not is_library(frame.file)]


def _is_above_optimizer_step(stack: Sequence[Frame], step_path: Sequence[Frame]) -> bool:
    """Return whether a stack is in the iteration after `optimizer.step`, above the line that calls it."""
    own = [frame for frame in stack if not is_library(frame.file)]
    for step_frame in reversed(step_path):
        own_frame = next((frame for frame in reversed(own) if _same_function(frame, step_frame)), None)
        if own_frame is not None and own_frame.line != step_frame.line:
            return own_frame.line < step_frame.line
    return False


def _same_function(frame: Frame, other: Frame) -> bool:
    """Return whether both frames are in one function. Only py-spy prefixes a method with its class."""
    functions = {candidate.function.rpartition(".")[2] for candidate in (frame, other)}
    return len(functions) == 1 and PurePath(frame.file).name == PurePath(other.file).name
