"""The one table of causes: everything that is known about a cause is its row, and nothing of it is said elsewhere.

Documents, the causes that a scenario may expect, severity, certainty, further runs and reproductions are all read from
here. Adding a cause begins with a row; the tests then say what else it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from re import Match, Pattern

from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.report import INCONCLUSIVE, STILL_RUNNING, SUSPECTED, HangKind, Severity, Status


class Caveat(StrEnum):
    """What the evidence may leave open, so that a cause is no more than likely. Asked in this order."""

    ALL_ARE_BLAMED = "all_are_blamed"
    A_RANK_STANDS_ELSEWHERE = "a_rank_stands_elsewhere"
    A_RANK_IS_UNSEEN = "a_rank_is_unseen"
    ANOTHER_FAILED_TOO = "another_failed_too"
    ENDED_IN_A_COLLECTIVE = "ended_in_a_collective"
    NO_LINE_OF_THE_PROGRAM = "no_line_of_the_program"
    CAUGHT_SOMETHING = "caught_something"
    WAITS_FOR_ANYBODY = "waits_for_anybody"
    LOST_WAKE_UP = "lost_wake_up"
    LOCK_OF_ITS_OWN = "lock_of_its_own"
    LOOP_WITHOUT_A_BEAT = "loop_without_a_beat"
    ENDED_AS_IF_DONE = "ended_as_if_done"


OF_EVERY_CAUSE = (
    Caveat.A_RANK_STANDS_ELSEWHERE,
    Caveat.A_RANK_IS_UNSEEN,
    Caveat.ANOTHER_FAILED_TOO,
    Caveat.NO_LINE_OF_THE_PROGRAM,
)
BETWEEN_RANKS = (Caveat.ALL_ARE_BLAMED, Caveat.CAUGHT_SOMETHING)


class SecondRun(StrEnum):
    """The one thing that a further run of the same program does otherwise."""

    NAMES = "names"  # DDP names parameters
    ANOMALY = "anomaly"  # autograd keeps the forward line of each operation
    CHECKPOINT_DEBUG = "checkpoint_debug"  # checkpointing tells which operation it recomputes otherwise
    LAUNCH_BLOCKING = "launch_blocking"  # a kernel fails on the line that launched it
    OTHER_BACKEND = "gloo"
    GROWTH = "growth"  # what lives after two steps is told by the line that allocated it
    AGAIN = "again"  # nothing


class Replay(StrEnum):
    """From which record a script of calls alone can do the same."""

    NONE = "none"
    CALLS = "calls"  # of the flight recorder, which has DDP's own ones too, or from Python
    PYTHON_CALLS = "python calls"  # alone: the flight recorder tells nothing of what differs


class DecisionTreePolicy(StrEnum):
    """Whether a run that ended so is asked a decision tree, which looks for the part of a program that is to blame."""

    NEVER = "never"  # it came from outside, or tells nothing of the program's parts
    UNEXPLAINED = "unless it is certain"  # then the cause is the answer, with its remedy
    ALWAYS = "always"  # that it happened may be certain, and explains nothing


class Producer(StrEnum):
    """Who says that this is the cause."""

    RULE = "a rule of the diagnosis"
    EXPECTATION = "a number that the scenario announced"
    NEEDS = "what the scenario needs and the machine lacks"
    ATTEMPTS = "several attempts laid side by side"


class ShownBy(StrEnum):
    """By what a cause is shown, the better first."""

    PROGRAM = "program"  # of tests/faults, with a healthy twin
    EVIDENCE = "evidence"  # built by hand, in tests/frozen
    TEST = "test"  # that lays outcomes side by side, where no evidence of one run can show it


@dataclass(frozen=True, kw_only=True)
class Shown:
    by: ShownBy
    name: str = ""  # of the program, or the test's file
    reason: str = ""  # why no program shows it


def by_program(name: str) -> Shown:
    return Shown(by=ShownBy.PROGRAM, name=name)


def by_evidence(reason: str) -> Shown:
    return Shown(by=ShownBy.EVIDENCE, reason=reason)


def by_test(name: str, reason: str) -> Shown:
    return Shown(by=ShownBy.TEST, name=name, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known about one cause."""

    code: str
    shown_by: tuple[Shown, ...]
    verdicts: tuple[Status, ...] = ()  # that it can be the cause of
    kinds: tuple[HangKind, ...] = ()  # of a HANG among them
    beside: bool = False  # it is also noted beside any verdict, a PASS included
    severity: Severity = Severity.CRITICAL  # beside a FAIL or HANG, where a warning is the most; its cause is critical
    unfailed: Severity = Severity.INFO  # in a run that neither failed nor hung
    blames: bool = True  # a run that ends so has a culprit
    between_ranks: bool = False  # ranks do not go together: one side is wrong, and somebody of the other side is not
    certain_by: tuple[EvidenceKind, ...] = ()  # of what a rule may go by; nothing else, however sure, makes it certain
    certain_unless: tuple[Caveat, ...] = ()  # besides the doubts that all causes share
    second_run: tuple[SecondRun, ...] | None = ()  # what tells more even where it is certain; None: no run tells more
    replay: Replay = Replay.NONE
    signatures: tuple[Pattern[str], ...] = ()  # torch's own words, where they alone tell the cause
    producer: Producer = Producer.RULE
    enters_tree: DecisionTreePolicy = DecisionTreePolicy.UNEXPLAINED
    criteria: str = ""  # settings with this prefix decide whether it is said at all
    reason_of: str = ""  # the cause of a run that has it for a reason, where it is certain itself

    @property
    def doubts(self) -> frozenset[Caveat]:
        """What must not be left open for it to be certain."""
        return frozenset((*OF_EVERY_CAUSE, *(BETWEEN_RANKS if self.between_ranks else ()), *self.certain_unless))


