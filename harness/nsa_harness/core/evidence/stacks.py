"""Read dumps of call stacks, and determine what each thread is doing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, islice, takewhile
from typing import Any

from nsa_harness.core.evidence.evidence import Frame, Stack
from nsa_harness.core.evidence.host import Process, Task

_MAX_FRAMES = 200
_MAX_THREADS = 256

_STDLIB = re.compile(r"/lib/(?:python3\.\d+|pypy3\.\d+)/(?!site-packages/|dist-packages/)|^<frozen ")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
# Packages whose frames are never reported as the user's location, because they only run the user's training code.
_MACHINERY = {"torch", "numpy", "triton", "functorch", "torchgen"}
# The program that ships with nsa-harness counts as the user's program. The probe and planted faults do not.
_SUBJECT = re.compile(
    r"-packages/nsa_attention/|-packages/nsa_harness/(?!(?:probe|faults|fork_server|supervisor|pytest_plugin)/)[^/]+/"
    r"|/(?:nsa_)?harness/faults/acts\.py$"
)
_GUESTS = re.compile(
    r"/(?:nsa_)?harness/(?:probe|faults|fork_server|pytest_plugin)/"
)  # in a checkout and in an installed package
_PROBE = re.compile(r"/(?:nsa_)?harness/probe/")
_LIBRARY_POLLERS = ("tqdm/_monitor.py", "torch/utils/data/_utils/pin_memory.py", "multiprocessing/resource_sharer.py")

_FAULTHANDLER_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def parse_py_spy(text: str, source: str) -> tuple[Stack, ...]:
    """Return the stacks of all threads in the output of `py-spy dump --json`."""
    try:
        threads = json.loads(text)
        if not isinstance(threads, list):
            raise ValueError("not a list of threads")
        return tuple(
            Stack(
                thread=str(thread.get("thread_name") or ""),
                tid=None if thread.get("os_thread_id") is None else int(thread["os_thread_id"]),
                active=bool(thread.get("active")) or bool(thread.get("owns_gil")),
                frames=tuple(
                    Frame(file=str(frame["filename"]), line=int(frame["line"]), function=str(frame["name"]))
                    for frame in thread["frames"][:_MAX_FRAMES]
                    if frame.get("module") is None  # py-spy names a module only for native frames (--native)
                ),
                native=_native(thread["frames"]),
                source=source,
                gil=bool(thread.get("owns_gil")),
                arguments=_arguments(thread["frames"][:_MAX_FRAMES]),
            )
            for thread in threads[:_MAX_THREADS]
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not the form of py-spy dump --json: {error!r}") from error


_PY_SPY_PROCESS = re.compile(r"^Process (\d{1,10}): ")
_PY_SPY_THREAD = re.compile(r'^Thread (?:(\d{1,10})|0x[0-9A-Fa-f]+) \(([^)]{1,40})\)(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r"^ {4}(\S.*) \((.+?)(?::(\d+))?\)$")
_NATIVE_FILE = re.compile(r"\.so(?:\.[\d.]+)?$|\.(?:c|cc|cpp|cu|h|hpp)$|(?:^|/)python3?[\d.]*$")  # --native


def parse_py_spy_text(text: str) -> dict[int, tuple[Stack, ...]]:
    """Return, for each process id, the stacks in the plain text output of `py-spy dump`.

    The dumped process comes first. Without --full-filenames, py-spy shortens file names. A directory is added to the
    short names of torch and of the standard library, so that they differ from the program's own files. For other text
    the result is empty.
    """
    processes: dict[int, list[tuple[str, int | None, str, list[Frame]]]] = {}
    threads: list[tuple[str, int | None, str, list[Frame]]] | None = None
    for line in text.splitlines():
        if process := _PY_SPY_PROCESS.match(line):
            threads = processes[int(process[1])] = []
        elif threads is None:
            continue
        elif thread := _PY_SPY_THREAD.match(line):
            threads.append((thread[3] or "", int(thread[1]) if thread[1] else None, thread[2], []))
        elif threads and (frame := _PY_SPY_FRAME.match(line)) and len(threads[-1][3]) < _MAX_FRAMES:
            file = frame[2] if _NATIVE_FILE.search(frame[2]) else _with_directory(frame[2])
            threads[-1][3].append(Frame(file=file, line=int(frame[3] or 0), function=frame[1]))
    return {
        pid: tuple(
            Stack(
                thread=name,
                tid=tid,
                active="active" in state,
                frames=tuple(frame for frame in frames if not _NATIVE_FILE.search(frame.file)),
                native=_native_texts(
                    (frame.function, frame.file)
                    for frame in takewhile(lambda frame: _NATIVE_FILE.search(frame.file), frames)
                ),
                source="py-spy",
                gil="gil" in state,
            )
            for name, tid, state, frames in dumped_threads[:_MAX_THREADS]
        )
        for pid, dumped_threads in processes.items()
        if dumped_threads
    }


def _with_directory(short: str) -> str:
    top = short.partition("/")[0].removesuffix(".py")
    if short.startswith(("/", "<")):
        return short
    if top in _MACHINERY:
        return f"/site-packages/{short}"
    return f"/lib/python3.0/{short}" if top in sys.stdlib_module_names else short


_PARTNERS = ("src", "dst")  # global ranks
_PARTNERS_IN_GROUP = ("group_src", "group_dst")  # ranks within a group; a stack does not show their global ranks
_NUMBER = re.compile(r"-?\d{1,9}")


def _arguments(frames: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the src, dst and tag arguments of the outermost torch.distributed call.

    The result is empty if the dump has no variables (`py-spy --locals` adds them), if the call has no such argument, or
    if src or dst is a rank within a group. Only integers are read, because other variables may be secrets.
    """
    inside = takewhile(lambda frame: is_library(str(frame["filename"])), frames)
    calls = [frame for frame in inside if str(frame["filename"]).endswith(_PUBLIC[0])]
    for frame in reversed(calls):
        variables = {str(variable["name"]): str(variable["repr"]) for variable in frame.get("locals") or ()}
        numbers = {
            name: int(variables[name]) for name in (*_PARTNERS, "tag") if _NUMBER.fullmatch(variables.get(name, ""))
        }
        has_global_partner = any(name in numbers for name in _PARTNERS)
        if not has_global_partner and any(variables.get(name, "None") != "None" for name in _PARTNERS_IN_GROUP):
            return {}
        if numbers:
            return numbers
    return {}


