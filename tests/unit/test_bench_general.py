"""`billfish bench general`: its records, their arithmetic, and every case against its reference."""

import itertools
import json

import pytest
import torch

from billfish.bench import general as bench
from billfish.bench import general_case, general_compile
from billfish.bench.general_case import Case, relative_error
from billfish.errors import ConfigError

CPU = torch.device("cpu")
RATES = bench.Rates(read=4000.0, copy=3200.0, write=2000.0, flops={torch.float32: 50e6})
DOMAINS = [d for d in bench.DOMAINS if bench.find_spec(f"billfish.bench.general_{d}")]


def doubled(**changes) -> Case:
    options = {
        "domain": "data", "kernel": "double", "size": "1000", "dtype": torch.float32,
        "draw": lambda device: (torch.rand(1000, device=device),),
        "run": lambda x: x * 2, "reference": lambda x: x.double() * 2,
        "read": 4_000_000, "written": 4_000_000,
        "peers": {"torch": lambda x: x + x, "off": lambda x: x * 2.001},
        "settings": {"vector loads": {"off": lambda x: x + x, "half": lambda x: x * 3}},
    }  # fmt: skip
    return Case(**options | changes)


def timer(impls, *, eager, ahead_cycles):
    assert all(isinstance(calls, list) for calls in impls.values())
    for calls in impls.values():
        calls[0]()
    return {name: (2500.0 * (i + 1), 0.125) for i, name in enumerate(impls)}


def test_rows_of_a_comparison():
    rows = bench.compare(doubled(), RATES, CPU, timer=timer)
    assert rows[0] == {
        "kernel": "double", "domain": "data", "size": "1000", "dtype": "float32",
        "impl": "billfish", "bytes": 8_000_000, "flops": 0, "floor_us": 2500.0,
        "rel_err": 0.0, "us": 2500.0, "spread": 0.125, "graph": True,
    }  # fmt: skip
    assert rows[1]["us"] == 5000.0
    # What is wrong is told and not timed.
    assert rows[2]["impl"] == "off"
    assert rows[2]["rel_err"] == pytest.approx(5e-4, rel=0.05)
    assert "us" not in rows[2]
    line = bench.table(rows).splitlines()[1].split()
    assert line == ["double", "1000", "float32", "2500.0", "torch", "5000.0", "2.00", "100%"]


def test_rows_of_an_ablation(capsys):
    rows = bench.ablate(doubled(), RATES, CPU, timer=timer)
    assert rows == [
        {"family": "general", "domain": "data", "kernel": "double", "technique": technique,
         "setting": setting, "case": "1000 float32", "us": us, "spread": 0.125,
         "bytes": 8_000_000, "floor_us": 2500.0}
        for technique, setting, us in (("all", "on", 2500.0), ("vector loads", "off", 5000.0))
    ]  # fmt: skip
    assert "wrong results, not timed: vector loads: half" in capsys.readouterr().out
    line = bench.ablation_table(rows).split()
    assert line == ["double", "1000", "float32", "2500.0", "vector", "loads:", "off", "5000.0",
                    "2.00"]  # fmt: skip


def test_peers_and_techniques_are_timed_in_the_same_turns():
    rows, ablation = bench.measure(doubled(), RATES, CPU, timer=timer)
    assert [(row["impl"], row.get("us")) for row in rows] == [
        ("billfish", 2500.0), ("torch", 5000.0), ("off", None),
    ]  # fmt: skip
    assert [(row["technique"], row["us"]) for row in ablation] == [
        ("all", 2500.0), ("vector loads", 7500.0),
    ]  # fmt: skip
    assert bench.measure(doubled(settings={}), RATES, CPU, timer=timer)[1] == []


def test_compilation_calls_what_is_timed_once():
    called = []
    case = doubled(
        run=lambda x: called.append("run"), settings={"fused": {"off": lambda x: called.append(x)}},
        peers={"torch": lambda x: called.append("torch"), "broken": lambda x: 1 / 0},
    )  # fmt: skip
    calls = general_compile.functions(case, None, False)
    failed = general_compile.first_calls(case, calls, CPU)
    assert called == ["run", "torch"]
    assert failed == ["double 1000 float32, broken: ZeroDivisionError: division by zero"]
    calls = general_compile.functions(case, ["broken"], True)
    assert list(calls) == ["billfish", "broken", "fused: off"]


def test_compilation_ends_when_its_time_does():
    """In processes of their own, each of which finds its case by number."""
    wanted = (("transpose",), False)
    lines = general_compile.compile_all(wanted, CPU, None, True, 1, until=0.0)
    assert [line.partition(":")[0] for line in lines] == [c.name for c in bench.all_cases(*wanted)]


