"""Reading values never runs code of the program, whatever its objects are."""

from __future__ import annotations

import ast
import collections
import enum
import importlib.util
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

from nsa_harness.probe import values

RUN: list[str] = []  # the methods of hostile objects that have run


def read_expressions(frame: Any, expressions: Sequence[str]) -> Iterator[tuple[str, values.Value]]:
    """Yield the values of expressions in a frame, without those that are missing there or may run code."""
    for expression in expressions:
        with suppress(SyntaxError):
            path = values.path_of(ast.parse(expression, mode="eval").body)
            found = values.MISSING if path is None else path.find(*values.frame_variables(frame))
            if found is not values.MISSING:
                yield expression, values.read(found)


def trap(name: str) -> Callable[..., Any]:
    def method(*_arguments: Any, **_options: Any) -> Any:
        RUN.append(name)
        raise SystemExit(f"{name} was run")

    return method


def armed(*bases: type, **members: Any) -> type:
    """Make a class all of whose special methods are traps."""
    names = (
        "__len__", "__iter__", "__repr__", "__str__", "__eq__", "__hash__", "__bool__", "__contains__", "__getitem__",
        "__int__", "__float__", "__index__", "__format__", "__sizeof__", "__reduce__", "__dir__", "__missing__",
        "__array__", "__array_interface__", "__torch_function__", "__getstate__", "__lt__", "__fspath__",
    )  # fmt: skip
    return type("Armed", bases or (object,), {**{name: trap(name) for name in names}, **members})


class Meta(type):
    """A metaclass that is asked nothing either."""

    __hash__ = trap("metaclass __hash__")  # type: ignore[assignment]
    __eq__ = trap("metaclass __eq__")  # type: ignore[assignment]
    __instancecheck__ = trap("metaclass __instancecheck__")
    __subclasscheck__ = trap("metaclass __subclasscheck__")
    __repr__ = trap("metaclass __repr__")
    bad = property(trap("metaclass property"))

    def mro(cls) -> list[type]:
        return super().mro()


def with_metaclass() -> Any:
    kind = Meta("Made", (), {})
    Meta.__getattribute__ = trap("metaclass __getattribute__")  # type: ignore[method-assign,assignment]
    try:
        return object.__new__(kind)
    finally:
        del Meta.__getattribute__


class Slots:
    __slots__ = ("__weakref__", "bad", "unset")

    def __init__(self) -> None:
        self.bad = 3


class Descriptor:
    __get__ = trap("__get__")


class DataDescriptor(Descriptor):
    __set__ = trap("__set__")


class HostileKey(str):
    __eq__ = trap("key __eq__")  # type: ignore[assignment]
    __hash__ = str.__hash__


class Parts(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_arguments: Any, **_options: Any) -> Any:
        RUN.append("tensor subclass")
        raise SystemExit


def plain(**members: Any) -> Any:
    made = type("Plain", (), {})()
    made.__dict__.update(members)
    return made


def lazy_module() -> Any:
    module = types.ModuleType("lazy")
    module.__getattr__ = trap("module __getattr__")  # type: ignore[method-assign]
    return module


def lazy_loaded() -> Any:
    """Return a module of the standard library that is executed when an attribute is read."""
    spec = importlib.util.find_spec("antigravity")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def generator() -> Iterator[int]:
    RUN.append("generator")
    yield 1


HOSTILE: dict[str, Callable[[], Any]] = {
    "__getattr__": lambda: armed(__getattr__=trap("__getattr__"))(),
    "__getattribute__": lambda: armed(__getattribute__=trap("__getattribute__"))(),
    "__class__ is a property": lambda: armed(__class__=property(trap("__class__")))(),
    "__dict__ is a property": lambda: armed(__dict__=property(trap("__dict__")))(),
    "metaclass": with_metaclass,
    "list": lambda: armed(list)(),
    "dict": lambda: armed(dict)(),
    "defaultdict": lambda: armed(collections.defaultdict)(),
    "int": lambda: armed(int)(),
    "float": lambda: armed(float)(),
    "str": lambda: armed(str)(),
    "tuple": lambda: armed(tuple)(),
    "set": lambda: armed(set)(),
    "ndarray": lambda: numpy.zeros(3).view(type("Array", (numpy.ndarray,), {"__array_finalize__": lambda *_: None})),
    "tensor": lambda: torch.zeros(3).as_subclass(Parts),
    "descriptor": lambda: armed(bad=Descriptor())(),
    "data descriptor": lambda: armed(bad=DataDescriptor())(),
    "property": lambda: armed(bad=property(trap("property")))(),
    "hidden by a property": lambda: _hidden(),
    "slots": Slots,
    "key of a program's type": lambda: plain(**{HostileKey("bad"): 1}),
    "items of a program's type": lambda: [armed()(), {"a": armed()()}, (armed(int)(), armed(str)())],
    "weakref": lambda: weakref.proxy(_KEPT[0]),
    "lazy module": lazy_module,
    "lazily loaded module": lazy_loaded,
    "generator": generator,
    "exception": lambda: armed(ValueError)("text"),
    "torch module": lambda: _module(),
    "class": lambda: armed(),
    "class with a hostile metaclass": lambda: Meta("Made", (), {}),
    "enum": lambda: enum.Enum("Hostile", {"bad": 1}, type=armed()),
}


