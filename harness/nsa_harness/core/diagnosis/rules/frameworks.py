"""A note about ranks that hang inside a framework, called by a line of the program such as `trainer.fit()`."""

from __future__ import annotations

import ast

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext, hung_roots, place_of, ranks_by_facts
from nsa_harness.core.diagnosis.explanation import Explanation, rule_if
from nsa_harness.core.evidence.evidence import Frame, Source, StatusFile
from nsa_harness.core.evidence.frameworks import FrameworkPosition, framework_positions
from nsa_harness.core.report import Facts, Place
from nsa_harness.core.source_code.excerpt import Excerpt
from nsa_harness.core.verdict.motion import rank_stack


def _inside_framework(context: DiagnosisContext) -> tuple[dict[int, FrameworkPosition]] | None:
    """Return where each rank of a hang is inside of a framework, or None.

    All ranks must be inside of it, called from the same line, and in different functions. At least one of them must be
    in a function of the framework.
    """
    if not hung_roots(context):
        return None
    stacks = {rank: rank_stack(snapshot) for rank, snapshot in context.last_snapshot.items()}
    by_line = {
        rank: {position.called_at: position for position in framework_positions(stack.frames if stack else ())}
        for rank, stack in stacks.items()
    }
    common = [line for line in next(iter(by_line.values()), ()) if all(line in lines for lines in by_line.values())]
    positions = {rank: lines[common[-1]] for rank, lines in by_line.items()} if common else {}
    functions = {position.frame.function for position in positions.values()}
    if len(functions) < 2 or all(position.in_program for position in positions.values()):
        return None
    return (positions,)


@rule_if(_inside_framework)
def framework_phase(context: DiagnosisContext, positions: dict[int, FrameworkPosition]) -> Explanation:
    """Report the function of a framework that each rank is in, and what is known about the functions it calls."""
    line, package = next((position.called_at, position.package) for position in positions.values())
    last: list[tuple[int, Facts]] = []
    for rank, position in positions.items():
        callback = None if position.in_program else _last_callback(context.status_file(rank), line)
        last += [(rank, {"function": callback.function or "", "line": callback})] if callback else []
    hooks = [source for source in context.evidence.sources if source.hook]
    return Explanation(
        cause=Cause.FRAMEWORK_PHASE,
        evidence=EvidenceKind.STACKS,
        facts={
            "framework": package,
            "called_at": place_of(context, None, line),
            "positions": ranks_by_facts(
                (rank, {"function": position.frame.function, "line": place_of(context, None, position.frame)})
                for rank, position in positions.items()
            ),
            "last_callbacks": ranks_by_facts(last),
            "hooks": tuple(source.hook for source in hooks),
            "conditions": tuple(condition for source in hooks if (condition := _rank_condition(source))),
        },
        ranks=tuple(positions),
        place=place_of(context, None, line),
        proof=tuple(snapshot.proof for snapshot in context.last_snapshot.values() if snapshot.proof),
    )


def _rank_condition(source: Source) -> Facts | None:
    """Return the first condition on the rank in a function that the framework calls, or None if it has none."""
    excerpt = Excerpt.from_source(source)
    tests = (node for node in excerpt.nodes if isinstance(node, ast.If) and excerpt.reads_rank(node.test))
    test = min(tests, key=lambda node: node.lineno, default=None)
    if test is None:
        return None
    line = Place(file=source.file, line=excerpt.line_of(test), function=source.hook)
    return {"function": source.hook, "text": f"if {ast.unparse(test.test)}", "line": line}


def _last_callback(status_file: StatusFile | None, line: Frame) -> Place | None:
    """Return the program's last recorded line that the framework called, or None.

    It is the line of the latest collective that the program called below `line`, or else the line that called the
    latest module.
    """
    if status_file is None:
        return None
    caller = line.line, line.function.rpartition(".")[2]
    below = (
        call.place
        for call in reversed(status_file.calls)
        if call.place and any((frame.line, frame.function.rpartition(".")[2]) == caller for frame in call.chain[1:])
    )
    modules = [
        status_file.modules[number].place
        for step in status_file.forwards[-1:]
        for number in step.calls
        if number < len(status_file.modules)
    ]
    called = (place for place in reversed(modules) if place is not None)
    return next(below, None) or next(called, None)
