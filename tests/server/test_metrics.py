"""What Prometheus reads, parsed as it parses it."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from billfish.server.metrics import Histogram
from tests.server.conftest import chat
from tests.server.live import LiveServer, live

NAMES = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_params_n", "prompt_tokens", "generation_tokens",
    "request_success", "http_responses", "engine_up", "engine_restarts", "num_requests_running",
    "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_blocks_total",
    "kv_cache_blocks_free", "kv_cache_blocks_cached", "kv_cache_blocks_in_use",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "engine_steps",
    "engine_step_seconds", "engine_wait_seconds",
}  # fmt: skip


def read(server: LiveServer) -> dict:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {f.name.removeprefix("billfish:"): f for f in
                text_string_to_metric_families(answer.text)}  # fmt: skip
    return {
        (sample.name.removeprefix("billfish:"), *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    } | {"families": set(families)}


def value(metrics: dict, name: str, **labels: str) -> float:
    return metrics[(name, *sorted({"model_name": "fake", **labels}.items()))]


def test_what_is_counted():
    with live() as server:
        url = "/v1/chat/completions"
        first = server.http.post(url, json=chat("one", n=2)).json()["usage"]
        second = server.http.post(url, json=chat("two", stream=True, max_tokens=5))
        assert second.text.count("data: ") > 3
        server.http.post(url, json=chat(n=0))
        server.http.get("/made/up/path")
        server.wait_idle()
        metrics = read(server)
        assert metrics["families"] == NAMES
        prompt = server.http.post("/tokenize", json={"messages": chat("two")["messages"]}).json()[
            "count"
        ]
        assert value(metrics, "prompt_tokens_total") == first["prompt_tokens"] + prompt
        assert value(metrics, "generation_tokens_total") == first["completion_tokens"] + 5
        assert value(metrics, "time_to_first_token_seconds_count") == 2
        assert value(metrics, "inter_token_latency_seconds_count") == (
            first["completion_tokens"] + 5 - 3
        )
        assert value(metrics, "e2e_request_latency_seconds_count") == 3  # samples
        assert value(metrics, "request_queue_time_seconds_count") == 3
        assert value(metrics, "request_params_n_sum") == 3
        assert value(metrics, "request_success_total", finished_reason="stop") == 2
        assert value(metrics, "request_success_total", finished_reason="length") == 1
        assert value(metrics, "engine_up") == 1
        assert value(metrics, "kv_cache_usage_perc") == 0
        assert value(metrics, "kv_cache_blocks_total") == 4096
        assert value(metrics, "engine_steps_total") > 5
        steps, waits = (value(metrics, f"engine_{n}_seconds_total") for n in ("step", "wait"))
        assert steps >= waits > 0
        responses = {key[1:]: n for key, n in metrics.items() if key[0] == "http_responses_total"}
        assert responses[("path", "/v1/chat/completions"), ("status", "200")] == 2
        assert responses[("path", "/v1/chat/completions"), ("status", "400")] == 1
        assert responses[("path", "other"), ("status", "404")] == 1


def test_it_answers_while_the_engine_is_dead():
    with live() as server:
        read(server)
        server.call(server.engine.die)
        metrics = read(server)
        assert value(metrics, "engine_up") == 0
        assert value(metrics, "engine_restarts_total") == 1
        assert value(metrics, "kv_cache_blocks_total") == 4096  # what was known last


def test_a_hostile_model_name_is_escaped():
    name = 'a"b\\c\nd'
    with live(model_names=(name,)) as server:
        server.http.post("/v1/chat/completions", json={**chat(), "model": name})
        text = server.http.get("/metrics").text
        labels = {s.labels.get("model_name") for f in text_string_to_metric_families(text)
                  for s in f.samples}  # fmt: skip
        assert labels == {name, None}


def test_histograms_count_up_to_their_bounds():
    histogram = Histogram("x", "y", (1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(observed)
    histogram.observe(2.0, times=3)
    found = {s.labels.get("le"): s.value for s in histogram.family("m").samples}
    assert found["1.0"] == 2
    assert found["2.0"] == 6
    assert found["+Inf"] == 7
    total = next(s.value for s in histogram.family("m").samples if s.name == "x_sum")
    assert total == pytest.approx(18.0)


def test_names_hold_no_client_data():
    """Clients must not be able to make series without end."""
    with live() as server:
        for number in range(20):
            server.http.get(f"/path/{number}", headers={"X-Request-Id": f"id{number}"})
            server.http.post("/v1/chat/completions", json=chat(model=f"m{number}"))
        series = read(server)
        assert len([key for key in series if key[0] == "http_responses_total"]) <= 4
        assert "path/1" not in json.dumps([list(map(str, key)) for key in series])
