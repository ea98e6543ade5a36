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
    RAISED_IN_COLLECTIVE = (
        "ended_in_a_collective"  # the error was raised in a collective, so another rank may be at fault
    )
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
    CHECKPOINT_DEBUG = (
        "checkpoint_debug"  # activation checkpointing reports which operation differs in the recomputation
    )
    LAUNCH_BLOCKING = (
        "launch_blocking"  # CUDA kernels run synchronously, so a failure is raised on the line that launched the kernel
    )
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


class Producer(StrEnum):
    """The component that can report a cause."""

    RULE = "a rule of the diagnosis"
    EXPECTATION = "a number that the scenario expects"
    NEEDS = "a need of the scenario that the machine lacks"
    ATTEMPTS = "a comparison of several attempts"
    COMMAND = "the command that launched the run, because no evidence is left"


class CauseTestKind(StrEnum):
    """The kinds of test that can cover a cause, in order of preference."""

    PROGRAM = "program"  # a program in tests/faults with this fault, and a twin without it
    EVIDENCE = "evidence"  # evidence in tests/frozen that was written by hand
    TEST = "test"  # a test that compares outcomes, because the evidence of one run cannot show the cause


@dataclass(frozen=True, kw_only=True)
class CauseTest:
    """A test that checks whether a cause is found."""

    by: CauseTestKind
    name: str = ""  # name of the program or path of the test
    reason: str = ""  # why no program in tests/faults can show the cause


def programs(*names: str) -> tuple[CauseTest, ...]:
    return tuple(CauseTest(by=CauseTestKind.PROGRAM, name=name) for name in names)


def by_evidence(reason: str) -> tuple[CauseTest, ...]:
    return (CauseTest(by=CauseTestKind.EVIDENCE, reason=reason),)


