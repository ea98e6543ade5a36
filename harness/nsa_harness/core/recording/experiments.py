"""Plan the experiments that test the candidates of an explanation."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from nsa_harness.core.recording.explanation import (
    RETURNED,
    Candidate,
    Division,
    ExperimentKind,
    Explanation,
    OriginKind,
    PlannedExperiment,
    RankValues,
)
from nsa_harness.core.recording.provability import counts_elements, is_result, names_own_file
from nsa_harness.core.recording.recording import Execution, RankRecording, executions_of
from nsa_harness.core.recording.source_statements import (
    LOOPS,
    Statement,
    called_names,
    except_clause,
    path_of,
    statement_at,
)
from nsa_harness.core.recording.value_texts import (
    begins_length,
    is_rank_number,
    is_scalar,
    lengths_of,
    reference_of,
)
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.excerpt import names_rank

MAX_OF_ORIGIN = 4  # experiments that test an origin
_TENSOR = re.compile(r"\w+ \[")
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_GENERATOR = "generator:"  # prefix of the name of a candidate whose value is the state of a random generator
# Parts of the names of functions that draw from a random generator.
_DRAWING = re.compile(
    r"rand|shuffle|sample|choice|normal|uniform|permutation|multinomial|bernoulli|dropout|rng|generator|gauss|beta"
)


def plan_experiments(
    explanation: Explanation, sources: Mapping[str, str], recordings: Sequence[RankRecording] = ()
) -> tuple[PlannedExperiment, ...]:
    """Return the experiments that are worth a run, in the order in which to make them.

    `sources` has the text of each source file by absolute path, and `recordings` are those that were explained.
    Experiments that test an origin come before those that only test the decision.
    """
    division, order = explanation.division, list(ExperimentKind)
    handler = _handler(division, explanation.candidates, sources) if division is not None else None
    origins = [
        planned
        for index, candidate in enumerate(explanation.candidates)
        if candidate.place.file is not None and candidate.place.line is not None
        if not _is_normal_difference(candidate, explanation)
        for planned in _for_candidate(index, candidate, division, sources, handler)
    ]
    origins = [_without_downstream_proof(planned, origins, explanation.candidates, sources) for planned in origins]
    origins = [_at_extra_call(planned, explanation.candidates, sources) for planned in origins]
    if division is not None and (made := _made_for_loop(division, sources, recordings)) is not None:
        origins += [
            replace(planned, is_of_decision=True, origin=made) for planned in _for_candidate(0, made, division, sources)
        ]
    if division is not None and handler is not None and recordings and min(one.python for one in recordings) >= (3, 12):
        origins += _with_same_exception(division, handler, sources)
    # A difference by chance from which no recorded value leads to the failure has no chain, and is tested last.
    chains = [candidate.chain for candidate in explanation.candidates]
    origins.sort(
        key=lambda one: (not one.proves_origin, not (one.origin or chains[one.candidate]), order.index(one.kind))
    )
    origins = origins[:MAX_OF_ORIGIN]
    decisions = [] if division is None or division.place.file is None else _for_decision(division, sources, handler)
    if division is not None and (role := _for_role(division, explanation.candidates, sources)) is not None:
        decisions = [
            replace(one, proves_origin=True, origin=role) if one.kind is ExperimentKind.FORCE_BRANCH else one
            for one in decisions
        ]
    unique: dict[str, PlannedExperiment] = {}
    for planned in (*origins, *decisions):
        unique.setdefault(json.dumps(planned.instruction), planned)
    return tuple(unique.values())


def control_of(planned: PlannedExperiment) -> PlannedExperiment:
    """Return the control of an experiment: the ranks wait for each other in the same way, and change nothing."""
    return replace(planned, env=(), instruction={**planned.instruction, "control": True})


def _is_normal_difference(candidate: Candidate, explanation: Explanation) -> bool:
    """Return whether the ranks rightly differ in a candidate, as in their data and in the draws for the data.

    Equal data would remove every difference, and so prove nothing. Data are containers and tensors. A draw is for the
    data if a value that the ranks should have reduced is computed from it.
    """
    if candidate.kind is OriginKind.LEAK or lengths_of(candidate)[1]:
        return False
    candidates, division = explanation.candidates, explanation.division
    shown = [*candidate.values, *(division.values if division else ())]
    texts = [text for value in shown if value.name == candidate.name for _, text in value.values]
    is_known = bool(texts) or not candidate.name or candidate.name.startswith(_GENERATOR)
    if candidate.kind is not OriginKind.HASH_ORDER and not (is_known and all(map(is_scalar, texts))):
        return True
    seeds = candidate.kind is OriginKind.RANDOM or "seed" in candidate.name.lower()
    later = {(place.file, place.line) for place, _ in candidate.chain[1:]}
    return seeds and any(
        other.kind is OriginKind.MISSING_REDUCTION and (other.place.file, other.place.line) in later
        for other in candidates
    )


def _made_for_loop(
    division: Division, sources: Mapping[str, str], recordings: Sequence[RankRecording]
) -> Candidate | None:
    """Return the statement that made a sequence of different length on the ranks, if a loop over it is the division."""
    statement = statement_at(division.place, sources)
    if statement is None or not isinstance(statement.node, ast.For):
        return None
    used = {ast.unparse(node) for node in ast.walk(statement.node.iter) if isinstance(node, (ast.Name, ast.Attribute))}
    for value in division.values:
        loop = Candidate(place=division.place, kind=OriginKind.LENGTH, ranks=(), name=value.name, values=(value,))
        if value.name not in used or not lengths_of(loop)[1]:
            continue
        made = {one.rank: _assignments(one, division.place, value.name) for one in recordings}
        lines = {execution.line for found in made.values() for execution in found}
        for executions in zip(*made.values(), strict=False) if len(lines) == 1 else ():
            texts: dict[str, list[tuple[int, str]]] = {}
            for rank, execution in zip(made, executions, strict=True):
                for name, shown in dict((*execution.reads, *execution.writes)).items():
                    texts.setdefault(name, []).append((rank, shown.text))
            values = tuple(RankValues(name=name, values=tuple(pairs)) for name, pairs in texts.items())
            origin = replace(loop, place=replace(division.place, line=min(lines), text=None), values=values)
            if lengths := lengths_of(origin)[1]:
                shortest = min(lengths.values())
                return replace(origin, ranks=tuple(rank for rank in lengths if lengths[rank] > shortest))
    return None


def _assignments(recording: RankRecording, loop: Place, name: str) -> list[Execution]:
    """Return the executions that assigned a name: a variable in the functions with this loop, or an attribute."""
    files = [one for one in executions_of(recording) if one[0].file == loop.file]
    functions = {activation.function for activation, execution in files if execution.line == loop.line}
    return [
        execution
        for activation, execution in files
        if ("." in name or activation.function in functions) and any(other == name for other, _ in execution.writes)
    ]


def _without_downstream_proof(
    planned: PlannedExperiment,
    others: Sequence[PlannedExperiment],
    candidates: Sequence[Candidate],
    sources: Mapping[str, str],
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
    if planned.kind is ExperimentKind.EQUAL_LENGTH and is_result((planned.origin or candidate).place, sources):
        return replace(planned, proves_origin=False)
    if planned.origin is not None:
        return planned
    if planned.kind is ExperimentKind.EQUAL_LENGTH:
        return replace(planned, proves_origin=not is_downstream)
    if planned.kind is ExperimentKind.SET_VALUE and planned.instruction["after"] is True:
        # What a function of the program returns begins to differ inside of the function.
        planned = replace(planned, proves_origin=not is_result(candidate.place, sources))
        loads = [
            other for other in candidates if other.kind is OriginKind.RESTORED_STATE and _hands_on(other, candidate)
        ]
        if loads:
            return replace(planned, origin=replace(candidate, kind=OriginKind.RESTORED_STATE, is_provable=True))
    is_effect = planned.kind is ExperimentKind.SET_VALUE and (
        is_downstream or _has_other_inputs(candidate) or _is_item(planned, sources)
    )
    is_usual = names_own_file(candidate) or counts_elements(candidate, sources)
    if is_effect or not candidate.is_provable or is_usual:
        return replace(planned, proves_origin=False)
    return planned


def _at_extra_call(
    planned: PlannedExperiment, candidates: Sequence[Candidate], sources: Mapping[str, str]
) -> PlannedExperiment:
    """Return the experiment with the call as its origin, if it restores what a call of one rank alone changed."""
    leak = candidates[planned.candidate]
    if planned.kind is not ExperimentKind.UNDO_LEAK or not planned.proves_origin or leak.caller is None:
        return planned
    statement = statement_at(leak.caller, sources)
    for other in candidates if statement is not None else ():
        is_call = other.kind is OriginKind.LEAK and not other.name and other.place.file == leak.caller.file
        if is_call and statement_at(other.place, sources) == statement:
            return replace(planned, origin=replace(leak, place=other.place))
    return planned


def _hands_on(load: Candidate, candidate: Candidate) -> bool:
    """Return whether a function that every rank called returns its rank's state to the statement of a candidate."""
    follows = any(_is_same(place, candidate.place) for place, _ in load.chain[1:])
    return follows and not load.name and any(len(value.values) > 1 for value in load.values)


