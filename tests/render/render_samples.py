"""Reports to render: one of each verdict, and one that attacks its readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsa_harness.core.comparison.decisions import with_decisions
from nsa_harness.core.comparison.plan_file import read_stored_plan
from nsa_harness.core.report import (
    Artifact,
    CallStack,
    CollectiveRef,
    Culprit,
    Divergence,
    EnteredCall,
    Finding,
    HangKind,
    MachineFacts,
    NamedValue,
    Outcome,
    Place,
    RankStatus,
    RankSummary,
    RanksValue,
    Report,
    SpecSummary,
    Status,
    Timing,
    Trouble,
    Usage,
    Verdict,
)
from nsa_harness.supervisor.launch.scenario_files import shipped_plan

MACHINE = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")

PASSED = Outcome(
    spec=SpecSummary(
        scenario="ddp_onestep",
        about="One DDP step with every trace on",
        spec_hash="9c1e",
        subject="shape ci (4 layers, dim 128, T 256, fp32)",
        ranks=2,
        backend="gloo",
        notes=("CPU form, chosen because this machine has no GPU",),
        not_covered=("nccl", "bf16", "flash-attn"),
    ),
    attempt=1,
    final=True,
    verdict=Verdict(status=Status.PASS, kind=None, cause=None, summary="every rank exited 0 and met what was expected"),
    expected=True,
    flaky=False,
    phase="exit",
    culprit=None,
    victims=(),
    last_step={0: 1, 1: 1},
    exit_codes={0: 0, 1: 0},
    findings=(),
    trouble=(),
    timing=Timing(launch_s=2.9, wall_s=4.6, no_progress_s=0.07, detected_s=None, teardown_s=0.3),
    usage=Usage(peak_rss_bytes=412_000_000, peak_gpu_bytes=None, tokens_per_s=731.4),
    dir="ddp_onestep",
    passed_checks=("losses finite", "gradients equal on all ranks", "41 of 41 collectives matched"),
    ruled_out_causes=(),
    rank_statuses=(),
    rank_summaries=(
        RankSummary(
            rank=0,
            loss=5.5479,
            gradients="67 of 67",
            buckets="2 · 0.9 M fp32",
            longest_gap_s=0.06,
            peak_rss_bytes=412_000_000,
        ),
        RankSummary(
            rank=1,
            loss=5.5512,
            gradients="67 of 67",
            buckets="2 · 0.9 M fp32",
            longest_gap_s=0.07,
            peak_rss_bytes=410_000_000,
        ),
    ),
    metrics={"loss_first": 5.5512, "loss_last": 5.5479, "steps": 1.0},
    artifacts=(
        Artifact(path="output.log", count=38, absent=None),
        Artifact(path="traces.log", count=71, absent=None),
        Artifact(path="k_stats.csv", count=None, absent="the sel branch was not reached"),
    ),
    proof_reason=None,
    ending_text="by itself, no process left",
    repeat_command="nsa-harness run reports/latest/ddp_onestep/spec.json",
    next_command="nsa-harness run -t plan",
)

PLACE = Place(
    file="nsa/model.py",
    line=212,
    function="Block.forward",
    module="blocks.3.attn.sel",
    layer=3,
    parameter=None,
    text="        if selected.any():\n            dist.all_reduce(usage)",
)

STACKS = (
    CallStack(
        ranks=(1,),
        of="",
        frames=(
            Place(file="nsa/ckpt.py", line=8, function="save_checkpoint", text="dist.barrier()"),
            Place(file="nsa/train.py", line=41, function="main", text="save_checkpoint(model)"),
        ),
        innermost="barrier",
        library=5,
        around=Place(
            file="nsa/ckpt.py",
            line=9,
            function="save_checkpoint",
            text="def save_checkpoint(model):\n    dist.barrier()\n    torch.save(model.state_dict(), PATH)",
        ),
        proof="branch_sel_only/dumps/rank1.txt",
    ),
    CallStack(
        ranks=(0,),
        of="",
        frames=(PLACE, Place(file="nsa/train.py", line=36, function="main", text="loss.backward()")),
        innermost="",
        library=0,
        around=None,
        proof=None,
    ),
)

_REDUCED = EnteredCall(
    op="all_reduce", seq=13, step=1, place=None, elements=272, dtype="float32", peer=None, inside=False
)
DIVERGENCE = Divergence(
    group="dp",
    ranks=((1,), (0,)),
    rows=(
        (_REDUCED, _REDUCED),
        (
            replace(_REDUCED, op="barrier", seq=14, place=STACKS[0].frames[0], elements=0, dtype="", inside=True),
            replace(_REDUCED, seq=14, place=PLACE, inside=True),
        ),
    ),
    shared=1,
)

VALUES = (
    NamedValue(
        name="selected.count",
        file="nsa/model.py",
        function="forward",
        line=211,
        decides=True,
        values=(RanksValue(ranks=(0,), value="3"), RanksValue(ranks=(1,), value="0")),
    ),
    NamedValue(
        name="self.least",
        file="nsa/model.py",
        function="forward",
        line=211,
        decides=True,
        values=(RanksValue(ranks=(0, 1), value="1"),),
    ),
    NamedValue(
        name="mode",
        file="nsa/train.py",
        function="main",
        line=None,
        decides=False,
        values=(RanksValue(ranks=(1,), value="'eval'"),),
    ),
)

DEADLOCK = replace(
    PASSED,
    spec=replace(
        PASSED.spec, scenario="branch_sel_only", about="Only the selection branch is open", spec_hash="77aa", notes=()
    ),
    verdict=Verdict(
        status=Status.HANG,
        kind=HangKind.DEADLOCK,
        cause="rank_conditional_collective",
        summary="rank 1 skipped all_reduce #14 (group dp) and waits in barrier #14; rank 0 waits for it",
    ),
    expected=False,
    phase="forward",
    culprit=Culprit(ranks=(1,), step=1, collective=CollectiveRef(group="dp", seq=14, op="all_reduce"), place=PLACE),
    victims=(0,),
    exit_codes={0: None, 1: None},
    findings=(
        Finding(
            code="rank_conditional_collective",
            claim="all_reduce at nsa/model.py:212 ran 4 times on rank 0 and 3 times on rank 1 in step 1",
            ranks=(1,),
            place=PLACE,
            confidence=0.95,
            proof=("branch_sel_only/dumps/rank1.txt:8", "branch_sel_only/dumps/flight.json"),
            advice="call it on every rank: reduce zeros when nothing is selected",
            left_open=("rank 0 called it where nobody else does",),
        ),
        Finding(
            code="memory_growth",
            claim="rank 0 holds 9.1 GB for a model of 0.9 M parameters",
            ranks=(0,),
            place=None,
            confidence=0.75,
            proof=("branch_sel_only/heartbeat_rank0.jsonl",),
            advice="run the same scenario with model.seq_len=128 and compare",
        ),
    ),
    trouble=(Trouble(what="native stack", why="ptrace is not permitted here (kernel.yama.ptrace_scope = 2)", rank=1),),
    timing=Timing(launch_s=2.8, wall_s=14.2, no_progress_s=5.2, detected_s=5.2, teardown_s=0.4),
    usage=Usage(peak_rss_bytes=9_100_000_000, peak_gpu_bytes=None, tokens_per_s=None),
    dir="branch_sel_only",
    passed_checks=("42 collectives compared", "both batches arrived"),
    ruled_out_causes=("slow", "network (0 retransmits)", "data (both batches arrived)"),
    rank_statuses=(
        RankStatus(rank=0, blocked_in="all_reduce #14", waits_for="rank 1", no_progress_s=5.2, is_culprit=False),
        RankStatus(rank=1, blocked_in="barrier #14", waits_for="rank 0", no_progress_s=5.1, is_culprit=True),
    ),
    rank_summaries=(),
    metrics={},
    last_agreed="all_reduce at nsa/model.py:212 in step 1",
    proof_reason="two ranks wait, and nobody is left to end that;"
    " no progress, CPU time or I/O in two samples 3 s apart",
    ending_text="TERM, 0.4 s, no process left; torch alone would wait 30 min",
    repeat_command="nsa-harness run reports/latest/branch_sel_only/spec.json",
    next_command="nsa-harness bisect branch_sel_only --layers",
    stacks=STACKS,
    divergence=DIVERGENCE,
    values=VALUES,
)

LIVELOCK = replace(
    DEADLOCK,
    spec=replace(
        DEADLOCK.spec,
        scenario="gc_bisect_layers_0_5",
        about="Gradient checkpointing in layers 0-5 [0:6]",
        spec_hash="1b2c",
    ),
    verdict=Verdict(
        status=Status.HANG,
        kind=HangKind.LIVELOCK,
        cause="infinite_loop",
        summary="rank 0 burns CPU at one line for 61 s and finishes nothing; rank 1 waits for it",
    ),
    phase="backward",
    culprit=Culprit(ranks=(0,), step=2, collective=None, place=replace(PLACE, line=9, text="while not done.is_set():")),
    victims=(1,),
    last_step={0: 2, 1: 3},
    exit_codes={0: None, 1: -6},
    findings=(),
    trouble=(),
    dir="gc_bisect_layers_0_5",
    rank_statuses=(
        RankStatus(rank=0, blocked_in="nsa/model.py:9", waits_for="nothing", no_progress_s=61.0, is_culprit=True),
        RankStatus(rank=1, blocked_in="all_reduce #77", waits_for="rank 0", no_progress_s=60.4, is_culprit=False),
    ),
    proof_reason="20 of 20 samples show the same leaf line; no mark in 61 s, the longest step took 0.4 s",
    stacks=(),
    divergence=None,
    values=(),
    repeat_command="nsa-harness run reports/latest/gc_bisect_layers_0_5/spec.json",
    next_command=None,
)

FAILED = replace(
    PASSED,
    spec=replace(
        PASSED.spec,
        scenario="gc_baseline_full",
        about="Gradient checkpointing in all layers",
        spec_hash="ab12",
        notes=(),
    ),
    verdict=Verdict(
        status=Status.FAIL,
        kind=None,
        cause="ready_twice",
        summary="rank 0 raised RuntimeError: Expected to mark a variable ready only once",
    ),
    expected=False,
    phase="backward",
    culprit=Culprit(ranks=(0,), step=1, collective=None, place=replace(PLACE, text=None, parameter="blocks.3.w_q")),
    victims=(1,),
    last_step={0: 1, 1: None},
    exit_codes={0: 1, 1: -15},
    findings=(
        Finding(
            code="ready_twice",
            claim="reentrant gradient checkpointing runs the backward of layer 3 twice under DDP",
            ranks=(0,),
            place=None,
            confidence=0.5,
            proof=("gc_baseline_full/output.log:112",),
            advice="set gc.mode=non_reentrant",
        ),
    ),
    dir="gc_baseline_full",
    passed_checks=("41 of 41 collectives matched",),
    rank_summaries=(
        RankSummary(rank=0, loss=float("nan"), gradients=None, buckets=None, longest_gap_s=None, peak_rss_bytes=None),
    ),
    metrics={"loss_first": float("nan")},
    ending_text="rank 1 by torchrun, no process left",
    repeat_command="nsa-harness run reports/latest/gc_baseline_full/spec.json",
    next_command=None,
)

SKIPPED = replace(
    PASSED,
    spec=replace(
        PASSED.spec,
        scenario="ddp_nccl",
        about="DDP over NCCL",
        spec_hash="cd34",
        backend="nccl",
        notes=(),
        not_covered=(),
    ),
    verdict=Verdict(status=Status.SKIP, kind=None, cause="missing_need", summary="needs 2 GPUs, this machine has none"),
    last_step={},
    exit_codes={},
    timing=Timing(launch_s=None, wall_s=0.0, no_progress_s=None, detected_s=None, teardown_s=None),
    usage=Usage(peak_rss_bytes=None, peak_gpu_bytes=None, tokens_per_s=None),
    dir="ddp_nccl",
    phase=None,
    passed_checks=(),
    rank_summaries=(),
    metrics={},
    artifacts=(),
    ending_text="",
    repeat_command="nsa-harness run ddp_nccl",
    next_command=None,
)

ERRED = replace(
    SKIPPED,
    spec=replace(SKIPPED.spec, scenario="fsdp", about="FSDP2", spec_hash="ef56", backend="gloo"),
    verdict=Verdict(
        status=Status.ERROR, kind=None, cause="infra", summary="torchrun could not be started: No space left on device"
    ),
    expected=False,
    trouble=(Trouble(what="progress boards", why="/dev/shm is full"),),
    dir="fsdp",
    ending_text="never started",
    repeat_command="nsa-harness run fsdp",
)

FLAKY_FIRST = replace(
    DEADLOCK,
    spec=replace(DEADLOCK.spec, scenario="ddp_gloo", spec_hash="5566"),
    final=False,
    flaky=True,
    dir="ddp_gloo",
    repeat_command="nsa-harness run reports/latest/ddp_gloo/spec.json",
)
FLAKY_SECOND = replace(
    PASSED,
    spec=replace(PASSED.spec, scenario="ddp_gloo", spec_hash="5566"),
    attempt=2,
    flaky=True,
    expected=False,
    verdict=Verdict(status=Status.FAIL, kind=None, cause="flaky", summary="attempt 1 hung, attempt 2 passed"),
    dir="ddp_gloo~2",
    repeat_command="nsa-harness run reports/latest/ddp_gloo~2/spec.json",
)

AGREED = read_stored_plan(shipped_plan()).plan


def judged(report: Report) -> Report:
    """With what its runs say to the plan that ships."""
    return with_decisions(report, AGREED)


MIXED = judged(
    Report(
        run_id="20261121T101500-3f2a",
        harness="0.1.0",
        machine=MACHINE,
        command="nsa-harness run -t plan --retries 1",
        interrupted=False,
        outcomes=(PASSED, DEADLOCK, LIVELOCK, FAILED, SKIPPED, ERRED, FLAKY_FIRST, FLAKY_SECOND),
    )
)


def planned(name: str, *settings: tuple[str, str], like: Outcome = PASSED, **of_spec: Any) -> Outcome:
    """A run of a plan: what it was set to, and which sample it ended like."""
    return replace(
        like,
        spec=replace(
            like.spec,
            scenario=name,
            settings=tuple(sorted(settings)),
            criteria=(("expect.verdict", "PASS"), ("limits.deadline_s", "600")),
            **{"device": "cpu", **of_spec},
        ),
        dir=name,
        missing_gradients=() if like is PASSED else None,
    )


_ALONE = (("parallel.wrapper", "none"), ("run.ranks", "1"))
_DEEP = (("model.layers", "12"), *_ALONE)
SICK_PLAN = judged(
    replace(
        MIXED,
        command="nsa-harness run -t plan",
        outcomes=(
            planned("ddp_onestep", like=DEADLOCK),
            planned("ddp_gloo", ("needs.backend", "gloo"), like=DEADLOCK),
            planned("ddp_nccl", ("needs.backend", "nccl"), like=SKIPPED, backend="", device=""),
            planned("branch_cmp_only", ("model.branch", "cmp")),
            planned("branch_sel_only", ("model.branch", "sel"), like=DEADLOCK),
            planned("branch_win_only", ("model.branch", "win")),
            planned("ddp_static_graph", ("parallel.static_graph", "true"), like=DEADLOCK),
            planned("gc_baseline_full", ("gc.layers", "all"), *_ALONE, ranks=1),
            planned("gc_bisect_layers_0_5", ("gc.layers", "0:6"), *_DEEP, like=LIVELOCK, ranks=1),
            planned("gc_bisect_layers_6_11", ("gc.layers", "6:12"), *_DEEP, ranks=1),
            planned("manual_average", ("parallel.wrapper", "manual")),
            planned("fsdp", ("parallel.wrapper", "fsdp"), like=ERRED),
        ),
    )
)
HEALTHY_PLAN = judged(
    replace(
        SICK_PLAN,
        outcomes=tuple(
            planned(run.spec.scenario, *run.spec.settings, ranks=run.spec.ranks)
            if run.verdict.status is not Status.SKIP
            else run
            for run in SICK_PLAN.outcomes
        ),
    )
)
QUIET = judged(replace(MIXED, command="nsa-harness run ddp_onestep", outcomes=(PASSED,)))

POISON = (
    "\x1b[31mred\x1b[0m\x1b]0;title\x07 a|b `c` ```d``` <script>alert(1)</script> [x](http://evil) ![i](x) *b* _e_ "
    "\u202egnp\u2066 \ud800 \x00\x9b31m]]> &lt; ${{ 7*7 }} {{ 7*7 }} ' \" \n# head\r\n| row |\u2028end"
)


def hostile() -> Report:
    """The mixed report with the poison in every text that a program can choose."""
    poisoned = [poison(outcome) for outcome in (PASSED, DEADLOCK)]
    return judged(replace(MIXED, command=POISON, outcomes=tuple(poisoned)))


def poison(outcome: Outcome) -> Outcome:
    place = replace(PLACE, file=POISON, function=POISON, module=POISON, parameter=POISON, text=POISON)
    return replace(
        outcome,
        spec=replace(
            outcome.spec,
            scenario=outcome.spec.scenario + POISON,
            about=POISON,
            subject=POISON,
            notes=(POISON,),
            not_covered=(POISON,),
        ),
        verdict=replace(outcome.verdict, cause=POISON, summary=POISON),
        phase=POISON,
        culprit=Culprit(ranks=(1,), step=1, collective=CollectiveRef(group=POISON, seq=1, op=POISON), place=place),
        findings=(
            Finding(
                code=POISON,
                claim=POISON,
                ranks=(0,),
                place=place,
                confidence=0.6,
                proof=(POISON, "javascript:alert(1)", "../../etc/passwd", "//evil/x", "dumps/a b(1).txt:7"),
                advice=POISON,
            ),
        ),
        trouble=(Trouble(what=POISON, why="x" * 5000, rank=0),),
        values=(
            replace(
                VALUES[0], name=POISON, file=POISON, function=POISON, values=(RanksValue(ranks=(0,), value=POISON),)
            ),
        ),
        dir="hostile",
        passed_checks=(POISON,),
        ruled_out_causes=(POISON,),
        rank_statuses=(RankStatus(rank=0, blocked_in=POISON, waits_for=POISON, no_progress_s=None, is_culprit=True),),
        rank_summaries=(
            RankSummary(rank=0, loss=1.0, gradients=POISON, buckets=POISON, longest_gap_s=None, peak_rss_bytes=1),
        ),
        metrics={POISON: float("inf")},
        artifacts=(Artifact(path=POISON, count=1, absent=None), Artifact(path=POISON, count=None, absent=POISON)),
        proof_reason=POISON,
        last_agreed=POISON,
        ending_text=POISON,
        repeat_command=POISON,
        next_command=POISON,
    )
