"""From what `doctor` measured to what it says: one line a thing, each with what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from harness.core.declared.yaml_tree import visible
from harness.core.health import checkup_system
from harness.core.health.checkup_facts import Facts, GpuFacts, Line, ModuleFacts, State, TorchFacts, Unknown

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_STATE_WIDTH = max(map(len, State))
_WIDEST = 1000
_NEEDS_TORCH = "not asked: torch cannot be imported"


def judged(facts: Facts) -> tuple[Line, ...]:
    """Every line, in the order in which they are shown."""
    return (*_software(facts), *checkup_system.lines(facts), *_optional(facts))


def healthy(lines: Sequence[Line]) -> bool:
    """Runs work here and their evidence is kept."""
    return all(line.state is not State.BROKEN for line in lines)


def lines_text(lines: Sequence[Line]) -> Iterator[str]:
    """For people: what to do stands below each line that is not ok; the verdict comes last."""
    width = max(map(len, (line.name for line in lines)), default=0)
    for line in lines:
        yield visible(f"{line.state:<{_STATE_WIDTH}} {line.name:<{width}}  {line.fact}", _WIDEST)
        if line.advice is not None:
            yield visible(f"{'':<{_STATE_WIDTH}} {'':<{width}}  do: {line.advice}", _WIDEST)
    broken = [line.name for line in lines if line.state is State.BROKEN]
    yield ""
    if broken:
        yield f"broken: {', '.join(broken)}; runs cannot work here, or evidence will be lost, until that is mended"
    else:
        yield "runs work here, and their evidence is kept"


def values(lines: Sequence[Line]) -> dict[str, object]:
    """For JSON."""
    shown = [{"name": line.name, "state": line.state.value, "fact": line.fact, "advice": line.advice} for line in lines]
    return {"schema": 1, "healthy": healthy(lines), "lines": shown}


def _software(facts: Facts) -> Iterator[Line]:
    torch = facts.torch
    yield _probe(facts)
    if isinstance(torch, Unknown):
        advice = (
            "install it in this environment: pip install 'torch>=2.11', or the build for your CUDA from pytorch.org"
        )
        yield Line(name="torch", state=State.BROKEN, fact=torch.why, advice=advice)
        for name in ("torchrun", "gloo", "nccl"):
            yield Line(name=name, state=State.BROKEN, fact=_NEEDS_TORCH, advice="mend the line torch first")
    else:
        yield _torch(torch)
        yield _torchrun(torch)
        yield _gloo(torch)
        yield _nccl(torch, facts.gpu)
    yield _gpu(facts.gpu, torch)
    yield _py_spy(facts)


def _optional(facts: Facts) -> Iterator[Line]:
    yield _module("triton", facts.triton, "kernels and torch.compile on a GPU", "pip install 'nsa-harness[gpu]'")
    yield _module("flash-attn", facts.flash_attn, "model.impl=flash", "pip install 'nsa-harness[flash]', needs a GPU")
    yield _module(
        "nvidia-ml-py",
        facts.nvml,
        "torch.cuda.utilization (the harness asks nvidia-smi)",
        "pip install 'nsa-harness[gpu]'",
    )
    yield _slurm(facts)


def _probe(facts: Facts) -> Line:
    python = facts.python
    if python.probe_trouble is None:
        return Line(name="probe", state=State.OK, fact=f"rides in a child of Python {python.version}")
    return Line(
        name="probe",
        state=State.BROKEN,
        fact=f"does not get into a child of Python {python.version}: {python.probe_trouble}",
        advice="look for a sitecustomize.py or a .pth file that ends the interpreter's start, or run with --probe=off "
        "(verdicts then rest on stacks and bytes alone)",
    )


def _torch(torch: TorchFacts) -> Line:
    built = f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPU only'}"
    match = _RELEASE.match(torch.version)
    release = (int(match[1]), int(match[2])) if match else None
    known = f"{_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    if release is not None and release < OLDEST_TORCH:
        advice = f"upgrade: pip install -U 'torch>={_dotted(OLDEST_TORCH)}'"
        return Line(name="torch", state=State.BROKEN, fact=f"{built}; supported are {known}", advice=advice)
    if release is None or release > NEWEST_TORCH:
        advice = "run `nsa-harness selftest`: if every line is right, this version can be trusted"
        return Line(name="torch", state=State.WARN, fact=f"{built}; tested are {known}", advice=advice)
    return Line(name="torch", state=State.OK, fact=built)


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _torchrun(torch: TorchFacts) -> Line:
    if torch.torchrun_trouble is None:
        return Line(name="torchrun", state=State.OK, fact="torch.distributed.run is importable")
    advice = "reinstall torch: pip install --force-reinstall torch"
    fact = f"torch.distributed.run: {torch.torchrun_trouble}"
    return Line(name="torchrun", state=State.BROKEN, fact=fact, advice=advice)


def _gloo(torch: TorchFacts) -> Line:
    if torch.gloo:
        return Line(name="gloo", state=State.OK, fact="in torch")
    advice = "install an official build of torch: every scenario on CPU uses gloo"
    return Line(name="gloo", state=State.BROKEN, fact="torch was built without it", advice=advice)


def _nccl(torch: TorchFacts, gpu: GpuFacts) -> Line:
    if torch.nccl:
        return Line(name="nccl", state=State.OK, fact=f"{torch.nccl}, in torch")
    if gpu.visible:
        advice = "install a CUDA build of torch (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        fact = f"torch was built without it, and runs would choose it for {_counted(gpu.visible)}"
        return Line(name="nccl", state=State.BROKEN, fact=fact, advice=advice)
    advice = "nothing: without a GPU, scenarios take gloo, and those that need nccl are SKIP"
    return Line(name="nccl", state=State.MISSING, fact="torch was built without it", advice=advice)


def _gpu(gpu: GpuFacts, torch: TorchFacts | Unknown) -> Line:
    if gpu.trouble:
        advice = "reboot after a driver update, or reinstall the driver; until then runs take their CPU form"
        return Line(name="gpu", state=State.WARN, fact=f"nvidia-smi fails: {gpu.trouble}", advice=advice)
    if not gpu.installed:
        fact = "none: no nvidia-smi" if gpu.installed is None else "nvidia-smi lists none"
        advice = "nothing: scenarios take their CPU form and say so; those that need a GPU are SKIP"
        return Line(name="gpu", state=State.MISSING, fact=fact, advice=advice)
    fact = f"{_counted(gpu.installed)}, driver {gpu.driver or 'unknown'}"
    if not gpu.visible:
        fact += f", hidden by CUDA_VISIBLE_DEVICES={gpu.chosen or ''}"
        return Line(name="gpu", state=State.WARN, fact=fact, advice="unset CUDA_VISIBLE_DEVICES to use them")
    if isinstance(torch, TorchFacts) and torch.devices < len(gpu.visible):
        fact += f", but torch can use {torch.devices} of {len(gpu.visible)}"
        advice = "install the torch build for this driver's CUDA (pytorch.org), or hide the GPUs: CUDA_VISIBLE_DEVICES="
        return Line(name="gpu", state=State.BROKEN, fact=fact, advice=advice)
    return Line(name="gpu", state=State.OK, fact=fact)


def _counted(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


def _py_spy(facts: Facts) -> Line:
    spy = facts.py_spy
    if spy.path is None:
        fact = "not found beside this Python nor on PATH"
        return Line(name="py-spy", state=State.BROKEN, fact=fact, advice="pip install py-spy")
    if spy.threads:
        scope = "" if spy.ptrace_scope is None else f" (ptrace_scope {spy.ptrace_scope})"
        return Line(name="py-spy", state=State.OK, fact=f"reads the stacks of a child process{scope}")
    scope = "" if spy.ptrace_scope is None else f", kernel.yama.ptrace_scope is {spy.ptrace_scope}"
    return Line(
        name="py-spy",
        state=State.BROKEN,
        fact=f"cannot read the stacks of a child process: {spy.trouble}{scope}",
        advice="in a container: docker run --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=1; without it a "
        "HANG has only the stacks that the ranks can still tell of themselves",
    )


def _module(name: str, module: ModuleFacts, serves: str, install: str) -> Line:
    if module.version is None:
        advice = f"only for {serves}: {install}"
        return Line(name=name, state=State.MISSING, fact="not installed", advice=advice)
    if module.trouble is not None:
        fact = f"{module.version} is installed and cannot be imported: {module.trouble}"
        advice = f"reinstall it for this torch, or uninstall it ({serves} is off until then)"
        return Line(name=name, state=State.WARN, fact=fact, advice=advice)
    return Line(name=name, state=State.OK, fact=f"{module.version}, importable")


def _slurm(facts: Facts) -> Line:
    slurm = facts.slurm
    job = f", inside job {slurm.job}" if slurm.job else ", not inside a job"
    if slurm.job is None and len(slurm.absent) == 3:
        advice = "only for clusters: run on a login node, or inside a job"
        return Line(name="slurm", state=State.MISSING, fact="no sinfo, scontrol or srun", advice=advice)
    if slurm.absent:
        advice = "load the Slurm module of this cluster, so that all three commands are on PATH"
        return Line(name="slurm", state=State.WARN, fact=f"no {', '.join(slurm.absent)} on PATH{job}", advice=advice)
    if slurm.trouble:
        advice = "ask `sinfo` yourself; the controller may be down"
        return Line(name="slurm", state=State.WARN, fact=f"sinfo fails: {slurm.trouble}{job}", advice=advice)
    return Line(name="slurm", state=State.OK, fact=f"{slurm.version}{job}")