def _is_same(place: Place, other: Place) -> bool:
    return (place.file, place.line) == (other.file, other.line)


def _is_item(planned: PlannedExperiment, sources: Mapping[str, str]) -> bool:
    """Return whether an experiment sets the variable of a `for` loop, whose values come from what it iterates over."""
    statement = statement_at(planned.place, sources)
    loops = (*statement.parents, statement.node) if statement is not None else ()
    return any(
        isinstance(part, ast.Name) and part.id == planned.name
        for loop in loops
        if isinstance(loop, (ast.For, ast.AsyncFor))
        for part in ast.walk(loop.target)
    )


def _has_other_inputs(candidate: Candidate) -> bool:
    """Return whether other values that differ come into the candidate's statement, besides the rank's number."""
    if candidate.kind is OriginKind.MISSING_REDUCTION:
        return False
    return any(
        value.name != candidate.name
        and len({text for _, text in value.values}) > 1
        and not is_rank_number(value, path_of(value.name))
        for value in candidate.values
    )


def _for_candidate(
    index: int,
    candidate: Candidate,
    division: Division | None,
    sources: Mapping[str, str],
    handler: Candidate | None = None,
) -> Iterator[PlannedExperiment]:
    """Yield the experiments that test whether a candidate is the origin.

    `handler` is the `except` clause in which only some ranks went on, if there is one.
    """
    statement = statement_at(candidate.place, sources)
    values = [value for value in candidate.values if value.name == candidate.name]
    reference, ranks = reference_of(values, _involved_ranks(candidate, division))
    plan = partial(_planned, index, candidate.place, reference=reference, ranks=ranks)
    callers = _callers(candidate.caller or candidate.place, sources)
    undo = partial(_planned, index, candidate.place, ExperimentKind.UNDO_LEAK, callers=callers)
    path, generator = path_of(candidate.name), candidate.name.startswith(_GENERATOR)
    if path and statement is not None and not _uses(statement, str(path[0][1])):
        path = ()  # the name that another function has for the value
    involved = _involved_ranks(candidate, division)
    if lengths := lengths_of(candidate)[1]:
        name = lengths_of(candidate)[0]
        is_after = statement is not None and not isinstance(statement.node, LOOPS) and statement.assigns(name)
        shortest = min(lengths, key=lambda rank: (lengths[rank], rank))
        others = tuple(rank for rank in involved if rank != shortest)
        if path_of(name) and is_after and begins_length(candidate):
            force = partial(plan, ExperimentKind.EQUAL_LENGTH, name=name, is_after=is_after)
            yield force(reference=shortest, ranks=others)
        return
    if handler is not None and candidate.kind is OriginKind.EXCEPTION and (guard := _guard(statement)) is not None:
        place = replace(candidate.place, line=guard.lineno, text=None)
        others = tuple(rank for rank in involved if rank not in handler.ranks)
        if others:
            force = partial(_planned, index, place, ExperimentKind.FORCE_BRANCH, is_of_decision=True)
            yield force(reference=others[0], ranks=handler.ranks, origin=handler)
    if candidate.is_provable and any(value.name == RETURNED for value in candidate.values):
        yield from _for_result(index, candidate, division, sources)
        return
    if _decides_by_tensors(candidate, statement) and (division is None or _is_same(division.place, candidate.place)):
        force = partial(plan, ExperimentKind.FORCE_BRANCH, occurrence=candidate.occurrence)
        known = replace(candidate, kind=OriginKind.MISSING_REDUCTION, is_provable=True)
        sides = [rank for rank in involved if rank not in candidate.ranks][:1] + list(candidate.ranks[:1])
        for rank in sides:
            yield force(reference=rank, ranks=tuple(one for one in involved if one != rank), origin=known)
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
    is_equal = any(len(value.values) > 1 and len({text for _, text in value.values}) == 1 for value in values)
    is_of_rank = any(is_rank_number(value, path) for value in values)
    if path and candidate.kind not in _NOT_VALUES and not is_equal and not is_of_rank:
        is_after = statement is not None and any(map(statement.assigns, _prefixes(candidate.name)))
        is_temporary = not is_after and _only_decides(statement)
        yield plan(ExperimentKind.SET_VALUE, name=candidate.name, is_after=is_after, is_temporary=is_temporary)
    elif candidate.kind is OriginKind.MISSING_REDUCTION and candidate.is_provable and _only_decides(statement):
        ways = [rank for rank in _involved_ranks(candidate, division) if rank not in candidate.ranks] or [0]
        others = tuple(rank for rank in _involved_ranks(candidate, division) if rank != ways[0])
        force = partial(plan, ExperimentKind.FORCE_BRANCH, reference=ways[0], ranks=others)
        yield force(occurrence=candidate.occurrence)