class Kept:
    __getattribute__ = trap("of a weakly referenced object")  # type: ignore[assignment]


_KEPT = [Kept()]


def _hidden() -> Any:
    made = armed(bad=property(trap("property")))()
    object.__getattribute__(made, "__dict__")["bad"] = 4
    return made


def _module() -> Any:
    return type("Net", (torch.nn.Module,), {"__getattr__": trap("__getattr__"), "__repr__": trap("__repr__")})()


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> Any:
    made = HOSTILE[request.param]()
    RUN.clear()
    yield made
    RUN.clear()


def test_a_hostile_object_is_read_without_running_it(hostile: Any) -> None:
    kind, text, identity = values.read(hostile)
    assert type(kind) is type(text) is str
    assert type(identity) is int
    values.attribute(hostile, "bad")
    values.attribute(hostile, "__dict__")
    values.item(hostile, 0)
    values.item(hostile, "bad")
    values.item({"bad": 1}, hostile)
    values.item([1], hostile)
    values.length(hostile)
    values.is_code(hostile)
    values.read([hostile, (hostile,), {"a": hostile}])
    values.read({0: hostile})
    values.message(ValueError(hostile))
    thing = plain(part=hostile)
    frame = types.SimpleNamespace(f_locals={"hostile": hostile, "thing": thing}, f_globals={})
    names = [
        "hostile.bad",
        "hostile[0]",
        "hostile['bad']",
        "thing.part.bad",
        "len(hostile)",
        "hostile",
        "thing[hostile]",
    ]
    list(read_expressions(frame, names))
    assert RUN == []


class Mode(TorchFunctionMode):
    def __torch_function__(self, *_arguments: Any, **_options: Any) -> Any:
        RUN.append("function mode")
        raise SystemExit


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, *_arguments: Any, **_options: Any) -> Any:
        RUN.append("dispatch mode")
        raise SystemExit


@pytest.mark.parametrize("mode", [Mode, DispatchMode])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(8, 4), "float32 [8, 4] crc 201a96c6"),
        (lambda: torch.tensor(2.5), "2.5"),
        (lambda: torch.tensor([7]), "7"),
        (lambda: torch.ones(2, 2, 2)[:, 0], "float32 [2, 2] crc e8681456"),
        (lambda: torch.nn.Parameter(torch.tensor([1.5])), "1.5"),
        (lambda: torch.ones(1, dtype=torch.bfloat16), "1.0"),
        (lambda: torch.ones(2, device="meta"), "float32 [2] meta"),
        (lambda: torch.ones(4).to_sparse(), "float32 [4]"),
        (lambda: torch.zeros(0), "float32 [0]"),
        (lambda: torch.Generator().manual_seed(1), None),
        (lambda: TensorDataset(torch.ones(5, 2)), ""),
    ],
)
def test_a_tensor_is_read_without_the_modes_of_the_program(
    mode: type[Any], make: Callable[[], Any], text: str | None
) -> None:
    RUN.clear()
    value = make()
    with mode():
        found = values.read(value)[1]
        size = values.length(value)
    assert RUN == []
    assert text in (None, found)
    assert size == (5 if isinstance(value, TensorDataset) else values.MISSING)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (None, "None"),
        (2.5, "2.5"),
        ("adam", "'adam'"),
        ([1, 2], "[1, 2]"),
        ((1,), "(1,)"),
        ({"lr": 0.5}, "{'lr': 0.5}"),
        (range(4), "range(0, 4)"),
        (numpy.float32(1.5), "1.5"),
        (numpy.arange(3), None),
        (collections.deque([1]), "[1]"),
        (torch.Size([2, 3]), "(2, 3)"),
        (torch.float16, "torch.float16"),
        (PosixPath("/a/b"), "'/a/b'"),
        (object(), ""),
        (2**600, None),
    ],
)
def test_values_of_known_types_are_shown(value: object, text: str | None) -> None:
    found = values.read(value)[1]
    assert found == text or (text is None and "crc" in found)


