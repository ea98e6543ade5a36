"""Name the kind of a statement that made a value differ between ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from nsa_harness.core.recording.alignment import Alignment, Row
from nsa_harness.core.recording.communications import is_point_to_point
from nsa_harness.core.recording.explanation import OriginKind, SilentDifference
from nsa_harness.core.recording.recording import Execution, Value, differs, has_size, sizes_differ
from nsa_harness.core.recording.slicing import Step
from nsa_harness.core.recording.statements import Statements
from nsa_harness.core.recording.trace import Trace
from nsa_harness.core.source_code.excerpt import names_rank

# What the source text of a statement says about its result, most telling first.
_BY_TEXT = (
    (
        OriginKind.CLOCK,
        r"\btime\.(?:time|monotonic|perf_counter|process_time)|perf_counter|\bdatetime\.\w*now\(|monotonic\(",
    ),
    (OriginKind.RESTORED_STATE, r"\btorch\.load\(|load_state_dict\(|\bload_checkpoint|\bpickle\.load|\.restore\w*\("),
    (
        OriginKind.FILE,
        r"\bopen\(|\.exists\(|\.is_file\(|listdir\(|\bglob|read_text\(|read_bytes\(|\.stat\(|np\.load|memmap\(|json\.load\(|safe_open\(",
    ),
    (
        OriginKind.RANDOM,
        r"\brandom|\brand(?:n|int|perm)?\(|randint\(|shuffle\(|multinomial\(|bernoulli|dropout|choices?\(|uuid\d?\(|\.sample\(",
    ),
    (
        OriginKind.RANK,
        r"get_rank\(|get_node_local_rank|gethostname|current_device|[\"'](?:LOCAL_|GROUP_)?RANK[\"']|getpid\(",
    ),
    (OriginKind.ENVIRONMENT, r"\benviron\b|getenv\("),
    (OriginKind.HASH_ORDER, r"\bset\(|frozenset\(|\bhash\(|\{[^{}:]*\sfor\s"),
    (OriginKind.LENGTH, r"\blen\("),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _BY_TEXT)
_CHANGES_FILE = re.compile(
    r"\b(?:save|dump|write_text|write_bytes|unlink|remove|rmtree|rename|replace|mkdir|touch)\(|[\"'][wax]b?[\"']"
)
_SHARED = ("recv", "scatter", "all_to_all")  # operations whose result differs from rank to rank by their nature
_ORDER_FREE = ("sorted", "len", "min", "max")  # functions whose result has no order of the set
_CHANGES_SET = ("add", "discard", "remove", "clear")  # methods of a set that take or return no item of unknown order
_SETS = ("set", "frozenset")
_NUMBERS = ("int", "float", "bool", "Tensor", "float32", "float64", "int64")


def kind_of(step: Step, traces: Sequence[Trace], pair: tuple[int, int], statements: Statements) -> OriginKind:
    """Return what makes the value of the step differ. `pair`: the traces that the step compares."""
    side, number = step.execution
    trace = traces[pair[side]]
    execution = trace.executions[number]
    if step.is_leak:
        return OriginKind.LEAK
    draws_alike = _draws_alike(step, traces, pair)
    if step.name.startswith("generator:") or (execution.draws and not draws_alike):
        return OriginKind.RANDOM
    if any(is_point_to_point(made) or made.operation.startswith(_SHARED) for made in execution.communications):
        return OriginKind.PEER_VALUE
    text = statements.header(trace.place(number))
    kind = kind_of_text(text)
    if kind is OriginKind.FILE and any(
        traces[other] is not trace for other, _ in changes_of_files([execution], traces, statements)
    ):
        return OriginKind.OTHER_RANKS_FILE
    if kind is not OriginKind.UNKNOWN and not (kind is OriginKind.RANDOM and draws_alike):
        return kind
    statement = statements.at(trace.place(number))
    sets = [name for name, value in execution.reads if value.type in _SETS]
    if any(statement is None or not _only_searches(statement, name) for name in sets):
        return OriginKind.HASH_ORDER
    if names_rank(text) and any(other == str(trace.rank) for other in _values(execution)):
        return OriginKind.RANK
    values = dict((*execution.writes, *execution.reads))
    if step.name in values and is_number(values[step.name]) and "[" not in values[step.name].text:
        return OriginKind.MISSING_REDUCTION
    return OriginKind.UNKNOWN


def _draws_alike(step: Step, traces: Sequence[Trace], pair: tuple[int, int]) -> bool:
    """Return whether both ranks drew from generators in the same states, so that the draw made no difference."""
    first, second = (
        None if number is None else {name: before for name, before, _ in traces[trace].executions[number].draws}
        for number, trace in zip(step.executions, pair, strict=True)
    )
    return bool(first) and first == second


def _only_searches(statement: ast.AST, name: str) -> bool:
    """Return whether a statement only searches, changes, sorts or counts a set, which shows no order."""
    ordered: set[ast.AST] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Compare) and all(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            ordered.update(node.comparators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDER_FREE:
            ordered.update(node.args)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES_SET:
            ordered.add(node.func.value)
    return all(node in ordered for node in ast.walk(statement) if _is_read(node, name))


def can_show_order(step: Step, traces: Sequence[Trace], pair: tuple[int, int], statements: Statements) -> bool:
    """Return whether the order of the set that a step assigned can matter: not if its function only searches in it.

    A value that the function does not use again, or that is no set, is assumed to be used in its order elsewhere.
    """
    side, execution = step.execution
    trace = traces[pair[side]]
    members = trace.members[trace.activation_of[execution]][trace.position[execution] + 1 :]
    readers = [at for at in members if step.name in dict(trace.executions[at].reads)]
    values = (value for name, value in trace.executions[execution].writes if name == step.name)
    if not readers or not any(value.type in _SETS for value in values):
        return True
    found = (statements.at(trace.place(at)) for at in readers)
    return any(statement is None or not _only_searches(statement, step.name) for statement in found)


def _is_read(node: ast.AST, name: str) -> bool:
    is_name = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    return is_name and ast.unparse(node) == name


def is_number(value: Value) -> bool:
    return value.type in _NUMBERS


def kind_of_text(text: str) -> OriginKind:
    return next((kind for kind, pattern in _PATTERNS if pattern.search(text)), OriginKind.UNKNOWN)


def _values(execution: Execution) -> Iterator[str]:
    for _, value in (*execution.writes, *execution.reads):
        yield value.text


def changes_of_files(
    readers: Sequence[Execution], traces: Sequence[Trace], statements: Statements
) -> Iterator[tuple[int, int]]:
    """Yield the last execution of each trace that writes or removes a file which one of the readers uses."""
    used = (value for reader in readers for _, value in reader.reads)
    paths = {value.text for value in used if "/" in value.text or "Path" in value.type}
    for trace_number, trace in enumerate(traces if paths else ()):
        for number in reversed(range(len(trace.executions))):
            if any(value.text in paths for _, value in trace.executions[number].reads) and _CHANGES_FILE.search(
                statements.header(trace.place(number))
            ):
                yield trace_number, number
                break


def is_shard(step: Step, traces: Sequence[Trace], pair: tuple[int, int], statement: ast.AST | None) -> bool:
    """Return whether a step took data by the number of the rank, and the parts differ in size.

    The parts of an object whose content is not known may have the same size. `pair`: the traces that the step compares.
    """
    if isinstance(statement, ast.For):
        return False
    made: list[dict[str, Value]] = []
    for number, execution in zip(pair, step.executions, strict=True):
        if execution is None:
            return False
        trace = traces[number]
        returned = trace.activations[trace.activation_of[execution]].returned
        is_result = isinstance(statement, ast.Return) and returned is not None
        made.append({"": returned} if is_result and returned else dict(trace.executions[execution].writes))
    ranks = [str(traces[number].rank) for number in pair]
    for name, value in made[0].items():
        other = made[1].get(name, Value("", ""))
        is_count = not name and value.type == other.type == "int" and [value.text, other.text] != ranks
        if sizes_differ(value, other) or (step.is_object and has_size(value)) or (is_count and differs(value, other)):
            return True
    return False


def is_chosen_by_rank(step: Step, statement: ast.AST | None) -> bool:
    """Return whether the number of the rank decides in a step what is passed to a function that makes the value."""
    if statement is None or hasattr(statement, "body") or step.name in ("", "self"):
        return False
    passed = (part for node in ast.walk(statement) if isinstance(node, ast.Call) for part in node.args)
    return any(isinstance(part, ast.IfExp) and names_rank(ast.unparse(part.test)) for part in passed)


_COLLECTS = re.compile(r"\.(?:named_)?parameters\(")
_COPIES = re.compile(r"\bdeepcopy\(|\bstate_dict\(|\.clone\(|\.copy_\(")
_ADDS = re.compile(r"\b(?:setattr|add_module|register_module|register_parameter)\(")
_WRAPS = "DistributedDataParallel"
_TENSORS = ("Tensor", "Parameter", "Buffer")
_RATE = re.compile(r"\blr\b|\blearning_rate\b|_lr\b")
_SCHEDULES = re.compile(r"sched\w*\.step\(")


def early_collections(
    trace: Trace, statements: Statements, names: Collection[str], *, is_copy: bool
) -> Iterator[tuple[int, int]]:
    """Yield the execution that collected a model's parameters too early, and the one that made other parameters later.

    Both are in the same function, which may have called the functions that did it. `names`: the parameters that differ.
    `is_copy`: they belong to a copy, which was made before the weights of the model were made equal. A statement that
    collected the parameters once more afterwards is left out, and so is one whose result no communication uses.
    """
    parts = {part for name in names for part in re.split(r" \.\. |\.", name) if not part.isdecimal()}
    latest = {
        (place.file, place.line): number for number in range(len(trace.executions)) if (place := trace.place(number))
    }
    collected, made = [], []
    for number in latest.values():
        header, wraps = statements.header(trace.place(number)), _makes(trace, number, _WRAPS)
        if is_copy:
            collected += [number] if _COPIES.search(header) else []
            made += [number] if wraps or _makes(trace, number, "broadcast") else []
        else:
            collected += [number] if wraps or _COLLECTS.search(header) else []
            made += [number] if _ADDS.search(header) or _assigns(statements.at(trace.place(number)), parts) else []
    last = max(made, key=trace.order, default=-1)
    for number in sorted(collected, key=trace.order):
        if last >= 0 and trace.order(number) < trace.order(last) and (is_copy or _is_shared_later(trace, number, last)):
            above = {trace.activation_of[outer]: outer for outer in (number, *trace.outer(number))}
            below = (outer for outer in (last, *trace.outer(last)) if trace.activation_of[outer] in above)
            if (common := next(below, None)) is not None and above[trace.activation_of[common]] != common:
                yield above[trace.activation_of[common]], common


def _makes(trace: Trace, execution: int, operation: str) -> bool:
    return any(made.operation == operation for made in trace.own_communications(execution))


def _assigns(statement: ast.AST | None, names: Collection[str]) -> bool:
    """Return whether the statement assigns the result of a call to an attribute with one of the names."""
    match statement:
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call()):
            return name in names
    return False


def _is_shared_later(trace: Trace, collected: int, since: int) -> bool:
    """Return whether communication after an execution uses what was collected, directly or in the same object."""
    execution, activation = trace.executions[collected], trace.activations[trace.activation_of[collected]]
    if _makes(trace, collected, _WRAPS):
        return True
    identities = {value.identity for _, value in execution.writes if value.type != "Parameter"}
    if not execution.writes or any("." in name or value.type == "Parameter" for name, value in execution.writes):
        identities |= {value.identity for name, value in activation.arguments if name == "self"}
    for owner in dict.fromkeys(owner for owner in trace.owners if trace.order(owner) > trace.order(since)):
        for number in (owner, *trace.outer(owner)):
            used = (*trace.activations[trace.activation_of[number]].arguments, *trace.executions[number].reads)
            if any(value.identity in identities for _, value in used if value.identity):
                return True
    return False


def first_use(
    alignment: Alignment, pair: tuple[int, int], statements: Statements, silent: SilentDifference
) -> tuple[Row, str] | None:
    """Return the first executions of two traces, and a name in them, whose values differ like the replicas.

    The name is that of a parameter or buffer that differs, or of a learning rate if these differ. What a scheduler gets
    also counts as a learning rate, because the rate itself is kept by the library.
    """
    lasts = "|".join(re.escape(name.rpartition(".")[2]) for name in silent.names)
    is_rate = silent.kind == "learning rate"
    wanted = _RATE if is_rate else re.compile(rf"\.(?:{lasts})$" if lasts else "$^")
    for row in alignment.rows:
        if {*pair} <= row.keys():
            trace = alignment.traces[pair[0]]
            ours, theirs = (alignment.traces[number].executions[row[number]] for number in pair)
            others = dict((*theirs.reads, *theirs.writes))
            differing = [
                name
                for name, value in (*ours.reads, *ours.writes)
                if name in others and differs(value, others[name]) and (is_rate or value.type in _TENSORS)
            ]
            if differing and is_rate and _SCHEDULES.search(statements.header(trace.place(row[pair[0]]))):
                return row, differing[0]
            if (found := next(filter(wanted.search, differing), None)) is not None:
                return row, found
    return None
