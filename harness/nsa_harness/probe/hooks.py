"""Hooks that record the progress of each training step.

The hooks do not read the values of tensors and return nothing, so they change no result.
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
from .exceptions import CaughtExceptions, DroppedBatchCounter
from .names import ModuleNames
from .patches import TroubleLog, before_first_call, compiling_test, patch
from .places import chain, foreign_code, frame_place, innermost, is_own
from .status_file import StatusFileWriter

OUTPUTS_LIMIT = 64  # tensors of one module's output that get a backward event
DEPTH_LIMIT = 4  # containers inside containers
CALLING_LINES_LIMIT = 1024  # more lines could fill the string table
COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


def install(
    torch: Any,
    status_file: StatusFileWriter,
    trouble: TroubleLog,
    dropped_batches: DroppedBatchCounter,
    fetches: FetchTimes,
) -> ModuleNames:
    """Install all hooks that record progress. Return the names of the models that the program calls."""
    names = ModuleNames(status_file)
    caught_exceptions = CaughtExceptions(status_file, foreign_code(torch))
    trouble.attempt(
        "module hooks", lambda: _hook_modules(torch, status_file, trouble, names, caught_exceptions, dropped_batches)
    )
    if hasattr(sys, "monitoring"):
        trouble.attempt(
            exceptions.PIECE, lambda: exceptions.monitor(vars(sys)["monitoring"], caught_exceptions, trouble)
        )
    trouble.attempt("optimizer hooks", lambda: _hook_optimizers(torch, status_file, trouble))
    trouble.attempt("first optimizer", lambda: _await_optimizer(status_file, trouble))
    trouble.attempt("data hook", lambda: _hook_data(torch, status_file, trouble, dropped_batches, fetches))
    return names


def _hook_modules(
    torch: Any,
    status_file: StatusFileWriter,
    trouble: TroubleLog,
    names: ModuleNames,
    caught_exceptions: CaughtExceptions,
    dropped_batches: DroppedBatchCounter,
) -> None:
    """Register global hooks that record each module's forward and backward passes.

    The backward event comes from a pre-hook on the grad_fn of the module's output. torch's own full backward hooks are
    not used, because they break programs that change tensors in place. A backward event costs three times as much as a
    forward event, so deeply nested modules get no backward event (`NamedModule.skips_backward`). torch's leaf modules
    inside a block get no event at all (`NamedModule.skips_events`): there are many of them, and none runs for long.
    """
    is_compiling = compiling_test(torch)
    tensor_type = torch.Tensor
    find_called, forward = names.called.get, status_file.write_forward
    lines = CallingLines(status_file, foreign_code(torch), torch.nn.modules.module.__file__)
    calling_line = lines.calling_line
    handles: list[Any] = []
    inner_output: list[Callable[[], object | None]] = [lambda: None]
    outermost: list[Any] = [None]  # the module whose forward is not inside another module's forward
    trains = [False]  # whether this forward runs in training mode and with gradients
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
            entry = find_called(id(module)) or names.find(module)
            if entry.skips_events:
                return
            if status_file.is_step_done:
                status_file.begin_step()
                outermost[0] = None  # the hook may have missed the end of a forward in the last step
            if entry.has_parameters and (outermost[0] is None or outermost[0] is module):
                outermost[0] = module
                learning = grad_enabled()
                status_file.write_mode(
                    protocol.MODE_KNOWN
                    | (protocol.MODE_TRAINING if module.training else 0)
                    | (protocol.MODE_GRADIENTS if learning else 0)
                )
                trains[0] = module.training and learning
                if trains[0] and in_backward() == -1:
                    trouble.attempt("batches", lambda: dropped_batches.note_forward(module, arguments))
                    if names.at_outermost is not None and not entry.is_ddp:
                        names.at_outermost(module)
            if entry.is_ddp and grad_enabled():
                names.called_ddps.add(id(module))
            if names.at_next_forward is not None:
                names.at_next_forward()
            forward(entry.forward_event, calling_line())
        except Exception as error:
            give_up(error)

    def after_forward(module: Any, _arguments: Any, output: Any) -> None:
        if is_compiling():
            return
        try:
            entry = find_called(id(module)) or names.find(module)
            if outermost[0] is module:
                outermost[0] = None
            if entry.skips_backward:
                return
            if isinstance(output, tensor_type):
                node = output.grad_fn
                if node is None:
                    entry.without_gradients |= outermost[0] is not None and trains[0]
                    return
                # A container returns the output tensor of its last child. Only the child gets an event, because its
                # name is more precise.
                if inner_output[0]() is output:
                    return
                inner_output[0] = weakref.ref(output)
                node.register_prehook(entry.write_backward_event)
            elif output is not None:
                on_backward = entry.write_backward_event
                tensors = _tensors(output, tensor_type)
                for tensor in tensors:
                    tensor.grad_fn.register_prehook(on_backward)
                entry.without_gradients |= not tensors and outermost[0] is not None and trains[0]
            else:
                caught_exceptions.note_forward_exit()
                # The exception left a whole model, or a loss module outside of the model.
                if outermost[0] is None and module.training and grad_enabled():
                    ended_by = sys.exc_info()[1]
                    trouble.attempt("batches", lambda: dropped_batches.note_failure(ended_by))
        except Exception as error:
            give_up(error)

    # torch.compile warns about global hooks that also run for its wrapper module. The probe's hooks may do so, and the
    # user has no hook to fix.
    warnings.filterwarnings("ignore", message=COMPILE_WARNING, category=UserWarning)
    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(before_forward))
    handles.append(torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True))


class CallingLines:
    """A search for the lines of the program that call modules."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...], torch_file: str) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._torch_file = torch_file  # the file of the frames between a hook and the caller of the module
        self._depth = 0  # number of frames from `calling_line` up to the module's caller; 0 = not measured yet
        # (id of the code, instruction) -> the code, string-table index of the line. The reference keeps the id valid.
        self._lines: dict[tuple[int, int], tuple[Any, int]] = {}

    def calling_line(self) -> int:
        """Return the line that calls the current module, as an index into the status file's string table.

        Return 0 if the line is in a library. Must be called from a forward hook. A line that was seen before costs
        about 0.3 us, because the frames in between are not read.
        """
        try:
            frame = sys._getframe(self._depth)
            return self._lines[id(frame.f_code), frame.f_lasti][1]
        except (KeyError, ValueError):  # ValueError: this stack has fewer frames
            return self._add_line(sys._getframe(1))

    def _add_line(self, frame: Any) -> int:
        depth = 1
        while frame is not None and (depth == 1 or frame.f_code.co_filename == self._torch_file):
            frame, depth = frame.f_back, depth + 1
        if frame is None or len(self._lines) == CALLING_LINES_LIMIT:
            return 0
        self._depth = self._depth or depth
        code, line = frame.f_code, 0
        if is_own(code.co_filename, self._foreign):
            line = self._status_file.string_number(frame_place(frame))
        self._lines[id(code), frame.f_lasti] = code, line
        return line


