"""Collectives that the program calls from Python: which one, from which line, on how many elements, and is it back."""

from __future__ import annotations

import functools
import inspect
import sys
import zlib
from collections.abc import Callable
from typing import Any

from .. import protocol
from . import imports
from .chains import Chains
from .groups import Groups
from .hooks import compiling_test
from .replicas import note_broadcast, note_reduced
from .status_file import StatusFileWriter
from .trouble import TroubleLog
from .waits import Handle, Waits

OPERATIONS = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "init_process_group",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink_group",
    "split_group",
)
GROUP_MAKERS = frozenset(
    {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "shrink_group", "split_group"}
)
GROUP_ENDERS = GROUP_MAKERS | {"destroy_process_group"}  # after these, None or an identity may mean another group
BATCH = "batch_isend_irecv"
# Two ranks that send each other something do not do the same.
TRANSFERS = frozenset({BATCH, "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"})
# torch.distributed._functional_collectives: what DTensor and compiled code call, most of it asynchronous.
FUNCTIONAL = (
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
)
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"


def install(torch: Any, board: StatusFileWriter, trouble: TroubleLog, waits: Waits, groups: Groups) -> None:
    """Wrap the functions in both namespaces that programs take them from. Async ones are `left` once handed over."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    recorder = _Recorder(torch, c10d, board, trouble, waits, groups)
    for name in OPERATIONS:
        function = getattr(c10d, name, None)
        if inspect.isfunction(function):
            wrapped = recorder.wrap(name, function)
            for namespace in (c10d, torch.distributed):
                if getattr(namespace, name, None) is function:
                    setattr(namespace, name, wrapped)

    def loaded() -> None:
        trouble.attempt("functional collectives", lambda: _wrap_functional(recorder))

    imports.after((FUNCTIONAL_MODULE,), loaded, trouble)


def _wrap_functional(recorder: _Recorder) -> None:
    module = sys.modules[FUNCTIONAL_MODULE]
    for name in FUNCTIONAL:
        function = getattr(module, name, None)
        if inspect.isfunction(function):
            setattr(module, name, recorder.wrap(name, function))
    module.wait_tensor = recorder.wrap_wait(module.wait_tensor)  # type: ignore[attr-defined]


class _Recorder:
    def __init__(
        self, torch: Any, c10d: Any, board: StatusFileWriter, trouble: TroubleLog, waits: Waits, groups: Groups
    ) -> None:
        self._torch = torch
        self._c10d = c10d
        self._board = board
        self._trouble = trouble
        self._waits = waits
        self._tensor_type = torch.Tensor
        self._work_type = c10d.Work
        self._no_work_type = getattr(c10d, "_IllegalWork", ())  # what a coalescing manager is to be asked for instead
        self._is_compiling = compiling_test(torch)
        self._groups = groups
        self._chains = Chains(board, waits.foreign)
        self._group_strings: dict[int, int] = {}  # by identity, until a group is made or taken down
        self._grad_enabled: Callable[[], bool] = torch.is_grad_enabled

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, entered and left on the board. A collective inside another one is part of that one."""
        said = CallArguments(self._torch, self._c10d, self._board, name, function)
        # Looked up once: this is all that happens at a call besides the call.
        returned, changes_groups = self._board.what("returned", name), name in GROUP_ENDERS
        is_compiling, inside, first = self._is_compiling, self._waits.inside, self._first
        getframe = sys._getframe
        enter, remember, regroup = self._enter, self._remember, self._regroup
        leave_call, note = self._board.leave_call, self._trouble.note

        @functools.wraps(function)
        def collective(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return function(*arguments, **options)
            call = inside.call
            if call[0]:
                return function(*arguments, **options)
            call[0] = number = enter(said, arguments, options, call[1] or first(call), getframe(1))
            try:
                result = function(*arguments, **options)
            finally:
                call[0] = 0
                try:
                    leave_call(number, call[1], returned)
                except Exception as error:
                    note("collectives", error)
                if changes_groups:
                    regroup(name)
            if result is not None:
                remember(number, said, arguments, options, result, getframe(1))
            return result

        return collective

    def wrap_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The wait for what a functional collective returned: on the board once it has lasted."""
        is_compiling, waits, handle = self._is_compiling, self._waits, Handle("tensor")

        @functools.wraps(function)
        def wait_tensor(*arguments: Any, **options: Any) -> Any:
            if is_compiling() or waits.inside.call[0]:
                return function(*arguments, **options)
            return waits.during(handle, None, lambda: function(*arguments, **options))

        return wait_tensor

    def _first(self, call: list[Any]) -> list[int] | None:
        """The first call of a thread: its slot. Never raises."""
        try:
            call[1] = slot = self._board.events()
        except Exception as error:
            self._trouble.note("collectives", error)
            return None
        return slot

    def _enter(self, said: CallArguments, arguments: Any, options: Any, slot: list[int] | None, frame: Any) -> int:
        """The call's number, -1 where there is none. Never raises: what cannot be told of a call is left empty."""
        group = place = node = call_hash = elements = dtype = 0
        peer = NOBODY
        try:
            chain = self._chains.of(frame)
            place, node = chain.place, chain.node
            group = self._group_strings.get(id(said.group(arguments, options))) or self._learn_group(
                said, arguments, options
            )
            at = said.payload_at
            payload: Any = arguments[at] if len(arguments) > at >= 0 else None
            if type(payload) is self._tensor_type and (string := said.dtypes.get(payload.dtype)) is not None:
                elements, dtype = payload.numel(), string
            else:
                elements, dtype = said.size(arguments, options)
            if said.named:
                peer = said.peer(arguments, options)
                if said.op == BATCH:
                    group = self._board.string(said.group_name(arguments, options))
                elif said.op == "broadcast":
                    note_broadcast(said.payload(arguments, options))
            if said.sums:
                self._note_sum(said, arguments, options)
            call_hash = (said.hash ^ chain.hash) + (elements if said.even else 0)
        except Exception as error:
            self._trouble.note("collective details", error)
        try:
            flags = GRADIENTS if self._grad_enabled() else NO_GRADIENTS
            board = self._board
            number = board.enter_call(
                said.string, group, place, elements, dtype, 0, peer, 0, node, flags, slot, said.entered
            )
            if said.hash:
                board.count_call(group, call_hash)
        except Exception as error:
            self._trouble.note("collectives", error)
            return -1
        return number

    def _note_sum(self, said: CallArguments, arguments: Any, options: Any) -> None:
        """Until the first step is done: what the whole job sums, which may be the gradients of replicas."""
        said.sums = 0 if self._board.step > 1 or self._board.step_done else said.sums - 1
        if (group := said.group(arguments, options)) is None or group is self._c10d.GroupMember.WORLD:
            note_reduced(said.payload(arguments, options))

    def _regroup(self, op: str) -> None:
        """Where groups are made, the new ones are told."""
        self._group_strings.clear()
        if op in GROUP_MAKERS:
            self._look_around(op)

    def _learn_group(self, said: CallArguments, arguments: Any, options: Any) -> int:
        """Its name's string. Until one is made or taken down, torch's own tables hold on to every group."""
        group, number = said.group(arguments, options), self._board.string(said.group_name(arguments, options))
        if group is None or group in self._c10d._world.pg_names:
            self._group_strings[id(group)] = number
        return number

    def _remember(
        self, number: int, said: CallArguments, arguments: Any, options: Any, result: Any, frame: Any
    ) -> None:
        """Never raises. A handle that was handed out is known by its call from here on."""
        try:
            if isinstance(result, self._work_type):
                if isinstance(result, self._no_work_type):
                    return
                handle = Handle(said.op, *self._board.described(number))
                handle.line = self._waits.unwaited.handed_out(
                    said.op, handle.peer, frame, said.tensors(arguments, options)
                )
                self._waits.remember(result, handle)
            elif said.op == BATCH:
                handle = Handle(said.op, *self._board.described(number))
                self._remember_batch(handle, said, arguments, options, result, frame)
        except Exception as error:
            self._trouble.note("collective handles", error)

    def _remember_batch(
        self, handle: Handle, said: CallArguments, arguments: Any, options: Any, works: Any, frame: Any
    ) -> None:
        """One handle for each operation, or one for all of them."""
        parts = said.operations(arguments, options)
        tensors = said.tensors(arguments, options)
        for index, work in enumerate(works):
            op, peer = parts[index] if len(parts) == len(works) else (handle.op, handle.peer)
            line = self._waits.unwaited.handed_out(op, peer, frame, tensors)
            self._waits.remember(work, Handle(op, handle.group, handle.elements, handle.dtype, peer, line))

    def _look_around(self, op: str) -> None:
        if op == "init_process_group":
            self._trouble.attempt("rank", self._identify)
        self._trouble.attempt("groups", self._groups.tell)

    def _identify(self) -> None:
        if self._c10d.is_initialized():
            self._board.identify(self._c10d.get_rank(), self._c10d.get_world_size())
            backend = str(self._c10d.get_backend())
            self._board.note(self._board.what("init", backend))
            self._board.fact(protocol.FACT_BACKEND, backend)


# What a rank gives away, under the names the operations have for it.
PAYLOADS = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "tensors", "p2p_op_list", "self")
# The partner of a transfer, and the root of a collective that has one.
PARTNERS = {
    "broadcast": ("src", "group_src"),
    "broadcast_object_list": ("src", "group_src"),
    "scatter": ("src", "group_src"),
    "scatter_object_list": ("src", "group_src"),
    "reduce": ("dst", "group_dst"),
    "gather": ("dst", "group_dst"),
    "gather_object": ("dst", "group_dst"),
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
    "send_object_list": ("dst", "group_dst"),
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
    "recv_object_list": ("src", "group_src"),
}
GRADIENTS, NO_GRADIENTS = protocol.CALL_GRADIENTS, protocol.CALL_NO_GRADIENTS
SUMS_LIMIT = 4096  # before the first step: more are no gradients of one step, or the program steps unseen
ELEMENTS_MAX = 2**64 - 1
NOBODY = -1

