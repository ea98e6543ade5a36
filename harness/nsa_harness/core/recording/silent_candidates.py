"""Yield the lines that may explain a difference which no exception and no parting of the ranks shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsa_harness.core.recording.candidate_builder import CandidateBuilder
from nsa_harness.core.recording.clues import Clue, Named
from nsa_harness.core.recording.explanation import Candidate, OriginKind, SilentDifference
from nsa_harness.core.recording.missing_collectives import discarded_results, skipped_collectives
from nsa_harness.core.recording.origin import can_show_order, early_collections, first_use
from nsa_harness.core.recording.provability import OF_RANK
from nsa_harness.core.recording.slicing import Pair, Step, extra_draws, first_differences

NEVER_EQUAL = "never equal again"  # as in `ReplicaDivergence.identified_by`
_USUAL = (*OF_RANK, OriginKind.CLOCK)  # differences that every healthy run has
_BY_CHANCE = (OriginKind.LEAK, OriginKind.HASH_ORDER)  # the recording may not show how these lead to a failure


def unequal_replicas(builder: CandidateBuilder, silent: SilentDifference | None) -> Iterator[Named]:
    """Yield where parameters that differ were made after the others had been collected to be made equal."""
    if silent is None:
        return
    trace, is_copy = builder.traces[0], silent.kind == "unequal copy"
    name = next(iter(silent.names), "")
    if silent.kind in ("", "optimizer state"):  # DDP averaged some gradients, and others not
        made = zip(trace.communications, trace.owners, strict=True)
        for execution in [owner for one, owner in made if one.operation == "no_sync"][:1]:
            found = builder.candidate(0, execution, OriginKind.UNSYNCHRONIZED, ())
            yield Clue.STALE, replace(found, values=())
    if silent.kind in ("", NEVER_EQUAL):
        for execution, copy in discarded_results(trace, builder.statements):
            found = builder.candidate(0, execution, OriginKind.DISCARDED_RESULT, (), name=copy)
            yield Clue.STALE, replace(found, values=())
    for early, late in early_collections(trace, builder.statements, silent.names, is_copy=is_copy):
        kind = OriginKind.EARLY_COPY if is_copy else OriginKind.STALE_PARAMETERS
        for execution, other in ((early, late), (late, early)) if is_copy else ((late, early), (early, late)):
            found = builder.candidate(0, execution, kind, (), name=name, caller=trace.place(other))
            yield Clue.STALE, replace(found, values=())


def uses_of_difference(builder: CandidateBuilder, silent: SilentDifference | None) -> Iterator[Named]:
    """Yield what made the first value differ that is named like what differs silently, or a learning rate."""
    silent = silent or SilentDifference(kind="")
    for pair in builder.outer_pairs():
        found = first_use(builder.alignment, pair, builder.statements, silent)
        if found is not None:
            row, name = found
            ranks = builder.ranks_of(pair[1:])
            steps = builder.facts.slicer(pair).slice((row[pair[0]], row[pair[1]]))
            yield from _skipped_collectives(builder, pair, row[pair[0]], steps)
            kind = OriginKind.MISSING_REDUCTION if silent.kind == "learning rate" else OriginKind.UNKNOWN
            yield Clue.STALE, builder.candidate(pair[0], row[pair[0]], kind, ranks, name=name, row=row)
            yield from builder.of_steps(steps, pair, ranks)


def _skipped_collectives(builder: CandidateBuilder, pair: Pair, use: int, steps: Sequence[Step]) -> Iterator[Named]:
    """Yield a condition that skipped a collective in a function that made a value differ, and what the condition reads.

    `use`: the execution that used the value. `steps`: how the value was made.
    """
    trace, slicer = builder.traces[pair[0]], builder.facts.slicer(pair)
    made = [use, *(step.executions[0] for step in steps if step.executions[0] is not None)]
    for condition in skipped_collectives(trace, builder.statements, made):
        every = [name for name, _ in trace.executions[condition].reads]
        names = [name for name in every if "." in name] or every
        for execution in (condition, *slicer.makers(condition, names)):
            name = names[0] if names else ""
            found = builder.candidate(pair[0], execution, OriginKind.SKIPPED_COLLECTIVE, (), name=name)
            yield Clue.STALE, replace(found, values=())


def differences_that_are_unusual(builder: CandidateBuilder) -> Iterator[Named]:
    """Yield the statements that made the first differences, without those that every healthy run has."""
    for pair in builder.outer_pairs():
        for step in first_differences(builder.alignment, pair):
            kind = builder.facts.kind(step, pair)
            if kind not in _USUAL:
                yield Clue.OWN_NUMBER, builder.of_step(step, kind, pair, builder.ranks_of(pair[1:]))


def by_chance(builder: CandidateBuilder) -> Iterator[Candidate]:
    """Yield where the ranks first differed by chance, even if no recorded value leads from there to the failure.

    An experiment changes all hashes at once, so it proves the origin only if there is one.
    """
    for pair in builder.outer_pairs():
        steps = [*first_differences(builder.alignment, pair), *extra_draws(builder.alignment, pair)]
        kinds = [builder.facts.kind(step, pair) for step in steps]
        for step, kind in zip(steps, kinds, strict=True):
            if kind in _BY_CHANCE and (
                kind is not OriginKind.HASH_ORDER or can_show_order(step, builder.traces, pair, builder.statements)
            ):
                candidate = builder.of_step(step, kind, pair, builder.ranks_of(pair[1:]))
                is_one = kind is not OriginKind.HASH_ORDER or kinds.count(kind) == 1
                yield replace(candidate, chain=(), is_provable=candidate.is_provable and is_one)
