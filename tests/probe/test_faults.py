"""Each planted fault happens at its rank, layer and step, and its healthy twin takes the same path and ends well."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import PROGRAMS, Boards, Ended, ended, fork_ranks, run_forks, run_ranks, wait_for

from nsa_harness import protocol
from nsa_harness.core.evidence.evidence import StatusFile
from nsa_harness.faults import acts
from nsa_harness.faults.plant import PlantedFault, averages_the_loss
from nsa_harness.faults.spec import KINDS, WITHOUT_TWIN, FaultCondition, FaultSpec

DDP_BLOCKS = str(PROGRAMS / "ddp_blocks.py")
STEP, LAYER = 2, 1
ASKED = signal.SIGRTMIN + protocol.STACKS_SIGNAL_OFFSET


def fault(kind: str, heals_s: float | None = None, **other: object) -> dict[str, str]:
    return {
        protocol.ENV_FAULT: json.dumps(
            {"kind": kind, "rank": 0, "layer": LAYER, "step": STEP, "heals_s": heals_s} | other
        )
    }


def run(boards: Path, planted: dict[str, str]) -> tuple[Ended, StatusFile]:
    (rank,) = run_forks(1, DDP_BLOCKS, "--steps=3", "--layers=2", boards=boards, **planted)
    return rank, Boards(boards).board(rank.pid)


@pytest.mark.parametrize(
    ("kind", "where", "mark"),
    [
        ("deadlock", "_wait_for_the_lock", ("backward", "blocks.1.attn")),
        ("endless_loop", "_spin_until", ("backward", "blocks.1.attn")),
        ("slow_step", "_select_token_by_token", ("forward", "blocks.1.attn")),
    ],
)
def test_what_never_ends_is_named_by_its_stack_and_its_last_mark(
    tmp_path: Path, kind: str, where: str, mark: tuple[str, str]
) -> None:
    boards = Boards(tmp_path)
    (process,) = fork_ranks(1, DDP_BLOCKS, "--layers=2", boards=tmp_path, **fault(kind))
    try:
        wait_for(lambda: _newest(boards, process.pid) == (*mark, STEP), "the mark before the fault")
        wait_for(lambda: _stacks_after_a_signal(boards, process.pid, where), f"{where} in the stacks")
        newest = _newest(boards, process.pid)
    finally:
        process.kill()
        process.communicate()
    assert newest == (*mark, STEP)


def _newest(boards: Boards, pid: int) -> tuple[str, str, int] | None:
    if not (boards.directory / protocol.STATUS_FILE.format(pid=pid)).exists():
        return None
    newest = boards.board(pid).latest_event
    return (newest.kind, newest.name, newest.step) if newest else None


def _stacks_after_a_signal(boards: Boards, pid: int, where: str) -> bool:
    os.kill(pid, ASKED)
    return f" in {where}" in boards.text(protocol.STACKS, pid)


def test_raise_ends_the_rank_in_the_layers_forward(tmp_path: Path) -> None:
    rank, board = run(tmp_path, fault("raise"))
    raised = Boards(tmp_path).json(protocol.RAISED, rank.pid)
    assert rank.status == 1
    assert board.ended_by_exception
    assert board.step == STEP
    assert (raised["type"], raised["message"]) == ("RuntimeError", "planted: step 2, layer 1, rank 0")
    assert raised["frames"][0]["function"] == "_raise"


@pytest.mark.parametrize(("kind", "status"), [("sigkill", -signal.SIGKILL), ("exit0", 0)])
def test_a_rank_that_vanishes_leaves_its_last_mark_and_no_farewell(tmp_path: Path, kind: str, status: int) -> None:
    rank, board = run(tmp_path, fault(kind))
    assert (rank.status, rank.out, board.exit_s, board.ended_by_exception) == (status, "", None, False)
    assert board.latest_event is not None
    assert (board.latest_event.kind, board.latest_event.name, board.latest_event.step) == (
        "forward",
        "blocks.1.attn",
        STEP,
    )


def test_sigstop_stops_the_rank_until_somebody_continues_it(tmp_path: Path) -> None:
    (process,) = fork_ranks(1, DDP_BLOCKS, "--layers=2", boards=tmp_path, **fault("sigstop"))
    try:
        wait_for(lambda: "\nState:\tT" in Path(f"/proc/{process.pid}/status").read_text(), "state T")
        assert _newest(Boards(tmp_path), process.pid) == ("forward", "blocks.1.attn", STEP)
    finally:
        process.send_signal(signal.SIGCONT)
    assert ended(process).status == 0


def test_skip_collective_leaves_out_one_all_reduce_of_one_step(tmp_path: Path) -> None:
    rank, board = run(tmp_path, fault("skip_collective", layer=None))
    assert rank.status == 0, rank.err
    assert [call.step for call in board.calls if call.op == "all_reduce"] == [1, 3]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> str:
    rank, _ = run(tmp_path_factory.mktemp("healthy"), {})
    assert rank.status == 0, rank.err
    return rank.out


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_TWIN])
def test_the_healthy_twin_takes_its_time_and_trains_as_if_nothing_was(tmp_path: Path, healthy: str, kind: str) -> None:
    rank, board = run(tmp_path, fault(kind, heals_s=0.3))
    assert (rank.status, rank.out, rank.err) == (0, healthy, "")
    assert [step for step, _ in board.steps_s] == [1, 2, 3]
    steps_s = dict(board.steps_s)
    if kind not in ("raise", "sigkill", "exit0"):
        assert steps_s[STEP] - steps_s[STEP - 1] >= 0.3
    assert not list(tmp_path.glob("*.trouble.jsonl"))


@pytest.mark.parametrize(
    ("module", "averages"),
    [
        ("__main__", True),
        ("nsa_attention.world", True),
        ("nsa_attention.parallelize", False),
        ("their_nsa.world", False),
    ],
)
def test_the_loss_is_averaged_by_the_program_and_by_our_package(module: str, averages: bool) -> None:
    assert averages_the_loss({"__name__": module}) is averages


def test_a_fault_that_never_happens_says_so(tmp_path: Path) -> None:
    rank, _ = run(tmp_path, fault("raise", layer=77))
    assert rank.status == 0
    assert rank.err == "nsa-harness: the planted fault never happened: raise on rank 0, layer 77, step 2\n"


def test_a_fault_on_another_rank_is_not_ours(tmp_path: Path, healthy: str) -> None:
    rank, _ = run(tmp_path, fault("raise", rank=1))
    assert (rank.status, rank.out, rank.err) == (0, healthy, "")


def test_a_fault_happens_without_the_probe_too(tmp_path: Path) -> None:
    planted = fault("raise") | {protocol.ENV_PROBE: protocol.PROBE_OFF}
    (rank,) = run_ranks(1, DDP_BLOCKS, "--layers=2", boards=tmp_path, **planted)
    assert rank.status == 1
    assert "planted: step 2, layer 1, rank 0" in rank.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "a fault must be a JSON object"),
        ('{"kind": "hiccup"}', "fault kind 'hiccup' is unknown; the kinds are raise, sigkill"),
        ('{"kind": "raise", "rank": -1}', "fault rank must be an integer of at least 0, got -1"),
        ('{"kind": "raise", "step": 1.5, "layer": 0}', "fault step must be an integer of at least 1, got 1.5"),
        ('{"kind": "raise", "rank": 0}', "fault layer must be an integer of at least 0, got None"),
        ('{"kind": "raise", "rank": 0, "layer": 0, "heals_s": "soon"}', "fault heals_s must be a number of seconds"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FaultSpec(text)


@pytest.mark.parametrize(
    ("when", "met", "missed"),
    [
        ({"recomputed": [7]}, {7, 11}, {6, 8}),
        ({"recomputed": [3, 8]}, {3, 8}, {3, 4}),
        ({"any_recomputed": [2, 6]}, {6}, {3, 4}),
        ({"recomputed_layers": 3}, {1, 5, 9}, {1, 5}),
        ({"recomputed": [4], "recomputed_layers": 2}, {4, 5}, {4}),
    ],
)
def test_a_fault_can_depend_on_which_layers_are_computed_again(when, met, missed) -> None:
    assert FaultCondition(when).in_recomputation
    assert FaultCondition(when).is_met_by_recomputation(met)
    assert not FaultCondition(when).is_met_by_recomputation(missed)


def test_a_fault_that_depends_on_something_may_stay_away_without_a_word() -> None:
    assert not FaultCondition({}).is_conditional
    assert FaultCondition({"chance": 0.5}).is_conditional
    assert FaultCondition({"seq_len": 128}).is_conditional
    assert not FaultCondition({"chance": 1.0}).is_conditional


def test_a_fault_in_a_recomputation_needs_no_layer_of_its_own() -> None:
    spec = FaultSpec('{"kind": "deadlock", "rank": 0, "when": {"recomputed": [3]}}')
    assert spec.layer == -1
    with pytest.raises(ValueError, match="fault layer must be an integer"):
        FaultSpec('{"kind": "deadlock", "rank": 0, "when": {"seq_len": 8}}')
    with pytest.raises(ValueError, match="fault when must be a JSON object"):
        FaultSpec('{"kind": "deadlock", "rank": 0, "layer": 1, "when": [3]}')


class _Layered(torch.nn.Module):
    """Two layers, the first with an attention of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Identity()])


