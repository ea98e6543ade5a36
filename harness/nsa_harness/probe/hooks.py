"""Marks from inside a training step: module forward, backward, optimizer and data, without touching a single value."""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import protocol
from .chains import Chains
from .names import ModuleNames
from .places import chain, foreign_code, innermost, is_installed, place_text
from .status_file import StatusFileWriter
from .trouble import TroubleLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .dropped_batches import GivenUp

OUTPUTS_LIMIT = 64  # tensors of one module's output that get a backward mark
DEPTH_LIMIT = 4  # containers inside containers
CALLING_LINES_LIMIT = 1024  # more would leave no room in the table of strings
COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


def install(
    torch: Any, board: StatusFileWriter, trouble: TroubleLog, given_up: GivenUp, fetches: Fetches
) -> ModuleNames:
    """Each kind of hook stands alone; what this torch does not have is noted and left out. The models they meet."""
    names = ModuleNames(board)
    caught = CaughtExceptions(board, foreign_code(torch))
    trouble.attempt("module hooks", lambda: _hook_modules(torch, board, trouble, names, caught, given_up))
    if hasattr(sys, "monitoring"):
        from . import handled

        trouble.attempt(handled.PIECE, lambda: handled.install(vars(sys)["monitoring"], caught, trouble))
    trouble.attempt("optimizer hooks", lambda: _hook_optimizers(torch, board, trouble))
    trouble.attempt("first optimizer", lambda: _await_optimizer(board))
    trouble.attempt("data hook", lambda: _hook_data(torch, board, trouble, given_up, fetches))
    return names


def compiling_test(torch: Any) -> Callable[[], bool]:
    """torch.compiler.is_compiling, under the name this torch has for it. Dynamo folds it to a constant."""
    compiler = getattr(torch, "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)


def _hook_modules(
    torch: Any,
    board: StatusFileWriter,
    trouble: TroubleLog,
    names: ModuleNames,
    caught: CaughtExceptions,
    given_up: GivenUp,
) -> None:
    """Global forward hooks. A module full backward hook is out of the question: it breaks programs that work in place.

    The backward mark is a pre-hook on the grad_fn of what the module returned. It is inert: it returns nothing.
    It costs thrice as much as a forward mark, so deep modules have none (`Known.silent_backward`), and the leaves of
    torch inside a part of a block have neither (`Known.silent`): there are many, and none takes long.
    """
    is_compiling = compiling_test(torch)
    tensor_type = torch.Tensor
    ready, forward = names.ready.get, board.forward
    lines = CallingLines(board, foreign_code(torch), torch.nn.modules.module.__file__)
    line_of = lines.of
    handles: list[Any] = []
    inner_output: list[Callable[[], object | None]] = [lambda: None]
    outermost: list[Any] = [None]  # the module whose forward is inside no other one's
    trains = [False]  # its pass
    grad_enabled: Callable[[], bool] = torch.is_grad_enabled

    def give_up(error: Exception) -> None:
        trouble.note("module hooks", error)
        for handle in handles:
            handle.remove()

    in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

    def before_forward(module: Any, arguments: Any) -> None:
        if is_compiling():
            return
        try:
            known = ready(id(module)) or names.of(module)
            if known.silent:
                return
            if board.step_done:
                board.begin_step()
                outermost[0] = None  # nothing of a step that is done, whatever became of its end
            if known.learns and (outermost[0] is None or outermost[0] is module):
                outermost[0] = module
                learning = grad_enabled()
                board.mode(
                    protocol.MODE_KNOWN
                    | (protocol.MODE_TRAINING if module.training else 0)
                    | (protocol.MODE_GRADIENTS if learning else 0)
                )
                trains[0] = module.training and learning
                if trains[0] and in_backward() == -1:
                    trouble.attempt("batches", lambda: given_up.began(module, arguments))
            if names.at_next_forward is not None:
                names.at_next_forward()
            forward(known.forward, line_of())
        except Exception as error:
            give_up(error)

    def after_forward(module: Any, _arguments: Any, output: Any) -> None:
        if is_compiling():
            return
        try:
            known = ready(id(module)) or names.of(module)
            if outermost[0] is module:
                outermost[0] = None
            if known.silent_backward:
                return
            if isinstance(output, tensor_type):
                node = output.grad_fn
                if node is None:
                    known.without_gradients |= outermost[0] is not None and trains[0]
                    return
                # A container returns its last child's tensor; the child's name says more, so the container is silent.
                if inner_output[0]() is output:
                    return
                inner_output[0] = weakref.ref(output)
                node.register_prehook(known.on_backward)
            elif output is not None:
                on_backward = known.on_backward
                tensors = _tensors(output, tensor_type)
                for tensor in tensors:
                    tensor.grad_fn.register_prehook(on_backward)
                known.without_gradients |= not tensors and outermost[0] is not None and trains[0]
            else:
                caught.look()
                # It left a whole model, or a loss beside one.
                if outermost[0] is None and module.training and grad_enabled():
                    ended_by = sys.exc_info()[1]
                    trouble.attempt("batches", lambda: given_up.failed(ended_by))
        except Exception as error:
            give_up(error)

    # torch.compile warns of global hooks that fire once more for its wrapper; ours may, and the user has none to mend.
    warnings.filterwarnings("ignore", message=COMPILE_WARNING, category=UserWarning)
    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(before_forward))
    handles.append(torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True))


