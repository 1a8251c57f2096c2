"""Kernels from ttir, ttgir, llir, ptx and cubin: compiled alike, and launched only where they fit.

``make versions`` runs it with every Triton that is supported.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.compile.runner_kernels import (
    add_one,
    choose,
    copy_rows,
    copy_tile,
    gluon_copy,
    product,
    renamed,
    scale,
    twice,
    watched,
)  # fmt: skip
from triton_dist import runner, tune
from triton_dist.cli.main import main
from triton_dist.errors import (
    ArtefactRefused,
    ArtefactWarning,
    InvalidArgument,
    InvalidArtefact,
    KernelNotShipped,
    NoValidConfig,
)
from triton_dist.knobs import InvalidKnob
from triton_dist.runner import foreign, scripts, sections, toolchains
from triton_dist.runner.files import dump
from triton_dist.runner.specialisation import Specialisation
from triton_dist.runtime.compiling import facts
from triton_dist.testing.compile_only import compile_only

DATA = Path(__file__).parent / "data" / "triton-3.9.0"
MEMORY = torch.zeros(1 << 12, dtype=torch.float16)
ODD = MEMORY[1:]  # its address is divisible by 2 alone
SPECIAL = {
    "x_ptr": MEMORY, "y_ptr": MEMORY, "n": 1024, "stride": 1, "alpha": 0.5, "pair": (MEMORY, 16),
    "BLOCK": 64, "DTYPE": tl.float16,
}  # fmt: skip
GENERAL = SPECIAL | {"x_ptr": ODD, "n": 2**40 + 1, "stride": 3, "pair": (ODD, 7)}
PRODUCT = (MEMORY, MEMORY, MEMORY, 64, 64, 64, 1)
TILE = {"BM": 32, "BK": 32}


@pytest.fixture(autouse=True)
def _sm90(sm90):
    """No test here launches elsewhere."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder of each kernel, at all levels: ``special``, ``general``, ``product``, ``gluon``."""
    folder = tmp_path_factory.mktemp("artefacts")
    with compile_only(90):
        runner.export(scale[(1,)](**SPECIAL, num_warps=2), folder / "special")
        runner.export(scale[(1,)](**GENERAL), folder / "general")
        kernel = product[(1,)](*PRODUCT, **TILE, num_warps=8, num_stages=4)
        runner.export(kernel, folder / "product")
        runner.export(gluon_copy[(1,)](MEMORY, MEMORY, 64, 64, num_warps=2), folder / "gluon")
    return folder


@pytest.mark.parametrize("level", runner.LEVELS)
def test_every_level_gives_the_same_cubin(level, exported, sm90):
    folder = exported / "product"
    kernel = product[lambda given: (given["BM"], 2)](*PRODUCT, **{f"{level}_dir": folder})
    assert kernel.asm["cubin"] == (folder / "product.cubin").read_bytes()
    assert set(kernel.asm) == set(runner.LEVELS[runner.LEVELS.index(level) :])
    plain = product[(1,)](*PRODUCT, **TILE, num_warps=8, num_stages=4).metadata
    assert kernel.metadata.num_warps == 8
    for fact in ("shared", "name", "num_stages", "global_scratch_size", "launch_cooperative_grid"):
        assert getattr(kernel.metadata, fact) == getattr(plain, fact), fact
    assert sm90.launches[0].grid == (32, 2, 1)
    assert sm90.launches[0].args[-2:] == (32, 32)


@pytest.mark.parametrize("level", runner.LEVELS[1:])
def test_every_level_of_gluon(level, exported):
    folder = exported / "gluon"
    kernel = gluon_copy[(1,)](MEMORY, MEMORY, 64, **{f"{level}_dir": folder})
    assert kernel.asm["cubin"] == (folder / "gluon_copy.cubin").read_bytes()
    assert kernel.metadata.num_warps == 2


WRONG = {
    "it requires x_ptr at an address divisible by 16": {"x_ptr": ODD},
    "it requires y_ptr at an address divisible by 16": {"y_ptr": ODD},
    "it requires n to be divisible by 16": {"n": 1023},
    "it requires n to be divisible by 16, the call's": {"n": 1},
    "it takes n as i32, the call has i64": {"n": 2**40},
    "it takes n as i32, the call has fp32": {"n": 1024.0},
    "it takes n as i32, the call has u1": {"n": True},
    "it has stride = 1, the call has another value of type i32": {"stride": 2},
    "it has stride = 1, the call has None": {"stride": None},
    "it takes x_ptr as *fp16, the call has *fp32": {"x_ptr": torch.zeros(64)},
    "it takes x_ptr as *fp16, the call has *bf16": {"x_ptr": MEMORY.bfloat16()},
    "it takes y_ptr as *fp16, the call has *i32": {"y_ptr": MEMORY.int()},
    "it takes y_ptr as *fp16, the call has the constant None": {"y_ptr": None},
    "it takes alpha as fp32, the call has the constant 1": {"alpha": 1},
    "it takes alpha as fp32, the call has i32": {"alpha": 2},
    "it has BLOCK = 64, the call has 128": {"BLOCK": 128},
    "it has BLOCK = 64, the call has '64'": {"BLOCK": "64"},
    "it has DTYPE = fp16, the call has fp32": {"DTYPE": tl.float32},
    "it requires pair[0] at an address divisible by 16": {"pair": (ODD, 16)},
    "it requires pair[1] to be divisible by 16": {"pair": (MEMORY, 17)},
    "it takes pair[0] as *fp16, the call has *fp32": {"pair": (torch.zeros(64), 16)},
    "it takes pair[2] as nothing, the call has i32": {"pair": (MEMORY, 16, 16)},
    "BLOCK = 64, the call has 32; it has DTYPE = fp16": {"BLOCK": 32, "DTYPE": tl.float32},
}


