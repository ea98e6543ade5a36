"""From the recordings of ranks to the lines that may have to change."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Candidate, Explanation, OriginKind, SilentDifference
from nsa_harness.core.recording.origin import kind_of_text
from nsa_harness.core.recording.recording import (
    Activation,
    Communication,
    Execution,
    RankRecording,
    ThreadRecording,
)
from nsa_harness.core.recording.trace import trace_of
from tests.core.recorded import FILE, Thing, at, call, main, op, recorded


def lines(explanation: Explanation) -> list[int | None]:
    return [candidate.place.line for candidate in explanation.candidates]


def explained(source: str, *recordings: RankRecording) -> Explanation:
    return explain(recordings, {FILE: dedent(source)})


STOPPING = """\
for step in range(9):
    loss = evaluate()
    if loss > best:
        break
    all_reduce(grads)
barrier()
"""


def stopping(rank: int, losses: list[float], *, stops: bool) -> RankRecording:
    """A rank that leaves its loop by its own loss, or that waits in the loop."""
    executions = []
    for step, loss in enumerate(losses):
        executions += [
            at(1, writes={"step": step}),
            at(2, call("evaluate", at(11), first_line=10, returned=loss), writes={"loss": loss}),
            at(3, reads={"loss": loss, "best": 5.0}),
        ]
        last = step == len(losses) - 1
        executions.append(at(4) if stops and last else at(5, op(returned=not last)))
    if stops:
        executions.append(at(6, op("barrier", returned=False)))
    return recorded(rank, main(*executions, ended=False))


def test_a_rank_that_leaves_its_loop_early_divides_from_the_others_at_the_condition() -> None:
    found = explained(
        STOPPING,
        stopping(0, [1.0, 2.0, 3.0], stops=False),
        stopping(1, [1.0, 2.0, 9.0], stops=True),
        stopping(2, [1.0, 2.0, 3.0], stops=False),
    )
    assert found.division is not None
    assert (found.division.place.line, found.division.occurrence, found.division.condition) == (3, 3, "loss > best")
    assert [(ranks, place and place.line) for ranks, place in found.division.ways] == [((1,), 4), ((0, 2), 5)]
    assert found.division.values[0].name == "loss"
    assert found.division.values[0].values == ((0, "3.0"), (1, "9.0"), (2, "3.0"))
    assert found.candidates[0].place.line == 11  # the number begins to differ where it is made of data
    assert candidate_at(found, 3).ranks == (1,)
    assert {(ranks, operation) for ranks, _, operation in found.ends} == {((0, 2), "all_reduce"), ((1,), "barrier")}


def candidate_at(explanation: Explanation, line: int) -> Candidate:
    return next(candidate for candidate in explanation.candidates if candidate.place.line == line)


def kinds(explanation: Explanation) -> dict[int | None, OriginKind]:
    return {candidate.place.line: candidate.kind for candidate in explanation.candidates}


def test_a_role_is_no_division_if_both_roles_communicate_the_same() -> None:
    def role(rank: int) -> RankRecording:
        first = at(1, reads={"rank": rank})
        own = at(2, op("broadcast", root=0)) if rank == 0 else at(4, op("broadcast", root=0))
        return recorded(rank, main(first, own, at(5, op())))

    source = "if rank == 0:\n    broadcast(x)\nelse:\n    broadcast(buffer)\nall_reduce(x)\n"
    found = explained(source, role(0), role(1))
    assert (found.division, found.candidates, found.notes) == (None, (), ("no_difference",))


def test_ranks_that_make_up_for_a_difference_have_no_division() -> None:
    def early(rank: int) -> RankRecording:
        now, later = ([at(2, op())], []) if rank == 0 else ([], [at(4, op())])
        steps = [at(1), *now, at(3, reads={"rank": rank}), *later, at(5, op("barrier")), at(6, reads={"x": rank})]
        return recorded(rank, main(*steps))

    assert explained("", early(0), early(1)).division is None


def test_a_rank_that_waits_is_no_division_in_the_functions_around_it() -> None:
    def stuck(rank: int) -> RankRecording:
        inner = [at(11, reads={"x": rank})] + ([at(12, op(returned=False))] if rank == 0 else [])
        ended = rank == 1
        rest = [at(2, op("barrier", returned=False))] if ended else []
        return recorded(rank, main(at(1, call("f", *inner, first_line=10, ended=ended)), *rest, ended=False))

    source = "f()\nbarrier()\n" + 7 * "\n" + "def f():\n    if x:\n        all_reduce()\n"
    found = explained(source, stuck(0), stuck(1))
    assert found.division is not None
    assert found.division.place.line == 11


@pytest.mark.parametrize(
    ("condition", "values", "is_provable"),
    [
        ("rank == 0", {"rank": (0, 1)}, True),
        ("loss > 2", {"loss": (5.0, 0.5)}, False),
        ("exists(path)", {}, False),
        ("path.exists() and rank < 9", {"rank": (0, 1)}, False),
        ("is_main_process()", {}, True),
    ],
)
def test_a_draw_of_one_rank_in_a_call_of_its_own_is_a_leak(
    condition: str, values: dict[str, tuple[float, float]], is_provable: bool
) -> None:
    def partner(rank: int) -> RankRecording:
        show = [at(2, call("show", at(21, draws=[("random", "a", "b")]), first_line=20))] if rank == 0 else []
        state = "b" if rank == 0 else "a"
        draw = at(31, draws=[("random", state, state + "+")], writes={"mate": state})
        mate = at(3, call("draw", draw, first_line=30, returned=state), writes={"mate": state})
        exchange = at(4, op(returned=False), reads={"mate": state}) if rank == 0 else at(6, op("barrier"))
        return recorded(
            rank,
            main(
                at(1, reads={name: by_rank[rank] for name, by_rank in values.items()}),
                *show,
                mate,
                at(5, reads={"mate": state}),
                exchange,
            ),
        )

    source = f"""\
        if {condition}:
            show()
        mate = draw()
        """
    found = explained(source, partner(0), partner(1))
    leak = candidate_at(found, 21)
    assert (leak.kind, leak.name) == (OriginKind.LEAK, "generator:random")
    assert leak.caller is not None
    assert leak.caller.line == 2
    assert leak.is_provable == is_provable


def test_a_number_of_the_ranks_own_data_that_decides_is_what_is_not_reduced() -> None:
    def stopped(rank: int) -> RankRecording:
        bad, stops = 3 * rank, rank == 1
        update = call("update", at(11, reads={"self.bad": bad, "self.patience": 3}), first_line=10, returned=stops)
        end = at(5, op("barrier", returned=False)) if stops else at(4, op(returned=False))
        data = at(1, writes={"data": Thing(7, "Tensor", f"float32 [8] crc {rank}")})
        return recorded(rank, main(data, at(2, update, reads={"data": Thing(7, "Tensor", f"crc {rank}")}), end))

    source = "data = part()\nif update(data):\n    stop()\nall_reduce(x)\nbarrier()\n" + 4 * "\n"
    found = explained(source + "def update(data):\n    return self.bad >= self.patience\n", stopped(0), stopped(1))
    first = next(one for one in found.candidates if one.place.line == 2)
    assert (first.kind, first.name) == (OriginKind.MISSING_REDUCTION, "self.bad")
    assert first.values[0].values == ((0, "0"), (1, "3"))


MOVED = """\
def moved(h):
    drift = h.norm()
    return drift > 0.1




