"""Programs as people write them: whatever changes in them, what was tuned before is not used."""

from __future__ import annotations

import importlib
import re
import sys
import types
from typing import Any

import pytest
import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.triton_compat import software_versions
from triton_dist.tune import constant

HEAD = """
import contextlib, dataclasses, enum, functools, json, os, pathlib, sys, types
from typing import NamedTuple
import torch, triton
import triton.language as tl
from triton_dist.tune import autotune
S, K = [{"n": 1}, {"n": 2}], lambda *a: 0
def h(x): return VALUE
"""


def programs(text: str) -> dict[str, str]:
    """The programs in ``text``, by the name in the line that begins with ``===``.

    What stands before a line of dashes is another module, ``elsewhere``. A ``return`` outside of
    functions is the body of ``op``, which is tuned.
    """
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)
    bodies = [re.sub("^return ", RETURNS, each, flags=re.MULTILINE) for each in parts[2::2]]
    return dict(zip(parts[1::2], bodies, strict=True))


RETURNS = "@autotune(S, K)\ndef op(x, n): return "
# ``VALUE`` is what changes, also in ``h`` of each program.
PROGRAMS = programs("""
=== a table of another module
TILES = {"tile": VALUE}
---
from elsewhere import TILES
return TILES["tile"]
=== one under another name
TILES = [VALUE]
---
from elsewhere import TILES as T
return T[0]
=== all names of another module
TILES = [VALUE]
---
from elsewhere import *
return TILES[0]
=== an import inside the function
TILES = [VALUE]
---
@autotune(S, K)
def op(x, n):
    from elsewhere import TILES
    return TILES[0]
=== an object of another module
import types
CFG = types.SimpleNamespace(depth=VALUE)
---
from elsewhere import CFG
return CFG.depth
=== functions inside a table of another module
def act(x): return x * VALUE
ACTS = [("act", act)]
---
from elsewhere import ACTS
return ACTS[0][1](x)
=== the configs of a tuned function that it calls
@autotune([{"m": VALUE}], K)
def helper(x, m): return x
return helper(x)
=== those of a tuned object that it calls
class Helper:
    def __call__(self, x, m): return x
helper = autotune([{"m": VALUE}], K)(Helper())
return helper(x)
=== those of a tuned partial that it calls
def add(a, x, m): return a + x
helper = autotune([{"m": VALUE}], K)(functools.partial(add, 1))
return helper(x)
=== a class in the configs of a tuned function that it calls
@dataclasses.dataclass(frozen=True)
class Tiles:
    m: int
    def rows(self): return VALUE
@autotune([{"m": Tiles(1)}], K)
def helper(x, m): return x
return helper(x)
=== the configs of a tuned function of a closure
def make(m):
    @autotune([{"m": m}], K)
    def helper(x, m): return x
    @autotune(S, K)
    def op(x, n): return helper(x)
    return op
op = make(VALUE)
=== the configs of a tuned method of a class that it uses
class Helper:
    @autotune([{"m": VALUE}], K)
    def run(self, x, m): return x
return Helper().run(x)
=== what checks a tuned function that it calls
def check(output, reference): return VALUE
@autotune([{"m": 1}, {"m": 2}], K, check_fn=check)
def helper(x, m): return x
return helper(x)
=== one of two lambdas of a function
def make():
    scale = lambda x: x * VALUE
    shift = lambda x: x + 1
    @autotune(S, K)
    def op(x, n): return scale(shift(x))
    return op
op = make()
=== what makes the configs of a tuned function that it calls
def configs(): return [{"m": VALUE}]
@autotune(configs, K)
def helper(x, m): return x
return helper(x)
=== which config of a tuned function that it calls is fallback
def fallback(config): return VALUE
def key(M): return ()
@autotune([{"m": 1}], key, sizes=("M",), fallback_fn=fallback)
def helper(M, m): return M
return helper(x)
=== the function that a callable object holds
def a(x): return VALUE
class Op:
    def __init__(self, act): self.act = act
    def __call__(self, x, n): return self.act(x)
op = autotune(S, K)(Op(a))
=== which function a callable object holds
def one(x): return x
def two(x): return x
class Op:
    def __init__(self, act): self.act = act
    def __call__(self, x, n): return self.act(x)
op = autotune(S, K)(Op((0, one, two)[VALUE]))
=== the object of a bound method
class Op:
    def __init__(self, act): self.act = act
    def go(self, x, n): return self.act(x)
op = autotune(S, K)(Op(lambda x: VALUE).go)
=== the class that a method is bound to
class Op:
    @classmethod
    def apply(cls, x): return cls.go(x)
class Scale(Op):
    @staticmethod
    def go(x): return VALUE
scale = Scale.apply
return scale(x)
=== what is restored
@autotune(S, K, restore=("x", "y")[:VALUE])
def op(x, n, y=None): return x
=== what resets
def reset(x, n): return VALUE
@autotune(S, K, reset_fn=reset)
def op(x, n): return x
=== a slot
class Op:
    __slots__ = ("width", "__name__")
    def __init__(self, width): self.width, self.__name__ = width, "op"
    def __call__(self, x, n): return self.width
op = autotune(S, K)(Op(VALUE))
=== the object in a partial
class Op:
    def __init__(self, width): self.width = width
    def go(self, x, y, n): return self.width
op = autotune(S, K)(functools.partial(Op(VALUE).go, 1))
=== code inside a list of a closure
def make():
    steps = [("scale", {"b": h})]
    @autotune(S, K)
    def op(x, n): return steps[0][1]["b"](x)
    return op
op = make()
=== data beside code in a list of a closure
def make(steps):
    @autotune(S, K)
    def op(x, n): return steps[0][0]
    return op
op = make([(VALUE, len)])
=== the order of functions in a tuple of a closure
def one(x): return x
def two(x): return -x
def make(steps):
    @autotune(S, K)
    def op(x, n): return steps[0](steps[1](x))
    return op
op = make((one, two)[:: 3 - 2 * VALUE])
=== the order of functions in a list of a closure
def one(x): return x
def two(x): return -x
def make(steps):
    @autotune(S, K)
    def op(x, n): return steps[0](steps[1](x))
    return op
op = make([one, two][:: 3 - 2 * VALUE])
=== a dataclass that is not frozen in a tuple of a closure
@dataclasses.dataclass
class Plan:
    width: int
def make(plans):
    @autotune(S, K)
    def op(x, n): return plans[0].width
    return op
op = make((Plan(VALUE), len))
=== a long list of a closure
def make(items):
    @autotune(S, K)
    def op(x, n): return items[0]
    return op
op = make([VALUE] * 2000)
=== a list in the closure of a helper
def make(table):
    def helper(x): return table[0]
    return helper
helper = make([VALUE])
return helper(x)
=== a list in a helper's partial
def g(table, x): return table[0]
helper = functools.partial(g, [VALUE])
return helper(x)
=== what super() finds
class Base:
    def h(self, x): return VALUE
class Op(Base):
    @autotune(S, K)
    def op(self, x, n): return super().h(x)
=== what an inherited method calls of the class that is tuned
class Base:
    def run(self, x): return self.kernel(x)
class Op(Base):
    def kernel(self, x): return VALUE
    @autotune(S, K)
    def op(self, x, n): return self.run(x)
=== an attribute that an inherited method reads of the class that is tuned
class Base:
    def run(self, x): return self.width
class Op(Base):
    width = VALUE
    @autotune(S, K)
    def op(self, x, n): return super().run(x)
=== code that a method keeps in its object
class Act:
    def __call__(self, x): return x + VALUE
class Op:
    def __init__(self): self.act = Act()
    @autotune(S, K)
    def op(self, x, n): return self.act(x)
=== data that a method keeps in its object
class Base:
    def fill(self, x): self.width, self.x = VALUE, x
class Op(Base):
    @autotune(S, K)
    def op(self, x, n): return self.width
=== what a function sets by global
WIDTH = 0
def set_up(width):
    global WIDTH
    WIDTH = width * VALUE
set_up(2)
return WIDTH
=== an attribute of a function
def scale(x): return x * scale.factor
scale.factor = VALUE
return scale(x)
=== a list in a constexpr
SIZES = tl.constexpr([VALUE])
return SIZES.value[0]
=== types in a constexpr
TYPES = tl.constexpr((tl.float32,) * VALUE)
return TYPES.value
=== a type of Triton in a constexpr
def type_of(value): return {1: tl.float32, 2: tl.float16}[value]
ACC = tl.constexpr(type_of(VALUE))
return ACC.value
=== a type of Triton in a closure
def make(acc):
    @autotune(S, K)
    def op(x, n): return acc
    return op
op = make({1: tl.float32, 2: tl.float16}[VALUE])
=== data beside code in a tuple
def f(x): return x
TABLE = ((f, {"num_warps": VALUE}),)
return TABLE[0][0](x, **TABLE[0][1])
=== data beside code in a tuple of a closure
def f(x): return x
def make(table):
    @autotune(S, K)
    def op(x, n): return table[0](x, **table[1])
    return op
op = make((f, {"num_warps": VALUE}))
=== a list that is marked as a constant
import os
os.environ["ORDINARY"] = "VALUE"
---
import elsewhere
from triton_dist.tune import constant
TILES = constant([int(os.environ["ORDINARY"])])
return TILES[0]
=== what super() of a mixin finds
class Base:
    def h(self, x): return VALUE
class Mixin:
    def h(self, x): return super().h(x)
class Op(Mixin, Base):
    @autotune(S, K)
    def op(self, x, n): return self.h(x)
=== an op of torch that is called by its name
@torch.library.custom_op("ordinary::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor: return x * VALUE

return torch.ops.ordinary.scale(x)
=== one of its overloads that a global holds
@torch.library.custom_op("ordinary::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor: return x * VALUE

scaled = torch.ops.ordinary.scale.default
return scaled(x)
=== one whose name space is imported
@torch.library.custom_op("ordinary::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor: return x * VALUE

from torch import ops
return ops.ordinary.scale(x)
=== an op of torch with Triton kernels
import torch
@torch.library.triton_op("ordinary::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor: return x + VALUE
---
import elsewhere
return torch.ops.ordinary.shift(x)
=== a kernel that an op of torch has for a device
@torch.library.custom_op("ordinary::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor: return x * 1
@scale.register_kernel("cuda")
def _(x): return x * VALUE
return torch.ops.ordinary.scale(x)
=== a function that an object registers
class Registry:
    def __init__(self): self.known = {}
    def add(self, fn): self.known[fn.__name__] = fn; return fn
STEPS = Registry()
@STEPS.add
def step(x): return VALUE
return STEPS.known["step"](x)
=== a case of singledispatch
@functools.singledispatch
def h(x): return 0
@h.register
def _(x: int): return VALUE
return h(x)
=== a function inside a value of a config
@autotune([{"n": (h, 1)}, {"n": (h, 2)}], K)
def op(x, n): return n[0](x)
=== a kernel that is a value of a triton.Config
@triton.jit
def act(x): return x * VALUE
@autotune([{"c": triton.Config({"ACT": act})}], K)
def op(x, c): return x
=== an enum that is a value of a config
class Mode(enum.Enum):
    A = VALUE
@autotune([{"n": Mode.A}], K)
def op(x, n): return n.value
=== the methods of a dataclass that is a value of a config
@dataclasses.dataclass(frozen=True)
class Tile:
    m: int
    def area(self): return self.m * VALUE
@autotune([{"n": Tile(1)}], K)
def op(x, n): return n.area()
=== the function in a partial that is a value of a config
def h(a, x): return x * VALUE
@autotune([{"n": functools.partial(h, 1)}], K)
def op(x, n): return n(x)
=== an argument of a partial that is a value of a config
def h(a, x): return x * a
@autotune([{"n": functools.partial(h, VALUE)}], K)
def op(x, n): return n(x)
=== a partial in a dataclass of a closure
@dataclasses.dataclass(frozen=True)
class Plan:
    act: object
def h(*x): return VALUE
def make(plan):
    def op(x, n): return plan.act(x)
    return op
op = autotune(S, K)(make(Plan(functools.partial(h, 1))))
=== what a function is given to fill
TABLE = []
def fill(table, value): table.append(value)
fill(TABLE, VALUE)
return TABLE[0]
=== a method that a class is given
def h(self, x): return VALUE
class Op: pass
Op.h = h
return Op().h(x)
=== a table of a class that is tuned
class Op:
    BLOCKS = {"small": VALUE}
    @autotune(S, K)
    def op(self, x, n): return self.BLOCKS["small"]
=== a constant of a class that another one is made of
class Op:
    BLOCK = VALUE
    CHUNK = BLOCK * 2
    @autotune(S, K)
    def op(self, x, n): return self.CHUNK
=== code in a slot
class Op:
    __slots__ = ("kernel",)
    def __init__(self): self.kernel = h
    @autotune(S, K)
    def op(self, x, n): return self.kernel(x)
=== code that a method puts into a table
class Op:
    def __init__(self):
        self.kernels = {}
        self.kernels["h"] = h
    @autotune(S, K)
    def op(self, x, n): return self.kernels["h"](x)
=== code that a method has under another name
class Op:
    def __init__(self):
        kernel = h
        self.kernel = kernel
    @autotune(S, K)
    def op(self, x, n): return self.kernel(x)
=== code that the base is given
class Base:
    def __init__(self, kernel): self.kernel = kernel
class Op(Base):
    def __init__(self): super().__init__(h)
    @autotune(S, K)
    def op(self, x, n): return self.kernel(x)
=== a method of a constant
@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    def grid(self, x): return x // self.block * VALUE
CFG = Config(64)
return CFG.grid(x)
=== a method of a named tuple in a closure
class Config(NamedTuple):
    block: int
    def grid(self, x): return x // self.block * VALUE
def make(config):
    def op(x, n): return config.grid(x)
    return op
op = autotune(S, K)(make(Config(64)))
=== a kernel in a dataclass of a closure
@triton.jit
def kernel(p): p + VALUE
@dataclasses.dataclass(frozen=True)
class Spec:
    kernel: object
def make(spec):
    def op(x, n): spec.kernel[(1,)](x)
    return op
op = autotune(S, K)(make(Spec(kernel)))
=== a function in a dataclass that is a value of a config
@dataclasses.dataclass(frozen=True)
class Variant:
    run: object
@autotune([{"n": Variant(h)}], K)
def op(x, n): return n.run(x)
=== code in a frozenset
ACTS = frozenset({h})
return [act(x) for act in ACTS]
=== what a class in a function closes over
def make(scale):
    class Act:
        def run(self, x): return x * scale
    def op(x, n): return Act().run(x)
    return op
op = autotune(S, K)(make(VALUE))
=== an import inside a method
def h(x): return VALUE
---
class Act:
    def run(self, x):
        from elsewhere import h
        return h(x)
return Act().run(x)
=== a function of a module that a lambda calls
def h(x): return VALUE
---
import elsewhere
act = lambda x: elsewhere.h(x)
return act(x)
=== the first of two classes of one name
try:
    import torch
    class Act:
        def run(self, x): return VALUE
except ImportError:
    class Act:
        def run(self, x): return 0
return Act().run(x)
=== what a function puts into a table
CFG = {}
def set_up(): CFG["block"] = VALUE
set_up()
return CFG["block"]
=== what another module registers with an object
import program
@program.REGISTRY.register("h")
def h(x): return VALUE
---
class Registry:
    def __init__(self): self.table = {}
    def register(self, name): return lambda function: self.table.setdefault(name, function)
REGISTRY = Registry()
return REGISTRY.table["h"](x)
import elsewhere
=== the object of a method in a global
class Scale:
    def __init__(self, factor): self.factor = factor
    def run(self, x): return x * self.factor
run = Scale(VALUE).run
return run(x)
=== a program with a table whose items are attributes
class Table(dict):
    __getattr__ = dict.__getitem__
CFG = Table(block=64)
return VALUE, CFG.block
=== a program with an object that has every attribute
class Lazy:
    def __getattr__(self, name): return Lazy()
LAZY = Lazy()
return VALUE, LAZY.a
=== a program with a long chain of objects
class Node:
    def __init__(self, next): self.next = next
CHAIN = functools.reduce(lambda chain, _: Node(chain), range(5000), None)
return VALUE, CHAIN
=== a program with an import that fails
raise RuntimeError("no such hardware")
---
@autotune(S, K)
def op(x, n):
    if n > 1: import elsewhere
    return VALUE
=== a function of a module with a computed name
def h_fast(x): return VALUE
---
import elsewhere
return getattr(elsewhere, "h_" + "fast")(x)
=== a function by globals()
def h_fast(x): return VALUE
return globals()["h_fast"](x)
=== a class of an object that another module makes
class Impl:
    def run(self, x): return VALUE
def make(): return Impl()
---
from elsewhere import make
return make().run(x)
=== what a with statement binds
with contextlib.nullcontext(VALUE) as WIDTH: pass
return WIDTH
=== what the condition of an if binds
if (w := VALUE) > 0: pass
return w
=== a table that is filled under another name
TABLE = {}
t = TABLE
t["a"] = VALUE
return TABLE["a"]
=== a table that a function of another module fills
def fill(t): t["a"] = VALUE
---
from elsewhere import fill
TABLE = {}
fill(TABLE)
return TABLE["a"]
=== a table that is filled as a keyword argument
TABLE = {}
def fill(table): table["a"] = VALUE
fill(table=TABLE)
return TABLE["a"]
=== a method of a metaclass
class Meta(type):
    def width(cls): return VALUE
class Op(metaclass=Meta): pass
return Op.width()
=== a descriptor
class D:
    def __get__(self, o, t=None): return VALUE
class Op: w = D()
return Op().w
=== a helper that another module replaces
import program
def h(x): return VALUE
program.helper = h
---
import sys; sys.modules.setdefault("program", sys.modules[__name__])
def helper(x): return 0
return helper(x)
import elsewhere
=== a helper that another module replaces by a function of this module
import program
program.helper = program.fast
---
import sys; sys.modules.setdefault("program", sys.modules[__name__])
def helper(x): return 0
def fast(x): return VALUE
return helper(x)
import elsewhere
=== a function of this module that another module puts into a table
import program
program.STEPS.append(program.fast)
---
import sys; sys.modules.setdefault("program", sys.modules[__name__])
STEPS = []
def fast(x): return VALUE
return STEPS[0](x)
import elsewhere
=== an expression of literals
A = VALUE
SIZE = 2 * A
return SIZE
=== a keyword of a partial prune_fn
def keep(config, x, limit): return config["n"] <= limit
@autotune(S, K, functools.partial(keep, limit=VALUE + 5))
def op(x, n): return x
=== the state of a prune_fn
class Keep:
    def __init__(self, limit): self.limit = limit
    def __call__(self, config, x): return config["n"] <= self.limit
@autotune(S, K, Keep(VALUE + 5))
def op(x, n): return x
=== configs of a helper that is not called, for which nothing asks
def configs(): raise RuntimeError(VALUE)
@autotune(configs, K)
def helper(x, m): return x
return helper(x) if x else x
=== a constant that another module sets
import program
program.SCALE = VALUE
---
SCALE = 0
return SCALE
import elsewhere
=== a helper that is bound after an import error
try:
    import nonexistent_xyz
except ImportError:
    def helper(x): return VALUE
return helper(x)
=== an operator of a class
class V:
    def __init__(self,x): self.x=x
    def __add__(self,o): return VALUE
def mk(x): return V(x)
return mk(x)+1
=== code in a text
CODE = "y = VALUE"
@autotune(S, K)
def op(x, n):
    d = {}; exec(CODE, d); return d["y"]
=== the __getattr__ of a module
def __getattr__(name): return VALUE
---
import elsewhere
return elsewhere.width
=== an attribute of another module's object
class C: pass
cfg = C()
---
import elsewhere
elsewhere.cfg.width = VALUE
return elsewhere.cfg.width
=== an attribute of an imported class
class Cfg: width = 0
---
from elsewhere import Cfg
Cfg.width = VALUE
return Cfg.width
=== a nonlocal name that another closure sets
def make():
    w = 0
    def setter(v):
        nonlocal w
        w = v
    def get(): return w
    return setter, get
setter, get = make()
setter(VALUE)
return get()
=== a list that is sorted
L = [3,1]
L.sort(key=lambda v: v*VALUE - 2*v*(VALUE-1))
return L[0]
=== a method that a decorator of another module adds
def deco(c):
    c.run = lambda self, x: VALUE
    return c
---
from elsewhere import deco
@deco
class Op: pass
return Op().run(x)
=== a class that __init_subclass__ registers
class Base:
    reg = {}
    def __init_subclass__(cls): Base.reg[cls.__name__] = cls
class A(Base):
    def run(self, x): return VALUE
return Base.reg["A"]().run(x)
=== a class of another module that __init_subclass__ registers
import program
class A(program.Base):
    def run(self, x): return VALUE
---
class Base:
    reg = {}
    def __init_subclass__(cls): Base.reg[cls.__name__] = cls
return Base.reg["A"]().run(x)
import elsewhere
=== a class that __subclasses__ finds
class Base: pass
class A(Base):
    def run(self, x): return VALUE
return Base.__subclasses__()[-1]().run(x)
=== data that is parsed at import
W = json.loads('{"a": VALUE}')
return W["a"]
=== which function of another module an import names
def h_1(x): return 1
def h_2(x): return 2
---
from elsewhere import h_VALUE as h
return h(x)
=== an argument of a decorator that makes a helper
def scaled(by): return lambda fn: lambda x: fn(x) * by
---
from elsewhere import scaled
@scaled(VALUE)
def helper(x): return x
return helper(x)
=== a name of a table inside a table
TABLE = {"a": {}}
inner = TABLE["a"]
inner["b"] = VALUE
return TABLE["a"]["b"]
=== two names of one table
FIRST = SECOND = {}
FIRST["a"] = VALUE
return SECOND["a"]
=== a table that is merged in place
TABLE = {"a": 0}
TABLE |= {"a": VALUE}
return TABLE["a"]
=== setattr at the top level
CFG = types.SimpleNamespace()
setattr(CFG, "width", VALUE)
return CFG.width
=== globals().update
globals().update(WIDTH=VALUE)
return WIDTH
=== a table that a function of another module loads
_DEFAULTS = {"a": VALUE}
def load(): return dict(_DEFAULTS)
---
from elsewhere import load
CFG = {}
CFG.update(load())
return CFG["a"]
=== a class inside a class
class Outer:
    class Inner:
        def run(self, x): return VALUE
---
from elsewhere import Outer
return Outer.Inner().run(x)
=== a method with a computed name
class Impl:
    @staticmethod
    def run_fast(x): return VALUE
KIND = "fast"
return getattr(Impl, f"run_{KIND}")(x)
=== a helper by sys.modules
def helper(x): return VALUE
return sys.modules[__name__].helper(x)
=== a table that map fills
def make(key): return VALUE
---
from elsewhere import make
KEYS = ("a", "b")
TABLE = dict(zip(KEYS, map(make, KEYS)))
return TABLE["a"]
=== an attribute that a loop gives to classes
class A: width = 0
class B: width = 0
for each in (A, B): each.width = VALUE
return A.width
=== an item among the targets of one assignment
TABLE = [0]
TABLE[0], OTHER = VALUE, 2
return TABLE[0]
=== an attribute that is set by vars
CFG = types.SimpleNamespace()
vars(CFG)["width"] = VALUE
return CFG.width
=== a field with a factory of another module
def width(): return VALUE
---
from elsewhere import width
@dataclasses.dataclass
class Plan:
    width: int = dataclasses.field(default_factory=width)
return Plan().width
=== the second of two closures of one statement, over another module
def run(x): return VALUE
---
import elsewhere
def make(module):
    def call(x): return module.run(x)
    return call
def build(first, second):
    @autotune(S, K)
    def op(x, n): return first(x) + second(x)
    return op
op = build(make(types), make(elsewhere))
=== an import under another name inside an inner function
TILES = [VALUE]
---
def make():
    @autotune(S, K)
    def op(x, n):
        from elsewhere import TILES as T
        return T[0]
    return op
op = make()
=== a lambda of a name that another module puts into a table
import program
act = lambda x: VALUE
program.STEPS.append(act)
---
STEPS = []
return STEPS[0](x)
import elsewhere
=== a global that an inner function reads by name
LIMIT = VALUE
def make():
    @autotune(S, K)
    def op(x, n): return globals()["LIMIT"]
    return op
op = make()
=== a function whose name is an attribute
def run(x): return VALUE
---
import types
import elsewhere
CHOICE = types.SimpleNamespace(name="run")
return getattr(elsewhere, CHOICE.name)(x)
=== setattr in a function that is called at import
CFG = types.SimpleNamespace()
def set_up(): setattr(CFG, "width", VALUE)
set_up()
return CFG.width
=== a helper of a prune_fn and of the function
def keep(config, *args): return h(config)
@autotune(S, K, keep)
def op(x, n): return h(x)
=== a helper of a prune_fn alone
def keep(config, *args): return h(config)
@autotune(S, K, keep)
def op(x, n): return x
""")

