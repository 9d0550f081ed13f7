"""Text of a required form: it comes out so, or is refused, and nobody else notices."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from billfish import LLM
from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine import Engine, RequestOutput
from billfish.engine.plan import Admission, Fork, StepPlan, Work
from billfish.errors import BillfishError, InvalidRequestError, QueueFullError
from billfish.sampling_params import SamplingParams
from billfish.server import engine_host
from billfish.server.engine_host import EngineHost
from billfish.server.fake_engine import (
    EOS,
    VOCAB_SIZE,
    ScriptedExecutor,
    byte_tokenizer,
    make_engine,
)
from billfish.server.messages import Abort, EngineRequest, Outputs, Submit
from billfish.structured_output import StructuredOutput as Form
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.grammar import GrammarCompiler, GrammarState, apply_masks, fill_masks
from billfish.worker.input_batch import InputBatch
from billfish.worker.logits_processor import LogitsProcessor
from tests.e2e import tiny_gguf

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 6
        and type(found["age"]) is int
        and 0 <= found["age"] <= 130
        and len(found["tags"]) <= 3
        and set(found["tags"]) <= {"a", "b"}
    )


SUM = r"""
start: term ("+" term){0,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]?/
"""

FORMS: list[tuple[str, Form, Callable[[str], bool]]] = [
    ("schema", Form.json_schema(PERSON), is_person),
    ("regex", Form.regex(r"[a-f]{3,5}-[0-9]{1,4}\.(com|org)"), lambda t: bool(
        re.fullmatch(r"[a-f]{3,5}-[0-9]{1,4}\.(com|org)", t))),
    ("regex with anchors", Form.regex("^ab?c$"), lambda t: t in ("abc", "ac")),
    ("grammar", Form.grammar(SUM), lambda t: isinstance(eval_sum(t), int)),
    ("gbnf", Form.grammar('root ::= "yes" | "no" [0-9]'), lambda t: bool(
        re.fullmatch("yes|no[0-9]", t))),
    ("choice", Form.choice(["red", "green", 'q"uo\\te', "über\n🐟"]),
        lambda t: t in ("red", "green", 'q"uo\\te', "über\n🐟")),
]  # fmt: skip


def eval_sum(text: str) -> int:
    assert re.fullmatch(r"[0-9+()]+", text)
    return sum(int(number) for number in re.findall("[0-9]+", text))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """Random weights: whatever has a form has it because it had to."""
    return LLM(str(tiny), dtype="float32", cache=CacheConfig(num_blocks=512), seed=0)


def compact(llm: LLM) -> dict[int, float]:
    """Bias against blanks, of which random weights are fond."""
    return {llm.tokenizer.encode(blank)[-1]: -100.0 for blank in " \t\r\n"}


def generate(llm: LLM, prompts: Sequence[str], *params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), list(params))
    stats = llm.stats()
    assert stats.blocks_in_use == 0
    return outputs


class TestForms:
    @pytest.mark.parametrize(("name", "form", "holds"), FORMS, ids=[name for name, *_ in FORMS])
    def test_every_text_has_it(self, llm: LLM, name: str, form: Form, holds) -> None:
        params = [
            SamplingParams(
                structured=form, temperature=t, seed=i, max_tokens=200, logit_bias=compact(llm)
            )
            for i, t in enumerate([0.0, 1.0, 2.0])
        ]
        for output in generate(llm, ["hello"] * len(params), *params):
            assert output.finish_reason == "stop", output.stop_reason
            assert holds(output.text), output.text

    @pytest.mark.parametrize("schema", [{}, True, "{}"])
    def test_the_empty_schema_is_any_json(self, llm: LLM, schema: Any) -> None:
        bias = compact(llm) | {llm.tokenizer.encode(c)[-1]: 4.0 for c in '0123456789"'}
        form = Form.json_schema(schema)
        params = [
            SamplingParams(structured=form, seed=i, max_tokens=60, logit_bias=bias)
            for i in range(4)
        ]
        outputs = generate(llm, ["a"] * 4, *params)
        finished = [output for output in outputs if output.finish_reason == "stop"]
        assert finished
        for output in finished:
            json.loads(output.text)

    def test_any_object(self, llm: LLM) -> None:
        bias = compact(llm) | {llm.tokenizer.encode("}")[-1]: 50.0}
        params = SamplingParams(
            structured=Form.json_object(), seed=0, max_tokens=100, logit_bias=bias
        )
        (output,) = generate(llm, ["a"], params)
        assert isinstance(json.loads(output.text), dict)

    def test_samples_of_one_prompt(self, llm: LLM) -> None:
        """Forks go on from a copy of the state, each its own way."""
        params = SamplingParams(
            structured=Form.json_schema(PERSON), n=5, seed=3, max_tokens=200, temperature=1.5,
            logit_bias=compact(llm),
        )  # fmt: skip
        outputs = generate(llm, ["hello"], params)
        assert all(is_person(output.text) for output in outputs)
        assert len({output.text for output in outputs}) > 1

    def test_preempted_ones_go_on_where_they_were(self, tiny: Path, llm: LLM) -> None:
        params = [
            SamplingParams(structured=Form.regex("<([ab]{3}-){12}>"), seed=i, max_tokens=80)
            for i in range(4)
        ]
        prompts = [chr(97 + i) * 20 for i in range(4)]
        small = LLM(
            str(tiny),
            dtype="float32",
            cache=CacheConfig(num_blocks=22, block_size=8, prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=4),
        )
        found = generate(small, prompts, *params)
        assert small.stats().preemptions > 0
        assert all(re.fullmatch("<([ab]{3}-){12}>", output.text) for output in found)
        # A resumed one has its tokens computed in another batch, so only the form is the same; the
        # same text is asked of those that were not preempted.
        wanted = generate(llm, prompts, *params)
        for one, other in zip(found, wanted, strict=True):
            if not one.metrics.preemptions:
                assert one.text == other.text

    def test_it_ends_only_where_the_text_is_complete(self, llm: LLM) -> None:
        brace = llm.tokenizer.encode("}")[-1]
        params = SamplingParams(
            structured=Form.json_schema({"type": "integer", "maximum": 99, "minimum": 10}),
            stop_token_ids=(brace, llm.tokenizer.encode("1")[-1]),
            logit_bias={brace: 100.0, llm.tokenizer.encode("1")[-1]: 90.0},
            max_tokens=20,
        )
        (output,) = generate(llm, ["a"], params)
        assert output.stop_reason == brace
        assert 10 <= int(output.text) <= 99


class TestOnADevice:
    """The runner for a GPU, whose steps overlap: the mask of one needs the token of the last."""

    @pytest.mark.parametrize("overlap", [False, True])
    def test_the_tokens_are_those_of_the_cpu(self, llm: LLM, overlap: bool) -> None:
        forms = [form for _, form, _ in FORMS]
        params = [
            SamplingParams(
                structured=[*forms, None][i % (len(forms) + 1)], n=1 + 2 * (i % 2), seed=i,
                max_tokens=40, logit_bias=compact(llm), min_tokens=i % 3,
            )
            for i in range(12)
        ]  # fmt: skip
        prompts = [[3 + i] * (1 + i) for i in range(12)]
        wanted = llm.generate(prompts, params)
        memory = torch.zeros_like(llm.executor.kv_cache)
        runner = DeviceRunner(
            llm.executor.model, memory, vocab_size=llm.tokenizer.vocab_size, max_num_seqs=7,
            max_model_len=llm.max_model_len, grammars=llm.grammars,
        )  # fmt: skip
        engine = Engine(
            runner, num_blocks=memory.shape[2] - 1, block_size=memory.shape[3],
            vocab_size=llm.tokenizer.vocab_size, max_model_len=llm.max_model_len,
            eos_token_ids=llm.tokenizer.eos_token_ids, token_bytes=llm.tokenizer.token_bytes,
            scheduler=SchedulerConfig(max_num_seqs=7), overlap=overlap,
        )  # fmt: skip
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, each)
        found = {}
        while engine.has_unfinished:
            for output in engine.step():
                found[int(output.request_id), output.index] = output
        outputs = [found[key] for key in sorted(found)]
        for mine, theirs in zip(outputs, wanted, strict=True):
            assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
            assert mine.finish_reason != "error"


class TestCombined:
    def test_with_what_else_is_asked(self, llm: LLM) -> None:
        ids = {c: llm.tokenizer.encode(c)[-1] for c in "abcx"}
        form = Form.regex("[abc]{4,8}")
        params = [
            SamplingParams(structured=form, allowed_token_ids=(ids["a"], ids["x"], 2), seed=0),
            SamplingParams(structured=form, bad_words=("b",), seed=1, logit_bias={ids["b"]: 99.0}),
            SamplingParams(structured=form, min_tokens=7, seed=2, logit_bias={2: 99.0}),
            SamplingParams(structured=form, seed=3, logit_bias={ids["x"]: 100.0, 2: 100.0}),
            SamplingParams(structured=form, seed=4, repetition_penalty=50.0, temperature=0.0),
        ]
        texts = [output.text for output in generate(llm, ["q"] * 5, *params)]
        assert re.fullmatch("a{4,8}", texts[0])
        assert re.fullmatch("[ac]{4,8}", texts[1])
        assert re.fullmatch("[abc]{7,8}", texts[2])
        assert re.fullmatch("[abc]{4}", texts[3])
        assert re.fullmatch("[abc]{4,8}", texts[4])

    @pytest.mark.parametrize(
        "options",
        [
            {"allowed_token_ids": "a"},  # "ab" cannot go on after "a"
            {"min_tokens": 5},  # it is complete after two
        ],
    )
    def test_a_dead_end_ends_that_request_alone(self, llm: LLM, options: dict[str, Any]) -> None:
        if "allowed_token_ids" in options:
            options = {"allowed_token_ids": (llm.tokenizer.encode("a")[-1],)}
        bad = SamplingParams(structured=Form.regex("ab"), **options)
        good = SamplingParams(structured=Form.regex("ab"))
        free = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        outputs = generate(llm, ["x", "y", "z"], bad, good, free)
        assert outputs[0].finish_reason == "error"
        assert "no token to choose" in str(outputs[0].stop_reason)
        assert (outputs[1].text, outputs[1].finish_reason) == ("ab", "stop")
        assert len(outputs[2].token_ids) == 6

    def test_not_with_ignore_eos(self) -> None:
        with pytest.raises(InvalidRequestError, match="ignore_eos"):
            SamplingParams(structured=Form.json_object(), ignore_eos=True)


BAD_FORMS = [
    Form("regex", "[a-z"),
    Form("regex", "(?=a)b"),
    Form("regex", r"\bword\b"),
    Form("regex", r"[^\s\S]"),
    Form("regex", "(" * 3000 + "a" + ")" * 3000),
    Form("grammar", 'start: "a'),
    Form("grammar", 'start: start "a"'),
    Form("grammar", "start: missing"),
    Form("grammar", 'root ::= "a" | missing ::='),
    Form("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    Form("json_schema", '{"type": "foo"}'),
    Form("json_schema", '{"$ref": "#/definitions/x"}'),
    Form("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'),
    Form("json_schema", '{"$ref": "file:///etc/passwd"}'),
    Form("json_schema", '{"$ref": "#"}'),
    Form("json_schema", "false"),
    Form("json_schema", '{"type": "string", "pattern": "(?=a)"}'),
    Form("json_schema", '{"type": "string", "format": "no-such-format"}'),
    Form("json_schema", '{"enum": []}'),
    Form("json_schema", '{"not": {"type": "string"}}'),
]


class TestRefused:
    """Invalid schemas, regular expressions and grammars; and a good one after each."""

    @pytest.mark.parametrize("form", BAD_FORMS, ids=lambda form: f"{form.kind} {form.text[:25]}")
    def test_what_cannot_be(self, llm: LLM, form: Form) -> None:
        before = llm.stats().steps
        with pytest.raises(InvalidRequestError, match="structured") as caught:
            llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured=form)])
        assert len(str(caught.value)) < 400
        assert llm.stats().steps == before  # before any of them starts
        assert not llm.engine.has_unfinished
        good = SamplingParams(structured=Form.choice(["yes", "no"]))
        (output,) = generate(llm, ["a"], good)
        assert output.text in ("yes", "no")

    @pytest.mark.parametrize(
        ("make", "names"),
        [
            (lambda: Form("xml", "a"), "kind"),
            (lambda: Form("regex", ""), "needs a text"),
            (lambda: Form("regex", 3), "string"),
            (lambda: Form("json_object", "a"), "takes no text"),
            (lambda: Form.regex("a" * 9000), "9000 characters"),
            (lambda: Form.grammar("a" * 70_000), "70000 characters"),
            (lambda: Form.json_schema("{"), "not JSON"),
            (lambda: Form.json_schema("[1]"), "object"),
            (lambda: Form.json_schema("null"), "object"),
            (lambda: Form.json_schema({"a": {1, 2}}), "cannot be written"),
            (lambda: Form.json_schema('{"a":' * 100 + "1" + "}" * 100), "64 levels"),
            (lambda: Form.json_schema('{"a":' * 9000 + "1" + "}" * 9000), "64 levels"),
            (lambda: Form.json_schema('{"a":"' + "b" * 200_000 + '"}'), "characters"),
            (lambda: Form.choice([]), "list of 1"),
            (lambda: Form.choice("abc"), "list of strings"),
            (lambda: Form.choice(["a", ""]), "not empty"),
            (lambda: Form.choice(["a", 1]), "string"),
            (lambda: Form.choice(["a"] * 2000), "1024"),
            (lambda: Form.choice(["a" * 70_000]), "characters"),
            (lambda: Form.choice(["\ud800"]), "surrogate"),
            (lambda: Form.regex("\udfff"), "surrogate"),
            (lambda: SamplingParams(structured={"type": "object"}), "StructuredOutput"),
        ],
    )
    def test_limits_of_size_and_depth(self, make: Callable[[], Any], names: str) -> None:
        with pytest.raises(InvalidRequestError, match=names):
            make()


def nested(kind: str, count: int) -> str:
    """Definitions that each name the next one twice: 2^count ways."""
    definitions: dict[str, Any] = {
        f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})


def wide(count: int) -> str:
    options = [
        {"type": "object", "properties": {f"p{i}": {"pattern": f"^.{{0,{i}}}x$"}}}
        for i in range(count)
    ]
    return json.dumps({"anyOf": options})


def product() -> str:
    each = [
        {"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(10)
    ]
    return json.dumps({"type": "object", "allOf": each})


BOMBS = [
    Form("regex", r"(a?){4000}a{4000}"),
    Form("regex", r"((((a{1,100}){1,100}){1,100}){1,100})"),
    Form("regex", r"(.*a.{0,200})|(.*b.{0,300}c)"),
    Form("regex", r"(.*[a-m].{30}|.*[n-z].{31}|.*[0-9].{37}){5}"),
    Form("regex", r".*[01].{60}[01]"),
    Form("regex", r"(\w+\s*)+(\w*\d+)*"),
    Form("json_schema", '{"type": "string", "minLength": 100000000, "maxLength": 1000000000}'),
    Form("json_schema", '{"type": "array", "minItems": 100000, "maxItems": 1000000}'),
    Form("json_schema", nested("allOf", 40)),
    Form("json_schema", nested("anyOf", 40)),
    Form("json_schema", wide(800)),
    Form("json_schema", product()),
    Form("json_schema", json.dumps({"enum": [f"x{i}" for i in range(8000)]})),
    Form("grammar", "start: s\ns: s s | s s s | /a+/ | "),
    Form("grammar", "start: T\nT: /((a|b)*c){1,200}/ & /(.*c){100}/"),
    Form("grammar", "start: T\nT: /(.*a){40}/ & ~/(.*b){40}/"),
    Form("grammar", "start: " + " | ".join(f"r{i}" for i in range(1500)) + "\n"
        + "\n".join(f'r{i}: "k{i}" start?' for i in range(1500))),
]  # fmt: skip


class TestBombs:
    """Schema, regex and grammar bombs. Each is refused, or fails alone, or is served; the work
    for it is counted by the library, so none of them goes on for ever."""

    @pytest.mark.parametrize("form", BOMBS, ids=lambda form: f"{form.kind} {form.text[:25]}")
    def test_it_harms_nobody(self, llm: LLM, form: Form) -> None:
        good = SamplingParams(structured=Form.choice(["yes", "no"]), seed=1)
        bomb = SamplingParams(structured=form, seed=2, max_tokens=30)
        try:
            outputs = generate(llm, ["a", "b"], good, bomb)
        except InvalidRequestError:
            outputs = generate(llm, ["a"], good)
        else:
            assert outputs[1].finish_reason in ("length", "stop", "error")
            assert outputs[1].finish_reason != "error" or outputs[1].stop_reason
        assert outputs[0].text in ("yes", "no")


def ids_of(mask: torch.Tensor) -> set[int]:
    words = mask.numpy().view("uint32")
    return {t for t in range(VOCAB_SIZE) if words[t // 32] >> (t % 32) & 1}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer())


def state(compiler: GrammarCompiler, form: Form, text: str = "", stops=(EOS, 256)) -> GrammarState:
    return compiler.start(form, stops, list(text.encode()))


class TestMasks:
    def test_what_may_follow(self, compiler: GrammarCompiler) -> None:
        form = Form.regex("a[bc]+")
        states = [state(compiler, form, text) for text in ("", "a", "ab")]
        masks = fill_masks(states, VOCAB_SIZE)
        wanted: list[set[int]] = [set(b"a"), set(b"bc"), {*b"bc", EOS, 256}]
        assert [ids_of(mask) for mask in masks] == wanted

    def test_all_tokens_that_end_it_where_it_may_end(self, compiler: GrammarCompiler) -> None:
        form = Form.regex("a[bc]+")
        states = [state(compiler, form, text, (EOS, 256, ord("c"))) for text in ("a", "ab")]
        masks = fill_masks(states, VOCAB_SIZE)
        # "c" as a token would end the text before it is complete.
        assert [ids_of(mask) for mask in masks] == [set(b"b"), {*b"bc", EOS, 256}]

    def test_a_rejected_token_is_the_end_of_that_one(self, compiler: GrammarCompiler) -> None:
        form = Form.regex("a[bc]+")
        states = [state(compiler, form, "ax"), state(compiler, form, "ab")]
        masks = fill_masks(states, VOCAB_SIZE)
        assert ids_of(masks[0]) == set()
        assert states[0].failure
        assert len(states[0].failure) < 400
        assert ids_of(masks[1]) == {*b"bc", EOS, 256}
        states[0].advance(b"a")  # nothing more happens to it
        assert ids_of(fill_masks(states, VOCAB_SIZE)[0]) == set()

    def test_a_copy_goes_its_own_way(self, compiler: GrammarCompiler) -> None:
        first = state(compiler, Form.choice(["abc", "axy"]), "a")
        second = first.fork()
        first.advance(b"b")
        second.advance(b"x")
        masks = fill_masks([first, second], VOCAB_SIZE)
        assert [ids_of(mask) for mask in masks] == [set(b"c"), set(b"y")]

    def test_replayed_is_the_same_as_followed(self, compiler: GrammarCompiler) -> None:
        form, text = Form.json_schema(PERSON), '{"name": "é", "age": 7, "tags": ["a"]}'
        followed = state(compiler, form)
        for i, byte in enumerate(text.encode()):
            followed.advance([byte])
            replayed = compiler.start(form, (EOS,), list(text.encode()[: i + 1]))
            masks = fill_masks([followed, replayed], VOCAB_SIZE)
            assert torch.equal(masks[0], masks[1])
        assert EOS in ids_of(masks[0])

    def test_only_the_rows_that_ask_are_touched(self) -> None:
        logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        masks = torch.zeros(2, 9, dtype=torch.int32)
        masks[0, 0], masks[1, 8], masks[1, 1] = 0b101, 1 << 2, -(2**31)
        masked = logits.clone()
        apply_masks(masked, torch.tensor([3, 1]), masks)
        for i in (0, 2, 4):
            assert torch.equal(masked[i], logits[i])
        for i, allowed in ((3, [0, 2]), (1, [63, 258])):
            assert masked[i].isfinite().nonzero().flatten().tolist() == allowed
            assert torch.equal(masked[i, allowed], logits[i, allowed])

    def test_batch_mates_are_unchanged_bit_for_bit(self, compiler: GrammarCompiler) -> None:
        options = [
            SamplingParams(),
            SamplingParams(structured=Form.regex("a+")),
            SamplingParams(logit_bias={5: 1.0}, repetition_penalty=1.3),
            SamplingParams(structured=Form.json_object(), min_tokens=3),
            SamplingParams(allowed_token_ids=(7, 8)),
        ]
        logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

        def processed(chosen: list[int]) -> torch.Tensor:
            batch = InputBatch(8, 64, 16, compiler)
            admitted = tuple(
                Admission(str(i), (1, 2), 2, options[i], 0, frozenset((EOS,))) for i in chosen
            )
            batch.apply(StepPlan(0, admitted=admitted))
            rows = [batch.rows[str(i)] for i in chosen]
            processor = LogitsProcessor(8, VOCAB_SIZE)
            return processor.apply(logits[chosen], rows, batch.token_ids)

        together = processed([0, 1, 2, 3, 4])
        apart = processed([0, 2, 4])
        assert torch.equal(together[[0, 2, 4]], apart)
        assert torch.equal(together[0], logits[0])

    def test_a_batch_follows_forks_and_tokens(self, compiler: GrammarCompiler) -> None:
        batch = InputBatch(8, 64, 16, compiler)
        params = SamplingParams(structured=Form.choice(["abc", "axy"]))
        new = Admission("s", (1, 2, ord("a")), 2, params, 0, frozenset((EOS,)), (), (1,), 2)
        work = Work("s", 2, 1, (), True)
        plan = StepPlan(0, admitted=(new,), work=(work,), forks=(Fork("t", "s", 1),))
        batch.apply(plan)
        batch.append("s", ord("b"))
        batch.append("t", ord("x"))
        states = [batch.rows[name].rules.grammar for name in "st"]
        assert [ids_of(m) for m in fill_masks(states, VOCAB_SIZE)] == [set(b"c"), set(b"y")]
        batch.append("s", EOS)  # it ends: the grammar is not asked
        assert states[0].failure is None

    def test_the_latest_grammars_are_kept(self, compiler: GrammarCompiler) -> None:
        forms = [Form.choice([f"a{i}"]) for i in range(80)]
        for form in forms:
            compiler.compile(form)
        assert len(compiler._compiled) == 64
        assert forms[-1] in compiler._compiled
        assert forms[0] not in compiler._compiled
        assert ids_of(fill_masks([state(compiler, forms[0], "a")], VOCAB_SIZE)[0]) == set(b"0")


class TestBeforeTheEngine:
    """A form is compiled in a thread: no step waits, and the request can still be aborted."""

    def host(self, compile: Callable[[Form], None]) -> tuple[EngineHost, threading.Event]:
        host = EngineHost(make_engine(ScriptedExecutor("abc"))[0], compile)
        woken = threading.Event()
        host.wake = woken.set
        return host, woken

    def submit(self, host: EngineHost, name: str, form: Form | None) -> None:
        params = SamplingParams(structured=form, max_tokens=2)
        host.handle(Submit(EngineRequest(request_id=name, prompt_token_ids=(1,), sampling=params)))

    def outputs(self, host: EngineHost) -> list[Outputs]:
        found = []
        while host.busy:
            found += [message for message in host.step() if isinstance(message, Outputs)]
        return found

    def test_others_go_on_meanwhile(self) -> None:
        go = threading.Event()
        host, woken = self.host(lambda form: go.wait(60) and None)
        self.submit(host, "slow", Form.json_object())
        assert not host.busy
        assert not host.idle
        self.submit(host, "quick", None)
        found = self.outputs(host)
        assert [name for message in found for name in message.accepted] == ["quick"]
        go.set()
        assert woken.wait(60)
        found = self.outputs(host)
        assert [name for message in found for name in message.accepted] == ["slow"]
        assert host.idle

    def test_refused_with_its_reason(self) -> None:
        def refuse(form: Form) -> None:
            raise InvalidRequestError("structured", "is nonsense")

        host, woken = self.host(refuse)
        self.submit(host, "a", Form.json_object())
        assert woken.wait(60)
        ((name, problem),) = self.outputs(host)[0].refused
        assert name == "a"
        assert str(problem.error()) == "structured: is nonsense"
        assert host.idle

    def test_aborted_meanwhile(self) -> None:
        go, started = threading.Event(), threading.Event()

        def wait(form: Form) -> None:
            started.set()
            go.wait(60)

        host, woken = self.host(wait)
        self.submit(host, "a", Form.json_object())
        assert started.wait(60)
        host.handle(Abort(("a",)))
        assert host.idle
        self.submit(host, "a", None)  # the same id, anew
        go.set()
        assert woken.wait(60)
        found = self.outputs(host)
        assert [name for message in found for name in message.accepted] == ["a"]
        assert host.idle

    def test_twice_the_same_id_and_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_host, "MAX_COMPILING", 2)
        go = threading.Event()
        host, _ = self.host(lambda form: go.wait(60) and None)
        for name in ("a", "a", "b", "c"):
            self.submit(host, name, Form.json_object())
        (message,) = self.outputs(host)
        errors: list[BillfishError] = [problem.error() for _, problem in message.refused]
        assert [name for name, _ in message.refused] == ["a", "c"]
        assert isinstance(errors[0], InvalidRequestError)
        assert isinstance(errors[1], QueueFullError)
        go.set()
