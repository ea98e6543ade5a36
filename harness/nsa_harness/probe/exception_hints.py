"""Explains torch's error messages by naming parameters and lines. Loaded only after the final exception."""

from __future__ import annotations

import dis
import re
import sys
from typing import Any

# Importing typing takes longer than importing everything else here, so only type checkers load it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType, TracebackType

    Hint = dict[str, Any]

HINTS_LIMIT = 32
MODULES_LIMIT = 20_000

# DDP's messages, identical from torch 2.1 to 2.13. They contain parameter names if TORCH_DISTRIBUTED_DEBUG is INFO or
# DETAIL, and parameter numbers otherwise.
_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: *([^\n]+)")
_READY_TWICE = re.compile(r"Parameter at index (\d+)(?: with name (\S+))? has been marked as ready twice")
_NUMBERS = re.compile(r"[\d ,]+(?: \.\.\.)?")
_NEWLY_USED = "is unused in first iteration, but then got used in the second iteration"
_RECOMPUTATION = "torch.utils.checkpoint"
_IN_PLACE = "modified by an inplace operation"


def hints(
    error: BaseException,
    traceback: TracebackType | None,
    roots: Iterable[Any],
    fresh: Iterable[Any],
    foreign: tuple[str, ...],
) -> list[Hint]:
    """Return hints that explain torch's error message, such as parameter names and lines of user code.

    Each hint is a dict with the keys kind, name, file, line and function; the last three are missing if unknown.
    `roots` are the models that were called, `fresh` the modules first called in this step, and `foreign` the prefixes
    of files outside the program.
    """
    message, models = str(error), list(roots)
    twice, without = _READY_TWICE.search(message), _WITHOUT_GRADIENT.search(message)
    if without:
        return _parameter_hints("without gradient", without[1], models, traceback, foreign)
    if twice:
        parameter_text = twice[2] or twice[1]
        return _parameter_hints("ready twice", parameter_text, models, traceback, foreign)
    if _NEWLY_USED in message:
        return _new_parameter_hints(models, traceback, {id(module) for module in fresh}, foreign)
    if message.startswith(_RECOMPUTATION):
        return _recomputation_hints(traceback)
    if _IN_PLACE in message:
        return _in_place_hints(message, traceback, models, foreign)
    return []


def line_that_uses(
    models: Iterable[Any], names: Sequence[str], foreign: tuple[str, ...]
) -> tuple[str, int, str] | None:
    """Return the file, line and function in which the parameters `names` are used, or None if unknown."""
    for model in models:
        inner = model.module if _is_wrapper(model) else model
        if names[0] in dict(inner.named_parameters()):
            return _use(inner, names[0], names, "", foreign)
    return None


def ordered_names(model: Any) -> list[str]:
    """Return the parameter names of a DDP model, in the order of the indices in torch's error messages."""
    names: list[str] = []
    known_ids: set[int] = set()
    for path, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_ignored = f"{path}.{name}" in model.parameters_to_ignore
            if parameter.requires_grad and not is_ignored and id(parameter) not in known_ids:
                known_ids.add(id(parameter))
                names.append(f"{path}.{name}" if path else name)
    return names


def _parameter_hints(
    kind: str, parameter_text: str, models: Iterable[Any], traceback: TracebackType | None, foreign: tuple[str, ...]
) -> list[Hint]:
    model = _ddp_model(models, traceback)
    if model is None:
        return []
    all_names = ordered_names(model)
    if _NUMBERS.fullmatch(parameter_text):
        names = [
            all_names[int(number)] for number in re.findall(r"\d+", parameter_text) if int(number) < len(all_names)
        ]
    else:
        names = [name for name in re.split(r", |\s", parameter_text.lstrip(".")) if name in set(all_names)]
    return [_hint(kind, name, _use(model.module, name, names, kind, foreign)) for name in names[:HINTS_LIMIT]]


def _new_parameter_hints(
    models: Iterable[Any], traceback: TracebackType | None, fresh: set[int], foreign: tuple[str, ...]
) -> list[Hint]:
    """Return one hint for each parameter of a module that was first called in the current step.

    `fresh` has the ids of these modules. torch's message does not name the newly used parameters, but they can only be
    in newly called modules.
    """
    model = _ddp_model(models, traceback)
    if model is None:
        return []
    new = {path for path, module in model.module.named_modules() if id(module) in fresh}
    names = [name for name in ordered_names(model) if name.rpartition(".")[0] in new]
    return [_hint("newly used", name, _use(model.module, name, names, "", foreign)) for name in names[:HINTS_LIMIT]]