def test_huge_values_are_read_in_a_bounded_way() -> None:
    for huge in (
        "x" * 10**7,
        list(range(10**6)),
        dict.fromkeys(range(10**5), "y" * 1000),
        [[[[1] * 99] * 99] * 99],
    ):
        assert len(values.read(huge)[1]) < 200
    assert values.read("x" * 10**7) != values.read("x" * (10**7 + 1))
    assert values.read(list(range(1000))) != values.read([-1, *range(999)])


def test_a_tensor_that_is_not_contiguous_is_compared_by_its_own_elements() -> None:
    memory = torch.arange(12).view(3, 4)
    text = values.read(memory.t())[1]
    assert text.startswith("int64 [4, 3] crc ")
    assert text == values.read(memory.t().contiguous())[1]
    other = memory.clone()
    other[0, 3] = 99  # outside of the columns that the next view shows
    assert values.read(memory[:, :2])[1] == values.read(other[:, :2])[1]
    assert values.read(memory[:, 2:])[1] != values.read(other[:, 2:])[1]
    assert values.read(torch.zeros(1).expand(3, 2))[1] == values.read(torch.zeros(3, 2))[1]
    assert "crc" in values.read(torch.zeros(10**4, 300)[:, ::2])[1]
    assert values.read(numpy.arange(6).reshape(2, 3).T)[1] != values.read(numpy.zeros((2, 3), numpy.int64).T)[1]


def test_a_container_of_itself_is_read() -> None:
    items: list[Any] = [1]
    items.append(items)
    assert "2 items" in values.read(items)[1]


def test_equal_values_have_equal_texts_and_their_own_identities() -> None:
    first, second = values.read([1, {"a": torch.ones(3)}]), values.read([1, {"a": torch.ones(3)}])
    assert first[:2] == second[:2]
    assert values.read(3)[2] == values.read("x")[2] == 0
    one = Slots()
    assert values.read(one)[2] == id(one)
    assert values.attribute(one, "bad") == 3
    assert values.attribute(one, "unset") is values.MISSING


def test_named_expressions_of_a_frame_are_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model.register_buffer("steps", torch.tensor(5))
    pair = collections.namedtuple("Pair", "left right")(1, 2)
    state = {"epoch": 3, "best": [4, 5]}
    key = "epoch"

    def frame() -> Any:
        return sys._getframe(1)

    wanted = [
        "model.steps", "pair.right", "state['epoch']", "state[key]", "state['best'][-1]", "len(state)", "Path.nothing",
        "nothing", "model.forward", "state.keys()", "key +", "random.bad", "values.TEXT_LIMIT",
    ]  # fmt: skip
    found = {name: value[1] for name, value in read_expressions(frame(), wanted)}
    assert (model, pair, state, key, random, Path) is not None
    expected = {
        "model.steps": "5", "pair.right": "2", "state['epoch']": "3", "state[key]": "3", "len(state)": "2",
        "values.TEXT_LIMIT": "80",
    }  # fmt: skip
    assert found == expected


def test_the_length_of_a_loader_is_computed_from_its_parts() -> None:
    dataset = TensorDataset(torch.ones(17, 2))
    subset = Subset(dataset, list(range(10)))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    assert values.length(DataLoader(dataset, batch_size=4)) == 5
    assert values.length(DataLoader(dataset, batch_size=4, drop_last=True)) == 4
    assert values.length(DataLoader(dataset, batch_size=4, sampler=sampler)) == 3
    assert values.length(DataLoader(subset, shuffle=True)) == 10
    assert values.length(BatchSampler(RandomSampler(dataset, num_samples=6, replacement=True), 4, False)) == 2
    assert values.length(DataLoader([1, 2, 3], batch_size=None)) == 3

    class Own(TensorDataset):
        __len__ = trap("__len__")

    assert values.length(DataLoader.__new__(DataLoader)) is values.MISSING
    assert values.length(Own(torch.ones(3))) is values.MISSING
    assert RUN == []


def test_an_attribute_that_a_property_hides_is_unknown() -> None:
    hidden = type("Hidden", (), {"bad": property(lambda _: 1)})()
    hidden.__dict__["bad"] = 2
    assert values.attribute(hidden, "bad") is values.MISSING


def test_an_attribute_that_the_class_computes_is_unknown() -> None:
    computed = type("Computed", (), {"__getattribute__": lambda *_: 1})()
    object.__setattr__(computed, "bad", 2)
    assert values.attribute(computed, "bad") is values.MISSING
