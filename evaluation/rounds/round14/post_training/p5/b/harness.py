import torch
import torch.distributed as dist

from tasks import RequestCache


class Evaluator:
    def __init__(self, cfg, folder, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.cache = RequestCache(folder, cfg, rank)

    @torch.no_grad()
    def loglikelihood(self, model, ids, answer_len=3):
        logp = model(ids[:, :-1]).log_softmax(-1)
        picked = logp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return picked[:, -answer_len:].sum(1)

    def run_task(self, model, task):
        rows, gold = self.cache.get(task)
        rows = torch.from_numpy(rows[self.rank::self.world])
        gold = torch.from_numpy(gold[self.rank::self.world])
        n, c, t = rows.shape
        scores = self.loglikelihood(model, rows.reshape(n * c, t)).view(n, c)
        hits = torch.tensor([(scores.argmax(1) == gold).sum().item(), n], dtype=torch.float64)
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()

    def run(self, model):
        model.eval()
        report = {task: self.run_task(model, task) for task in self.cfg.tasks}
        model.train()
        return report