def _tensors(output: Any, tensor_type: type) -> list[Any]:
    """Return the tensors in `output` that have a grad_fn."""
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
    """Count the steps of the first optimizer that steps, or of the next one once it is garbage-collected."""
    from torch.optim import optimizer as optimizers

    counting: list[Callable[[], object | None]] = [lambda: None]
    gradients = [0]
    is_active = [True]  # a hook cannot remove itself: torch is iterating over the table of hooks
    callers = StepCallers(status_file, foreign_code(torch))

    def give_up(error: Exception) -> None:
        is_active[0] = False
        trouble.note("optimizer hooks", error)

    def before_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not is_active[0]:
            return
        try:
            if counting[0]() is None:
                counting[0] = weakref.ref(optimizer)
            status_file.write_training_event(status_file.event_code("optimizer", type(optimizer).__name__))
            if counting[0]() is optimizer:
                gradients[0] = _gradients(optimizer)
                callers.note_caller()
        except Exception as error:
            give_up(error)

    def after_step(optimizer: Any, _arguments: Any, _options: Any) -> None:
        if not is_active[0]:
            return
        try:
            status_file.write_training_event(status_file.event_code("step", type(optimizer).__name__))
            if counting[0]() is optimizer:
                status_file.finish_step(gradients[0])
        except Exception as error:
            give_up(error)

    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(after_step)


def _await_optimizer(status_file: StatusFileWriter, trouble: TroubleLog) -> None:
    """Record the moment when the program creates its first optimizer."""
    from torch.optim.optimizer import Optimizer

    status_file.write_fact(protocol.FACT_OPTIMIZER, "none")

    def first_optimizer(_arguments: Any, _options: Any) -> None:
        status_file.write_fact(protocol.FACT_OPTIMIZER, "made")

    before_first_call(Optimizer, "__init__", "first optimizer", trouble, first_optimizer)


def _gradients(optimizer: Any) -> int:
    """Return how many of an optimizer's parameters have a gradient."""
    return sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


CALLERS_LIMIT = 4  # lines that call the optimizer; further lines are not recorded


class StepCallers:
    """A record of the call stack for each line that calls an optimizer's step method."""

    def __init__(self, status_file: StatusFileWriter, foreign: tuple[str, ...]) -> None:
        self._status_file = status_file
        self._foreign = foreign
        self._known_callers: set[tuple[Any, int]] = set()

    def note_caller(self) -> None:
        frame = innermost(sys._getframe(1), self._foreign)
        if (
            frame is None
            or (frame.f_code, frame.f_lineno) in self._known_callers
            or len(self._known_callers) == CALLERS_LIMIT
        ):
            return
        self._known_callers.add((frame.f_code, frame.f_lineno))
        self._status_file.write_fact(protocol.FACT_STEPPED, chain(frame, self._foreign))


