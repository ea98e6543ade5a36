"""Origins that lie far from the place where the ranks part: arguments, objects, calls that were left out."""

from __future__ import annotations

from textwrap import dedent

import pytest

from nsa_harness.core.recording.experiments import plan_experiments
from nsa_harness.core.recording.explain import explain
from nsa_harness.core.recording.explanation import ExperimentKind, Explanation, OriginKind
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


PLANNING = """\
    def plan(self):
        return large(batches[self.rank :: 2])







    for batch in planner.plan():
        all_reduce(batch)
    barrier()
    """


@pytest.mark.parametrize(("counts", "is_first"), [((2, 3), True), ((3, 3), False)])
def test_a_loop_over_what_a_function_returned_leads_to_the_function_that_returned_different_lengths(
    counts: tuple[int, int], is_first: bool
) -> None:
    def planned(rank: int) -> RankRecording:
        part = items(counts[rank], rank)
        plan = call("plan", at(2, reads={"batches": items(6), "self.rank": rank}), returned=part)
        loop = [at(10, plan), at(11, op()), at(10), at(11, op()), at(10)]
        wait = at(12, op("barrier", returned=False)) if rank == 0 else at(11, op(returned=False))
        return recorded(rank, main(*loop, wait, ended=False))

    found = explained(PLANNING, planned(0), planned(1))
    assert (found.candidates[0].place.line == 2) is is_first


FILTERING = """\
    def keep(records):
        kept = [record for record in records if record.usable]
        return kept




    records = deal(everything, rank)




    data = keep(records)




    for item in data:
        all_reduce()
    barrier()
    """


@pytest.mark.parametrize("by_rank", [True, False])
def test_data_that_were_dealt_out_by_rank_and_then_filtered_lead_to_where_they_were_dealt_out(by_rank: bool) -> None:
    def filtered(rank: int) -> RankRecording:
        records = Thing(700 + rank, "list", "9 items")
        kept = items((2, 3)[rank], rank)
        dealt = at(
            8, reads={"everything": items(18), **({"rank": rank} if by_rank else {})}, writes={"records": records}
        )
        filters = call(
            "keep",
            at(2, reads={"records": records}, writes={"kept": kept}),
            at(3, reads={"kept": kept}),
            arguments={"records": records},
            returned=kept,
        )
        keeps = at(13, filters, reads={"records": records}, writes={"data": kept})
        rounds = [part for _ in range(2) for part in (at(18, reads={"data": kept}), at(19, op()))]
        wait = at(20, op("barrier", returned=False)) if rank == 0 else at(19, op(returned=False))
        return recorded(rank, main(dealt, keeps, *rounds, at(18, reads={"data": kept}), wait, ended=False))

    found = explained(FILTERING, filtered(0), filtered(1))
    assert (8 in lines(found)[:2]) is by_rank


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


LOADED_BY_ONE = """\
    def load(tracker):
        tracker.best = 1
    def update(tracker, value):
        if value < tracker.best:
            tracker.best = value
        else:
            tracker.bad += 1
    if rank == 0:
        load(tracker)
    for value in (3, 2):
        update(tracker, value)



    if tracker.bad:
        barrier()
    all_reduce()
    """


def test_state_that_only_one_rank_loads_is_the_origin_although_all_ranks_changed_it_later() -> None:
    tracker = Thing(7)

    def run(rank: int) -> RankRecording:
        best, rounds = (9, 1)[rank == 0], []
        for value in (3, 2):
            check = at(4, reads={"tracker": tracker, "tracker.best": best, "value": value})
            if rank == 0:
                change = at(7, reads={"tracker": tracker}, writes={"tracker.bad": 4 - value})
            else:
                best, change = value, at(5, reads={"tracker": tracker}, writes={"tracker.best": value})
            own = {"tracker": tracker, "value": value}
            rounds += [at(10), at(11, call("update", check, change, first_line=3, arguments=own), reads=own)]
        load = call(
            "load", at(2, reads={"tracker": tracker}, writes={"tracker.best": 1}), arguments={"tracker": tracker}
        )
        loaded = [at(9, load, reads={"tracker": tracker})] if rank == 0 else []
        decision = at(15, reads={"tracker": tracker, "tracker.bad": 2 if rank == 0 else 0})
        wait = at(16, op("barrier", returned=False)) if rank == 0 else at(17, op(returned=False))
        return recorded(rank, main(at(8, reads={"rank": rank}), *loaded, *rounds, at(10), decision, wait, ended=False))

    found = explained(LOADED_BY_ONE, run(0), run(1))
    assert (lines(found)[0], found.candidates[0].kind) == (9, OriginKind.LEAK)
    provable = [one for one in plan_experiments(found, {FILE: dedent(LOADED_BY_ONE)}) if one.proves_origin]
    assert [(one.kind, one.place.line, one.origin and one.origin.place.line) for one in provable] == [
        (ExperimentKind.UNDO_LEAK, 2, 9)
    ]