@pytest.mark.parametrize("why", WRONG)
def test_a_launch_that_does_not_fit_is_refused(why, exported, sm90):
    with pytest.raises(ArtefactRefused) as refused:
        scale[(1,)](**{**SPECIAL, **WRONG[why]}, cubin_dir=exported / "special")
    assert why in str(refused.value)
    assert str(exported / "special" / "scale.cubin") in str(refused.value)
    assert sm90.launches == []


GENERAL_SERVES = [
    {}, {"x_ptr": MEMORY}, {"y_ptr": MEMORY[8:]}, {"n": 1024}, {"n": 7}, {"n": 1}, {"n": 0},
    {"n": -5}, {"n": 2**40}, {"n": -(2**62)}, {"stride": 1}, {"stride": 2}, {"stride": 16},
    {"stride": 0}, {"stride": -1}, {"alpha": 0.25}, {"alpha": 0.0}, {"pair": (MEMORY, 7)},
    {"pair": (ODD, 16)}, {"pair": (MEMORY, 1)}, SPECIAL,
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(GENERAL_SERVES)))
def test_a_more_general_artefact_serves(case, exported, sm90):
    """With the launcher of its own arguments: what the call would make a constant is passed."""
    call = {**GENERAL, **GENERAL_SERVES[case]}
    kernel = scale[(1,)](**call, cubin_dir=exported / "general")
    assert kernel.asm["cubin"] == (exported / "general" / "scale.cubin").read_bytes()
    assert (kernel.src.signature["n"], kernel.src.signature["stride"]) == ("i64", "i32")
    assert len(sm90.launches) == 1


def test_another_architecture_is_refused_below_ttir(exported):
    with compile_only(80):
        with pytest.raises(ArtefactRefused, match="it is for sm_90, the device is sm_80"):
            scale[(1,)](**SPECIAL, cubin_dir=exported / "special")
        kernel = scale[(1,)](**SPECIAL, ttir_dir=exported / "special")
        assert ".target sm_80" in kernel.asm["ptx"]


def test_descriptors_of_the_host(tmp_path):
    """Each is several parameters of the kernel; what launchers make of it is in the sidecar."""
    matrix = torch.empty(256, 256, dtype=torch.float16)
    wide, narrow = (TensorDescriptor.from_tensor(matrix, [64, n]) for n in (64, 32))
    plain = copy_tile[(1,)](wide, wide)
    runner.export(plain, tmp_path)
    for level in ("ttir", "llir", "cubin"):
        kernel = copy_tile[(1,)](wide, wide, **{f"{level}_dir": tmp_path})
        assert kernel.asm["cubin"] == plain.asm["cubin"]
        assert kernel.metadata.tensordesc_meta == plain.metadata.tensordesc_meta
    with pytest.raises(ArtefactRefused, match=r"takes target as tensordesc<fp16\[64, 64\]>, the"):
        copy_tile[(1,)](wide, narrow, cubin_dir=tmp_path)
    with pytest.warns(ArtefactWarning):
        kernel = copy_tile[(1,)](wide, wide, ttgir_src=plain.asm["ttgir"])
    assert kernel.asm["cubin"] == plain.asm["cubin"]


def test_what_a_launch_leaves_out_is_the_artefacts(exported, sm90):
    most = {name: value for name, value in SPECIAL.items() if name not in ("BLOCK", "DTYPE")}
    artefact = runner.load(exported / "special", "scale")
    kernel = scale[lambda given: (given["BLOCK"],)](**most, artefact=artefact, num_warps=16)
    assert kernel.metadata.num_warps == 2
    assert sm90.launches[-1].grid == (64, 1, 1)
    one = scale[(1,)](*most.values(), cubin_dir=str(exported / "special"))
    assert scale[(1,)](*most.values(), autotune_cubin_dir=exported / "special") is one


def test_a_launch_without_an_artefact_is_tritons(exported):
    plain = triton.jit(scale.fn)[(1,)](**SPECIAL)
    assert scale[(1,)](**SPECIAL).asm["cubin"] == plain.asm["cubin"]
    assert scale[(1,)](**SPECIAL, cubin_dir=exported / "special") is not plain


