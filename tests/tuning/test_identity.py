"""Which function a record is of, and which values count: what ordinary programs bind and read."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.tuning.test_ordinary_programs import programs
from triton_dist import knobs
from triton_dist._tuning.engine import agreement
from triton_dist.errors import InvalidArgument, TuningWarning
from triton_dist.tune import AutoTuner, autotune

HEAD = """
import enum, functools, os, time
from triton_dist import tune
from triton_dist.tune import autotune

def tuned(fn, **options):
    return autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x, scope="rank", **options)(fn)

"""


class Program:
    """A program that is started again and again; ``ops`` in it are called with the key 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, body: str, *, late: bool = False, **environment: str) -> list[int]:
        """How often each op tunes. ``late``: everything there is was found by an earlier start."""
        (self._folder / "program.py").write_text(HEAD + textwrap.dedent(body))
        sys.modules.pop("program", None)
        importlib.invalidate_caches()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            if late:
                later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
                patch.setattr(agreement, "_process_start", later)
                patch.setattr(agreement, "_used_digests", set())
            self.module = importlib.import_module("program")
            for op in self.module.ops:
                op(1)
        return [op.num_tunings for op in self.module.ops]

    def fingerprints(self) -> list[dict]:
        files = (knobs.cache_dir.get() / "autotune").glob("*/*.json")
        return [json.loads(file.read_text())["fingerprint"] for file in files]


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Program(tmp_path)
    sys.modules.pop("program", None)


SEVERAL = programs("""
=== functions of a factory
def make(scale):
    def op(x, n): return x * scale
    return tuned(op)
ops = [make(2.0), make(3.0), make(4.0)]
=== a factory that binds a function
def make(inner):
    def op(x, n): return inner(x)
    return tuned(op)
def add(k): return lambda x: x + k
ops = [make(add(1)), make(add(2)), make(abs)]
=== a factory with options in a dict
def make(options):
    def op(x, n): return options["scale"] * x
    return tuned(op)
ops = [make({"scale": 2}), make({"scale": 3})]
=== a factory with a default
def make(scale):
    def op(x, n, s=scale): return x * s
    return tuned(op)
ops = [make(2), make(3)]
=== two definitions of one name
def make(fast):
    if fast:
        def op(x, n): return x
    else:
        def op(x, n): return x * x
    return tuned(op)
ops = [make(True), make(False)]
=== lambdas
ops = [tuned(lambda x, n: x + 1), tuned(lambda x, n: x + 2)]
=== partials
def impl(size, x, n): return x + size
ops = [tuned(functools.partial(impl, 64)), tuned(functools.partial(impl, 128))]
=== callable objects
class Scale:
    def __init__(self, factor): self.factor = factor
    def __call__(self, x, n): return x * self.factor
ops = [tuned(Scale(2)), tuned(Scale(3))]
=== bound methods
class Scale:
    def __init__(self, factor): self.factor = factor
    def run(self, x, n): return x * self.factor
ops = [tuned(Scale(2).run), tuned(Scale(3).run)]
""")


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_functions_of_one_name_keep_a_record_each(program, kind):
    first = program.start(SEVERAL[kind])
    assert first == [1] * len(first)
    for _ in range(2):
        assert program.start(SEVERAL[kind]) == [0] * len(first)


def test_a_literal_that_the_environment_chooses_counts_and_so_does_a_marked_value(program):
    body = """
        SIZE = 64
        if os.environ.get("BIG"): SIZE = 128
        MODE = tune.constant(os.environ.get("MODE", ""))
        def op(x, n): return SIZE, MODE
        ops = [tuned(op)]
    """
    assert program.start(body) == [1]
    assert program.start(body, BIG="1") == [1]
    assert program.start(body, MODE="a") == [1]