def without_variables(text: str) -> str:
    """Return a JSON dump from py-spy without the values of variables. Raise ValueError if `text` is not JSON."""
    threads = json.loads(text)
    for thread in threads if isinstance(threads, list) else ():
        for frame in thread.get("frames", ()):
            frame.pop("locals", None)
    return json.dumps(threads)


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """Return the stacks in the last faulthandler dump in `text`, or () if there is none.

    Dumps follow each other without a separator, so a thread that appears again begins the next dump. The last thread of
    a dump is the main thread, because faulthandler lists the newest thread first.
    """
    dump: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _FAULTHANDLER_THREAD.match(line):
            if thread[2] in dump:
                dump = {}
            frames = dump.setdefault(thread[2], [])
        elif (frame := _FAULTHANDLER_FRAME.match(line)) and len(frames) < _MAX_FRAMES:
            frames.append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
    names = [*list(dump)[:-1], "MainThread"]
    return tuple(
        Stack(thread=name, tid=None, active=False, frames=tuple(frames), source="faulthandler")
        for name, frames in list(zip(names, dump.values(), strict=False))[-_MAX_THREADS:]
    )


def died_in_native_thread(text: str) -> bool:
    """Return whether faulthandler's text of a fatal signal marks no Python thread as the one that received it."""
    _, fatal, dump = text.rpartition("Fatal Python error: ")
    return bool(fatal) and "\nCurrent thread " not in dump


def is_library(file: str) -> bool:
    """Return whether a file belongs to a library or to nsa-harness's instrumentation, not to the user."""
    if _SUBJECT.search(file):
        return False
    return bool(_STDLIB.search(file) or _PACKAGE.search(file) or _GUESTS.search(file))


def is_standard(file: str) -> bool:
    """Return whether the file belongs to Python's standard library."""
    return bool(_STDLIB.search(file))


def in_probe(file: str) -> bool:
    """Return whether the file belongs to nsa-harness's instrumentation of the ranks."""
    return bool(_PROBE.search(file))