h = load()
if moved(h):
    fetch()
all_reduce(x)
"""


def moving(rank: int, h: object) -> RankRecording:
    """A rank that fetches if the norm of its own data is large."""
    drift = 0.05 + rank
    norm = at(2, reads={"h": h}, writes={"drift": drift})
    decided = call("moved", norm, at(3, reads={"drift": drift}), arguments={"h": h}, returned=rank == 1)
    last = at(10, op("recv", returned=False)) if rank else at(11, op(returned=False))
    return recorded(rank, main(at(8, writes={"h": h}), at(9, decided, reads={"h": h}), last, ended=False))


@pytest.mark.parametrize("is_origin", [True, False])
def test_what_a_function_returns_by_a_number_is_the_origin_unless_a_number_differed_before(is_origin: bool) -> None:
    data = [Thing(5, "Tensor", f"float32 [8] crc {rank}") if is_origin else 2.5 + rank for rank in range(2)]
    found = explained(MOVED, *(moving(rank, h) for rank, h in enumerate(data)))
    returned = next(one for one in found.candidates if one.place.line in (2, 3))
    assert (returned.kind, returned.name) == (OriginKind.MISSING_REDUCTION, "drift")
    assert returned.is_provable == is_origin


COUNTED = """\
rows = cut(len(docs))



ids = pack(rows)



seen = count(ids)



if seen > 9:
    all_reduce()