COMPUTED = {
    "a rank": "RANK = int(os.environ['RANK'])",
    "a time": "RANK = time.time()",
    "a choice by a time": "RANK = 1 if time.time() > 0 else 2.5",
    "what main sets": "RANK = -1\ndef main():\n    global RANK\n    RANK = time.time()\nmain()",
    "a handle": "import threading\nRANK = threading.Lock()",
    "a device index": "import torch\nRANK = torch.device('cuda', int(os.environ['RANK']))",
    "a class attribute": "class Job:\n    RANK = int(os.environ['RANK'])\nRANK = Job.RANK",
    "a loop's": "for RANK in (float(os.environ['RANK']), time.time()): pass",
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_global_that_is_computed_does_not_count_and_is_listed(program, kind):
    body = COMPUTED[kind] + "\ndef helper(): return RANK\ndef op(x, n): return helper()\n"
    body += "ops = [tuned(op)]"
    assert program.start(body, RANK="0") == [1]
    assert program.start(body, RANK="1") == [0]
    (fingerprint,) = program.fingerprints()
    if kind not in ("a handle", "a device index"):
        assert fingerprint["uncounted"]["RANK"] == "it is computed when the program runs"


PLACES = {
    "a path": "from pathlib import Path\nROOT = Path(__file__).parent\n",
    "a text": "ROOT = __file__\n",
    "in the function": "def root(): return __file__\nROOT = root\n",
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_copy_of_a_program_elsewhere_uses_the_same_records(program, kind, tmp_path, monkeypatch):
    body = PLACES[kind] + "def op(x, n): return ROOT\nops = [tuned(op)]"
    assert program.start(body) == [1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.syspath_prepend(str(elsewhere))
    assert Program(elsewhere).start(body) == [0]


CHANGING = """
def make(begin):
    def op(x, n): return begin
    return op
ops = [tuned(make(time.time()){})]
"""


def test_what_is_bound_anew_at_each_start_is_said_once_and_can_be_ignored(program):
    assert program.start(CHANGING.format("")) == [1]
    with pytest.warns(TuningWarning, match=r"tuned again, because of constant: op\.begin was 1"):
        assert program.start(CHANGING.format(""), late=True) == [1]
    ignoring = CHANGING.format(", ignore=('begin',)")
    program.start(ignoring, late=True)
    assert program.start(ignoring, late=True) == [0]
    assert {"op.begin": "ignored"} in [each.get("uncounted") for each in program.fingerprints()]


def test_what_a_function_changes_itself_is_no_part_of_it(program):
    body = """
        class Keep:
            def __init__(self): self.asked = 0
            def __call__(self, config, x):
                self.asked += 1
                return True
        def make():
            seen, count = [], 0
            def op(x, n):
                nonlocal count
                count += 1
                seen.append(x)
                return x
            return tuned(op, prune_fn=Keep())
        ops = [make()]
        ops[0](2)
    """
    assert program.start(body) == [2]
    reordered = body.replace("ops[0](2)", "ops[0](1); ops[0](2)")
    assert program.start(reordered) == [0]


def test_a_function_of_an_earlier_start_is_no_reason_to_warn(program):
    """A factory that makes one more function, once the others were found."""
    body = SEVERAL["functions of a factory"]
    program.start(body)
    counts = program.start(body.replace("make(4.0)]", "make(4.0), make(5.0)]"), late=True)
    assert counts == [0, 0, 0, 1]


def impl(size, x, n):
    """Adds."""
    return x + size


class Ops:
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x)
    @staticmethod
    def inner_static(x, n):
        return x, n

    @staticmethod
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x)
    def outer_static(x, n):
        return x, n

    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda cls, x: x)
    @classmethod
    def inner_class(cls, x, n):
        return cls, x

    @classmethod
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda cls, x: x)
    def outer_class(cls, x, n):
        return cls, x


tuned_partial = autotune([{"n": 1}], key_fn=lambda x: x)(functools.partial(impl, 64))


def test_a_tuned_partial_is_a_function_to_its_users():
    assert (tuned_partial.__name__, tuned_partial.__doc__) == ("impl", "Adds.")
    assert pickle.loads(pickle.dumps(tuned_partial)) is tuned_partial
    assert functools.wraps(tuned_partial)(lambda x: x).__name__ == "impl"
    with pytest.raises(pickle.PicklingError, match="not a global of any module"):
        pickle.dumps(autotune([{"n": 1}], key_fn=lambda x: x)(functools.partial(impl, 1)))
    assert tuned_partial(1) == 65


@pytest.mark.parametrize("holder", [Ops, Ops()])
def test_static_and_class_methods_work_in_both_orders(holder):
    assert holder.inner_static(3)[0] == holder.outer_static(3)[0] == 3
    assert holder.inner_class(3) == holder.outer_class(3) == (Ops, 3)
    assert isinstance(Ops.inner_static, AutoTuner)


async def coroutine(x, n): ...


async def async_generator(x, n):
    yield x


def generator(x, n):
    yield x


class Generator:
    def __call__(self, x, n):
        yield x


def takes_the_tuners_name(x, n, autotune=True): ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (coroutine, "not a coroutine function"),
        (async_generator, "not a coroutine function"),
        (generator, "not a generator function"),
        (functools.partial(generator, 1), "not a generator function"),
        (Generator(), "not a generator function"),
        (takes_the_tuners_name, "parameter names other than autotune"),
        (5, "expected a function"),
        (Ops, "expected a function"),
    ],
)
def test_what_cannot_be_tuned_is_refused_where_it_is_decorated(function, said):
    with pytest.raises(InvalidArgument, match=said):
        autotune([{"n": 1}], key_fn=lambda x: x)(function)


def test_a_triton_kernel_and_no_space_are_refused_with_what_to_do():
    import triton

    with pytest.raises(InvalidArgument, match="a function that launches the kernel"):
        autotune([{"n": 1}], key_fn=lambda x: x)(triton.jit(impl))
    with pytest.raises(InvalidArgument, match="config_space"):
        autotune(None, key_fn=lambda x: x)
    with pytest.raises(InvalidArgument, match="a parameter of the function: size, x, n"):
        autotune([{"n": 1}], key_fn=lambda x: x, restore="y")(impl)


