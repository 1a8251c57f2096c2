"""The documentation names all there is, and its links lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import PACKAGE
from tests.architecture.test_names import NAMES
from tests.docs.markdown import DOCS, REFERENCE, ROOT, anchors, name, pages, prose
from triton_dist import errors, knobs
from triton_dist.knobs import Knob

# Modules whose names are for users. Others of the package are its own.
_OTHER_MODULES = """
    tune autotuner deep_ep ops packs language runner runner.language utils nv_utils profiler_utils
    kernels.allreduce kernels.nvidia kernels.nvidia.allgather_gemm
    kernels.nvidia.comm_perf_model kernels.nvidia.gemm kernels.nvidia.gemm_allreduce
    kernels.nvidia.gemm_reduce_scatter kernels.nvidia.grouped_gemm
    kernels.nvidia.allgather_group_gemm kernels.nvidia.moe_reduce kernels.nvidia.moe_reduce_ar
    kernels.nvidia.expert_parallel kernels.nvidia.ulysses kernels.nvidia.decode_attention
    kernels.nvidia.sp_ag_attention kernels.nvidia.ep_group_gemm kernels.nvidia.ulysses_gemm
    kernels.nvidia.moe_reduce_rs kernels.nvidia.moe_utils kernels.nvidia.allreduce
    kernels.nvidia.reduce_scatter kernels.nvidia.allgather kernels.nvidia.shard_collectives
    layers.nvidia models models.config models.kv_cache models.llama models.llm models.utils
    testing test.utils
"""
PUBLIC_MODULES = ["triton_dist", *(f"triton_dist.{each}" for each in _OTHER_MODULES.split())]
# Public names of modules that have no __all__.
OTHER_NAMES = {
    "triton_dist.runtime.symmetric": ["allocate", "Region", "SymmetricMemory"],
    "triton_dist.testing.timing": ["time_interleaved", "capture_graph", "Samples"],
    "triton_dist.kernels.common.libraries": [
        "all_gather_rows", "all_gather_matmul", "async_tp_matmul", "has_async_tp",
    ],
    "triton_dist.layers.nvidia.symm_mem": [
        "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter",
    ],
    "triton_dist.testing.opinfo.base": ["OpInfo", "Cost", "Baseline", "tolerance"],
    "triton_dist.testing.opinfo.allgather_gemm": ["gather_alone"],
    "triton_dist.testing.opinfo": ["OPINFOS"],
    "triton_dist.testing.overlap": ["overlap_limit_ms"],
    "triton_dist.testing.compile_only": ["compile_only", "install", "compile_kernel", "Compiled"],
    "triton_dist.testing.assertions": [
        "bitwise_equal", "assert_bitwise_equal", "count_mismatches",
    ],
    "triton_dist.errors": [
        kind for kind, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ],
    "triton_dist.knobs": ["InvalidKnob"],
}  # fmt: skip
SCRIPTS = sorted(path.stem for path in (PACKAGE / "test" / "nvidia").glob("test_*.py"))
KNOBS = [value for value in vars(knobs).values() if isinstance(value, Knob)]


def public_names() -> set[str]:
    names = {item for module in PUBLIC_MODULES for item in importlib.import_module(module).__all__}
    scripts = " ".join(NAMES.values()).split()
    return names.union(scripts, *OTHER_NAMES.values())


def test_every_module_with_public_names_is_listed_here() -> None:
    inside = ("runtime", "_tuning", "kernels/common")
    listed = {
        f"triton_dist/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^__all__", path.read_text(encoding="utf-8"), re.MULTILINE)
        and not path.relative_to(PACKAGE).as_posix().startswith(inside)
    }
    modules = [importlib.import_module(module) for module in PUBLIC_MODULES]
    here = {Path(str(m.__file__)).relative_to(PACKAGE.parent).as_posix() for m in modules}
    assert listed == here


def test_every_public_name_has_a_place_in_the_reference() -> None:
    """Names in backticks count."""
    text = "".join(prose(page) for page in REFERENCE.rglob("*.md"))
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    assert sorted(public_names() - documented) == []


def documents_itself(module: ModuleType, public: str) -> bool:
    """Return whether a function or class has a docstring, or a text below its assignment."""
    value = getattr(module, public)
    value = getattr(value, "fn", value)  # of a tuned function or a kernel
    home = inspect.getmodule(value)
    if home is None or not (inspect.isfunction(value) or inspect.isclass(value)):
        return True
    below = rf'^{public}\b.* = .*\n"""'
    return bool(inspect.getdoc(value) or re.search(below, inspect.getsource(home), re.MULTILINE))


def test_every_public_function_and_class_has_a_docstring() -> None:
    modules = [importlib.import_module(module) for module in PUBLIC_MODULES]
    names = [(module, public) for module in modules for public in module.__all__]
    names += [(importlib.import_module(m), each) for m, n in OTHER_NAMES.items() for each in n]
    assert [public for module, public in names if not documents_itself(module, public)] == []


def row_of(knob: Knob[object]) -> str:
    default = {False: "0", True: "1"}.get(knob.default, knob.default)  # type: ignore[call-overload]
    return f"| `{knob.variable}` | {knob.expected} | `{default}` | {knob.doc} |"


def test_every_variable_is_documented_as_it_is_and_pages_name_no_other() -> None:
    table = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    assert [row for row in map(row_of, KNOBS) if row not in table] == []
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    named = set(re.findall(r"TRITON_DIST_\w+", text))
    assert sorted(named - {knob.variable for knob in KNOBS}) == []


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and anchor not in anchors(target))


def test_links_lead_somewhere() -> None:
    links = [
        (name(page), link)
        for page in pages()
        for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page))
    ]
    assert [each for each in links if is_broken(ROOT / each[0], each[1])] == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index)}
    assert set(DOCS.rglob("*.md")) - {DOCS / "README.md"} <= linked


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_a_test_script_is_documented(script: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"triton_dist.test.nvidia.{script}").get_args()
    options = set(re.findall(r"(?<!\w)--(?!no-|help)([\w-]+)", capsys.readouterr().out))
    page = (REFERENCE / "test-scripts.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    text = "".join(each for each in sections if re.match(rf"Common|.*`{script}\.py`", each))
    assert "case" in options
    assert sorted(option for option in options if not re.search(rf"\b{option}\b", text)) == []


def test_pages_are_short_and_have_one_title() -> None:
    long = {name(p): n for p in pages() if (n := len(p.read_text("utf-8").splitlines())) > 240}
    assert not long, "split them"
    titles = {name(page): len(re.findall(r"^# ", prose(page), re.MULTILINE)) for page in pages()}
    assert {page for page, count in titles.items() if count != 1} == set()


def test_every_file_of_the_tour_exists() -> None:
    """By the end of its path: within a room, files are named without their folder."""
    named = re.findall(r"`([\w./-]+(?:\.py|\.toml|/))`", prose(DOCS / "explanation" / "tour.md"))
    folders = {path.parent for path in PACKAGE.rglob("*.py")} | {DOCS / "adr"}
    there = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.toml")]
    tests = {path.parent for path in there}
    ends = [f"{path.as_posix()}{'/' * path.is_dir()}" for path in {*there, *folders, *tests}]
    assert named
    assert [path for path in named if not any(end.endswith(f"/{path}") for end in ends)] == []