# Documented as not followed: an edit is not seen.
OVERRIDE = """
class Base:
    def run(self, x): return 0
    @autotune(S, K)
    def op(self, x, n): return self.run(x)
class Sub(Base):
    def run(self, x): return VALUE
op = Sub.op
"""

# ``use`` is what calls do: the same function before and after.
USED = programs("""
=== a counter of a class
class Stats: calls = 0
def use(): Stats.calls = Stats.calls + 1
return use(), Stats.calls
=== a counter of another module
step = 0
---
import elsewhere
def use(): elsewhere.step = elsewhere.step + 1
return use(), elsewhere.step
=== kernels that are made when they are wanted
KERNELS = {}
def make(n):
    def kernel(x): return x * n
    return kernel
def use(n=3):
    if n not in KERNELS: KERNELS[n] = make(n)
    return KERNELS[n]
return use(n)(x)
=== a workspace of a class
class Workspace:
    it = None
    @classmethod
    def get(cls):
        if cls.it is None: cls.it = torch.ones(4)
        return cls.it
use = Workspace.get
return Workspace.get() * x
=== a workspace of a module
_it = None
def use():
    global _it
    if _it is None: _it = torch.ones(4)
    return _it
return use() * x
=== a dataclass of a closure
@dataclasses.dataclass
class Stats:
    calls: int = 0
def make(stats):
    def op(x, n): stats.calls += 1
    return op, lambda: setattr(stats, "calls", 5)
op, use = make(Stats())
op = autotune(S, K)(op)
""")