def test_compilation_alone_needs_processes(capsys):
    for options in (["--compile-only"], ["--jobs", "-1"]):
        with pytest.raises(SystemExit):
            bench.main(["--out", "x.json", *options])
        assert "--jobs, 1 or more" in capsys.readouterr().err


def test_peers_are_compiled_where_they_are_timed(monkeypatch):
    """A record of techniques alone has none."""
    asked = []
    monkeypatch.setattr(bench, "compile_all", lambda *given: asked.append(given[2]) or [])
    for paths in (["--ablation", "a.json"], ["--out", "o.json", "--ablation", "a.json"]):
        bench.main([*paths, "--jobs", "1", "--compile-only", "--peers", "torch"])
    assert asked == [[], ["torch"]]


def test_cases_come_in_the_order_of_their_names():
    found = [case.kernel for case in bench.all_cases(["signal", "transpose", "sort"])]
    assert found[0] == "fft"
    assert found[-3:] == ["transpose", "sort", "sort"]
    everything = [case.domain for case in bench.all_cases(["science", "data"])]
    assert everything == sorted(everything, reverse=True)


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    assert RATES.memory_us(4000, 0) == 1.0
    assert RATES.memory_us(0, 4000) == 2.0
    assert RATES.memory_us(3200, 3200) == 2.0
    assert RATES.memory_us(3200 + 4000, 3200) == 3.0
    assert RATES.floor_us(doubled(flops=500_000_000_000)) == 10_000.0
    assert RATES.floor_us(doubled(flops=1000)) == 2500.0
    # The rate of another dtype, where the case names it.
    rates = bench.Rates(4000.0, 3200.0, 2000.0, {torch.float16: 1e6, torch.float32: 1.0})
    assert rates.floor_us(doubled(flops=10**10, math=torch.float16)) == 10_000.0
    rates.flops["tf32"] = 2e6
    assert rates.floor_us(doubled(flops=10**10, math="tf32")) == 5_000.0
    assert list(rates.as_json()["tflops"]) == ["float16", "float32", "tf32"]


def test_products_in_tf32_have_a_floor_of_their_own():
    one, three = (case for case in bench.all_cases(["matmul"]) if "tf32" in case.size)
    assert one.math == three.math == "tf32"
    assert three.flops == 3 * one.flops


def test_inputs_are_cold_unless_that_takes_long():
    assert bench.copies_of(doubled(), RATES) == 4  # 10 ms of 2.5 ms each
    small = doubled(read=40_000, written=40_000)
    assert bench.copies_of(small, RATES) == bench.MOST_COPIES
    assert bench.copies_of(doubled(read=2_000_000, written=2_000_000), RATES) == 8
    quick = bench.Rates(4e6, 4e6, 4e6)
    assert bench.copies_of(doubled(), quick) == 33  # 260 MB of 8 MB each
    assert bench.copies_of(doubled(read=10**9), quick) == 1
    slow = doubled(read=40_000, written=40_000, flops=10**12)
    assert bench.copies_of(slow, RATES) == 1


def test_missing_peers_are_named_and_not_called(monkeypatch):
    monkeypatch.setitem(general_case.MODULES, "absent", "billfish_no_such_module")
    case = doubled(peers={"absent device": lambda x: 1 / 0, "torch": lambda x: x + x})
    rows = bench.compare(case, RATES, CPU, timer=timer)
    assert [row["impl"] for row in rows] == ["billfish", "torch"]
    assert bench.missing([case]) == ["absent device"]
    chosen = bench.compare(doubled(), RATES, CPU, peers=[""], timer=timer)
    assert [row["impl"] for row in chosen] == ["billfish"]


def test_a_peer_that_fails_is_left_out(capsys):
    case = doubled(peers={"broken": lambda x: 1 / 0})
    assert len(bench.compare(case, RATES, CPU, timer=timer)) == 1
    assert "broken: ZeroDivisionError" in capsys.readouterr().out


def test_what_no_graph_holds_is_told():
    peer = general_case.with_cupy(lambda cupy, x: x)
    assert peer.eager

    def by_call(x):
        return x + x

    by_call.eager = True
    rows = bench.compare(doubled(peers={"torch": by_call}), RATES, CPU, timer=timer)
    assert [row["graph"] for row in rows] == [True, False]


def test_results_in_place_do_not_reach_the_next():
    case = doubled(run=lambda x: x.mul_(2), peers={"other": lambda x: x.mul_(2)})
    rows = bench.compare(case, RATES, CPU, timer=timer)
    assert [row["rel_err"] for row in rows] == [0.0, 0.0]