class CallingLines:
    """Which line of the program calls a module, 0 = one of a library."""

    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...], torch_file: str) -> None:
        self._board = board
        self._foreign = foreign
        self._torch_file = torch_file  # of the frames between a hook and what called the module
        self._depth = 0  # of what called the module, seen from `of`; 0 = not known yet
        self._known: dict[tuple[int, int], tuple[Any, int]] = {}  # by code and instruction; the code is held by it

    def of(self) -> int:
        """Asked by a hook. One that is known costs about 0.3 us: the frames between are not touched."""
        try:
            frame = sys._getframe(self._depth)
            return self._known[id(frame.f_code), frame.f_lasti][1]
        except (KeyError, ValueError):  # or the stack is not as deep
            return self._learn(sys._getframe(1))

    def _learn(self, frame: Any) -> int:
        depth = 1
        while frame is not None and (depth == 1 or frame.f_code.co_filename == self._torch_file):
            frame, depth = frame.f_back, depth + 1
        if frame is None or len(self._known) == CALLING_LINES_LIMIT:
            return 0
        self._depth = self._depth or depth
        code, line = frame.f_code, 0
        if not code.co_filename.startswith(self._foreign) and not is_installed(code.co_filename):
            line = self._board.string(place_text(code.co_filename, frame.f_lineno, code.co_name))
        self._known[id(code), frame.f_lasti] = code, line
        return line


def _tensors(output: Any, tensor_type: type) -> list[Any]:
    """Tensors with a grad_fn in tuples, lists and dicts, a bounded number."""
    found: list[Any] = []
    for tensor in _walk(output, tensor_type, DEPTH_LIMIT):
        if tensor.grad_fn is not None:
            found.append(tensor)
        if len(found) == OUTPUTS_LIMIT:
            break
    return found


def _walk(output: Any, tensor_type: type, depth: int) -> Iterator[Any]:
    if isinstance(output, tensor_type):
        yield output
    elif depth and isinstance(output, (tuple, list)):
        for item in output:
            yield from _walk(item, tensor_type, depth - 1)
    elif depth and isinstance(output, dict):
        for item in output.values():
            yield from _walk(item, tensor_type, depth - 1)


def _hook_optimizers(torch: Any, board: StatusFileWriter, trouble: TroubleLog) -> None:
    """The first optimizer that steps counts the steps; when it is gone, the next one that steps takes over."""
    from torch.optim import optimizer as optimizers

    counting: list[Callable[[], object | None]] = [lambda: None]
    gradients = [0]
    working = [True]  # a hook that removed itself would change what torch is just going through
    caller = Caller(board, foreign_code(torch))

    def give_up(error: Exception) -> None:
        working[0] = False
        trouble.note("optimizer hooks", error)

    def before_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not working[0]:
            return
        try:
            if counting[0]() is None:
                counting[0] = weakref.ref(optimizer)
            board.mark(board.what("optimizer", type(optimizer).__name__))
            if counting[0]() is optimizer:
                gradients[0] = _gradients(optimizer)
                caller.look()
        except Exception as error:
            give_up(error)

    def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not working[0]:
            return
        try:
            board.mark(board.what("step", type(optimizer).__name__))
            if counting[0]() is optimizer:
                board.finish_step(gradients[0])
        except Exception as error:
            give_up(error)

    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)


