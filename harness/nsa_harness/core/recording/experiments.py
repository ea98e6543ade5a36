"""Plan the experiments that test the candidates of an explanation."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from nsa_harness.core.recording.explanation import (
    Candidate,
    Division,
    ExperimentKind,
    Explanation,
    OriginKind,
    PlannedExperiment,
    RankValues,
)
from nsa_harness.core.recording.source_statements import LOOPS, Path, Statement, called_names, path_of, statement_at
from nsa_harness.core.report import Place

MAX_OF_ORIGIN = 3  # experiments that test an origin
_GENERATOR = "generator:"  # prefix of the name of a candidate whose value is the state of a random generator
# Parts of the names of functions that draw from a random generator.
_DRAWING = re.compile(
    r"rand|shuffle|sample|choice|normal|uniform|permutation|multinomial|bernoulli|dropout|rng|generator|gauss|beta"
)


def plan_experiments(explanation: Explanation, sources: Mapping[str, str]) -> tuple[PlannedExperiment, ...]:
    """Return the experiments that are worth a run, in the order in which to make them.

    `sources` has the text of each source file by absolute path. Experiments that test an origin come before those that
    only test the decision.
    """
    division, order = explanation.division, list(ExperimentKind)
    origins = [
        planned
        for index, candidate in enumerate(explanation.candidates)
        if candidate.place.file is not None and candidate.place.line is not None
        if not _is_normal_difference(candidate, explanation)
        for planned in _for_candidate(index, candidate, division, sources)
    ]
    origins = [_without_downstream_proof(planned, origins, explanation.candidates) for planned in origins]
    # A difference by chance from which no recorded value leads to the failure has no chain, and is tested last.
    chains = [candidate.chain for candidate in explanation.candidates]
    origins.sort(key=lambda one: (not one.proves_origin, not chains[one.candidate], order.index(one.kind)))
    origins = origins[:MAX_OF_ORIGIN]
    decisions = [] if division is None or division.place.file is None else _for_decision(division, sources)
    unique: dict[str, PlannedExperiment] = {}
    for planned in (*origins, *decisions):
        unique.setdefault(json.dumps(planned.instruction), planned)
    return tuple(unique.values())


def _is_normal_difference(candidate: Candidate, explanation: Explanation) -> bool:
    """Return whether the ranks rightly differ in a candidate, as in their data and in the draws for the data.

    Equal data would remove every difference, and so prove nothing. Data are containers and tensors. A draw is for the
    data if a value that the ranks should have reduced is computed from it.
    """
    if candidate.kind is OriginKind.LEAK:
        return False
    candidates, division = explanation.candidates, explanation.division
    shown = [*candidate.values, *(division.values if division else ())]
    texts = [text for value in shown if value.name == candidate.name for _, text in value.values]
    is_known = bool(texts) or not candidate.name or candidate.name.startswith(_GENERATOR)
    if candidate.kind is not OriginKind.HASH_ORDER and not (is_known and all(map(_is_scalar, texts))):
        return True
    seeds = candidate.kind is OriginKind.RANDOM or "seed" in candidate.name.lower()
    later = {(place.file, place.line) for place, _ in candidate.chain[1:]}
    return seeds and any(
        other.kind is OriginKind.MISSING_REDUCTION and (other.place.file, other.place.line) in later
        for other in candidates
    )


def _is_scalar(text: str) -> bool:
    try:
        return not isinstance(ast.literal_eval(text), (list, tuple, dict, set))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text.lstrip("-") in ("inf", "nan")


def _without_downstream_proof(
    planned: PlannedExperiment, others: Sequence[PlannedExperiment], candidates: Sequence[Candidate]
) -> PlannedExperiment:
    """Return the experiment with `proves_origin` only if its candidate can be the origin.

    Equal values of a variable that is computed from the origin also let the ranks go on. They prove nothing about the
    variable's own statement.
    """
    candidate = candidates[planned.candidate]
    tested = (candidates[other.candidate] for other in others if other.candidate != planned.candidate)
    is_downstream = any(
        (place.file, place.line) == (candidate.place.file, candidate.place.line)
        for other in tested
        for place, _ in other.chain[1:]
    )
    is_effect = planned.kind is ExperimentKind.SET_VALUE and (is_downstream or _has_other_inputs(candidate))
    if is_effect or not candidate.is_provable:
        return replace(planned, proves_origin=False)
    return planned


def _has_other_inputs(candidate: Candidate) -> bool:
    """Return whether other values that differ come into the candidate's statement, besides the rank's number."""
    if candidate.kind is OriginKind.MISSING_REDUCTION:
        return False
    return any(
        value.name != candidate.name
        and len({text for _, text in value.values}) > 1
        and not _is_rank_number(value, path_of(value.name))
        for value in candidate.values
    )


def _for_candidate(
    index: int, candidate: Candidate, division: Division | None, sources: Mapping[str, str]
) -> Iterator[PlannedExperiment]:
    """Yield the experiments that test whether a candidate is the origin."""
    statement = statement_at(candidate.place, sources)
    values = [value for value in candidate.values if value.name == candidate.name]
    reference, ranks = _reference(values, _involved_ranks(candidate, division))
    plan = partial(_planned, index, candidate.place, reference=reference, ranks=ranks)
    callers = _callers(candidate.caller or candidate.place, sources)
    undo = partial(_planned, index, candidate.place, ExperimentKind.UNDO_LEAK, callers=callers)
    path, generator = path_of(candidate.name), candidate.name.startswith(_GENERATOR)
    if path and statement is not None and not _uses(statement, str(path[0][1])):
        path = ()  # the name that another function has for the value
    if candidate.kind is OriginKind.LEAK:
        if path or generator:
            yield undo(name=candidate.name)
    elif candidate.kind is OriginKind.RANDOM and candidate.caller is not None:
        yield undo(name=candidate.name if generator else "")
    elif candidate.kind is OriginKind.RANDOM and (generator or _uses_generator(statement)):
        name = candidate.name if generator else ""
        yield plan(ExperimentKind.SHARE_GENERATOR, name=name, is_after=_seeds(statement))
    elif candidate.kind is OriginKind.HASH_ORDER:
        yield replace(plan(ExperimentKind.FIX_HASH_SEED), env=(("PYTHONHASHSEED", "0"),))
    if path and candidate.kind not in _NOT_VALUES and not any(_is_rank_number(value, path) for value in values):
        is_after = statement is not None and any(map(statement.assigns, _prefixes(candidate.name)))
        is_temporary = not is_after and _only_decides(statement)
        yield plan(ExperimentKind.SET_VALUE, name=candidate.name, is_after=is_after, is_temporary=is_temporary)
    elif candidate.kind is OriginKind.MISSING_REDUCTION and candidate.is_provable and _only_decides(statement):
        ways = [rank for rank in _involved_ranks(candidate, division) if rank not in candidate.ranks] or [0]
        others = tuple(rank for rank in _involved_ranks(candidate, division) if rank != ways[0])
        force = partial(plan, ExperimentKind.FORCE_BRANCH, reference=ways[0], ranks=others)
        yield force(occurrence=candidate.occurrence)


def _callers(caller: Place, sources: Mapping[str, str]) -> list[Place]:
    """Return the statement that makes an extra call, and the others in the same branch, which may make more of them."""
    statement = statement_at(caller, sources)
    branch = statement.parents[-1] if statement is not None and statement.parents else None
    if statement is None or not isinstance(branch, ast.If):
        return [caller]
    body = branch.body if statement.node in branch.body else branch.orelse
    lines = {node.lineno for top in body for node in ast.walk(top) if isinstance(node, ast.stmt)}
    return [replace(caller, line=line) for line in sorted(lines)]


def _for_decision(division: Division, sources: Mapping[str, str]) -> Iterator[PlannedExperiment]:
    """Yield the experiments that make all ranks decide alike: by equal values, or by the same next statement."""
    statement = statement_at(division.place, sources)
    ranks = tuple(sorted({rank for ranks, _ in division.ways for rank in ranks}))
    plan = partial(_planned, 0, division.place, proves_origin=False, is_of_decision=True)
    for value in division.values:
        path = path_of(value.name)
        texts = {text for _, text in value.values}
        if path and len(texts) > 1 and all(map(_is_scalar, texts)) and not _is_rank_number(value, path):
            reference, others = _reference((value,), ranks)
            is_temporary = _only_decides(statement)
            yield plan(
                ExperimentKind.SET_VALUE, name=value.name, reference=reference, ranks=others, is_temporary=is_temporary
            )
            break
    way = _way_to_force(division, statement)
    if way:
        others = tuple(rank for rank in ranks if rank != min(way))
        yield plan(ExperimentKind.FORCE_BRANCH, reference=min(way), ranks=others, occurrence=division.occurrence)


_INSTRUCTIONS = {
    ExperimentKind.UNDO_LEAK: "undo",
    ExperimentKind.FIX_HASH_SEED: "hash_seed",
    ExperimentKind.SHARE_GENERATOR: "generator",
    ExperimentKind.SET_VALUE: "scalar",
    ExperimentKind.FORCE_BRANCH: "branch",
}


def _planned(
    candidate: int,
    place: Place,
    kind: ExperimentKind,
    *,
    name: str = "",
    reference: int = 0,
    ranks: tuple[int, ...] = (),
    occurrence: int = 1,
    is_after: bool = False,
    is_temporary: bool = False,
    callers: Sequence[Place] = (),
    proves_origin: bool = True,
    is_of_decision: bool = False,
) -> PlannedExperiment:
    """Return an experiment with the instruction that the ranks get.

    `reference` is the rank whose value the other `ranks` get. UNDO_LEAK applies to every rank that executes
    one of the `callers`. `is_after`: the change is made after the statement. `is_temporary`: it applies only to this
    statement, so a loss keeps its graph.
    """
    instruction = {
        "kind": _INSTRUCTIONS[kind],
        "file": place.file,
        "line": place.line,
        "from": occurrence,
        "reference": reference,
        "ranks": list(ranks),
        "path": [list(step) for step in path_of(name)],
        "after": is_after,
        "temporary": is_temporary,
        "callers": [[caller.file, caller.line] for caller in callers],
    }
    return PlannedExperiment(
        kind=kind,
        candidate=candidate,
        place=place,
        name=name.removeprefix(_GENERATOR),
        occurrence=occurrence,
        proves_origin=proves_origin,
        is_of_decision=is_of_decision,
        instruction=instruction,
    )


def _way_to_force(division: Division, statement: Statement | None) -> tuple[int, ...]:
    """Return the ranks of the way that all ranks can take, or () if there is none.

    Python can leave the body of a `for` loop, but cannot enter it or continue it.
    """
    ways = [(ranks, place) for ranks, place in division.ways if place is not None and ranks]
    if len(division.ways) < 2 or not ways:
        return ()
    if statement is not None:
        ways = [way for way in ways if not _needs_iterator(way[1], statement)] or ways
    return max(ways, key=lambda way: (len(way[0]), -min(way[0])))[0]


def _needs_iterator(place: Place, statement: Statement) -> bool:
    """Return whether the frame would have to enter or to continue a `for` loop to get from a statement to a place."""
    node, line = statement.node, place.line or 0
    loops = [parent for parent in statement.parents if isinstance(parent, LOOPS)]
    if any(line == loop.lineno and not isinstance(loop, ast.While) for loop in loops):
        return True
    return isinstance(node, (ast.For, ast.AsyncFor)) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)


def _involved_ranks(candidate: Candidate, division: Division | None) -> tuple[int, ...]:
    ways = {rank for ranks, _ in division.ways for rank in ranks} if division else set()
    return tuple(sorted(ways or set(candidate.ranks) | {0}))


def _reference(values: Sequence[RankValues], ranks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the rank whose value most ranks have, and the other ranks. The lowest rank wins a tie."""
    pairs = values[0].values if values else ()
    involved = sorted({*ranks, *(rank for rank, _ in pairs)}) or [0]
    counts = Counter(text for _, text in pairs)
    reference = min(pairs, key=lambda pair: (-counts[pair[1]], pair[0]))[0] if pairs else involved[0]
    return reference, tuple(rank for rank in involved if rank != reference)


