"""What the seeds describe, and the shipped scenario that asks each of it."""

from __future__ import annotations

# The directories of seed 5's artifacts, in the order of its phases.
SEED_5 = (
    "ddp_onestep_trace",
    "ddp_gloo_sanity",
    "branch_cmp_only",
    "branch_sel_only",
    "branch_win_only",
    "ddp_static_graph",
    "gc_baseline_full",
    "gc_bisect_layers_0_5",
    "gc_bisect_layers_6_11",
)
# Seed 1, "Attempted mitigations", in its order. The last one, gradients outside of the buckets, is ddp_standard itself.
SEED_1 = (
    "ddp_find_unused",
    "nccl_p2p_disable",
    "ddp_conservative_kernels",
    "ddp_stop_gradient_gates",
    "ddp_bucket_2mb",
    "ddp_no_broadcast",
)
# What the seeds describe, each with the scenarios (names, or globs of variants) that ask it.
MISSION = {
    "one DDP step with full tracing": ["ddp_onestep"],
    "backend sanity": ["ddp_gloo", "ddp_nccl"],
    "one branch": ["branch_cmp_only", "branch_sel_only", "branch_win_only"],
    "branch pairs": [f"branch_pairs@model.branch={pair}" for pair in ("cmp+sel", "cmp+win", "sel+win")],
    "static graph": ["ddp_static_graph"],
    "GC ranges": ["gc_baseline_full", "gc_baseline_none", "gc_bisect_layers_0_5", "gc_bisect_layers_6_11"],
    "one device with and without GC": ["single_gc", "single_no_gc"],
    "DDP standard": ["ddp_standard"],
    "find_unused_parameters": ["ddp_find_unused"],
    "safe mode": ["ddp_safe_mode", "ddp_safe_minimal", "ddp_conservative_kernels", "ddp_stop_gradient_gates"],
    "bucket size": ["ddp_bucket_2mb"],
    "no buffer broadcast": ["ddp_no_broadcast"],
    "gradient_as_bucket_view and none": ["ddp_bucket_view", "ddp_no_bucket_view"],
    "NCCL_P2P_DISABLE and NCCL_IB_DISABLE": ["nccl_p2p_disable", "nccl_ib_disable"],
    "no_sync and accumulation": ["ddp_no_sync"],
    "averaging by hand": ["manual_average"],
    "FSDP2 and FSDP1": ["fsdp2", "fsdp1"],
    "communication hook": ["ddp_comm_hook"],
    "barrier after backward": ["ddp_barrier"],
    "reentrant GC under DDP": ["ddp_gc", "ddp_gc_reentrant", "ddp_gc_reentrant_static"],
    "flash and compile": ["ddp_flash", "ddp_compile"],
    "Triton kernels": ["ddp_fused_kernels"],
    "minimal": ["minimal@gc.layers=none", "minimal@gc.layers=all"],
    "production": ["production", "production_single@gc.layers=all", "production_single@gc.layers=none"],
    "showcase": ["showcase"],
    "shake": ["shake"],
    "4 against 5 layers of the reproduction": ["repro@model.layers=4", "repro@model.layers=5"],
    "controls": ["control_vanilla", "control_stock"],
    "sweeps": ["sweep_layers@*", "sweep_seq_len@*", "sweep_dtype@*", "sweep_gc@*"],
    "the cost of the production shape before anybody waits for it": ["sweep_production@*"],
    "phases apart": [f"phases@train.phase={phase}" for phase in ("data", "forward", "backward", "step")],
    "launch blocking and C++ stacks": ["launch_blocking", "cpp_stacktraces"],
    "memory profile": ["memory_profile"],
    "anomaly detection": ["anomaly"],
    "100 and more steps, stable memory": ["ready_steps", "ready_stable"],
    "200 synthetic and 300 text steps": ["ready_synthetic", "ready_text"],
    "checkpoints": ["ready_checkpoint"],
    "a checkpoint of a run that was killed": ["ready_killed", "ready_resume"],
    "what happens to a long run": ["resume_killed", "resume_damaged", "resume_other_world"],
    "data pipeline": ["ready_data"],
    "data pipeline under load": ["ready_data_load", "ready_load"],
    "before production, each part by itself": [
        "ready_phases@*",
        "ready_attention@*",
        "ready_wrappers@*",
        "ready_branches@*",
    ],
    "sequence 4096": ["ready_seq_4096"],
}
# Each failure of the seeds that can be planted, and the one key in which its healthy twin differs. What a shell script
# under `set -e` does with a HANG is shown by tests/end_to_end/test_seed_failures.py.
SEED_FAILURES = {
    "seed_ready_twice": "gc.mode",
    "seed_token_loop": "model.impl",
    "seed_quadratic_memory": "model.impl",
    "seed_gc_hang": "gc.layers",
    "seed_five_layers": "model.layers",
    "seed_gate_collapsed": "fault",
    "seed_leak": "fault",
    "seed_nan_half": "model.dtype",
    "seed_starved_loader": "fault.heals_s",
}
WITHOUT_A_CPU_FORM = {
    "ddp_nccl": "NCCL needs a GPU for each of 2 ranks; this machine has no GPU",
    "nccl_p2p_disable": "NCCL needs a GPU for each of 2 ranks; this machine has no GPU",
    "nccl_ib_disable": "NCCL needs a GPU for each of 2 ranks; this machine has no GPU",
    "ddp_flash": "needs 2 GPUs; this machine has no GPU",
    "ddp_fused_kernels": "needs 2 GPUs; this machine has no GPU",
    "launch_blocking": "needs 2 GPUs; this machine has no GPU",
    "production": "needs 2 GPUs; this machine has no GPU",
    "shake": "needs 2 GPUs; this machine has no GPU",
    "production_single@gc.layers=all": "needs 1 GPU; this machine has no GPU",
    "production_single@gc.layers=none": "needs 1 GPU; this machine has no GPU",
}