# What DDP says as the next forward pass begins, of gradients that it never got.
_UNFINISHED = re.compile(r"Expected to have finished reduction in the prior iteration")


class Cause(StrEnum):
    """The stable code of a finding, with its row. The order is that of docs/findings.md.

    torch raises plain RuntimeErrors for much of what it refuses, so that its words are the only mechanism; the
    signatures are the same in 2.11 and 2.13.
    """

    _value_: str
    row: Row

    def __new__(cls, row: Row) -> Cause:
        cause = str.__new__(cls, row.code)
        cause._value_ = row.code
        cause.row = row
        return cause

    def said_in(self, text: str) -> Match[str] | None:
        """Where one of its signatures stands in the text."""
        return next((found for one in self.row.signatures if (found := one.search(text))), None)

    RANK_CONDITIONAL_COLLECTIVE = Row(
        code="rank_conditional_collective",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("exit_destroyed_early"), by_program("fsdp_branch_skips")),
    )

    RANK0_ONLY_COLLECTIVE = Row(
        code="rank0_only_collective",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("fsdp_state_rank0"), by_program("groups_rank0_barrier")),
    )

    ROOT_MISMATCH = Row(
        code="root_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_broadcast_root"), by_program("groups_gather_root")),
    )

    COLLECTIVE_ORDER_MISMATCH = Row(
        code="collective_order_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_dict_order"), by_program("groups_wrong_lookup")),
    )

    SHAPE_MISMATCH = Row(
        code="shape_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("fsdp_width_differs"), by_program("groups_batch_smaller")),
    )

    DTYPE_MISMATCH = Row(
        code="dtype_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_dtype_autocast"),),
    )

    CROSS_GROUP_DEADLOCK = Row(
        code="cross_group_deadlock",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_opposite_order"),),
    )

    NO_SYNC_MISMATCH = Row(
        code="no_sync_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_accumulation_differs"), by_program("groups_no_sync_once")),
    )

    UNEVEN_INPUTS = Row(
        code="uneven_inputs",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("data_sampler_stops"), by_program("data_uneven_shards")),
    )

    SWALLOWED_EXCEPTION = Row(
        code="swallowed_exception",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        beside=True,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(
            by_program("data_error_swallowed"),
            by_program("data_loss_swallowed"),
            by_program("silent_batch_given_up"),
        ),
    )

    THREAD_DIED = Row(
        code="thread_died",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        shown_by=(by_program("thread_producer_died"),),
    )

    STARVED = Row(
        code="starved",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("proc_child_sleeps"),),
    )

    BLOCKED_IO = Row(
        code="blocked_io",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        shown_by=(by_program("backward_hook_reads_pipe"), by_program("io_fifo_no_writer")),
    )

    PIPE_FULL = Row(
        code="pipe_full",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("io_full_pipe_to_self"), by_program("proc_child_pipe_full")),
    )

    DATALOADER_WORKER_BLOCKED = Row(
        code="dataloader_worker_blocked",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("data_worker_lock"), by_program("data_worker_pipe")),
    )

    DATALOADER_WORKER_DIED = Row(
        code="dataloader_worker_died",
        verdicts=(Status.FAIL,),
        signatures=(
            re.compile(
                r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)"
                r" (is killed by signal: \w[\w ]*|exited unexpectedly with exit code -?\d+|exited unexpectedly)"
            ),
        ),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("data_worker_killed"),),
    )

    FORK_LOCK = Row(
        code="fork_lock",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.CLOSED,),
        certain_unless=(Caveat.LOCK_OF_ITS_OWN,),
        shown_by=(by_program("proc_fork_holds_lock"), by_program("proc_pool_fork_lock")),
    )

    RENDEZVOUS_MISSING_RANK = Row(
        code="rendezvous_missing_rank",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.RECORD, EvidenceKind.RAISED),
        shown_by=(by_program("rdzv_world_size"),),
    )

    GROUP_CREATION_SUBSET = Row(
        code="group_creation_subset",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_program("groups_new_subset"),),
    )

    P2P_UNMATCHED = Row(
        code="p2p_unmatched",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.CLOSED,),
        shown_by=(by_program("p2p_both_receive"), by_program("p2p_both_send")),
    )

    STORE_KEY_MISSING = Row(
        code="store_key_missing",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED, EvidenceKind.RAISED),
        certain_unless=(Caveat.WAITS_FOR_ANYBODY,),
        shown_by=(by_program("store_counter_short"), by_program("store_key_never_set")),
    )

    TRANSPORT = Row(
        code="transport",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        second_run=(SecondRun.OTHER_BACKEND, SecondRun.AGAIN),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("net_cut"),),
    )

    BACKWARD_FUNCTION_BLOCKED = Row(
        code="backward_function_blocked",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("backward_lock"),),
    )

    LOCK_CYCLE = Row(
        code="lock_cycle",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED,),
        certain_unless=(Caveat.LOST_WAKE_UP,),
        shown_by=(by_program("forward_lock"), by_program("groups_monitored_barrier")),
    )

    STOPPED_PROCESS = Row(
        code="stopped_process",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STOPPED,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_program("proc_stopped_child"), by_program("signal_stop_self")),
    )

    INFINITE_LOOP = Row(
        code="infinite_loop",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK,),
        certain_by=(EvidenceKind.SAMPLES,),
        certain_unless=(Caveat.LOOP_WITHOUT_A_BEAT,),
        shown_by=(
            by_program("thread_endless_forward"),
            by_program("data_worker_endless_loop"),
            by_program("thread_prefetcher_spins"),
        ),
    )

    LIVELOCK = Row(
        code="livelock",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK,),
        shown_by=(by_program("thread_poll_flag"), by_program("thread_retry_logs")),
    )

    POOL_WORKER_LOST = Row(
        code="pool_worker_lost",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        shown_by=(by_program("proc_pool_worker_killed"),),
    )

    SHUTDOWN_HANG = Row(
        code="shutdown_hang",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED,),
        shown_by=(by_program("exit_atexit_waits"), by_program("exit_executor_left")),
    )

    GIL_HELD_NATIVE = Row(
        code="gil_held_native",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.HOLDER,),
        shown_by=(by_program("thread_gil_in_c"),),
    )

    NATIVE_BUSY_LOOP = Row(
        code="native_busy_loop",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK,),
        certain_by=(EvidenceKind.SAMPLES,),
        shown_by=(by_program("thread_spin_lock"),),
    )

    RANK_ABSENT = Row(
        code="rank_absent",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        second_run=None,
        shown_by=(by_test("tests/core/test_aftermath.py", "of a job that nobody watched; a run of ours says more"),),
    )

    SLOW = Row(
        code="slow",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        criteria="limits.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.SAMPLES,),
        shown_by=(by_program("forward_slow_loop"),),
    )

    UNUSED_PARAMS = Row(
        code="unused_params",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_unused_branch"), by_program("ddp_unused_never")),
    )

    RANK_CONDITIONAL_UNUSED_PARAMS = Row(
        code="rank_conditional_unused_params",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,),
        certain_by=(EvidenceKind.RAISED, EvidenceKind.RECORD, EvidenceKind.REPAIRED),
        shown_by=(
            by_program("ddp_output_not_in_loss"),
            by_program("ddp_unused_at_once"),
            by_program("ddp_layer_dropped"),
        ),
    )

    REENTRANT_NO_GRAD_INPUT = Row(
        code="reentrant_no_grad_input",
        verdicts=(Status.FAIL,),
        beside=True,
        unfailed=Severity.WARNING,
        signatures=(_UNFINISHED,),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("gc_reentrant_first"), by_program("gc_reentrant_silent")),
    )

    READY_TWICE = Row(
        code="ready_twice",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(re.compile(r"Expected to mark a variable ready only once"),),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_ready_twice_shared"), by_program("gc_ready_twice_outside")),
    )

    STATIC_GRAPH_CHANGED = Row(
        code="static_graph_changed",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(re.compile(r"this is not compatible with static_graph set to True"),),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_static_graph_grows"), by_program("ddp_static_graph_shrinks")),
    )

    CHECKPOINT_RECOMPUTE_MISMATCH = Row(
        code="checkpoint_recompute_mismatch",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.CHECKPOINT_DEBUG,),
        signatures=(
            re.compile(
                r"torch\.utils\.checkpoint: (?:A different number of tensors was saved"
                r"|Recomputed values for the following|trying to save more tensors during recomputation)"
            ),
        ),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("gc_recompute_counts"), by_program("gc_recompute_shapes")),
    )

    INPLACE_MODIFICATION = Row(
        code="inplace_modification",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.ANOMALY,),
        signatures=(
            re.compile(r"modified by an inplace operation: \[\S+ \[(.*?)\]\], which is output \d+ of (\w+?),"),
        ),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("backward_inplace_add"), by_program("backward_inplace_mask")),
    )

    MODEL_MISMATCH = Row(
        code="model_mismatch",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(
            re.compile(
                r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+)"
                r" has inconsistent (\d+) params"
            ),
            re.compile(r"params\[(\d+)\] in this process with (sizes|strides) \[(.*?)\] appears not to match"),
        ),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_model_depth_differs"), by_program("ddp_model_width_differs")),
    )

    FIND_UNUSED_NEEDLESS = Row(
        code="find_unused_needless",
        beside=True,
        severity=Severity.WARNING,
        shown_by=(by_program("ddp_find_unused_needless"),),
    )

    GRADIENT_ORDER_DIFFERS = Row(
        code="gradient_order_differs",
        beside=True,
        severity=Severity.WARNING,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_evidence("only the traces of this project's model tell the order"),),
    )

    EXCEPTION = Row(
        code="exception",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.RAISED,),
        certain_unless=(Caveat.ENDED_IN_A_COLLECTIVE,),
        second_run=(SecondRun.ANOMALY,),
        shown_by=(by_program("backward_hook_raises"), by_program("backward_twice")),
    )

    HOST_OOM = Row(
        code="host_oom",
        verdicts=(Status.FAIL,),
        signatures=(  # torch's own, the C library's errno 12, and workers that found /dev/shm full.
            re.compile(r"DefaultCPUAllocator: can't allocate memory|\[Errno 12\]|Cannot allocate memory|bad_alloc"),
        ),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.RAISED, EvidenceKind.KERNEL),
        shown_by=(by_program("exit_memory_error"), by_program("exit_tensor_too_large")),
    )

    CUDA_OOM = Row(
        code="cuda_oom",
        verdicts=(Status.FAIL,),
        signatures=(  # The name of torch's class moves between modules; its text begins like this, on ROCm with HIP.
            re.compile(r"\b(?:CUDA|HIP) out of memory|CUDA error: out of memory"),
        ),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_evidence("memory of a GPU"),),
    )

    CUDA_ASSERT = Row(
        code="cuda_assert",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.LAUNCH_BLOCKING,),
        signatures=(re.compile(r"device-side assert"),),
        shown_by=(by_evidence("a kernel's assertion takes a GPU"),),
    )

    INFRA = Row(
        code="infra",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.NEVER,
        shown_by=(by_program("io_disk_full"), by_program("io_file_too_large")),
    )

    DISK_FULL = Row(
        code="disk_full",
        verdicts=(Status.FAIL, Status.ERROR),
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_resources.py", "no program of a test may fill a disk that others use"),),
    )

    EARLY_EXIT = Row(
        code="early_exit",
        verdicts=(Status.FAIL,),
        certain_by=(EvidenceKind.KERNEL,),
        certain_unless=(Caveat.ENDED_AS_IF_DONE,),
        shown_by=(by_program("exit_os_exit_zero"), by_program("exit_zero_early")),
    )

    BAD_EXIT = Row(
        code="bad_exit",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("exit_bad_option"), by_program("exit_three")),
    )

    KILLED = Row(
        code="killed",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("signal_kill_self"),),
    )

    SEGFAULT = Row(
        code="segfault",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("signal_bus"), by_program("signal_segfault")),
    )

    ABORTED = Row(
        code="aborted",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        certain_unless=(Caveat.ENDED_IN_A_COLLECTIVE,),
        shown_by=(by_program("signal_abort"),),
    )

    UNKNOWN = Row(
        code="unknown",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        enters_tree=DecisionTreePolicy.ALWAYS,
        shown_by=(by_evidence("a program that no rule explains would be a rule that is missing"),),
    )

    EXPECTATION_MISSED = Row(
        code="expectation_missed",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        producer=Producer.EXPECTATION,
        criteria="expect.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(
            by_test("tests/core/test_expectation.py", "a scenario announces the number, and the corpus has none"),
        ),
    )

    FLAKY = Row(
        code="flaky",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        producer=Producer.ATTEMPTS,
        enters_tree=DecisionTreePolicy.NEVER,
        shown_by=(by_program("flaky_exit_second_attempt"), by_program("flaky_hang_second_attempt")),
    )

    NO_GRADIENT = Row(
        code="no_gradient",
        verdicts=(Status.FAIL,),
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        signatures=(re.compile(r"does not require grad and does not have a grad_fn"),),
        certain_by=(EvidenceKind.FACT,),
        shown_by=(
            by_program("silent_no_gradient_detached"),
            by_program("silent_no_gradient_no_grad"),
            by_program("silent_no_gradient_masked"),
            by_program("silent_no_gradient_by_hand"),
            by_program("silent_no_gradient_summed"),
        ),
    )

    NAN = Row(
        code="nan",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=(SecondRun.ANOMALY,),
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_program("silent_nan_loss_one_rank"), by_program("silent_nan_root_of_zero")),
    )

    REPLICA_DIVERGENCE = Row(
        code="replica_divergence",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(
            by_program("silent_replicas_edited"),
            by_program("silent_replicas_extra_step"),
            by_program("silent_replicas_own_seed"),
        ),
    )

    SHARED_FILE = Row(
        code="shared_file",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_file_of_all"),),
    )

    UNINITIALISED_PARAMETERS = Row(
        code="uninitialised_parameters",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_parameters_unset"),),
    )

    UNWAITED_COLLECTIVE = Row(
        code="unwaited_collective",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_unwaited_reduce"),),
    )

    MEMORY_GROWTH = Row(
        code="memory_growth",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=(SecondRun.GROWTH,),
        shown_by=(by_program("silent_leak_cache"), by_program("silent_leak_graphs")),
    )

    INPUT_BOUND = Row(
        code="input_bound",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_input_bound"),),
    )

    GATE_COLLAPSE = Row(
        code="gate_collapse",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_evidence("only the model of this project has gates"),),
    )

    PER_TOKEN_NODES = Row(
        code="per_token_nodes",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        reason_of="slow",
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train counts the nodes of its graph"),),
    )

    QUADRATIC_COST = Row(
        code="quadratic_cost",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train tells what its graph keeps"),),
    )

    MEMORY_EXCESS = Row(
        code="memory_excess",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train tells what its shape needs"),),
    )

    IDLE_DEVICE = Row(
        code="idle_device",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_test("tests/core/test_resources.py", "two GPUs were never at hand: recorded values alone"),),
    )

    DIRTY_EXIT = Row(
        code="dirty_exit",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("silent_dirty_atexit"), by_program("silent_dirty_shared_memory")),
    )

    ORPHAN_PROCESS = Row(
        code="orphan_process",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_program("proc_orphan_left"),),
    )

    DEEPENED = Row(
        code="deepened",
        beside=True,
        severity=Severity.INFO,
        producer=Producer.ATTEMPTS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_test("tests/core/test_deepening.py", "a second run with one change"),),
    )

    SAME_PLACE = Row(
        code="same_place",
        beside=True,
        severity=Severity.INFO,
        producer=Producer.ATTEMPTS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_test("tests/core/test_same_place.py", "several attempts of one launch"),),
    )

    MISSING_NEED = Row(
        code="missing_need",
        verdicts=(Status.SKIP,),
        producer=Producer.NEEDS,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_outcome.py", "a machine that lacks something"),),
    )

    INTERRUPTED = Row(
        code="interrupted",
        verdicts=(Status.ERROR,),
        second_run=None,
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("Ctrl-C comes from outside the program"),),
    )

    STILL_RUNNING = Row(
        code=STILL_RUNNING,
        verdicts=(Status.ERROR,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("a job that is only looked at"),),
    )

    SUSPECTED = Row(
        code=SUSPECTED,
        verdicts=(Status.ERROR,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("a job that is only looked at"),),
    )

    INCONCLUSIVE = Row(
        code=INCONCLUSIVE,
        verdicts=(Status.ERROR,),
        second_run=None,
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_aftermath.py", "of a job that nobody watched, with too few files"),),
    )

    RETRACTED_HANG = Row(
        code="retracted_hang",
        beside=True,
        severity=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("what is observed and moves again after its proof"),),
    )

    HARNESS_ERROR = Row(
        code="harness_error",
        verdicts=(Status.ERROR,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("a defect of the harness itself"),),
    )


# What a verdict can come with, and so what a scenario can expect.
CAUSES_OF_VERDICTS = tuple(cause.value for cause in Cause if cause.row.verdicts)


_BY_CODE = {cause.value: cause.row for cause in Cause}


def row_of(code: str | None) -> Row:
    """Of a code that another version stored and this one does not know, the row of what is unknown."""
    return _BY_CODE.get(code or "", Cause.UNKNOWN.row)