def _await_optimizer(board: StatusFileWriter) -> None:
    """Whether the program counts steps at all, once its first optimizer is made; covers the constructor until then."""
    from torch.optim import optimizer as optimizers

    kind = optimizers.Optimizer
    original = kind.__init__

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__ = original
        board.fact(protocol.FACT_OPTIMIZER, "made")
        original(self, *arguments, **options)

    board.fact(protocol.FACT_OPTIMIZER, "none")
    kind.__init__ = construct


def _gradients(optimizer: Any) -> int:
    """Parameters that have one, about 0.1 us each. Nothing is read but whether it is there."""
    return sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _hook_data(torch: Any, board: StatusFileWriter, trouble: TroubleLog, given_up: GivenUp, fetches: Fetches) -> None:
    """A mark when a DataLoader is asked for a batch, and one when it has answered; how far its iterator is."""
    from torch.utils.data import dataloader

    iterator = dataloader._BaseDataLoaderIter
    construct, begin_again, fetch = iterator.__init__, iterator._reset, iterator.__next__
    loaders = Loaders(board, Chains(board, foreign_code(torch)))
    asked, answered = board.what("data", "fetch"), board.what("data", "fetched")

    @functools.wraps(fetch)
    def next_batch(self: Any) -> Any:
        board.begin_step()
        board.mark(asked)
        began_ns = time.monotonic_ns()
        try:
            batch = fetch(self)
        except StopIteration:
            trouble.attempt("loaders", lambda: loaders.gave(self, 0))
            raise
        board.mark(answered)
        # The first one waits for workers to start.
        if getattr(self, "_num_yielded", 0) > 1:
            wait_ns = time.monotonic_ns() - began_ns
            trouble.attempt("waits for batches", lambda: fetches.waited(wait_ns))
        given_up.took_another()
        trouble.attempt("loaders", lambda: loaders.gave(self, 1))
        return batch

    @functools.wraps(construct)
    def init(self: Any, loader: Any, *arguments: Any, **options: Any) -> None:
        construct(self, loader, *arguments, **options)
        trouble.attempt("loaders", lambda: loaders.began(self, loader))

    @functools.wraps(begin_again)
    def reset(self: Any, *arguments: Any, **options: Any) -> None:
        begin_again(self, *arguments, **options)
        trouble.attempt("loaders", lambda: loaders.again(self))

    iterator.__init__, iterator._reset, iterator.__next__ = init, reset, next_batch


class Fetches:
    """For how long the main thread has waited for batches, and the line of the longest wait."""

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self._foreign = foreign
        self._thread = threading.main_thread().ident
        self._began_ns = time.monotonic_ns()
        self._waited_ns = self._longest_ns = 0
        self._place = ""

    def waited(self, wait_ns: int) -> None:
        if threading.get_ident() != self._thread:  # one that fetches ahead keeps nobody waiting
            return
        self._waited_ns += wait_ns
        if wait_ns > self._longest_ns:
            self._longest_ns = wait_ns
            frame = innermost(sys._getframe(1), self._foreign)
            at = None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            self._place = place_text(*at) if at else ""

    def record(self) -> dict[str, Any]:
        """In seconds, up to now, of the time since this object was made."""
        passed_ns = time.monotonic_ns() - self._began_ns
        return {"waited_s": self._waited_ns / 1e9, "passed_s": passed_ns / 1e9, "waited_at": self._place}