def _for_result(
    index: int, candidate: Candidate, division: Division | None, sources: Mapping[str, str]
) -> Iterator[PlannedExperiment]:
    """Yield the experiment in which all ranks get the number that a function returned on one rank.

    The number is set after the first statement that assigns it to a name. If a condition uses it at once, the ranks
    take the same decision instead.
    """
    results = next(value for value in candidate.values if value.name == RETURNED)
    if not all(is_scalar(text) for _, text in results.values) or counts_elements(candidate, sources):
        return
    reference, ranks = reference_of((results,), _involved_ranks(candidate, division))
    plan = partial(_planned, index, reference=reference, ranks=ranks, origin=candidate)
    for place, name in candidate.chain[1:]:
        statement = statement_at(place, sources)
        if (
            statement is not None
            and path_of(name)
            and statement.assigns(name)
            and not isinstance(statement.node, LOOPS)
        ):
            yield plan(place, ExperimentKind.SET_VALUE, name=name, is_after=True)
            return
    statement = statement_at(division.place, sources) if division is not None else None
    if division is not None and _only_decides(statement):
        yield plan(division.place, ExperimentKind.FORCE_BRANCH, occurrence=division.occurrence)


def _for_role(division: Division, candidates: Sequence[Candidate], sources: Mapping[str, str]) -> Candidate | None:
    """Return the condition at the division, if only the number of the rank decides there who makes an operation."""
    statement = statement_at(division.place, sources)
    test = statement.node.test if statement is not None and isinstance(statement.node, ast.If) else None
    is_by_rank = isinstance(test, ast.Compare) and names_rank(ast.unparse(test))
    others = [value for value in division.values if not is_rank_number(value, path_of(value.name))]
    differing = [value for value in others if len({text for _, text in value.values}) > 1]
    if candidates and _is_same(candidates[0].place, division.place) and is_by_rank and not differing:
        return replace(candidates[0], kind=OriginKind.RANK, is_provable=True)
    return None


