"""Collectives that the program calls from Python: which one, from which line, on how many elements, and is it back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .. import protocol
from . import imports
from .board import BoardWriter
from .groups import Groups
from .hooks import compiling_test
from .places import innermost, place_text
from .replicas import note_broadcast
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


def install(torch: Any, board: BoardWriter, trouble: TroubleLog, waits: Waits, groups: Groups) -> None:
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
        self, torch: Any, c10d: Any, board: BoardWriter, trouble: TroubleLog, waits: Waits, groups: Groups
    ) -> None:
        self._torch = torch
        self._c10d = c10d
        self._board = board
        self._trouble = trouble
        self._waits = waits
        self._work_type = c10d.Work
        self._is_compiling = compiling_test(torch)
        self._places: dict[tuple[str, int, str], int] = {}
        self._groups = groups

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, entered and left on the board. A collective inside another one is part of that one."""
        said = CallArguments(self._torch, self._c10d, name, function)
        entered, returned = self._board.what("collective", name), self._board.what("returned", name)
        is_compiling, inside = self._is_compiling, self._waits.inside
        enter, leave, remember = self._enter, self._leave, self._remember

        @functools.wraps(function)
        def collective(*arguments: Any, **options: Any) -> Any:
            if is_compiling() or inside.number:
                return function(*arguments, **options)
            handle = Handle(name)
            inside.number = number = enter(handle, said, arguments, options, entered)
            try:
                result = function(*arguments, **options)
            finally:
                inside.number = 0
                leave(number, returned, name)
            if result is not None:
                remember(handle, said, arguments, options, result)
            return result

        return collective

    def wrap_wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The wait for what a functional collective returned: on the board once it has lasted."""
        is_compiling, waits, handle = self._is_compiling, self._waits, Handle("tensor")

        @functools.wraps(function)
        def wait_tensor(*arguments: Any, **options: Any) -> Any:
            if is_compiling() or waits.inside.number:
                return function(*arguments, **options)
            return waits.during(handle, None, lambda: function(*arguments, **options))

        return wait_tensor

    def _enter(self, handle: Handle, said: CallArguments, arguments: Any, options: Any, entered: int) -> int:
        """The call's number, -1 where there is none. Never raises: what cannot be told of a call is left empty."""
        place = 0
        try:
            place = self._place()
            handle.group = self._board.string(said.group_name(arguments, options))
            handle.elements, dtype = said.size(arguments, options)
            handle.dtype = self._board.string(dtype)
            handle.peer = said.peer(arguments, options)
            if handle.op == "broadcast":
                note_broadcast(said.payload(arguments, options))
        except Exception as error:
            self._trouble.note("collective details", error)
        try:
            op = self._board.string(handle.op)
            number = self._board.enter_call(op, handle.group, place, handle.elements, handle.dtype, peer=handle.peer)
            self._board.note(entered)
        except Exception as error:
            self._trouble.note("collectives", error)
            return -1
        return number

    def _leave(self, number: int, returned: int, name: str) -> None:
        """Never raises. Where groups are made, the new ones are told."""
        try:
            self._board.note(returned)
            self._board.leave_call(number)
        except Exception as error:
            self._trouble.note("collectives", error)
        if name in GROUP_MAKERS:
            self._look_around(name)

    def _remember(self, handle: Handle, said: CallArguments, arguments: Any, options: Any, result: Any) -> None:
        """Never raises. A handle that was handed out is known by its call from here on."""
        try:
            if isinstance(result, self._work_type):
                self._waits.remember(result, handle)
            elif handle.op == "batch_isend_irecv":
                self._remember_batch(handle, said, arguments, options, result)
        except Exception as error:
            self._trouble.note("collective handles", error)

    def _remember_batch(self, handle: Handle, said: CallArguments, arguments: Any, options: Any, works: Any) -> None:
        """One handle for each operation, or one for all of them."""
        parts = said.operations(arguments, options)
        for index, work in enumerate(works):
            op, peer = parts[index] if len(parts) == len(works) else (handle.op, handle.peer)
            self._waits.remember(work, Handle(op, handle.group, handle.elements, handle.dtype, peer))

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

    def _place(self) -> int:
        """The innermost frame that is neither torch's nor ours, as "file:line:function"."""
        frame = innermost(sys._getframe(1), self._waits.foreign)
        if frame is None:
            return 0
        key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        known = self._places.get(key)
        if known is None:
            known = self._board.string(place_text(*key))
            self._places[key] = known
        return known


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
ELEMENTS_MAX = 2**64 - 1
NOBODY = -1