BAD_KEYWORDS = [
    ({"cubin_dir": "a", "ptx_dir": "b"}, r"\['cubin_dir', 'ptx_dir'\], expected one artefact"),
    ({"amdgcn_dir": "a"}, "expected NVIDIA GPUs"),
    ({"start_pass": "a"}, "expected a whole level"),
    ({"dump_value": "%1"}, "runner.language.dump in the kernel's source"),
    (
        {"dump_tensor": MEMORY, "ttir_dir": "a"},
        r"\['dump_tensor', 'ttir_dir'\], .* IR is not edited",
    ),
    ({"artefact": "a"}, "artefact is 'a', expected an artefact"),
    ({"cubin_dir": 3}, "cubin_dir is 3, expected the path of a folder"),
    ({"ptx_src": 3}, "ptx_src is 3, expected the text of a kernel in ptx"),
    ({"cubin_dir": "a", "metadata_json": {}}, "metadata_json is {}"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD_KEYWORDS)
def test_bad_keywords(keywords, message, sm90):
    with pytest.raises(InvalidArgument, match=message):
        scale[(1,)](**SPECIAL, **keywords)
    assert sm90.launches == []


def side(**changes):
    """A change of members of the sidecar; a dict changes members of that member."""

    def change(data):
        tree = json.loads(data)
        for name, value in changes.items():
            tree[name] = tree[name] | value if value and isinstance(value, dict) else value
        return json.dumps(tree).encode()

    return change


# The level to launch from, the damaged file, the damage (None deletes it), and what is said.
DAMAGES = {
    "no file": ("cubin", "cubin", None, "No such file or .*; .* contains scale.json, scale"),
    "no sidecar": ("cubin", "json", None, r"scale\.json: No such file"),
    "half a sidecar": ("cubin", "json", lambda d: d[:100], r"scale\.json: it cannot be read"),
    "of a later version": (
        "cubin", "json", side(triton_dist_artefact=99), "a later version of triton_dist wrote it",
    ),
    "sidecar of others": ("cubin", "json", lambda d: b"[]", "scale.json"),
    "of another kernel": (
        "cubin", "json", side(function="other"), "it describes kernel 'other', not 'scale'",
    ),
    "a name that is no text": (
        "cubin", "json", side(function="\ud800"), r"it describes kernel '.ud800', not",
    ),
    "no launch": ("cubin", "json", side(launch={}), "its json has no size of shared memory"),
    "text for a number": ("cubin", "json", side(launch={"shared": "x"}), "it has shared 'x'"),
    "no power of two": ("cubin", "json", side(options={"num_warps": 3}), "num_warps is 3, not a"),
    "descriptors of nothing": (
        "cubin", "json", side(launch={"tensordesc_meta": 1}), "it has tensordesc_meta 1",
    ),
    "no UTF-8": (
        "ttir", "ttir", lambda d: d.decode().encode("utf-16"),
        r"scale\.ttir: the text is not a kernel in TTIR",
    ),
    "no cubin": ("cubin", "cubin", lambda d: b"PK" * 99, "the file is not a cubin, or it is"),
    "half a cubin": ("cubin", "cubin", lambda d: d[:-50], "the file is not a cubin, or it is"),
    "no entry": (
        "ptx", "ptx", lambda d: d.replace(b".entry scale", b".entry other"),
        "it has no kernel scale; it contains other",
    ),
    "wrong ptx": (
        "ptx", "ptx", lambda d: d.replace(b"ret;", b"return;"),
        r"Triton 3\.\d+\.\d+ cannot compile it: PTXASError",
    ),
    "wrong llir": (
        "llir", "llir", lambda d: d.replace(b"ret void", b"ret"),
        r"Triton 3\.\d+\.\d+ cannot compile it",
    ),
    "wrong ttir": (
        "ttir", "ttir", lambda d: b"module {", r"Triton 3\.\d+\.\d+ cannot compile it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_missing_or_damaged_is_told(name, exported, tmp_path, sm90):
    folder = shutil.copytree(exported / "special", tmp_path / "damaged")
    level, suffix, change, message = DAMAGES[name]
    path = folder / f"scale.{suffix}"
    if name == "no UTF-8":  # else it is compiled as the sidecar says
        (folder / "scale.json").unlink()
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidArtefact, match=message):
        scale[(1,)](**SPECIAL, **{f"{level}_dir": folder})
    assert sm90.launches == []


def test_compiling_forbidden_an_artefact_runs_from_its_cubin_alone(exported, sm90, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_COMPILE_FROZEN", "1")
    fresh = runner.jit(triton.jit(scale.fn))
    for level in runner.LEVELS[:-1]:
        with pytest.raises(
            KernelNotShipped,
            match=rf"compiled from {level}, .*scale\.{level}\. .*Ship it: its cubin",
        ) as caught:
            fresh[(1,)](**SPECIAL, **{f"{level}_dir": exported / "special"})
    assert sm90.launches == []
    assert caught.value.specialisation["x_ptr"] == "*fp16, divisibility 16"
    assert caught.value.specialisation["pair"] == "(*fp16, divisibility 16, i32, divisibility 16)"
    assert caught.value.specialisation["DTYPE"] == "fp16"
    fresh[(1,)](**SPECIAL, cubin_dir=exported / "special")
    assert len(sm90.launches) == 1


def test_ir_of_another_triton_says_who_wrote_it(exported, capfd):
    text = (exported / "special" / "scale.ttgir").read_text()
    old = text.replace("ttg.", "triton_gpu.")  # as of 3.2; its target cannot be read either
    with (
        pytest.warns(ArtefactWarning),
        pytest.raises(InvalidArtefact, match="unknown version wrote it, and IR differs"),
    ):
        scale[(1,)](**SPECIAL, ttgir_src=old)
    capfd.readouterr()


def test_a_kernel_of_other_arguments(exported, tmp_path):
    folder = shutil.copytree(exported / "special", tmp_path / "renamed")
    side = json.loads((folder / "scale.json").read_text()) | {"function": "renamed"}
    (folder / "renamed.json").write_text(json.dumps(side))
    shutil.copy(folder / "scale.cubin", folder / "renamed.cubin")
    call = {"source_ptr" if name == "x_ptr" else name: value for name, value in SPECIAL.items()}
    with pytest.raises(ArtefactRefused, match=r"its arguments are \(x_ptr, .* \(source_ptr, "):
        renamed[(1,)](**call, cubin_dir=folder)


def test_a_body_of_pass_runs_from_its_ir(exported):
    text = (exported / "special" / "scale.ttgir").read_text()
    call = {"source_ptr" if name == "x_ptr" else name: value for name, value in SPECIAL.items()}
    with pytest.warns(
        ArtefactWarning, match="constants of its arguments cannot be checked"
    ) as seen:
        kernel = renamed[(1,)](**call, ttgir_src=text)
    assert seen[0].filename == __file__
    assert kernel.metadata.num_warps == 2
    assert kernel.asm["cubin"] == (exported / "special" / "scale.cubin").read_bytes()
    with pytest.warns(ArtefactWarning), pytest.raises(ArtefactRefused, match="divisible by 16"):
        renamed[(1,)](**call | {"source_ptr": ODD}, ttgir_src=text)
    with pytest.raises(ArtefactRefused, match="takes 6 arguments at run time, the call has 7"):
        renamed[(1,)](**call | {"stride": 2}, ttgir_src=text)


def test_types_that_an_ir_does_not_tell_apart():
    head = b"  tt.func public @f(%a: !tt.ptr<i8>, %b: i1, %c: !tt.ptr<f16>, %d: i64) attributes {}"
    types = {"a": "*u8", "b": "u1", "c": "*kfp16", "d": "i32"}
    artefact = runner.Artefact("ttir", head, foreign.metadata_from_ir("f", "tt.func", ""))
    with pytest.warns(ArtefactWarning):
        found = foreign.with_specialisation(artefact, Specialisation(types, {}, {}))
    assert found.metadata.specialisation.types == types | {"d": "i64"}


@pytest.mark.parametrize("level", ["llir", "ptx"])
def test_a_text_with_metadata(level, exported):
    kernel = scale[(1,)](**SPECIAL, num_warps=2)
    keywords = {f"{level}_src": kernel.asm[level]}
    with pytest.raises(InvalidArtefact, match="pass metadata_json"):
        scale[(1,)](**SPECIAL, **keywords)
    with pytest.raises(InvalidArtefact, match="metadata cannot be read: FileNotFoundError"):
        scale[(1,)](**SPECIAL, **keywords, metadata_json="none.json")
    with pytest.raises(ArtefactRefused, match="BLOCK = 64, the call has 32"):
        scale[(1,)](**SPECIAL | {"BLOCK": 32}, **keywords, metadata_json=kernel)
    checked = scale[(1,)](**SPECIAL, **keywords, metadata_json=exported / "special/scale.json")
    with pytest.warns(ArtefactWarning, match="neither types"):
        unchecked = scale[(1,)](**SPECIAL, **keywords, metadata_json=kernel.metadata)
    assert checked.asm["cubin"] == unchecked.asm["cubin"] == kernel.asm["cubin"]


def test_folders_of_other_tools(exported, tmp_path):
    """Triton's cache tells what a launch needs; triton-runner also what the kernel was made for."""
    kernel = scale[(1,)](**SPECIAL, num_warps=2)
    tree = json.loads(json.dumps(kernel.metadata._asdict(), default=vars))
    for later in ("profile_scratch_size", "profile_scratch_align", "global_scratch_align"):
        del tree[later]  # as of Triton 3.3
    signature = (
        ("x_ptr", "*fp16", "D", False), ("y_ptr", "*fp16", "D", False), ("n", "i32", "D", False),
        ("stride", "constexpr", 1, False), ("alpha", "fp32", "", False),
        ("pair", ("*fp16", "i32"), "", False), ("BLOCK", "constexpr", 64, True),
        ("DTYPE", "constexpr", None, True),
    )  # fmt: skip
    (tmp_path / "scale.json").write_text(json.dumps(tree))
    (tmp_path / "scale.cubin").write_bytes(kernel.asm["cubin"])
    with pytest.warns(ArtefactWarning, match="has no specialisation"):
        again = scale[(1,)](**SPECIAL, cubin_dir=tmp_path)
    assert again.asm["cubin"] == kernel.asm["cubin"]
    (tmp_path / "scale.json").write_text(json.dumps(tree | {"kernel_signature": str(signature)}))
    artefact = runner.load(tmp_path, "scale")
    assert artefact.constants() == {"stride": 1, "BLOCK": 64, "DTYPE": None}
    with pytest.raises(ArtefactRefused, match=r"n to be divisible by 16, .*it has DTYPE = None"):
        scale[(1,)](**SPECIAL | {"n": 3}, artefact=artefact)


@pytest.mark.parametrize("level", ["ttir", "ttgir", "llir", "cubin"])
def test_artefacts_of_another_triton(level):
    """What 3.9.0 wrote runs in each that is supported; PTX alone is of a later CUDA
    than ptxas of 3.6 knows."""
    x = torch.zeros(1024)
    kernel = add_one[(16,)](x, x, 1024, **{f"{level}_dir": DATA})
    assert runner.load(DATA, "add_one", level).metadata.compiler == "triton 3.9.0"
    assert kernel.metadata.num_warps == 4
    assert b"add_one" in kernel.asm["cubin"]
    with pytest.raises(ArtefactRefused, match="n to be divisible by 16"):
        add_one[(16,)](x, x, 1023, **{f"{level}_dir": DATA})


STRIDE = "tensormap.replace.tile.global_stride"


@pytest.mark.parametrize("level", ["llir", "ptx"])
def test_strides_of_descriptors_for_an_assembler_that_counts_in_16_bytes(level, tmp_path):
    """Triton 3.3 shifted them itself, for CUDA 12.4; ptxas of now does."""
    kernel = copy_rows[(1,)](MEMORY, MEMORY, 64)
    assert kernel.asm[level].count(STRIDE) == 2
    runner.export(kernel, tmp_path)
    side = tmp_path / "copy_rows.json"
    if level == "ptx":
        path = tmp_path / "copy_rows.ptx"
        text = re.sub(r"(?m)^\.version .*", ".version 8.4", path.read_text())
        path.write_text(re.sub(r"(bulk\.tensor\.2d\.shared)::cta\b", r"\1::cluster", text))

    def launched(compiler: str) -> str:
        side.write_text(json.dumps(json.loads(side.read_text()) | {"compiler": compiler}))
        return copy_rows[(1,)](
            MEMORY, MEMORY, 64, artefact=runner.load(tmp_path, "copy_rows", level)
        ).asm["ptx"]

    assert ", %bytes;" not in launched("triton 3.4.0")
    ptx = launched("triton 3.3.1")
    strides = re.findall(r"shl\.b64 %bytes, (%rd\d+), 4; (?:@%p\d+ )?([\w.:]+)[^;]*, %bytes;", ptx)
    assert [name for _, name in strides] == [f"{STRIDE}.shared::cta.b1024.b64"] * 2
    if level == "ptx":  # its own version tells, where nothing says who wrote it
        assert launched("") == ptx
    text = (tmp_path / f"copy_rows.{level}").read_text()
    (tmp_path / f"copy_rows.{level}").write_text(text.replace(f"{STRIDE}.", f"{STRIDE} ."))
    with pytest.raises(
        InvalidArtefact, match=r"counts strides in units of 16 bytes.*Run the cubin"
    ):
        launched("triton 3.3.1")


def test_interpreted_kernels_take_no_artefact(exported, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = runner.jit(triton.jit(scale.fn))
    with pytest.raises(InvalidArgument, match=r"cubin_dir is .*TRITON_INTERPRET=1"):
        interpreted[(1,)](**SPECIAL, cubin_dir=exported / "special")


def test_decorating():
    @triton.jit(do_not_specialize=["n"], debug=True)
    def kernel(x_ptr, n):
        pass

    again = runner.jit(kernel)
    assert isinstance(again, triton.JITFunction)
    assert (again.do_not_specialize, again.debug) == (["n"], True)
    for wrong in (3, triton.autotune([triton.Config({})], key=[])(kernel)):
        with pytest.raises(InvalidArgument, match=r"other decorators, such as triton\.autotune"):
            runner.jit(wrong)
    with pytest.raises(InvalidArgument, match="none for a decorated kernel"):
        runner.jit(kernel, debug=True)


def test_constants_of_every_kind(tmp_path):
    """A kernel is compared by its name, and cannot be left out; a tuple and ``None`` can."""
    call = {"x_ptr": MEMORY, "function": twice, "sizes": (64, 1.5), "nothing": None}
    plain = choose[(1,)](**call)
    runner.export(plain, tmp_path)
    artefact = runner.load(tmp_path, "choose")
    assert artefact.constants() == {"sizes": (64, 1.5), "nothing": None}
    assert choose[(1,)](MEMORY, twice, artefact=artefact).asm["cubin"] == plain.asm["cubin"]
    for wrong in ({"function": renamed}, {"sizes": (64, 1)}, {"sizes": (32, 1.5)}, {"nothing": 0}):
        with pytest.raises(ArtefactRefused, match=f"it has {next(iter(wrong))} = "):
            choose[(1,)](**call | wrong, artefact=artefact)
    with pytest.raises(TypeError, match="function"):
        choose[(1,)](MEMORY, artefact=artefact)


def test_exporting_what_is_not_there(tmp_path):
    kernel = scale[(1,)](**SPECIAL)
    with pytest.raises(InvalidArgument, match="levels is 'sass', expected some of ttir, ttgir"):
        runner.export(kernel, tmp_path, ["sass"])
    with pytest.raises(InvalidArgument, match="kernel is None"):
        runner.export(None, tmp_path)
    with pytest.raises(InvalidArgument, match="level is 'sass'"):
        runner.load(tmp_path, "scale", "sass")


def test_hooks_and_listeners_see_it(exported, monkeypatch):
    seen = []
    knobs = triton.knobs
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: seen.append("before"))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: seen.append("after"))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda cache_hit, **_: seen.append(("listener", cache_hit))
    )
    artefact = runner.load(exported / "special", "scale")
    fresh = runner.jit(triton.jit(scale.fn))
    for _ in range(2):
        fresh.warmup(*SPECIAL.values(), grid=(1,), artefact=artefact)
    assert seen == ["before", ("listener", True), "after"]


@pytest.fixture
def several(tmp_path) -> Path:
    """A folder of three folders of ``scale``, with BLOCK 32, 64, 128; the second is no cubin that a
    driver would take."""
    for number, block in enumerate((32, 64, 128)):
        kernel = scale[(1,)](**SPECIAL | {"BLOCK": block})
        runner.export(kernel, tmp_path / f"{number}-{block}", ["cubin"])
    (tmp_path / "1-64" / "scale.cubin").write_bytes(b"\x7fELF and no more")
    return tmp_path


def launched(**call):
    """Of a tuned function."""
    return scale[(1,)](*list(SPECIAL.values())[:6], **call).src.constants[(6,)]


def test_triton_autotune_picks_among_folders(several, sm90):
    """Past those that cannot run: a folder without one, half a cubin, one for other arguments."""
    (several / "0-20").mkdir()
    runner.export(scale[(1,)](**GENERAL | {"alpha": 1}), several / "0-30")
    configs = [triton.Config({"autotune_cubin_dir": str(p)}) for p in sorted(several.iterdir())]
    tuned = triton.autotune(configs, key=["n"])(scale)
    tuned[lambda given: (given["BLOCK"],)](*list(SPECIAL.values())[:6])
    assert sm90.launches[-1].grid == (32, 1, 1)
    failed = [time for time in tuned.configs_timings.values() if time == [float("inf")] * 3]
    assert (len(configs), len(failed)) == (5, 3)


def test_tuning_among_cubins(several, monkeypatch):
    """A cubin that cannot be loaded is a failed candidate; overwritten files are tuned again, and
    those that moved are not."""

    def tuned(folder: Path):
        space = runner.tuning.cubin_space(folder, scale)
        return tune.autotune(space, lambda: 0, scope="rank")(
            lambda artefact: launched(artefact=artefact)
        )

    first = tuned(several)
    assert first() in (32, 128)
    assert first.num_tunings == 1
    moved = Path(shutil.copytree(several, several.parent / "moved"))
    second = tuned(moved)
    assert (second(), second.num_tunings) == (first(), 0)
    shutil.copy(several / "0-32" / "scale.cubin", moved / "2-128" / "scale.cubin")
    third = tuned(moved)
    third()
    assert third.num_tunings == 1
    with pytest.raises(InvalidArgument, match=r"a folder with scale\.cubin in it"):
        tuned(several / "none")()
    with pytest.raises(NoValidConfig):
        tuned(several / "1-64")()


@pytest.fixture
def toolchain(monkeypatch):
    """The Triton of this process as another one, called ``here``. This process runs the program
    that compiles. Returns a list to which the kernels' names are added. tests/gpu starts a process.
    """
    monkeypatch.setenv("TRITON_DIST_TOOLCHAINS", f"here={Path(triton.__file__).parents[1]}")
    requests = []

    def answer(kernel, folder, request):
        requests.append(kernel)
        driver = triton.runtime.driver._active
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
        exec(toolchains._COMPILE_PROGRAM, {})
        triton.runtime.driver._active = driver

    monkeypatch.setattr(toolchains, "_compile_in_subprocess", answer)
    return requests


def test_a_kernel_of_another_compiler(toolchain):
    plain = scale[(1,)](**SPECIAL, num_warps=2)
    for _ in range(2):  # in a process that compiled it, and in one that finds it
        fresh = runner.jit(triton.jit(scale.fn))
        kernel = fresh[(1,)](**SPECIAL, num_warps=2, toolchain="here")
        assert (set(kernel.asm), kernel.metadata.num_warps) == ({"cubin"}, 2)
        assert kernel.asm["cubin"] == plain.asm["cubin"]
        assert fresh[(1,)](**SPECIAL, num_warps=2, toolchain=None) is not kernel
    assert toolchain == ["scale"]
    general = scale[(1,)](**GENERAL, toolchain="here")
    assert general.src.signature["n"] == "i64"


def test_tuning_among_compilers(toolchain):
    space = runner.tuning.toolchain_space([{"BLOCK": 32}, {"BLOCK": 64}])

    @tune.autotune(space, lambda: 0, scope="rank")
    def tuned(BLOCK, toolchain):
        return launched(BLOCK=BLOCK, DTYPE=tl.float16, toolchain=toolchain)

    assert tuned() in (32, 64)
    assert len(tuned.tune().trials) == 4
    assert toolchain == ["scale"] * 2
    assert [each["toolchain"] for each in space()] == [None, None, "here", "here"]
    assert f"Toolchain('here', triton {triton.__version__})" in str(space()[-1])


def test_mistakes_with_toolchains(toolchain, tmp_path, monkeypatch):
    @runner.jit
    def local(x_ptr):
        pass

    with pytest.raises(InvalidArgument, match=r"'3\.0', expected one of .*TOOLCHAINS, .* here"):
        scale[(1,)](**SPECIAL, toolchain="3.0")
    with pytest.raises(InvalidArgument, match="another process cannot import a kernel in a"):
        local[(1,)](MEMORY, toolchain="here")
    monkeypatch.setenv("TRITON_DIST_COMPILE_FROZEN", "1")
    with pytest.raises(KernelNotShipped, match=r"the Triton in .* would compile it"):
        scale[(1,)](**SPECIAL | {"BLOCK": 256}, toolchain="here")
    assert toolchain == []
    monkeypatch.setenv("TRITON_DIST_TOOLCHAINS", f"empty={tmp_path}")
    with pytest.raises(InvalidArgument, match="a folder with the package triton in it"):
        scale[(1,)](**SPECIAL, toolchain="empty")
    monkeypatch.setenv("TRITON_DIST_TOOLCHAINS", "empty")
    with pytest.raises(InvalidKnob, match="NAME=FOLDER"):
        scale[(1,)](**SPECIAL, toolchain="empty")


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('it is broken')")
    monkeypatch.setenv("TRITON_DIST_TOOLCHAINS", f"broken={tmp_path}")
    with pytest.raises(InvalidArtefact, match=r"by the Triton in .*RuntimeError: it is broken"):
        scale[(1,)](**SPECIAL, toolchain="broken")


def test_artefacts_are_compared_by_content(exported, tmp_path):
    one = runner.load(exported / "special", "scale")
    two = runner.load(shutil.copytree(exported / "special", tmp_path / "copy"), "scale")
    assert (one, hash(one), repr(one)) == (two, hash(two), repr(two))
    assert repr(one).endswith("stride=1, BLOCK=64, DTYPE=fp16, num_warps=2, num_stages=3)")
    metadata = dataclasses.replace(two.metadata, options={**two.metadata.options, "num_warps": 4})
    assert runner.Artefact(two.level, two.data, metadata) != one


def test_names_of_scripts(exported):
    jit = triton.jit
    runner.configure_jit_backend()
    try:
        kernel = triton.jit(scale.fn)
        assert kernel[(1,)](**SPECIAL, cubin_dir=exported / "special").metadata.num_warps == 2
    finally:
        runner.restore_jit_backend()
    assert triton.jit is jit
    assert runner.get_file_dir(__file__) == str(Path(__file__).parent)
    kernel = runner.gluon_runner.jit(gluon_copy.fn)
    assert kernel[(1,)](MEMORY, MEMORY, 64, 64).asm["cubin"]
    sizes = runner.torch_utils
    assert sizes.get_grid_dim((10, 20), (4, 8)) == (3, 3)
    assert sizes.get_pad_n_elements(torch.ones(10, 20), (4, 8)) == 12 * 24
    padded = sizes.pad_2d_to_block_shape(torch.ones(10, 20), (4, 8))
    assert (padded.shape, padded.sum()) == ((12, 24), 200)
    assert scripts.autotune is triton.autotune


def test_values_are_dumped_where_the_launch_says_so(sm90):
    """tests/language/test_dump.py has the values, tests/gpu both."""
    plain = watched[(4,)](MEMORY, 256, BLOCK=64)
    kernel = watched[(4,)](MEMORY, 256, BLOCK=64, dump_tensor=torch.empty(1 << 9))
    assert kernel.src.signature["dump_tensor"] == "*fp32"
    assert "dump_tensor" not in plain.src.signature
    assert plain.asm["ttir"].count("tt.store") == 1
    assert kernel.asm["ttir"].count("tt.store") == 4
    assert watched.warmup(MEMORY, 256, BLOCK=64, dump_tensor=torch.empty(1), grid=(4,)) is kernel
    assert len(sm90.launches) == 2
    for wrong, why in (
        ({"WHERE": (0, 0, 0, 0)}, "at most three"),
        ({"HELPED": True}, "the kernel itself"),
    ):
        with pytest.raises(triton.CompilationError) as refused:
            watched[(4,)](MEMORY, 256, BLOCK=64, **wrong, dump_tensor=torch.empty(1))
        cause: BaseException = refused.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        assert isinstance(cause, InvalidArgument)
        assert why in str(cause)
    with pytest.raises(InvalidArgument, match="a kernel in Triton's language"):
        gluon_copy[(1,)](MEMORY, MEMORY, 64, 64, dump_tensor=torch.empty(1))


PROGRAM = """
import sitecustomize
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def zero(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 0.0)

@triton.jit
def @LONG@(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1.0)

for kernel in (zero, @LONG@):
    source = triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": 64})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
raise SystemExit(sitecustomize.STATUS)
"""


def test_dump(tmp_path, capfd, monkeypatch):
    """Of a program that knows nothing of triton_dist, in an environment that has a sitecustomize of
    its own; the status is the command's."""
    program, folder = tmp_path / "program.py", tmp_path / "dumped"
    long = "k" * 245  # a file of that name and a level has too long a name
    program.write_text(PROGRAM.replace("@LONG@", long))
    (tmp_path / "sitecustomize.py").write_text("STATUS = 3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["dump", "--to", str(folder), "--levels", "ptx,sass"]
    assert main([*command, "--", sys.executable, str(program)]) == 3
    other, kernel = sorted(folder.iterdir())
    assert runner.load(other, long).metadata.function == long
    assert {p.name for p in kernel.iterdir()} == {
        "zero.cubin",
        "zero.json",
        "zero.ptx",
        "zero.sass",
    }
    assert "EXIT" in (kernel / "zero.sass").read_text()
    assert runner.load(kernel, "zero").constants() == {"N": 64}
    said = capfd.readouterr().err
    assert f"{kernel.name}" in said
    assert said.endswith(f"{folder}: 2 kernels, 2 new\n")
    assert main(["dump", "--to", str(folder), "--levels", "foo", "--", "true"]) == 2
    assert main(["dump", "--to", str(tmp_path / "none"), "--", "true"]) == 1
    command = ["touch", str(tmp_path / "ran")]
    assert main(["dump", "--to", str(program), "--", *command]) == 2
    assert not (tmp_path / "ran").exists()


def test_a_kernel_that_cannot_be_dumped_does_not_end_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_DIST_DUMP_DIR", str(tmp_path))
    details = {"src": SimpleNamespace(fn=None), "metadata": {"name": "zero"}}
    with pytest.warns(ArtefactWarning, match="kernel zero is not dumped"):
        dump(**details, metadata_group={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump(**details, metadata_group={})
    assert "kernel zero is not dumped" in capsys.readouterr().err
    killed = ["bash", "-c", "kill -TERM $$"]
    assert main(["dump", "--to", str(tmp_path / "none"), "--", *killed]) == 143


def test_two_dumps_are_compared_by_level_and_part(exported, tmp_path, monkeypatch, capsys):
    pair = [str(exported / "general"), str(exported / "special")]
    assert main(["dump", "--diff", *pair, "--json"]) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["facts"]["num_warps"] == [4, 2]
    assert tree["missing"] == {}
    for level in ("ttgir", "ptx", "sass"):
        assert set(tree["levels"][level]) - {"layouts"} == {"outside of loops"}
        part = tree["levels"][level]["outside of loops"]
        told = sum(new - old for old, new in part["operations"].values())
        assert told == part["new"] - part["old"] != 0
    assert tree["levels"]["ttgir"]["layouts"]["only_new"]
    assert main(["dump", "--diff", *pair]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^  num_warps +4 -> 2$", said, re.M)
    assert re.search(r"^ptx, outside of loops: \d+ -> \d+\n +\d+ -> \d+ +\w+", said, re.M)

    shutil.copytree(exported / "product", tmp_path / "product")
    (tmp_path / "product" / "product.ptx").unlink()
    assert main(["dump", "--diff", str(exported / "product"), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ttgir, loop 1: \d+, the same$", said, re.M)
    assert re.search(r"^sass, loop 1: \d+, the same$", said, re.M)
    assert "ptx: not compared: FileNotFoundError: " in said

    def none(*_):
        raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(facts, "resource_usage", none)
    monkeypatch.setattr(facts, "sass", none)
    assert main(["dump", "--diff", str(exported / "product"), str(exported / "product")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^  registers +not known: Cannot find cuobjdump$", said, re.M)
    assert "sass: not compared: RuntimeError: Cannot find cuobjdump" in said
    assert "ptx, loop 1: " in said
    assert main(["dump", "--diff", str(exported), pair[0]]) == 2
    assert "kernels found: general, gluon, product, special" in capsys.readouterr().err


def test_an_instruction_is_of_the_loop_that_it_runs_in(exported):
    folder = exported / "product"
    texts = {level: (folder / f"product.{level}").read_text() for level in ("ttgir", "ptx")}
    texts["sass"] = facts.sass((folder / "product.cubin").read_bytes())
    for level, product_of in {"ttgir": "dot", "ptx": "mma", "sass": "MMA"}.items():
        found = {
            name
            for name, part in sections.sections(level, texts[level]).items()
            if any(product_of in each for each in part.operations)
        }
        assert found == {"loop 1"}, level
