"""What `billfish chat` sends to the model, turn by turn."""

import logging
from types import SimpleNamespace

import pytest

from billfish.checkpoint.sampling_defaults import SamplingDefaults
from billfish.cli import chat, common
from billfish.errors import CapacityError


class FakeLLM:
    """Answers "answer 1", "answer 2"; refuses a conversation whose last message is "too long"."""

    max_model_len = 1000
    checkpoint_defaults = SamplingDefaults()

    def __init__(self) -> None:
        self.tokenizer = self
        self.conversations: list[list[tuple[str, str]]] = []

    def encode_chat(self, messages):
        return messages

    def stream(self, prompts, params, *, cancelled):
        (messages,) = prompts
        self.conversations.append([(m["role"], m["content"]) for m in messages])
        if messages[-1]["content"] == "too long":
            raise CapacityError("does not fit")
        text = f"answer {len(self.conversations)}"
        yield 0, SimpleNamespace(delta=text, text=text, finish_reason="stop")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch):
    def run(*lines: str, **options) -> list[list[tuple[str, str]]]:
        llm, left = FakeLLM(), iter(lines)

        def read(_prompt: str) -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            if line == "ctrl-c":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(common, "load", lambda *_: llm)
        monkeypatch.setattr("builtins.input", read)
        chat.command(**options)
        assert next(left, None) in (None, "not read")
        return llm.conversations

    return run


def test_it_remembers(talk) -> None:
    assert talk("one", "two") == [
        [("user", "one")],
        [("user", "one"), ("assistant", "answer 1"), ("user", "two")],
    ]


def test_reset_forgets_all_but_the_system_message(talk) -> None:
    assert talk("one", "/reset", "two", system="Be brief.") == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "two")],
    ]


def test_exit_leaves_and_empty_lines_and_ctrl_c_do_nothing(talk) -> None:
    assert talk("", "ctrl-c", "  ", "one", "/exit", "not read") == [[("user", "one")]]


def test_a_refused_message_is_not_remembered(talk) -> None:
    assert talk("one", "too long", "two")[-1] == [
        ("user", "one"),
        ("assistant", "answer 1"),
        ("user", "two"),
    ]


def test_the_plan_of_a_gpu_is_shown_before_anything_is_loaded(monkeypatch, capsys) -> None:
    starting = logging.getLogger("billfish.worker.start")

    def llm(model: str, **options) -> SimpleNamespace:
        starting.info("%s", "memory of a GPU, [80 GiB]:\n  weights")
        assert "memory of a GPU, [80 GiB]:\n  weights" in capsys.readouterr().err
        return SimpleNamespace(checkpoint_defaults=SamplingDefaults(), rounding=None)

    monkeypatch.setattr("billfish.llm.LLM", llm)
    common.load("m", "bfloat16", None)
    assert not starting.handlers
    assert starting.level == logging.NOTSET
    capsys.readouterr()
    starting.info("later")
    assert "later" not in capsys.readouterr().err
