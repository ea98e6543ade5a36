"""What a Slurm cluster offers, read from what its commands print. Text that makes no sense is no error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nsa_harness.engine.slurm_reasons import NO_REASON


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The limits of a partition."""

    name: str
    max_time_s: float | None  # None: unlimited
    max_nodes: int | None  # of one job; None: unlimited
    is_default: bool


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions in what `scontrol show partition -o` prints."""
    lines = [dict(_PARTITION_FIELD.findall(line)) for line in text.splitlines()]
    return tuple(
        Partition(
            name=fields["PartitionName"],
            max_time_s=parse_time_limit(fields.get("MaxTime", "")),
            max_nodes=int(fields["MaxNodes"]) if fields.get("MaxNodes", "").isdecimal() else None,
            is_default=fields.get("Default") == "YES",
        )
        for fields in lines
        if fields.get("PartitionName")
    )


_PARTITION_FIELD = re.compile(r"(?:^|\s)(PartitionName|MaxTime|MaxNodes|Default)=(\S*)")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a job can ask for on one node."""

    name: str
    cpus: int
    gpus: int
    features: tuple[str, ...]


def parse_nodes(text: str) -> tuple[NodeFacts, ...]:
    """Return the nodes in what `sinfo --Node --format=%N|%c|%G|%f` prints, each node once."""
    nodes: dict[str, NodeFacts] = {}
    for line in text.splitlines():
        name, cpus, gres, features = (*map(str.strip, line.split("|")), "", "", "")[:4]
        if name and cpus.isdecimal():
            known = () if features in NO_REASON else tuple(features.split(","))
            nodes[name] = NodeFacts(name=name, cpus=int(cpus), gpus=parse_gpus(gres) or 0, features=known)
    return tuple(nodes.values())


def feature_names(constraint: str) -> tuple[str, ...]:
    """Return the features that `sbatch --constraint` asks for, such as "a100" and "ib" for "[a100*2&ib]"."""
    words = re.split(r"[&|\[\](),!]", constraint)
    return tuple(dict.fromkeys(name for word in words if (name := word.partition("*")[0].strip())))


def parse_time_limit(text: str) -> float | None:
    """Return a time limit in seconds, as `sbatch --time` takes it, such as "90", "1:30:00" or "2-12".

    Returns None for no limit. Raise ValueError if the text is none of these forms.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1", ""):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("no time limit of Slurm")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is None:
        # One number is minutes, two are minutes and seconds.
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
        return float(hours * 3600 + minutes * 60 + seconds)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return float(int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds)


_TIME = re.compile(r"(?:(?P<days>[0-9]{1,4})-)?(?P<clock>[0-9]{1,9}(?::[0-9]{1,2}){0,2})")


def parse_gpus(text: str) -> int | None:
    """Return the most GPUs of a node from what `sinfo --format=%G` prints, or None if it names none."""
    counts = [int(number) for number in re.findall(r"\bgpu(?::[A-Za-z][\w.-]*)?:([0-9]+)", text)]
    return max(counts, default=None)
