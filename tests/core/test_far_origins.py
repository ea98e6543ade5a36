"""Origins that lie far from the place where the ranks part: arguments, objects, calls that were left out."""

from __future__ import annotations

from textwrap import dedent

import pytest

from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import Explanation, OriginKind
from nsa_harness.core.recording.recording import Execution, RankRecording, ThreadRecording
from tests.core.recorded import FILE, Thing, at, call, main, op, recorded


def explained(source: str, *recordings: RankRecording) -> Explanation:
    return explain(recordings, {FILE: dedent(source)})


def lines(explanation: Explanation) -> list[int | None]:
    return [candidate.place.line for candidate in explanation.candidates]


def items(count: int, rank: int = 0) -> Thing:
    return Thing(500 + count, "list", f"{count} items crc 0000000{rank}")


def looping(rows: Thing, waits: Execution) -> list[Execution]:
    """A loop at line 10 over two batches, after which the ranks part."""
    rounds = [part for _ in range(2) for part in (at(10, reads={"rows": rows}), at(11, op()))]
    return [*rounds, at(10, reads={"rows": rows}), waits]


SHARDING = """\
    def pack(docs):
        rows = list(docs)
        return rows
    def shard(docs, rank):
        return pack(docs[rank::2])
    rows = shard(docs, rank)



    for batch in rows:
        all_reduce(batch)
    barrier()
    """


@pytest.mark.parametrize(("counts", "is_first"), [((2, 3), True), ((2, 2), False)])
def test_data_that_were_divided_into_unequal_parts_come_before_the_loop_that_shows_it(
    counts: tuple[int, int], is_first: bool
) -> None:
    def sharded(rank: int) -> RankRecording:
        part, own = items(counts[rank], rank), {"docs": items(9), "rank": rank}
        packed = call(
            "pack",
            at(2, reads={"docs": part}, writes={"rows": part}),
            at(3, reads={"rows": part}),
            arguments={"docs": part},
            returned=part,
        )
        divided = call("shard", at(5, packed, reads=own), first_line=4, arguments=own, returned=part)
        wait = at(12, op("barrier", returned=False)) if rank == 0 else at(11, op(returned=False))
        start = at(6, divided, reads=own, writes={"rows": part})
        return recorded(rank, main(start, *looping(part, wait), ended=False))

    found = explained(SHARDING, sharded(0), sharded(1))
    assert (found.candidates[0].place.line == 5) is is_first


def test_an_update_by_one_rank_of_an_object_leads_to_the_condition_for_it() -> None:
    source = """\
        state = fresh()
        if rank == 0 and exists(path):
            state.update(load(path))



        while state["step"] < 9:
            all_reduce()
        barrier()
        """

    def restored(rank: int) -> RankRecording:
        def state(step: int) -> Thing:
            return Thing(40 + rank, "dict", f"{{'step': {step}}}")

        made = at(1, writes={"state": state(0)})
        update = [at(3, reads={"state": state(0), "path": "/p"})] if rank == 0 else []
        loop = at(7, reads={"state": state(8 if rank == 0 else 0)})
        wait = at(9, op("barrier", returned=False)) if rank == 0 else at(8, op(returned=False))
        return recorded(rank, main(made, at(2, reads={"path": "/p"}), *update, loop, wait, ended=False))

    found = explained(source, restored(0), restored(1))
    assert {2, 3} & set(lines(found))
    assert lines(found)[0] == 7


ADVANCING = """\
    def next_key():
        counter.n += 1
        return f"round-{counter.n}"
    def note(epoch):
        entry = {
            "epoch": epoch,
            "unused": None,
            "other": None,
            "key": next_key(),
        }
    if rank == 1:
        note(epoch)
    key = next_key()
    if rank == 0:
        all_reduce(key)
    else:
        value = store.get(key)
    """


def test_the_call_that_advances_a_counter_once_more_is_named_by_its_own_line() -> None:
    def advance(number: int) -> tuple[object, str]:
        key = f"round-{number}"
        steps = [
            at(
                2,
                reads={"counter": Thing(7), "counter.n": number - 1},
                writes={"counter": Thing(7), "counter.n": number},
            ),
            at(3, reads={"counter": Thing(7), "counter.n": number}),
        ]
        return call("next_key", *steps, returned=key), key

    def advancing(rank: int) -> RankRecording:
        extra = [at(12, call("note", at(5, advance(1)[0]), first_line=4))] if rank == 1 else []
        called, key = advance(1 + rank)
        wait = at(17, reads={"key": key}) if rank == 1 else at(15, op(returned=False))
        parts = [
            at(11, reads={"rank": rank}),
            *extra,
            at(13, called, writes={"key": key}),
            at(14, reads={"rank": rank}),
        ]
        return recorded(rank, main(*parts, wait, ended=False))

    first = explained(ADVANCING, advancing(0), advancing(1)).candidates[0]
    assert (first.place.line, first.kind, first.ranks) == (9, OriginKind.LEAK, (1,))


@pytest.mark.parametrize("closing", ["writer.close()", "emit('close')"])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_function_that_ended_before_the_call_for_which_a_thread_waits_is_the_origin(
    closing: str, is_early: bool
) -> None:
    source = f"""\
        def close():
            jobs.put(None)
        def work():
            jobs.get()
        def fit():
            if loss < best:
                return best
            {closing}
        fit()
        """

    def fitting(rank: int) -> RankRecording:
        end = [at(7)] if is_early else [at(8, call("close", at(2)))]
        recording = recorded(rank, main(at(9, call("fit", at(6), *end, first_line=5)), ended=False))
        worker = call("work", at(4), first_line=3, ended=False)
        worker.executions[0].order = 99
        return RankRecording(rank, 2, (3, 11), [*recording.threads, ThreadRecording("writer", [worker])])

    assert (explained(source, fitting(0), fitting(1)).candidates[0].place.line == 7) is is_early


