"""Options of nanoGPT and torchtitan with their equivalents in nsa.train, for error messages.

The option names come from nanoGPT's train.py and torchtitan's config classes, including older spellings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ForeignOption:
    """One option of nanoGPT or torchtitan, and the nsa.train options that replace it.

    If `ours` is empty, nsa.train has no such option, and `remark` says what to do instead.
    """

    nanogpt: tuple[str, ...] = ()
    torchtitan: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    remark: str = ""


FOREIGN_OPTIONS = (
    ForeignOption(
        nanogpt=("config/FILE.py",),
        torchtitan=("job.config_file",),
        ours=("--config",),
        remark="a YAML file with one `name: value` per line; also `CONFIG=FILE`",
    ),
    ForeignOption(nanogpt=("out_dir",), torchtitan=("job.dump_folder", "dump_folder"), ours=("--out-dir",)),
    ForeignOption(torchtitan=("model.flavor",), ours=("--shape",)),
    ForeignOption(nanogpt=("n_layer",), ours=("--layers",)),
    ForeignOption(nanogpt=("n_head", "n_embd"), remark="set `heads:` and `dim:` in the file"),
    ForeignOption(nanogpt=("dropout", "bias"), remark="not supported: the model has no dropout and no biases"),
    ForeignOption(
        nanogpt=("dataset",),
        torchtitan=("training.dataset", "training.dataset_path", "dataloader.dataset"),
        ours=("--data",),
    ),
    ForeignOption(nanogpt=("block_size",), torchtitan=("training.seq_len",), ours=("--seq-len",)),
    ForeignOption(
        nanogpt=("batch_size",), torchtitan=("training.local_batch_size",), ours=("--batch",), remark="per rank"
    ),
    ForeignOption(
        nanogpt=("gradient_accumulation_steps",),
        torchtitan=("training.global_batch_size",),
        ours=("--accumulate",),
        remark="per rank; nanoGPT counts the steps of all ranks together, torchtitan counts sequences",
    ),
    ForeignOption(
        nanogpt=("max_iters",),
        torchtitan=("training.steps",),
        ours=("--steps",),
        remark="includes the steps before `--resume`",
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
        remark="a learning rate, not a fraction of one",
    ),
    ForeignOption(
        nanogpt=("weight_decay",),
        torchtitan=("optimizer.weight_decay",),
        ours=("--weight-decay",),
        remark="applied to every parameter; nanoGPT skips vectors",
    ),
    ForeignOption(nanogpt=("beta1",), torchtitan=("optimizer.beta1",), ours=("--beta1",)),
    ForeignOption(nanogpt=("beta2",), torchtitan=("optimizer.beta2",), ours=("--beta2",)),
    ForeignOption(
        torchtitan=("optimizer.eps", "optimizer.name"), remark="not supported: AdamW with PyTorch's default epsilon"
    ),
    ForeignOption(
        nanogpt=("grad_clip",), torchtitan=("training.max_norm",), ours=("--clip",), remark="0 turns clipping off"
    ),
    ForeignOption(
        nanogpt=("eval_interval",), torchtitan=("validation.freq", "validation.enable"), ours=("--eval-every",)
    ),
    ForeignOption(
        nanogpt=("eval_iters",), torchtitan=("validation.steps",), ours=("--eval-batches",), remark="per rank"
    ),
    ForeignOption(
        torchtitan=("validation.dataset", "validation.dataset_path"),
        ours=("--eval-data",),
        remark="nanoGPT's `val.bin`; without it no data is held out",
    ),
    ForeignOption(nanogpt=("eval_only",), remark="not supported: at least one training step precedes each evaluation"),
    ForeignOption(
        nanogpt=("log_interval",),
        torchtitan=("metrics.log_freq",),
        ours=("--log-every",),
        remark="for printed lines; the files contain every step",
    ),
    ForeignOption(
        nanogpt=("wandb_log", "wandb_project", "wandb_run_name"),
        torchtitan=("metrics.enable_wandb",),
        remark="not supported: the numbers are in `training.csv` and `evaluation.csv`",
    ),
    ForeignOption(
        nanogpt=("always_save_checkpoint",),
        torchtitan=("checkpoint.interval", "checkpoint.enable", "checkpoint.enable_checkpoint"),
        ours=("--checkpoint-every",),
        remark="every checkpoint is written, whatever its loss",
    ),
    ForeignOption(
        nanogpt=("init_from",),
        torchtitan=("checkpoint.initial_load_path", "checkpoint.load_step"),
        ours=("--resume",),
        remark="`auto`, a checkpoint, or a directory of checkpoints; no pretrained weights",
    ),
    ForeignOption(torchtitan=("checkpoint.keep_latest_k",), ours=("--keep-last",)),
    ForeignOption(torchtitan=("checkpoint.async_mode",), ours=("--async-checkpoint",)),
    ForeignOption(
        torchtitan=("checkpoint.folder",),
        ours=("--out-dir",),
        remark="checkpoints are written to its subdirectory `checkpoint/`",
    ),
    ForeignOption(torchtitan=("activation_checkpoint.mode",), ours=("--gc",), remark="`all`, `none`, or layer numbers"),
    ForeignOption(
        torchtitan=("parallelism.data_parallel_replicate_degree",),
        ours=("--ddp",),
        remark="1 or 0; always over all ranks",
    ),
    ForeignOption(
        torchtitan=("parallelism.data_parallel_shard_degree",),
        ours=("--wrapper",),
        remark="`fsdp`; always over all ranks",
    ),
    ForeignOption(
        torchtitan=(
            "parallelism.tensor_parallel_degree",
            "parallelism.pipeline_parallel_degree",
            "parallelism.context_parallel_degree",
        ),
        remark="not supported: data parallelism only",
    ),
    ForeignOption(nanogpt=("backend",), ours=("--backend",)),
    ForeignOption(nanogpt=("device",), ours=("--device",)),
    ForeignOption(nanogpt=("dtype",), torchtitan=("training.mixed_precision_param",), ours=("--dtype",)),
    ForeignOption(nanogpt=("compile",), torchtitan=("compile.enable", "training.compile"), ours=("--compile",)),
    ForeignOption(torchtitan=("debug.detect_anomaly",), ours=("--detect-anomaly",)),
    ForeignOption(
        torchtitan=("profiling.enable_profiling", "profiler.enable_profiling"),
        ours=("--profile-memory",),
        remark="operators sorted by memory, in the second step",
    ),
    ForeignOption(
        torchtitan=("profiling.enable_memory_snapshot", "profiler.enable_memory_snapshot"), ours=("--mem-snapshot",)
    ),
    ForeignOption(torchtitan=("comm.trace_buf_size",), remark="set the environment variable `TORCH_FR_BUFFER_SIZE`"),
)
_BY_NAME = {name: option for option in FOREIGN_OPTIONS for name in (*option.nanogpt, *option.torchtitan)}


def replacement_for(name: str) -> str | None:
    """Return what to write instead of an option of nanoGPT or torchtitan, or None if the option is unknown."""
    option = _BY_NAME.get(name) or _BY_NAME.get(name.replace("-", "_"))
    if option is None:
        return None
    remark = option.remark.replace("`", "")
    return " and ".join(option.ours) + (f" ({remark})" if remark and option.ours else remark)
