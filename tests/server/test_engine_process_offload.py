"""The event loop goes on while threads work on large prompts and on grammars."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from billfish.checkpoint.gguf import GGUFFile
from billfish.server.offload import LARGE, Offload
from billfish.structured_output import StructuredOutput
from billfish.tokenizer import Tokenizer, from_gguf
from billfish.tokenizer.library import RELEASE_AT
from billfish.worker.grammar import GrammarCompiler
from tests.e2e import tiny_gguf
from tests.server.test_structured_output import wide


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with GGUFFile.open(path) as file:
        return from_gguf(file.metadata, str(path))


def text(characters: int) -> str:
    words = random.Random(0).choices(
        ["he", "hello", " fish", "\n\n", "12", "é", "🐟"], k=characters
    )
    return "".join(words)[:characters]


def longest_wait(size: int, work: Callable[[], object]) -> float:
    """How long the event loop stood still while work was done in a thread: the share of all its
    time, each in seconds of the processor, so that other programs on this machine do not count."""

    async def run() -> float:
        offload, times = Offload(), [time.process_time()]
        task = asyncio.ensure_future(offload.run(size, work))
        while not task.done():
            await asyncio.sleep(0.001)
            times.append(time.process_time())
        await task
        offload.close()
        waits = [after - before for before, after in itertools.pairwise(times)]
        return max(waits) / (times[-1] - times[0])

    return asyncio.run(run())


class TestTheLoopGoesOn:
    """A large prompt does not hold up who asks for health. Where the interpreter's lock is held to
    the end, the loop stands still for nearly all of the time."""

    def test_while_a_megabyte_is_tokenized(self, tokenizer: Tokenizer) -> None:
        long = text(1 << 20)
        assert longest_wait(len(long), lambda: tokenizer.encode(long)) < 0.3

    def test_while_a_chat_of_a_megabyte_is_rendered(self, tokenizer: Tokenizer) -> None:
        messages = [{"role": "user", "content": text(1 << 20)}]
        assert longest_wait(1 << 20, lambda: tokenizer.encode_chat(messages)) < 0.3

    def test_while_a_grammar_is_compiled(self, tokenizer: Tokenizer) -> None:
        form, compiler = StructuredOutput("json_schema", wide(800)), GrammarCompiler(tokenizer)
        assert longest_wait(0, lambda: compiler.compile(form)) < 0.3


@pytest.mark.parametrize("length", [RELEASE_AT - 1, RELEASE_AT, RELEASE_AT + 1, 20_000])
def test_long_texts_have_the_tokens_of_short_ones(tokenizer: Tokenizer, length: int) -> None:
    long = text(length)
    cut = [long[i : i + 1000] for i in range(0, length, 1000)]
    # The tiny vocabulary merges "he" alone, so cuts that part no "he" change nothing.
    for i in range(len(cut) - 1):
        if cut[i].endswith("h"):
            cut[i], cut[i + 1] = cut[i][:-1], "h" + cut[i + 1]
    assert tokenizer.encode(long) == [t for part in cut for t in tokenizer.encode(part)]
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_small_work_never_waits_for_large() -> None:
    async def run() -> None:
        offload, go = Offload(small=1, large=1), threading.Event()
        large = [asyncio.ensure_future(offload.run(LARGE, go.wait, 60)) for _ in range(5)]
        assert await offload.run(LARGE - 1, lambda: 3) == 3
        assert not any(task.done() for task in large)
        go.set()
        assert all(await asyncio.gather(*large))
        offload.close()

    asyncio.run(run())


def test_the_real_tokenizer_too(model_path: Path) -> None:
    with GGUFFile.open(model_path) as file:
        tokenizer = from_gguf(file.metadata, str(model_path))
    long = text(1 << 18)
    assert longest_wait(len(long), lambda: tokenizer.encode(long)) < 0.3