def _hook_data(
    torch: Any,
    status_file: StatusFileWriter,
    trouble: TroubleLog,
    dropped_batches: DroppedBatchCounter,
    fetches: FetchTimes,
) -> None:
    """Patch DataLoader iterators to record when batches are requested and returned."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    loaders = LoaderProgress(status_file, Chains(status_file, foreign_code(torch)))
    fetch_event, fetched_event = status_file.event_code("data", "fetch"), status_file.event_code("data", "fetched")

    def before_next(_arguments: Any, _options: Any) -> int:
        status_file.begin_step()
        status_file.write_training_event(fetch_event)
        return time.monotonic_ns()

    def after_next(began_ns: int, arguments: Any, _options: Any, _batch: Any, error: BaseException | None) -> None:
        iterator = arguments[0]
        if error is None:
            status_file.write_training_event(fetched_event)
            # The wait for the first batch includes the start of the workers and does not count.
            if getattr(iterator, "_num_yielded", 0) > 1:
                fetches.note_wait(time.monotonic_ns() - began_ns)
            dropped_batches.note_next_batch()
            loaders.note_batches(iterator, 1)
        elif isinstance(error, StopIteration):
            loaders.note_batches(iterator, 0)

    def after_init(_state: object, arguments: Any, options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            loaders.note_iterator(arguments[0], arguments[1] if len(arguments) > 1 else options["loader"])

    def after_reset(_state: object, arguments: Any, _options: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            loaders.note_restart(arguments[0])

    patch(_BaseDataLoaderIter, "__init__", "loaders", trouble, after=after_init)
    patch(_BaseDataLoaderIter, "_reset", "loaders", trouble, after=after_reset)
    patch(_BaseDataLoaderIter, "__next__", "data hook", trouble, before=before_next, after=after_next)


class FetchTimes:
    """A measurement of the time that the main thread spends waiting for batches."""

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self._foreign = foreign
        self._thread = threading.main_thread().ident
        self._created_ns = time.monotonic_ns()
        self.waited_ns = 0  # total time that the main thread waited for batches
        self._longest_ns = 0
        self._place = ""

    def note_wait(self, wait_ns: int) -> None:
        """Record that the main thread waited `wait_ns` nanoseconds for a batch."""
        if threading.get_ident() != self._thread:  # a prefetching thread does not delay a step
            return
        self.waited_ns += wait_ns
        if wait_ns > self._longest_ns:
            self._longest_ns = wait_ns
            self._place = frame_place(innermost(sys._getframe(1), self._foreign))

    def record(self) -> dict[str, Any]:
        """Return the total time spent waiting for batches, and the line of the longest wait."""
        passed_ns = time.monotonic_ns() - self._created_ns
        return {"waited_s": self.waited_ns / 1e9, "passed_s": passed_ns / 1e9, "waited_at": self._place}


class _Loader:
    """The progress of one DataLoader of the program."""

    __slots__ = ("batches", "chain", "ended", "iterators", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.iterators = self.batches = self.chain = 0
        self.ended = False


class LoaderProgress:
    """A recorder of each DataLoader's progress in the status file."""

    def __init__(self, status_file: StatusFileWriter, chains: Chains) -> None:
        self._status_file = status_file
        self._chains = chains
        self._count = 0
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[_Loader, int]] = weakref.WeakKeyDictionary()

    def note_iterator(self, iterator: Any, loader: Any) -> None:
        entry = self._loaders.get(loader)
        if entry is None:
            self._count += 1
            entry = self._loaders[loader] = _Loader(self._count)
        self._begin_iteration(iterator, entry)

    def note_restart(self, iterator: Any) -> None:
        """Record that an iterator with persistent workers starts again. The reset at its creation does not count."""
        entry, _ = self._iterators.get(iterator, (None, 0))
        if entry is not None and (entry.batches or entry.ended):
            self._begin_iteration(iterator, entry)

    def note_batches(self, iterator: Any, batches: int) -> None:
        """Add `batches` to the number of batches from an iterator, or record that it has ended if `batches` is 0."""
        entry, number = self._iterators.get(iterator, (None, 0))
        if entry is not None and number == entry.iterators:
            entry.batches += batches
            entry.ended = not batches
            self._write(entry)

    def _begin_iteration(self, iterator: Any, entry: _Loader) -> None:
        entry.iterators += 1
        entry.batches, entry.ended = 0, False
        entry.chain = self._chains.find(sys._getframe(2)).node
        self._iterators[iterator] = entry, entry.iterators
        self._write(entry)

    def _write(self, entry: _Loader) -> None:
        self._status_file.write_loader(entry.number, entry.batches, entry.iterators, entry.chain, ended=entry.ended)