Find = Callable[[Any, Any], Any]


class CallArguments:
    """What a call says of itself: group, payload, partner. Reads one function's calls, and changes nothing of them."""

    def __init__(self, torch: Any, c10d: Any, board: StatusFileWriter, name: str, function: Callable[..., Any]) -> None:
        self.op = name
        self.string = board.string(name)
        self.entered = board.what("collective", name)
        self._board = board
        self.even = name in protocol.EVEN
        self.hash = 0 if name in TRANSFERS else zlib.crc32(name.encode()) << 32  # 0: not to be compared between ranks
        self._c10d = c10d
        self._tensor_type = torch.Tensor
        self.dtypes: dict[Any, int] = {}
        self.group = _argument(function, "group") or _nothing
        self.payload = _argument(function, *PAYLOADS) or _nothing
        self.sums = SUMS_LIMIT if name == "all_reduce" else 0  # that are yet to be noted
        self._world_size = _argument(function, "world_size")
        self.payload_at = -1 if self._world_size else _position(function, *PAYLOADS)
        partner, partner_in_group = PARTNERS.get(name, ("", ""))
        self._partner = _argument(function, partner)
        self._partner_in_group = _argument(function, partner_in_group)
        self.named = name == BATCH or bool(self._partner or self._partner_in_group)

    def group_name(self, arguments: Any, options: Any) -> str:
        """A ProcessGroup, its name, a mesh of one axis, or (mesh, axis); "" for what is none of these."""
        group = self.group(arguments, options)
        if group is None and self.op == BATCH:
            group = next((item.group for item in self._operations(arguments, options)), None)
        if group is None:
            group = self._c10d.GroupMember.WORLD
        name = getattr(group, "group_name", None)
        if isinstance(name, str):
            return name
        if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group") and group.ndim == 1:
            group = group.get_group()
        return group if isinstance(group, str) else str(getattr(group, "group_name", ""))

    def size(self, arguments: Any, options: Any) -> tuple[int, int]:
        """Elements of what this rank gives, and the string of their type; a size that is only a symbol counts as 0.

        Whoever joins or makes a job gives nothing, and may say of how many ranks it is.
        """
        if self._world_size is not None:
            expected = self._world_size(arguments, options)
            if isinstance(expected, int):
                return max(expected, 0), 0
        return self._sum(self.tensors(arguments, options))

    def tensors(self, arguments: Any, options: Any) -> list[Any]:
        """What this rank gives, or for a transfer what it gives or takes."""
        payload: Any = self.payload(arguments, options)
        items = payload if isinstance(payload, (list, tuple)) else (payload,)
        given: list[Any] = [getattr(item, "tensor", item) for item in items]
        return [tensor for tensor in given if isinstance(tensor, self._tensor_type)]

    def _sum(self, tensors: list[Any]) -> tuple[int, int]:
        elements = 0
        for tensor in tensors:
            size = tensor.numel()
            if isinstance(size, int):  # while torch traces it may be a symbol
                elements += size
        dtype = tensors[0].dtype if tensors else None
        string = self.dtypes.get(dtype)
        if string is None:
            string = self.dtypes[dtype] = self._board.string(str(dtype).replace("torch.", "") if tensors else "")
        return min(elements, ELEMENTS_MAX), string

    def peer(self, arguments: Any, options: Any) -> int:
        """The global rank of the partner or root; of a batch the one that all its operations have, else nobody."""
        partner = self._partner(arguments, options) if self._partner else None
        if partner is not None:
            return int(partner)
        in_group = self._partner_in_group(arguments, options) if self._partner_in_group else None
        if in_group is not None:
            group = self.group(arguments, options) or self._c10d.GroupMember.WORLD
            return int(self._c10d.get_global_rank(group, in_group))
        peers = {peer for _, peer in self.operations(arguments, options)}
        return peers.pop() if len(peers) == 1 else NOBODY

    def operations(self, arguments: Any, options: Any) -> list[tuple[str, int]]:
        """Of a batch of point-to-point operations: isend or irecv, and with whom."""
        return [(str(each.op.__name__), int(each.peer)) for each in self._operations(arguments, options)]

    def _operations(self, arguments: Any, options: Any) -> list[Any]:
        payload = self.payload(arguments, options)
        return [item for item in payload if hasattr(item, "peer")] if isinstance(payload, (list, tuple)) else []


def _nothing(_arguments: Any, _options: Any) -> None:
    """What a function without such a parameter is given."""


def _argument(function: Callable[..., Any], *wanted: str) -> Find | None:
    """How to find the first of the wanted parameters in a call, by position or by name; None: there is none."""
    position = _position(function, *wanted)
    if position < 0:
        return None
    name = list(inspect.signature(function).parameters)[position]

    def find(arguments: Any, options: Any) -> Any:
        return arguments[position] if len(arguments) > position else options.get(name)

    return find


def _position(function: Callable[..., Any], *wanted: str) -> int:
    """Of the first of the wanted parameters that there is; -1 where there is none."""
    parameters = list(inspect.signature(function).parameters)
    return next((parameters.index(name) for name in wanted if name in parameters), -1)