barrier()
"""


@pytest.mark.parametrize("kind", ["Tensor", "list"])
def test_a_number_of_a_tensor_is_the_origin_although_the_data_in_the_tensor_differed_before(kind: str) -> None:
    def counting(rank: int) -> RankRecording:
        rows = Thing(3, "list", f"{3 + rank} items crc {rank}")
        ids = Thing(4, kind, f"int64 [4] crc {rank}")
        made = [at(1, writes={"rows": rows}), at(5, reads={"rows": rows}, writes={"ids": ids})]
        counted = at(9, reads={"ids": ids}, writes={"seen": 9 + rank})
        last = at(14, op(returned=False)) if rank else at(15, op("barrier", returned=False))
        return recorded(rank, main(*made, counted, at(13, reads={"seen": 9 + rank}), last, ended=False))

    found = candidate_at(explained(COUNTED, counting(0), counting(1)), 9)
    assert (found.kind, found.name) == (OriginKind.MISSING_REDUCTION, "seen")
    assert found.is_provable == (kind == "Tensor")


@pytest.mark.parametrize("before", ["tensor", "number", "communication"])
def test_a_number_that_decides_at_once_is_the_origin_if_nothing_but_data_differed_before(before: str) -> None:
    def routed(rank: int) -> RankRecording:
        inbox = 4 + rank if before == "number" else Thing(4, "Tensor", f"float32 [{4 + rank}, 2] crc {rank}")
        made = at(1, writes={"inbox": inbox})
        load = at(8, reads={"inbox": inbox}, writes={"load": rank * 5})
        made_equal = [op()] if before == "communication" else []
        decides = at(9, *made_equal, reads={"load": rank * 5})
        last = at(10, op("recv", returned=False)) if rank else at(11, op(returned=False))
        return recorded(rank, main(made, load, decides, last, ended=False))

    source = "inbox = receive()\n\n\n\n\n\n\nload = count(inbox)\nif load == 0:\n    fetch()\nall_reduce()\n"
    found = candidate_at(explained(source, routed(0), routed(1)), 9)
    assert found.kind is OriginKind.MISSING_REDUCTION
    assert found.is_provable == (before == "tensor")


def test_an_extra_draw_and_a_hash_are_named_even_if_no_value_leads_from_them() -> None:
    def drawing(rank: int) -> RankRecording:
        extra = (
            [at(3, call("preview", at(18, draws=[("random", "seed", "drawn")]), first_line=17))] if rank == 0 else []
        )
        draw = at(7, draws=[("random", "seed" if rank else "drawn", f"next {rank}")])
        key = at(8, call("key", at(15), first_line=14, returned=f"k{rank}"), writes={"key": f"k{rank}"})
        waits = at(10, op(returned=False)) if rank else at(11, op("barrier", returned=False))
        seed = at(1, draws=[("random", f"new {rank}", "seed")])
        return recorded(rank, main(seed, at(2, reads={"rank": rank}), *extra, draw, key, at(9), waits, ended=False))

    source = "seed(3)\nif rank == 0:\n    preview()\n\n\n\npick()\nkey = make()\nx = 1\nall_reduce()\nbarrier()\n\n\n"
    found = explained(
        f"{source}def make():\n    return hash(x)\n\ndef preview():\n    pick()\n", drawing(0), drawing(1)
    )
    by_line = {one.place.line: one for one in found.candidates}
    assert (by_line[15].kind, by_line[15].is_provable) == (OriginKind.HASH_ORDER, True)
    assert (by_line[18].kind, by_line[18].name, by_line[18].is_provable) == (OriginKind.LEAK, "generator:random", True)
    assert by_line[18].caller is not None
    assert by_line[18].caller.line == 3


@pytest.mark.parametrize(
    ("use", "is_found"),
    [("'a' in known", False), ("sorted(known)", False), ("known.add('c')", False), ("list(known)", True)],
)
def test_the_order_of_a_set_matters_only_where_it_shows(use: str, is_found: bool) -> None:
    def searching(rank: int) -> RankRecording:
        names = Thing(7, "set", ("{'a', 'b'}", "{'b', 'a'}")[rank])
        search = [at(1, writes={"known": names}), at(2, reads={"known": names}, writes={"x": f"{use} {rank}"})]
        waits = at(4, op(returned=False)) if rank else at(5, op("barrier", returned=False))
        return recorded(rank, main(*search, at(3, reads={"x": f"{use} {rank}"}), waits, ended=False))

    source = f"known = set(corpus)\nx = {use}\nif x:\n    all_reduce()\nbarrier()\n"
    found = explained(source, searching(0), searching(1)).candidates
    assert (OriginKind.HASH_ORDER in [one.kind for one in found if one.is_provable]) == is_found


def test_a_clock_from_which_no_value_leads_to_the_failure_is_no_candidate() -> None:
    def timing(rank: int) -> RankRecording:
        waits = at(3, op(returned=False)) if rank else at(4, op("barrier", returned=False))
        return recorded(rank, main(at(1, writes={"t0": 5.5 + rank}), at(2), waits, ended=False))

    found = explained("t0 = time.time()\nif late():\n    all_reduce()\nbarrier()\n", timing(0), timing(1))
    assert 1 not in lines(found)


@pytest.mark.parametrize("is_loop", [False, True])
def test_only_a_loop_that_goes_on_by_a_number_stops_a_thread_by_it(is_loop: bool) -> None:
    def stopped(rank: int) -> RankRecording:
        count = at(1, writes={"hits": 4 + rank})
        turns = [at(2, reads={"hits": 4 + rank}) for _ in range(60 if is_loop else 1)]
        return recorded(rank, main(count, *turns, ended=False))

    found = explained("hits = count(x)\nwhile hits:\n    sleep(1)\n", stopped(0), stopped(1))
    assert candidate_at(found, 1).is_provable == is_loop


def test_a_counter_that_only_hands_on_a_difference_is_no_candidate() -> None:
    def resumed(rank: int) -> RankRecording:
        step = 3 * rank
        executions = [at(1, reads={"path": "x"}, writes={"step": step})]
        for _ in range(6 - step):
            executions += [
                at(11, reads={"step": step, "most": 6}),
                at(12, op()),
                at(20, reads={"step": step}, writes={"step": step + 1}),
            ]
            step += 1
        executions += [at(11, reads={"step": step, "most": 6}), at(25, op("barrier", returned=False))]
        if rank == 0:
            executions[11].communications[0].returned = False
            executions = executions[:12]
        return recorded(rank, main(*executions, ended=False))

    loop = "while step < most:\n    all_reduce()\n" + 7 * "\n" + "    step += 1\n"
    found = explained("step = load(path)\n" + 9 * "\n" + loop, resumed(0), resumed(1))
    assert found.division is not None
    assert 20 not in lines(found)
    assert [place.line for place, _ in candidate_at(found, 1).chain] == [1, 20]


def test_the_exception_of_one_rank_comes_before_the_network_errors_of_the_others() -> None:
    def failing(rank: int) -> RankRecording:
        if rank == 0:
            wait = at(2, op(error="RuntimeError", returned=False), raised="RuntimeError: Connection closed by peer")
            return recorded(rank, main(at(1, call("load", at(11), first_line=10)), wait))
        load = call("load", at(11, raised="KeyError"), first_line=10)
        return recorded(rank, main(at(1, load, raised="KeyError")))

    found = explained("", failing(0), failing(1))
    assert (found.candidates[0].place.line, found.candidates[0].kind) == (11, OriginKind.EXCEPTION)
    assert found.candidates[0].ranks == (1,)
    assert 2 not in lines(found)


def test_an_exception_that_one_rank_handles_leads_to_the_end_of_its_handler() -> None:
    source = "try:\n    f()\n\n\n\n    all_reduce()\nexcept ValueError:\n    pass\nbarrier()\n"

    def handling(rank: int) -> RankRecording:
        inner = call("f", at(21, raised="ValueError" if rank else ""), first_line=20)
        if rank == 0:
            return recorded(rank, main(at(1), at(2, inner), at(6, op(returned=False)), ended=False))
        steps = [at(1), at(2, inner, raised="ValueError", handled=True), at(7), at(8), at(9, op("barrier"))]
        return recorded(rank, main(*steps))

    found = explained(source, handling(0), handling(1))
    assert found.division is not None
    assert found.division.place.line == 2
    assert lines(found)[:2] == [21, 8]
    assert kinds(found)[2] is OriginKind.EXCEPTION


def test_a_message_with_another_tag_leads_to_where_the_tags_came_from() -> None:
    def exchanging(rank: int) -> RankRecording:
        count = 1 - rank
        more = [at(3, call("count", at(21, reads={"c": Thing(7), "c.n": 0}, writes={"c.n": 1}), first_line=20))]
        message = op("send", peer=1, tag=1) if rank == 0 else op("recv", peer=0, tag=0, returned=False)
        line = 5 if rank == 0 else 7
        return recorded(
            rank,
            main(
                at(1, writes={"rank": rank}),
                at(2, reads={"rank": rank}, writes={"c": Thing(7)}),
                *(more if rank == 0 else []),
                at(4, reads={"rank": rank}),
                at(line, message, reads={"c": Thing(7), "c.n": count}),
                ended=rank == 0,
            ),
        )

    source = """\
        rank = get_rank()
        if rank == 0:
            count()
        if rank == 0:
            send()
        else:
            recv()
        """
    found = explained(source, exchanging(0), exchanging(1))
    assert candidate_at(found, 21).name == "c.n"


def test_a_counter_that_every_rank_advances_leaks_where_one_rank_alone_advances_it() -> None:
    def counting(rank: int) -> RankRecording:
        def count(n: int) -> Activation:
            add = at(21, reads={"c": Thing(7), "c.n": n}, writes={"c.n": n + 1})
            return call("count", add, at(22, reads={"c": Thing(7), "c.n": n + 1}), first_line=20, returned=n + 1)

        extra = [at(3, count(0))] if rank == 0 else []
        tag = len(extra) + 1
        decide = at(4, count(tag - 1), writes={"tag": tag}), at(5, reads={"tag": tag})
        wait = at(6, op(returned=False)) if rank == 0 else at(8, op("barrier", returned=False))
        return recorded(rank, main(at(1, writes={"rank": rank}), at(2, reads={"rank": rank}), *extra, *decide, wait))

    source = "rank = get_rank()\nif rank == 0:\n    count()\ntag = count()\nif tag > 1:\n    all_reduce()\n"
    source += "else:\n    barrier()\n" + 12 * "\n" + "c.n += 1\nreturn c.n\n"
    found = explained(source, counting(0), counting(1))
    leak = candidate_at(found, 21)
    assert (leak.kind, leak.name, leak.is_provable) == (OriginKind.LEAK, "c.n", True)
    assert leak.caller is not None
    assert leak.caller.line == 3


def test_the_order_of_a_set_that_is_written_as_such_is_hash_order() -> None:
    for text in ("x = list({f(u) for u in corpus})", "x = list(set(corpus))"):
        assert kind_of_text(text) is OriginKind.HASH_ORDER
    assert kind_of_text("x = list({u: f(u) for u in corpus})") is OriginKind.UNKNOWN


def test_a_message_that_was_left_out_leads_to_the_loop_that_should_have_sent_it() -> None:
    source = """\
        rank = get_rank()
        if rank == 0:
            for p in weights():
                send(p)



            all_reduce()


        else:
            recv(p)
        """

    def sending(rank: int) -> RankRecording:
        branch = [at(1, writes={"rank": rank}), at(2, reads={"rank": rank})]
        if rank == 1:
            return recorded(rank, main(*branch, at(12, op("recv", peer=0, returned=False)), ended=False))
        loop = at(3, call("weights", at(21), first_line=20))
        return recorded(rank, main(*branch, loop, at(8, op(returned=False)), ended=False))

    assert {3, 21} <= set(lines(explained(source, sending(0), sending(1))))


def test_a_rank_that_polls_for_what_never_comes_leads_to_the_hash_in_its_name() -> None:
    source = "key = name()\nif rank == 0:\n    all_reduce()\nelse:\n    while not exists(path):\n        sleep(1)\n"

    def polling(rank: int) -> RankRecording:
        key = f"k{7 + rank}"
        hashed = call("name", at(21, reads={"text": "a"}, writes={"n": key}), first_line=20, returned=key)
        branch = [at(1, hashed, writes={"key": key}), at(2, reads={"rank": rank})]
        if rank == 0:
            return recorded(rank, main(*branch, at(3, op(returned=False)), ended=False))
        poll = [at(5, reads={"path": key}), at(6)]
        return recorded(rank, main(*branch, at(4, reads={"key": key}, writes={"path": key}), *poll, *poll, ended=False))

    found = explained(source + 14 * "\n" + "n = hash(text)\n", polling(0), polling(1))
    assert candidate_at(found, 21).kind is OriginKind.HASH_ORDER


def test_a_file_that_only_one_rank_finds_leads_to_the_line_that_removed_it() -> None:
    def resuming(rank: int) -> RankRecording:
        path = f"/tmp/part{rank}"
        prune = [at(1), at(2, reads={"file": "/tmp/part0"})] if rank == 1 else [at(1)]
        found = at(22, writes={"step": 5}) if rank == 1 else at(24, writes={"step": 0})
        wait = at(32, op(returned=False)) if rank == 0 else at(40, op("barrier", returned=False))
        ways = [at(21, reads={"path": path}), found, at(31, reads={"step": 5 * rank}), wait]
        return recorded(rank, main(*prune, *ways, ended=False))

    restore = "if path.exists():\n    step = load(path)\nelse:\n    step = 0\n"
    source = "if rank == 1:\n    file.unlink()\n" + 18 * "\n" + restore + 6 * "\n" + "if step < 5:\n    all_reduce()\n"
    found = explained(source, resuming(0), resuming(1))
    assert (candidate_at(found, 2).kind, candidate_at(found, 2).ranks) == (OriginKind.OTHER_RANKS_FILE, (1,))


def test_a_test_of_another_number_than_the_rank_is_no_role() -> None:
    def evaluating(rank: int) -> RankRecording:
        executions = [at(1, reads={"rank": rank}, writes={"every": 2 + rank})]
        for step in range(1, 3):
            executions.append(at(11, reads={"step": step, "every": 2 + rank}))
            executions.append(at(12, op("all_gather", returned=False)) if rank == 0 and step == 2 else at(21, op()))
        executions[-1].communications[0].returned = False
        return recorded(rank, main(*executions, ended=False))

    source = (
        "every = setting(rank)\n" + 9 * "\n" + "if step % every == 0:\n    all_gather()\n" + 8 * "\n" + "backward()\n"
    )
    assert lines(explained(source, evaluating(0), evaluating(1)))[0] == 11


def test_a_loop_over_generators_leads_to_where_the_generators_part() -> None:
    source = """\
        for batch in batches():
            all_reduce()
        barrier()
        """

    def training(rank: int) -> RankRecording:
        sizes = [3, 4] if rank else [3, 4, 5]
        inside = [at(20, reads={"files": Thing(1, "list", str(sizes))}, writes={"files": Thing(1, "list", str(sizes))})]
        for size in sizes:
            inside += [at(21, reads={"files": Thing(1, "list", str(sizes))}), at(22, reads={"size": size})]
        batches = call("batches", *inside, *([at(21)] if rank else []), first_line=20, ended=rank == 1)
        steps = [at(1, batches), at(2, op()), at(1), at(2, op()), at(1)]
        last = at(3, op("barrier", returned=False)) if rank else at(2, op(returned=False))
        return recorded(rank, main(*steps, last, ended=False))

    found = explained(source, training(0), training(1))
    assert found.division is not None
    assert found.division.place.line == 1
    assert lines(found)[:2] == [1, 21]
    assert [place.line for place, _ in found.candidates[1].chain] == [21]


def test_a_silent_fault_leads_to_the_first_values_that_differ() -> None:
    def drifting(rank: int) -> RankRecording:
        noise = at(2, reads={"n": 4}, writes={"noise": Thing(5, "Tensor", f"crc {rank}")})
        return recorded(rank, main(at(1, writes={"n": 4}), noise, at(3, op()), at(4, op("barrier"))))

    found = explained("n = 4\nnoise = torch.randn(n)\n", drifting(0), drifting(1))
    assert found.division is None
    assert [(c.place.line, c.kind, c.name) for c in found.candidates] == [(2, OriginKind.RANDOM, "noise")]


def test_three_ranks_of_which_two_go_the_same_way_name_the_third() -> None:
    found = explained(
        STOPPING, *(stopping(rank, [1.0, 9.0 if rank == 1 else 2.0], stops=rank == 1) for rank in range(3))
    )
    assert {candidate.ranks for candidate in found.candidates[:1]} == {(1,)}


def test_one_recording_has_no_division() -> None:
    found = explained("", stopping(0, [1.0], stops=False))
    assert (found.candidates, found.division, found.notes) == ((), None, ("one_rank",))
    assert [operation for _, _, operation in found.ends] == ["all_reduce"]


# Whatever the recordings hold.

COLLECTIVES = ["all_reduce", "backward", "barrier"]
SCALARS = st.sampled_from([0, 1, 2.5, "a", Thing(7), Thing(8, "list", "[1]"), Thing(8, "list", "[2]")])
NAMES = st.dictionaries(st.sampled_from(["x", "self", "self.n", "d['k']", "len(x)"]), SCALARS, max_size=2)


LOADING = """\
for batch in loader:
    loss(batch).backward()


