"""Records each collective that the program calls from Python."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

from .. import protocol
from .chains import Chains
from .gradients import CUTTING, note_cut
from .groups import Groups
from .patches import TroubleLog, after_import, compiling_test, patch
from .places import frame_place, innermost
from .replicas import note_broadcast, note_collective, note_reduced
from .status_file import StatusFileWriter
from .waits import Handle, OngoingWait, Waits

OPERATIONS = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "gather",
    "gather_object", "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list", "shrink_group",
    "split_group",
)  # fmt: skip
GROUP_MAKERS = frozenset(
    {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "shrink_group", "split_group"}
)
# After one of these, `group=None` or the address of a group object may mean another group than before.
GROUP_ENDERS = GROUP_MAKERS | {"destroy_process_group"}
BATCH = "batch_isend_irecv"
# Point-to-point transfers are not compared between ranks: the sender and the receiver call different operations.
TRANSFERS = frozenset({BATCH, "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"})
# Functions of torch.distributed._functional_collectives, which DTensor and compiled code call. Most are asynchronous.
FUNCTIONAL = (
    "all_gather_into_tensor_coalesced", "all_gather_single", "all_gather_single_autograd",
    "all_gather_single_coalesced", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_reduce_coalesced", "all_to_all_single", "all_to_all_single_autograd", "broadcast", "permute_tensor",
    "reduce_scatter_single", "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"


def install(torch: Any, status_file: StatusFileWriter, trouble: TroubleLog, waits: Waits, groups: Groups) -> None:
    """Record all calls to collectives. An asynchronous one counts as returned once the program has its handle."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    recorder = CallRecorder(torch, c10d, status_file, trouble, waits, groups)
    for name in OPERATIONS:
        if inspect.isfunction(getattr(c10d, name, None)):
            recorder.patch(c10d, name, also=(torch.distributed,))

    def patch_functional() -> None:
        trouble.attempt("functional collectives", lambda: _patch_functional(recorder))

    after_import((FUNCTIONAL_MODULE,), patch_functional, trouble)


def _patch_functional(recorder: CallRecorder) -> None:
    module = sys.modules[FUNCTIONAL_MODULE]
    for name in FUNCTIONAL:
        if inspect.isfunction(getattr(module, name, None)):
            recorder.patch(module, name)
    recorder.patch_wait(module, "wait_tensor")


class CallRecorder:
    """A recorder that patches collectives. A collective called inside another collective is not recorded."""

    def __init__(
        self, torch: Any, c10d: Any, status_file: StatusFileWriter, trouble: TroubleLog, waits: Waits, groups: Groups
    ) -> None:
        self.torch, self.c10d = torch, c10d
        self.status_file = status_file
        self.trouble = trouble
        self.waits = waits
        self.chains = Chains(status_file, waits.foreign)
        # id(group) -> string-table index of its name; cleared when groups change
        self.group_strings: dict[int, int] = {}
        self._groups = groups
        self._is_compiling = compiling_test(torch)

    def patch(self, owner: Any, name: str, also: tuple[Any, ...] = ()) -> None:
        """Record each call to `owner.name`, and to the same function in the modules `also`, in the status file."""
        operation = Operation(self, name, getattr(owner, name))
        patch(
            owner,
            name,
            "collectives",
            self.trouble,
            before=operation.enter,
            after=operation.leave,
            unless=self._is_compiling,
            also=also,
        )

    def patch_wait(self, owner: Any, name: str) -> None:
        """Patch `owner.name`, a function that waits for a functional collective, to record its long waits."""
        waits, handle = self.waits, Handle("tensor")

        def begin(_arguments: Any, _options: Any) -> OngoingWait | None:
            return None if waits.current_call.state[0] else waits.begin(handle, None)

        patch(owner, name, "collectives", self.trouble, before=begin, after=waits.end, unless=self._is_compiling)

    def update_groups(self, op: str) -> None:
        """Record new process groups after `op`, an operation that creates or destroys process groups."""
        self.group_strings.clear()
        if op == "init_process_group":
            self.trouble.attempt("rank", self._write_identity)
        if op in GROUP_MAKERS:
            self.trouble.attempt("groups", self._groups.write)

    def _write_identity(self) -> None:
        if self.c10d.is_initialized():
            self.status_file.write_identity(self.c10d.get_rank(), self.c10d.get_world_size())
            backend = str(self.c10d.get_backend())
            self.status_file.write_event(self.status_file.event_code("init", backend))
            self.status_file.write_fact(protocol.FACT_BACKEND, backend)