class _Ddp(_Layered):
    find_unused_parameters = True
    static_graph = False


_Ddp.__name__ = "DistributedDataParallel"


class _Group:
    """torch.distributed as a condition asks it."""

    def __init__(self, ranks: int, backend: str = "gloo") -> None:
        self.ranks, self.backend = ranks, backend

    def is_initialized(self) -> bool:
        return self.ranks > 1

    def get_world_size(self) -> int:
        return self.ranks

    def get_backend(self) -> str:
        return self.backend


@pytest.mark.parametrize(
    ("when", "met", "missed"),
    [
        ({"module": "Linear"}, (_Layered(), 1), (torch.nn.Identity(), 1)),
        ({"module": "DistributedDataParallel"}, (_Ddp(), 2), (_Layered(), 2)),
        ({"layers": 2}, (_Layered(), 1), (torch.nn.Sequential(torch.nn.Identity()), 1)),
        ({"ranks": 2}, (_Layered(), 2), (_Layered(), 1)),
        ({"backend": "gloo"}, (_Layered(), 2), (_Layered(), 1)),
        ({"find_unused_parameters": True}, (_Ddp(), 2), (_Layered(), 2)),
        ({"static_graph": False}, (_Ddp(), 2), (_Layered(), 2)),
    ],
    ids=str,
)
def test_a_fault_can_depend_on_the_model_its_wrapper_and_the_job(when, met, missed) -> None:
    condition = FaultCondition(when)
    assert condition.is_conditional
    assert condition.is_met_by_job(met[0], _Group(met[1]))
    assert not condition.is_met_by_job(missed[0], _Group(missed[1]))