def draw(gen):
    while True:
        crop = gen.crop()
        if crop.sum() > least:
            return crop
"""


def loading(rank: int, *, waits: bool, spins: bool, raises: str = "") -> RankRecording:
    """A rank whose loader has one worker, which draws again and again on rank 1, or raises there."""
    error = f"{raises}: in DataLoader worker process 0" if raises else ""
    training = [at(1, writes={"batch": 1}), at(2, op("backward", returned=True)), at(1, raised=error)]
    training = training if waits else [*training[:1], at(2, op("backward", returned=False))]
    one = recorded(rank, main(*training, ended=bool(raises)))
    rounds = [part for _ in range(3) for part in (at(6), at(7, writes={"crop": 0.1}), at(8))]
    rounds[-1] = at(7, raised=raises) if raises else rounds[-1]
    drawn = call("draw", *rounds, first_line=5, ended=bool(raises))
    first = call("draw", at(6), at(7), at(8), at(9), first_line=5, returned=1)
    activations = [first, drawn] if spins else [first]
    one.children = [ThreadRecording("DataLoader worker 0", recorded(rank, *activations).threads[0].activations)]
    return one


def test_a_worker_that_never_ends_is_where_its_rank_stopped() -> None:
    found = explained(LOADING, loading(0, waits=False, spins=False), loading(1, waits=True, spins=True))
    assert [end[2] for end in found.ends] == ["backward", "its DataLoader worker 0"]
    assert [end[1].line for end in found.ends if end[1]] == [2, 8]
    assert found.candidates[0].place.line in (6, 7, 8)
    assert found.candidates[0].ranks == (1,)


def test_what_a_worker_raised_comes_before_what_its_rank_raised() -> None:
    found = explained(
        LOADING, loading(0, waits=False, spins=False), loading(1, waits=True, spins=True, raises="ValueError")
    )
    assert found.candidates[0].place.line == 7
    assert [one.place.line for one in found.candidates if one.kind is OriginKind.EXCEPTION] == [7]


def test_workers_are_left_out_unless_a_rank_waits_for_one() -> None:
    ranks = [loading(rank, waits=False, spins=rank == 1) for rank in (0, 1)]
    found = explained(LOADING, *ranks)
    assert [end[2] for end in found.ends] == ["backward"]
    assert not any(line in (6, 7, 8) for line in lines(found))


def test_what_a_rank_does_after_a_fork_is_not_seen_by_its_worker() -> None:
    later = recorded(0, main(at(1), at(2), at(3)))
    later.children = [ThreadRecording("DataLoader worker 0", [call("draw", at(6), at(7))])]
    for order, execution in enumerate(later.children[0].activations[0].executions, start=3):
        execution.order = order
    trace = trace_of(later, with_children=True)
    assert [trace.is_visible(number, 4) for number in range(5)] == [True, True, False, True, True]
    assert not trace.is_visible(3, 2)


COLLECTING = """\
class Average:
    def __init__(self, model):
        self.parameters = list(model.parameters())

    def average(self):
        all_reduce(self.parameters)


