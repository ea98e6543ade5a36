import json
import logging
import os
from dataclasses import asdict, dataclass, field

import torch

from .accelerator import Accelerator
from .modeling import BOS, EOS

logger = logging.getLogger("sft")


@dataclass
class TrainerState:
    epoch: float = 0.0
    global_step: int = 0
    best_metric: float = float("inf")
    log_history: list = field(default_factory=list)


class TrainerCallback:
    def on_step_end(self, args, state, model=None, **kwargs):
        pass

    def on_evaluate(self, args, state, model=None, metrics=None, **kwargs):
        pass

    def on_train_end(self, args, state, model=None, **kwargs):
        pass


class HistoryCallback(TrainerCallback):
    """Writes the log history next to the weights."""

    def on_train_end(self, args, state, model=None, **kwargs):
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "trainer_state.json"), "w") as f:
            json.dump(asdict(state), f, indent=1)


class SampleCompletionsCallback(TrainerCallback):
    """Greedy completions of a few prompts after each evaluation, to look at them by eye."""

    def __init__(self, prompts, max_new_tokens=12):
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens

    @torch.no_grad()
    def on_evaluate(self, args, state, model=None, metrics=None, **kwargs):
        was_training = model.training
        model.eval()
        for prompt in self.prompts:
            ids = torch.tensor([[BOS] + prompt])
            for _ in range(self.max_new_tokens):
                nxt = model(ids)[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, nxt], dim=1)
                if nxt.item() == EOS:
                    break
            logger.info("step %d  %s -> %s", state.global_step, prompt, ids[0, len(prompt) + 1:].tolist())
        model.train(was_training)


class Trainer:
    def __init__(self, args, model, train_dataset, eval_dataset, collator, callbacks=()):
        self.args = args
        self.accelerator = Accelerator(args.gradient_accumulation_steps)
        self.model = model
        self.model_wrapped = self.accelerator.prepare_model(model)
        self.train_loader = self.accelerator.prepare_loader(
            train_dataset, args.per_device_batch_size, collator, shuffle=True)
        self.eval_loader = self.accelerator.prepare_loader(
            eval_dataset, args.per_device_batch_size, collator, shuffle=False)
        params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=args.learning_rate)
        total = max(1, args.num_train_epochs * len(self.train_loader) // args.gradient_accumulation_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: max(0.05, 1 - s / total))
        self.state = TrainerState()
        self.callbacks = list(callbacks)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def call_event(self, event, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, model=self.model, **kwargs)

    def training_step(self, batch, sync):
        self.model_wrapped.require_backward_grad_sync = sync
        loss, _ = self.model_wrapped(**batch)
        (loss / self.args.gradient_accumulation_steps).backward()
        return loss.detach()

    def train(self):
        accum = self.args.gradient_accumulation_steps
        for epoch in range(self.args.num_train_epochs):
            self.train_loader.sampler.set_epoch(epoch)
            self.model_wrapped.train()
            running = 0.0
            for step, batch in enumerate(self.train_loader, start=1):
                last = step == len(self.train_loader)
                sync = step % accum == 0 or last
                running += self.training_step(batch, sync).item()
                if not sync:
                    continue
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.state.global_step += 1
                self.state.epoch = epoch + step / len(self.train_loader)
                self.call_event("on_step_end")
                if self.state.global_step % self.args.logging_steps == 0:
                    self.log({"loss": self.accelerator.reduce_mean(running / step)})
                if self.state.global_step % self.args.eval_steps == 0:
                    self.evaluate()
        if self.accelerator.is_main_process:
            self.call_event("on_train_end")
        return self.state

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.eval_loader:
            loss, _ = self.model(**batch)
            total, count = total + loss.item(), count + 1
        self.model.train()
        metrics = {"eval_loss": self.accelerator.reduce_mean(total / max(1, count))}
        self.log(metrics)
        if metrics["eval_loss"] < self.state.best_metric:
            self.state.best_metric = metrics["eval_loss"]
            self.save_model("best")
        self.call_event("on_evaluate", metrics=metrics)
        return metrics

    def log(self, values):
        entry = {"step": self.state.global_step, "epoch": round(self.state.epoch, 2), **values}
        self.state.log_history.append(entry)
        self.accelerator.print(entry)

    def save_model(self, name):
        if self.accelerator.is_main_process:
            path = os.path.join(self.args.output_dir, name)
            os.makedirs(path, exist_ok=True)
            torch.save(self.model.state_dict(), os.path.join(path, "model.pt"))
        self.accelerator.wait_for_everyone()