def test_a_fault_that_depends_on_an_option_of_ddp_stays_away_under_the_other_value() -> None:
    assert not FaultCondition({"find_unused_parameters": False}).is_met_by_job(_Ddp(), _Group(2))
    assert not FaultCondition({"static_graph": True}).is_met_by_job(_Ddp(), _Group(2))
    assert not FaultCondition({"backend": "nccl"}).is_met_by_job(_Ddp(), _Group(2))


def test_a_class_that_fsdp2_has_renamed_is_still_that_class() -> None:
    class FSDPLinear(torch.nn.Linear):
        pass

    assert FaultCondition({"module": "Linear"}).is_met_by_job(FSDPLinear(2, 2), _Group(1))


@pytest.mark.parametrize(("layers", "happens"), [(2, True), (3, False)])
def test_a_fault_that_depends_on_the_model_happens_there_alone(tmp_path, healthy: str, layers: int, happens) -> None:
    rank, _ = run(tmp_path, fault("raise", when={"layers": layers}))
    assert (rank.status == 1) is happens
    assert "planted: step 2, layer 1, rank 0" in rank.err if happens else (rank.out, rank.err) == (healthy, "")


def test_without_a_rank_every_rank_has_the_fault(tmp_path: Path) -> None:
    ranks = run_forks(2, DDP_BLOCKS, "--steps=3", "--layers=2", boards=tmp_path, **fault("raise", rank=None))
    assert all("planted: step 2, layer 1, every rank" in rank.err for rank in ranks)


def test_set_parameters_sets_those_of_its_pattern_as_the_step_begins(tmp_path: Path, healthy: str) -> None:
    planted = fault("set_parameters", layer=None, step=1, parameters="*", value=0)
    rank, board = run(tmp_path, planted)
    assert (rank.status, rank.err) == (0, "")
    assert rank.out != healthy
    assert [step for step, _ in board.steps_s] == [1, 2, 3]
    rank, _ = run(tmp_path / "none", fault("set_parameters", layer=None, parameters="nothing.*"))
    assert rank.err == "nsa-harness: the planted fault never happened: set_parameters on rank 0, step 2\n"


def test_a_leak_keeps_some_megabytes_in_every_step_from_its_own_on() -> None:
    kept = acts.a_copy_to_keep(torch, torch.ones(3, 7, requires_grad=True))
    assert 8 << 20 <= kept.numel() * kept.element_size() <= 9 << 20
    assert not kept.requires_grad
    planted = PlantedFault(FaultSpec('{"kind": "leak", "rank": 0, "layer": 0, "step": 2}'), torch)
    planted._is_possible = True
    for step in (1, 2, 3):
        planted._step = step
        planted._after_forward(None, (), torch.ones(2))
    assert len(planted._leaked_tensors) == 2
