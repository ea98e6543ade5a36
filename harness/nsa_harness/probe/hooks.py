"""Progress events of a training step: module forward and backward, optimizer step, data loading.

The hooks read no tensor's values and return nothing, so they change no result.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import protocol
from . import exceptions
from .chains import Chains
from .exceptions import CaughtExceptions, DroppedBatches
from .names import ModuleNames
from .patches import TroubleLog, before_first_call, compiling_test, patch
from .places import chain, foreign_code, frame_place, innermost, is_own
from .status_file import StatusFileWriter

OUTPUTS_LIMIT = 64  # tensors of one module's output that get a backward event
DEPTH_LIMIT = 4  # containers inside containers
CALLING_LINES_LIMIT = 1024  # more would leave no room in the table of strings
COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


def install(
    torch: Any, status_file: StatusFileWriter, trouble: TroubleLog, dropped_batches: DroppedBatches, fetches: Fetches
) -> ModuleNames:
    """Install each kind of hook, and return the models that they will meet. A kind that this torch lacks is noted."""
    names = ModuleNames(status_file)
    caught = CaughtExceptions(status_file, foreign_code(torch))
    trouble.attempt("module hooks", lambda: _hook_modules(torch, status_file, trouble, names, caught, dropped_batches))
    if hasattr(sys, "monitoring"):
        trouble.attempt(exceptions.PIECE, lambda: exceptions.monitor(vars(sys)["monitoring"], caught, trouble))
    trouble.attempt("optimizer hooks", lambda: _hook_optimizers(torch, status_file, trouble))
    trouble.attempt("first optimizer", lambda: _await_optimizer(status_file, trouble))
    trouble.attempt("data hook", lambda: _hook_data(torch, status_file, trouble, dropped_batches, fetches))
    return names


def _hook_modules(
    torch: Any,
    status_file: StatusFileWriter,
    trouble: TroubleLog,
    names: ModuleNames,
    caught: CaughtExceptions,
    dropped_batches: DroppedBatches,
) -> None:
    """Register global forward hooks.

    The backward event comes from a pre-hook on the grad_fn of the module's output, which returns nothing. torch's own
    full backward hooks are not used: they break programs that change tensors in place. A backward event costs three
    times as much as a forward event, so deeply nested modules have none (`Known.silent_backward`). torch's own leaf
    modules inside a block have neither (`Known.silent`): there are many, and none runs long.
    """
    is_compiling = compiling_test(torch)
    tensor_type = torch.Tensor
    ready, forward = names.ready.get, status_file.forward
    lines = CallingLines(status_file, foreign_code(torch), torch.nn.modules.module.__file__)
    line_of = lines.of
    handles: list[Any] = []
    inner_output: list[Callable[[], object | None]] = [lambda: None]
    outermost: list[Any] = [None]  # the module whose forward is inside no other module's forward
    trains = [False]  # whether its pass trains
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
            if status_file.step_done:
                status_file.begin_step()
                outermost[0] = None  # the end of a forward in the last step may have been missed
            if known.learns and (outermost[0] is None or outermost[0] is module):
                outermost[0] = module
                learning = grad_enabled()
                status_file.mode(
                    protocol.MODE_KNOWN
                    | (protocol.MODE_TRAINING if module.training else 0)
                    | (protocol.MODE_GRADIENTS if learning else 0)
                )
                trains[0] = module.training and learning
                if trains[0] and in_backward() == -1:
                    trouble.attempt("batches", lambda: dropped_batches.pass_began(module, arguments))
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
                # A container returns the tensor of its last child, whose name is better: the container is silent.
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
                caught.note_forward_exit()
                # The exception left a whole model, or a loss next to a model.
                if outermost[0] is None and module.training and grad_enabled():
                    ended_by = sys.exc_info()[1]
                    trouble.attempt("batches", lambda: dropped_batches.pass_failed(ended_by))
        except Exception as error:
            give_up(error)

    # torch.compile warns of global hooks that also fire for its wrapper. The probe's may, and the user has no hook to
    # fix.
    warnings.filterwarnings("ignore", message=COMPILE_WARNING, category=UserWarning)
    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(before_forward))
    handles.append(torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True))


class CallingLines:
    """The program's lines that call modules."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...], torch_file: str) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._torch_file = torch_file  # the file of the frames between a hook and the caller of the module
        self._depth = 0  # how many frames the module's caller is above `of`; 0 = not measured yet
        self._known: dict[
            tuple[int, int], tuple[Any, int]
        ] = {}  # (id(code), instruction) -> code, line; the code keeps its id valid

    def of(self) -> int:
        """Return the string number of the line that calls the module, 0 for a library's line. Call it from a hook.

        A line that was seen before costs about 0.3 us: the frames in between are not read.
        """
        try:
            frame = sys._getframe(self._depth)
            return self._known[id(frame.f_code), frame.f_lasti][1]
        except (KeyError, ValueError):  # ValueError: the stack is not as deep
            return self._add_line(sys._getframe(1))

    def _add_line(self, frame: Any) -> int:
        """Find the line that calls the module above the hook in `frame`, remember it, and return its string number."""
        depth = 1
        while frame is not None and (depth == 1 or frame.f_code.co_filename == self._torch_file):
            frame, depth = frame.f_back, depth + 1
        if frame is None or len(self._known) == CALLING_LINES_LIMIT:
            return 0
        self._depth = self._depth or depth
        code, line = frame.f_code, 0
        if is_own(code.co_filename, self._foreign):
            line = self._status_file.string(frame_place(frame))
        self._known[id(code), frame.f_lasti] = code, line
        return line