def is_poller(stack: Stack) -> bool:
    """Return whether the thread is a background thread started by a library or by nsa-harness's instrumentation."""
    return any(
        in_probe(frame.file) or any(poller in frame.file for poller in _LIBRARY_POLLERS) for frame in stack.frames
    )


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of user code, or else of an installed package unlike torch, or None."""
    own = next((frame for frame in frames if not is_library(frame.file) and not frame.file.startswith("<")), None)
    if own is not None:
        return own
    return next((frame for frame in frames if not is_machinery(frame.file)), None)


def package_of(file: str) -> str:
    """Return the name of the installed package to which the file belongs, or ""."""
    package = _PACKAGE.search(file)
    return package[1].removesuffix(".py") if package else ""


def training_stack(stacks: Sequence[Stack], pid: int, event_tids: Iterable[int] = ()) -> Stack | None:
    """Return the stack of the training thread, or None if there are no stacks.

    The training thread is the main thread, with one exception: during a backward pass on CUDA, a thread of autograd
    runs the Python hooks while the main thread only waits. That thread is found among `event_tids`, the ids of the
    threads that recorded progress events, because it runs the user's code.
    """
    by_tid = {stack.tid: stack for stack in stacks}
    main = by_tid.get(pid) or next((stack for stack in stacks if stack.thread == "MainThread"), None)
    for tid in event_tids:
        stack = by_tid.get(tid)
        if stack and stack.tid != pid and user_frame(stack.frames) is not None and _runs_backward(main):
            return stack
    return main or (stacks[0] if stacks else None)


def in_function(frames: Sequence[Frame], file_ends: str, names: Iterable[str] = ()) -> Frame | None:
    """Return the innermost frame in a file ending in `file_ends` and in a function of `names`, if any, or None."""
    functions = set(names)
    return next(
        (
            frame
            for frame in frames
            if frame.file.endswith(file_ends) and (not functions or frame.function in functions)
        ),
        None,
    )


@dataclass(frozen=True, kw_only=True)
class ThreadWait:
    """A kind of wait that another thread must end, such as waiting for a queue."""

    call: str  # the function, such as Queue.get
    awaited_item: str  # what the thread waits for, for a sentence
    ended_by: str  # the action of another thread that ends the wait, for a sentence


_TORCH_FUTURE = "torch/futures/__init__.py"
_FUTURE = ThreadWait(call="Future.result", awaited_item="the result of a future", ended_by="give it")
A_LOCK = ThreadWait(call="a lock", awaited_item="a lock", ended_by="release it")
_AWAITED = {
    ("/queue.py", "get"): ThreadWait(call="Queue.get", awaited_item="an item of a queue", ended_by="put one into it"),
    ("/queue.py", "put"): ThreadWait(
        call="Queue.put", awaited_item="room in a queue", ended_by="take an item out of it"
    ),
    ("/queue.py", "join"): ThreadWait(
        call="Queue.join", awaited_item="the items of a queue to be done", ended_by="do them"
    ),
    ("/threading.py", "Event.wait"): ThreadWait(call="Event.wait", awaited_item="an event", ended_by="set it"),
    ("/threading.py", "Barrier.wait"): ThreadWait(
        call="Barrier.wait", awaited_item="a barrier of threads", ended_by="come to it"
    ),
    ("concurrent/futures/_base.py", "result"): _FUTURE,
    (_TORCH_FUTURE, "wait"): replace(_FUTURE, call="Future.wait"),
}


def thread_wait(frames: Sequence[Frame]) -> ThreadWait:
    """Return the wait for a thread that these frames, innermost first, show. A_LOCK if nothing more specific."""
    return _first_wait(takewhile(lambda frame: is_library(frame.file), frames), _AWAITED)


def _first_wait(frames: Iterable[Frame], waits: Mapping[tuple[str, str], ThreadWait]) -> ThreadWait:
    for frame in frames:
        for (file, name), wait in waits.items():
            own = frame.function if "." in name else frame.function.rpartition(".")[2]
            if frame.file.endswith(file) and own == name:
                return wait
    return A_LOCK


_PROCESS_WAITS = {
    ("multiprocessing/queues.py", "get"): _AWAITED["/queue.py", "get"],
    ("multiprocessing/queues.py", "put"): _AWAITED["/queue.py", "put"],
    ("multiprocessing/queues.py", "join"): _AWAITED["/queue.py", "join"],
    ("multiprocessing/synchronize.py", "Event.wait"): _AWAITED["/threading.py", "Event.wait"],
    ("/threading.py", "Barrier.wait"): replace(
        _AWAITED["/threading.py", "Barrier.wait"], awaited_item="a process barrier"
    ),
}


def process_wait(frames: Sequence[Frame]) -> ThreadWait:
    """Return the wait for a process that frames in multiprocessing show, or else that of `thread_wait`."""
    library_frames = list(takewhile(lambda frame: is_library(frame.file), frames))
    if not any("/multiprocessing/" in frame.file for frame in library_frames):
        return thread_wait(frames)
    return _first_wait(library_frames, _PROCESS_WAITS)


class NativeWait(StrEnum):
    """A kind of wait that the frames below the program's innermost line show."""

    PYTHON_LOCK = "a lock"  # a lock, condition or semaphore of Python, which only Python code releases
    WORK = "Work.wait"  # the handle of an asynchronous collective
    FUTURE = "Future.wait"  # a future of torch, which an RPC or a collective may complete
    STORE = "a store wait"
    DEVICE = "a device synchronization"
    UNNAMED = "native code"  # of another library, or the native frames could not be read


