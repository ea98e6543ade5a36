"""The import rule of ARCHITECTURE.md, read from the source: who may import whom, and who touches what."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "nsa" / "nsa_attention").rglob("*.py")])
HARNESS, PRIVATE = "nsa_harness", "_nsa_harness"  # its import name, and the one under which guests are loaded

# Layer -> the layers it may import, besides itself. `errors` is added for all but the guests in a rank.
MAY_IMPORT = {
    "protocol": set(),
    "errors": set(),
    "package": {"cli", "commands", "core"},  # __init__ and __main__: the version, and what is loaded on first use
    "core": {"protocol"},
    "texts": {"core", "protocol"},
    "subject": {"texts", "core", "protocol"},
    "supervisor": {"subject", "texts", "core", "protocol", "package"},
    "render": {"supervisor", "texts", "core", "protocol", "package"},  # not the subject: it is passed in
    "engine": {"supervisor", "subject", "texts", "core", "protocol", "package"},
    "commands": {"engine", "render", "supervisor", "subject", "texts", "core", "protocol", "package"},
    "cli": {"commands", "engine", "render", "supervisor", "subject", "texts", "core", "protocol", "package"},
    "pytest_plugin": {"commands", "render", "supervisor", "subject", "texts", "core", "protocol", "package"},
    "probe": {"protocol"},
    "faults": {"protocol"},
    "fork_server": {"protocol"},
}
GUESTS = ("probe", "faults")
# The one door between the guests: a rank whose run has a planted fault loads it, and no other rank ever does.
DOOR = ("harness/nsa_harness/probe/startup.py", "nsa_harness.faults.plant")
# A fork of the server guards its launch as every guardian does.
GUARD = ("harness/nsa_harness/fork_server/serving.py", "nsa_harness.supervisor.launch.reaper")
TORCH_USERS = ("nsa_attention", "probe", "faults", "fork_server")
RANK_OF_A_TEST = "harness/nsa_harness/pytest_plugin/in_rank.py"  # pytest loads it in each rank
# What a pure module has no use for: the clock, the machine, other processes, files. Paths as values are fine.
IMPURE = {"os", "time", "subprocess", "socket", "shutil", "tempfile", "threading", "psutil", "platform"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", ".now", ".today", ".monotonic", ".read_text", ".read_bytes"}
# What one person can keep in mind. More of them is no mistake of the last one: join what one reader looks for together.
MOST_CHILDREN, MOST_FILES = 16, 406


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(module: str) -> str:
    """nsa_harness.core.plan -> core; nsa_harness -> package; anything else -> its top package."""
    top, *rest = module.split(".")
    if top != HARNESS:
        return top
    return rest[0] if rest else "package"


def module_of(path: Path) -> str:
    """Return the import name of a source file: harness/nsa_harness/core/plan.py is nsa_harness.core.plan."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def imports(tree: ast.AST, path: Path | None = None) -> Iterator[str]:
    """Every imported module, nested imports too; `from nsa_harness import protocol` counts as nsa_harness.protocol."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = _absolute(node, path)
            known = [f"{whole}.{alias.name}" for alias in node.names if _is_module(f"{whole}.{alias.name}")]
            yield from known or [whole]


def _absolute(node: ast.ImportFrom, path: Path | None) -> str:
    """Guests are loaded under a private package name, so they import each other relative to where they lie."""
    if not node.level:
        return node.module or ""
    assert path is not None
    package = module_of(path).split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that the file imports, and the guests' private package by its real name."""
    found = imports(parsed(path), path)
    return tuple(f"{HARNESS}{name.removeprefix(PRIVATE)}" if name.startswith(PRIVATE) else name for name in found)


def packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(path)}


