"""Determines from the options of `bisect` what a bisection varies, such as layers, commits or packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import as_plain, dotted_items
from nsa_harness.core.scenario.overrides import is_override, parse_override
from nsa_harness.core.scenario.scenario import OUR_PROGRAM, Scenario
from nsa_harness.core.scenario.yaml_tree import Plain, parse_verbatim, plain, value_text
from nsa_harness.core.search.subject import ENV, PACKAGE, SEED, Subject, SubjectForm
from nsa_harness.errors import UsageError
from nsa_harness.subject.options import DEPENDENT_KEYS, branch_subject
from nsa_harness.subject.program import machine_choice
from nsa_harness.supervisor.experiments.intermediate_configs import (
    commits_between,
    different_keys,
    environment_differences,
    read_environment,
)
from nsa_harness.supervisor.launch.planning import Invocation, check_scenarios, file_argument, select_scenarios

AUTO = "auto"
GC_BASELINE = "gc_baseline_full"
_SHORTEST = 16  # tokens: the good end of a sequence length, if the user names none
_MAX_MULTIPLE = 1024  # an open end is searched up to this multiple of the good value, ...
_MAX_OPEN_VALUES = 1 << 17  # ... and at most this many values above it
_MAX_VALUES = 1 << 20  # a search stores each value
_MAX_SEEDS = 64  # each seed is run several times
_NOT_COMPARED = ("name", "about", "tags", "aliases", "priority", "expect", "limits")
# If the first key of a group differs, the others only have a meaning together with it.
_DEPENDENT_KEYS = (
    DEPENDENT_KEYS,
    (
        "parallel.wrapper", "parallel.static_graph", "parallel.find_unused_parameters", "parallel.broadcast_buffers",
        "parallel.gradient_as_bucket_view", "parallel.bucket_cap_mb", "parallel.comm_hook",
    ),
    ("run.program", "run.command", "run.args", "run.cwd"),
    ("run.ranks", "fault.rank"),
    ("train.phase", "train.resume", "train.checkpoint_every", "train.keep_last", "train.async_checkpoint"),
)  # fmt: skip


# The options of `bisect` that say what is varied, such as {"gc_range": "0:4"}. An option that is not given is None.
SubjectOptions = dict[str, str | bool | None]


def make_subject(
    options: SubjectOptions, question: Invocation, *, templated: bool, facts: MachineFacts
) -> tuple[Invocation, Subject]:
    """Return the command and what its bisection varies. `templated`: templates pass the value, not scenario keys."""
    option, value = _single_option(options)
    if option == "set" and templated:
        return question, _two_files(value, _with_scenario("file", question))
    question = _with_scenario(option, question)
    if option == "set":
        return _two_scenarios(value, question)
    if option == "env_file":
        return _two_environments(value, question)
    scenario = _scenario(question)
    if scenario.is_ours and templated:
        use = "--arg and --env-arg are for your own programs"
        raise UsageError(f"{use}; remove them, because {OUR_PROGRAM} is set by keys such as gc.layers=0:4")
    needs = _NEEDS_PLACEHOLDER.get(option)
    if not scenario.is_ours and needs and not templated:
        raise UsageError(f"--{option.replace('_', '-')}: how does {scenario.run.program} get the value? Add {needs}")
    return question, _MAKERS[option](_Option(value=value, scenario=scenario, question=question, facts=facts))


def program_arguments(question: Invocation) -> tuple[str, ...]:
    """Return the arguments that the scenario already gives its program."""
    return () if question.script is not None else _scenario(question).run.args


_NEEDS_PLACEHOLDER = {
    "gc_range": "--arg '--gc-layers={layers}' or --env-arg 'GC_RANGE={range}', with the names that it uses",
    "layers": "--arg '--layers={value}' or --env-arg 'LAYERS={value}', with the names that it uses",
    "seq_len": "--arg '--seq-len={value}' or --env-arg 'SEQ_LEN={value}', with the names that it uses",
    "seeds": "--arg '--seed={value}' or --env-arg 'SEED={value}', with the names that it uses",
}


def _single_option(options: SubjectOptions) -> tuple[str, str]:
    given_options = [(name, value) for name, value in options.items() if value not in (None, False)]
    if len(given_options) != 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in (*_MAKERS, "set", "env_file"))
        given_names = (
            f"; {' and '.join(f'--{name}' for name, _ in given_options).replace('_', '-')} were given"
            if given_options
            else ""
        )
        raise UsageError(f"bisect needs exactly one option that says what to vary: {names}{given_names}")
    name, value = given_options[0]
    return name, AUTO if value is True else str(value)


def _with_scenario(option: str, question: Invocation) -> Invocation:
    has_scenario = question.script is not None or any("=" not in word for word in question.arguments)
    if option == "set":
        if has_scenario:
            files = "for two config files of your own program, add --arg '--config={file}', with the name that it uses"
            raise UsageError(f"--set already names the good and the bad scenario; remove the other one; {files}")
        return question
    if has_scenario:
        return question
    if option == "gc_range":
        return replace(question, arguments=(GC_BASELINE, *question.arguments))
    raise UsageError("nothing to bisect: name a scenario or your script; `nsa-harness list` shows all scenarios")


def _scenario(question: Invocation) -> Scenario:
    selected, _ = select_scenarios(question)
    if len(selected) != 1:
        names = ", ".join(item.name for item in selected[:3])
        raise UsageError(f"bisect needs one scenario, but {len(selected)} are selected: {names}")
    return check_scenarios(selected)[0]


@dataclass(frozen=True, kw_only=True)
class _Option:
    """The value of a `bisect` option, with the scenario to which it applies."""

    value: str
    scenario: Scenario
    question: Invocation
    facts: MachineFacts

    @property
    def machine_layers(self) -> int | None:
        """Return the number of layers that the scenario's model has on this machine, or None for a user's program."""
        return machine_choice(self.scenario, self.facts).layers if self.scenario.is_ours else None

    @property
    def machine_seq_len(self) -> int | None:
        return machine_choice(self.scenario, self.facts).seq_len if self.scenario.is_ours else None


def _gc_range(option: _Option) -> Subject:
    count = option.machine_layers
    if option.value == AUTO and count is None:
        raise UsageError(
            "--gc-range: the number of layers of this program is unknown; give the range, such as --gc-range=0:8"
        )
    start, stop = (0, count or 0) if option.value == AUTO else _parse_span("--gc-range", option.value)
    if count is not None and stop > count:
        raise UsageError(f"--gc-range={option.value}: the model has layers 0-{count - 1}; set model.layers")
    key = "gc.layers" if option.scenario.is_ours else "layers"
    return Subject(form=SubjectForm.LAYERS, key=key, noun="layer", items=tuple(range(start, stop)))


def _layers(option: _Option) -> Subject:
    key = "model.layers" if option.scenario.is_ours else "layers"
    most = option.machine_layers
    return _number_range("--layers", key, option.value, lowest=1, most=most)


def _seq_len(option: _Option) -> Subject:
    most = option.machine_seq_len
    lowest = _SHORTEST if most is None or most > _SHORTEST else 2
    return _number_range(
        "--seq-len", "model.seq_len" if option.scenario.is_ours else "seq_len", option.value, lowest=lowest, most=most
    )


def _world_size(option: _Option) -> Subject:
    ranks = option.scenario.run.ranks if option.question.script is None else option.question.script.ranks
    if option.value.endswith(":"):
        raise UsageError(
            f"--world-size={option.value}: give the largest number, too, such as --world-size=1:8: ranks need memory"
        )
    return _number_range("--world-size", "run.ranks", option.value, lowest=1, most=ranks)


def _number_range(option: str, key: str, value: str, *, lowest: int, most: int | None) -> Subject:
    """Return the subject of a bisection over all numbers from a known-good one to a known-bad one.

    The bad number can be unknown, as in "4:". The numbers are `lowest` and `most` if the option has the value "auto".
    """
    if value == AUTO and most is None:
        example = f"{option}={lowest}:{lowest * 8}, or {option}={lowest}: if no bad value is known"
        raise UsageError(f"{option}: give a good and a bad value, such as {example}")
    if open_from := re.fullmatch(r"([0-9]{1,9}):", value):
        good = int(open_from[1])
        stop = min(max(good, 1) * _MAX_MULTIPLE, good + _MAX_OPEN_VALUES) + 1
        return Subject(
            form=SubjectForm.VALUE, key=key, noun=key, items=tuple(range(good + 1, stop)), good=good, open_end=True
        )
    good, bad = (lowest, most or 0) if value == AUTO else _parse_span(option, value)
    if good >= bad:
        raise UsageError(f"{option}: there is nothing to search from {good} to {bad}; give {option}=GOOD:BAD")
    return Subject(form=SubjectForm.VALUE, key=key, noun=key, items=tuple(range(good + 1, bad + 1)), good=good)


def _env(option: _Option) -> Subject:
    declared_variables = option.scenario.run.env
    names = sorted(declared_variables) if option.value == AUTO else [name for name in option.value.split(",") if name]
    unknown = [name for name in names if name not in declared_variables]
    if unknown or not names:
        problem = f"the scenario does not set {unknown[0]}" if unknown else "the scenario sets no variable"
        raise UsageError(
            f"--env: varies the environment variables of the scenario, but {problem}; set run.env.NAME=VALUE"
        )
    values = tuple(declared_variables[name] for name in names)
    keys = tuple(f"{ENV}{name}" for name in names)
    return Subject(
        form=SubjectForm.KEYS, key="run.env", noun="variable", items=keys, bad_values=values,
        good_values=(None,) * len(keys), labels=tuple(names),
    )  # fmt: skip


def _commits(option: _Option) -> Subject:
    good, dots, bad = option.value.partition("..")
    if not (good and dots and bad):
        raise UsageError(f"--commits: expected GOOD..BAD, got {value_text(option.value)}")
    good_sha, labels = commits_between(option.question.working_dir, good, bad)
    return Subject(
        form=SubjectForm.COMMIT, key="commit", noun="commit", items=tuple(labels), good=good_sha,
        labels=tuple(labels.values()),
    )  # fmt: skip


def _any(option: _Option) -> Subject:
    override = parse_override(option.value, "--any")
    values = plain(override.value)
    if not isinstance(values, list) or len(values) < 2 or any(isinstance(value, list | dict) for value in values):
        raise UsageError(f"--any: expected KEY=[A, B, ...] with two values or more, got {value_text(option.value)}")
    if len({repr(value) for value in values}) < len(values):
        raise UsageError(f"--any: {override.key}: a value appears twice")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return Subject(
            form=SubjectForm.VALUE, key=override.key, noun=override.key, items=tuple(values[1:]), good=values[0]
        )
    return Subject(form=SubjectForm.WORDS, key=override.key, noun="value", items=tuple(values))


def _ordered_values(option: _Option) -> Subject:
    """Return the subject of a bisection over a list of values, whose order is kept."""
    key, values = _values_as_written("--ordered", option.value, "v=[1.9,2.0,2.0.1,2.1], the good one first")
    return Subject(form=SubjectForm.VALUE, key=key, noun=key, items=tuple(values[1:]), good=values[0])


def _alternatives(option: _Option) -> Subject:
    key, values = _values_as_written("--choice", option.value, "parallel.wrapper=[ddp,fsdp]")
    return Subject(form=SubjectForm.CHOICE, key=key, noun="value", items=tuple(values))


def _values_as_written(option: str, value: str, example: str) -> tuple[str, list[Plain]]:
    """Return the key that an option names and its list of values, exactly as the user wrote them."""
    mistake = f"{option}: expected KEY=[A, B, ...] with two values or more, such as {example}; got {value_text(value)}"
    if not is_override(value):
        raise UsageError(mistake)
    override = parse_override(value, option)
    parsed_values = plain(override.value)
    text = parse_verbatim(value.partition("=")[2], option).root
    written_values = plain(text) if text is not None else None
    if not isinstance(parsed_values, list) or not isinstance(written_values, list) or len(parsed_values) < 2:
        raise UsageError(mistake)
    # A list in the list is one value, such as a mesh.
    values = [
        item if isinstance(item, list | dict) else word
        for item, word in zip(parsed_values, written_values, strict=True)
    ]
    if option == "--ordered" and any(isinstance(item, list | dict) for item in parsed_values):
        raise UsageError(mistake)
    repeated = next((value for value in values if values.count(value) > 1), None)
    if repeated is not None:
        raise UsageError(f"{option}: {override.key}: {value_text(repeated)} appears twice")
    return override.key, values


def _seeds(option: _Option) -> Subject:
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})+", option.value):
        seeds = list(dict.fromkeys(map(int, option.value.split(","))))
    else:
        seeds = list(range(*_parse_span("--seeds", option.value)))
    if not 2 <= len(seeds) <= _MAX_SEEDS:
        raise UsageError(f"--seeds={option.value}: expected 2 to {_MAX_SEEDS} seeds, such as --seeds=0:4")
    return Subject(
        form=SubjectForm.CHOICE, key="train.seed" if option.scenario.is_ours else "seed", noun=SEED, items=tuple(seeds)
    )


def _items(option: _Option) -> Subject:
    """Return the subject of a bisection over a range of numbers, such as data shards or batches."""
    key, equals, span = option.value.partition("=")
    if not equals or not is_override(f"{key}="):
        raise UsageError(f"--items: expected NAME=A:B, such as --items 'batch=0:64', got {value_text(option.value)}")
    start, stop = _parse_span("--items", span)
    noun = key.rpartition(".")[2]
    # A key of a list has its plural: data.shards.
    noun = noun.removesuffix("s") if "." in key and len(noun) > 1 else noun
    return Subject(form=SubjectForm.LAYERS, key=key, noun=noun, items=tuple(range(start, stop)))


_MAKERS: Mapping[str, Callable[[_Option], Subject]] = {
    "gc_range": _gc_range,
    "layers": _layers,
    "seq_len": _seq_len,
    "world_size": _world_size,
    "branch": lambda option: branch_subject(option.scenario),
    "env": _env,
    "commits": _commits,
    "any": _any,
    "ordered": _ordered_values,
    "choice": _alternatives,
    "seeds": _seeds,
    "items": _items,
}


def _two_scenarios(value: str, question: Invocation) -> tuple[Invocation, Subject]:
    """Return the command for the good scenario, and a subject with all keys in which the two scenarios differ."""
    names = _parse_pair("--set", value, "two scenarios or YAML files")
    good, bad = (
        replace(question, arguments=(file_argument(name, question.working_dir), *question.arguments)) for name in names
    )
    good_keys, bad_keys = (_compared_keys(_scenario(side)) for side in (good, bad))
    keys = [key for key in {**good_keys, **bad_keys} if good_keys.get(key) != bad_keys.get(key)]
    if not keys:
        raise UsageError(f"--set: {names[0]} and {names[1]} differ in no key that changes the launch")
    return good, Subject(
        form=SubjectForm.KEYS,
        key="keys",
        noun="key",
        items=tuple(keys),
        good_values=tuple(good_keys.get(key) for key in keys),
        bad_values=tuple(bad_keys.get(key) for key in keys),
        together=tuple(_linked_groups(keys)),
    )


def _compared_keys(scenario: Scenario) -> dict[str, Plain]:
    """Return the compared settings of a scenario as a flat dict with keys such as "model.layers"."""
    keys = dotted_items(as_plain(scenario), whole=("fault",))
    return {key: value for key, value in keys if key.partition(".")[0] not in _NOT_COMPARED}


def _two_files(value: str, question: Invocation) -> Subject:
    names = _parse_pair("--set", value, "two files that the program reads")
    good, bad = (question.working_dir / name for name in names)
    if good.suffix != bad.suffix:
        raise UsageError(
            f"--set: {value_text(names[0])} and {value_text(names[1])} have different types; name two files of one kind"
        )
    keys = different_keys(good, bad)
    if not keys:
        raise UsageError(f"--set: {names[0]} and {names[1]} differ in no key")
    return Subject(
        form=SubjectForm.FILE, key="keys", noun="key", items=tuple(key.label for key in keys), good=list(names),
        good_values=tuple(key.good for key in keys), bad_values=tuple(key.bad for key in keys),
    )  # fmt: skip


def _two_environments(value: str, question: Invocation) -> tuple[Invocation, Subject]:
    """Return the command for the good environment, and a subject with all variables and packages that differ."""
    names = _parse_pair(
        "--env-file", value, "two files of NAME=VALUE or name==version lines, or two virtual environments"
    )
    good, bad = (read_environment(question.working_dir / name) for name in names)
    if (good.python is None) != (bad.python is None):
        raise UsageError(
            "--env-file: name two virtual environments or two files; `pip freeze > FILE` makes a file of an environment"
        )
    differences = list(environment_differences(good, bad))
    if not differences:
        raise UsageError(f"--env-file: {names[0]} and {names[1]} do not differ")
    packages = [key.startswith(PACKAGE) for key, _, _ in differences]
    noun = "package" if all(packages) else "difference" if any(packages) else "variable"
    subject = Subject(
        form=SubjectForm.KEYS,
        key="environment",
        noun=noun,
        items=tuple(key if key.startswith(PACKAGE) else f"{ENV}{key}" for key, _, _ in differences),
        labels=tuple(key.removeprefix(PACKAGE) for key, _, _ in differences),
        good_values=tuple(good_value for _, good_value, _ in differences),
        bad_values=tuple(bad_value for _, _, bad_value in differences),
    )
    return replace(question, python=good.python or question.python), subject


def _parse_pair(option: str, value: str, description: str) -> tuple[str, str]:
    good, comma, bad = value.partition(",")
    if not (good and comma and bad) or "," in bad:
        raise UsageError(f"{option}: expected GOOD,BAD, {description}, got {value_text(value)}")
    return good, bad


def _linked_groups(keys: Sequence[str]) -> Iterator[tuple[int, ...]]:
    for head, *others in _DEPENDENT_KEYS:
        if head in keys:
            group = [keys.index(key) for key in (head, *others) if key in keys]
            if len(group) > 1:
                yield tuple(group)


def _parse_span(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option}: expected A:B with A below B, such as {option}=0:8, got {value_text(text)}")
    if int(match[2]) - int(match[1]) > _MAX_VALUES:
        raise UsageError(f"{option}={text}: at most {_MAX_VALUES:,} values can be searched; choose a smaller range")
    return int(match[1]), int(match[2])
