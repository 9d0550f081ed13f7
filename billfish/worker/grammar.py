"""Text of a given form: which tokens may come next, kept track of by llguidance.

A grammar is compiled once, off whatever must not wait, and kept; each sequence gets a copy of it
that follows the sequence's own tokens. llguidance (https://github.com/guidance-ai/llguidance)
computes a mask over the vocabulary in tens of microseconds, outside the interpreter's lock. What a
grammar may cost is bounded: its size and nesting in `StructuredOutput`, its compilation and every
single mask by the limits below, counted in the library's own units of work.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import torch
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from torch import Tensor

from billfish.errors import InvalidRequestError
from billfish.structured_output import StructuredOutput
from billfish.tokenizer import Tokenizer
from billfish.worker.host_copies import to_device

KEPT_GRAMMARS = 64
BITS = 32
"""Tokens in a word of a mask."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON. Without an end to it, a weak model may write nothing else."""

JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}

DEAD_END = "the required form leaves no token to choose"


@dataclass(slots=True)
class GrammarState:
    """Where one sequence is in its grammar.

    matcher: has consumed all tokens of the sequence but those that end it. stop_ids: tokens that
    end it; they can be chosen where the text is complete, and nowhere else. failure: why nothing
    can follow any more.
    """

    matcher: llguidance.LLMatcher
    stop_ids: tuple[int, ...]
    failure: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the sequence by these tokens, none of which ends it."""
        if self.failure is None and not self.matcher.consume_tokens(list(token_ids)):
            self.failure = _reason(self.matcher.get_error())

    def fork(self) -> "GrammarState":
        return GrammarState(self.matcher.deep_copy(), self.stop_ids, self.failure)


class GrammarCompiler:
    """The grammars of one tokenizer's vocabulary. For any number of threads.

    What all grammars share is made before the first, in a second for a large vocabulary, during
    which no other thread runs: who cannot have that then calls `prepare` first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[StructuredOutput, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000,  # some 20 ms
            step_lexer_fuel=200_000,  # some 15 ms
            step_max_items=50_000,  # some 3 ms
            max_lexer_states=1 << 15,  # one or two kilobytes each
            max_grammar_size=500_000,
            verbose_errors=False,
        )

    def prepare(self) -> None:
        """Make what all grammars share."""
        with self._lock:
            _ = self._vocabulary

    def compile(self, structured: StructuredOutput) -> None:
        """Compile it, unless that was done lately.

        InvalidRequestError for "structured": it has errors, uses what llguidance does not offer,
        takes more work than is allowed, or no text has this form.
        """
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
                return
        matcher = self._compile(structured)
        with self._lock:
            self._compiled[structured] = matcher
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)

    def start(
        self, structured: StructuredOutput, stop_ids: Sequence[int], generated: Sequence[int]
    ) -> GrammarState:
        """The state of a sequence that has generated these tokens. Raises what `compile` does."""
        with self._lock:
            compiled = self._compiled.get(structured)
        if compiled is None:
            compiled = self._compile(structured)
        state = GrammarState(compiled.deep_copy(), tuple(stop_ids))
        if generated:
            state.advance(generated)
        return state

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        tokenizer = self._tokenizer
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=list(tokenizer.eos_token_ids),
        )

    def _compile(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        with self._lock:
            vocabulary = self._vocabulary
        try:
            grammar = _grammar(structured)
        except (ValueError, GbnfToLarkError, RecursionError) as error:
            raise InvalidRequestError("structured", _reason(str(error))) from error
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequestError("structured", _reason(matcher.get_error()))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise InvalidRequestError("structured", _reason(first.get_error()))
        return matcher


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = []
        for i, data in enumerate(self.tokens):
            if not data:  # control tokens, and ids that are no token: by name, never as text
                self.tokens[i] = tokenizer.named_token_bytes(i) or f"<|unused_{i}|>".encode()
                self.special_token_ids.append(i)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def fill_masks(states: Sequence[GrammarState], vocab_size: int) -> Tensor:
    """Which tokens may follow each sequence: int32 [len(states), ceil(vocab_size / 32)] on the CPU.

    Token t is bit t % 32 of word t // 32. Where nothing can follow, the row is 0 and the state's
    failure is set.
    """
    masks = torch.zeros(len(states), -(-vocab_size // BITS), dtype=torch.int32)
    live = [(state.matcher, i) for i, state in enumerate(states) if state.failure is None]
    if live:
        _executor().unsafe_compute_mask_ptr(
            live, masks.data_ptr(), masks.shape[1] * masks.itemsize, len(states)
        )
    words = masks.numpy().view("uint32")
    for row, state in zip(words, states, strict=True):
        if state.failure is None and state.matcher.is_error():
            state.failure = _reason(state.matcher.get_error())
        if state.failure is not None:
            row[:] = 0
            continue
        complete = state.matcher.is_accepting()
        for token_id in state.stop_ids:
            word, bit = divmod(token_id, BITS)
            if complete:
                row[word] |= 1 << bit
            else:
                row[word] &= ~(1 << bit) & 0xFFFFFFFF
    return masks


def require(logits: Tensor, grammars: Sequence[tuple[int, GrammarState]]) -> None:
    """Set logits [S, V] to minus infinity for what cannot follow; grammars: of which rows, all
    different."""
    if not grammars:
        return
    masks = fill_masks([state for _, state in grammars], logits.shape[1])
    where = torch.tensor([i for i, _ in grammars])
    apply_masks(logits, to_device(where, logits.device), to_device(masks, logits.device))


def apply_masks(logits: Tensor, where: Tensor, masks: Tensor) -> None:
    """Set logits [S, V] to minus infinity, in rows `where` (int64 [R]), for what is not in masks
    (int32 [R, ceil(V / 32)]). All on one device; the other rows are not touched."""
    bits = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    allowed = (masks[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[where] = logits[where].masked_fill(~allowed, -torch.inf)


def _grammar(structured: StructuredOutput) -> str:
    """As llguidance wants it. ValueError or GbnfToLarkError where it is seen at once to be none."""
    text = structured.text
    match structured.kind:
        case "json_schema":
            schema = json.loads(text)
            if schema is False:
                raise ValueError("no text has the form of the schema false")
            text = "{}" if schema is True else text
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        case "json_object":
            return llguidance.LLMatcher.grammar_from_json_schema(
                '{"type": "object"}', overrides=JSON_OPTIONS
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        case "choice":
            return llguidance.grammar_from("choice", text)
    return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))


_executors: list[llguidance.LLExecutor] = []


def _executor() -> llguidance.LLExecutor:
    """Its threads, started when they are first needed."""
    if not _executors:
        _executors.append(llguidance.LLExecutor())
    return _executors[0]


def _reason(message: str) -> str:
    """The first lines of what llguidance says, of a bounded length."""
    message = message.removesuffix("\n<non-verbose/>").strip()
    if message.startswith("NoExtension"):
        return DEAD_END
    return message if len(message) <= 300 else f"{message[:300]}..."