class _Loader:
    """One DataLoader: its number, its iterators so far, what the newest one gave, and who made that."""

    __slots__ = ("batches", "chain", "ended", "iterators", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.iterators = self.batches = self.chain = 0
        self.ended = False


class Loaders:
    """Says on the board how far each DataLoader is. Holds on to none, and to none of its iterators."""

    def __init__(self, board: StatusFileWriter, chains: Chains) -> None:
        self._board = board
        self._chains = chains
        self._count = 0
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[_Loader, int]] = weakref.WeakKeyDictionary()

    def began(self, iterator: Any, loader: Any) -> None:
        known = self._loaders.get(loader)
        if known is None:
            self._count += 1
            known = self._loaders[loader] = _Loader(self._count)
        self._begin(iterator, known)

    def again(self, iterator: Any) -> None:
        """Workers that persist keep their iterator; torch also calls this as one is made."""
        known, _ = self._iterators.get(iterator, (None, 0))
        if known is not None and (known.batches or known.ended):
            self._begin(iterator, known)

    def gave(self, iterator: Any, batches: int) -> None:
        """Another batch, or none, and with that its end. An older iterator of the same loader is not told."""
        known, number = self._iterators.get(iterator, (None, 0))
        if known is not None and number == known.iterators:
            known.batches += batches
            known.ended = not batches
            self._tell(known)

    def _begin(self, iterator: Any, known: _Loader) -> None:
        known.iterators += 1
        known.batches, known.ended = 0, False
        known.chain = self._chains.of(sys._getframe(2)).node
        self._iterators[iterator] = known, known.iterators
        self._tell(known)

    def _tell(self, known: _Loader) -> None:
        self._board.loader(known.number, known.batches, known.iterators, known.chain, ended=known.ended)


CALLERS_LIMIT = 4  # of a program that steps from more lines, the newest of these counts


class Caller:
    """Says on the board which lines of the user's led to the optimizer, when they change. About 1 us a step."""

    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._seen: set[tuple[Any, int]] = set()

    def look(self) -> None:
        frame = innermost(sys._getframe(1), self._foreign)
        if frame is None or (frame.f_code, frame.f_lineno) in self._seen or len(self._seen) == CALLERS_LIMIT:
            return
        self._seen.add((frame.f_code, frame.f_lineno))
        self._board.fact(protocol.FACT_STEPPED, chain(frame, self._foreign))


HANDLERS_LIMIT = 4  # lines that one kind is handled by, on its way or for good
CAUGHT_LIMIT = 8  # kinds, each a type and a line; what is raised all the time has one place, and is counted there