def by_test(name: str, reason: str) -> tuple[CauseTest, ...]:
    return (CauseTest(by=CauseTestKind.TEST, name=name, reason=reason),)


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """A row in the cause table, which contains everything known about one cause except its wording."""

    code: str
    shown_by: tuple[CauseTest, ...]
    verdicts: tuple[Status, ...] = ()  # verdicts that this cause can explain
    kinds: tuple[HangKind, ...] = ()  # kinds of hang that this cause can explain
    is_noted: bool = False  # the finding can accompany any verdict, even a PASS
    severity: Severity = (
        Severity.CRITICAL
    )  # severity in a FAIL or HANG; a finding that is only noted counts as a warning at most
    ok_severity: Severity = Severity.INFO  # severity in a run that neither failed nor hung
    has_culprit: bool = True  # the report names a culprit (ranks, step, place) for this cause
    between_ranks: bool = False  # two groups of ranks disagree, and one of them is wrong
    certain_by: tuple[EvidenceKind, ...] = ()  # kinds of evidence that prove this cause
    certain_unless: tuple[Caveat, ...] = ()  # caveats of this cause, in addition to COMMON_CAVEATS
    second_run: (
        tuple[SecondRun, ...] | None
    ) = ()  # second runs that show more about this cause; None: no second run can
    replay: Replay = Replay.NONE
    signatures: tuple[Pattern[str], ...] = ()  # texts of PyTorch's errors that identify this cause
    producer: Producer = Producer.RULE
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
_ROW = CauseRow(code="", shown_by=())
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
    RANK_CONDITIONAL_COLLECTIVE = replace(_DIVERGING, code="rank_conditional_collective",
        shown_by=programs("exit_destroyed_early", "fsdp_branch_skips"))
    RANK0_ONLY_COLLECTIVE = replace(_DIVERGING, code="rank0_only_collective",
        shown_by=programs("fsdp_state_rank0", "groups_rank0_barrier"))
    ROOT_MISMATCH = replace(_DIVERGING, code="root_mismatch", replay=Replay.PYTHON_CALLS,
        shown_by=programs("groups_broadcast_root", "groups_gather_root"))
    COLLECTIVE_ORDER_MISMATCH = replace(_DIVERGING, code="collective_order_mismatch",
        shown_by=programs("groups_dict_order", "groups_wrong_lookup"))
    SHAPE_MISMATCH = replace(_DIVERGING, code="shape_mismatch",
        shown_by=programs("fsdp_width_differs", "groups_batch_smaller"))
    DTYPE_MISMATCH = replace(_DIVERGING, code="dtype_mismatch", shown_by=programs("groups_dtype_autocast"))
    CROSS_GROUP_DEADLOCK = replace(_DIVERGING, code="cross_group_deadlock", shown_by=programs("groups_opposite_order"))
    NO_SYNC_MISMATCH = replace(_DIVERGING, code="no_sync_mismatch",
        shown_by=programs("groups_accumulation_differs", "groups_no_sync_once"))
    UNEVEN_INPUTS = replace(_DIVERGING, code="uneven_inputs",
        shown_by=programs("data_sampler_stops", "data_uneven_shards"))
    SWALLOWED_EXCEPTION = replace(_HANG, code="swallowed_exception", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK,),
        is_noted=True, ok_severity=Severity.WARNING, certain_by=(_E.REPAIRED,),
        shown_by=programs("data_error_swallowed", "data_loss_swallowed", "silent_batch_given_up"))
    THREAD_DIED = replace(_HANG, code="thread_died", kinds=(_DEADLOCK, _STARVED),
        shown_by=programs("thread_producer_died"))
    STARVED = replace(_HANG, code="starved", kinds=(_STARVED,), certain_by=(_E.KERNEL,),
        shown_by=programs("proc_child_sleeps"))
    BLOCKED_IO = replace(_HANG, code="blocked_io", kinds=(_DEADLOCK, _STARVED),
        shown_by=programs("backward_hook_reads_pipe", "io_fifo_no_writer"))
    DEBUGGER_WAITS = replace(_HANG, code="debugger_waits", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.KERNEL,),
        shown_by=programs("io_breakpoint_left"))
    PIPE_FULL = replace(_HANG, code="pipe_full", kinds=(_DEADLOCK,), certain_by=(_E.KERNEL,),
        shown_by=programs("io_full_pipe_to_self", "proc_child_pipe_full"))
    DATALOADER_WORKER_BLOCKED = replace(_HANG, code="dataloader_worker_blocked", kinds=(_DEADLOCK, _STARVED),
        certain_by=(_E.KERNEL,), shown_by=programs("data_worker_lock", "data_worker_pipe"))
    DATALOADER_WORKER_DIED = replace(_FAILURE, code="dataloader_worker_died", certain_by=(_E.RAISED,),
        signatures=(_WORKER_LOST,), shown_by=programs("data_worker_killed"))
    FORK_LOCK = replace(_HANG, code="fork_lock", kinds=(_DEADLOCK,), certain_by=(_E.CLOSED,),
        certain_unless=(Caveat.LOCK_TAKEN_TWICE,), shown_by=programs("proc_fork_holds_lock", "proc_pool_fork_lock"))
    RENDEZVOUS_MISSING_RANK = replace(_HANG, code="rendezvous_missing_rank", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK,),
        certain_by=(_E.RECORD, _E.RAISED), shown_by=programs("rdzv_world_size"))
    GROUP_CREATION_SUBSET = replace(_HANG, code="group_creation_subset", kinds=(_DEADLOCK,), certain_by=(_E.RECORD,),
        replay=Replay.PYTHON_CALLS, shown_by=programs("groups_new_subset"))
    P2P_UNMATCHED = replace(_DIVERGING, code="p2p_unmatched", verdicts=(Status.HANG,), certain_by=(_E.CLOSED,),
        replay=Replay.PYTHON_CALLS, shown_by=programs("p2p_both_receive", "p2p_both_send"))
    STORE_KEY_MISSING = replace(_HANG, code="store_key_missing", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK, _STARVED),
        certain_by=(_E.CLOSED, _E.RAISED), certain_unless=(Caveat.UNKNOWN_SETTER,),
        shown_by=programs("store_counter_short", "store_key_never_set"))
    TRANSPORT = replace(_HANG, code="transport", kinds=(_STARVED,), certain_by=(_E.KERNEL,),
        second_run=(SecondRun.OTHER_BACKEND, SecondRun.AGAIN), shown_by=programs("net_cut"))
    BACKWARD_FUNCTION_BLOCKED = replace(_HANG, code="backward_function_blocked", kinds=(_DEADLOCK,),
        certain_by=(_E.KERNEL,), certain_unless=(Caveat.WAIT_WITHOUT_NAME,), shown_by=programs("backward_lock"))
    LOCK_CYCLE = replace(_HANG, code="lock_cycle", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,),
        certain_unless=(Caveat.WAIT_WITHOUT_NAME, Caveat.WAIT_WITHOUT_HOLDER),
        shown_by=programs("forward_lock", "groups_monitored_barrier", "proc_child_barrier", "thread_logger_died"))
    RPC_DEADLOCK = replace(_HANG, code="rpc_deadlock", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,),
        shown_by=programs("rpc_locks_crossed",))
    STOPPED_PROCESS = replace(_HANG, code="stopped_process", kinds=(_STOPPED,), certain_by=(_E.FACT,),
        enters_tree=_NEVER, shown_by=programs("proc_stopped_child", "signal_stop_self"))
    INFINITE_LOOP = replace(_HANG, code="infinite_loop", kinds=(_LIVELOCK,), certain_by=(_E.SAMPLES,),
        certain_unless=(Caveat.MISSING_HEARTBEAT,),
        shown_by=programs("thread_endless_forward", "data_worker_endless_loop", "thread_prefetcher_spins"))
    LIVELOCK = replace(_HANG, code="livelock", kinds=(_LIVELOCK,),
        shown_by=programs("thread_poll_flag", "thread_retry_logs"))
    POOL_WORKER_LOST = replace(_HANG, code="pool_worker_lost", kinds=(_STARVED,),
        shown_by=programs("proc_pool_worker_killed"))
    SHUTDOWN_HANG = replace(_HANG, code="shutdown_hang", kinds=(_DEADLOCK, _STARVED), certain_by=(_E.CLOSED,),
        shown_by=programs("exit_atexit_waits", "exit_executor_left"))
    GIL_HELD_NATIVE = replace(_HANG, code="gil_held_native", kinds=(_LIVELOCK, _STARVED), certain_by=(_E.HOLDER,),
        shown_by=programs("thread_gil_in_c"))
    NATIVE_BUSY_LOOP = replace(_HANG, code="native_busy_loop", kinds=(_LIVELOCK,), certain_by=(_E.SAMPLES,),
        shown_by=programs("thread_spin_lock"))
    RANK_ABSENT = replace(_HANG, code="rank_absent", kinds=(_DEADLOCK,), second_run=None,
        shown_by=by_test("tests/core/test_aftermath.py", "needs a job that was not watched"))
    SLOW = replace(_FAILURE, code="slow", severity=Severity.WARNING, ok_severity=Severity.WARNING,
        certain_by=(_E.SAMPLES,), second_run=None, enters_tree=_NEVER, criteria="limits.",
        shown_by=programs("forward_slow_loop", "rank_busy_past_timeout"))
    UNUSED_PARAMS = replace(_FAILURE, code="unused_params", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,), shown_by=programs("ddp_unused_branch", "ddp_unused_never"))
    RANK_CONDITIONAL_UNUSED_PARAMS = replace(_HANG, code="rank_conditional_unused_params", verdicts=_FAIL_OR_HANG,
        kinds=(_DEADLOCK,), certain_by=(_E.RAISED, _E.RECORD, _E.REPAIRED), second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,),
        shown_by=programs("ddp_output_not_in_loss", "ddp_unused_at_once", "ddp_layer_dropped"))
    REENTRANT_NO_GRAD_INPUT = replace(_FAILURE, code="reentrant_no_grad_input", is_noted=True,
        ok_severity=Severity.WARNING, certain_by=(_E.RAISED,), signatures=(_UNFINISHED,),
        shown_by=programs("gc_reentrant_first", "gc_reentrant_silent"))
    READY_TWICE = replace(_FAILURE, code="ready_twice", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=(_READY_TWICE,), shown_by=programs("ddp_ready_twice_shared", "gc_ready_twice_outside"))
    STATIC_GRAPH_CHANGED = replace(_FAILURE, code="static_graph_changed", certain_by=(_E.RAISED,),
        second_run=(SecondRun.NAMES,), signatures=(_NOT_STATIC,),
        shown_by=programs("ddp_static_graph_grows", "ddp_static_graph_shrinks"))
    CHECKPOINT_RECOMPUTE_MISMATCH = replace(_FAILURE, code="checkpoint_recompute_mismatch", certain_by=(_E.RAISED,),
        second_run=(SecondRun.CHECKPOINT_DEBUG,), signatures=(_RECOMPUTED,),
        shown_by=programs("gc_recompute_counts", "gc_recompute_shapes"))
    INPLACE_MODIFICATION = replace(_FAILURE, code="inplace_modification", certain_by=(_E.RAISED,),
        second_run=(SecondRun.ANOMALY,), signatures=(_IN_PLACE,),
        shown_by=programs("backward_inplace_add", "backward_inplace_mask"))
    MODEL_MISMATCH = replace(_FAILURE, code="model_mismatch", certain_by=(_E.RAISED,), second_run=(SecondRun.NAMES,),
        signatures=_OTHER_MODEL, shown_by=programs("ddp_model_depth_differs", "ddp_model_width_differs"))
    FIND_UNUSED_NEEDLESS = replace(_SILENT, code="find_unused_needless", ok_severity=Severity.INFO,
        shown_by=programs("ddp_find_unused_needless"))
    GRADIENT_ORDER_DIFFERS = replace(_SILENT, code="gradient_order_differs", ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,), shown_by=by_evidence("only the traces of nsa.train show the order"))
    EXCEPTION = replace(_FAILURE, code="exception", certain_by=(_E.RAISED,),
        certain_unless=(Caveat.RAISED_IN_COLLECTIVE,), second_run=(SecondRun.ANOMALY,), enters_tree=_ALWAYS,
        shown_by=programs("backward_hook_raises", "backward_twice"))
    HOST_OOM = replace(_FAILURE, code="host_oom", certain_by=(_E.RAISED, _E.KERNEL), enters_tree=_NEVER,
        signatures=(_NO_MEMORY,), shown_by=programs("exit_memory_error", "exit_tensor_too_large"))
    CUDA_OOM = replace(_FAILURE, code="cuda_oom", certain_by=(_E.RAISED,), enters_tree=_NEVER,
        signatures=(_NO_GPU_MEMORY,), shown_by=by_evidence("needs a GPU"))
    CUDA_ASSERT = replace(_FAILURE, code="cuda_assert", second_run=(SecondRun.LAUNCH_BLOCKING,),
        signatures=(_GPU_ASSERT,), shown_by=by_evidence("needs a GPU kernel"))
    INFRA = replace(_FAILURE, code="infra", enters_tree=_NEVER, shown_by=programs("io_disk_full", "io_file_too_large"))
    HIDDEN_PACKAGE = replace(_FAILURE, code="hidden_package", certain_by=(_E.RAISED,), enters_tree=_NEVER,
        shown_by=by_test("tests/core/test_resources.py", "the program must not start"))
    DISK_FULL = replace(_HANG, code="disk_full", verdicts=(Status.FAIL, Status.ERROR), has_culprit=False,
        certain_by=(_E.FACT,), enters_tree=_NEVER,
        shown_by=by_test("tests/core/test_resources.py", "a test program must not fill a shared disk"))
    EARLY_EXIT = replace(_FAILURE, code="early_exit", certain_by=(_E.KERNEL,),
        certain_unless=(Caveat.EXIT_BETWEEN_STEPS,), shown_by=programs("exit_os_exit_zero", "exit_zero_early"))
    BAD_EXIT = replace(_FAILURE, code="bad_exit", certain_by=(_E.ENDED,), enters_tree=_ALWAYS,
        shown_by=programs("exit_bad_option", "exit_three"))
    KILLED = replace(_FAILURE, code="killed", certain_by=(_E.KERNEL,), enters_tree=_NEVER,
        shown_by=programs("signal_kill_self"))
    SEGFAULT = replace(_FAILURE, code="segfault", certain_by=(_E.ENDED,), enters_tree=_ALWAYS,
        shown_by=programs("signal_bus", "signal_segfault"))
    ABORTED = replace(_FAILURE, code="aborted", certain_by=(_E.ENDED,), certain_unless=(Caveat.RAISED_IN_COLLECTIVE,),
        enters_tree=_ALWAYS, shown_by=programs("signal_abort"))
    UNKNOWN = replace(_HANG, code="unknown", verdicts=_FAIL_OR_HANG, kinds=(_DEADLOCK, _STARVED), enters_tree=_ALWAYS,
        shown_by=by_evidence("such a program would show that a rule is missing"))
    EXPECTATION_MISSED = replace(_FAILURE, code="expectation_missed", severity=Severity.WARNING,
        ok_severity=Severity.WARNING, certain_by=(_E.FACT,), second_run=None, producer=Producer.EXPECTATION,
        enters_tree=_NEVER, criteria="expect.",
        shown_by=by_test("tests/core/test_expectation.py", "the number comes from a scenario; test programs have none"))
    FLAKY = replace(_FAILURE, code="flaky", severity=Severity.WARNING, ok_severity=Severity.WARNING, second_run=None,
        producer=Producer.ATTEMPTS, enters_tree=_NEVER,
        shown_by=programs("flaky_exit_second_attempt", "flaky_hang_second_attempt"))
    NO_GRADIENT = replace(_SILENT, code="no_gradient", verdicts=(Status.FAIL,), certain_by=(_E.FACT,),
        signatures=(_NO_GRAD_FN,),
        shown_by=programs("silent_no_gradient_detached", "silent_no_gradient_no_grad", "silent_no_gradient_masked",
            "silent_no_gradient_by_hand", "silent_no_gradient_summed"))
    NAN = replace(_SILENT, code="nan", certain_by=(_E.RECORD,), second_run=(SecondRun.ANOMALY,),
        shown_by=programs("silent_nan_loss_one_rank", "silent_nan_root_of_zero"))
    REPLICA_DIVERGENCE = replace(_SILENT, code="replica_divergence", certain_by=(_E.RECORD,),
        shown_by=programs(
            "silent_replicas_edited", "silent_replicas_extra_step", "silent_replicas_own_seed", "silent_replicas_order",
            "silent_uneven_accumulation",
        ))
    SHARED_FILE = replace(_SILENT, code="shared_file", shown_by=programs("silent_file_of_all"))
    UNINITIALISED_PARAMETERS = replace(_SILENT, code="uninitialised_parameters",
        shown_by=programs("silent_parameters_unset"))
    UNWAITED_COLLECTIVE = replace(_SILENT, code="unwaited_collective", shown_by=programs("silent_unwaited_reduce"))
    MEMORY_GROWTH = replace(_SILENT, code="memory_growth", second_run=(SecondRun.GROWTH,),
        shown_by=programs("silent_leak_cache", "silent_leak_graphs"))
    INPUT_BOUND = replace(_SILENT, code="input_bound", shown_by=programs("silent_input_bound"))
    STRAGGLER = replace(_SILENT, code="straggler", shown_by=programs("silent_straggler"))
    GATE_COLLAPSE = replace(_SILENT, code="gate_collapse",
        shown_by=by_evidence("only the model of nsa.train has gates"))
    PER_TOKEN_NODES = replace(_SILENT, code="per_token_nodes", certain_by=(_E.FACT,), reason_of="slow",
        shown_by=by_test("tests/end_to_end/test_step_costs.py", "only nsa.train counts the nodes of its graph"))
    QUADRATIC_COST = replace(_SILENT, code="quadratic_cost", certain_by=(_E.FACT,),
        shown_by=by_test("tests/end_to_end/test_step_costs.py", "only nsa.train reports the memory of its graph"))
    MEMORY_EXCESS = replace(_SILENT, code="memory_excess", certain_by=(_E.FACT,),
        shown_by=by_test("tests/end_to_end/test_step_costs.py", "only nsa.train reports what its shape needs"))
    IDLE_DEVICE = replace(_SILENT, code="idle_device",
        shown_by=by_test("tests/core/test_resources.py", "needs two GPUs; tested with recorded values"))
    DIRTY_EXIT = replace(_SILENT, code="dirty_exit", certain_by=(_E.ENDED,),
        shown_by=programs("silent_dirty_atexit", "silent_dirty_shared_memory"))
    ORPHAN_PROCESS = replace(_SILENT, code="orphan_process", certain_by=(_E.FACT,),
        shown_by=programs("proc_orphan_left"))
    DEEPENED = replace(_SILENT, code="deepened", severity=Severity.INFO, ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,), producer=Producer.ATTEMPTS,
        shown_by=by_test("tests/core/test_deepening.py", "needs a second run with one change"))
    SAME_PLACE = replace(_SILENT, code="same_place", severity=Severity.INFO, ok_severity=Severity.INFO,
        certain_by=(_E.RECORD,), producer=Producer.ATTEMPTS,
        shown_by=by_test("tests/core/test_same_place.py", "needs several attempts of one launch"))
    MISSING_NEED = replace(_ROW, code="missing_need", verdicts=(Status.SKIP,), certain_by=(_E.FACT,),
        producer=Producer.NEEDS, enters_tree=_NEVER,
        shown_by=by_test("tests/core/test_outcome.py", "needs a machine that lacks something"))
    INTERRUPTED = replace(_UNJUDGED, code="interrupted", has_culprit=False, second_run=None,
        shown_by=by_evidence("Ctrl-C comes from outside the program"))
    STILL_RUNNING = replace(_UNJUDGED, code=STILL_RUNNING, shown_by=by_evidence("needs a job that is only inspected"))
    SUSPECTED = replace(_UNJUDGED, code=SUSPECTED, shown_by=by_evidence("needs a job that is only inspected"))
    INCONCLUSIVE = replace(_UNJUDGED, code=INCONCLUSIVE, has_culprit=False, second_run=None,
        shown_by=by_test("tests/core/test_aftermath.py", "needs the incomplete files of a job that was not watched"))
    FRAMEWORK_PHASE = replace(_SILENT, code="framework_phase",
        shown_by=by_test("tests/core/test_frameworks.py", "needs a framework"))
    RETRACTED_HANG = replace(_SILENT, code="retracted_hang", ok_severity=Severity.INFO, certain_by=(_E.FACT,),
        shown_by=by_evidence("needs a watched job that continues after its proof"))
    ATTEMPT_DIRECTORY_LOST = replace(_UNJUDGED, code="attempt_directory_lost", severity=Severity.WARNING,
        ok_severity=Severity.WARNING, has_culprit=False, second_run=None,
        producer=Producer.COMMAND,
        shown_by=by_test("tests/end_to_end/test_lost_directory.py", "leaves no evidence"))
    HARNESS_ERROR = replace(_UNJUDGED, code="harness_error", severity=Severity.WARNING, ok_severity=Severity.WARNING,
        has_culprit=False, shown_by=by_evidence("needs a defect of nsa-harness itself"))
    # fmt: on


# Causes of verdicts. A scenario can name one of these as the cause that it expects.
CAUSES_OF_VERDICTS = tuple(cause.value for cause in Cause if cause.row.verdicts)


_BY_CODE = {cause.value: cause.row for cause in Cause}


def row_of(code: str | None) -> CauseRow:
    """Return the row for the cause with this code, or the row for `Cause.UNKNOWN` if there is no such cause."""
    return _BY_CODE.get(code or "", Cause.UNKNOWN.row)