# The names that the various operations give to the parameter with the rank's own tensors.
PAYLOADS = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "tensors", "p2p_op_list", "self")
# The parameters for the peer of a transfer or the root of a collective: as a global rank, and as a rank in the
# group.
_FROM, _TO = ("src", "group_src"), ("dst", "group_dst")
PARTNERS = {
    **dict.fromkeys(("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"), _FROM),
    **dict.fromkeys(("reduce", "gather", "gather_object", "send", "isend", "send_object_list"), _TO),
    **dict.fromkeys(("recv", "irecv", "recv_object_list"), _FROM),
}
GRADIENTS, NO_GRADIENTS = protocol.CALL_GRADIENTS, protocol.CALL_NO_GRADIENTS
# all_reduce calls that are inspected. Only those of the first step of a model matter, but other models may be trained
# before it.
REDUCTIONS_LIMIT = 4096
CUT_CALLS_LIMIT = 64  # calls of each operation that are inspected for gradients
BATCHES_LIMIT = 256  # different batches whose transfers are recorded, because the string table is small
ELEMENTS_MAX = 2**64 - 1
NO_PEER = -1

_getframe = sys._getframe
Find = Callable[[Any, Any], Any]


class CallArguments:
    """A reader of a collective call's arguments, which finds the group, the tensors and the peer rank."""

    def __init__(
        self, torch: Any, c10d: Any, status_file: StatusFileWriter, name: str, function: Callable[..., Any]
    ) -> None:
        self.op = name
        self._string = status_file.string_number(name)
        self._status_file = status_file
        self._has_equal_sizes = name in protocol.EQUAL_SIZES
        self._hash = 0 if name in TRANSFERS else zlib.crc32(name.encode()) << 32  # 0 = not compared between ranks
        self._c10d = c10d
        self._tensor_type = torch.Tensor
        self._dtypes: dict[Any, int] = {}
        self.group = _argument_getter(function, "group") or _no_argument
        self._group_at = _position(function, "group")
        self.payload = _argument_getter(function, *PAYLOADS) or _no_argument
        self._reductions_left = REDUCTIONS_LIMIT if name == "all_reduce" else 0  # how many more calls are inspected
        self._world_size = _argument_getter(function, "world_size")
        self._payload_at = -1 if self._world_size else _position(function, *PAYLOADS)
        partner, partner_in_group = PARTNERS.get(name, ("", ""))
        self._partner = _argument_getter(function, partner)
        self._partner_in_group = _argument_getter(function, partner_in_group)
        self._records_transfers = name == BATCH and protocol.ENV_TRANSFERS in os.environ
        self._batches: dict[str, int] = {}
        self._has_peer = name == BATCH or bool(self._partner or self._partner_in_group)

    def group_name(self, arguments: Any, options: Any) -> str:
        """Return the name of the process group used by a call, or "" if unknown."""
        group = self.group(arguments, options)
        if group is None and self.op == BATCH:
            group = next((item.group for item in self._transfers(arguments, options)), None)
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
        """Return the number of elements that this rank contributes to a call, and their dtype.

        The dtype is an index in the string table. A symbolic size counts as 0. For an operation with a `world_size`
        argument, return (world size, 0).
        """
        if self._world_size is not None:
            world_size = self._world_size(arguments, options)
            if isinstance(world_size, int):
                return max(world_size, 0), 0
        return self._sum(self.tensors(arguments, options))

    def tensors(self, arguments: Any, options: Any) -> list[Any]:
        """Return the tensors that this rank contributes to a call, or that it sends or receives in a transfer."""
        payload: Any = self.payload(arguments, options)
        items = payload if isinstance(payload, (list, tuple)) else (payload,)
        values: list[Any] = [getattr(item, "tensor", item) for item in items]
        return [tensor for tensor in values if isinstance(tensor, self._tensor_type)]

    def _sum(self, tensors: list[Any]) -> tuple[int, int]:
        elements = 0
        for tensor in tensors:
            size = tensor.numel()
            if isinstance(size, int):  # a symbol while torch traces
                elements += size
        dtype = tensors[0].dtype if tensors else None
        string = self._dtypes.get(dtype)
        if string is None:
            string = self._dtypes[dtype] = self._status_file.string_number(
                str(dtype).replace("torch.", "") if tensors else ""
            )
        return min(elements, ELEMENTS_MAX), string

    def peer(self, arguments: Any, options: Any) -> int:
        """Return the global rank of the peer or root of a call, or NO_PEER if it has none or a batch has several."""
        partner = self._partner(arguments, options) if self._partner else None
        if partner is not None:
            return int(partner)
        in_group = self._partner_in_group(arguments, options) if self._partner_in_group else None
        if in_group is not None:
            group = self.group(arguments, options) or self._c10d.GroupMember.WORLD
            return int(self._c10d.get_global_rank(group, in_group))
        peers = {peer for _, peer in self.transfers(arguments, options)}
        return peers.pop() if len(peers) == 1 else NO_PEER

    def transfers(self, arguments: Any, options: Any) -> list[tuple[str, int]]:
        """Return the operation and the global rank of the peer for each transfer in a batch of point-to-point calls."""
        return [(str(transfer.op.__name__), int(transfer.peer)) for transfer in self._transfers(arguments, options)]

    def transfers_string(self, arguments: Any, options: Any) -> int:
        """Return the index of a batch's transfers in the string table, or 0 (the empty string) beyond the limits."""
        made = self._transfers(arguments, options)
        text = ";".join(f"{one.op.__name__} {one.peer} {one.tensor.numel()} {one.tensor.dtype}" for one in made)
        if text not in self._batches and len(text) <= protocol.STRING_LIMIT and len(self._batches) < BATCHES_LIMIT:
            self._batches[text] = self._status_file.string_number(text.replace("torch.", ""))
        return self._batches.get(text, 0)

    def _transfers(self, arguments: Any, options: Any) -> list[Any]:
        payload = self.payload(arguments, options)
        return [item for item in payload if hasattr(item, "peer")] if isinstance(payload, (list, tuple)) else []


