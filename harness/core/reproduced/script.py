"""The script that makes the recorded calls, as text: at most a screen, and nothing of the run but known words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pprint import pformat

from harness.core.reproduced.calls import Made, Members
from harness.core.reproduced.operations import STATEMENTS

MOST_LINES = 60
_CALLS_OF_A_RANK = (12, 8, 5, 3)  # tried in this order until the script fits


def script(calls: Mapping[int, Sequence[Made]], cause: str) -> str | None:
    """The whole text; None where the ranks did too many different things for a screen."""
    texts = (_text({rank: made[:most] for rank, made in calls.items()}, cause) for most in _CALLS_OF_A_RANK)
    return next((text for text in texts if text.count("\n") <= MOST_LINES), None)


def _text(calls: Mapping[int, Sequence[Made]], cause: str) -> str:
    groups = _groups(calls)
    rows = {rank: [_row(one, groups) for one in made] for rank, made in sorted(calls.items())}
    rooted = any(one.root is not None for made in calls.values() for one in made)
    used = dict.fromkeys(one.operation for made in calls.values() for one in made)
    lines = [
        f'"""The calls of {len(calls)} ranks around the point where they part ({cause}), and nothing else.',
        "",
        "Made from the record of a run: no line of the program is in it. It needs torch alone:",
        f"torchrun --standalone --nproc-per-node={len(calls)} repro.py",
        '"""',
        "",
        "import torch",
        "import torch.distributed as dist",
        "",
        "# rank: (operation, group, elements, type, peer), in the order in which it made them",
        f"CALLS = {pformat(rows, width=110, compact=True)}",
        f"GROUPS = {[list(members) for _, members in groups]}",
        "",
        'dist.init_process_group("gloo")',
        "rank, started = dist.get_rank(), []",
        "groups = [dist.new_group(members) for members in GROUPS]",
        "for operation, group, elements, kind, peer in CALLS[rank]:",
        "    where, first = (None, 0) if group is None else (groups[group], GROUPS[group][0])",
        "    tensor, size = torch.ones(elements, dtype=getattr(torch, kind)), dist.get_world_size(where)",
        *(["    first = first if peer is None else peer"] if rooted else []),
        *_branches(list(used)),
        "for work in started:",
        "    work.wait()",
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"


def _groups(calls: Mapping[int, Sequence[Made]]) -> list[tuple[str, Members]]:
    """Every group but the one of all ranks, in an order that all ranks make them in. The names stay out of the text."""
    return sorted({(one.group, one.members) for made in calls.values() for one in made if one.group})


def _row(one: Made, groups: Sequence[tuple[str, Members]]) -> tuple[str, int | None, int, str, int | None]:
    group = groups.index((one.group, one.members)) if one.group else None
    return (one.operation, group, one.elements, one.dtype, one.root if one.peer is None else one.peer)


def _branches(operations: Sequence[str]) -> list[str]:
    lines = []
    for number, operation in enumerate(operations):
        lines += [f'    {"elif" if number else "if"} operation == "{operation}":', f"        {STATEMENTS[operation]}"]
    return lines
