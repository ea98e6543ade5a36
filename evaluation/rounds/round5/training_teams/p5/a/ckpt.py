import pathlib

import torch


class CheckpointDir:
    """step00010_model.pt (written once) and step00010_loader_rank0.pt ... (one for each rank)."""

    def __init__(self, root, rank, keep=2):
        self.root = pathlib.Path(root)
        self.rank = rank
        self.keep = keep

    def save(self, step, model, opt, loader):
        self.root.mkdir(parents=True, exist_ok=True)
        torch.save(loader.state_dict(), self.root / f"step{step:05d}_loader_rank{self.rank}.pt")
        if self.rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step},
                       self.root / f"step{step:05d}_model.pt")

    def prune(self):
        for kind in ("model", "loader"):
            files = sorted(self.root.glob(f"step*_{kind}*.pt"))
            steps = sorted({f.name.split("_")[0] for f in files})
            for f in files:
                if f.name.split("_")[0] not in steps[-self.keep:]:
                    f.unlink()

    def restore(self, model, opt, loader):
        models = sorted(self.root.glob("step*_model.pt"))
        if not models:
            return 0
        state = torch.load(models[-1])
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        mine = self.root / f"step{state['step']:05d}_loader_rank{self.rank}.pt"
        if mine.exists():
            loader.load_state_dict(torch.load(mine))
        return state["step"]
