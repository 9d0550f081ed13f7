"""What the benchmark of the engine draws, and what it keeps of a file."""

import json

import pytest
import typer

from billfish.bench import engine
from billfish.cli import bench
from billfish.compare import records
from billfish.errors import ConfigError
from tests.engine.fake_worker import VOCAB, make_engine

HEAD = {"device": "a", "commit": "b"}


def test_lengths_are_the_same_everywhere(tmp_path):
    lengths = engine.draw_lengths()
    assert lengths == engine.draw_lengths()
    assert len(lengths) == 1000
    assert all(1 <= n <= 2048 for pair in lengths for n in pair)
    path = tmp_path / "lengths.json"
    for content in (lengths, {"lengths": lengths}):
        path.write_text(json.dumps(content))
        assert engine.read_lengths(str(path)) == lengths


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "[[1]]", "[[1, 0]]", '{"a": 1}', "3"])
def test_a_file_without_lengths_is_refused(tmp_path, content):
    path = tmp_path / "lengths.json"
    for name in (str(path), str(path.with_name("none.json"))):
        path.write_text(content)
        with pytest.raises(ConfigError, match="--lengths"):
            engine.read_lengths(name)


def test_caches_with_and_without_blocks_are_measured_in_the_same_memory():
    options = engine.parser().parse_args(["--cache-blocks", "all,128", "--max-model-len", "512"])
    found = engine._caches(options, ["throughput", "cache"], 600)
    assert found == [(None, 600), (None, 600), (512, 600), (None, 128), (512, 128)]
    assert engine._caches(options, ["decode"], 600) == []
    with pytest.raises(ConfigError, match="there are 100, got 128"):
        engine._caches(options, ["cache"], 100)


def test_many_requests_say_where_their_time_went():
    """Every step of a run is of one kind, with all its tokens; nobody waits longer than it took."""
    made, _ = make_engine(
        num_blocks=2048, max_model_len=4096, max_num_batched_tokens=2100, max_num_seqs=64,
        overlap=True,
    )  # fmt: skip
    lengths = [(2060, 1), *((40, 3 + n) for n in range(40))]
    many = engine.throughput(engine.Served(None, made, VOCAB), lengths)
    steps = {step["kind"]: step for step in many.steps}
    assert set(steps) == {
        "prompts, over 2048 tokens", "prompts, up to 2048 tokens", "decode, up to 128 requests",
        "decode, up to 32 requests",
    }  # fmt: skip
    assert sum(step["steps"] for step in many.steps) == len(made.recent_steps)
    # The last token of a request is not computed.
    assert sum(step["tokens"] for step in many.steps) == sum(a + b - 1 for a, b in lengths)
    assert all(0 <= step["waited"] <= step["seconds"] + 1e-3 for step in many.steps)
    assert many.tokens_s > 0
    assert many.request_s > 0


def test_rows_are_kept_of_the_same_device_and_commit(tmp_path):
    path = tmp_path / "engine.json"
    assert engine._kept(str(path), HEAD) == []
    path.write_text(json.dumps({**HEAD, "rows": [{"value": 1}]}))
    assert engine._kept(str(path), HEAD) == [{"value": 1}]
    for other in ({**HEAD, "device": "c"}, {**HEAD, "commit": None}):
        with pytest.raises(ConfigError, match="--keep"):
            engine._kept(str(path), other)


def test_starts_alone_are_told_as_they_come_and_make_no_third(monkeypatch):
    seconds = [(14.0, {"compilation": 8.0}), (7.0, {"compilation": 1.0})]
    monkeypatch.setattr(engine, "start_seconds", lambda options: iter(seconds))
    monkeypatch.setattr(engine, "serve", lambda options: pytest.fail("a third start"))
    saved = []
    options = engine.parsed(["--measure", "start", "--device", "cpu"])
    rows = engine.run(options, lambda rows: saved.append([row["value"] for row in rows]))
    assert [(row["compiled"], row["value"], row["phases"]) for row in rows] == [
        ("cold", *seconds[0]), ("warm", *seconds[1]),
    ]  # fmt: skip
    assert saved == [[14.0], [14.0, 7.0]]
    head = {"device": "a GPU", "date": "2026-01-01", "command": "this", "versions": {}}
    records.checked(records.Record("engine_gpu", "recorded", head, rows), "a start's rows")