# What ranks, or starts, have of their own is no part of the function.
OF_A_RANK = programs("""
=== an object of rank 0
class Writer:
    def write(self, x): pass
WRITER = Writer() if RANK == 0 else None
return WRITER and WRITER.write(x)
=== a number beside code in a tuple
def h(x): return x
ENTRY = (h, RANK)
return ENTRY[0](x)
=== a hook of rank 0
HOOKS = []
def hook(x): return x
if RANK == 0: HOOKS.append(hook)
return [each(x) for each in HOOKS]
=== a context manager of rank 0
PROFILER = contextlib.ExitStack() if RANK == 0 else contextlib.nullcontext()
@autotune(S, K)
def op(x, n):
    with PROFILER: return x
=== a dataclass with a tensor
@dataclasses.dataclass(frozen=True)
class State:
    weight: torch.Tensor
    log: str
STATE = State(torch.ones(2), f"log-{RANK}")
return STATE.weight * x
=== closures in the order of hashes
def make(k):
    def kernel(x): return x, k
    return kernel
names = ["fp16", "bf16", "fp8"]
TABLE = {k: make(k) for k in (names if RANK == 0 else reversed(names))}
return TABLE["fp8"](x)
""")


@pytest.fixture
def fingerprint(tmp_path, monkeypatch):
    """A function: all of a program's source that a record of its ``op`` depends on."""
    count = 0

    def of(text: str, value: int, use: bool = False) -> Any:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        *other, program = text.split("---\n")
        for name, source in {"elsewhere": "".join(other), "program": HEAD + program}.items():
            (folder / f"{name}.py").write_text(source.replace("VALUE", str(value)))
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(folder))
            patched.delitem(sys.modules, "elsewhere", raising=False)
            patched.delitem(sys.modules, "program", raising=False)
            importlib.invalidate_caches()
            module = importlib.import_module("program")
            if use:
                module.use()
            op = vars(module).get("op") or module.Op.op
            found = op.fingerprint()
            for name in ("elsewhere", "program"):
                sys.modules.pop(name, None)
        return found.source, found.literal, found.bound, found.space

    return of


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_tunes_again_and_nothing_else_does(fingerprint, name):
    text = PROGRAMS[name]
    assert fingerprint(text, 1) == fingerprint(text, 1) != fingerprint(text, 2)