class Operation(CallArguments):
    """A patched collective. `enter` and `leave` run at every call, so they must be fast."""

    def __init__(self, recorder: CallRecorder, name: str, function: Callable[..., Any]) -> None:
        super().__init__(recorder.torch, recorder.c10d, recorder.status_file, name, function)
        self._recorder = recorder
        self._trouble, self._waits, self._chains = recorder.trouble, recorder.waits, recorder.chains
        self._current_call, self._group_strings = recorder.waits.current_call, recorder.group_strings
        self._own_call, self._step_times = self._current_call.state, recorder.waits.step_times
        self._grad_enabled: Callable[[], bool] = recorder.torch.is_grad_enabled
        self._work_type = recorder.c10d.Work
        # The result of a call inside a coalescing manager, which has the real handle.
        self._no_work_type = getattr(recorder.c10d, "_IllegalWork", ())
        self._entered, self._returned = (
            self._status_file.event_code("collective", name),
            self._status_file.event_code("returned", name),
        )
        self._changes_groups = name in GROUP_ENDERS
        self._cuts_left = CUT_CALLS_LIMIT if name in CUTTING else 0  # how many more calls are inspected

    def enter(self, arguments: Any, options: Any) -> list[Any] | None:
        """Record the start of a call, and return the state for `leave`, or None inside another collective."""
        call = self._current_call.state
        if call[0]:
            return None
        group = place = node = call_hash = elements = dtype = transfers = 0
        peer = NO_PEER
        try:
            chain = self._chains.find(_getframe(2))
            place, node = chain.place, chain.node
            at = self._group_at
            key = id(arguments[at] if len(arguments) > at >= 0 else options.get("group"))
            group = self._group_strings.get(key) or self._group_name_string(arguments, options)
            at = self._payload_at
            payload: Any = arguments[at] if len(arguments) > at >= 0 else None
            if type(payload) is self._tensor_type and (string := self._dtypes.get(payload.dtype)) is not None:
                elements, dtype = payload.numel(), string
            else:
                elements, dtype = self.size(arguments, options)
            if self._has_peer:
                peer = self.peer(arguments, options)
                if self.op == BATCH:
                    group = self._status_file.string_number(self.group_name(arguments, options))
                    if self._records_transfers:
                        transfers = self.transfers_string(arguments, options)
                elif self.op == "broadcast":
                    note_broadcast(self.payload(arguments, options))
            if self._reductions_left:
                self._note_reduction(arguments, options)
            if self._cuts_left and self._grad_enabled():
                self._note_cut(arguments, options, _getframe(2))
            call_hash = (self._hash ^ chain.hash) + (elements if self._has_equal_sizes else 0)
        except Exception as error:
            self._trouble.note("collective details", error)
        try:
            call[0] = -1
            slot = call[1] or self._first_call(call)
            flags = GRADIENTS if self._grad_enabled() else NO_GRADIENTS
            status_file = self._status_file
            number = status_file.enter_call(
                self._string, group, place, elements, dtype, transfers, peer, 0, node, flags, slot, self._entered
            )
            if self._hash:
                status_file.add_to_total(group, call_hash)
                note_collective(elements)
            call[0] = number
        except Exception as error:
            self._trouble.note("collectives", error)
        return call

    def leave(self, call: list[Any] | None, arguments: Any, options: Any, result: Any, _error: object) -> None:
        """Record that a call has returned or raised an exception. `call` is the result of `enter`."""
        if call is None:
            return
        number, call[0] = call[0], 0
        waited_ns = self._status_file.leave_call(number, call[1], self._returned)
        if call is self._own_call and self._step_times is not None:
            self._step_times.waited_ns += waited_ns
        if self._changes_groups:
            self._recorder.update_groups(self.op)
        if result is not None:
            self._remember(number, arguments, options, result, _getframe(2))

    def _first_call(self, call: list[Any]) -> list[int]:
        call[1] = slot = self._status_file.event_slot()
        return slot

    def _note_reduction(self, arguments: Any, options: Any) -> None:
        """Record a tensor that is reduced over all ranks, because models without DDP may be replicas."""
        self._reductions_left -= 1
        if (group := self.group(arguments, options)) is None or group is self._c10d.GroupMember.WORLD:
            note_reduced(self.payload(arguments, options))

    def _note_cut(self, arguments: Any, options: Any, frame: Any) -> None:
        """Record a call that is given tensors with a gradient, although it returns tensors without one."""
        self._cuts_left -= 1
        tensors = [tensor for tensor in self.tensors(arguments, options) if tensor.requires_grad]
        if tensors and (line := innermost(frame, self._waits.foreign)) is not None:
            note_cut(f"{self.op} {frame_place(line)}", tensors)

    def _group_name_string(self, arguments: Any, options: Any) -> int:
        """Return the index of the process group's name in the status file's string table.

        An index is cached by address only for groups in torch's tables. These groups stay alive, so no other group can
        get their address.
        """
        group, number = (
            self.group(arguments, options),
            self._status_file.string_number(self.group_name(arguments, options)),
        )
        if group is None or group in self._c10d._world.pg_names:
            self._group_strings[id(group)] = number
        return number

    def _remember(self, number: int, arguments: Any, options: Any, result: Any, frame: Any) -> None:
        try:
            if isinstance(result, self._work_type):
                if not isinstance(result, self._no_work_type):
                    tensors = self.tensors(arguments, options)
                    self._remember_work(result, self.op, self._status_file.call_arguments(number), frame, tensors)
            elif self.op == BATCH:
                group, elements, dtype, peer = self._status_file.call_arguments(number)
                transfers, tensors = self.transfers(arguments, options), self.tensors(arguments, options)
                transfers = transfers if len(transfers) == len(result) else [(self.op, peer)] * len(result)
                for work, (op, partner) in zip(result, transfers):
                    self._remember_work(work, op, (group, elements, dtype, partner), frame, tensors)
        except Exception as error:
            self._trouble.note("collective handles", error)

    def _remember_work(
        self, work: Any, op: str, arguments: tuple[int, int, int, int], frame: Any, tensors: list[Any]
    ) -> None:
        handle = Handle(op, *arguments)
        handle.line = self._waits.unwaited.count_handle(op, handle.peer, frame, tensors)
        self._waits.remember(work, handle)


def _no_argument(_arguments: Any, _options: Any) -> None:
    pass


def _argument_getter(function: Callable[..., Any], *names: str) -> Find | None:
    """Return a function that finds the first of the parameters `names` in a call, or None if there is none."""
    position = _position(function, *names)
    if position < 0:
        return None
    name = list(inspect.signature(function).parameters)[position]

    def find(arguments: Any, options: Any) -> Any:
        return arguments[position] if len(arguments) > position else options.get(name)

    return find


def _position(function: Callable[..., Any], *names: str) -> int:
    """Return the position of the first of `names` that is a parameter of `function`, or -1 if none is."""
    parameters = list(inspect.signature(function).parameters)
    return next((parameters.index(name) for name in names if name in parameters), -1)