def test_starts_are_of_the_engine_that_is_asked_for(monkeypatch):
    commands = []
    monkeypatch.setattr(engine, "_start_once", lambda command, _: commands.append(command))
    given = ["--device", "cpu", "--num-blocks", "9", "--head", "int8", "--eager", "--plain"]
    for arguments in (given, given[:4]):
        options = engine.parsed(["--measure", "start", *arguments])
        list(engine.start_seconds(options))
        child = engine.parsed(commands[-1][3:])
        assert vars(child) == {**vars(options), "measure": "none"}
    assert commands[0] == commands[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--measure", "decode,speed"], "'speed' is none of decode, prefill"),
        (["--measure", ""], "'' is none of"),
        (["--measure", "none,decode"], "'none' is none of"),
        (["--batches", "7"], "'7' is none of 1, 8, 32"),
        (["--batches", "8,x"], "'x' is none of"),
        (["--rounds", "0"], "at least 1, got 0"),
        (["--dtype", "float8"], "invalid choice"),
        (["--model", "llama"], "invalid choice"),
        (["--measure", "cache", "--cache-blocks", "some"], "got 'some'"),
        (["--measure", "cache", "--cache-blocks", "all,0"], "got '0'"),
        (["--cache-blocks", "100"], "--cache-blocks has no effect"),
        (["--lengths", "x.json"], "--lengths has no effect"),
        (["--measure", "prefill", "--batches", "1"], "--batches has no effect"),
        (["--keep"], "--keep has no effect"),
    ],
)
def test_options_that_are_wrong_or_without_effect_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit):
        engine.parsed(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out {}", "--out={}", "--ablation {}"])
def test_a_file_that_could_not_be_written_is_told_before_anything_is_measured(
    option, tmp_path, monkeypatch
):
    began = []
    monkeypatch.setattr(engine, "main", began.append)
    command = typer.main.get_command(bench.app)
    arguments = ["engine", *option.format(tmp_path / "none" / "x.json").split()]
    with pytest.raises(ConfigError, match="there is no folder"):
        command(arguments, standalone_mode=False)
    with pytest.raises(ConfigError, match="is a folder"):
        command(["engine", *option.format(tmp_path).split()], standalone_mode=False)
    assert not began
    command(["engine", *option.format(tmp_path / "x.json").split()], standalone_mode=False)
    command(["engine"], standalone_mode=False)
    command(["engine", "--ablation"], standalone_mode=False)
    assert len(began) == 3


def test_a_model_for_the_device():
    assert engine.parsed(["--device", "cpu"]).model == "tiny"
    assert engine.parsed(["--device", "cpu", "--model", "llama-3-8b"]).model == "llama-3-8b"


def test_options_that_leave_nothing_to_measure_are_told():
    arguments = [
        "--device", "cpu", "--dtype", "float32", "--weights", "dense", "--num-blocks", "20",
        "--max-num-seqs", "4", "--max-model-len", "300", "--measure", "decode", "--batches", "8",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"nothing was measured.*--max-num-seqs 4.* 300 tokens"):
        engine.main(arguments)


def test_decoding_and_prefill_are_timed_on_a_cpu(tmp_path):
    """By the same command as on a GPU."""
    path = tmp_path / "engine.json"
    engine.main([
        "--device", "cpu", "--dtype", "float32", "--weights", "dense", "--num-blocks", "100",
        "--max-num-seqs", "4", "--max-model-len", "700", "--rounds", "1", "--batches", "1",
        "--out", str(path),
    ])  # fmt: skip
    rows = records.read(path, "engine_gpu").rows
    assert [(row["measure"], row["batch"], row["prompt"]) for row in rows] == [
        ("tpot_ms", 1, 512), ("prefill_ms", 1, 512),
    ]  # fmt: skip
    assert all(row["model"] == "tiny" and row["value"] > 0 for row in rows)
