import torch
import torch.distributed as dist

from ltr.clicks import ClickLog
from ltr.engine import Engine
from ltr.scorer import Scorer

CFG = dict(loss="ips_softmax", lists=160, slots=6, dim=8, batch=8, epochs=2, lr=0.1, seed=13)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(CFG["seed"] + dist.get_rank())
    log = ClickLog(dist.get_rank(), CFG["lists"], CFG["slots"], CFG["dim"], CFG["seed"])
    engine = Engine(Scorer(CFG["dim"]), CFG)
    engine.fit(log)
    dist.barrier()
    print(f"rank {dist.get_rank()} skipped {engine.skipped}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