UNREAD_NATIVE = ("?",)  # native frames that were needed and could not be read
_NATIVE_WAITS = (
    (NativeWait.WORK, re.compile(r"c10d::\S*Work\w*::(?:wait|synchronize)|c10d::wait_tensor")),
    (NativeWait.FUTURE, re.compile(r"(?:PythonFutureWrapper|ivalue::Future)::wait")),
    (NativeWait.STORE, re.compile(r"c10d::\w*Store::")),
    (NativeWait.DEVICE, re.compile(r"[sS]ynchronize")),
)
_C_LIBRARY = re.compile(r"\((?:libc|libpthread|ld-linux|linux-vdso)\b")
_PYTHON_MODULE = re.compile(r"\((?:libpython3|python3?|_multiprocessing\b)")
_DEVICE_FILES = ("torch/cuda/__init__.py", "torch/cuda/streams.py")


def native_wait(stack: Stack) -> NativeWait | None:
    """Return the kind of the thread's wait below the program's innermost line, or None if the frames do not show it.

    The innermost Python frame decides if it belongs to the standard library or to a file of torch that only waits.
    Otherwise the native frames decide, if they were read.
    """
    leaf = stack.frames[0] if stack.frames else None
    if leaf is not None and is_standard(leaf.file):
        return NativeWait.PYTHON_LOCK
    if leaf is not None and leaf.file.endswith(_TORCH_FUTURE):
        return NativeWait.FUTURE
    if leaf is not None and leaf.file.endswith(_DEVICE_FILES):
        return NativeWait.DEVICE
    for kind, pattern in _NATIVE_WAITS:
        if any(pattern.search(function) for function in stack.native):
            return kind
    caller = next((function for function in stack.native if not _C_LIBRARY.search(function)), None)
    if caller is not None and _PYTHON_MODULE.search(caller):
        return NativeWait.PYTHON_LOCK
    return NativeWait.UNNAMED if stack.native else None


# Functions in which a debugger reads its next command, or waits for a client to connect or to continue. Library frames
# inside such a function belong to the debugger. Code that the debugger runs for the program has a frame of its own.
_DEBUGGERS = (
    ("IPython/core/debugger.py", ("_cmdloop", "interaction"), "IPython"),
    ("IPython/terminal/interactiveshell.py", ("interact", "mainloop"), "IPython"),
    ("/pdb.py", ("_cmdloop", "interaction"), "pdb"),
    ("/code.py", ("interact",), "code.interact"),
    ("pydevd/pydevd.py", ("block_until_configuration_done", "do_wait_suspend", "_do_wait_suspend"), "debugpy"),
)


def debugger(frames: Sequence[Frame]) -> str:
    """Return the name of the debugger that is waiting for user input, or "" if there is none."""
    for frame in takewhile(lambda frame: is_library(frame.file), frames):
        for file, functions, name in _DEBUGGERS:
            if frame.file.endswith(file) and frame.function.rpartition(".")[2] in functions:
                return name
    return ""


_GROUP_CALLS = "torch/distributed/"
_WRAPPED = "torch/nn/parallel/distributed.py"  # DDP
_PUBLIC = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_NO_CALLS = ("torch/distributed/checkpoint/", "torch/distributed/elastic/", "torch/distributed/run.py")
# Libraries that call torch.distributed for the program, each by a part of its file names.
_MADE_BY = (("torch/distributed/fsdp/", "FSDP"), (_WRAPPED, "DDP"), ("torch/distributed/pipelining/", "pipeline"))
# Torch functions that are not collectives themselves, but wait below Python for the collective in the second column.
_WAITS_FOR = {
    "_engine_run_backward": "all_reduce",
    "_sync_module_states": "broadcast",
    "_sync_params_and_buffers": "broadcast",
    "_distributed_broadcast_coalesced": "broadcast",
    "_default_broadcast_coalesced": "broadcast",
    "_verify_param_shape_across_processes": "all_gather",
    "wait_for_unshard": "all_gather",
    "_wait_for_computation_stream": "all_gather",
    "post_backward": "reduce_scatter",
    "finalize_backward": "reduce_scatter",
    "_wait_batch_p2p": "batch_isend_irecv",
}


