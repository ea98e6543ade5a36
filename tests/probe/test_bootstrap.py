"""The way in: it costs next to nothing, hands over to the user's own sitecustomize, and breaks no program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import BOOTSTRAP, PROGRAMS, Boards, ended, python, run_forks

from nsa_harness import protocol
from nsa_harness.probe import startup

LOADED = "import sys; print(*sorted(sys.modules))"
RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def test_only_sitecustomize_is_put_on_the_path() -> None:
    assert [path.name for path in BOOTSTRAP.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]


@pytest.mark.parametrize("extra", [{}, RANK], ids=["no rank", "rank"])
def test_a_process_without_torch_loads_a_handful_of_small_modules(tmp_path: Path, extra: dict[str, str]) -> None:
    bare = set(ended(python("-c", LOADED, boards=None)).out.split())
    loaded = set(ended(python("-c", LOADED, boards=tmp_path, **extra)).out.split()) - bare
    small = {"__future__", "_struct", "struct", "itertools", "mmap", "faulthandler", "atexit", "sitecustomize"}
    assert {name for name in loaded if not name.startswith("_nsa_harness")} <= small
    assert "harness" not in loaded
    assert len(loaded) < 20


def test_the_users_sitecustomize_runs_in_our_place(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "sitecustomize.py").write_text(
        "import sys\nsys.greeting = __name__, __file__\nWHOSE = 'user'\n"
    )
    code = "import sys, sitecustomize; print(sys.greeting, sitecustomize.WHOSE, '_nsa_harness.probe' in sys.modules)"
    both = f"{BOOTSTRAP}:{tmp_path / 'user'}"
    process = ended(python("-c", code, boards=tmp_path / "boards", **RANK | {"PYTHONPATH": both}))
    file = str(tmp_path / "user" / "sitecustomize.py")
    assert (process.out, process.err) == (f"{('sitecustomize', file)} user True\n", "")
    assert len(Boards(tmp_path / "boards").all()) == 1


def test_an_error_in_the_users_sitecustomize_is_reported_as_without_us_and_the_probe_is_in(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "sitecustomize.py").write_text("import no_such_module_anywhere\n")
    both = f"{BOOTSTRAP}:{tmp_path / 'user'}"
    with_us = ended(python("-c", "print('ran')", boards=tmp_path / "boards", **RANK | {"PYTHONPATH": both}))
    without = ended(python("-c", "print('ran')", boards=None, PYTHONPATH=str(tmp_path / "user")))
    assert (with_us.status, with_us.out, with_us.err) == (without.status, without.out, without.err)
    assert "no_such_module_anywhere" in with_us.err
    assert len(Boards(tmp_path / "boards").all()) == 1


def test_a_users_own_harness_and_nsa_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "harness.py").write_text("raise SystemExit('the wrong harness')\n")
    (tmp_path / "nsa.py").write_text("raise SystemExit('the wrong nsa')\n")
    (tmp_path / "protocol.py").write_text("raise SystemExit('the wrong protocol')\n")
    process = ended(python("-c", "print('ran')", boards=tmp_path / "boards", cwd=tmp_path, **RANK))
    assert (process.status, process.out, process.err) == (0, "ran\n", "")
    assert len(Boards(tmp_path / "boards").all()) == 1


def test_probe_off_leaves_nothing(tmp_path: Path) -> None:
    code = "import sys; print(sorted(name for name in sys.modules if name.startswith('_nsa_harness.probe.')))"
    process = ended(python("-c", code, boards=tmp_path, **RANK, **{protocol.ENV_PROBE: protocol.PROBE_OFF}))
    assert process.out == "['_nsa_harness.probe.patches', '_nsa_harness.probe.startup']\n"
    assert list(tmp_path.iterdir()) == []


def test_a_program_runs_where_no_board_can_be_made(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    code = str(PROGRAMS / "ddp_blocks.py")
    (rank,) = run_forks(1, code, "--steps=1", boards=tmp_path, **{protocol.ENV_PROBE_DIRECTORY: gone})
    assert (rank.status, rank.err) == (0, "")
    assert rank.out.startswith("rank 0 losses")


HOSTILE = """
import torch
class Odd(torch.nn.Linear):
    def named_modules(self, *args, **options):
        raise RuntimeError("not with me")