class CaughtExceptions:
    """Says on the board what was raised, where, in which steps and how often. Holds on to no exception, and so to no
    frame."""

    def __init__(self, board: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._board = board
        self._foreign = foreign
        self._chains = Chains(board, foreign)
        self._kinds: dict[tuple[str, str], _Caught] = {}
        self._last: tuple[int, int] | None = None  # the same exception passes one module after the other
        # By identity of the function, which is held: what it handled last.
        self._handled: dict[int, tuple[Any, _Caught, str]] = {}

    def look(self) -> None:
        """Called from a forward hook: the frame before the hook's is torch's, which handles the exception if any."""
        kind, error, _ = sys.exc_info()
        trace = error.__traceback__ if error is not None else None
        if kind is None or trace is None or trace.tb_frame is not sys._getframe(2) or is_control_flow(kind):
            return
        key = (id(error), self._board.step)
        if key == self._last and _left_another(trace):
            return
        inner = self._inside(trace)
        caller = innermost(trace.tb_frame, self._foreign)
        if not inner and (caller is None or is_installed(caller.f_code.co_filename)):
            return  # so far it passed through no line of the program
        self._last = key
        # What torch raised, the line did that called torch.
        place = inner[-1] if inner else place_text(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
        known = self._kind(type(error).__name__, place, trace.tb_frame, inner)
        if known is not None:
            known.forward = True
            known.again(self._board.step)

    def handled(self, error: BaseException, frame: Any, offset: int) -> None:
        """The frame, of the program's own code, goes on at this instruction, which may be only on the way past it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not frame:
            trace = trace.tb_next
        if trace is None or is_control_flow(type(error)):
            return
        inner = self._inside(trace)
        known = self._kind(type(error).__name__, inner[-1], frame.f_back, inner)
        if known is None:
            return
        line = known.handled_at(frame.f_code, offset)
        self._handled[id(frame.f_code)] = frame.f_code, known, line
        # Once, on its way past several lines; what a forward raised was counted as it left it.
        if known.is_first(line) and not (known.forward and self._last == (id(error), self._board.step)):
            known.again(self._board.step)

    def passed_on(self, code: Any) -> None:
        """What it handled last it did not catch."""
        if id(code) in self._handled:
            _, known, line = self._handled[id(code)]
            known.tell(line, handled=False)

    def is_foreign(self, file: str) -> bool:
        return file.startswith(self._foreign)

    def _inside(self, trace: Any) -> list[str]:
        """The program's own lines that it left already, outermost first."""
        lines: list[str] = []
        while trace is not None:
            code = trace.tb_frame.f_code
            if not code.co_filename.startswith(self._foreign) and not is_installed(code.co_filename):
                lines.append(place_text(code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        return lines

    def _kind(self, kind: str, place: str, outside: Any, inner: list[str]) -> _Caught | None:
        """None where there are too many."""
        known = self._kinds.get((kind, place))
        if known is None and len(self._kinds) < CAUGHT_LIMIT:
            node = self._chains.of(outside).node if outside is not None else 0
            for line in inner:
                node = self._board.node(self._board.string(line), node)
            known = _Caught(self._board, len(self._kinds) + 1, f"{kind} {place}", node)
            self._kinds[kind, place] = known
        return known


def _left_another(trace: Any) -> bool:
    """It left a module inside this one before. Another exception may lie where an old one did."""
    calls, inner = trace.tb_frame.f_code, trace.tb_next
    while inner is not None and inner.tb_frame.f_code is not calls:
        inner = inner.tb_next
    return inner is not None


class _Caught:
    """One kind of exception on the board: the first of it, how many there were, and the step of the newest."""

    def __init__(self, board: StatusFileWriter, number: int, said: str, node: int) -> None:
        self._board = board
        self._number, self._node = number, node
        self._count = 0
        self.forward = False  # it left one, and was counted there
        self._lines: dict[tuple[int, int], tuple[Any, str]] = {}  # by code and instruction; the code is held by it
        self._handlers: dict[str, int] = {}  # by line; where on the board each is told
        board.fact(f"{protocol.FACT_CAUGHT}{number}", f"{board.step} {said}")
        self._at = board.fact(f"{protocol.FACT_CAUGHT_AGAIN}{number}", self._numbers(board.step))

    def again(self, step: int) -> None:
        self._count += 1
        if self._at:
            self._board.rewrite(self._at, self._numbers(step))

    def handled_at(self, code: Any, offset: int) -> str:
        _, line = self._lines.get((id(code), offset)) or self._learn(code, offset)
        self.tell(line, handled=True)
        return line

    def is_first(self, line: str) -> bool:
        return line == next(iter(self._handlers), None)

    def tell(self, line: str, *, handled: bool) -> None:
        at = self._handlers.get(line)
        if at:
            self._board.rewrite(at, f"{int(handled)}{int(self.forward)}")

    def _learn(self, code: Any, offset: int) -> tuple[Any, str]:
        """The end of a handler is one of its own, in the same line."""
        line = next((line for _, end, line in code.co_lines() if end > offset and line), code.co_firstlineno)
        place = place_text(code.co_filename, line, code.co_name)
        index = len(self._handlers)
        if place not in self._handlers and index < HANDLERS_LIMIT:
            said = f"{self._number}.{index}"
            self._handlers[place] = self._board.fact(f"{protocol.FACT_HANDLED}{said}", f"00 {said} {place}")
        if len(self._lines) < HANDLERS_LIMIT * HANDLERS_LIMIT:
            self._lines[id(code), offset] = code, place
        return code, place

    def _numbers(self, step: int) -> str:
        return f"{self._number} {self._count:010d} {step:010d} {self._node:010d}"


def is_control_flow(kind: type[BaseException]) -> bool:
    """Nothing went wrong where it was raised: iteration that ends, a generator that is closed, torch's private signals.

    The private errors of torch's C code are those it has public names for.
    """
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return True
    words = f"{kind.__module__}.{kind.__qualname__}".split(".")
    return words[0] == "torch" and kind.__module__ != "torch._C" and any(word.startswith("_") for word in words)