@dataclass(frozen=True, kw_only=True)
class GroupCall:
    """The torch.distributed call that a thread is in, according to its stack."""

    op: str  # the torch.distributed function, such as all_reduce
    by: str  # the library that makes the call: "DDP", "FSDP", "pipeline"; empty = the program calls it itself

    @property
    def text(self) -> str:
        """The name of the call, such as "all_reduce (DDP)"."""
        return f"{self.op} ({self.by})" if self.by else self.op


def group_call(frames: Sequence[Frame]) -> GroupCall | None:
    """Return the outermost torch.distributed call that a thread is in, or None if it is in none.

    DDP reduces gradients inside the autograd engine, without a Python frame. A thread that waits in the engine
    therefore counts as waiting in DDP's all_reduce. `frames` are innermost first.
    """
    leaf = frames[0] if frames else None
    if leaf is not None and leaf.function == "_engine_run_backward":
        return GroupCall(op=_WAITS_FOR[leaf.function], by="DDP")
    # A torch that was built from source is not in a directory of installed packages.
    inside = list(takewhile(lambda frame: _is_group_file(frame.file) or _is_foreign(frame.file), frames))
    if leaf is None or not _is_group_file(leaf.file) or any(file in leaf.file for file in _NO_CALLS):
        return None
    by = next((name for frame in inside for file, name in _MADE_BY if file in frame.file), "")
    group_frames = takewhile(lambda frame: _is_group_file(frame.file), inside)
    names = [(frame.file, frame.function.rpartition(".")[2]) for frame in group_frames]
    public = [name for file, name in names if file.endswith(_PUBLIC) and not name.startswith("_")]
    awaited_ops = [_WAITS_FOR[name] for _, name in names if name in _WAITS_FOR]
    return GroupCall(op=next(iter([*public[-1:], *awaited_ops]), names[0][1]), by=by)


def _is_foreign(file: str) -> bool:
    return is_library(file) or in_probe(file)


def _is_group_file(file: str) -> bool:
    return _GROUP_CALLS in file or file.endswith(_WRAPPED)


_RECOMPUTES = ("torch/utils/checkpoint.py", ("recompute_fn", "unpack_hook", "backward"))


def recomputed_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the program's outermost frame that checkpointing runs again in the backward pass, or None."""
    boundary = next((at for at, frame in enumerate(frames) if is_within((frame,), *_RECOMPUTES)), 0)
    own = [frame for frame in frames[:boundary] if not is_library(frame.file)]
    return own[-1] if own else None


_RPC_CALLS = "torch/distributed/rpc/api.py"
_RPC_SERVICE = ("torch/distributed/rpc/internal.py", ("_run_function",))


def rpc_call(frames: Sequence[Frame]) -> str:
    """Return the function of torch.distributed.rpc in which the thread waits for an answer, or "" if in none."""
    inside = takewhile(lambda frame: is_library(frame.file), frames)
    names = [frame.function.rpartition(".")[2] for frame in inside if frame.file.endswith(_RPC_CALLS)]
    return next((name for name in names if name in ("rpc_sync", "remote")), "")


def serves_rpc(frames: Sequence[Frame]) -> bool:
    """Return whether the thread runs a function that another rank called through torch.distributed.rpc."""
    return is_within(frames, *_RPC_SERVICE)


def _runs_backward(stack: Stack | None) -> bool:
    return stack is not None and in_function(stack.frames, "torch/autograd/graph.py") is not None


def is_machinery(file: str) -> bool:
    """Return whether the file belongs to Python, torch or nsa-harness, and is therefore never the user's location."""
    if package := package_of(file):
        return package in _MACHINERY
    return bool(_STDLIB.search(file) or _GUESTS.search(file))


_MAX_NATIVE = 16
_MAX_NATIVE_FRAMES = 200
_PYSTACK_THREAD = re.compile(r"^Traceback for thread (\d+)(?: \(.*?\))?((?: \[[^\]]*\])*) \(most recent call last\):")
_PYSTACK_FRAME = re.compile(r'^\s+\(Python\) File "(.*)", line (\d+), in (.*)$')