def fake(values):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return values(torch.ones(4, 4))


def meta(values):
    return values(torch.ones(4, 4, device="meta"))


def exported(values):
    class Module(torch.nn.Module):
        def forward(self, x):
            return values(x)

    return torch.export.export(Module(), (torch.ones(4, 4),), strict=False)


def made_fx(values):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: values(x))(torch.ones(4, 4))


def traced(values):
    return torch.jit.trace(values, (torch.ones(4, 4),), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("tracer", [fake, meta, exported, made_fx, traced])
def test_a_call_that_computes_nothing_gets_the_default_and_keeps_nothing(tracer, tmp_path):
    called = []

    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: tuple(x.shape))
    def op(x, n):
        called.append(n)
        return x * n

    with pytest.warns(TuningWarning, match="impossible while it is traced"):
        tracer(op)
    assert (op.num_tunings, set(called)) == (0, {1})
    assert not list(tmp_path.rglob("*.json"))
    op(torch.ones(4, 4))
    assert op.num_tunings == 1


def test_a_whole_run_can_go_without_tuning(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "0")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_FROZEN", "1")
    op = autotune([{"n": 1}, {"n": 2}], key_fn=lambda x: x)(lambda x, n: n)
    assert (op(7), dict(op.best_config(7)), op.num_tunings) == (1, {"n": 1}, 0)
    with pytest.warns(TuningWarning, match="overwrites"):
        assert not op.best_config(7, n=3, autotune_allow_arg_overwrite=True)
    monkeypatch.delenv("TRITON_DIST_AUTOTUNE_FROZEN")
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE", "1")
    op(7)
    assert op.num_tunings == 1


def test_arguments_that_the_function_changes_are_restored():
    seen = []

    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x, state: 1, restore=("x", "state"))
    def op(x, state, n):
        seen.append((float(x[0]), float(state["sum"])))
        x += 1
        state["sum"] += x.sum()
        return x

    x, state = torch.zeros(2), {"sum": torch.zeros(())}
    result = op(x, state)
    assert set(seen) == {(0.0, 0.0)}
    assert len(seen) > 4
    assert result is x
    assert (x.tolist(), float(state["sum"])) == ([1.0, 1.0], 2.0)
    with pytest.raises(InvalidArgument, match="restore: argument x"):
        autotune([{"n": 1}], key_fn=lambda x: x, restore="x")(lambda x, n: x)(3)


STATES = {
    "plain": lambda: torch.zeros(3),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "expanded": lambda: torch.zeros(1).expand(5),
    "expanded matrix": lambda: torch.zeros(2, 1, 2).expand(2, 3, 2),
    "windows": lambda: torch.zeros(6).unfold(0, 3, 1),
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "inference": torch.inference_mode()(lambda: torch.zeros(3)),
    "empty": lambda: torch.zeros(0),
}


def bump(state):
    """Add one to the first element, and to those that share its memory."""
    with torch.inference_mode(state.is_inference()), torch.no_grad():
        if state.is_sparse:
            state.add_(torch.ones(3).to_sparse())
        elif state.numel():
            state.view(-1)[:1].add_(1) if state.is_contiguous() else state[
                (slice(1),) * state.ndim
            ].add_(1)


@pytest.mark.parametrize("name", STATES)
def test_tensors_of_any_kind_are_restored(name):
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda **_: 1, restore=("state",))
    def op(n, **given):
        bump(given["state"])

    state, expected = STATES[name](), STATES[name]()
    bump(expected)
    with torch.inference_mode(name == "inference"):
        op(state=state)
    assert torch.equal(state.to_dense(), expected.to_dense())


def test_a_restored_tensor_may_be_saved_for_backward():
    writes = []

    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda state: 1, restore=("state",))
    def op(state, n):
        """As a Triton kernel would: PyTorch does not see it."""
        writes.append(state.tolist())
        state.data.add_(1)

    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    op(weight)
    assert writes.count([1.0] * 3) == len(writes) > 2
    weight.data.sub_(1)
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 3


def test_a_change_in_place_without_restore_is_named_once():
    @autotune([{"n": 1}, {"n": 2}], key_fn=lambda x, *_: len(x))
    def op(x, states, out, other=None, n=1):
        states["count"].add_(1)
        out[0].copy_(x)
        other.data.add_(1)  # not counted
        return x

    def call(size, **options):
        given = torch.ones(size), {"count": torch.zeros(1)}, [torch.zeros(size)], torch.zeros(1)
        return op(*given, **options)

    with pytest.warns(
        TuningWarning, match=r"op: trials changed 'states', 'out' in place"
    ) as caught:
        call(2)
    assert "restore=('states', 'out',)" in str(caught[0].message)
    assert caught[0].filename == __file__
    for size in (2, 3, 4):
        call(size)
    op.clear()
    call(2)