def build():
    model = Model()
    average = Average(model)
    optimizer = Adam(model.parameters())
    add_head(model)
    return model, average


def add_head(model):
    model.head = Linear(8)


model, average = build()
average.average()
"""


def collecting(rank: int, *, again: bool = False, is_used: bool = True) -> RankRecording:
    """A rank that collects the parameters of its model in line 3, and adds a head in line 18."""
    average, parameters = Thing(1, "Average"), Thing(2, "list")
    own = {"self": average if is_used else Thing(9, "Average")}

    def collect() -> Activation:
        writes = {"self.parameters": parameters if is_used else Thing(8, "list")}
        return call("__init__", at(3, writes=writes), first_line=2, arguments=own)

    add = call("add_head", at(18, writes={"model.head": Thing(5, "Linear")}), first_line=17)
    building = [
        at(10),
        at(11, collect(), writes={"average": own["self"]}),
        at(12, writes={"optimizer": Thing(3, "Adam")}),
        at(13, add),
        *([at(11, collect())] if again else []),
        at(14),
    ]
    reduced = call(
        "average", at(6, op(), reads={"self.parameters": parameters}), first_line=5, arguments={"self": average}
    )
    return recorded(rank, main(at(21, call("build", *building, first_line=9)), at(22, reduced)))


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, [13]), ({"again": True}, []), ({"is_used": False}, [])],
    ids=["too early", "collected again", "used by nothing that communicates"],
)
def test_parameters_made_after_the_others_were_collected_are_named(changes: dict[str, bool], found: list[int]) -> None:
    ranks = [collecting(rank, **changes) for rank in (0, 1)]
    explanation = explain(ranks, {FILE: COLLECTING}, SilentDifference(kind="", names=("head.weight",)))
    assert [one.place.line for one in explanation.candidates if one.kind is OriginKind.STALE_PARAMETERS] == found
    assert explanation.ends == ()
    assert lines(explain(ranks, {FILE: COLLECTING})) == []


COPYING = """\
model = Model()
teacher = deepcopy(model)
student = DistributedDataParallel(model)
student(batch).backward()
"""


def test_a_copy_made_before_ddp_has_broadcast_is_named() -> None:
    def copying(rank: int, *, is_early: bool) -> RankRecording:
        copied, wrapped = at(2), at(3, op("DistributedDataParallel"))
        order = [copied, wrapped] if is_early else [wrapped, copied]
        return recorded(rank, main(at(1), *order, at(4, op("backward"))))

    silent = SilentDifference(kind="unequal copy", names=("conv.weight",))
    found = explain([copying(rank, is_early=True) for rank in (0, 1)], {FILE: COPYING}, silent)
    assert [(one.place.line, one.kind) for one in found.candidates] == [(2, OriginKind.EARLY_COPY)]
    assert explain([copying(rank, is_early=False) for rank in (0, 1)], {FILE: COPYING}, silent).candidates == ()


def test_no_sync_is_named_if_replicas_in_ddp_differ() -> None:
    ranks = [recorded(rank, main(at(1, op("no_sync")), at(2, op("backward")))) for rank in (0, 1)]
    found = explain(ranks, {FILE: "with model.no_sync():\n    loss.backward()\n"}, SilentDifference(kind=""))
    assert [(one.place.line, one.kind) for one in found.candidates] == [(1, OriginKind.UNSYNCHRONIZED)]
    assert explain(ranks, {}, SilentDifference(kind="learning rate")).candidates == ()


def test_different_learning_rates_lead_to_the_loss_that_the_scheduler_got() -> None:
    source = """\
    value = evaluate()
    scheduler.step(value)
    print(step)
    """

    def annealing(rank: int) -> RankRecording:
        loss = {"value": 0.5 + rank}
        evaluated = call("evaluate", at(11), first_line=10, returned=0.5 + rank)
        return recorded(rank, main(at(1, evaluated, writes=loss), at(2, reads=loss), at(3, reads={"step": 1})))

    found = explain(
        [annealing(rank) for rank in (0, 1)], {FILE: dedent(source)}, SilentDifference(kind="learning rate")
    )
    assert found.candidates[0].place.line in (1, 2)
    assert kinds(found)[found.candidates[0].place.line] is OriginKind.MISSING_REDUCTION


@st.composite
def trees(draw: st.DrawFn, operations: Sequence[str] = (*COLLECTIVES, "send", "irecv")) -> list[Activation]:
    """Draw the activations of a rank, with about 20 executions."""
    budget = [draw(st.integers(0, 20))]

    def activation(depth: int) -> Activation:
        function = draw(st.sampled_from("fg"))
        executions = []
        while budget[0] > 0 and draw(st.integers(0, 4)):
            budget[0] -= 1
            executions.append(execution(depth))
        return call(function, *executions, first_line=ord(function), ended=draw(st.booleans()), arguments=draw(NAMES))

    def execution(depth: int) -> Execution:
        parts: list[Activation | Communication] = []
        kind = draw(st.integers(0, 5))
        if kind == 0 and depth < 3:
            parts.append(activation(depth + 1))
        if kind == 1:
            ranks, peer = draw(st.sampled_from([(), (0, 1), (1, 2)])), draw(st.sampled_from([None, 0, 1]))
            parts.append(op(draw(st.sampled_from(operations)), ranks=ranks, returned=draw(st.booleans()), peer=peer))
        line = draw(st.integers(1, 5))
        raised = draw(st.sampled_from(["", "", "", "ValueError", "StopIteration"]))
        draws = draw(st.sampled_from([(), (("torch", "1", "2"),), (("torch", "2", "3"),)]))
        reads, writes = draw(NAMES), draw(NAMES)
        return at(line, *parts, reads=reads, writes=writes, draws=draws, raised=raised, handled=line % 2 == 0)

    return [activation(0) for _ in range(draw(st.integers(0, 2)))]


SOURCE = "if x:\n    f(x)\nfor x in d:\n    opt.step()\nd['k'] = self.n\n"


@settings(max_examples=40)
@given(st.lists(trees(), max_size=3))
def test_any_recordings_have_an_explanation_that_does_not_depend_on_their_order(ranks: list[list[Activation]]) -> None:
    recordings = [recorded(rank, *tree) for rank, tree in enumerate(ranks)]
    found = explained(SOURCE, *recordings)
    assert explained(SOURCE, *reversed(recordings)) == found


@settings(max_examples=30)
@given(trees(COLLECTIVES), st.integers(2, 4))
def test_equal_recordings_have_no_division(tree: list[Activation], count: int) -> None:
    found = explained(SOURCE, *(recorded(rank, *tree, world_size=count) for rank in range(count)))
    assert found.division is None
    assert "no_difference" in found.notes