def _handler(division: Division, candidates: Sequence[Candidate], sources: Mapping[str, str]) -> Candidate | None:
    """Return the `except` clause in which some ranks went on from a division, unless a number made them differ.

    Without a number that differs, the exception came from the rank's own data, and no other rank knows of it. The
    clause can also be in a calling function, where one of the `candidates` is.
    """
    has_number = any(
        len(texts := {text for _, text in value.values}) > 1
        and all(map(is_scalar, texts))
        and "'" not in "".join(texts)
        for value in division.values
        if len(value.values) == sum(len(ranks) for ranks, _ in division.ways)
    )
    for ranks, place in division.ways if not has_number and len(division.ways) > 1 else ():
        handled = [one.place for one in candidates if one.kind is OriginKind.EXCEPTION and {*one.ranks} <= {*ranks}]
        for within in [place] if place is not None else handled:
            clause = except_clause(within, sources)
            if clause is not None and (place is None or clause.lineno == place.line):
                text = sources[within.file or ""].splitlines()[clause.lineno - 1].strip()
                origin = replace(within, line=clause.lineno, text=text)
                return Candidate(place=origin, kind=OriginKind.EXCEPTION, ranks=ranks, is_provable=True)
    return None


def _with_same_exception(
    division: Division, handler: Candidate, sources: Mapping[str, str]
) -> Iterator[PlannedExperiment]:
    """Yield the experiment in which every rank that did not raise the exception of a rank raises it at the division.

    They raise it after the statement of the division, unless the next one is no longer in the body of the `try`.
    Exceptions of the program's own classes cannot be made without running its code.
    """
    clause = except_clause(handler.place, sources)
    types = [ast.Name("Exception")] if clause is None or clause.type is None else list(ast.walk(clause.type))
    names = [node.id for node in types if isinstance(node, ast.Name) and _can_be_raised(node.id)]
    ranks = tuple(sorted({rank for ranks, _ in division.ways for rank in ranks}))
    if names and all(place is not None or ranks == handler.ranks for ranks, place in division.ways):
        plan = partial(_planned, 0, division.place, ExperimentKind.SHARE_EXCEPTION, is_of_decision=True)
        line, last = division.place.line or 0, handler.place.line or 0
        following = [place.line or 0 for ranks, place in division.ways if place is not None and ranks != handler.ranks]
        is_called = all(place is None for ranks, place in division.ways if ranks == handler.ranks)
        plan = partial(plan, is_after=is_called or all(line < one < last for one in following))
        planned = plan(reference=handler.ranks[0], ranks=ranks, occurrence=division.occurrence, origin=handler)
        error = {"error": names[0], "handler": handler.place.line}
        yield replace(planned, instruction={**planned.instruction, **error})


