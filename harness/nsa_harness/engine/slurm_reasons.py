"""Words for the reasons that Slurm gives for a pending job, and which setting the user can change."""

from __future__ import annotations

import re

NO_REASON = ("", "None", "(null)", "None assigned")
_NEVER = "so it never starts; Ctrl-C cancels it"
_WAITS = {
    "Resources": "it waits for free nodes",
    "Priority": "jobs with a higher priority are before it in the queue",
    "Dependency": "it waits for another job",
    "BeginTime": "its begin time has not come",
    "Licenses": "it waits for a license",
    "JobHeldUser": "it is held; `scontrol release` lets it start",
    "JobHeldAdmin": "an administrator holds it",
    "Reservation": "it waits for its reservation",
    "PartitionDown": "the partition is down; --partition chooses another one",
    "PartitionInactive": "the partition is inactive; --partition chooses another one",
    "NodeDown": "a node that it needs is down",
    "JobArrayTaskLimit": "as many tasks of its array are running as its throttle allows",
    "QOSUsageThreshold": "its QOS has used more than its share, so it waits",
}
_MISTAKES = {
    "PartitionConfig": (
        "it asks for more on each node than the nodes of the partition have",
        "change cpus_per_node, gpus_per_node or the --mem of `directives`, or --partition",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition has or allows, or they are down",
        "change --nodes or --partition",
    ),
    "PartitionTimeLimit": (
        "it asks for more time than the partition allows",
        "change time_limit or limits.deadline_s, or --partition",
    ),
    "BadConstraints": ("no node has what it asks for", "change --constraint, or the `directives` of the site file"),
    "DependencyNeverSatisfied": (
        "the job that it waits for has failed",
        "remove --dependency from the `directives` of the site file",
    ),
    "AccountNotAllowed": ("the partition does not admit its account", "change --account or --partition"),
    "InvalidAccount": ("its account does not exist", "change --account"),
    "QOSNotAllowed": ("its account or partition does not admit its QOS", "change --qos in `directives`, or --account"),
    "InvalidQOS": ("its QOS does not exist", "change --qos in the `directives` of the site file"),
    "MaxMemPerLimit": ("it asks for more memory than is allowed", "change --mem in the `directives` of the site file"),
    "ReservationDeleted": ("its reservation was deleted", "remove --reservation from the `directives`"),
}
_RESOURCES = {
    "cpu": ("cores", "cpus_per_node"),
    "node": ("nodes", "--nodes"),
    "mem": ("memory", "--mem in the `directives` of the site file"),
    "memory": ("memory", "--mem in the `directives` of the site file"),
    "gres": ("GPUs", "--gpus-per-node"),
    "license": ("licenses", "the `directives` of the site file"),
    "billing": ("billed resources", "--nodes and --gpus-per-node"),
    "wallduration": ("time", "time_limit or limits.deadline_s"),
    "wall": ("time", "time_limit or limits.deadline_s"),
}
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc)(?P<kind>Grp|Max|Min)(?P<resource>Cpu|CPU|Node|Memory|Mem|GRES|License|Billing|WallDuration|Wall)"
    r"(?P<minutes>(?:Run)?Minutes)?(?P<scope>PerJob|PerNode|PerUser|NotSatisfied|)(?:Limit)?"
)
_JOBS = re.compile(r"(?P<owner>QOS|Assoc)(?:Grp|Max)(?P<is_submitted>Submit)?Jobs?(?:PerUser)?(?:Limit)?")
_OWNERS = {"QOS": "its QOS", "Assoc": "its account"}


def reason_text(reason: str) -> str:
    """Return the reason why a job is pending in words, or as Slurm gives it if it is not a known reason.

    If waiting does not help, the text says so, and names the settings of nsa-harness that can be changed.
    """
    if reason in NO_REASON:
        return ""
    name, _, nodes = reason.partition(",_UnavailableNodes:")
    name = name.partition(",")[0]
    if name == "ReqNodeNotAvail":
        which = f": {nodes}" if nodes else ""
        return (
            f"nodes that it needs are down, drained or reserved{which} (ReqNodeNotAvail); `sinfo -R` says why, and"
            " --partition or --constraint chooses other nodes"
        )
    if name in _MISTAKES:
        mistake, remedy = _MISTAKES[name]
        return f"{mistake}, {_NEVER}; {remedy} ({name})"
    text = _WAITS.get(name) or _limit_text(name)
    return f"{text} ({name})" if text else reason.replace("_", " ")


def _limit_text(name: str) -> str:
    """Return the meaning of a reason about a limit of a QOS or an account, or "" if it is not one."""
    if jobs := _JOBS.fullmatch(name):
        verb = "submitted" if jobs["is_submitted"] else "running"
        return f"the limit of {verb} jobs of {_OWNERS[jobs['owner']]} is reached, so it waits for others to end"
    limit = _LIMIT.fullmatch(name)
    if limit is None:
        return ""
    owner, (resource, setting) = _OWNERS[limit["owner"]], _RESOURCES[limit["resource"].lower()]
    if limit["kind"] == "Min":
        return f"it asks for fewer {resource} than {owner} requires, {_NEVER}; change {setting}"
    if limit["minutes"] and limit["scope"] != "PerJob":
        return f"the budget of {resource} x time of {owner} is used up; change --account, or ask the administrators"
    if limit["scope"] in ("PerJob", "PerNode"):
        where = "on each node" if limit["scope"] == "PerNode" else "in a job"
        return f"it asks for more {resource} than {owner} allows {where}, {_NEVER}; change {setting}"
    who = "of a user" if limit["scope"] == "PerUser" else "of all jobs together"
    return (
        f"with it, the {resource} {who} would exceed the limit of {owner}, so it waits for other jobs to end; if none"
        f" runs, it asks for more than the limit: change {setting}"
    )