@cache
def _is_module(name: str) -> bool:
    top = "nsa" if name.startswith("nsa_attention") else "harness"
    place = ROOT.joinpath(top, *name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def top_level(path: Path) -> set[str]:
    """The packages that importing the file imports."""
    body = [node for node in parsed(path).body if isinstance(node, (ast.Import, ast.ImportFrom, ast.If, ast.Try))]
    return {name for node in body if not _type_checking(node) for name in imports(node, path)}


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def of_layer(*layers: str) -> tuple[Path, ...]:
    def layer(path: Path) -> str:
        return layer_of(module_of(path).removesuffix(".__init__").removesuffix(".__main__"))

    return tuple(path for path in SOURCES if layer(path) in layers)


def violations(path: Path, layer: str) -> list[str]:
    allowed = MAY_IMPORT[layer] | {layer} | (set() if layer in GUESTS else {"errors"})
    ours = [module for module in imported(path) if module.split(".")[0] in (HARNESS, "nsa_attention")]
    found = [(name_of(path), module) for module in ours if layer_of(module) not in allowed]
    return [f"{name} imports {module}" for name, module in found if (name, module) not in (DOOR, GUARD)]


def test_every_module_belongs_to_a_known_layer() -> None:
    known = of_layer(*MAY_IMPORT, "nsa_attention")
    assert [name_of(path) for path in SOURCES if path not in known] == []
    assert len(known) > 50


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    assert [line for path in of_layer(layer) for line in violations(path, layer)] == []


def test_no_module_needs_itself_to_be_imported() -> None:
    """Whichever of a circle is imported first fails: the other one finds it half done."""
    assert circles({module_of(path).removesuffix(".__init__"): set(top_level(path)) for path in SOURCES}) == []


def test_no_late_import_of_the_probe_hides_a_circle() -> None:
    assert circles({module_of(path): set(imported(path)) for path in of_layer("probe")}) == []


def circles(needs: dict[str, set[str]]) -> list[str]:
    """Return the modules that need each other, or such modules, to be imported."""
    while done := {module for module, others in needs.items() if not others & (needs.keys() - {module})}:
        needs = {module: others for module, others in needs.items() if module not in done}
    return sorted(needs)


def test_the_subject_and_the_harness_do_not_know_each_other() -> None:
    assert [name_of(path) for path in of_layer("nsa_attention") if HARNESS in packages(path)] == []
    assert [name_of(path) for path in of_layer(*MAY_IMPORT) if "nsa_attention" in packages(path)] == []


@pytest.mark.parametrize("path", of_layer("nsa_attention"), ids=name_of)
def test_the_subject_never_says_its_own_name_where_that_loads_something(path: Path) -> None:
    """The package may be copied below another package: its imports are relative."""
    tree = parsed(path)
    absolute = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    absolute += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [module for module in absolute if module.split(".")[0] == "nsa_attention"] == []
    assert [
        text
        for text in texts
        if text.startswith(("nsa::", "nsa_attention::")) or (text.startswith("nsa_attention.") and _is_module(text))
    ] == []


# Words of the program that ships with us. Scenarios are `selected` too, so that word tells nothing.
OF_THE_SUBJECT = frozenset(
    {"nsa", "attention", "gate", "gates", "branch", "branches", "cmp", "sel", "win", "compressed", "compression"}
    | {"sliding"}
)
# Our own name; what points any program at its folder; the repository variable that names a runner.
_OUR_NAME = re.compile(r"nsa[-_]harness|\(\?:nsa_\)\?harness|nsa_attention|NSA_OUT_DIR|NSA_GPU_RUNNER", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_TABLE = re.compile(r"\w+\.csv")
# Where one of them stands all the same, and why.
ALLOWED: dict[str, tuple[set[str], str]] = {
    "harness/nsa_harness/core/collectives/repair.py": ({"branches"}, "of the user's code"),
    "harness/nsa_harness/core/evidence/job_files.py": ({"compressed"}, "of a log file"),
    "harness/nsa_harness/core/search/subject.py": ({"branches"}, "how bisect.json calls a form"),
    "harness/nsa_harness/core/comparison/plan_file.py": ({"gate", "gates"}, "a gate of a decision"),
    "harness/nsa_harness/core/comparison/decisions.py": ({"gate", "gates"}, "a gate of a decision"),
    "harness/nsa_harness/core/comparison/decision_rules.py": ({"gates"}, "the section of a plan file"),
    "harness/nsa_harness/core/diagnosis/causes.py": (
        {"gate"},
        "the one table of causes, with that of the subject, which docs and `expect.cause` are read from",
    ),
    "harness/nsa_harness/core/diagnosis/rules/autograd.py": ({"branch"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/rules/call_places.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/rules/call_reasons.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/rules/calls_differ.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/rules/failures.py": (
        {"nsa", "branch"},
        "a folder of our checkout, which may shadow a user's package; a branch of the user's code",
    ),
    "harness/nsa_harness/core/diagnosis/rules/group_waits.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/rules/p2p.py": ({"branch"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/call_paths.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/diagnosis/parting.py": ({"branch"}, "of the user's code"),
    "harness/nsa_harness/core/source_code/excerpt.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/source_code/deciding.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/source_code/program_source.py": ({"branch", "branches"}, "of the user's code"),
    "harness/nsa_harness/core/report.py": ({"gate", "gates"}, "a gate of a decision"),
    "harness/nsa_harness/core/outcome/reproduction.py": ({"branches"}, "of the script that is written"),
    "harness/nsa_harness/core/scenario/env_names.py": ({"win"}, "a variable of NCCL"),
    "harness/nsa_harness/core/scenario/scenario.py": (
        {"nsa", "attention", "gates", "branch", "branches", "cmp", "sel", "win", "compression"},
        "the one schema of scenario files, which has the keys of our program",
    ),
    "harness/nsa_harness/supervisor/experiments/subjects.py": (
        {"branch"},
        "the option --branch, answered by the subject",
    ),
    "harness/nsa_harness/supervisor/launch/machine.py": ({"branch"}, "of git"),
}


def of_the_subject(text: str) -> set[str]:
    plain = _OUR_NAME.sub("", text)
    return {*_TABLE.findall(plain), *({word.lower() for word in _WORD.findall(plain)} & OF_THE_SUBJECT)}


def test_the_core_and_the_supervisor_have_no_word_of_the_subject() -> None:
    """What is known of our own program alone stands in harness/nsa_harness/subject and is passed in."""
    found = {name_of(path): of_the_subject(path.read_text("utf-8")) for path in of_layer("core", "supervisor")}
    for name in found:
        if "/core/recording/" in name:
            found[name] -= {"branch", "branches"}  # of the user's code, which this package is about
    assert {name: words for name, words in found.items() if words} == {
        name: words for name, (words, _) in ALLOWED.items()
    }


def test_a_word_of_the_subject_is_seen_within_any_name() -> None:
    seen = "SecondRun.OTHER_ATTENTION, AttentionGate, NSA_TRAIN, 'gate_health.csv', nsa_harness, aggregate, windows"
    assert of_the_subject(seen) == {"attention", "gate", "nsa", "gate_health.csv"}


COMMANDS = sorted(
    path for path in (ROOT / "harness/nsa_harness/cli").glob("*.py") if path.stem not in ("__init__", "streams", "text")
)


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_the_command_line_loads_nothing_but_typer_and_the_errors_before_a_command_runs(path: Path) -> None:
    ours = {f"nsa_harness.cli.{module.stem}" for module in (ROOT / "harness/nsa_harness/cli").glob("*.py")} - {
        "nsa_harness.cli.text"
    }
    found = {name for name in top_level(path) if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in found} >= {"typer"}
    assert found <= {"typer", "typer.core", "nsa_harness.errors", *ours}


def test_faults_come_into_a_rank_by_one_door_and_only_when_it_is_opened() -> None:
    name, module = DOOR
    users = [name_of(path) for path in SOURCES if module in imported(path) and path not in of_layer("faults")]
    assert users == [name]
    assert module not in top_level(ROOT / name)


@pytest.mark.parametrize("path", of_layer(*GUESTS), ids=name_of)
def test_a_guest_in_a_rank_needs_only_the_standard_library_and_torch_late(path: Path) -> None:
    # sitecustomize chain-loads the next module of its own name.
    assert packages(path) - sys.stdlib_module_names <= {"torch", HARNESS, path.stem}
    assert "torch" not in {name.split(".")[0] for name in top_level(path)}, "importing torch is the program's choice"


@pytest.mark.parametrize("path", of_layer("fork_server"), ids=name_of)
def test_the_fork_server_needs_only_the_standard_library_and_imports_torch_by_name(path: Path) -> None:
    assert packages(path) - sys.stdlib_module_names <= {HARNESS}


@pytest.mark.parametrize(
    "name",
    [
        "harness/nsa_harness/protocol.py",
        "harness/nsa_harness/supervisor/storage/safe_directory.py",
        "harness/nsa_harness/supervisor/storage/expressions.py",
    ],
)
def test_a_program_of_its_own_needs_only_the_standard_library(name: str) -> None:
    assert {module.split(".")[0] for module in top_level(ROOT / name)} <= sys.stdlib_module_names


def test_the_guardian_loads_besides_the_standard_library_only_the_door_to_files() -> None:
    """It starts without site-packages, and in the fork server under another name of the package."""
    guardian = ROOT / GUARD[1].replace(".", "/").replace("nsa_harness/", "harness/nsa_harness/", 1)
    ours = {module for module in imported(guardian.with_suffix(".py")) if module.startswith(HARNESS)}
    assert ours == {"nsa_harness.supervisor.storage.safe_directory"}
    assert packages(guardian.with_suffix(".py")) - {HARNESS} <= sys.stdlib_module_names


@pytest.mark.parametrize("heavy", ["torch", "triton", "flash_attn"])
def test_only_the_subject_and_the_guests_touch_torch(heavy: str) -> None:
    outside = [path for path in SOURCES if path not in of_layer(*TORCH_USERS) and name_of(path) != RANK_OF_A_TEST]
    assert [name_of(path) for path in outside if heavy in packages(path)] == []


def children(folder: Path) -> list[str]:
    """The names of the modules and packages directly in `folder`, without `__init__` and `__main__`."""
    found = {path.relative_to(folder).parts[0] for path in folder.rglob("*.py")}
    return sorted(found - {"__init__.py", "__main__.py"})


def test_the_harness_has_few_children_and_few_files() -> None:
    package = ROOT / "harness" / HARNESS
    assert len(children(package)) <= MOST_CHILDREN, children(package)
    files = [path for path in SOURCES if path.is_relative_to(ROOT / "harness")]
    assert len(files) <= MOST_FILES, f"harness/ has {len(files)} Python files, and {MOST_FILES} is the most"


def calls(tree: ast.AST) -> set[str]:
    """The names that are called: `open`, and the last part of `datetime.now`."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    plain = {func.id for func in called if isinstance(func, ast.Name)}
    return plain | {f".{func.attr}" for func in called if isinstance(func, ast.Attribute)}


@pytest.mark.parametrize("path", of_layer("core"), ids=name_of)
def test_the_core_has_no_clock_file_process_or_environment(path: Path) -> None:
    assert packages(path) & IMPURE == set()
    assert calls(parsed(path)) & IMPURE_CALLS == set()
    whole = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.module == "pathlib"]
    assert {alias.name for node in whole for alias in node.names} <= {"PurePath", "PurePosixPath"}
    assert {"pathlib", "random"}.isdisjoint(
        a.name for n in ast.walk(parsed(path)) if isinstance(n, ast.Import) for a in n.names
    )


@pytest.mark.parametrize("path", of_layer("core"), ids=name_of)
def test_what_the_core_draws_at_random_follows_from_a_seed(path: Path) -> None:
    nodes = list(ast.walk(parsed(path)))
    drawn = {a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "random" for a in n.names}
    assert drawn <= {"Random"}
    calls_of_it = [
        n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "Random"
    ]
    assert all(call.args for call in calls_of_it)


# Who reads or writes files of a run, and the calls by which a file is opened or listed without asking where it lies.
OF_RUNS = (
    "harness/nsa_harness/cli",
    "harness/nsa_harness/commands",
    "harness/nsa_harness/render",
    "harness/nsa_harness/supervisor/storage",
    "harness/nsa_harness/supervisor/experiments",
)
PAST_THE_DOOR = {"open", ".open", ".read_text", ".read_bytes", ".write_text", ".write_bytes", ".glob", ".rglob"}
PAST_THE_DOOR |= {".iterdir", ".scandir", ".walk", ".unlink", ".touch", ".rename", ".symlink_to", ".copyfile", ".copy2"}
NO_FILE_OF_A_RUN: dict[str, tuple[set[str], str]] = {
    "harness/nsa_harness/cli/streams.py": ({".open"}, "/dev/null, instead of a stream that is closed or full"),
    "harness/nsa_harness/cli/options.py": ({".write_text"}, "a paragraph of a help text"),
    "harness/nsa_harness/commands/live.py": (
        {".glob", ".read_bytes"},
        "status files of ranks that run, which lie in memory",
    ),
    "harness/nsa_harness/commands/ci_init.py": ({".read_text"}, "our own template, and a workflow of the user"),
    "harness/nsa_harness/commands/run.py": ({".read_text", ".write_text"}, "the comm.lock file that a user has named"),
    "harness/nsa_harness/commands/session.py": ({".open"}, "/dev/null, in the place of a terminal that is gone"),
    "harness/nsa_harness/render/documents/html.py": ({".read_text"}, "our own template"),
    "harness/nsa_harness/render/documents/schemas.py": ({".read_text"}, "our own descriptions"),
    "harness/nsa_harness/supervisor/experiments/intermediate_configs.py": (
        {".rename"},
        "a folder that pip has filled, in a run of our own",
    ),
    "harness/nsa_harness/supervisor/experiments/cache_key.py": (
        {".read_bytes", ".walk"},
        "the files of the program that is searched",
    ),
    "harness/nsa_harness/supervisor/storage/safe_directory.py": (
        {"open", ".open", ".scandir", ".unlink", ".rename"},
        "the door itself",
    ),
    "harness/nsa_harness/supervisor/storage/logs.py": ({".open"}, "a log of a launch that runs, by no link"),
    "harness/nsa_harness/supervisor/storage/redacted_files.py": ({".open"}, "the bundle that a user has named"),
    "harness/nsa_harness/supervisor/storage/history.py": ({".unlink"}, "the index beside the runs, if it is damaged"),
    "harness/nsa_harness/supervisor/storage/reports.py": (
        {".walk"},
        "where runs lie is looked for; what is found goes by the door",
    ),
    "harness/nsa_harness/supervisor/storage/rundir.py": (
        {".rename", ".symlink_to", ".unlink"},
        "`latest`, beside the runs",
    ),
    "harness/nsa_harness/supervisor/storage/sources.py": (
        {".read_text"},
        "the program of a launch that has just ended",
    ),
}


def past_the_door(tree: ast.AST) -> set[str]:
    """The calls that open or list a file by its path; `directory.open_file`, `stack.open` of ours have other names."""
    return calls(tree) & PAST_THE_DOOR


def test_files_of_a_run_are_opened_by_the_one_door_alone() -> None:
    of_runs = [path for path in SOURCES if name_of(path).startswith(OF_RUNS)]
    found = {name_of(path): past_the_door(parsed(path)) for path in of_runs}
    assert {name: made for name, made in found.items() if made} == {
        name: made for name, (made, _) in NO_FILE_OF_A_RUN.items()
    }
    assert len(of_runs) > 40


def test_a_way_past_the_door_would_be_noticed() -> None:
    ways = "open(p); run.log.open('a'); os.open(p, 0); p.read_text(); sorted(d.glob('*')); directory.open_file(p)"
    assert past_the_door(ast.parse(ways)) == {"open", ".open", ".read_text", ".glob"}


def test_the_rule_would_notice_what_it_forbids() -> None:
    nested = ast.parse("def f():\n    from nsa_harness.supervisor.storage import rundir\n    import torch.nn\n")
    assert list(imports(nested)) == ["nsa_harness.supervisor.storage.rundir", "torch.nn"]
    assert list(imports(ast.parse("from nsa_harness import protocol, __version__"))) == ["nsa_harness.protocol"]
    relative = ast.parse("from .. import protocol\nfrom .status_file import StatusFile")
    assert list(imports(relative, ROOT / "harness/nsa_harness/probe/heartbeat.py")) == [
        "nsa_harness.protocol",
        "nsa_harness.probe.status_file",
    ]
    assert calls(ast.parse("open(p); d.now()")) == {"open", ".now"}


# Strings in the core: descriptions of keys, messages about scenario files, texts that facts quote. Rules return facts,
# and the sentences of findings are in texts/causes.toml. The number may fall, and never rise.
MOST_SENTENCES_IN_CORE = 674


def sentences_in(tree: ast.Module) -> Iterator[str]:
    """Yield the string constants of at least four words that are no docstrings and no patterns."""
    no_sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    compiled = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
    )
    no_sentences.update(id(part) for call in compiled for part in ast.walk(call))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in no_sentences
        if is_text and len(node.value.split()) >= 4:
            yield node.value


def test_the_core_gains_no_sentence() -> None:
    found = [text for path in of_layer("core") for text in sentences_in(parsed(path))]
    assert len(found) <= MOST_SENTENCES_IN_CORE, f"{len(found)}: put words into harness/nsa_harness/texts"
    assert list(
        sentences_in(ast.parse('"""A docstring of five words."""\nx = "one two three four"; y = "two words"'))
    ) == ["one two three four"]


@pytest.mark.parametrize("path", sorted((ROOT / "harness/nsa_harness/core/diagnosis/rules").glob("*.py")), ids=name_of)
def test_a_rule_gives_no_claim_and_no_advice(path: Path) -> None:
    given = {keyword.arg for node in ast.walk(parsed(path)) if isinstance(node, ast.Call) for keyword in node.keywords}
    assert given & {"claim", "advice", "summary"} == set()
