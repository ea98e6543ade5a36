"""The options of nanoGPT and torchtitan, and what stands for each here: for whoever types them out of habit.

Their names are those of nanoGPT's train.py and of torchtitan's config classes, older spellings included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ForeignOption:
    """One thing that is set. Without `here` there is nothing like it, and `remark` says what there is instead."""

    nanogpt: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    remark: str = ""


FOREIGN_OPTIONS = (
    ForeignOption(
        nanogpt=("config/FILE.py",),
        torchtitan=("job.config_file",),
        ours=("--config",),
        remark="a YAML file with one `name: value` a line; also `CONFIG=FILE`",
    ),
    ForeignOption(nanogpt=("out_dir",), torchtitan=("job.dump_folder", "dump_folder"), ours=("--out-dir",)),
    ForeignOption(torchtitan=("model.flavor",), ours=("--shape",)),
    ForeignOption(nanogpt=("n_layer",), ours=("--layers",)),
    ForeignOption(nanogpt=("n_head", "n_embd"), remark="`heads:` and `dim:` in the file"),
    ForeignOption(nanogpt=("dropout", "bias"), remark="not there: no dropout, no biases"),
    ForeignOption(
        nanogpt=("dataset",),
        torchtitan=("training.dataset", "training.dataset_path", "dataloader.dataset"),
        ours=("--data",),
    ),
    ForeignOption(nanogpt=("block_size",), torchtitan=("training.seq_len",), ours=("--seq-len",)),
    ForeignOption(
        nanogpt=("batch_size",), torchtitan=("training.local_batch_size",), ours=("--batch",), remark="of one rank"
    ),
    ForeignOption(
        nanogpt=("gradient_accumulation_steps",),
        torchtitan=("training.global_batch_size",),
        ours=("--accumulate",),
        remark="of one rank; nanoGPT counts those of all ranks together, torchtitan sequences",
    ),
    ForeignOption(
        nanogpt=("max_iters",),
        torchtitan=("training.steps",),
        ours=("--steps",),
        remark="those before `--resume` count",
    ),
    ForeignOption(torchtitan=("debug.seed", "training.seed"), ours=("--seed",)),
    ForeignOption(nanogpt=("learning_rate",), torchtitan=("optimizer.lr",), ours=("--learning-rate",)),
    ForeignOption(nanogpt=("warmup_iters",), torchtitan=("lr_scheduler.warmup_steps",), ours=("--warmup-steps",)),
    ForeignOption(nanogpt=("decay_lr",), torchtitan=("lr_scheduler.decay_type",), ours=("--lr-decay",)),
    ForeignOption(
        nanogpt=("lr_decay_iters",),
        torchtitan=("lr_scheduler.decay_ratio", "lr_scheduler.total_steps"),
        ours=("--decay-steps",),
        remark="the step where the decay ends; it begins where the warm-up ends",
    ),
    ForeignOption(
        nanogpt=("min_lr",),
        torchtitan=("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"),
        ours=("--min-lr",),
        remark="a rate, not a share of one",
    ),
    ForeignOption(
        nanogpt=("weight_decay",),
        torchtitan=("optimizer.weight_decay",),
        ours=("--weight-decay",),
        remark="on every parameter; nanoGPT leaves out vectors",
    ),
    ForeignOption(nanogpt=("beta1",), torchtitan=("optimizer.beta1",), ours=("--beta1",)),
    ForeignOption(nanogpt=("beta2",), torchtitan=("optimizer.beta2",), ours=("--beta2",)),
    ForeignOption(torchtitan=("optimizer.eps", "optimizer.name"), remark="not there: AdamW with torch's own epsilon"),
    ForeignOption(nanogpt=("grad_clip",), torchtitan=("training.max_norm",), ours=("--clip",), remark="0 is off"),
    ForeignOption(
        nanogpt=("eval_interval",), torchtitan=("validation.freq", "validation.enable"), ours=("--eval-every",)
    ),
    ForeignOption(
        nanogpt=("eval_iters",), torchtitan=("validation.steps",), ours=("--eval-batches",), remark="of one rank"
    ),
    ForeignOption(
        torchtitan=("validation.dataset", "validation.dataset_path"),
        ours=("--eval-data",),
        remark="nanoGPT's `val.bin`; nothing is held out unasked",
    ),
    ForeignOption(nanogpt=("eval_only",), remark="not there: a step is made before each evaluation"),
    ForeignOption(
        nanogpt=("log_interval",),
        torchtitan=("metrics.log_freq",),
        ours=("--log-every",),
        remark="of what is printed; the files have every step",
    ),
    ForeignOption(
        nanogpt=("wandb_log", "wandb_project", "wandb_run_name"),
        torchtitan=("metrics.enable_wandb",),
        remark="not there: `training.csv` and `evaluation.csv` have the numbers",
    ),
    ForeignOption(
        nanogpt=("always_save_checkpoint",),
        torchtitan=("checkpoint.interval", "checkpoint.enable", "checkpoint.enable_checkpoint"),
        ours=("--checkpoint-every",),
        remark="each is written, none is chosen by its loss",
    ),
    ForeignOption(
        nanogpt=("init_from",),
        torchtitan=("checkpoint.initial_load_path", "checkpoint.load_step"),
        ours=("--resume",),
        remark="`auto`, a checkpoint or a folder of them; no pretrained weights",
    ),
    ForeignOption(torchtitan=("checkpoint.keep_latest_k",), ours=("--keep-last",)),
    ForeignOption(torchtitan=("checkpoint.async_mode",), ours=("--async-checkpoint",)),
    ForeignOption(
        torchtitan=("checkpoint.folder",), ours=("--out-dir",), remark="checkpoints lie in `checkpoint/` of it"
    ),
    ForeignOption(torchtitan=("activation_checkpoint.mode",), ours=("--gc",), remark="`all`, `none`, or the layers"),
    ForeignOption(
        torchtitan=("parallelism.data_parallel_replicate_degree",), ours=("--ddp",), remark="1 or 0, over all ranks"
    ),
    ForeignOption(
        torchtitan=("parallelism.data_parallel_shard_degree",), ours=("--wrapper",), remark="`fsdp`, over all ranks"
    ),
    ForeignOption(
        torchtitan=(
            "parallelism.tensor_parallel_degree",
            "parallelism.pipeline_parallel_degree",
            "parallelism.context_parallel_degree",
        ),
        remark="not there: data parallelism alone",
    ),
    ForeignOption(nanogpt=("backend",), ours=("--backend",)),
    ForeignOption(nanogpt=("device",), ours=("--device",)),
    ForeignOption(nanogpt=("dtype",), torchtitan=("training.mixed_precision_param",), ours=("--dtype",)),
    ForeignOption(nanogpt=("compile",), torchtitan=("compile.enable", "training.compile"), ours=("--compile",)),
    ForeignOption(torchtitan=("debug.detect_anomaly",), ours=("--detect-anomaly",)),
    ForeignOption(
        torchtitan=("profiling.enable_profiling", "profiler.enable_profiling"),
        ours=("--profile-memory",),
        remark="operators by memory, in the second step",
    ),
    ForeignOption(
        torchtitan=("profiling.enable_memory_snapshot", "profiler.enable_memory_snapshot"), ours=("--mem-snapshot",)
    ),
    ForeignOption(torchtitan=("comm.trace_buf_size",), remark="`TORCH_FR_BUFFER_SIZE` in the environment"),
)
_BY_NAME = {name: option for option in FOREIGN_OPTIONS for name in (*option.nanogpt, *option.torchtitan)}


def replacement_for(name: str) -> str | None:
    """What to write in place of an option of theirs, without its dashes; None where it is nobody's."""
    option = _BY_NAME.get(name) or _BY_NAME.get(name.replace("-", "_"))
    if option is None:
        return None
    remark = option.remark.replace("`", "")
    return " and ".join(option.ours) + (f" ({remark})" if remark and option.ours else remark)