def _can_be_raised(name: str) -> bool:
    """Return whether a builtin exception needs no arguments but a message."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)


def _guard(statement: Statement | None) -> ast.If | None:
    """Return the `if` whose body raises an exception, or None if the statement is anything else."""
    branch = statement.parents[-1] if statement is not None and statement.parents else None
    return branch if isinstance(branch, ast.If) and statement and isinstance(statement.node, ast.Raise) else None


def _decides_by_tensors(candidate: Candidate, statement: Statement | None) -> bool:
    """Return whether an `if` decides by the content of this rank's tensors alone, without a function of the program."""
    if statement is None or not isinstance(statement.node, ast.If):
        return False
    differ = {value.name: value.values for value in candidate.values if len({text for _, text in value.values}) > 1}
    names = {node.id for node in ast.walk(statement.node.test) if isinstance(node, ast.Name)}
    calls = [node.func for node in ast.walk(statement.node.test) if isinstance(node, ast.Call)]
    is_plain = all(
        ast.unparse(call).startswith("torch.")
        or (isinstance(call, ast.Attribute) and ast.unparse(call.value) in differ)
        for call in calls
    )
    texts = [text for values in differ.values() for _, text in values]
    return bool(differ) and is_plain and {*differ} <= names and all(_TENSOR.match(text) for text in texts)


