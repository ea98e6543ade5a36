"""The options of nanoGPT and torchtitan, and what stands for each here: for whoever types them out of habit.

Their names are those of nanoGPT's train.py and of torchtitan's config classes, older spellings included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Habit:
    """One thing that is set. Without `here` there is nothing like it, and `remark` says what there is instead."""

    nanogpt: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    remark: str = ""


HABITS = (
    Habit(
        nanogpt=("config/FILE.py",),
        torchtitan=("job.config_file",),
        here=("--config",),
        remark="a YAML file with one `name: value` a line; also `CONFIG=FILE`",
    ),
    Habit(nanogpt=("out_dir",), torchtitan=("job.dump_folder", "dump_folder"), here=("--out-dir",)),
    Habit(torchtitan=("model.flavor",), here=("--shape",)),
    Habit(nanogpt=("n_layer",), here=("--layers",)),
    Habit(nanogpt=("n_head", "n_embd"), remark="`heads:` and `dim:` in the file"),
    Habit(nanogpt=("dropout", "bias"), remark="not there: no dropout, no biases"),
    Habit(
        nanogpt=("dataset",),
        torchtitan=("training.dataset", "training.dataset_path", "dataloader.dataset"),
        here=("--data",),
    ),
    Habit(nanogpt=("block_size",), torchtitan=("training.seq_len",), here=("--seq-len",)),
    Habit(nanogpt=("batch_size",), torchtitan=("training.local_batch_size",), here=("--batch",), remark="of one rank"),
    Habit(
        nanogpt=("gradient_accumulation_steps",),
        torchtitan=("training.global_batch_size",),
        here=("--accumulate",),
        remark="of one rank; nanoGPT counts those of all ranks together, torchtitan sequences",
    ),
    Habit(
        nanogpt=("max_iters",),
        torchtitan=("training.steps",),
        here=("--steps",),
        remark="those before `--resume` count",
    ),
    Habit(torchtitan=("debug.seed", "training.seed"), here=("--seed",)),
    Habit(nanogpt=("learning_rate",), torchtitan=("optimizer.lr",), here=("--learning-rate",)),
    Habit(nanogpt=("warmup_iters",), torchtitan=("lr_scheduler.warmup_steps",), here=("--warmup-steps",)),
    Habit(nanogpt=("decay_lr",), torchtitan=("lr_scheduler.decay_type",), here=("--lr-decay",)),
    Habit(
        nanogpt=("lr_decay_iters",),
        torchtitan=("lr_scheduler.decay_ratio", "lr_scheduler.total_steps"),
        here=("--decay-steps",),
        remark="the step where the decay ends; it begins where the warm-up ends",
    ),
    Habit(
        nanogpt=("min_lr",),
        torchtitan=("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"),
        here=("--min-lr",),
        remark="a rate, not a share of one",
    ),
    Habit(
        nanogpt=("weight_decay",),
        torchtitan=("optimizer.weight_decay",),
        here=("--weight-decay",),
        remark="on every parameter; nanoGPT leaves out vectors",
    ),
    Habit(nanogpt=("beta1",), torchtitan=("optimizer.beta1",), here=("--beta1",)),
    Habit(nanogpt=("beta2",), torchtitan=("optimizer.beta2",), here=("--beta2",)),
    Habit(torchtitan=("optimizer.eps", "optimizer.name"), remark="not there: AdamW with torch's own epsilon"),
    Habit(nanogpt=("grad_clip",), torchtitan=("training.max_norm",), here=("--clip",), remark="0 is off"),
    Habit(nanogpt=("eval_interval",), torchtitan=("validation.freq", "validation.enable"), here=("--eval-every",)),
    Habit(nanogpt=("eval_iters",), torchtitan=("validation.steps",), here=("--eval-batches",), remark="of one rank"),
    Habit(
        torchtitan=("validation.dataset", "validation.dataset_path"),
        here=("--eval-data",),
        remark="nanoGPT's `val.bin`; nothing is held out unasked",
    ),
    Habit(nanogpt=("eval_only",), remark="not there: a step is made before each evaluation"),
    Habit(
        nanogpt=("log_interval",),
        torchtitan=("metrics.log_freq",),
        here=("--log-every",),
        remark="of what is printed; the files have every step",
    ),
    Habit(
        nanogpt=("wandb_log", "wandb_project", "wandb_run_name"),
        torchtitan=("metrics.enable_wandb",),
        remark="not there: `training.csv` and `evaluation.csv` have the numbers",
    ),
    Habit(
        nanogpt=("always_save_checkpoint",),
        torchtitan=("checkpoint.interval", "checkpoint.enable", "checkpoint.enable_checkpoint"),
        here=("--checkpoint-every",),
        remark="each is written, none is chosen by its loss",
    ),
    Habit(
        nanogpt=("init_from",),
        torchtitan=("checkpoint.initial_load_path", "checkpoint.load_step"),
        here=("--resume",),
        remark="`auto`, a checkpoint or a folder of them; no pretrained weights",
    ),
    Habit(torchtitan=("checkpoint.keep_latest_k",), here=("--keep-last",)),
    Habit(torchtitan=("checkpoint.async_mode",), here=("--async-checkpoint",)),
    Habit(torchtitan=("checkpoint.folder",), here=("--out-dir",), remark="checkpoints lie in `checkpoint/` of it"),
    Habit(torchtitan=("activation_checkpoint.mode",), here=("--gc",), remark="`all`, `none`, or the layers"),
    Habit(torchtitan=("parallelism.data_parallel_replicate_degree",), here=("--ddp",), remark="1 or 0, over all ranks"),
    Habit(torchtitan=("parallelism.data_parallel_shard_degree",), here=("--wrapper",), remark="`fsdp`, over all ranks"),
    Habit(
        torchtitan=(
            "parallelism.tensor_parallel_degree",
            "parallelism.pipeline_parallel_degree",
            "parallelism.context_parallel_degree",
        ),
        remark="not there: data parallelism alone",
    ),
    Habit(nanogpt=("backend",), here=("--backend",)),
    Habit(nanogpt=("device",), here=("--device",)),
    Habit(nanogpt=("dtype",), torchtitan=("training.mixed_precision_param",), here=("--dtype",)),
    Habit(nanogpt=("compile",), torchtitan=("compile.enable", "training.compile"), here=("--compile",)),
    Habit(torchtitan=("debug.detect_anomaly",), here=("--detect-anomaly",)),
    Habit(
        torchtitan=("profiling.enable_profiling", "profiler.enable_profiling"),
        here=("--profile-memory",),
        remark="operators by memory, in the second step",
    ),
    Habit(torchtitan=("profiling.enable_memory_snapshot", "profiler.enable_memory_snapshot"), here=("--mem-snapshot",)),
    Habit(torchtitan=("comm.trace_buf_size",), remark="`TORCH_FR_BUFFER_SIZE` in the environment"),
)
_KNOWN = {name: habit for habit in HABITS for name in (*habit.nanogpt, *habit.torchtitan)}


def instead_of(name: str) -> str | None:
    """What to write in place of an option of theirs, without its dashes; None where it is nobody's."""
    habit = _KNOWN.get(name) or _KNOWN.get(name.replace("-", "_"))
    if habit is None:
        return None
    remark = habit.remark.replace("`", "")
    return " and ".join(habit.here) + (f" ({remark})" if remark and habit.here else remark)