Find = Callable[[Any, Any], Any]


class CallArguments:
    """What a call says of itself: group, payload, partner. Reads one function's calls, and changes nothing of them."""

    def __init__(self, torch: Any, c10d: Any, name: str, function: Callable[..., Any]) -> None:
        self._c10d = c10d
        self._tensor_type = torch.Tensor
        self._group = _argument(function, "group")
        self.payload = _argument(function, *PAYLOADS)
        self._world_size = _argument(function, "world_size")
        partner, partner_in_group = PARTNERS.get(name, ("", ""))
        self._partner = _argument(function, partner)
        self._partner_in_group = _argument(function, partner_in_group)

    def group_name(self, arguments: Any, options: Any) -> str:
        """A ProcessGroup, its name, a mesh of one axis, or (mesh, axis); "" for what is none of these."""
        group = self._group(arguments, options)
        if group is None:
            group = getattr(self._first_operation(arguments, options), "group", None) or self._c10d.GroupMember.WORLD
        if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
            group = group[0].get_group(group[1])
        elif hasattr(group, "get_group") and group.ndim == 1:
            group = group.get_group()
        return group if isinstance(group, str) else str(getattr(group, "group_name", ""))

    def size(self, arguments: Any, options: Any) -> tuple[int, str]:
        """Elements and type of what this rank gives; a size that is only a symbol while torch traces counts as 0.

        Whoever joins or makes a job gives nothing, and may say of how many ranks it is.
        """
        expected = self._world_size(arguments, options)
        if isinstance(expected, int):
            return max(expected, 0), ""
        payload = self.payload(arguments, options)
        items = payload if isinstance(payload, (list, tuple)) else (payload,)
        given: list[Any] = [getattr(item, "tensor", item) for item in items]
        tensors = [tensor for tensor in given if isinstance(tensor, self._tensor_type)]
        if not tensors:
            return 0, ""
        sizes = [tensor.numel() for tensor in tensors]
        elements = sum(size for size in sizes if isinstance(size, int))
        return min(elements, ELEMENTS_MAX), str(tensors[0].dtype).replace("torch.", "")

    def peer(self, arguments: Any, options: Any) -> int:
        """The global rank of the partner or root; of a batch the one that all its operations have, else nobody."""
        partner = self._partner(arguments, options)
        if partner is not None:
            return int(partner)
        in_group = self._partner_in_group(arguments, options)
        if in_group is not None:
            group = self._group(arguments, options) or self._c10d.GroupMember.WORLD
            return int(self._c10d.get_global_rank(group, in_group))
        peers = {peer for _, peer in self.operations(arguments, options)}
        return peers.pop() if len(peers) == 1 else NOBODY

    def operations(self, arguments: Any, options: Any) -> list[tuple[str, int]]:
        """Of a batch of point-to-point operations: isend or irecv, and with whom."""
        return [(str(each.op.__name__), int(each.peer)) for each in self._operations(arguments, options)]

    def _operations(self, arguments: Any, options: Any) -> list[Any]:
        payload = self.payload(arguments, options)
        return [item for item in payload if hasattr(item, "peer")] if isinstance(payload, (list, tuple)) else []

    def _first_operation(self, arguments: Any, options: Any) -> Any:
        return next(iter(self._operations(arguments, options)), None)


def _argument(function: Callable[..., Any], *wanted: str) -> Find:
    """How to find the first of the wanted parameters in a call, whether it is passed by position or by name."""
    parameters = list(inspect.signature(function).parameters)
    name: str | None = next((each for each in wanted if each in parameters), None)
    position = parameters.index(name) if name else 0

    def find(arguments: Any, options: Any) -> Any:
        if name is None:
            return None
        return options.get(name, arguments[position] if len(arguments) > position else None)

    return find