def _ddp_model(models: Iterable[Any], traceback: TracebackType | None) -> Any:
    """Return the DDP model in which the exception was raised, or None if unknown."""
    for frame, _ in _frames(traceback):
        if _is_wrapper(frame.f_locals.get("self")):
            return frame.f_locals["self"]
    ddp_models = {id(module): module for module in _modules(models) if _is_wrapper(module)}
    return next(iter(ddp_models.values())) if len(ddp_models) == 1 else None


def _is_wrapper(module: Any) -> bool:
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return ddp is not None and isinstance(module, ddp.DistributedDataParallel)


def _use(
    model: Any, name: str, together: Sequence[str], kind: str, foreign: tuple[str, ...]
) -> tuple[str, int, str] | None:
    """Return the file, line and function in which the parameter `name` is used, or None if unknown."""
    levels = list(_levels(model, name))
    if kind == "ready twice":
        levels = [level for level in levels if any(map(names_checkpoint, _methods(level[0], foreign)))] + levels
    else:
        levels = [level for level in levels if not _is_unused(model, level[2], together)]
    for holder, attribute, _ in levels:
        for code in _methods(holder, foreign):
            line = line_that_loads(code, attribute)
            if line is not None:
                return code.co_filename, line, code.co_name
        maker = _own_code(type(holder), "__init__", foreign)
        line = line_that_makes(maker, attribute) if maker else None
        if maker and line is not None:
            return maker.co_filename, line, maker.co_name
    return None


