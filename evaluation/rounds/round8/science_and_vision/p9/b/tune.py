"""Random search for a regression network; each rank trains its own trials and
rank 0 collects the outcomes through a key-value store."""
import datetime
import json
import pathlib

import torch
import torch.distributed as dist

from search.space import draw_trials
from search.results import ResultBoard
from search.trial import run_trial

HERE = pathlib.Path(__file__).resolve().parent


def open_board(rank):
    """The board lives in rank 0; its port is told to the others."""
    wait = datetime.timedelta(hours=6)
    port = [0]
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast_object_list(port, src=0)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", port[0], None, False, wait, wait_for_workers=False)
    return ResultBoard(store)


def main():
    cfg = json.loads((HERE / "space.json").read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    board = open_board(rank)
    trials = draw_trials(cfg)
    for trial in trials[rank::world]:
        run_trial(trial, cfg, board)
    if rank == 0:
        rows = [board.fetch(t.number) for t in trials]
        done = [r for r in rows if r["state"] == "complete"]
        best = min(done, key=lambda r: r["loss"])
        print(f"{len(done)} of {len(rows)} complete", flush=True)
        print(f"best #{best['number']} loss {best['loss']:.4f} {best['params']}", flush=True)
        (HERE / "best.json").write_text(json.dumps(best))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
