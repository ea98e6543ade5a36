"""Advice and claims that depend on the facts of the run: the condition, the loop, the transfers, the counts."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_harness.core.report import Place
from nsa_harness.texts.templates import render_template

LINE = Place(file="/own/train.py", line=31)


def advice(cause: str, **facts: Any) -> str:
    return render_template(cause, "advice", {"remedy": "Do.", "condition": None, "rank": 0, "ranks": (0,), **facts})


def call(op: str) -> dict[str, Any]:
    return {"op": op, "number": 4, "group": "0", "line": LINE}


def condition(text: str, *, leaves: bool = False) -> dict[str, Any]:
    return {"text": text, "leaves": leaves, "line": LINE, "ranks": (0,)}


@pytest.mark.parametrize("cause", ["rank_conditional_collective", "rank0_only_collective"])
@pytest.mark.parametrize(
    ("facts", "start"),
    [
        (
            {"variant": "extra", "condition": condition("if loss < best")},
            "Move the call out of `if loss < best`: every",
        ),
        (
            {"variant": "missing", "condition": condition("if empty: return", leaves=True)},
            "Make the call before `if empty: return` ends the function or the iteration, so that every rank",
        ),
        ({"variant": "extra", "own_call": call("barrier")}, "Let every rank reach this barrier, or none."),
        (
            {"variant": "extra", "own_call": call("reduce")},
            "Let every rank reach this reduce, or none; a rank that has nothing to add can pass zeros.",
        ),
        (
            {"variant": "missing", "expected_call": call("barrier")},
            "Let every rank reach this barrier, in the same order.",
        ),
        (
            {"variant": "missing", "expected_call": call("all_reduce")},
            "Let every rank reach this all_reduce, in the same order; a rank that has nothing to add can pass zeros.",
        ),
        ({"variant": "repeated", "own_call": call("broadcast")}, "Let every rank reach this broadcast equally often."),
        (
            {"variant": "count", "reduces_gradients": True},
            "Let every rank do the same number of iterations: give every rank the same number of batches"
            " (`drop_last=True`, a DistributedSampler that pads), or put the loop into the context manager"
            " torch.distributed.algorithms.Join, which DDP supports.",
        ),
        (
            {"variant": "count", "reduces_gradients": False},
            "Let every rank do the same number of iterations. If the number depends on the data of the rank, agree",
        ),
        ({"variant": "dropped_batch"}, "Drop the batch on every rank or on none: all_reduce a flag first."),
        (
            {"variant": "fewer_collectives", "op": "all_gather"},
            "In each step, call all_gather equally often on every rank.",
        ),
        ({"variant": "extra_module"}, "Call the same modules on every rank, in the same order:"),
        ({"variant": "order"}, "Do."),
    ],
    ids=lambda value: value["variant"] if isinstance(value, dict) else "",
)
def test_calls_that_differ(cause: str, facts: dict[str, Any], start: str) -> None:
    text = advice(cause, **facts)
    assert text.startswith(start)
    assert text.endswith("are collectives too.") is (cause == "rank0_only_collective")


def wait(rank: int, sends: bool | None) -> dict[str, Any]:
    half = None if sends is None else {"op": "send" if sends else "recv", "sends": sends, "peers": (1 - rank,)}
    return {"rank": rank, "blocked_in": "all_reduce #4", "transfer": half, "line": LINE}


@pytest.mark.parametrize(
    ("waits", "did", "start"),
    [
        ((False, False), "", "Both sides receive first: let one of them send first, or use batch_isend_irecv on both."),
        ((True, True), "", "Both sides send first: let one of them receive first, or use batch_isend_irecv on both."),
        ((False, None), "", "Rank 1 waits for a transfer while rank 0 is in all_reduce #4: put the transfer and that"),
        ((False,), "", "Pair each recv with a send of the partner, in the same order on both ranks."),
        (
            (False, None),
            "left its rounds",
            "Let the ranks on both sides do the same number of iterations of that loop.",
        ),
        ((False, None), "skipped", "Let rank 0 call send in every iteration, or let its partner skip"),
        (
            (False, None),
            "took another peer",
            "Let both sides compute the partner in the same way: the rank that rank 0",
        ),
        ((False, None), "went past", "Let rank 0 make the matching call before all_reduce #4, or let rank 1 leave its"),
    ],
)
def test_transfers_that_do_not_match(waits: tuple[bool | None, ...], did: str, start: str) -> None:
    departed = {"did": did, "op": "send", "line": LINE, "waiting_rank": 1} if did else None
    text = advice(
        "p2p_unmatched",
        variant="half is missing",
        waits=[wait(1 - at, sends) for at, sends in enumerate(waits)],
        departed=departed,
    )
    assert text.startswith(start)


def test_transfers_of_which_both_halves_were_called() -> None:
    assert advice("p2p_unmatched", variant="halves do not match").startswith(
        "Compare tag, group and order on both ranks"
    )


@pytest.mark.parametrize(
    ("sizes", "text"), [((1, 3), "1 element on rank 0, 3 elements on rank 1"), ((0, 2), "0 elements")]
)
def test_a_single_element_is_counted_in_the_singular(sizes: tuple[int, int], text: str) -> None:
    entered = tuple({"ranks": (rank,), **call("all_reduce"), "value": size} for rank, size in enumerate(sizes))
    assert text in render_template(
        "shape_mismatch",
        "claim",
        {"variant": "shape", "step": None, "entered": entered, "condition": None, "inside_with": None},
    )


def test_calls_of_several_groups_are_told_with_their_groups() -> None:
    waits = [
        {"rank": rank, "waits_for": 1 - rank, "never_entered": False, "call": {**call("barrier"), "group": group}}
        for rank, group in enumerate(("0", "tp"))
    ]
    facts = {"waits": waits, "took_another_order": False, "waits_in_earlier_call": None}
    assert render_template("cross_group_deadlock", "claim", facts) == (
        "2 ranks wait for each other across process groups: rank 0 waits for rank 1 in barrier #4 of the default group"
        " (own/train.py:31), rank 1 waits for rank 0 in barrier #4 of group tp (own/train.py:31)"
    )
