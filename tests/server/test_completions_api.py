"""/v1/completions, /tokenize and /detokenize."""

import pytest

REPLY = "Hello! I am a fake model, and this is all I say. 🐟"


def test_a_completion(client):
    answer = client.completions.create(model="fake", prompt="Hi", max_tokens=100)
    (choice,) = answer.choices
    assert choice.text == REPLY
    assert choice.finish_reason == "stop"
    assert answer.object == "text_completion"
    chunks = list(client.completions.create(model="fake", prompt="Hi", max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model="fake", prompt="Hi")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompt", ["Hi", ["Hi"], ["Hi", "there", "🐟"], [72, 105], [[72, 105], [116]]]
)
def test_prompts_of_every_kind(client, prompt):
    count = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    answer = client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=5, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    texts = (
        {"H": "Hi", "t": "there" if isinstance(prompt[1], str) else "t", "🐟": "🐟"}
        if (count > 1)
        else {"H": "Hi"}
    )
    for choice in answer.choices:
        assert choice.text == texts[choice.text[0]] + "Hello"
    streamed = [""] * (2 * count)
    usage = None
    for chunk in client.completions.create(
        model="fake", prompt=prompt, n=2, max_tokens=5, echo=True, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = chunk.usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]
    assert usage.completion_tokens == answer.usage.completion_tokens == 10 * count
    assert usage.prompt_tokens == answer.usage.prompt_tokens


def test_log_probabilities_of_a_completion(client):
    answer = client.completions.create(model="fake", prompt="Hé", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompts_log_probabilities(client, stream):
    options = {"prompt": "Hé", "max_tokens": 2, "logprobs": 1, "echo": True, "stream": stream}
    answer = client.completions.create(model="fake", **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "HéHe"
    known = [choice.logprobs for choice in choices if choice.logprobs]
    assert [t for each in known for t in each.tokens] == [
        "H", "bytes:\\xc3", "bytes:\\xa9", "H", "e",
    ]  # fmt: skip
    assert [t for each in known for t in each.token_logprobs] == [None, *[-0.5] * 4]
    assert [t for each in known for t in each.text_offset] == [0, 1, 1, 2, 3]
    assert known[0].top_logprobs[0] is None


def test_a_prompt_is_scored_without_generating(client):
    """What evaluation harnesses ask for: echo, log-probabilities, and no tokens."""
    for stream in (False, True):
        answer = client.completions.create(
            model="fake", prompt="abc", max_tokens=0, logprobs=1, echo=True, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == "abc"
        assert choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
        assert choices[-1].finish_reason == "length"
        if not stream:
            assert answer.usage.completion_tokens == 0


def test_no_tokens_and_no_echo(client):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=0)
    assert answer.choices[0].text == ""


def test_infinities_never_reach_json(server, http):
    """Minus infinity is no JSON; the engine's least log-probability is a number."""
    body = {"model": "fake", "prompt": "abc", "logprobs": 5, "max_tokens": 3, "echo": True}
    text = http.post("/v1/completions", json=body).text
    assert "Infinity" not in text
    assert "NaN" not in text


REFUSED = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": ["x"] * 256, "n": 5}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"messages": []}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(http, change, param):
    answer = http.post("/v1/completions", json={"model": "fake", "prompt": "x", **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_one_bad_prompt_refuses_all(server, http):
    body = {"model": "fake", "prompt": [[72], [105], [5000]], "max_tokens": 1000}
    assert http.post("/v1/completions", json=body).status_code == 400
    server.wait_idle()


def test_tokenize_and_back(http):
    answer = http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3, "max_model_len": 4096, "tokens": [97, 195, 169],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}
    assert http.post("/detokenize", json={"tokens": [5000]}).json()["error"]["param"] == "tokens"
    for body in ({}, {"prompt": "x", "messages": []}, {"prompt": "x", "tools": []}):
        assert http.post("/tokenize", json=body).status_code == 400