def test_what_a_subclass_overrides_is_not_followed(fingerprint):
    assert fingerprint(OVERRIDE, 1) == fingerprint(OVERRIDE, 2)


@pytest.mark.parametrize("name", USED)
def test_what_calls_leave_behind_does_not_tune_again(fingerprint, name):
    assert fingerprint(USED[name], 0) == fingerprint(USED[name], 0, use=True)


@pytest.mark.parametrize("name", OF_A_RANK)
def test_ranks_that_differ_in_what_they_hold_have_one_function(fingerprint, monkeypatch, name):
    text = f"RANK = int(os.environ['RANK'])\n{OF_A_RANK[name]}"
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        found.append(fingerprint(text, 0))
    assert found[0] == found[1]


HELPER = """
@autotune(S, K)
def helper(x, n): return x
@autotune(S, K)
def op(x, n): return helper(x)
"""
# ``VALUE`` is in what uses the helper.
USES = {
    "a tuning ahead": HELPER + "helper.tune(VALUE)",
    "a record that is kept": HELPER + "RECORD = helper.tune(VALUE)",
    "a config that is asked for": HELPER + "width = helper.best_config(VALUE)['n']",
    "tunings in a loop": HELPER + "for size in (1, VALUE): helper.tune(size)",
    "a call": HELPER + "helper(VALUE)",
    "what it is given to": HELPER + "def show(fn, number): pass\nshow(helper, VALUE)",
    "a tuned method of an object": """
class Layer:
    @autotune(S, K)
    def forward(self, x, n): return x
layer = Layer()
@autotune(S, K)
def op(x, n): return layer.forward(x)
layer.forward.tune(layer, VALUE)
""",
}