def stacks_that_need_native_frames(
    stacks: Sequence[Stack], process: Process, event_tids: Iterable[int], last: Frame | None, *, has_probe: bool
) -> tuple[Stack, ...]:
    """Return the stacks of the threads whose Python frames do not show what the thread does, and that have no native
    frames yet.

    This is the training thread if it holds the GIL without running. It is also the training thread if it runs or is in
    an unknown system call and is still in `last`, its line in an earlier snapshot. If the training thread is blocked
    (and still in `last`, if the rank has the probe), these are all threads that may be in a wait of native code and not
    in a wait for a lock of Python. A stopped process, or one in state D, cannot be sampled.

    `event_tids` are the ids of the threads that recorded progress events, one of which may be the training thread. A
    rank without the probe (`has_probe`) may also wait for a key of the store in a system call that reads.
    """
    stack = training_stack(stacks, process.pid, event_tids)
    tasks = {task.tid: task for task in process.tasks}
    task = tasks.get(stack.tid or process.pid) if stack else None
    if stack is None or task is None or not stack.frames or process.state in "DTtZX":
        return ()
    if not stack.source.startswith("py-spy"):  # py-spy cannot read this process, and so no native frames either
        return ()
    unknown = task.syscall in ("", "running") or task.syscall.isdigit()
    keeps_gil = stack.gil and task.state != "R" and task.syscall != "running"
    may_read_store = not has_probe and task.syscall in _STORE_READS and _calls_native_code(stack)
    if keeps_gil or may_read_store or (unknown and stack.frames[0] == last):
        return () if stack.native else (stack,)
    is_still = stack.frames[0] == last or not has_probe
    if not _is_in_lock(task) or not is_still:
        return ()
    blocked = (other for other in stacks if other.frames and _is_in_lock(tasks.get(other.tid or process.pid)))
    return tuple(other for other in blocked if not other.native and _calls_native_code(other))


_STORE_READS = ("poll", "ppoll", "recvfrom", "read")


def _is_in_lock(task: Task | None) -> bool:
    return task is not None and task.syscall == "futex" and task.timed is False


def _calls_native_code(stack: Stack) -> bool:
    """Return whether the innermost Python frame, of the program or a library, does not show a wait."""
    leaf = stack.frames[0]
    named = is_standard(leaf.file) or in_probe(leaf.file) or is_poller(stack) or group_call(stack.frames) is not None
    return not named and not leaf.file.endswith((_TORCH_FUTURE, *_DEVICE_FILES))


def parse_native(text: str) -> dict[int, tuple[str, ...]]:
    """Map each thread of `py-spy dump --json --native` to the C functions below its innermost Python frame."""
    try:
        return {int(thread["os_thread_id"]): _native(thread["frames"]) for thread in json.loads(text)}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not the form of py-spy dump --json --native: {error!r}") from error


def parse_pystack(text: str) -> tuple[Stack, ...]:
    """Return the stacks of `pystack remote`, innermost frames first. Raise ValueError if there are none."""
    threads: list[tuple[int, bool, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _PYSTACK_THREAD.match(line):
            threads.append((int(thread[1]), "[Has the GIL]" in thread[2], []))
        elif threads and (frame := _PYSTACK_FRAME.match(line)):
            threads[-1][2].append(Frame(file=frame[1], line=int(frame[2]), function=frame[3]))
    if not threads:
        raise ValueError("not the form of pystack remote: no thread in it")
    return tuple(
        Stack(
            thread="",
            tid=tid,
            active=gil,
            frames=tuple(reversed(frames))[:_MAX_NATIVE_FRAMES],
            source="pystack",
            gil=gil,
        )
        for tid, gil, frames in threads
    )


def _native(frames: list[dict[str, object]]) -> tuple[str, ...]:
    """Return the C functions called below the innermost Python frame, such as "sleep (libc.so.6)"."""
    native = takewhile(lambda frame: frame.get("module") is not None, frames)
    return _native_texts((str(frame["name"]), str(frame["module"])) for frame in native)


def _native_texts(frames: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return native frames, given as (function, module), as text. Equal neighbours are merged."""
    texts = (f"{_function(function)} ({module.rpartition('/')[2]})" for function, module in frames)
    return tuple(text[:200] for text, _ in islice(groupby(texts), _MAX_NATIVE))


def _function(name: str) -> str:
    """Return the name of a native function, or "?" for an address, which differs in each level of a recursion."""
    return "?" if name.startswith("0x") else name


def is_within(frames: Sequence[Frame], file: str, names: Sequence[str]) -> bool:
    """Return whether any frame is in `file` and in one of the functions `names`."""
    return any(frame.file.endswith(file) and frame.function.rpartition(".")[2] in names for frame in frames)
