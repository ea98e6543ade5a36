"""What is told of ranks that nobody can ask any more: memory, what they do with a signal, how NCCL connected them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    ALL_REDUCE,
    ended,
    evidence,
    locked_in_backward,
    process,
    rank_evidence,
    rank_snapshot,
    spec,
    stalled,
)
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.commands.judge import judge_evidence
from nsa_harness.core.evidence.evidence import Evidence, RankSnapshot
from nsa_harness.core.evidence.health_samples import HealthSamples, MemorySample
from nsa_harness.core.evidence.host import (
    Gpu,
    MemoryAtEvent,
    NcclInfo,
    SentSignal,
    SignalMasks,
    read_nccl,
    sigterm_reaction,
)
from nsa_harness.core.outcome.outcome import signal_reactions
from nsa_harness.core.report import Outcome, Status
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.texts import words

NOTHING = SignalMasks(pending=0, blocked=0, ignored=0, caught=0)


def bits(*signals: signal.Signals) -> int:
    return sum(1 << (one - 1) for one in signals)


# What a rank does with a signal.


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"signals": NOTHING}, "SIGTERM ends it"),
        ({"signals": None}, ""),
        ({"signals": NOTHING, "state": "Z"}, ""),
        ({"signals": replace(NOTHING, blocked=bits(signal.SIGTERM))}, "it blocks SIGTERM: only SIGKILL ends it"),
        ({"signals": replace(NOTHING, ignored=bits(signal.SIGTERM))}, "it ignores SIGTERM: only SIGKILL ends it"),
        (
            {"signals": replace(NOTHING, caught=bits(signal.SIGTERM, signal.SIGINT))},
            "it handles SIGTERM itself, which in Python waits until the call that it is blocked in returns",
        ),
        (
            {"signals": replace(NOTHING, pending=bits(signal.SIGUSR1))},
            "SIGTERM ends it; sent and not taken yet: SIGUSR1",
        ),
        (
            {"signals": NOTHING, "state": "D"},
            "in state D, in which no signal reaches it, SIGKILL included, until its call of the kernel is over",
        ),
        ({"signals": NOTHING, "state": "T"}, "stopped: of all signals only SIGKILL and SIGCONT act"),
        ({"is_frozen": True}, "stopped: of all signals only SIGKILL and SIGCONT act"),
    ],
)
def test_what_a_process_does_with_a_signal_is_read_and_not_tried(changes: dict[str, Any], answer: str) -> None:
    assert sigterm_reaction(process(**changes)) == answer


@given(*(st.integers(0, (1 << 64) - 1) for _ in range(4)))
def test_any_masks_have_words(pending: int, blocked: int, ignored: int, caught: int) -> None:
    masks = SignalMasks(pending=pending, blocked=blocked, ignored=ignored, caught=caught)
    assert ("not taken yet" in sigterm_reaction(process(signals=masks))) is bool(pending)


def told(seen: Evidence) -> Outcome:
    return judge_evidence(spec(), seen, attempt=1, directory="a", artifacts=(), metrics={}, repeat="r")


def hang(**of_evidence: Any) -> Evidence:
    """Rank 1 holds a lock in its backward pass, rank 0 waits for it; both had 2 MB resident."""
    waits, locks = rank_snapshot(0, ALL_REDUCE), locked_in_backward(1)
    ranks = [
        replace(one, process=replace(one.process, signals=NOTHING, rss_bytes=2_000_000))
        for one in (waits, locks)
        if one.process
    ]
    seen = stalled(*ranks)
    assert told(seen).verdict.status is Status.HANG
    return replace(seen, **of_evidence)


def test_of_a_hang_it_is_told_what_each_rank_does_with_a_signal_and_which_ended_it() -> None:
    sent = [
        (101, "SIGKILL", "harness"),
        *((pid, "SIGTERM", who) for pid in (100, 101) for who in ("harness", "torchrun")),
    ]
    signals = tuple(SentSignal(pid=pid, rank=pid - 100, signal=name, sender=who, at_s=None) for pid, name, who in sent)
    outcome = told(hang(signals=signals, unkillable=()))
    assert outcome.signals == {
        0: "SIGTERM ends it; its stacks were read by py-spy; it ended at our SIGTERM",
        1: "SIGTERM ends it; its stacks were read by py-spy; our SIGTERM did not end it in time, and SIGKILL followed",
    }
    unseen = told(hang(signals=signals, unkillable=None)).signals
    assert unseen[0] == "SIGTERM ends it; its stacks were read by py-spy"
    same = replace(outcome, signals=dict.fromkeys((0, 1), "SIGTERM ends it"))
    assert dict(words.grounds(same))["signals"] == ("ranks 0, 1: SIGTERM ends it",)


def test_a_handler_that_wrote_stacks_has_answered_and_a_silent_rank_has_not() -> None:
    seen = hang()
    looks = tuple(
        replace(look, ranks=(_by_faulthandler(look.ranks[0]), replace(look.ranks[1], stacks=())))
        for look in seen.snapshots
    )
    judgement = judge(seen)
    assert dict(signal_reactions(replace(seen, snapshots=looks), judgement)) == {
        0: "SIGTERM ends it; faulthandler answered from its signal handler",
        1: "SIGTERM ends it; its stacks could not be read",
    }


def _by_faulthandler(seen: RankSnapshot) -> RankSnapshot:
    return replace(seen, stacks=tuple(replace(one, source="faulthandler") for one in seen.stacks))


def test_a_run_that_ended_by_itself_is_asked_for_no_signal() -> None:
    well = evidence(rank_evidence(0, exit=ended(0)), snapshots=hang().snapshots)
    assert told(well).signals == {}


# Memory.


def marked(moment: str, step: int, allocated: int | None, reserved: int | None) -> MemoryAtEvent:
    return MemoryAtEvent(
        moment=moment, step=step, rss_bytes=1_000_000, allocated_bytes=allocated, reserved_bytes=reserved
    )


def test_memory_at_the_hang_is_the_kernel_s_the_driver_s_and_the_rank_s_last_word() -> None:
    gpu = Gpu(
        index=0, name="", utilisation=1.0, used_bytes=None, total_bytes=None, ecc_errors=None,
        pids=(101,), used_by={101: 73_000_000_000},
    )  # fmt: skip
    seen = hang()
    marks = (
        marked("boot", 0, 298_000_000, 610_000_000),
        marked("dump", 2, 5, 6),
        marked("last", 3, 7_000_000, 9_000_000),
    )
    ranks = (seen.ranks[0], replace(seen.ranks[1], memory=marks))
    last = replace(seen.snapshots[-1], gpus=(gpu,))
    outcome = told(replace(seen, ranks=ranks, snapshots=(seen.snapshots[0], last)))
    assert [(row.rank, row.moment, row.step) for row in outcome.memory] == [
        (1, "boot", None),
        (1, "dump", 2),
        (0, "end", None),
        (1, "end", None),
    ]
    assert dict(words.grounds(outcome))["memory"] == (
        "at boot: rank 1 1 MB resident, 298 MB allocated of 610 MB reserved",
        "in the latest dump: rank 1 1 MB resident, 0 MB allocated of 0 MB reserved, step 2",
        "at the hang: rank 0 2 MB resident; rank 1 2 MB resident, 7 MB allocated of 9 MB reserved as of step 3, "
        "73.0 GB on its GPU, according to the driver",
    )


def test_of_a_program_that_writes_no_heartbeat_the_probe_has_seen_the_allocator() -> None:
    seen = hang()
    looks = HealthSamples(memory=(MemorySample(step=4, anonymous_bytes=1, gpu_bytes=3_000_000),))
    outcome = told(replace(seen, ranks=(replace(seen.ranks[0], health=looks), seen.ranks[1])))
    at_end = outcome.memory[0]
    assert (at_end.allocated_bytes, at_end.reserved_bytes, at_end.allocator_step) == (3_000_000, None, 4)


def test_of_many_ranks_those_that_use_most_are_told() -> None:
    outcome = told(hang())
    rows = tuple(replace(outcome.memory[0], rank=rank, rss_bytes=rank * 1_000_000) for rank in range(10))
    (line,) = words.memory(replace(outcome, memory=rows))
    assert line == (
        "at the hang: rank 6 6 MB resident; rank 7 7 MB resident; rank 8 8 MB resident; rank 9 9 MB resident; "
        "6 more ranks with less"
    )


def test_a_run_that_went_well_tells_memory_only_where_it_has_an_allocator() -> None:
    def of(allocated: int | None) -> list[str]:
        rank = rank_evidence(0, exit=ended(0), memory=(marked("boot", 0, allocated, allocated),))
        return list(words.memory(told(evidence(rank))))

    assert of(None) == []
    assert of(5_000_000) == ["at boot: rank 0 1 MB resident, 5 MB allocated of 5 MB reserved"]


# NCCL.

LOG = """\
box:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
box:71:71 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
box:71:90 [0] NCCL INFO NET/IB : No device found.
box:71:90 [0] NCCL INFO Using network Socket
box:71:90 [0] NCCL INFO ncclCommInitRankConfig comm 0x5581 rank 0 nranks 2 busId 1000 commId 0x9f - Init START
box:71:90 [0] NCCL INFO comm 0x5581 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0
box:71:91 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
box:71:91 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
box:71:91 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0
box:71:91 [0] NCCL INFO Connected all rings
box:71:90 [0] NCCL INFO 4 coll channels, 4 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer
box:71:90 [0] NCCL INFO ncclCommInitRankConfig comm 0x5581 rank 0 nranks 2 busId 1000 commId 0x9f - Init COMPLETE
"""


def test_what_nccl_says_as_it_connects_is_read() -> None:
    """The log is written by hand in the format of NCCL_DEBUG=INFO (NCCL's user guide), not taken from a run."""
    other = [line for line in LOG.replace("[0] NCCL", "[1] NCCL").splitlines() if "COMPLETE" not in line]
    other += ["box:72:99 [1] transport/nvls.cc:142 NCCL WARN Cuda failure 802 'system not yet initialized'"]
    info = read_nccl({0: LOG.splitlines(), 1: other, 2: ["step 1 loss 5.5", "NCCLX INFO"]})
    assert info == NcclInfo(
        version="2.27.5+cuda12.9",
        channels=4,
        p2p_channels=8,
        transports=("P2P/CUMEM", "NET/Socket"),
        network="Socket",
        logged_ranks=(0, 1),
        connected_ranks=(0,),
        warnings=("Cuda failure 802 'system not yet initialized'",),
    )
    assert info is not None
    assert list(words.nccl(info)) == [
        "version 2.27.5+cuda12.9",
        "4 channels for collectives, 8 for transfers",
        "transport P2P/CUMEM, NET/Socket",
        "network Socket",
        "rank 0 connected",
        "rank 1 started to connect but did not finish",
        "warning: Cuda failure 802 'system not yet initialized'",
    ]


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("h:1:2 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via P2P/IPC", "P2P/IPC"),
        ("h:1:2 [0] NCCL INFO Channel 03/0 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct"),
        ("h:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/0/GDRDMA", "NET/IB"),
    ],
)
def test_each_form_of_a_connection_names_its_transport(line: str, transport: str) -> None:
    """Forms of NCCL 2.10 to 2.27, written by hand after its source."""
    info = read_nccl({0: [line]})
    assert info is not None
    assert info.transports == (transport,)


def test_an_older_nccl_that_says_only_when_it_is_done_has_connected() -> None:
    """Written by hand: the line of NCCL 2.14, which has no Init START."""
    line = "h:1:2 [0] NCCL INFO comm 0x7f rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE"
    info = read_nccl({0: [line]})
    assert info is not None
    assert (info.connected_ranks, info.version, list(words.nccl(info))) == ((0,), None, ["rank 0 connected"])


@given(st.lists(st.text(max_size=60) | st.sampled_from(LOG.splitlines()), max_size=20))
def test_no_log_breaks_the_reader(lines: list[str]) -> None:
    info = read_nccl({0: lines})
    assert info is None or set(info.connected_ranks) <= set(info.logged_ranks) == {0}


def test_without_a_word_of_nccl_nothing_is_told() -> None:
    assert read_nccl({0: ["step 1"], 1: []}) is None
    assert "NCCL" not in dict(words.grounds(told(hang())))