def _levels(model: Any, name: str) -> Iterator[tuple[Any, str, str]]:
    """Yield each module that contains the parameter `name`, innermost first, as (module, attribute, path)."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:depth])
        yield model.get_submodule(path), parts[depth], path


def _is_unused(model: Any, path: str, together: Sequence[str]) -> bool:
    """Return whether all trainable parameters of the module at `path` are among the unused ones in `together`."""
    parameters = model.get_submodule(path).named_parameters(prefix=path)
    below = [name for name, parameter in parameters if parameter.requires_grad]
    return bool(path) and set(below) <= set(together)


def _methods(module: Any, foreign: tuple[str, ...]) -> Iterator[CodeType]:
    """Yield the code objects of the methods that a user wrote for a module, starting with forward."""
    kind = type(module)
    names = dict.fromkeys(["forward", *(name for owner in kind.__mro__ for name in vars(owner))])
    for name in names:
        code = _own_code(kind, name, foreign) if name != "__init__" else None
        if code is not None:
            yield code


def _own_code(kind: type, name: str, foreign: tuple[str, ...]) -> CodeType | None:
    code = getattr(getattr(kind, name, None), "__code__", None)
    return code if code is not None and not code.co_filename.startswith(foreign) else None


def _recomputation_hints(traceback: TracebackType | None) -> list[Hint]:
    """Return a hint naming the checkpointed function that torch was recomputing, or an empty list if there is none."""
    for frame, _ in _frames(traceback):
        checkpoint = frame.f_locals.get("frame") or frame.f_locals.get("self")
        recompute = getattr(checkpoint, "recompute_fn", None)
        for cell in getattr(recompute, "__closure__", None) or ():
            code = _code_of(cell.cell_contents)
            if code is not None and callable(cell.cell_contents):
                return [_hint("recomputed", code.co_qualname if hasattr(code, "co_qualname") else code.co_name, code)]
    return []


def _code_of(function: Any) -> CodeType | None:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    callee = getattr(type(function), "forward", None) if hasattr(function, "named_modules") else function
    return getattr(callee, "__code__", None)


def _in_place_hints(
    message: str, traceback: TracebackType | None, models: Iterable[Any], foreign: tuple[str, ...]
) -> list[Hint]:
    """Return one hint for each line of user code that changes a tensor in place."""
    codes: dict[CodeType, None] = {}
    for module in {type(module): module for module in _modules(models)}.values():
        codes.update(dict.fromkeys(_methods(module, foreign)))
    for frame, _ in _frames(traceback):
        if not frame.f_code.co_filename.startswith(foreign):
            codes[frame.f_code] = None
    node = re.search(r"is output \d+ of (?:As)?(\w+?)(?:Backward\d*)?,", message)
    operation = node[1].lower() if node else ""
    lines = [(code, line, is_saved) for code in codes for line, is_saved in in_place_lines(code, operation)]
    reported_lines = [line for line in lines if line[2]] or lines
    # The lines of a nested function occur twice: the function around it contains them, too.
    places = {(code.co_filename, line): code.co_name for code, line, _ in reversed(reported_lines)}
    return [_hint("in place", operation, (*place, name)) for place, name in list(places.items())[:HINTS_LIMIT]]


def _modules(models: Iterable[Any]) -> Iterator[Any]:
    modules_left = MODULES_LIMIT
    for model in models:
        for module in model.modules():
            modules_left -= 1
            if modules_left < 0:
                return
            yield module


def _frames(traceback: TracebackType | None) -> list[tuple[Any, int]]:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1]


def _hint(kind: str, name: str, place: Any) -> Hint:
    hint: Hint = {"kind": kind, "name": name}
    if isinstance(place, tuple):
        hint["file"], hint["line"], hint["function"] = place
    elif place is not None:
        begin = place.co_firstlineno
        first = min((line for _, line in dis.findlinestarts(place) if line and line > begin), default=begin)
        hint["file"], hint["line"], hint["function"] = place.co_filename, first, place.co_name
    return hint


# Reading bytecode: which lines load, set or change a tensor in place.

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_SHIFTS = ("COPY", "SWAP", "ROT_TWO", "ROT_THREE", "DUP_TOP_TWO", "CACHE")
_NOT_IN_PLACE = frozenset({"requires_grad_"})  # its name ends like an in-place method's, but it changes no value


def line_that_loads(code: CodeType, attribute: str) -> int | None:
    """Return the first line of `code` that reads `.attribute`, or None if no line does."""
    return next((line for line, op in _lines(code) if op.opname in _LOADS and op.argval == attribute), None)


def line_that_makes(code: CodeType, attribute: str) -> int | None:
    """Return the last line of `code` that sets `.attribute`, or None if no line does."""
    lines = [line for line, op in _lines(code) if op.opname == "STORE_ATTR" and op.argval == attribute]
    return lines[-1] if lines else None


def names_checkpoint(code: CodeType) -> bool:
    """Return whether the code uses a name that contains "checkpoint"."""
    return any("checkpoint" in name for name in code.co_names)


def in_place_lines(code: CodeType, operation: str) -> Iterator[tuple[int, bool]]:
    """Yield each line of `code` that changes a tensor in place, and whether that is an output of `operation`."""
    operation_outputs: set[str] = set()
    for line, statement in _statements(code):
        target, stored_names = (
            _changed_variable(statement),
            [str(op.argval) for op in statement if op.opname in _STORES],
        )
        if target is not None:
            yield line, target in operation_outputs
        elif operation and any(_is_named(str(op.argval), operation) for op in statement if op.argval is not None):
            operation_outputs.update(stored_names)


def _changed_variable(statement: list[dis.Instruction]) -> str | None:
    """Return the name of the variable that a statement changes in place ("" if unknown), or None if there is none."""
    for number, op in enumerate(statement):
        if op.opname in _LOADS and _is_in_place(str(op.argval)):
            return _variable_name(statement[:number][-1:])
        if op.opname == "STORE_SUBSCR":
            return _variable_name(
                [instruction for instruction in statement[:number] if instruction.opname in _LOCALS][-2:][:1]
            )
        if _is_augmented(op) and not any(
            isinstance(instruction.argval, int) for instruction in statement[:number][-1:]
        ):
            stores = [instruction for instruction in statement[number + 1 :] if instruction.opname not in _SHIFTS][:1]
            if stores and stores[0].opname in _STORES:
                return str(stores[0].argval)
    return None


def _is_augmented(op: dis.Instruction) -> bool:
    return op.opname.startswith("INPLACE_") or (op.opname == "BINARY_OP" and op.argrepr.endswith("="))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and name not in _NOT_IN_PLACE


def _is_named(name: str, operation: str) -> bool:
    return name.lower().replace("_", "") == operation


def _variable_name(instructions: list[dis.Instruction]) -> str:
    return str(instructions[0].argval) if instructions and instructions[0].opname in _LOCALS else ""


def _lines(code: CodeType) -> Iterator[tuple[int, dis.Instruction]]:
    starts = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    for op in dis.get_instructions(code):
        line = starts.get(op.offset) or line
        yield line, op
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _lines(constant)


def _statements(code: CodeType) -> Iterator[tuple[int, list[dis.Instruction]]]:
    """Yield the line number and the bytecode instructions of each statement."""
    line, statement = 0, list[dis.Instruction]()
    for number, op in _lines(code):
        if number != line and statement:
            yield line, statement
            statement = []
        line = number
        statement.append(op)
    if statement:
        yield line, statement
