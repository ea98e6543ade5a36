"""Each piece of the probe, made to fail: it is switched off and noted, and the program does what it did without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import BOOTSTRAP, PATIENCE_S, Ended, ended, python

# Where each piece breaks: a module of the probe, and what in it raises.
PIECES = {
    "status file": "status_file._new_file",
    "progress events": "status_file._pack_slot",
    "excepthook": "exit_hooks.ExitEvidence._chain_excepthook",
    "faulthandler": "exit_hooks.ExitEvidence._enable_faulthandler",
    "exit": "exit_hooks.ExitEvidence._note_exit",
    "flight at exit": "exit_hooks.ExitEvidence._write_flight",
    "module hooks": "names.ModuleNames.find",
    "optimizer hooks": "hooks._gradients",
    "data hook": "hooks._hook_data",
    "loaders": "hooks.LoaderProgress.note_iterator",
    "autograd nodes": "autograd.count_nodes",
    "collectives": "status_file.StatusFileWriter.enter_call",
    "collective details": "collectives.CallArguments.size",
    "collective handles": "waits.Waits.remember",
    "functional collectives": "collectives._patch_functional",
    "rank": "collectives.CallRecorder._write_identity",
    "groups": "groups.Groups._members",
    "mesh": "groups.MeshCoordinates.write_if_larger",
    "store waits": "waits.watch_stores",
    "store keys": "waits._Keys.note",
    "handles": "waits.watch_handles",
    "waits": "waits.Waits.write_lasting",
    "heartbeat": "status_file.StatusFileWriter.write_heartbeat",
    "last line": "heartbeat.Heartbeat._sample_line",
    "collective counters": "heartbeat.Heartbeat._count",
    "device progress": "device.install",
    "stop signals": "exit_hooks.StopSignals._note",
    "worker server": "heartbeat.start_worker_server",
    "late init": "startup.ProcessProbe._wait_for_init",
}
SCRIPT = """
import gc, importlib, json, os, sys, time, types
import torch, torch.distributed as dist
import torch._dynamo, torch.distributed._functional_collectives as functional  # once, not in each child
from torch.distributed.device_mesh import init_device_mesh
harness, home, patience_s = sys.argv[1], sys.argv[2], float(sys.argv[3])

def planted(*arguments, **options):
    raise OSError("planted")

def let_the_probe_in(piece, where, boards):
    os.mkdir(boards)
    os.environ["_NSA_HARNESS_BOARDS"] = boards
    if piece != "late init":
        os.environ.update(RANK="0", WORLD_SIZE="1")
    package = sys.modules["_nsa_harness"] = types.ModuleType("_nsa_harness")
    package.__path__ = [harness]
    if where:
        module, *path, name = where.split(".")
        holder = importlib.import_module("_nsa_harness.probe." + module)
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, name, planted)
    importlib.import_module("_nsa_harness.probe.startup").start_probe()

def train(store):
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    store.set("key", "7")
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.rand(6, 2), batch_size=3):
        loss = model(batch).square().mean() * float(store.get("key"))
        loss.backward()
        optimizer.step()
        work = dist.all_reduce(loss.detach(), async_op=True)
        work.wait()
        loss = functional.wait_tensor(functional.all_reduce(loss.detach(), "sum", mesh))
    os.kill(os.getpid(), 0)
    print(loss.item().hex())

def noted(boards):
    path = os.path.join(boards, f"{os.getpid()}.trouble.jsonl")
    return [json.loads(line)["piece"] for line in open(path)] if os.path.exists(path) else []

def run(piece, where):
    boards = os.path.join(home, piece or "none")
    let_the_probe_in(piece, where, boards)
    train(dist.HashStore())
    end_s = time.monotonic() + patience_s
    # Some pieces belong to the beat, and the last two to the exit.
    while piece and piece not in ("exit", "flight at exit") and not noted(boards) and time.monotonic() < end_s:
        time.sleep(0.01)

gc.collect()
gc.freeze()  # an exit looks at everything that is not, and copies its pages
running = []
for piece, where in json.loads(sys.argv[4]):
    sys.stdout.flush()
    if len(running) == 6:
        print(os.waitstatus_to_exitcode(os.waitpid(running.pop(0), 0)[1]))
        sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with open(os.path.join(home, f"{piece}.out"), "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        run(piece, where)
        sys.exit(0)
    running.append(child)
for child in running:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each run left: `PIECE.out` with all that it said, `PIECE/` with its boards."""
    home = tmp_path_factory.mktemp("pieces")
    plan = json.dumps([["", ""], *PIECES.items()])
    arguments = [str(BOOTSTRAP.parents[1]), str(home), str(PATIENCE_S), plan]
    done: Ended = ended(python("-c", SCRIPT, *arguments, boards=None))
    assert (done.status, done.err) == (0, "")
    assert done.out.split() == ["0"] * (1 + len(PIECES))
    return home


def test_a_whole_probe_has_nothing_to_note(home: Path) -> None:
    assert float.fromhex((home / ".out").read_text()) > 0
    assert list((home / "none").glob("*.board"))
    assert not list((home / "none").glob("*.trouble.jsonl"))


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_that_fails_is_noted_alone_and_the_program_trains_on(home: Path, piece: str) -> None:
    assert (home / f"{piece}.out").read_text() == (home / ".out").read_text()
    lines = [json.loads(line) for path in (home / piece).glob("*.trouble.jsonl") for line in path.open()]
    assert [(line["piece"], line["error"]) for line in lines] == [(piece, "OSError: planted")]
