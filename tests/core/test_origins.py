"""Where a value was made: the rounds of a loop, and what a call is given."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

from builders import ALL_REDUCE, USER, board, call, evidence, frame, rank_evidence, rank_snapshot, stalled

from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.rules.call_places import _iteration_count_origin, difference_place
from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.collection import excerpts, program_sources
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.core.source_code.value_origin import ValueOrigin, origin_of_arguments, origin_of_loop
from nsa_harness.core.verdict.verdict import judge

PROGRAM = dedent(
    """\
    class Trainer:
        def __init__(self, args, rank, world):
            self.files = files(args)[rank::world]
            self.step = self.resume()

        def resume(self):
            step = newest()
            return step

        def start(self):
            try:
                return load(self.args.path)
            except OSError:
                return 0

        def epoch(self):
            steps = len(self.table) // self.args.batch
            for _ in range(self.args.epochs):
                for k in range(steps):
                    self.train(k)
            while self.step < self.args.most:
                self.step += 1
            for file in self.files:
                read(file)
            first = self.start()
            while first < self.args.most:
                first = follow(first)
            common = self.agreed(len(self.table))
            for k in range(common):
                self.train(k)

        def agreed(self, count):
            found = torch.tensor(count)
            dist.all_reduce(found)
            return found

        def gather(self, tensor):
            whole = tensor.contiguous()
            return dist.all_gather(whole)

        def evaluate(self, batch):
            labels = batch["labels"]
            self.gather(labels)

        def share(self):
            for row in self.reader(self.rank):
                read(row)
            for row in self.opened(self.rank):
                read(row)

        def reader(self, who):
            rows = Reader(self.own_rows(who))
            return rows

        def own_rows(self, rank):
            return sorted(self.rows)[rank :: self.world]

        def opened(self, who):
            return open(who)

        def settled(self):
            fixed = Fixed(rounds=3)
            for k in range(fixed.rounds):
                self.train(k)
            parser = Parser()
            chosen = parser.parse_args()
            for k in range(chosen.rounds):
                self.train(k)

        def slices(self, items):
            mine = dist.get_rank()
            part = items[mine :: self.world]
            count = len(part)
            for k in range(count):
                self.train(k)

        def gossip(self):
            order = self.everyone()
            random.shuffle(order)
            partner = order[self.place]
            dist.send(self.flat, partner)
    """
)


def at(text: str) -> int:
    return next(number for number, one in enumerate(PROGRAM.splitlines(), start=1) if text in one)


KEPT: tuple[Source, ...] = tuple(excerpts(USER, PROGRAM, set(range(2, PROGRAM.count("\n") + 1))))


def rounds(text: str) -> str | None:
    return line_of(origin_of_loop(ProgramSource(KEPT), Place(file=USER, line=at(text)), ()))


def given(*lines: str, own_rank: bool = True) -> str | None:
    return line_of(
        origin_of_arguments(ProgramSource(KEPT), tuple(frame(at(text)) for text in lines), own_rank=own_rank)
    )


def line_of(found: ValueOrigin | None) -> str | None:
    return None if found is None else PROGRAM.splitlines()[(found.place.line or 0) - 1].strip()


def test_a_loop_that_counts_hangs_on_where_its_count_was_made() -> None:
    assert rounds("for k in range(steps)") == "steps = len(self.table) // self.args.batch"


def test_a_loop_over_settings_is_the_same_on_every_rank() -> None:
    assert rounds("for _ in range(self.args.epochs)") is None
    assert rounds("for k in range(fixed.rounds)") is None
    assert rounds("for k in range(chosen.rounds)") is None


def test_what_is_shared_out_by_rank_comes_before_what_lies_as_near() -> None:
    assert rounds("for file in self.files") == "self.files = files(args)[rank::world]"


def test_of_helpers_that_the_rank_is_handed_to_the_one_that_shares_out_by_it_comes_before_the_call() -> None:
    assert rounds("for row in self.reader") == "return sorted(self.rows)[rank :: self.world]"
    assert rounds("for row in self.opened") == "for row in self.opened(self.rank):", "it shows nothing of it"


def test_the_line_that_slices_by_rank_is_named_and_not_the_one_that_reads_the_rank() -> None:
    """Every rank reads its own rank, which is right. What is made of it makes the difference."""
    assert rounds("for k in range(count)") == "part = items[mine :: self.world]"


def test_an_attribute_leads_to_the_method_that_made_it_and_not_to_its_counter() -> None:
    assert rounds("while self.step") == "step = newest()"


def test_a_value_that_an_except_gives_differs_by_rank() -> None:
    assert rounds("while first") == "return 0"


def test_what_the_ranks_agreed_on_is_no_ranks_own() -> None:
    assert rounds("for k in range(common)") is None


def test_of_a_helper_the_caller_made_what_it_is_given() -> None:
    assert given("dist.all_gather", "self.gather(labels)") == 'labels = batch["labels"]'


def test_chance_gives_a_partner_that_the_other_side_does_not_know() -> None:
    assert given("dist.send", own_rank=False) == "random.shuffle(order)"


def test_functions_that_lead_on_are_kept_from_imported_files_too() -> None:
    main = "from data import Reader\n\ndef main():\n    reader = Reader()\n    train(reader.batches())\n"
    data = "class Reader:\n    def batches(self):\n        return self.rows\n\n    def other(self):\n        pass\n"
    texts = {USER: main, f"{USER.rpartition('/')[0]}/data.py": data}
    looks = stalled(rank_snapshot(0, frame(5))).snapshots
    kept = list(program_sources(evidence(rank_evidence(0), snapshots=looks), lambda file: texts.get(file, "")))
    assert [(one.file, one.first) for one in kept] == [(USER, 3), (list(texts)[1], 2)]


def test_how_often_a_loop_goes_that_a_rank_has_left_is_told_by_where_another_one_still_is_in_it() -> None:
    stands = rank_snapshot(1, ALL_REDUCE, frame(at("    self.train(k)"), function="epoch"))
    seen = replace(evidence(rank_evidence(1), snapshots=stalled(stands).snapshots), sources=KEPT)
    case = DiagnosisContext(evidence=seen, judgement=judge(seen))
    around = ProgramSource(KEPT).loops_around(frame(at("    self.train(k)")))
    (first,) = (one for one in around if PROGRAM.splitlines()[one.line - 1].strip() == "for k in range(steps):")
    assert line_of(_iteration_count_origin(case, first, 1)) == "steps = len(self.table) // self.args.batch"
    assert line_of(_iteration_count_origin(case, around[-1], 1)) == "steps = len(self.table) // self.args.batch", (
        "within it"
    )
    beyond = replace(first, line=first.last + 1, last=first.last + 3)
    assert _iteration_count_origin(case, beyond, 1) is None
    assert _iteration_count_origin(case, first, 0) is None


def test_ranks_that_give_a_helper_unlike_shapes_are_told_the_caller_that_made_them() -> None:
    chain = (frame(at("dist.all_gather")), frame(at("self.gather(labels)")))
    place = Place(file=USER, line=chain[0].line, function="gather")
    snapshots = []
    for rank, elements in ((0, 8), (1, 12)):
        one = call(elements=elements, left_s=None, place=place, chain=chain)
        made = board(rank=rank, calls=(one,))
        snapshots.append(rank_snapshot(rank, ALL_REDUCE, *chain, status_file=made))
    ranks = [rank_evidence(one.rank, status_file=one.status_file) for one in snapshots]
    seen = replace(evidence(*ranks, snapshots=stalled(*snapshots).snapshots, backend="gloo"), sources=KEPT)
    case = DiagnosisContext(evidence=seen, judgement=judge(seen))
    place_told = difference_place(case, next(iter(case.differences)), (0, 1))
    assert place_told is not None
    assert PROGRAM.splitlines()[(place_told.line or 0) - 1].strip() == 'labels = batch["labels"]'
