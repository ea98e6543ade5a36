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

    ALL_ARE_BLAMED = "all are blamed"
    A_RANK_STANDS_ELSEWHERE = "a rank stands elsewhere"
    A_RANK_IS_UNSEEN = "a rank is unseen"
    ANOTHER_FAILED_TOO = "another failed too"
    ENDED_IN_A_COLLECTIVE = "ended in a collective"
    NO_LINE_OF_THE_PROGRAM = "no line of the program"
    CAUGHT_SOMETHING = "caught something"
    WAITS_FOR_ANYBODY = "waits for anybody"
    LOST_WAKE_UP = "lost wake-up"
    LOCK_OF_ITS_OWN = "lock of its own"
    LOOP_WITHOUT_A_BEAT = "loop without a beat"
    ENDED_AS_IF_DONE = "ended as if done"


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
    means: str  # the three parts of its section in docs/findings.md
    proven_by: str
    remedy: str
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
    advice: str = ""  # where one belongs to the cause; else the rule gives it
    producer: Producer = Producer.RULE
    enters_tree: DecisionTreePolicy = DecisionTreePolicy.UNEXPLAINED
    criteria: str = ""  # settings with this prefix decide whether it is said at all
    reason_of: str = ""  # the cause of a run that has it for a reason, where it is certain itself
    as_reason: str = ""  # what is then said there
    verdict_means: str = ""  # for the reader, in place of what its status means

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
        means="""
        one rank left out a collective that the others called; afterwards a rank failed or waits for ever. With gloo it
        can end as an abort (FAIL) or as a closed wait (HANG); both have this cause.
        """,
        proven_by="""
        `rank<r>/calls.txt`, the collectives that the rank called, with line, step and size. The calls of all ranks are
        compared, and the first one that a rank passed over is named, with the counts per rank. For collectives below
        Python (DDP's buckets, FSDP) it is `step_ledger.txt`, which has the collectives of each optimizer step and rank,
        or `rank<r>/flight.json`, in which the ranks entered different collectives under one number. Then the claim
        names the ranks that differ from the most; of two it names both and says so. A rank that stands in a collective
        between its steps while another is in the next one may also have had no step left; the claim says both, as
        *likely*. So it does where a rank made no other call since and was ended from outside: it may not have come to
        this one yet. A rank that left within a step it never finished is an early_exit.
        """,
        remedy="""
        call the collective on every rank, in the same order. Move it out of the condition, or contribute zeros where
        there is nothing to add.
        """,
    )

    RANK0_ONLY_COLLECTIVE = Row(
        code="rank0_only_collective",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("fsdp_state_rank0"), by_program("groups_rank0_barrier")),
        advice=(
            "Move the collective out of `if rank == 0`: every member of the group has to make it, with the saving"
            " or printing alone left to one rank. A state dict that gathers, a barrier and a metric that reduces"
            " are collectives too."
        ),
        means="""
        one rank, mostly rank 0, called a collective that nobody else called: a barrier after saving, a metric that is
        reduced, a state dict that gathers its shards, under `if rank == 0`. The others went on to their next step.
        """,
        proven_by="""
        `rank<r>/calls.txt` and `rank<r>/flight.json`, as rank_conditional_collective. The condition on the rank around
        the call, or around a line that leads to it, decides where the source shows it. Without it the one of several
        ranks that is alone with the call is wrong; of two ranks it is said, as *likely*, of rank 0, and only of a call
        that no earlier step had, for else one rank skipped what both called before. Below Python the recorder shows a
        collective that no step before had, on a rank between steps.
        """,
        remedy="""
        move the collective out of the condition. Leave to one rank only the writing or printing.
        """,
    )

    ROOT_MISMATCH = Row(
        code="root_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_broadcast_root"), by_program("groups_gather_root")),
        advice=(
            "Decide on one rank who the root is and share it, or compute it from what all ranks have alike. The"
            " argument is a global rank, unless it is group_src or group_dst."
        ),
        means="""
        the ranks called one broadcast, reduce, gather or scatter with different roots (`src`, `dst`), so that each
        waits for another one.
        """,
        proven_by="""
        `rank<r>/calls.txt`, which has the root of each rank. The culprit is the rank that differs from the most.
        """,
        remedy="""
        decide on one rank and share the decision, or compute it from what all ranks have alike.
        """,
    )

    COLLECTIVE_ORDER_MISMATCH = Row(
        code="collective_order_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_dict_order"), by_program("groups_wrong_lookup")),
        means="""
        at the same point of the same step the ranks called different collectives of one group. gloo and NCCL pair calls
        by their order, so neither ends.
        """,
        proven_by="""
        `rank<r>/calls.txt`, with the line of each rank, and `rank<r>/flight.json`, with the number under which they
        were entered. The rank that departs from its own earlier steps, or from the most, is the culprit. Where it went
        on to what it usually calls later, and both calls are made from one line further up, that line goes through them
        in another order, or lacks an item: that is *likely*, and the place is that line.
        """,
        remedy="""
        call the same collectives in the same order on every rank: look for a branch, or for an iteration over a set or
        dict, that differs between ranks.
        """,
    )

    SHAPE_MISMATCH = Row(
        code="shape_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("fsdp_width_differs"), by_program("groups_batch_smaller")),
        advice=(
            "Pad or gather the sizes first, so that every rank passes the same shape and dtype. gloo ends the"
            " rank that receives too much, which is the victim; NCCL may go on with wrong numbers."
        ),
        means="""
        the ranks called one collective on tensors of different sizes, where the operation needs the same size on every
        rank. gloo ends the rank that receives too much, and torchrun then names that rank; it is the victim.
        """,
        proven_by="""
        `rank<r>/calls.txt`, with the elements of the call on each rank; below DDP or FSDP `rank<r>/flight.json`. The
        culprit is the rank that changed its size since the step before, or that gave one and the same size from that
        line each time before, or differs from the most; where neither tells, all are named. Operations that may be
        uneven (all_to_all, scatter, gather, objects) never count.
        """,
        remedy="""
        pad, or exchange the sizes first.
        """,
    )

    DTYPE_MISMATCH = Row(
        code="dtype_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_dtype_autocast"),),
        advice=(
            "Pad or gather the sizes first, so that every rank passes the same shape and dtype. gloo ends the"
            " rank that receives too much, which is the victim; NCCL may go on with wrong numbers."
        ),
        means="""
        as shape_mismatch, but the tensors have different types. NCCL may go on with wrong numbers.
        """,
        proven_by="""
        as shape_mismatch: the type of the call on each rank.
        """,
        remedy="""
        cast before the call on every rank; look for an autocast or a default dtype that only one rank has.
        """,
    )

    CROSS_GROUP_DEADLOCK = Row(
        code="cross_group_deadlock",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_opposite_order"),),
        advice=(
            "Enter the collectives of these groups in the same order on every rank. Where the order depends on"
            " data, do the work of one group to its end before any rank begins the other's."
        ),
        means="""
        each rank stands in a collective of one group and waits for a rank that stands in another group's: a ring. Both
        may stand on the same line, so stacks alone look like a slow network.
        """,
        proven_by="""
        `rank<r>/flight.json`: the open collective of each rank, and the members that have not entered it. The place is
        the line at which a rank that took another order than before parts from one that did not.
        """,
        remedy="""
        enter the collectives of these groups in the same order on every rank.
        """,
    )

    NO_SYNC_MISMATCH = Row(
        code="no_sync_mismatch",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("groups_accumulation_differs"), by_program("groups_no_sync_once")),
        means="""
        in one step a rank did not reduce its gradients, and the others did. Shapes are equal, so the next step's
        reduction is paired with it in silence; the run shows it only at its end. Gradients are wrong from that step on.
        """,
        proven_by="""
        `step_ledger.txt`: the collectives of each optimizer step and rank, from the board's step times and the
        recorder's. Only steps that every rank finished and remembers whole are compared (the newest 256 steps, and the
        newest 512 collectives beside those still open), and a difference that a later step makes up for does not count.
        Where every step of a rank holds more or fewer batches than on the others, it is *likely* that they accumulate
        unlike.
        """,
        remedy="""
        enter and leave no_sync in the same steps on every rank. Do not go on from a later checkpoint.
        """,
    )

    UNEVEN_INPUTS = Row(
        code="uneven_inputs",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.CALLS,
        certain_by=(EvidenceKind.REPAIRED,),
        shown_by=(by_program("data_sampler_stops"), by_program("data_uneven_shards")),
        advice=(
            "Give every rank the same number of batches: a DistributedSampler that pads, drop_last=True, or the"
            " context torch.distributed.algorithms.Join. If the data is even, look for a swallowed exception or a"
            " break."
        ),
        means="""
        a rank asked its DataLoader for another batch, got none and went on to something else, while others trained
        another step.
        """,
        proven_by="""
        `step_ledger.txt` and the rank's `calls.txt`: what it entered after its last step. The step is the one that the
        others are in, the first for which the rank had no batch.
        """,
        remedy="""
        a DistributedSampler that pads, `drop_last=True`, or `torch.distributed.algorithms.Join`. If the data is even,
        look for a swallowed exception or a break.
        """,
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
        advice=(
            "Look for an except that goes on, or a continue, around the step. Tell all ranks (an all_reduce of a flag)"
            " and leave the batch out on every one, or let the exception end the run."
        ),
        means="""
        an exception was raised in a training loop and went no further, and the job stands because of it. One rank gives
        up a batch and takes the next one; it comes to its end while the others have another step to do. Or it goes on
        without a call that the others make in that step. Where the ranks do so alike, or need not meet, nothing stands:
        the run passes, and has learnt from fewer batches than it took. That is noted beside the verdict, *likely*,
        where an exception left a whole model in training, a loss or a backward pass, and the next thing was another
        batch or a step. A pass that is tried again does not count, nor does a type of the program's own, what it raises
        by its own `raise`, or that memory ran out.
        """,
        proven_by="""
        `rank<r>/calls.txt` and the board: in one step the rank began again, as no other rank and no other step did.
        Where the exception left a module's forward, its type and line are known, and it is *certain*; else a `continue`
        looks the same, and it is *likely*. Beside a verdict `rank<r>/looks.jsonl`: type, line and how many batches.
        """,
        remedy="""
        let the exception end the process, or leave the batch out on every rank or on none: reduce a flag first.
        """,
    )

    THREAD_DIED = Row(
        code="thread_died",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        shown_by=(by_program("thread_producer_died"),),
        advice=(
            "A thread or child that raises only prints it: hand the exception to whoever waits for it (a future, a"
            " queue that carries errors), or end the process."
        ),
        means="""
        an exception ended a thread of a rank, or a child process. It was printed and the thread is gone, while the rank
        waits for what it would have brought.
        """,
        proven_by="""
        `rank<r>/stderr.log`, which has its traceback, and the stack of the waiting thread in `dumps/`. Another thread
        may have been meant, so it is *likely* at most.
        """,
        remedy="""
        hand the exception to whoever waits: a future, a queue that carries errors. Or end the process.
        """,
    )

    STARVED = Row(
        code="starved",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("proc_child_sleeps"),),
        advice="Find what the sleep waits for (a file, a lock, another job), and give it a limit.",
        means="""
        a rank sleeps until after the run's deadline, and the others wait for it.
        """,
        proven_by="""
        the rank's stack in `dumps/`, and the end of its sleep, read from the kernel without asking the rank.
        """,
        remedy="""
        find what the sleep waits for (a file, a lock, another job), and give it a limit.
        """,
    )

    BLOCKED_IO = Row(
        code="blocked_io",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        shown_by=(by_program("backward_hook_reads_pipe"), by_program("io_fifo_no_writer")),
        means="""
        a rank stands in a read or write, on a pipe, a socket or a file, waits for a lock on a file that a process
        outside the job holds, or for a child process; and no byte came or went for longer than `limits.open_wait_s`.
        Such a wait may still end; that is why the limit is long. A read of a pipe whose other end only the waiting
        processes hold can never end, and is proven at once.
        """,
        proven_by="""
        the rank's stack in `dumps/`, with the system call, what it waits on and its byte counters. The place is the
        line of the process below it, where that one waits for what nobody can end.
        """,
        remedy="""
        look at the other end: a pipe nobody writes to, a socket, a file system that does not answer.
        """,
    )

    PIPE_FULL = Row(
        code="pipe_full",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("io_full_pipe_to_self"), by_program("proc_child_pipe_full")),
        advice=(
            "Read what is written before waiting for the writer: `communicate()` in place of `wait()`, a thread"
            " that drains the pipe, a queue that is emptied before `join()`."
        ),
        means="""
        a rank, or a child that a rank waits for, writes to a pipe that is full, and everyone who holds the reading end
        waits as well. Nobody empties it.
        """,
        proven_by="""
        the stacks in `dumps/`, with the pipe's number and the processes that hold its other end.
        """,
        remedy="""
        read before waiting: `communicate()` in place of `wait()`, a thread that drains the pipe, a queue that is
        emptied before `join()`.
        """,
    )

    DATALOADER_WORKER_BLOCKED = Row(
        code="dataloader_worker_blocked",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("data_worker_lock"), by_program("data_worker_pipe")),
        advice=(
            "Open files, clients and locks inside the worker (worker_init_fn), not before the fork, or use"
            " multiprocessing_context='spawn'; give reads in the dataset a limit, and the loader a timeout."
        ),
        means="""
        a rank waits for a batch, and the worker of its DataLoader that makes it stands still: in a lock that was held
        when the worker was forked, a full pipe, stopped (proven at once), or in a read (after `limits.open_wait_s`).
        """,
        proven_by="""
        the stacks of the rank and of its workers in `dumps/`; the place is the worker's own line.
        """,
        remedy="""
        open files, clients and locks inside the worker, or use `multiprocessing_context="spawn"`. Give reads in the
        dataset a limit, and the DataLoader a `timeout`.
        """,
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
        advice=(
            "Look for what ended the worker: memory (the kernel's log, a control group's limit), /dev/shm, a native"
            " crash in the dataset. num_workers=0 runs the dataset in the rank, where the fault shows itself."
        ),
        means="""
        a worker of a rank's DataLoader was killed or left, and the rank raised as it waited for a batch. Where the
        kernel killed it for want of memory it is a host_oom, where the machine refused it something infra. An exception
        that the dataset raised is handed on by the worker, and is an exception.
        """,
        proven_by="""
        torch's message in `rank<r>/raised.json`, which names the worker's process and its signal. It comes up wherever
        the rank is at that moment, so no place is named.
        """,
        remedy="""
        look for what ended the worker: memory, `/dev/shm`, a native crash in the dataset. With `num_workers=0` the
        dataset runs in the rank, where the fault shows itself.
        """,
    )

    FORK_LOCK = Row(
        code="fork_lock",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.CLOSED,),
        certain_unless=(Caveat.LOCK_OF_ITS_OWN,),
        shown_by=(by_program("proc_fork_holds_lock"), by_program("proc_pool_fork_lock")),
        advice=(
            "Start child processes before threads and locks exist, or use the start method 'spawn' in place of 'fork'."
        ),
        means="""
        a rank waits for a child process, or for those workers of a pool that have a task, and it waits for a lock which
        no thread of the child holds. The lock was held in the parent at the moment of the fork; the child has a copy of
        it, and nobody to release it.
        """,
        proven_by="""
        the stacks of the rank and of the child in `dumps/`; the place is the child's line.
        """,
        remedy="""
        start child processes before threads and locks exist, or use the start method `spawn`.
        """,
    )

    RENDEZVOUS_MISSING_RANK = Row(
        code="rendezvous_missing_rank",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.RECORD, EvidenceKind.RAISED),
        shown_by=(by_program("rdzv_world_size"),),
        advice=(
            "Every rank must call init_process_group, and world_size must be the number of ranks that are"
            " started. Look at what the named rank does before it."
        ),
        means="""
        some rank never came to `init_process_group`, and the others wait for it, or gave up with an error that names
        the missing rank's key. A number outside the job (`world_size` too large) never comes.
        """,
        proven_by="""
        the stacks in `dumps/` and the calls in `rank<r>/calls.txt`; after an error, its text in `rank<r>/raised.json`.
        """,
        remedy="""
        look at what the named rank does before it, and compare `world_size` with the ranks that are started.
        """,
    )

    GROUP_CREATION_SUBSET = Row(
        code="group_creation_subset",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_program("groups_new_subset"),),
        advice=(
            "new_group must be called by every rank of the job in the same order, members or not. Move it out of"
            " the condition, or pass use_local_synchronization=True where only members call it."
        ),
        means="""
        `new_group` or one of its relatives was called by some ranks only. It needs every rank of the job, members or
        not, in the same order.
        """,
        proven_by="""
        the calls of each rank in `rank<r>/calls.txt`; the claim says what the absent rank stands in. That may be the
        making of a later group: it has another number there, so that all ranks wait, and the one that made fewer left
        one out.
        """,
        remedy="""
        move the call out of the condition, or pass `use_local_synchronization=True` where only members call it.
        """,
    )

    P2P_UNMATCHED = Row(
        code="p2p_unmatched",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        between_ranks=True,
        replay=Replay.PYTHON_CALLS,
        certain_by=(EvidenceKind.CLOSED,),
        shown_by=(by_program("p2p_both_receive"), by_program("p2p_both_send")),
        means="""
        a rank waits in a send or receive for a partner that waits for it in something else: both receive, or the
        partner is in a collective.
        """,
        proven_by="""
        the open call of each rank, with its partner, in `rank<r>/calls.txt`, and the stacks in `dumps/`. Where one of
        them departed from its own rounds before, it is the culprit, with the half that it left out, or with the line
        that has had another partner each time before.
        """,
        remedy="""
        pair each receive with a send, in the same order on both sides. Where both begin with the same half, let one
        begin with the other, or use `batch_isend_irecv`.
        """,
    )

    STORE_KEY_MISSING = Row(
        code="store_key_missing",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED, EvidenceKind.RAISED),
        certain_unless=(Caveat.WAITS_FOR_ANYBODY,),
        shown_by=(by_program("store_counter_short"), by_program("store_key_never_set")),
        advice=(
            "Let a rank set the key before it waits for anything itself, under exactly this name and prefix, and"
            " give the wait a timeout."
        ),
        means="""
        a rank waits for a key of the store, and every rank that could set it waits too; or it waited in vain, and gave
        up. Where the source shows who sets such a key, that line is named.
        """,
        proven_by="""
        the open call with its key in `rank<r>/calls.txt`, and the stacks of all ranks in `dumps/`.
        """,
        remedy="""
        set the key before waiting for anything, under the same name and prefix. Give the wait a timeout.
        """,
    )

    TRANSPORT = Row(
        code="transport",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        second_run=(SecondRun.OTHER_BACKEND, SecondRun.AGAIN),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("net_cut"),),
        advice=(
            "Look at the path between these addresses: the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), a"
            " firewall, the MTU, a switch. The program's collectives agree."
        ),
        means="""
        every rank is in the same collective, nothing differs between them, and it did not end within
        `limits.open_wait_s`. The kernel holds bytes for another rank that nobody acknowledges, and repeats them in
        vain. Of a job that nobody watched it is enough that all ranks gave up in the same collective; then it is
        *likely*, and one of them may have come too late.
        """,
        proven_by="""
        the connections in two snapshots in `dumps/`: addresses, unacknowledged bytes, retransmits. With both sides
        stuck it is *certain*.
        """,
        remedy="""
        look at the path between the two addresses: the interface, a firewall, the MTU, a switch.
        """,
    )

    BACKWARD_FUNCTION_BLOCKED = Row(
        code="backward_function_blocked",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("backward_lock"),),
        advice=(
            "Code that runs during backward (autograd functions, hooks) must not wait for what another rank or"
            " this same thread holds. Release the lock before backward, or use a timeout and fail."
        ),
        means="""
        a rank waits for a lock inside the backward pass, and no thread of its process is left that could release it.
        """,
        proven_by="""
        the rank's stack in `dumps/`: the wait stands below autograd's engine, the kernel says `futex` without a time
        limit, and every other thread waits too or is a library's own poller.
        """,
        remedy="""
        code that runs during backward (autograd functions, hooks) must not wait for what another rank or the same
        thread holds. Release the lock before backward, or give the wait a limit and fail.
        """,
    )

    LOCK_CYCLE = Row(
        code="lock_cycle",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED,),
        certain_unless=(Caveat.LOST_WAKE_UP,),
        shown_by=(by_program("forward_lock"), by_program("groups_monitored_barrier")),
        means="""
        the same wait for a lock, outside the backward pass: a lock, a condition, an event, a queue, a future, a barrier
        of threads, or the end of a thread that waits for one. Or a lock on a file whose holder is a rank that waits for
        this one. Of a thread that is joined the place is its own line.
        """,
        proven_by="""
        the rank's stack in `dumps/`, as above; of a file's lock the holder, by `/proc/locks`.
        """,
        remedy="""
        look for a lock taken twice by one thread, or for two locks taken in opposite order.
        """,
    )

    STOPPED_PROCESS = Row(
        code="stopped_process",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STOPPED,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_program("proc_stopped_child"), by_program("signal_stop_self")),
        means="""
        a rank, or a child process that a rank waits for, is stopped by a signal (state T): a debugger, Ctrl-Z, a
        foreign SIGSTOP.
        """,
        proven_by="""
        the state of the process in two snapshots, in `dumps/`.
        """,
        remedy="""
        find the sender: a scheduler that suspends, a debugger, a shell. `kill -CONT PID` resumes the process.
        """,
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
        advice="Give the loop an end that every rank reaches, and check the condition that should have ended it.",
        means="""
        a rank computes without end: the same one or two lines in 20 samples or more, over at least 60 s, and no mark
        and no finished step. The run is HANG, kind livelock. Of a longer body, or one that calls small functions, 60
        samples over twice that time have to show one function of the program, on at most 8 lines, and at most 16 below
        it. So it is of each process that a rank waits for and that computes, a worker of a DataLoader or of a pool,
        where it moves no byte, and of threads of the rank's own where its main thread waits for a lock, a queue or a
        result, and no other thread could end that; the rank that waits is blamed, and the place is the line that
        computes.
        """,
        proven_by="""
        the samples in `watch.jsonl` and the stacks in `dumps/`.
        """,
        remedy="""
        give the loop an end that every rank reaches, and check the condition that should have ended it.
        """,
    )

    LIVELOCK = Row(
        code="livelock",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK,),
        shown_by=(by_program("thread_poll_flag"), by_program("thread_retry_logs")),
        advice="Find who should bring what the loop looks for; give the loop a limit, and fail when it is met.",
        means="""
        a rank sleeps, looks for something and sleeps again on the same line, and what it looks for never comes. It
        moves, it may even write a line each time that it tries again, and no step is done. The run is HANG, kind
        livelock: at once where the loop looks at nothing but objects of its own process and no other thread of it can
        run, else after `limits.open_wait_s`, since somebody may still bring it.
        """,
        proven_by="""
        the samples in `watch.jsonl` and the snapshots in `dumps/`: one sleep after another on one line, with no mark,
        no connection that carries bytes and less than 64 KiB/s read or written. What the loop looks at is read from its
        source.
        """,
        remedy="""
        find who should bring what the loop looks for. Give the loop a limit, and fail when it is met.
        """,
    )

    POOL_WORKER_LOST = Row(
        code="pool_worker_lost",
        verdicts=(Status.HANG,),
        kinds=(HangKind.STARVED,),
        shown_by=(by_program("proc_pool_worker_killed"),),
        advice=(
            "multiprocessing.Pool starts a new worker and forgets the task. Look for what ended the worker"
            " (memory, a signal, os._exit); concurrent.futures.ProcessPoolExecutor raises BrokenProcessPool in its"
            " place."
        ),
        means="""
        a rank waits for a result of its `multiprocessing.Pool`, and every worker of the pool waits for work. The worker
        that had the task was killed; the pool starts another one and forgets the task.
        """,
        proven_by="""
        the stacks of the rank and of its workers in `dumps/`, after `limits.open_wait_s`.
        """,
        remedy="""
        look for what ended the worker: memory, a signal, `os._exit`. `concurrent.futures.ProcessPoolExecutor` raises
        `BrokenProcessPool` in its place.
        """,
    )

    SHUTDOWN_HANG = Row(
        code="shutdown_hang",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.CLOSED,),
        shown_by=(by_program("exit_atexit_waits"), by_program("exit_executor_left")),
        advice=(
            "End threads and executors before the program does (a sentinel in their queue, `shutdown()`,"
            " `daemon=True`); handlers at exit must not wait for what nobody does any more."
        ),
        means="""
        the program of a rank is over, and its process does not end: a thread that is no daemon, an executor's task, a
        handler at exit or `destroy_process_group` waits. Ranks that have left with 0 are not to blame then.
        """,
        proven_by="""
        the rank's stack in `dumps/`, whose main thread is in the interpreter's shutdown, and the mark `exit` on its
        board. The place is the line of the thread that is joined, where it is the only one.
        """,
        remedy="""
        end threads and executors before the program does. A handler at exit must not wait for what nobody does any
        more.
        """,
    )

    GIL_HELD_NATIVE = Row(
        code="gil_held_native",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK, HangKind.STARVED),
        certain_by=(EvidenceKind.HOLDER,),
        shown_by=(by_program("thread_gil_in_c"),),
        means="""
        a rank stands in a C function that keeps the interpreter's lock while it waits. No other Python thread of its
        process can run, so nothing in the process can end the wait. So it is, and *likely*, where the rank computes in
        a function of the interpreter itself that never returns, such as a search with a regular expression.
        """,
        proven_by="""
        the rank's stack in `dumps/`: the thread holds the lock, is not running, and its native frames name the
        function. They are asked for only then, since that stops the process for up to a second.
        """,
        remedy="""
        release the lock around what may wait (`ctypes.CDLL` instead of `PyDLL`, `Py_BEGIN_ALLOW_THREADS`, pybind11's
        `call_guard`), and give the wait a limit.
        """,
    )

    NATIVE_BUSY_LOOP = Row(
        code="native_busy_loop",
        verdicts=(Status.HANG,),
        kinds=(HangKind.LIVELOCK,),
        certain_by=(EvidenceKind.SAMPLES,),
        shown_by=(by_program("thread_spin_lock"),),
        advice=(
            "The Python line only calls it: look at the arguments of that call (a size, a tolerance, a lock it"
            " spins on), or repeat it alone with a native debugger."
        ),
        means="""
        as infinite_loop, but the time goes into a C function that one Python line has called and that does not return:
        it has given the interpreter's lock away, or keeps it so that no other thread of the process runs.
        """,
        proven_by="""
        the samples in `watch.jsonl`, and the native frames below the Python line in `dumps/`.
        """,
        remedy="""
        look at the arguments of that call: a size, a tolerance, a lock it spins on. Repeat it alone with a native
        debugger.
        """,
    )

    RANK_ABSENT = Row(
        code="rank_absent",
        verdicts=(Status.HANG,),
        kinds=(HangKind.DEADLOCK,),
        second_run=None,
        shown_by=(by_test("tests/core/test_aftermath.py", "of a job that nobody watched; a run of ours says more"),),
        advice=(
            "Look at what the named rank does before that call. Under `nsa-harness watch` the next one is told with the"
            " line where it stands."
        ),
        means="""
        of a job that nobody watched: its other ranks waited in a call for this one, until they gave up or were ended,
        and it never came. Why not the files do not say: it was slow, blocked elsewhere, or on another way.
        """,
        proven_by="""
        the dumps of those who waited, or what they said as they gave up; and the stack of this rank, or the last call
        that its flight recorder has. It is *likely* at most.
        """,
        remedy="""
        look at what that rank does before the call. `nsa-harness watch -- COMMAND` names the line of the next one.
        """,
    )

    SLOW = Row(
        code="slow",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        criteria="limits.",
        verdict_means="Slow, not stuck: it was still moving at its deadline.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.SAMPLES,),
        shown_by=(by_program("forward_slow_loop"),),
        means="""
        the run was still there at its deadline, and it is not proven to hang. It is FAIL, never HANG. The claim gives
        the steps done, the rate, how much later the rest would have ended where the program says how many steps it
        plans (`of_steps` in its heartbeat), and where the time goes: the loops, with the line of their `for` or `while`
        and their share of the samples, which are taken over the whole run. Ranks that all do the same have no culprit.
        Where nobody works, it names the rank that all others wait for. *Certain* it is only while one step follows the
        other, and with 30 samples or more.
        So it is, and *likely* at most, where the wait of the others in a collective ran out (the timeout of the process
        group) and the rank that had not come to it was still busy: the line is where it was seen last.
        """,
        proven_by="""
        `profile.txt`: each rank's lines by how often they were seen, and the autograd nodes of its first backward pass.
        The looks themselves are in `watch.jsonl`.
        """,
        remedy="""
        the advice goes by what was seen: computing (a Python loop over tokens or heads builds one autograd node a
        turn), a data loader, a sleep, or another wait. Raise `limits.deadline_s` if the work is meant to take long.
        """,
    )

    UNUSED_PARAMS = Row(
        code="unused_params",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(_UNFINISHED,),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_unused_branch"), by_program("ddp_unused_never")),
        advice=(
            "Let every parameter take part in the loss on every rank (add 0 * output.sum() for a skipped branch),"
            " freeze what is never used, or construct DDP with find_unused_parameters=True."
        ),
        means="""
        parameters took no part in the loss, on any rank. DDP waits for the gradient of each of its parameters; it finds
        out as the next forward pass begins, so the step that is named is the one before.
        """,
        proven_by="""
        DDP's message in `rank<r>/raised.json`. The probe puts names in place of its numbers, and the line of the user's
        own class that would use them: the first one in `forward` that reads the part of the model that was left out, or
        the one that made it, if nothing reads it.
        """,
        remedy="""
        let every parameter take part (add `0 * output.sum()` for a skipped branch), freeze what is never used, or
        construct DDP with `find_unused_parameters=True`.
        """,
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
        means="""
        some ranks left parameters out of the loss which took part in it on the others. Those wait in the reduction of
        that step, and fail when the first ones end.
        """,
        proven_by="""
        as unused_params; and by the boards: the others never finished that step. Where that cannot be told the finding
        is *likely*. Where the ranks wait for each other, by the modules that each went into in that step: the first in
        which they part, after a step in which all did the same, and the branch around the line that calls it.
        """,
        remedy="""
        as unused_params. Look for a branch that depends on the rank's own data: a batch without images, an expert
        without tokens.
        """,
    )

    REENTRANT_NO_GRAD_INPUT = Row(
        code="reentrant_no_grad_input",
        verdicts=(Status.FAIL,),
        beside=True,
        unfailed=Severity.WARNING,
        signatures=(_UNFINISHED,),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("gc_reentrant_first"), by_program("gc_reentrant_silent")),
        advice=(
            "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or call requires_grad_() on one of"
            " its inputs."
        ),
        means="""
        a reentrant checkpoint was given inputs of which none requires a gradient. What it computes then has none
        either, so its parameters never learn. Under DDP the next step fails; elsewhere nothing does, and it is a
        finding of a run that passed.
        """,
        proven_by="""
        the line on the rank's board, written as torch makes its own check, and the parameters without a gradient: DDP's
        message, or `rank<r>/looks.jsonl`. An evaluation without gradients alone is no finding.
        """,
        remedy="""
        `use_reentrant=False`, or `requires_grad_()` on the input.
        """,
    )

    READY_TWICE = Row(
        code="ready_twice",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(re.compile(r"Expected to mark a variable ready only once"),),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_ready_twice_shared"), by_program("gc_ready_twice_outside")),
        advice=(
            "A module is used by several reentrant checkpoints, or inside one and outside: pass"
            " use_reentrant=False, or construct DDP with static_graph=True."
        ),
        means="""
        the gradient of one parameter was computed twice in one backward pass of DDP. Almost always a module that
        several reentrant checkpoints share, or that is used inside one and outside.
        """,
        proven_by="""
        DDP's message in `rank<r>/raised.json`, which names the parameter. The line is the one that reads that part of
        the model, in the class that calls a checkpoint.
        """,
        remedy="""
        `use_reentrant=False`, or `static_graph=True` for DDP.
        """,
    )

    STATIC_GRAPH_CHANGED = Row(
        code="static_graph_changed",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.NAMES,),
        signatures=(re.compile(r"this is not compatible with static_graph set to True"),),
        certain_by=(EvidenceKind.RAISED,),
        shown_by=(by_program("ddp_static_graph_grows"), by_program("ddp_static_graph_shrinks")),
        advice=(
            "Use the same parameters in every step, or construct DDP without static_graph=True (with"
            " find_unused_parameters=True where a step may leave some out)."
        ),
        means="""
        DDP was promised `static_graph=True`, and a step used other parameters than the first one.
        """,
        proven_by="""
        DDP's message. Which parameters were left out stands in it; which were new is told by the modules that were
        called for the first time in that step.
        """,
        remedy="""
        use the same parameters in every step, or leave the promise out.
        """,
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
        advice=(
            "What is checkpointed may depend on its arguments alone: look for a counter, a global, a random"
            " branch or autocast that differs when it runs again. Run again with --deepen for the operation that"
            " differs."
        ),
        means="""
        what is checkpointed ran otherwise when it was computed once more for the backward pass: another number of
        tensors, or other shapes.
        """,
        proven_by="""
        torch's message in `rank<r>/raised.json`. The line is where the function begins that was computed again.
        """,
        remedy="""
        look there for a counter, a global, a random branch, autocast. `--deepen` names the operation that differs.
        """,
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
        means="""
        a tensor that an operation had saved for its backward pass was changed in place.
        """,
        proven_by="""
        autograd's message, which names the operation. If the user's code at hand has one in-place line on what that
        operation returned, or one at all, that is the line, as *probably*; else it is the line that called `backward`.
        """,
        remedy="""
        an operation that returns a new tensor, or a clone before. `--deepen` shows the forward line.
        """,
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
        advice=(
            "Build the model from the same configuration on every rank; look for what the rank, its data or a"
            " file of its own decides about layers and sizes."
        ),
        means="""
        DDP was constructed from models that differ between ranks, in the number of parameters or in a shape.
        """,
        proven_by="""
        what each rank said in `rank<r>/raised.json`. The ranks that differ from the most are the culprits; of two it
        cannot be told, and both are named as *likely*.
        """,
        remedy="""
        build the model from one configuration; look for what the rank, its data or a file of its own decides.
        """,
    )

    FIND_UNUSED_NEEDLESS = Row(
        code="find_unused_needless",
        beside=True,
        severity=Severity.WARNING,
        shown_by=(by_program("ddp_find_unused_needless"),),
        advice="Leave it out, unless a later step or another rank skips a part of the model.",
        means="""
        DDP was constructed with `find_unused_parameters=True` and found nothing unused in its first step. The search
        costs time in every step.
        """,
        proven_by="""
        torch's own warning in `rank<r>/stderr.log`. What a later step leaves out it cannot know.
        """,
        remedy="""
        leave it out, unless a later step or another rank skips a part of the model.
        """,
    )

    GRADIENT_ORDER_DIFFERS = Row(
        code="gradient_order_differs",
        beside=True,
        severity=Severity.WARNING,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_evidence("only the traces of this project's model tell the order"),),
        advice=(
            "The ranks computed their graphs in another order: look for a branch or an iteration over a set or"
            " dict that differs between ranks."
        ),
        means="""
        gradients arrived in another order on one rank than on the others. DDP keeps rank 0's order of buckets, so
        nothing fails of it; the ranks' graphs differ.
        """,
        proven_by="""
        `grad_order_rank<r>.jsonl`, which the program writes with its gradient trace on. Only what arrived on both ranks
        is compared; a change between steps that all ranks make is none. With the bucket trace on it also says whether
        DDP's buckets became ready in another order.
        """,
        remedy="""
        look for a branch, or an iteration over a set or dict, that differs between ranks.
        """,
    )

    EXCEPTION = Row(
        code="exception",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.RAISED,),
        certain_unless=(Caveat.ENDED_IN_A_COLLECTIVE,),
        second_run=(SecondRun.ANOMALY,),
        shown_by=(by_program("backward_hook_raises"), by_program("backward_twice")),
        advice="This is the first failure in time; what other ranks say about lost connections follows from it.",
        means="""
        a rank raised, and this is the first failure in time that is not the echo of another one. What a worker handed
        on, or what it was raised from, is told with its own line, and so is a child or thread that died before.
        """,
        proven_by="""
        `rank<r>/raised.json`, written by the probe in the rank; without it, the traceback in the rank's log.
        """,
        remedy="""
        start here. What other ranks say about lost connections follows from it.
        """,
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
        means="""
        a rank got no memory of the host: Python's `MemoryError`, torch's "can't allocate memory", or a SIGKILL by the
        kernel, of the rank or of a worker of its DataLoader.
        """,
        proven_by="""
        `rank<r>/raised.json`; of a SIGKILL the kernel's log, which names the process. Where the kernel only counted a
        kill in the control groups of the run, the claim is *likely*.
        """,
        remedy="""
        make smaller what the line allocates, look for a list that grows, or raise the limit that the claim gives.
        """,
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
        advice=(
            "The line asked last, not for most: compare peak_gpu_bytes of the ranks. Smaller batch or sequence,"
            " checkpointing, sharding; PYTORCH_ALLOC_CONF=expandable_segments:True where much is reserved and"
            " unused."
        ),
        means="""
        a rank ran out of GPU memory. The line is the one that asked last, not the one that took most.
        """,
        proven_by="""
        `rank<r>/raised.json`.
        """,
        remedy="""
        a smaller batch or sequence, checkpointing, sharding. Compare `peak_gpu_bytes` of the ranks in report.json.
        """,
    )

    CUDA_ASSERT = Row(
        code="cuda_assert",
        verdicts=(Status.FAIL,),
        second_run=(SecondRun.LAUNCH_BLOCKING,),
        signatures=(re.compile(r"device-side assert"),),
        shown_by=(by_evidence("a kernel's assertion takes a GPU"),),
        advice=(
            "Run it again with CUDA_LAUNCH_BLOCKING=1: then the line is the one that launched the kernel. Most"
            " often an index out of range: a label, a token, a position."
        ),
        means="""
        an assertion failed inside a kernel on the GPU. Kernels run behind the program's back: the line is where it was
        noticed, and the kernel was launched there or earlier. That is why it is never more than *likely*.
        """,
        proven_by="""
        `rank<r>/raised.json`, and the kernel's own line in `rank<r>/stderr.log`.
        """,
        remedy="""
        `CUDA_LAUNCH_BLOCKING=1` makes the line the right one. Most often an index is out of range.
        """,
    )

    INFRA = Row(
        code="infra",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.NEVER,
        shown_by=(by_program("io_disk_full"), by_program("io_file_too_large")),
        advice=(
            "Look at the machine first: `df -h`, `df -i`, `ulimit -a`, `ss -ltnp`, /dev/shm. If the limit is a"
            " fair one, look for what the program opens and never closes."
        ),
        means="""
        the machine refused what a rank asked for: no space or quota, no file descriptor, a port that is taken, a full
        /dev/shm, a read-only or stale file system, an address that cannot be reached.
        """,
        proven_by="""
        the error number in `rank<r>/raised.json`; of a launcher that started no rank, `output.log`. It is *likely*: the
        limit may be the machine's, or the program takes and never gives back.
        """,
        remedy="""
        `df -h`, `df -i`, `ulimit -a`, `ss -ltnp`. Where the limit is a fair one, look for what the program opens and
        never closes.
        """,
    )

    DISK_FULL = Row(
        code="disk_full",
        verdicts=(Status.FAIL, Status.ERROR),
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_resources.py", "no program of a test may fill a disk that others use"),),
        advice="Free space where the reports go (`df -h`, `quota`), or name another disk with --out.",
        means="""
        the disk that takes the run was full, or the quota used up, and nothing else says why the run failed or could
        not be judged: what a program, torchrun or the harness had to say went to that disk.
        """,
        proven_by="""
        the record `full` in `processes.jsonl`, which the guardian writes into room that was kept for it. It is
        *likely* of a FAIL: the exit itself says nothing.
        """,
        remedy="""
        free space where the reports go (`df -h`, `quota`), or name another disk with `--out`; then
        `nsa-harness run --resume` goes on.
        """,
    )

    EARLY_EXIT = Row(
        code="early_exit",
        verdicts=(Status.FAIL,),
        certain_by=(EvidenceKind.KERNEL,),
        certain_unless=(Caveat.ENDED_AS_IF_DONE,),
        shown_by=(by_program("exit_os_exit_zero"), by_program("exit_zero_early")),
        advice="Find the return, sys.exit or exhausted iterator that only this rank reaches.",
        means="""
        a rank ended with exit code 0 while the others still needed it.
        """,
        proven_by="""
        `processes.jsonl`, where the guardian notes the end of each process.
        """,
        remedy="""
        find the return, `sys.exit` or exhausted iterator that only this rank reaches.
        """,
    )

    BAD_EXIT = Row(
        code="bad_exit",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("exit_bad_option"), by_program("exit_three")),
        advice="The program chose to leave: read the end of the rank's stderr.log.",
        means="""
        a rank left with an exit code other than 0 and without an exception: `sys.exit`, argparse, `os._exit`.
        """,
        proven_by="""
        `rank<r>/stderr.log`; the claim quotes its last error line.
        """,
        remedy="""
        read the end of that file.
        """,
    )

    KILLED = Row(
        code="killed",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.KERNEL,),
        shown_by=(by_program("signal_kill_self"),),
        advice="Look for the sender: the kernel's out-of-memory killer (dmesg), a scheduler's limit, a colleague.",
        means="""
        SIGKILL or SIGTERM ended a rank or the launcher, and the harness did not send it. Where torchrun, another
        launcher or a scheduler says that it did, the claim names the sender, and no rank is blamed.
        """,
        proven_by="""
        `processes.jsonl`, and what launchers say in `output.log`. The claim names the last module the rank was in.
        """,
        remedy="""
        look for the sender: the kernel's out-of-memory killer (`dmesg`), a scheduler's limit, a colleague.
        """,
    )

    SEGFAULT = Row(
        code="segfault",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("signal_bus"), by_program("signal_segfault")),
        advice="The stack at death names the Python line; a native fault needs `py-spy --native` or a core file.",
        means="""
        SIGSEGV or SIGBUS ended a rank.
        """,
        proven_by="""
        `rank<r>/stacks.txt`, written by faulthandler as the process died; without it, `processes.jsonl`.
        """,
        remedy="""
        the stack names the Python line. The native fault needs `py-spy --native` or a core file.
        """,
    )

    ABORTED = Row(
        code="aborted",
        verdicts=(Status.FAIL,),
        enters_tree=DecisionTreePolicy.ALWAYS,
        certain_by=(EvidenceKind.ENDED,),
        certain_unless=(Caveat.ENDED_IN_A_COLLECTIVE,),
        shown_by=(by_program("signal_abort"),),
        advice="The stack at death names the Python line; a native fault needs `py-spy --native` or a core file.",
        means="""
        another fatal signal ended a rank, most often SIGABRT from native code.
        """,
        proven_by="""
        as for `segfault`.
        """,
        remedy="""
        as for `segfault`; the last lines of `rank<r>/stderr.log` often carry the native message.
        """,
    )

    UNKNOWN = Row(
        code="unknown",
        verdicts=(Status.FAIL, Status.HANG),
        kinds=(HangKind.DEADLOCK, HangKind.STARVED),
        enters_tree=DecisionTreePolicy.ALWAYS,
        shown_by=(by_evidence("a program that no rule explains would be a rule that is missing"),),
        advice="Read output.log and dumps/ from the earliest line on.",
        means="""
        no rule names the cause. The claim lists what was seen: failures, and what each root stands in.
        """,
        proven_by="""
        `output.log` and `dumps/`.
        """,
        remedy="""
        read both from the earliest line on. A pattern that a rule could name is worth an issue.
        """,
    )

    EXPECTATION_MISSED = Row(
        code="expectation_missed",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        producer=Producer.EXPECTATION,
        criteria="expect.",
        verdict_means="The program ended by itself and missed what was expected of it.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(
            by_test("tests/core/test_expectation.py", "a scenario announces the number, and the corpus has none"),
        ),
        advice="The run itself ended well. Correct the number in the scenario, or find what changed it.",
        means="""
        the run ended well, and a number in `expect` was not met or not reported. The verdict is FAIL.
        """,
        proven_by="""
        `spec.json`, which holds the expectation, and the numbers in the report.
        """,
        remedy="""
        correct the number in the scenario, or find what changed it.
        """,
    )

    FLAKY = Row(
        code="flaky",
        verdicts=(Status.FAIL,),
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=None,
        producer=Producer.ATTEMPTS,
        verdict_means="The same launch does not always end the same way; a single attempt proves nothing.",
        enters_tree=DecisionTreePolicy.NEVER,
        shown_by=(by_program("flaky_exit_second_attempt"), by_program("flaky_hang_second_attempt")),
        means="""
        attempts of one launch (the same `spec_hash`) did not all end with the same verdict. The attempt that counts
        becomes FAIL; every attempt stays in the report. SKIP and ERROR disagree with nothing.
        """,
        proven_by="""
        the attempts' own folders, `NAME/`, `NAME~2/` and so on, each with its verdict.
        """,
        remedy="""
        `--repeat=5` says how often. Believe no comparison with such a run before it always ends the same way.
        """,
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
        means="""
        parameters received no gradient in a traced step of `nsa.train`. In any other program: an optimizer holds them,
        their module was called, and at none of at least four looks did they have a gradient; that is *likely*, since an
        output may be left out of the loss on purpose. Frozen parameters do not count. Or every gradient that an
        optimizer was given was zero at each of at least four looks, in host memory. The same is asked of what each
        backward pass leaves in a model, so that a program which steps by hand is seen too, and a rank that has nothing
        of its own to bring to a sum over all; a parameter that then never has a gradient, though others of its model
        do, counts where no optimizer of torch's ever stepped and nothing keeps it out: its module runs with gradients
        and in training mode, and nobody writes its values. Noted beside the verdict, also of a PASS. It is the cause of
        a FAIL, and *likely*, where a backward pass began at a tensor that no parameter leads to. The place is the line
        that uses the whole part of the model that never learns.
        """,
        proven_by="""
        the `[GRAD-TRACE]` and `- MISSING:` lines in `traces.log`; else `rank<r>/looks.jsonl`.
        """,
        remedy="""
        frozen on purpose, or not reached by the loss. Under DDP the second kind needs `find_unused_parameters` or a
        term of zero.
        """,
    )

    NAN = Row(
        code="nan",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=(SecondRun.ANOMALY,),
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_program("silent_nan_loss_one_rank"), by_program("silent_nan_root_of_zero")),
        advice=(
            "Look at the loss of that step: a division, a logarithm or a root of zero, an overflow in half"
            " precision; trace.detect_anomaly or torch.autograd.set_detect_anomaly(True) names the operation."
        ),
        means="""
        parameters are NaN or infinite at the end, or the last three losses or more are. The rank whose loss broke first
        is named, with step and the line of its backward. Where a loss broke because the parameters had before it, or no
        loss was seen to break, it came out of a backward pass; under DDP which rank began is then not told, and with
        several ranks that is *likely* at most. A batch that was broken and skipped is none, nor is a parameter that was
        not finite before the first step. Only host memory is looked at; of a large tensor a sample.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: each of the first 16 optimizer steps, then eight in every doubling.
        """,
        remedy="""
        look at the loss of that step: a division, a logarithm or a root of zero, an overflow in half precision.
        `trace.detect_anomaly` or `torch.autograd.set_detect_anomaly(True)` names the operation.
        """,
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
        advice=(
            "DDP never compares parameters again, and reduces no gradient of a forward past it (its .module): change"
            " them on every rank alike, or broadcast them. Results from that step on are of several models."
        ),
        means="""
        the replicas of a model differ at the last look that all its ranks have: under DistributedDataParallel, or
        outside of it where all parameters were broadcast before the first step, or a step had changed them alike, or
        every gradient of the first step was summed over all ranks, although no two looks ever found them equal.
        Parameters are compared as DDP has made them equal, before a forward, and after an optimizer step; a rank that
        changed them between a step and the next forward, or stepped more often than it went backward, is named, or the
        ranks that are fewer. Of two that came out of a step unequal neither is. What is equal again later, differs by
        rounding only, belongs to FSDP, is a buffer or frozen, or has a communication hook of the program's own, does
        not count. Outside of DDP neither do models that were equal at the start alone (one seed), that become equal now
        and then (averaged), or differ at the very end alone; the finding is *likely* there.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: checksums, sizes and sums of the parameters, in at most 24 parts.
        """,
        remedy="""
        change parameters on every rank alike, or broadcast them after the change; reduce every gradient before a step.
        Results from that step on are of several models.
        """,
    )

    SHARED_FILE = Row(
        code="shared_file",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_file_of_all"),),
        advice=(
            "Let one rank write it, and others that read it wait for that at a barrier; or put the rank into the name."
        ),
        means="""
        several ranks opened one file to write it from its beginning (`open(..., "w")`, `torch.save`), and it is there
        at the end: the last one has won, or parts of several stand in it. What is appended to, empty (a lock), renamed
        or removed again, or on a device does not count. Always *likely*: they may have taken turns.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: the files, and the line that opened each first.
        """,
        remedy="""
        let one rank write it, or put the rank into the name.
        """,
    )

    UNINITIALISED_PARAMETERS = Row(
        code="uninitialised_parameters",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_parameters_unset"),),
        advice=(
            "Look for torch.empty, empty_like or to_empty behind the parameter, and give it values (torch.nn.init, or"
            " reset_parameters) before the first forward; under DDP one rank's garbage becomes everybody's."
        ),
        means="""
        a parameter held NaN, or a number above 1e20, as its first gradient came, before any step: that is what memory
        looks like which `torch.empty` gave out and nobody wrote. Infinities do not count, nor does a parameter that has
        no gradient. Always *likely*. Memory that happens to hold zeros or small numbers cannot be told from a choice;
        where it differs between ranks that reduce their gradients, that is `replica_divergence`.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: names, and the first such number. Only host memory is looked at; of a large tensor a
        sample.
        """,
        remedy="""
        give it values before the first forward: `torch.nn.init`, `reset_parameters`, or a checkpoint that has all keys.
        """,
    )

    UNWAITED_COLLECTIVE = Row(
        code="unwaited_collective",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_unwaited_reduce"),),
        advice=(
            "Keep the handle that async_op=True gives, and call its wait() before the first line that reads or writes"
            " the tensor."
        ),
        means="""
        a line of the program called a collective asynchronously, three times or more, and none of its handles was
        waited for or asked whether it is done, be it by a future or a poll. What it brings may be read before it has
        come, or be overwritten by it later. Only what brings this rank something counts: not `isend`, not a barrier,
        not what a root sends; nor what a library calls. Tensors on a device do not count, since a later wait of that
        group covers them. Always *likely*: nobody may read what was brought.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: the line, the operation and how many handles it was given.
        """,
        remedy="""
        keep the handle and call its `wait()` before the tensor is used.
        """,
    )

    MEMORY_GROWTH = Row(
        code="memory_growth",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        second_run=(SecondRun.GROWTH,),
        shown_by=(by_program("silent_leak_cache"), by_program("silent_leak_graphs")),
        advice=(
            "Look for what a step appends to and nothing empties: losses kept with their graph (use .item() or"
            " .detach()), caches without a bound, hooks registered in each step. Data that is cached for a first"
            " epoch looks the same until that ends."
        ),
        means="""
        memory of a process, or what torch has given out on its GPU, grew with the steps until the end: by 48 MiB and 15
        % or more over seven eighths of the run, and in its later half not much slower than before. What is mapped from
        files or shared does not count. Of 20 to 31 steps it is asked that memory grew by half, and at every look. It is
        *likely* at most: a cache that fills for a whole first epoch looks the same.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`; the slope is the median over all pairs of looks. With `--deepen` a second run counts what
        lives after steps 9 and 17, by the line that allocated it, and names the line that keeps most.
        """,
        remedy="""
        look for what a step appends to and nothing empties: losses kept with their graph, caches without a bound, hooks
        registered in each step.
        """,
    )

    INPUT_BOUND = Row(
        code="input_bound",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_program("silent_input_bound"),),
        advice=(
            "Give the DataLoader more workers (num_workers, with persistent_workers and prefetch_factor), or make an"
            " item cheaper to load: time the loader alone, in a loop without the model."
        ),
        means="""
        the main thread of a rank spent half of its time or more in waiting for a `DataLoader` of torch, 5 s or more, in
        the earlier half of its steps as in the later one; the first two steps and the first batch of an iterator, for
        which workers start, do not count. A run that passes with it would be faster with a faster loader. Under DDP the
        other ranks wait for this one in their collectives. It is *likely* at most. A loader that is no `DataLoader` of
        torch's is not seen.
        """,
        proven_by="""
        `rank<r>/looks.jsonl`: `waited_s` of `passed_s`, and the line of the longest wait.
        """,
        remedy="""
        more workers (`num_workers`, `persistent_workers`, `prefetch_factor`), or items that are cheaper to load.
        """,
    )

    GATE_COLLAPSE = Row(
        code="gate_collapse",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_evidence("only the model of this project has gates"),),
        advice=(
            "A branch that is shut gets no gradient and never opens again: look at the gate's initial bias and at"
            " the learning rate."
        ),
        means="""
        a gate of `nsa` is shut: its mean over the tokens is below 0.01, and 99 % of it below 0.01 or above 0.99.
        """,
        proven_by="""
        the newest step in `gate_health.csv`.
        """,
        remedy="""
        a branch that is shut gets no gradient and never opens again. Look at the gate's initial bias and at the
        learning rate.
        """,
    )

    PER_TOKEN_NODES = Row(
        code="per_token_nodes",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        reason_of="slow",
        as_reason="the program computes token by token",
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train counts the nodes of its graph"),),
        advice=(
            "Compute all tokens in one call: a batched matmul or attention with a mask, or a kernel. Until then run"
            " fewer tokens; more ranks, another backend or less checkpointing change nothing."
        ),
        means="""
        the autograd graph of a step has nodes for each token: four or more for each token and layer, and two thousand
        or more a layer, where a layer of this model has about two hundred whatever the length. A Python loop over
        tokens builds it. Forward and backward then take minutes at full CPU and an idle GPU, checkpointing doubles
        that, and every other rank waits: it looks like a hang, and is none.
        """,
        proven_by="""
        `step_cost.csv`: nsa.train counts the nodes after its first forward pass, before the backward pass begins,
        so that one step tells, also one that never ends.
        """,
        remedy="""
        compute all tokens in one call. `nsa-harness fit` says what more tokens would cost.
        """,
    )

    QUADRATIC_COST = Row(
        code="quadratic_cost",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train tells what its graph keeps"),),
        advice=(
            "Keep no scores of all tokens against all: scaled_dot_product_attention, or a kernel that goes by tiles,"
            " needs memory that grows with the tokens alone."
        ),
        means="""
        a step costs what grows with the square of the tokens. Of one run it is said of memory: half or more of what the
        graph keeps, and 16 MiB or more, are tensors with a row and a column for each token. Of a sweep it is said of
        its largest run, where the time of a step grows with an exponent of 1.5 or more, doubt included.
        """,
        proven_by="""
        `step_cost.csv` of a run with `trace.step_cost=true` (`square_bytes`); for a sweep its fit, in SUMMARY.md.
        """,
        remedy="""
        use an attention that keeps no scores. A length that equals a width of the model is not told apart: run another.
        """,
    )

    MEMORY_EXCESS = Row(
        code="memory_excess",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/end_to_end/test_step_costs.py", "only nsa.train tells what its shape needs"),),
        advice=(
            "Run it with trace.step_cost=true, which tells tensors that grow with the square of the tokens, and with"
            " trace.profile_memory=true, which names the operators that take most."
        ),
        means="""
        a step took four times the memory, or more, that its shape needs: parameters, their gradients, two moments of
        the optimizer, and activations of 32 times the width for each token and layer and four times the vocabulary for
        each token, all in float32. What the graph keeps counts where it was asked for (`trace.step_cost=true`), from 64
        MiB above that on, and is *certain*; else the memory of the first step, from 512 MiB above it on, which is
        *likely*: of a process on a CPU other things grow as well.
        """,
        proven_by="""
        `step_cost.csv`: `expected_bytes` beside `saved_bytes`, or `peak_bytes` less `begin_bytes`.
        """,
        remedy="""
        look for scores of all tokens against all, for a mask that was expanded, for activations that a loop keeps.
        """,
    )

    IDLE_DEVICE = Row(
        code="idle_device",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        shown_by=(by_test("tests/core/test_resources.py", "two GPUs were never at hand: recorded values alone"),),
        advice=(
            "Print torch.cuda.current_device() on each rank: call torch.cuda.set_device(LOCAL_RANK) before the first"
            " tensor, and look whether CUDA_VISIBLE_DEVICES leaves each rank its own GPU."
        ),
        means="""
        at every look a GPU of the node was at 0 % and held nothing of the run, while ranks of it worked on fewer GPUs
        than there are ranks. It is *likely* at most, and has been tested with recorded values alone, never on two GPUs.
        """,
        proven_by="""
        what nvidia-smi said at each look, in `dumps/`.
        """,
        remedy="""
        give each rank its own GPU. Where two ranks share one on purpose, this is none.
        """,
    )

    DIRTY_EXIT = Row(
        code="dirty_exit",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.ENDED,),
        shown_by=(by_program("silent_dirty_atexit"), by_program("silent_dirty_shared_memory")),
        advice=(
            "Close pools and queues, unlink shared segments, and call destroy_process_group before the program"
            " leaves; what runs at exit must not need what the program has closed."
        ),
        means="""
        every rank left with 0, and the interpreter or torch complained as it ended: a function called at exit raised,
        semaphores or shared memory were left to the resource tracker, NCCL's process group was never destroyed.
        Exceptions of threads and destructors while the program runs do not count.
        """,
        proven_by="""
        `rank<r>/stderr.log`.
        """,
        remedy="""
        close pools and queues, unlink shared segments, call `destroy_process_group`; what runs at exit must not need
        what the program has closed.
        """,
    )

    ORPHAN_PROCESS = Row(
        code="orphan_process",
        beside=True,
        severity=Severity.WARNING,
        unfailed=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_program("proc_orphan_left"),),
        advice="Join or end child processes before the program leaves.",
        means="""
        processes outlived the launcher, and the harness ended them, or could not: those are named with their owner and
        the reason. Noted beside the verdict.
        """,
        proven_by="""
        `processes.jsonl`.
        """,
        remedy="""
        join or end child processes before the program leaves.
        """,
    )

    DEEPENED = Row(
        code="deepened",
        beside=True,
        severity=Severity.INFO,
        producer=Producer.ATTEMPTS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_test("tests/core/test_deepening.py", "a second run with one change"),),
        means="""
        under `--deepen` a further launch with one change was made, and this is what it showed: the forward line behind
        a failing backward (anomaly detection), the first operation that checkpointing recomputed otherwise (its debug
        mode), the names of parameters (`TORCH_DISTRIBUTED_DEBUG=INFO`), the line that launched a kernel
        (`CUDA_LAUNCH_BLOCKING=1`), or how it ended over gloo, with vanilla attention, or unchanged with the same seed.
        Where the further launch failed in the same way, a place that it alone could name becomes the culprit's. It
        changes no verdict.
        """,
        proven_by="""
        the folder of that attempt, `NAME~2/` and so on; its `spec.json` holds what was changed.
        """,
        remedy="""
        start at the line or the parameters it names. What follows from a single pair of runs is *likely*, no more.
        """,
    )

    SAME_PLACE = Row(
        code="same_place",
        beside=True,
        severity=Severity.INFO,
        producer=Producer.ATTEMPTS,
        certain_by=(EvidenceKind.RECORD,),
        shown_by=(by_test("tests/core/test_same_place.py", "several attempts of one launch"),),
        advice="One line each time is a fault of that line or of what it waits for; several are a race before them.",
        means="""
        several attempts of one launch were made, and this says how many ended badly at one line, and where the others
        did. Noted at the attempt that counts.
        """,
        proven_by="""
        `verdict.json` of each attempt.
        """,
        remedy="""
        one line each time is a fault of that line, or of what it waits for. Several are a race before them.
        """,
    )

    MISSING_NEED = Row(
        code="missing_need",
        verdicts=(Status.SKIP,),
        producer=Producer.NEEDS,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_outcome.py", "a machine that lacks something"),),
        means="""
        the machine lacks what the scenario needs: GPUs, nccl, flash-attn. The verdict is SKIP.
        """,
        proven_by="""
        the reason says what is missing and what is there.
        """,
        remedy="""
        run it where the need is met. A need given on the command line (`needs.backend=nccl`) is exit code 2 in place of
        a SKIP.
        """,
    )

    INTERRUPTED = Row(
        code="interrupted",
        verdicts=(Status.ERROR,),
        second_run=None,
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("Ctrl-C comes from outside the program"),),
        advice="Run it again with the command below.",
        means="""
        Ctrl-C or TERM ended the run, or the harness died and its guardian ended it. The verdict is ERROR.
        """,
        proven_by="""
        the file `interrupted` in the attempt, where the guardian did it.
        """,
        remedy="""
        run it again with the command in the report.
        """,
    )

    STILL_RUNNING = Row(
        code=STILL_RUNNING,
        verdicts=(Status.ERROR,),
        verdict_means="It was only looked at, and it moves. Nobody has seen its end.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("a job that is only looked at"),),
        advice="Nothing to do; attach again when it goes quiet.",
        means="""
        `attach` looked at a job, and it moves (MOVING): marks, bytes or changing lines. Nobody has seen its end, so it
        is no PASS; the verdict is ERROR and the exit code 0.
        """,
        proven_by="""
        the samples in `watch.jsonl`.
        """,
        remedy="""
        nothing. Attach again when it goes quiet.
        """,
    )

    SUSPECTED = Row(
        code=SUSPECTED,
        verdicts=(Status.ERROR,),
        verdict_means="It was only looked at, and it did not move. That is no proof.",
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("a job that is only looked at"),),
        advice="Attach again with a longer --for; dumps/ shows where each rank stands.",
        means="""
        `attach` looked at a job, nothing moved, and it is not proven that nothing can (SUSPECT). The verdict is ERROR.
        """,
        proven_by="""
        the samples in `watch.jsonl` and the stacks in `dumps/`.
        """,
        remedy="""
        attach again with a longer `--for`: without marks a stall takes 20 s, an open wait five minutes.
        """,
    )

    INCONCLUSIVE = Row(
        code=INCONCLUSIVE,
        verdicts=(Status.ERROR,),
        verdict_means="Its files show neither a failure nor ranks that could not go on.",
        second_run=None,
        blames=False,
        enters_tree=DecisionTreePolicy.NEVER,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_test("tests/core/test_aftermath.py", "of a job that nobody watched, with too few files"),),
        advice="Add what is missing to what is read: the log of each rank, and a stack or recorder dump of each.",
        means="""
        `read` was given files that a job left, and they show neither a failure nor ranks that could not go on. What
        each rank stood in is told as far as it is known. The verdict is ERROR and the exit code 125.
        """,
        proven_by="""
        nothing is proven. The answer lists what is missing.
        """,
        remedy="""
        add the logs and dumps of the other ranks. `read` says how to get them next time.
        """,
    )

    RETRACTED_HANG = Row(
        code="retracted_hang",
        beside=True,
        severity=Severity.WARNING,
        certain_by=(EvidenceKind.FACT,),
        shown_by=(by_evidence("what is observed and moves again after its proof"),),
        advice="Something outside the job released it. Raise limits.stall_s beyond the pause if it is meant to be.",
        means="""
        a job under `watch` was proven to hang, was left alone, and moved again. Noted beside the verdict, which is that
        of its end.
        """,
        proven_by="""
        the records `proof` and `released` in `watch.jsonl`.
        """,
        remedy="""
        find what held it from outside. Raise `limits.stall_s` or `limits.open_wait_s` beyond the pause if it is meant.
        """,
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
        advice="Read test_execution.log; report this as a bug.",
        means="""
        the harness could not judge: the program did not start, a record is missing, or a fault of its own. The verdict
        is ERROR.
        """,
        proven_by="""
        `test_execution.log`, which holds the traceback where there is one.
        """,
        remedy="""
        read it. Where the program exists and starts by hand, report it as a bug.
        """,
    )


# What a verdict can come with, and so what a scenario can expect.
CAUSES_OF_VERDICTS = tuple(cause.value for cause in Cause if cause.row.verdicts)


_BY_CODE = {cause.value: cause.row for cause in Cause}


def row_of(code: str | None) -> Row:
    """Of a code that another version stored and this one does not know, the row of what is unknown."""
    return _BY_CODE.get(code or "", Cause.UNKNOWN.row)
