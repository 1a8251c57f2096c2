"""Modes of ``TRITON_DIST_DEBUG``: what is refused where, and what is set."""

from __future__ import annotations

import re

import pytest
import triton
from packaging.version import Version

from triton_dist import knobs
from triton_dist.debugging import modes
from triton_dist.debugging.faults import DebugModeRefused
from triton_dist.debugging.modes import GPU, INTERPRETER, NOTHING, Environment

# Of each mode, whether it works on a GPU: as compiling with each release showed, by whether the PTX
# is another (consan fails to compile; gsan sees no memory of ours).
WORKS = {
    "assert": "3.6 3.7 3.8 3.9",
    "consan": "3.6 3.9",
    "iisan": "3.7 3.8 3.9",
    "fpsan": "3.8 3.9",
    "gsan": "",
}


@pytest.mark.parametrize("release", ["3.6", "3.7", "3.8", "3.9"])
@pytest.mark.parametrize("mode", WORKS)
def test_a_mode_is_refused_by_the_releases_in_which_it_finds_nothing(mode, release):
    place = Environment(Version(f"{release}.1"), GPU)
    if release in WORKS[mode].split():
        assert modes.check([mode], place) == ()
        return
    with pytest.raises(DebugModeRefused, match=f"TRITON_DIST_DEBUG={mode} is refused") as refused:
        modes.check([mode], place)
    assert re.search("Use instead: (racecheck|TRITON_INTERPRET=1 .*interp)", str(refused.value))


@pytest.mark.parametrize(
    ("words", "runs", "said"),
    [
        (["interp"], GPU, "triton-dist debug interp -- COMMAND"),
        (["interp:bounds"], NOTHING, "TRITON_DIST_DEBUG=interp:bounds"),
        (["memcheck"], GPU, "triton-dist debug memcheck -- COMMAND"),
        (["memcheck"], INTERPRETER, "kernels are interpreted. Use instead: .*=interp:bounds"),
        (["assert"], NOTHING, "there is no GPU. Use instead: .*=interp$"),
        (["consan", "fpsan"], GPU, "combined with consan"),
        (["interp:luck"], INTERPRETER, "no such mode. Use instead: one of interp, interp:bounds"),
        (["interp", "fpsan"], INTERPRETER, "it requires compiled kernels"),
        (["luck"], GPU, "no such mode"),
        (["compile"], NOTHING, "would wait forever. Use instead: triton_dist.testing.compile_only"),
        (["attach"], GPU, "interpreted kernels only. Use instead: .*=interp:waits,attach"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(words, runs, said):
    with pytest.raises(DebugModeRefused, match=said):
        modes.check(words, Environment(Version("3.9.0"), runs))


def test_what_can_be_is_turned_on():
    here = Environment(Version("3.9.0"), INTERPRETER)
    assert modes.check(["interp"], here) == modes.CHECKS
    assert modes.check(["interp:waits", "interp:bounds", "assert"], here) == ("bounds", "waits")
    assert modes.check(["memcheck"], Environment(Version("3.6.0"), GPU, "memcheck")) == ()
    assert modes.check(["attach", "where"], here) == ()
    for runs in (GPU, NOTHING):
        assert modes.check(["where"], Environment(Version("3.6.0"), runs)) == ()
    assert modes.variables_to_set(["fpsan", "assert"]) == {
        "TRITON_INSTRUMENTATION_MODE": "fpsan",
        "TRITON_DEBUG": "1",
        "TRITON_DIST_AUTOTUNE": "0",
    }
    assert modes.variables_to_set(["interp"]) == {}


def test_triton_is_told_and_so_is_the_reader(monkeypatch, capfd):
    compilation = triton.knobs.compilation
    monkeypatch.setattr(compilation, "instrumentation_mode", "")
    monkeypatch.setattr(triton.knobs.runtime, "debug", False)
    monkeypatch.setattr(Environment, "current", lambda: Environment(Version("3.9.0"), GPU))
    for variable in modes.variables_to_set(["consan", "assert"]):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv(knobs.debug.variable, "consan,assert")
    assert modes.activate.__wrapped__() == ()
    assert (compilation.instrumentation_mode, triton.knobs.runtime.debug) == ("consan", True)
    assert capfd.readouterr().err == (
        "triton_dist: rank 0: debugging with consan, assert; TRITON_INSTRUMENTATION_MODE=consan "
        "TRITON_DEBUG=1 TRITON_DIST_AUTOTUNE=0; times are not meaningful\n"
    )


def test_nothing_is_done_where_nothing_is_asked_for(monkeypatch, capfd):
    monkeypatch.delenv(knobs.debug.variable, raising=False)
    modes.activate.cache_clear()
    assert modes.activate() == ()
    assert capfd.readouterr() == ("", "")