def test_relative_error():
    ones = torch.ones(4, dtype=torch.float64)
    assert relative_error(ones.float(), ones) == 0
    assert relative_error(ones + 0.1, ones) == pytest.approx(0.1)
    assert relative_error((ones, ones * 2), (ones, ones)) == 1.0
    assert relative_error(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 0])) == 0.5
    assert relative_error(ones, ones[:3]) == float("inf")
    assert relative_error(ones, (ones,)) == float("inf")
    assert not relative_error(ones * torch.nan, ones) <= 1e9
    assert relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0


def all_tiny():
    modules = [bench.import_module(f"billfish.bench.general_{domain}") for domain in DOMAINS]
    return [case for module in modules for case in module.tiny()]


@pytest.mark.parametrize("case", all_tiny(), ids=lambda case: case.name)
def test_a_case_on_the_cpu(case):
    """The operation, and torch's peers, compute what the case says."""
    impls = {"billfish": case.run}
    impls |= {name: peer for name, peer in case.peers.items() if name.split()[0] == "torch"}
    errors = bench.check(case, impls, CPU)
    assert set(errors) == set(impls)
    assert all(error <= case.limit for error in errors.values()), errors
    assert case.read + case.written > 0


def test_every_kernel_has_a_tiny_case_and_names_are_distinct():
    cases = bench.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kernel for case in cases} == {case.kernel for case in all_tiny()}
    for case in cases:
        assert case.domain in bench.DOMAINS
        assert "all" not in case.settings


def test_kernels_by_name():
    assert {case.kernel for case in bench.all_cases(["scan"])} == {"scan"}
    assert {case.domain for case in bench.all_cases(["data", "rms_norm"])} == {"data", "training"}
    quick = bench.all_cases(["data"], quick=True)
    assert len(quick) == len({case.kernel for case in quick})
    assert quick[0] is not None
    assert quick[0].name == bench.all_cases(["data"])[0].name
    with pytest.raises(ConfigError, match="no general kernel is named skan"):
        bench.all_cases(["skan"])


def test_files_keep_rows_of_other_kernels(tmp_path):
    path = tmp_path / "general.json"
    head = {"device": "a GPU", "commit": "abc"}
    assert bench._kept(str(path), head, []) == []
    path.write_text(json.dumps(head | {"rows": [{"kernel": "double"}, {"kernel": "scan"}]}))
    assert bench._kept(str(path), head, [doubled()]) == [{"kernel": "scan"}]
    with pytest.raises(ConfigError, match="commit"):
        bench._kept(str(path), head | {"commit": "def"}, [])


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    """Everything but a GPU: heads, both files, tables, a case that fails, time that runs out."""
    failing = doubled(kernel="fails", reference=lambda x: 1 / 0, settings={})
    late = doubled(kernel="late")
    monkeypatch.setattr(bench, "DEVICE", CPU)
    states = iter([True, True])
    monkeypatch.setattr(bench, "_sound", lambda: next(states, False))
    monkeypatch.setattr(bench, "COLD_BYTES", 20_000_000)
    monkeypatch.setattr(bench, "time_in_turns", timer)
    monkeypatch.setattr(bench.Rates, "measured", classmethod(lambda cls: RATES))
    monkeypatch.setattr(bench, "all_cases", lambda names, quick: [doubled(), failing, late])
    clock = itertools.count(0, 10)  # asked once at the start, then three times a case
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    out, ablation = tmp_path / "general.json", tmp_path / "ablation.json"
    bench.main(["--out", str(out), "--ablation", str(ablation), "--time-limit", "50"])
    for path, count in ((out, 3), (ablation, 2)):
        found = json.loads(path.read_text())
        assert {"device", "date", "commit", "versions", "command", "missing", "rates"} < set(found)
        assert found["rates"]["copy_gbps"] == 3
        assert len(found["rows"]) == count
    said = capsys.readouterr().out
    assert "fails 1000 float32: ZeroDivisionError" in said
    assert "out of time before late" in said
    assert "vector loads: off" in said
    with pytest.raises(SystemExit):
        bench.main(["--quick"])
    assert "say where results go" in capsys.readouterr().err


def test_a_peer_that_nobody_has_is_told():
    arguments = ["--out", "x.json", "--kernels", "transpose", "--peers", "torch,jax"]
    with pytest.raises(ConfigError, match=r"'jax' beside it; there are .*torch"):
        bench.main(arguments)