print(Odd(1, 1)(torch.ones(1)).shape)
"""


def test_a_piece_that_fails_is_switched_off_and_noted_and_the_program_goes_on(tmp_path: Path) -> None:
    (rank,) = run_forks(1, "-c", HOSTILE, boards=tmp_path)
    assert (rank.status, rank.out, rank.err) == (0, "torch.Size([1])\n", "")
    (line,) = Boards(tmp_path).text(protocol.TROUBLE, rank.pid).splitlines()
    assert '"piece": "module hooks"' in line
    assert "RuntimeError: not with me" in line


COMPILING = """
import sys, torch
torch.compiler.is_compiling = lambda: True
sys.path.insert(0, sys.argv[1])
from nsa_harness.probe import hooks
from nsa_harness.probe.status_file import StatusFileWriter
from nsa_harness.probe.exceptions import DroppedBatchCounter
board = StatusFileWriter(sys.argv[2], rank=0, world_size=1)
class Silent:
    def note(self, piece, error): raise error
    def attempt(self, piece, do): do(); return True
hooks.install(torch, board, Silent(), DroppedBatchCounter(board, ()), hooks.FetchTimes(()))
layer = torch.nn.Linear(1, 1)
layer(torch.ones(1)).sum().backward()
print(bool(torch.nn.modules.module._has_any_global_hook()))
"""


def test_hooks_are_silent_while_torch_compiles(tmp_path: Path) -> None:
    (process,) = run_forks(1, "-c", COMPILING, str(BOOTSTRAP.parents[2]), str(tmp_path / "1.board"), boards=None)
    assert (process.status, process.out) == (0, "True\n"), process.err
    assert Boards(tmp_path).board(1).events == ()


COMPILED = """
import torch
from torch import nn
ops = []
def backend(graph, _inputs):
    ops.append(len(list(graph.graph.nodes)))
    return graph.forward
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
compiled = torch.compile(model, backend=backend)
compiled(torch.ones(2, 4)).sum().backward()
print(ops, torch._dynamo.utils.counters["graph_break"])
"""


@pytest.mark.slow
def test_a_compiled_graph_has_as_many_operations_with_the_probe(tmp_path: Path) -> None:
    with_probe = ended(python("-c", COMPILED, boards=tmp_path, **RANK))
    without = ended(python("-c", COMPILED, boards=None, **RANK))
    assert (with_probe.status, with_probe.err) == (0, "")
    assert with_probe.out == without.out
    assert with_probe.out.startswith("[")
    assert not list(tmp_path.glob("*.trouble.jsonl"))


STARTED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("port", "init_method", "opens_a_store"),
    [("2", None, True), ("1", None, False), ("1", "tcp://here:2", True), ("2", "tcp://here:1?rank=0", False)],
)
def test_ranks_that_a_program_starts_open_a_store_of_their_own_at_another_address(
    monkeypatch: pytest.MonkeyPatch, port: str, init_method: str | None, opens_a_store: bool
) -> None:
    for name, value in {**STARTED, protocol.ENV_AGENT_STORE: "here:1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    startup._use_own_store(("gloo",), {"init_method": init_method})
    assert (startup.AGENT_STORE_FLAG not in os.environ) is opens_a_store


def test_a_rank_of_torchrun_passes_the_address_of_its_store_on_to_its_children(tmp_path: Path) -> None:
    code = f"import os; print(os.environ.get({protocol.ENV_AGENT_STORE!r}))"
    assert ended(python("-c", code, boards=tmp_path, **RANK, **STARTED)).out == "here:1\n"
    assert ended(python("-c", code, boards=tmp_path, **RANK)).out == "None\n"
