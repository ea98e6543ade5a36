"""Cross-modal distillation: rank 0 runs the image teacher, rank 1 trains the audio student."""
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from callbacks import History, Progress
from data import PairedClips
from hints import HintPolicy

TEACHER, STUDENT = 0, 1


@dataclass
class Plan:
    classes: int = 8
    epochs: int = 3
    batch: int = 16
    warmup_steps: int = 150
    temperature: float = 2.0
    alpha: float = 0.7
    seed: int = 9
    hints: HintPolicy = field(default_factory=HintPolicy)


def mlp(n_in, hidden, n_out):
    return nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, n_out))


class TeacherServer:
    def __init__(self, plan, data):
        self.plan, self.data = plan, data
        self.net = mlp(64, 128, plan.classes)

    def pretrain(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        for _ in range(self.plan.warmup_steps):
            idx = torch.randint(len(self.data.label), (64,))
            loss = F.cross_entropy(self.net(self.data.image[idx]), self.data.label[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        self.net.eval()

    def fit(self):
        self.pretrain()
        step = 0
        for epoch in range(self.plan.epochs):
            for _, image, _ in self.data.epoch(epoch, self.plan.batch):
                step += 1
                if self.plan.hints.due():
                    with torch.no_grad():
                        logits = self.net(image)
                    dist.send(logits, dst=STUDENT, tag=step)
            dist.barrier()


class StudentTrainer:
    def __init__(self, plan, data, callbacks):
        self.plan, self.data, self.callbacks = plan, data, callbacks
        self.hints = plan.hints
        self.net = mlp(32, 48, plan.classes)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3)
        self.used_hint, self.accuracy = False, 0.0

    def call(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def loss(self, logits, label, step):
        hard = F.cross_entropy(logits, label)
        self.used_hint = self.hints.due()
        if not self.used_hint:
            return hard
        soft = torch.empty_like(logits)
        dist.recv(soft, src=TEACHER, tag=step)
        t, a = self.plan.temperature, self.plan.alpha
        kd = F.kl_div((logits / t).log_softmax(-1), (soft / t).softmax(-1), reduction="batchmean") * t * t
        return a * kd + (1 - a) * hard

    def fit(self):
        self.call("on_fit_start")
        step = 0
        for epoch in range(self.plan.epochs):
            hits = 0
            for audio, _, label in self.data.epoch(epoch, self.plan.batch):
                step += 1
                logits = self.net(audio)
                loss = self.loss(logits, label, step)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                hits += (logits.argmax(-1) == label).sum().item()
                self.call("on_step_end", step, loss.item())
            self.accuracy = hits / len(self.data.label)
            self.call("on_epoch_end", epoch)
            dist.barrier()
        self.call("on_fit_end")


def main():
    dist.init_process_group("gloo")
    plan, data = Plan(), PairedClips()
    torch.manual_seed(plan.seed)
    if dist.get_rank() == TEACHER:
        TeacherServer(plan, data).fit()
    else:
        StudentTrainer(plan, data, [Progress(), History("runs/history.json")]).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