def _prefixes(name: str) -> Iterator[str]:
    """Yield a name such as "cfg.steps['eval']" and the names of the objects that hold it: "cfg.steps" and "cfg"."""
    while name and name != "self":
        yield name
        name = name[: max(name.rfind("."), name.rfind("["), 0)]


_NOT_VALUES = (OriginKind.EXCEPTION, OriginKind.CALL, OriginKind.HASH_ORDER, OriginKind.LEAK)


def _is_rank_number(value: RankValues, path: Path) -> bool:
    """Return whether a value is the number of the rank, without which the ranks cannot work."""
    is_named_rank = bool(path) and str(path[-1][1]).lower() in (
        "rank",
        "local_rank",
        "global_rank",
        "world_rank",
        "is_main",
    )
    return is_named_rank or (len(value.values) > 1 and all(text == str(rank) for rank, text in value.values))


def _seeds(statement: Statement | None) -> bool:
    return any("seed" in name for name in called_names(statement))


def _uses(statement: Statement, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement.node)) or (
        statement.assigns(name) or isinstance(statement.node, (ast.Import, ast.ImportFrom))
    )


def _uses_generator(statement: Statement | None) -> bool:
    return statement is None or any("seed" in name or _DRAWING.search(name) for name in called_names(statement))


def _only_decides(statement: Statement | None) -> bool:
    """Return whether a value that the statement reads is used only for its decision."""
    return statement is not None and isinstance(statement.node, (ast.If, ast.While))