def test_a_function_that_made_one_of_two_calls_left_none_out() -> None:
    source = """\
        def work():
            jobs.get()



        def step(x):
            if x:
                jobs.put(1)
                return
            jobs.put(2)
        step(1)
        step(0)
        """

    def stepping(rank: int) -> RankRecording:
        first = call("step", at(7), at(8), at(9), first_line=6)
        second = call("step", at(7), at(10), first_line=6)
        waiting = at(13, call("work", at(2), first_line=1, ended=False))
        return recorded(rank, main(at(11, first), at(12, second), waiting, ended=False))

    assert 9 not in lines(explained(source, stepping(0), stepping(1)))


def test_an_argument_leads_into_the_function_that_made_it() -> None:
    source = """\
        def restore():
            return load()



        train(restore())



        def train(state):
            while state < 9:
                all_reduce()
            barrier()
        """

    def training(rank: int) -> RankRecording:
        restored = call("restore", at(2), first_line=1, returned=8 * rank)
        wait = at(13, op("barrier", returned=False)) if rank else at(12, op(returned=False))
        trained = call(
            "train",
            at(11, reads={"state": 8 * rank}),
            wait,
            first_line=10,
            arguments={"state": 8 * rank},
            ended=False,
        )
        return recorded(rank, main(at(6, restored, trained), ended=False))

    assert 2 in lines(explained(source, training(0), training(1)))


def test_a_value_that_only_one_rank_passes_on_is_where_its_result_comes_from() -> None:
    source = """\
        state = load(path if rank == 0 else None)



        if rank == 0:
            store.set(state.n)
        else:
            store.get(state.n)
        """

    def loading(rank: int) -> RankRecording:
        loaded = call("load", at(21), first_line=20, returned=Thing(60 + rank))
        start = at(1, loaded, reads={"rank": rank, "path": "/p"}, writes={"state": Thing(60 + rank)})
        line = 6 if rank == 0 else 8
        used = {"state": Thing(60 + rank), "state.n": 1 - rank}
        return recorded(rank, main(start, at(5, reads={"rank": rank}), at(line, reads=used), ended=False))

    assert explained(source, loading(0), loading(1)).candidates[0].place.line == 1


def test_a_rank_that_ended_before_the_others_is_missed_in_the_call_that_it_had_finished() -> None:
    source = "train()\n\n\n\n\nreport()\n\n\n\n\nprint()\n"

    def reporting(rank: int) -> RankRecording:
        lost = at(21, raised="DistNetworkError: Broken pipe") if rank == 1 else at(21)
        report = at(6, call("report", lost, first_line=20), raised="DistNetworkError: Broken pipe" if rank == 1 else "")
        return recorded(rank, main(at(1), report, *([] if rank else [at(11)])))

    assert explained(source, reporting(0), reporting(1)).candidates[0].place.line == 6


def test_a_number_that_an_exception_of_all_ranks_names_leads_to_where_it_was_made() -> None:
    source = "plan = make(recipe)\n\n\n\n\nsched = Schedule(plan.total)\n\n\n\n\nsched.step()\n"

    def stepping(rank: int) -> RankRecording:
        made = at(1, call("make", at(21), first_line=20, returned=Thing(7)), writes={"plan": Thing(7)})
        used = at(6, reads={"plan": Thing(7), "plan.total": 42})
        return recorded(rank, main(made, used, at(11, raised="ValueError: step 43 of 42 steps")))

    assert 21 in lines(explained(source, stepping(0), stepping(1)))


def test_a_message_of_a_role_that_was_not_taken_leads_through_functions_to_the_value_that_decided() -> None:
    source = """\
        def take():
            recv()
        def teach(ids):
            quota = count(ids)




            for k in range(quota):
                take()



            barrier()
        if rank == 0:
            teach(ids)
        else:
            send()
        """

    def role(rank: int) -> RankRecording:
        if rank == 1:
            return recorded(rank, main(at(15), at(18, op("send", peer=0, returned=False)), ended=False))
        counted = at(4, call("count", at(31), first_line=30, returned=0), writes={"quota": 0})
        loop = [at(9, reads={"quota": 0}), at(14, op("barrier", returned=False))]
        return recorded(
            rank, main(at(15), at(16, call("teach", counted, *loop, first_line=3, ended=False)), ended=False)
        )

    assert {9, 31} <= set(lines(explained(source, role(0), role(1))))


def test_a_message_to_a_rank_that_failed_is_no_division() -> None:
    def piped(rank: int) -> RankRecording:
        closed = "RuntimeError: gloo: Connection closed by peer"
        part = (
            at(5, raised="ValueError: math domain error") if rank == 2 else at(9, op("recv", peer=rank + 1, error="E"))
        )
        if rank < 2:
            part.raised = at(9, raised=closed).raised
        outermost = main(at(1), part) if rank < 2 else call("stage", part, first_line=4)
        return recorded(rank, outermost, world_size=3)

    found = explained("a()\n\n\n\nlog(x)\n\n\n\nrecv()\n", piped(0), piped(1), piped(2))
    assert found.division is None or found.division.place.line != 9
    assert lines(found)[0] == 5
