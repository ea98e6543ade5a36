"""Collectives that the program calls from Python: which one, from which line, on how many elements, and is it back."""

from __future__ import annotations

import _thread
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .board import Board
from .hooks import compiling_test
from .places import foreign_code, place_text
from .trouble import Trouble

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
# What a rank gives away, under the names the operations have for it.
PAYLOADS = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "tensors", "p2p_op_list")


def install(torch: Any, board: Board, trouble: Trouble) -> None:
    """Wrap the functions in both namespaces that programs take them from. Async ones are `left` once handed over."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    recorder = _Recorder(torch, c10d, board, trouble)
    for name in OPERATIONS:
        function = getattr(c10d, name, None)
        if inspect.isfunction(function):
            wrapped = recorder.wrap(name, function)
            for namespace in (c10d, torch.distributed):
                if getattr(namespace, name, None) is function:
                    setattr(namespace, name, wrapped)


class _Recorder:
    def __init__(self, torch: Any, c10d: Any, board: Board, trouble: Trouble) -> None:
        self._c10d = c10d
        self._board = board
        self._trouble = trouble
        self._tensor_type = torch.Tensor
        self._is_compiling = compiling_test(torch)
        self._inside = _thread._local()
        self._foreign = foreign_code(torch)
        self._places: dict[tuple[str, int, str], int] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, entered and left on the board. A collective inside another one is part of that one."""
        group_of, payload_of = _argument(function, ("group",)), _argument(function, PAYLOADS)
        entered, returned = self._board.what("collective", name), self._board.what("returned", name)
        is_compiling, inside, board = self._is_compiling, self._inside, self._board
        op = board.string(name)

        @functools.wraps(function)
        def collective(*arguments: Any, **options: Any) -> Any:
            if is_compiling() or getattr(inside, "one", False):
                return function(*arguments, **options)
            inside.one = True
            number = self._enter(op, group_of(arguments, options), payload_of(arguments, options), entered)
            try:
                result = function(*arguments, **options)
                if name == "init_process_group":
                    self._identify()
                return result
            finally:
                inside.one = False
                board.note(returned)
                board.leave_call(number)

        return collective

    def _enter(self, op: int, group: Any, payload: Any, entered: int) -> int:
        """Never raises: what cannot be told of a call is left empty."""
        group_name = place = dtype = elements = 0
        try:
            group_name = self._board.string(self._group_name(group))
            place = self._place()
            elements, dtype_name = self._size(payload)
            dtype = self._board.string(dtype_name)
        except Exception as error:
            self._trouble.note("collective details", error)
        number = self._board.enter_call(op, group_name, place, elements, dtype)
        self._board.note(entered)
        return number

    def _group_name(self, group: Any) -> str:
        group = self._c10d.GroupMember.WORLD if group is None else group
        return str(getattr(group, "group_name", ""))

    def _size(self, payload: Any) -> tuple[int, str]:
        items = payload if isinstance(payload, (list, tuple)) else (payload,)
        given: list[Any] = [getattr(item, "tensor", item) for item in items]
        tensors = [tensor for tensor in given if isinstance(tensor, self._tensor_type)]
        if not tensors:
            return 0, ""
        elements = min(sum(int(tensor.numel()) for tensor in tensors), 2**64 - 1)
        return elements, str(tensors[0].dtype).replace("torch.", "")

    def _place(self) -> int:
        """The innermost frame that is neither torch's nor ours, as "file:line:function"."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(self._foreign):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return 0
        key = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        known = self._places.get(key)
        if known is None:
            known = self._board.string(place_text(*key))
            self._places[key] = known
        return known

    def _identify(self) -> None:
        def identify() -> None:
            self._board.identify(self._c10d.get_rank(), self._c10d.get_world_size())
            self._board.note(self._board.what("init", str(self._c10d.get_backend())))

        self._trouble.attempt("rank", identify)


def _argument(function: Callable[..., Any], wanted: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """How to find the first of the wanted parameters in a call, whether it is passed by position or by name."""
    parameters = list(inspect.signature(function).parameters)
    name: str | None = next((each for each in wanted if each in parameters), None)
    position = parameters.index(name) if name else 0

    def find(arguments: Any, options: Any) -> Any:
        if name is None:
            return None
        return options.get(name, arguments[position] if len(arguments) > position else None)

    return find
