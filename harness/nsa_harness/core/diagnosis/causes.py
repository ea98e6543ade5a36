"""The table of all causes that a diagnosis can find, with one row for each cause.

The documentation, the severity and confidence of findings, the second runs, the reproduction scripts and the causes
that a scenario may expect all come from this table. The texts are in causes.toml. If you add a row, the tests report
what else the new cause needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from re import Match, Pattern

from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.report import INCONCLUSIVE, STILL_RUNNING, SUSPECTED, HangKind, Severity, Status


class Caveat(StrEnum):
    """A gap in the evidence that makes a cause likely instead of certain. A finding shows the first that applies."""

    EVERY_PARTY_AT_FAULT = "all_are_blamed"  # every rank that disagrees counts as at fault
    INDEPENDENT_HANG = "a_rank_stands_elsewhere"  # another rank hangs for a different reason
    RANK_IN_UNKNOWN_STATE = "a_rank_is_unseen"  # nothing shows the state of some rank
    INDEPENDENT_FAILURE = "another_failed_too"  # another rank failed on its own at almost the same time
    RAISED_IN_COLLECTIVE = "ended_in_a_collective"  # raised in a collective, so another rank may be at fault
    NO_PROGRAM_LINE = "no_line_of_the_program"  # no line of the program is known
    CAUGHT_EXCEPTION = "caught_something"  # a rank at fault caught an exception
    UNKNOWN_SETTER = "waits_for_anybody"  # the run does not show which rank should have set the store key
    WAIT_WITHOUT_NAME = "wait_without_a_name"  # the stacks do not show that the wait is for a lock of Python
    WAIT_WITHOUT_HOLDER = "lost_wake_up"  # a condition, event or queue, which has no holder
    LOCK_TAKEN_TWICE = "lock_of_its_own"  # the child process may have taken the lock twice itself
    MISSING_HEARTBEAT = "loop_without_a_beat"  # without a heartbeat, a native call looks like a loop
    EXIT_BETWEEN_STEPS = "ended_as_if_done"  # the rank may have had fewer steps to run


COMMON_CAVEATS = (
    Caveat.INDEPENDENT_HANG,
    Caveat.RANK_IN_UNKNOWN_STATE,
    Caveat.INDEPENDENT_FAILURE,
    Caveat.NO_PROGRAM_LINE,
)
RANK_CAVEATS = (Caveat.EVERY_PARTY_AT_FAULT, Caveat.CAUGHT_EXCEPTION)


class SecondRun(StrEnum):
    """A way to run the same program again with one changed setting, to learn more about the cause."""

    NAMES = "names"  # DDP's messages contain parameter names
    ANOMALY = "anomaly"  # autograd's anomaly mode records the forward line of each operation
    CHECKPOINT_DEBUG = "checkpoint_debug"  # checkpointing reports which operation differs in the recomputation
    LAUNCH_BLOCKING = "launch_blocking"  # CUDA kernels run synchronously: the line that launched one raises its failure
    OTHER_BACKEND = "gloo"  # collectives use gloo instead of NCCL
    GROWTH = "growth"  # allocations that live longer than two steps are listed by line
    AGAIN = "again"  # the same settings
    RECORDED = "recorded"  # each rank records its statements, with their values and its calls to other ranks


class Replay(StrEnum):
    """The kind of records from which a reproduction script can repeat the collective calls."""

    NONE = "none"
    CALLS = "calls"  # the flight recorder, which also has DDP's own calls, or the calls recorded in Python
    PYTHON_CALLS = "python calls"  # only the calls recorded in Python: the flight recorder does not show the difference


class DecisionTreePolicy(StrEnum):
    """A policy on whether the program is rerun to find the part of it that is at fault.

    In a decision tree, nsa-harness reruns the program with parts of it changed. The policy of a cause says whether a
    run with this cause enters a decision tree.
    """

    NEVER = "never"  # the cause is outside the program, or does not depend on a part of it
    UNEXPLAINED = "unless it is certain"  # a certain cause needs no further search
    ALWAYS = "always"  # the cause describes the failure but does not explain it


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """A row in the cause table, which contains everything known about one cause except its wording."""

    code: str
    verdicts: tuple[Status, ...] = ()  # verdicts that this cause can explain
    kinds: tuple[HangKind, ...] = ()  # kinds of hang that this cause can explain
    is_noted: bool = False  # the finding can accompany any verdict, even a PASS
    severity: Severity = Severity.CRITICAL  # in a FAIL or HANG; a finding that is only noted is at most a warning
    ok_severity: Severity = Severity.INFO  # severity in a run that neither failed nor hung
    has_culprit: bool = True  # the report names a culprit (ranks, step, place) for this cause
    between_ranks: bool = False  # two groups of ranks disagree, and one of them is wrong
    certain_by: tuple[EvidenceKind, ...] = ()  # kinds of evidence that prove this cause
    certain_unless: tuple[Caveat, ...] = ()  # caveats of this cause, in addition to COMMON_CAVEATS
    second_run: tuple[SecondRun, ...] | None = ()  # second runs that show more; None: no second run can
    replay: Replay = Replay.NONE
    signatures: tuple[Pattern[str], ...] = ()  # texts of PyTorch's errors that identify this cause
    enters_tree: DecisionTreePolicy = DecisionTreePolicy.UNEXPLAINED
    criteria: str = ""  # prefix of the settings on which this cause depends
    reason_of: str = ""  # code of the cause for which this finding, if certain, is the reason

    @property
    def caveats(self) -> frozenset[Caveat]:
        """All caveats that can make this cause only likely."""
        return frozenset((*COMMON_CAVEATS, *(RANK_CAVEATS if self.between_ranks else ()), *self.certain_unless))


_E, _NEVER, _ALWAYS = EvidenceKind, DecisionTreePolicy.NEVER, DecisionTreePolicy.ALWAYS
_DEADLOCK, _LIVELOCK, _STARVED, _STOPPED = HangKind
_FAIL_OR_HANG = (Status.FAIL, Status.HANG)

# Base rows, from which the other rows are built. Ranks with different calls fail with gloo (FAIL) and hang with NCCL.
_ROW = CauseRow(code="")
_HANG = replace(_ROW, verdicts=(Status.HANG,))
_DIVERGING = replace(
    _ROW,
    verdicts=_FAIL_OR_HANG,
    kinds=(_DEADLOCK,),
    between_ranks=True,
    second_run=(SecondRun.RECORDED,),
    replay=Replay.CALLS,
    certain_by=(_E.REPAIRED,),
)
_FAILURE = replace(_ROW, verdicts=(Status.FAIL,))
_SILENT = replace(_ROW, is_noted=True, severity=Severity.WARNING, ok_severity=Severity.WARNING)
_UNJUDGED = replace(_ROW, verdicts=(Status.ERROR,), enters_tree=_NEVER, certain_by=(_E.FACT,))

# Texts of PyTorch's errors. DDP raises the first one at the start of a forward pass if gradients of the previous
# backward pass are missing.
_UNFINISHED = re.compile(r"Expected to have finished reduction in the prior iteration")
_READY_TWICE = re.compile(r"Expected to mark a variable ready only once")
_NOT_STATIC = re.compile(r"this is not compatible with static_graph set to True")
_RECOMPUTED = re.compile(
    r"torch\.utils\.checkpoint: (?:A different number of tensors was saved"
    r"|Recomputed values for the following|trying to save more tensors during recomputation)"
)
_IN_PLACE = re.compile(r"modified by an inplace operation: \[\S+ \[(.*?)\]\], which is output \d+ of (\w+?),")
_OTHER_MODEL = (
    re.compile(
        r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+)"
        r" has inconsistent (\d+) params"
    ),
    re.compile(r"params\[(\d+)\] in this process with (sizes|strides) \[(.*?)\] appears not to match"),
)
# Messages for a failed host allocation: of PyTorch, of the C library (errno 12), and of DataLoader workers that found
# /dev/shm full.
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory|bad_alloc")
# PyTorch moves its exception class between modules, but the start of the message stays the same (HIP on ROCm).
_NO_GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP) out of memory|CUDA error: out of memory")
_GPU_ASSERT = re.compile(r"device-side assert")
_NO_GRAD_FN = re.compile(r"does not require grad and does not have a grad_fn")
_WORKER_LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)"
    r" (is killed by signal: \w[\w ]*|exited unexpectedly with exit code -?\d+|exited unexpectedly)"
)


class Cause(StrEnum):
    """The known causes of a failed, hung or slow run.

    The value of a member is its code in reports; `row` has everything else. Codes never change. The members are in the
    order of docs/findings.md. PyTorch raises plain RuntimeErrors for many mistakes, so some causes are identified only
    by the text of the error; the signatures match PyTorch 2.11 and 2.13.
    """

    _value_: str
    row: CauseRow

    def __new__(cls, row: CauseRow) -> Cause:
        cause = str.__new__(cls, row.code)
        cause._value_ = row.code
        cause.row = row
        return cause

    def find_message(self, text: str) -> Match[str] | None:
        """Return the first match of this cause's error patterns in `text`, or None if there is none."""
        return next((match for signature in self.row.signatures if (match := signature.search(text))), None)

    # fmt: off
    RANK_CONDITIONAL_COLLECTIVE = replace(_DIVERGING, code="rank_conditional_collective")
    RANK0_ONLY_COLLECTIVE = replace(_DIVERGING, code="rank0_only_collective")
    ROOT_MISMATCH = replace(_DIVERGING, code="root_mismatch", replay=Replay.PYTHON_CALLS)
    COLLECTIVE_ORDER_MISMATCH = replace(_DIVERGING, code="collective_order_mismatch")
    SHAPE_MISMATCH = replace(_DIVERGING, code="shape_mismatch")
    DTYPE_MISMATCH = replace(_DIVERGING, code="dtype_mismatch")
    CROSS_GROUP_DEADLOCK = replace(_DIVERGING, code="cross_group_deadlock")
    NO_SYNC_MISMATCH = replace(_DIVERGING, code="no_sync_mismatch")
    UNEVEN_INPUTS = replace(_DIVERGING, code="uneven_inputs")
    SWALLOWED_EXCEPTION = replace(_HANG, code="swallowed_exception", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK,),
        is_noted=True, ok_severity=Severity.WARNING, certain_by=(_E.REPAIRED,))
    THREAD_DIED = replace(_HANG, code="thread_died", kinds=(_DEADLOCK, _STARVED))
    STARVED = replace(_HANG, code="starved", kinds=(_STARVED,), certain_by=(_E.KERNEL,))
    BLOCKED_IO = replace(_HANG, code="blocked_io", kinds=(_DEADLOCK, _STARVED))
    DEBUGGER_WAITS = replace(_HANG, code="debugger_waits", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.KERNEL,))
    PIPE_FULL = replace(_HANG, code="pipe_full", kinds=(_DEADLOCK,), certain_by=(_E.KERNEL,))
    DATALOADER_WORKER_BLOCKED = replace(_HANG, code="dataloader_worker_blocked", kinds=(_DEADLOCK, _STARVED),
        certain_by=(_E.KERNEL,))
    DATALOADER_WORKER_DIED = replace(_FAILURE, code="dataloader_worker_died", certain_by=(_E.RAISED,),
        signatures=(_WORKER_LOST,))
    FORK_LOCK = replace(_HANG, code="fork_lock", kinds=(_DEADLOCK,), certain_by=(_E.CLOSED,),
        certain_unless=(Caveat.LOCK_TAKEN_TWICE,))
    RENDEZVOUS_MISSING_RANK = replace(_HANG, code="rendezvous_missing_rank", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK,),
        certain_by=(_E.RECORD, _E.RAISED))
    GROUP_CREATION_SUBSET = replace(_HANG, code="group_creation_subset", kinds=(_DEADLOCK,), certain_by=(_E.RECORD,),
        replay=Replay.PYTHON_CALLS)
    P2P_UNMATCHED = replace(_DIVERGING, code="p2p_unmatched", verdicts=(Status.HANG,), certain_by=(_E.CLOSED,),
        replay=Replay.PYTHON_CALLS)
    STORE_KEY_MISSING = replace(_HANG, code="store_key_missing", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK, _STARVED),
        certain_by=(_E.CLOSED, _E.RAISED), certain_unless=(Caveat.UNKNOWN_SETTER,))
    TRANSPORT = replace(_HANG, code="transport", kinds=(_STARVED,), certain_by=(_E.KERNEL,),
        second_run=(SecondRun.OTHER_BACKEND, SecondRun.AGAIN))
    BACKWARD_FUNCTION_BLOCKED = replace(_HANG, code="backward_function_blocked", kinds=(_DEADLOCK,),
        certain_by=(_E.KERNEL,), certain_unless=(Caveat.WAIT_WITHOUT_NAME,))
    LOCK_CYCLE = replace(_HANG, code="lock_cycle", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,),
        certain_unless=(Caveat.WAIT_WITHOUT_NAME, Caveat.WAIT_WITHOUT_HOLDER))
    RPC_DEADLOCK = replace(_HANG, code="rpc_deadlock", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,))
    STOPPED_PROCESS = replace(_HANG, code="stopped_process", kinds=(_STOPPED,), certain_by=(_E.FACT,),
        enters_tree=_NEVER)
    INFINITE_LOOP = replace(_HANG, code="infinite_loop", kinds=(_LIVELOCK,), certain_by=(_E.SAMPLES,),
        certain_unless=(Caveat.MISSING_HEARTBEAT,))
    LIVELOCK = replace(_HANG, code="livelock", kinds=(_LIVELOCK,))
    POOL_WORKER_LOST = replace(_HANG, code="pool_worker_lost", kinds=(_STARVED,))
    SHUTDOWN_HANG = replace(_HANG, code="shutdown_hang", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,))
    GIL_HELD_NATIVE = replace(_HANG, code="gil_held_native", kinds=(_LIVELOCK, _STARVED), certain_by=(_E.HOLDER,))
    NATIVE_BUSY_LOOP = replace(_HANG, code="native_busy_loop", kinds=(_LIVELOCK,), certain_by=(_E.SAMPLES,))
    RANK_ABSENT = replace(_HANG, code="rank_absent", kinds=(_DEADLOCK,), second_run=None)
    SLOW = replace(_FAILURE, code="slow", severity=Severity.WARNING, ok_severity=Severity.WARNING,
        certain_by=(_E.SAMPLES,), second_run=None, enters_tree=_NEVER, criteria="limits.")
    UNUSED_PARAMS = replace(_FAILURE, code="unused_params", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,))
    RANK_CONDITIONAL_UNUSED_PARAMS = replace(_HANG, code="rank_conditional_unused_params", verdicts=_FAIL_OR_HANG,
        kinds=(_DEADLOCK,), certain_by=(_E.RAISED, _E.RECORD, _E.REPAIRED), second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,))
    REENTRANT_NO_GRAD_INPUT = replace(_FAILURE, code="reentrant_no_grad_input", is_noted=True,
        ok_severity=Severity.WARNING, certain_by=(_E.RAISED,), signatures=(_UNFINISHED,))
    READY_TWICE = replace(_FAILURE, code="ready_twice", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=(_READY_TWICE,))
    STATIC_GRAPH_CHANGED = replace(_FAILURE, code="static_graph_changed", certain_by=(_E.RAISED,),
        second_run=(SecondRun.NAMES,), signatures=(_NOT_STATIC,))
    CHECKPOINT_RECOMPUTE_MISMATCH = replace(_FAILURE, code="checkpoint_recompute_mismatch", certain_by=(_E.RAISED,),
        second_run=(SecondRun.CHECKPOINT_DEBUG,), signatures=(_RECOMPUTED,))
    INPLACE_MODIFICATION = replace(_FAILURE, code="inplace_modification", certain_by=(_E.RAISED,),
        second_run=(SecondRun.ANOMALY,), signatures=(_IN_PLACE,))
    MODEL_MISMATCH = replace(_FAILURE, code="model_mismatch", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=_OTHER_MODEL)
    FIND_UNUSED_NEEDLESS = replace(_SILENT, code="find_unused_needless", ok_severity=Severity.INFO)
    GRADIENT_ORDER_DIFFERS = replace(_SILENT, code="gradient_order_differs", ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,))
    EXCEPTION = replace(_FAILURE, code="exception", certain_by=(_E.RAISED,),
        certain_unless=(Caveat.RAISED_IN_COLLECTIVE,), second_run=(SecondRun.ANOMALY,), enters_tree=_ALWAYS)
    HOST_OOM = replace(_FAILURE, code="host_oom", certain_by=(_E.RAISED, _E.KERNEL), enters_tree=_NEVER,
        signatures=(_NO_MEMORY,))
    CUDA_OOM = replace(_FAILURE, code="cuda_oom", certain_by=(_E.RAISED,), enters_tree=_NEVER,
        signatures=(_NO_GPU_MEMORY,))
    CUDA_ASSERT = replace(_FAILURE, code="cuda_assert", second_run=(SecondRun.LAUNCH_BLOCKING,),
        signatures=(_GPU_ASSERT,))
    INFRA = replace(_FAILURE, code="infra", enters_tree=_NEVER)
    HIDDEN_PACKAGE = replace(_FAILURE, code="hidden_package", certain_by=(_E.RAISED,), enters_tree=_NEVER)
    DISK_FULL = replace(_HANG, code="disk_full", verdicts=(Status.FAIL, Status.ERROR), has_culprit=False,
        certain_by=(_E.FACT,), enters_tree=_NEVER)
    EARLY_EXIT = replace(_FAILURE, code="early_exit", certain_by=(_E.KERNEL,),
        certain_unless=(Caveat.EXIT_BETWEEN_STEPS,))
    BAD_EXIT = replace(_FAILURE, code="bad_exit", certain_by=(_E.ENDED,), enters_tree=_ALWAYS)
    KILLED = replace(_FAILURE, code="killed", certain_by=(_E.KERNEL,), enters_tree=_NEVER)
    SEGFAULT = replace(_FAILURE, code="segfault", certain_by=(_E.ENDED,), enters_tree=_ALWAYS)
    ABORTED = replace(_FAILURE, code="aborted", certain_by=(_E.ENDED,), certain_unless=(Caveat.RAISED_IN_COLLECTIVE,),
        enters_tree=_ALWAYS)
    UNKNOWN = replace(_HANG, code="unknown", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK, _STARVED), enters_tree=_ALWAYS)
    EXPECTATION_MISSED = replace(_FAILURE, code="expectation_missed", severity=Severity.WARNING,
        ok_severity=Severity.WARNING, certain_by=(_E.FACT,), second_run=None, enters_tree=_NEVER, criteria="expect.")
    FLAKY = replace(_FAILURE, code="flaky", severity=Severity.WARNING, ok_severity=Severity.WARNING, second_run=None,
        enters_tree=_NEVER)
    NO_GRADIENT = replace(_SILENT, code="no_gradient", verdicts=(Status.FAIL,), certain_by=(_E.FACT,),
        signatures=(_NO_GRAD_FN,))
    NAN = replace(_SILENT, code="nan", certain_by=(_E.RECORD,), second_run=(SecondRun.ANOMALY,))
    REPLICA_DIVERGENCE = replace(_SILENT, code="replica_divergence", certain_by=(_E.RECORD,))
    SHARED_FILE = replace(_SILENT, code="shared_file")
    UNINITIALISED_PARAMETERS = replace(_SILENT, code="uninitialised_parameters")
    UNWAITED_COLLECTIVE = replace(_SILENT, code="unwaited_collective")
    MEMORY_GROWTH = replace(_SILENT, code="memory_growth", second_run=(SecondRun.GROWTH,))
    INPUT_BOUND = replace(_SILENT, code="input_bound")
    STRAGGLER = replace(_SILENT, code="straggler")
    SLOW_LINK = replace(_SILENT, code="slow_link")
    GATE_COLLAPSE = replace(_SILENT, code="gate_collapse")
    PER_TOKEN_NODES = replace(_SILENT, code="per_token_nodes", certain_by=(_E.FACT,), reason_of="slow")
    QUADRATIC_COST = replace(_SILENT, code="quadratic_cost", certain_by=(_E.FACT,))
    MEMORY_EXCESS = replace(_SILENT, code="memory_excess", certain_by=(_E.FACT,))
    GPU_FAULT = replace(_SILENT, code="gpu_fault", certain_by=(_E.KERNEL,))
    IDLE_DEVICE = replace(_SILENT, code="idle_device")
    DIRTY_EXIT = replace(_SILENT, code="dirty_exit", certain_by=(_E.ENDED,))
    ORPHAN_PROCESS = replace(_SILENT, code="orphan_process", certain_by=(_E.FACT,))
    DEEPENED = replace(_SILENT, code="deepened", severity=Severity.INFO, ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,))
    SAME_PLACE = replace(_SILENT, code="same_place", severity=Severity.INFO, ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,))
    MISSING_NEED = replace(_ROW, code="missing_need", verdicts=(Status.SKIP,), certain_by=(_E.FACT,),
        enters_tree=_NEVER)
    INTERRUPTED = replace(_UNJUDGED, code="interrupted", has_culprit=False, second_run=None)
    NODE_LOST = replace(_UNJUDGED, code="node_lost", has_culprit=False)
    STILL_RUNNING = replace(_UNJUDGED, code=STILL_RUNNING)
    SUSPECTED = replace(_UNJUDGED, code=SUSPECTED)
    INCONCLUSIVE = replace(_UNJUDGED, code=INCONCLUSIVE, has_culprit=False, second_run=None)
    FRAMEWORK_PHASE = replace(_SILENT, code="framework_phase")
    RETRACTED_HANG = replace(_SILENT, code="retracted_hang", ok_severity=Severity.INFO, certain_by=(_E.FACT,))
    ATTEMPT_DIRECTORY_LOST = replace(_UNJUDGED, code="attempt_directory_lost", severity=Severity.WARNING,
        ok_severity=Severity.WARNING, has_culprit=False, second_run=None)
    HARNESS_ERROR = replace(_UNJUDGED, code="harness_error", severity=Severity.WARNING, ok_severity=Severity.WARNING,
        has_culprit=False)
    # fmt: on


# Causes of verdicts. A scenario can name one of these as the cause that it expects.
CAUSES_OF_VERDICTS = tuple(cause.value for cause in Cause if cause.row.verdicts)


_BY_CODE = {cause.value: cause.row for cause in Cause}


def row_of(code: str | None) -> CauseRow:
    """Return the row for the cause with this code, or the row for `Cause.UNKNOWN` if there is no such cause."""
    return _BY_CODE.get(code or "", Cause.UNKNOWN.row)