def _tensors(output: Any, tensor_type: type) -> list[Any]:
    """Return up to OUTPUTS_LIMIT tensors with a grad_fn from nested tuples, lists and dicts."""
    tensors: list[Any] = []
    for tensor in _walk(output, tensor_type, DEPTH_LIMIT):
        if tensor.grad_fn is not None:
            tensors.append(tensor)
        if len(tensors) == OUTPUTS_LIMIT:
            break
    return tensors


def _walk(output: Any, tensor_type: type, depth: int) -> Iterator[Any]:
    if isinstance(output, tensor_type):
        yield output
    elif depth and isinstance(output, (tuple, list, dict)):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _walk(item, tensor_type, depth - 1)


def _hook_optimizers(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Count steps by the first optimizer that steps. Once it is collected, the next optimizer that steps counts."""
    from torch.optim import optimizer as optimizers

    counting: list[Callable[[], object | None]] = [lambda: None]
    gradients = [0]
    works = [True]  # a hook that removed itself would change the table that torch is iterating over
    callers = StepCallers(status_file, foreign_code(torch))

    def give_up(error: Exception) -> None:
        works[0] = False
        trouble.note("optimizer hooks", error)

    def before_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not works[0]:
            return
        try:
            if counting[0]() is None:
                counting[0] = weakref.ref(optimizer)
            status_file.progress_event(status_file.what("optimizer", type(optimizer).__name__))
            if counting[0]() is optimizer:
                gradients[0] = _gradients(optimizer)
                callers.note_caller()
        except Exception as error:
            give_up(error)

    def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not works[0]:
            return
        try:
            status_file.progress_event(status_file.what("step", type(optimizer).__name__))
            if counting[0]() is optimizer:
                status_file.finish_step(gradients[0])
        except Exception as error:
            give_up(error)

    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)


def _await_optimizer(status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Write whether the program has made an optimizer: a program without one takes no steps that could be counted."""
    from torch.optim.optimizer import Optimizer

    status_file.fact(protocol.FACT_OPTIMIZER, "none")

    def made(_arguments: Any, _options: Any) -> None:
        status_file.fact(protocol.FACT_OPTIMIZER, "made")

    before_first_call(Optimizer, "__init__", "first optimizer", trouble, made)


def _gradients(optimizer: Any) -> int:
    """Return how many parameters have a gradient. Costs about 0.1 us each, and reads no gradient."""
    return sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


CALLERS_LIMIT = 4  # lines that call the optimizer; later lines are not recorded


class StepCallers:
    """Writes which of the program's lines called the optimizer, when they change. Costs about 1 us per step."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._seen: set[tuple[Any, int]] = set()

    def note_caller(self) -> None:
        frame = innermost(sys._getframe(1), self._foreign)
        if frame is None or (frame.f_code, frame.f_lineno) in self._seen or len(self._seen) == CALLERS_LIMIT:
            return
        self._seen.add((frame.f_code, frame.f_lineno))
        self._status_file.fact(protocol.FACT_STEPPED, chain(frame, self._foreign))


def _hook_data(
    torch: Any, status_file: StatusFileWriter, trouble: TroubleLog, dropped_batches: DroppedBatches, fetches: Fetches
) -> None:
    """Patch the iterators of DataLoader: an event when a batch is requested and when it arrives, and the counts."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    loaders = Loaders(status_file, Chains(status_file, foreign_code(torch)))
    fetch, fetched = status_file.what("data", "fetch"), status_file.what("data", "fetched")

    def before_next(_arguments: Any, _options: Any) -> int:
        status_file.begin_step()
        status_file.progress_event(fetch)
        return time.monotonic_ns()

    def after_next(began_ns: int, arguments: Any, _options: Any, _batch: Any, error: BaseException | None) -> None:
        iterator = arguments[0]
        if error is None:
            status_file.progress_event(fetched)
            # The first batch waits for the workers to start.
            if getattr(iterator, "_num_yielded", 0) > 1:
                fetches.note_wait(time.monotonic_ns() - began_ns)
            dropped_batches.next_batch_began()
            loaders.note_batches(iterator, 1)
        elif isinstance(error, StopIteration):
            loaders.note_batches(iterator, 0)

    def constructed(_state: object, arguments: Any, options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            loaders.begin(arguments[0], arguments[1] if len(arguments) > 1 else options["loader"])

    def reset(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            loaders.note_restart(arguments[0])

    patch(_BaseDataLoaderIter, "__init__", "loaders", trouble, after=constructed)
    patch(_BaseDataLoaderIter, "_reset", "loaders", trouble, after=reset)
    patch(_BaseDataLoaderIter, "__next__", "data hook", trouble, before=before_next, after=after_next)


class Fetches:
    """The time that the main thread has waited for batches, and the line of the longest wait."""

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self._foreign = foreign
        self._thread = threading.main_thread().ident
        self._began_ns = time.monotonic_ns()
        self._waited_ns = self._longest_ns = 0
        self._place = ""

    def note_wait(self, wait_ns: int) -> None:
        """Add a wait for a batch in this thread."""
        if threading.get_ident() != self._thread:  # a thread that prefetches delays no step
            return
        self._waited_ns += wait_ns
        if wait_ns > self._longest_ns:
            self._longest_ns = wait_ns
            self._place = frame_place(innermost(sys._getframe(1), self._foreign))

    def record(self) -> dict[str, Any]:
        """Return the waits and the time since this object was made, in seconds."""
        passed_ns = time.monotonic_ns() - self._began_ns
        return {"waited_s": self._waited_ns / 1e9, "passed_s": passed_ns / 1e9, "waited_at": self._place}


class _Loader:
    """One DataLoader: its number, how many iterators it made, and the latest iterator's batches and caller chain."""

    __slots__ = ("batches", "chain", "ended", "iterators", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.iterators = self.batches = self.chain = 0
        self.ended = False


class Loaders:
    """Writes to the status file how far each DataLoader is. Has only weak references to loaders and iterators."""

    def __init__(self, status_file: StatusFileWriter, chains: Chains) -> None:
        self._status_file = status_file
        self._chains = chains
        self._count = 0
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[_Loader, int]] = weakref.WeakKeyDictionary()

    def begin(self, iterator: Any, loader: Any) -> None:
        known = self._loaders.get(loader)
        if known is None:
            self._count += 1
            known = self._loaders[loader] = _Loader(self._count)
        self._begin(iterator, known)

    def note_restart(self, iterator: Any) -> None:
        """Note that an iterator with persistent workers restarts. torch also calls this while it makes an iterator."""
        known, _ = self._iterators.get(iterator, (None, 0))
        if known is not None and (known.batches or known.ended):
            self._begin(iterator, known)

    def note_batches(self, iterator: Any, batches: int) -> None:
        """Count another batch, or note the end if `batches` is 0. Only the loader's latest iterator counts."""
        known, number = self._iterators.get(iterator, (None, 0))
        if known is not None and number == known.iterators:
            known.batches += batches
            known.ended = not batches
            self._write(known)

    def _begin(self, iterator: Any, known: _Loader) -> None:
        known.iterators += 1
        known.batches, known.ended = 0, False
        known.chain = self._chains.of(sys._getframe(2)).node
        self._iterators[iterator] = known, known.iterators
        self._write(known)

    def _write(self, known: _Loader) -> None:
        self._status_file.loader(known.number, known.batches, known.iterators, known.chain, ended=known.ended)