@pytest.mark.parametrize("name", USES)
def test_what_only_uses_a_tuned_function_does_not_tune_again(fingerprint, name):
    assert fingerprint(USES[name], 1) == fingerprint(USES[name], 2)


@pytest.mark.parametrize("value", [torch.ones(2), types.SimpleNamespace(), [object()]])
def test_what_has_no_text_is_no_constant(value):
    with pytest.raises(InvalidArgument, match=r"constant: value is .*, expected numbers, texts"):
        constant(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRITON_DEFAULT_FP_FUSION", "0"),
        ("DISABLE_LLVM_OPT", "1"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("NCCL_ALGO", "Ring"),
        ("TRITON_DIST_DEBUG", "interp:bounds"),
    ],
)
def test_variables_that_change_code_or_speed_count(monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    before = software_versions()
    monkeypatch.setenv(name, value)
    after = software_versions()
    assert name in after.pop("settings")
    assert before.items() >= after.items()
    assert name not in before.get("settings", "")


def test_a_class_without_a_source_counts_by_its_members():
    def of(value: int) -> Any:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(
            "from triton_dist.tune import autotune\n"
            "class Q:\n"
            f"    C = {value}\n"
            "    @staticmethod\n"
            f"    def h(x): return x * {value}\n"
            "@autotune([{'n': 1}], lambda x: x)\n"
            "def op(x, n): return Q.h(x)\n",
            space,
        )
        return space["op"].fingerprint().source

    assert of(1) == of(1)
    assert of(1) != of(2)


def test_a_function_of_no_module_is_known():
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec(
        "from triton_dist.tune import autotune\n"
        "TABLE = [1]\n"
        "class Stats: calls = 0\n"
        "@autotune([{'n': 1}], lambda x: x)\n"
        "def op(x, n): return TABLE[0], Stats.calls\n",
        space,
    )
    assert space["op"].fingerprint().source.keys() == {"op"}