HOOKS = """\
    def next_batch(t):
        t.iter += 1


    def preview(t):
        next_batch(t)



    hooks = []
    if rank == 0:
        hooks.append(preview)
    for hook in hooks:
        hook(t)
    next_batch(t)
    if t.iter > 1:
        barrier()
    all_reduce()
    """


def test_what_a_hook_of_one_rank_advances_is_the_origin_and_not_that_the_rank_has_a_hook() -> None:
    t = Thing(7)

    def advance(iteration: int, line: int) -> Execution:
        step = at(2, reads={"t": t, "t.iter": iteration - 1}, writes={"t.iter": iteration})
        return at(line, call("next_batch", step, arguments={"t": t}), reads={"t": t})

    def run(rank: int) -> RankRecording:
        hooks = Thing(8, "list", "0 items crc 00000000" if rank else "1 items crc 00000001")
        registered, called = [], []
        if rank == 0:
            registered = [at(12, reads={"hooks": hooks})]
            hook = call("preview", advance(1, 6), first_line=5, arguments={"t": t})
            called = [at(14, hook, reads={"t": t}), at(13, reads={"hooks": hooks})]
        executions = [
            at(10, writes={"hooks": Thing(8, "list", "[]")}),
            at(11, reads={"rank": rank}),
            *registered,
            at(13, reads={"hooks": hooks}),
            *called,
        ]
        iteration = 1 if rank else 2
        decision = at(16, reads={"t": t, "t.iter": iteration})
        wait = at(18, op(returned=False)) if rank else at(17, op("barrier", returned=False))
        return recorded(rank, main(*executions, advance(iteration, 15), decision, wait, ended=False))

    found = explained(HOOKS, run(0), run(1))
    assert lines(found)[0] == 6
    provable = [one for one in plan_experiments(found, {FILE: dedent(HOOKS)}) if one.proves_origin]
    assert [(one.place.line, one.origin and one.origin.place.line) for one in provable] == [(2, 6)]


REGISTERED = """\
    def register(hooks):
        hooks.append(save)



    hooks = []
    if rank == 0:
        register(hooks)



    if hooks:
        barrier()
    all_reduce()
    """


def test_that_a_rank_has_registered_something_by_its_number_is_no_provable_leak() -> None:
    def run(rank: int) -> RankRecording:
        hooks = Thing(8, "list", "0 items crc 00000000" if rank else "1 items crc 00000001")
        body = at(2, reads={"hooks": hooks})
        registered = [] if rank else [at(8, call("register", body, arguments={"hooks": hooks}), reads={"hooks": hooks})]
        start = at(6, writes={"hooks": Thing(8, "list", "[]")}), at(7, reads={"rank": rank})
        wait = at(14, op(returned=False)) if rank else at(13, op("barrier", returned=False))
        return recorded(rank, main(*start, *registered, at(12, reads={"hooks": hooks}), wait, ended=False))

    found = explained(REGISTERED, run(0), run(1))
    assert OriginKind.LEAK in {candidate.kind for candidate in found.candidates}
    plan = plan_experiments(found, {FILE: dedent(REGISTERED)})
    assert not [one for one in plan if one.proves_origin and not one.is_of_decision]


def test_ranks_that_call_different_functions_after_the_same_one_part_there() -> None:
    source = """\
        def draw():
            return sample()
        def token(batch):
            return batch
        def contrast(batch):
            all_gather(batch)
        name = pick()



        LOSSES[name](draw())
        loss.backward()
        """

    def run(rank: int) -> RankRecording:
        drawn = call("draw", at(2), first_line=1, returned=7)
        waits = call("contrast", at(6, op("all_gather", returned=False)), first_line=5, ended=False)
        chosen = call("token", at(4), first_line=3) if rank else waits
        name = ("contrast", "token")[rank]
        start = at(7, writes={"name": name}, draws=[("random", f"state {rank}", "state 9")])
        rest = [at(12, op("backward", returned=False))] if rank else []
        return recorded(rank, main(start, at(11, drawn, chosen, reads={"name": name}), *rest, ended=False))

    found = explained(source, run(0), run(1))
    assert found.division is not None
    assert found.division.place.line == 11
    assert 7 in lines(found)