def _callers(caller: Place, sources: Mapping[str, str]) -> list[Place]:
    """Return the statement that makes an extra call, and the others in the same branch, which may make more of them.

    Behind an `if` that leaves the block, the rest of the block is a branch.
    """
    statement = statement_at(caller, sources)
    branch = statement.parents[-1] if statement is not None and statement.parents else None
    if statement is None or branch is None:
        return [caller]
    blocks = [getattr(branch, name, []) for name in ("body", "orelse")]
    body: list[ast.stmt] = next((block for block in blocks if statement.node in block), [statement.node])
    if not isinstance(branch, ast.If):
        index = body.index(statement.node)
        before = body[index - 1] if index else None
        is_rest = isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVES)
        body = body[index:] if is_rest else [statement.node]
    lines = {node.lineno for top in body for node in ast.walk(top) if isinstance(node, ast.stmt)}
    return [replace(caller, line=line) for line in sorted(lines)]


def _for_decision(
    division: Division, sources: Mapping[str, str], handler: Candidate | None = None
) -> Iterator[PlannedExperiment]:
    """Yield the experiments that make all ranks decide alike: by equal values, or by the same next statement."""
    statement = statement_at(division.place, sources)
    ranks = tuple(sorted({rank for ranks, _ in division.ways for rank in ranks}))
    plan = partial(_planned, 0, division.place, proves_origin=False, is_of_decision=True)
    for value in division.values:
        path = path_of(value.name)
        texts = {text for _, text in value.values}
        if path and len(texts) > 1 and all(map(is_scalar, texts)) and not is_rank_number(value, path):
            reference, others = reference_of((value,), ranks)
            is_temporary = _only_decides(statement)
            yield plan(
                ExperimentKind.SET_VALUE, name=value.name, reference=reference, ranks=others, is_temporary=is_temporary
            )
            break
    way = _way_to_force(division, statement, handler)
    if way:
        others = tuple(rank for rank in ranks if rank != min(way))
        yield plan(ExperimentKind.FORCE_BRANCH, reference=min(way), ranks=others, occurrence=division.occurrence)


_INSTRUCTIONS = {
    ExperimentKind.UNDO_LEAK: "undo",
    ExperimentKind.FIX_HASH_SEED: "hash_seed",
    ExperimentKind.SHARE_GENERATOR: "generator",
    ExperimentKind.EQUAL_LENGTH: "length",
    ExperimentKind.SET_VALUE: "scalar",
    ExperimentKind.SHARE_EXCEPTION: "raise",
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
    origin: Candidate | None = None,
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
        origin=origin,
        instruction=instruction,
    )


def _way_to_force(division: Division, statement: Statement | None, handler: Candidate | None = None) -> tuple[int, ...]:
    """Return the ranks of the way that all ranks can take, or () if there is none.

    Python can leave the body of a `for` loop, but cannot enter it or continue it. It cannot enter a `handler` either.
    """
    ways = [(ranks, place) for ranks, place in division.ways if place is not None and ranks]
    ways = [way for way in ways if handler is None or way[0] != handler.ranks]
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


def _prefixes(name: str) -> Iterator[str]:
    """Yield a name such as "cfg.steps['eval']" and the names of the objects that hold it: "cfg.steps" and "cfg"."""
    while name and name != "self":
        yield name
        name = name[: max(name.rfind("."), name.rfind("["), 0)]


_NOT_VALUES = (OriginKind.EXCEPTION, OriginKind.CALL, OriginKind.HASH_ORDER, OriginKind.LEAK)


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
