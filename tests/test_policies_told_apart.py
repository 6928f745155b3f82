"""What a policy of the user's own is told as: equal fingerprints mean equal numbers, whatever its code stands on."""

import functools
import importlib
import re
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from astrolabe_lab.errors import InputError
from astrolabe_lab.sweep.identity import of_value

POLICY = "class Own:\n    def choose(self, request, cluster, rng):\n        return {}\n"


def told(returns, **names):
    """The fingerprint of a policy whose choose() returns this expression, among these names."""
    exec(POLICY.format(returns), names)
    return of_value(names["Own"]())


def jitted(source, **options):
    import numba

    names = {}
    exec(source, names)
    return numba.njit(**options)(names["score"])


class Weighs:
    def __init__(self, weight):
        self.weight = weight


def scaled(by, x=0):
    return by * x


CACHED = [functools.lru_cache(lambda x, by=by: x * by) for by in (1, 2)]


@pytest.mark.parametrize(
    ("returns", "one", "other"),
    [
        ("int(used[0])", np.array([1.0, 2.0]), np.array([1.0, 3.0])),
        ("int(used[0] // 2)", np.array([5]), np.array([5.0])),
        ("used.weight", Weighs(1), Weighs(2)),
        ("used()", functools.partial(scaled, 1), functools.partial(scaled, 2)),
        ("used()", Weighs(1).__init__, Weighs(2).__init__),
        ("used(0)", *CACHED),
        ("used[0]", {0: 1}, {"0": 1}),
        ("used[0]", range(3), range(4)),
        ("used[0]", [Weighs(1)], [Weighs(2)]),
        ("used(0)", np.exp, np.log),
        ("used(0)", min, max),
        ("used.weight", SimpleNamespace(weight=1), SimpleNamespace(weight=2)),
        ("used.match('a')", re.compile("a"), re.compile("b")),
        ("used.random()", np.random.default_rng(1), np.random.default_rng(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_policy_is_another_when_what_it_uses_is(returns, one, other):
    assert told(returns, used=one) == told(returns, used=one) != told(returns, used=other)


def test_a_policy_is_another_when_what_it_compiles_is():
    source = "def score(x):\n    return x + 1\n"
    versions = [jitted(source), jitted(source.replace("1", "2")), jitted(source, fastmath=True)]
    prints = [told("used(0)", used=one) for one in versions]
    assert len(set(prints)) == 3 and told("used(0)", used=jitted(source)) == prints[0]


@pytest.mark.parametrize("kind", ["staticmethod", "classmethod", "property", "functools.cached_property"])
def test_a_class_is_another_when_a_decorated_method_is(kind):
    def of(line):
        names = {"functools": functools}
        exec(POLICY.format(0) + f"    @{kind}\n    def score(*args):\n        return {line}\n", names)
        return of_value(names["Own"]())

    assert of("x") == of("x") != of("y")
    assert of("x") != told("0")


def test_a_class_is_another_when_an_object_in_it_is():
    def of(**names):
        exec("class Own:\n    used = given\n    def choose(self, *_):\n        return self.used\n", names)
        return of_value(names["Own"]())

    for one, other in ((np.zeros(2), np.ones(2)), (Weighs(1), Weighs(2)), (staticmethod(min), staticmethod(max))):
        assert of(given=one) != of(given=other)


def test_which_of_two_known_things_is_used_is_told():
    first, second = (eval(f"lambda: {i}") for i in range(2))
    versions = [told("a() + b() + c()", a=first, b=second, c=third) for third in (first, second)]
    assert versions[0] != versions[1]


@pytest.mark.parametrize("how", ["import", "from", "inside", "package", "asked by name"])
def test_a_module_of_ones_own_that_is_edited_makes_its_policies_others(how, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "__init__.py").write_text("")
    (tmp_path / "own_rule.py").write_text("from own_pack import inner\ndef score(x):\n    return inner.deep(x)\n")
    lines, inside, used = {
        "import": ("import own_rule", "pass", "own_rule.score(0)"),
        "from": ("from own_rule import score", "pass", "score(0)"),
        "inside": ("", "from own_rule import score", "score(0)"),
        "package": ("import own_pack.inner", "pass", "own_pack.inner.deep(0)"),
        "asked by name": ("import own_rule", "pass", "getattr(own_rule, 'sco' + 're')(0)"),
    }[how]
    policy = f"{lines}\nclass Own:\n    def choose(self, *_):\n        {inside}\n        return {used}\n"

    def of(deep):
        (tmp_path / "own_pack" / "inner.py").write_text(f"def deep(x):\n    return {deep}\n")
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        names = {}
        exec(policy, names)
        return of_value(names["Own"]())

    assert of("x + 1") == of("x + 1") != of("x + 2")


def test_a_value_that_is_set_in_a_module_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_limits.py").write_text("LIMIT = 1\n")
    own_limits = importlib.import_module("own_limits")
    before = told("used.LIMIT", used=own_limits)
    monkeypatch.setattr(own_limits, "LIMIT", 2)
    assert told("used.LIMIT", used=own_limits) != before


def test_what_stands_beside_a_policy_and_is_not_used_does_not_matter():
    assert told("request.waiting", waiting=1) == told("request.waiting", waiting=threading.Lock())


def test_what_policies_are_commonly_made_of_can_be_told():
    class Rule(ABC):
        @abstractmethod
        def choose(self, request, cluster, rng): ...

    class Side(Enum):
        LEFT = 0

    @dataclass(frozen=True, slots=True)
    class Own(Rule):
        side: Side = Side.LEFT
        folder: Path = Path("x")

        def choose(self, request, cluster, rng):
            return round(float(np.exp(self.side.value)) + len(super().__repr__()) + (self.choose is None))

    assert of_value(Own()) == of_value(Own()) != of_value(Own(folder=Path("y")))


@pytest.mark.parametrize("made", [threading.Lock, lambda: (i for i in range(3))])
def test_what_cannot_be_told_is_refused_and_not_left_out(made):
    with pytest.raises(InputError, match="cannot be told from others of its kind"):
        told("used", used=made())


def test_a_value_that_holds_itself_ends():
    own = Weighs(0)
    own.weight = own
    assert of_value(own) == of_value(own)
    loop = []
    loop.append(loop)
    with pytest.raises(InputError, match="holds itself"):
        of_value(loop)
