"""The bytes between the server and the engine: any pieces in, whole messages out, or an error."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.config import CacheConfig, EngineConfig, SchedulerConfig
from billfish.engine.logprobs import TokenLogprobs
from billfish.errors import (
    BillfishError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineUnavailableError,
    InvalidRequestError,
    ProtocolError,
    QueueFullError,
)
from billfish.sampling_params import SamplingParams
from billfish.server import engine_process
from billfish.server.engine_host import tokens_per_second
from billfish.server.fake_engine import ScriptedExecutor, make_engine, make_host
from billfish.server.frames import MAX_FRAME, FrameReader, frame
from billfish.server.messages import (
    Abort,
    EngineOutput,
    EngineRequest,
    Launch,
    Outputs,
    Problem,
    StepRecord,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from billfish.server.streams import merge
from billfish.structured_output import StructuredOutput


class TestFrames:
    @settings(max_examples=100)
    @given(st.lists(st.binary(max_size=300), max_size=8), st.randoms(use_true_random=False))
    def test_any_cut_gives_the_same_messages(self, messages, random) -> None:
        data = b"".join(map(frame, messages))
        reader, found = FrameReader(), []
        while data:
            size = random.randint(1, 40)
            found += reader.feed(data[:size])
            data = data[size:]
        assert found == messages
        assert not reader.partial

    def test_a_length_too_large_is_an_error_before_anything_is_kept(self) -> None:
        reader = FrameReader()
        with pytest.raises(ProtocolError, match=str(MAX_FRAME + 1)):
            reader.feed((MAX_FRAME + 1).to_bytes(4, "big"))

    def test_what_is_cut_off_is_told(self) -> None:
        reader = FrameReader()
        assert reader.feed(frame(b"abc")[:-1]) == []
        assert reader.partial

    def test_a_message_too_large_is_not_sent(self) -> None:
        with pytest.raises(ProtocolError):
            frame(bytes(MAX_FRAME + 1))


class TestMessages:
    def test_every_sampling_option_arrives(self) -> None:
        params = SamplingParams(
            n=3, max_tokens=None, min_tokens=0, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
            presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.1,
            logit_bias={5: 1.5, 0: -100.0}, allowed_token_ids=(1, 2), bad_words=("no",),
            logprobs=3, prompt_logprobs=0, seed=2**64 - 1, stop=("a", "é"),
            include_stop_str_in_output=True, stop_token_ids=(9,), skip_special_tokens=False,
            shown_special_token_ids=(7,),
            structured=StructuredOutput.choice(["yes", "no"]),
        )  # fmt: skip
        # What is added to the options later must be named here, and differ from its default.
        same = {
            f.name for f in dataclasses.fields(params)
            if getattr(params, f.name) == getattr(SamplingParams(), f.name)
        }  # fmt: skip
        assert same == {"min_tokens", "ignore_eos"}
        request = EngineRequest(
            request_id="a", prompt_token_ids=(1, 2), sampling=params, priority=-3, cache_salt="s",
            bad_word_ids=((1,), (2, 3)),
        )  # fmt: skip
        found = decode_to_engine(encode(Submit(request)))
        assert isinstance(found, Submit)
        assert found.request == request

    def test_every_setting_arrives(self) -> None:
        config = EngineConfig(
            model="m",
            dtype="float32",
            cache=CacheConfig(block_size=32, num_blocks=7, prefix_caching=False, swap_blocks=3),
            scheduler=SchedulerConfig(preemption="swap", swap_cost=0.5, max_model_len=100),
        )
        launch = Launch(config=config, seed=3)
        assert decode_to_engine(encode(launch)) == launch

    def test_an_option_out_of_range_is_no_message(self) -> None:
        request = EngineRequest(
            request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(top_k=77)
        )
        data = encode(Submit(request)).replace(b"\xa5top_k\x4d", b"\xa5top_k\xff")
        with pytest.raises(ProtocolError, match="top_k"):
            decode_to_engine(data)

    @pytest.mark.parametrize(
        "error",
        [
            InvalidRequestError("stop", "is wrong"),
            QueueFullError("later"),
            CapacityError("16 GB"),
            ConfigError("a setting"),
            CheckpointError("file", "is damaged"),
            EngineUnavailableError("draining", "it ends"),
            BillfishError("something"),
        ],
    )
    def test_errors_keep_their_type_and_words(self, error: BillfishError) -> None:
        found = Problem.of(error).error()
        assert type(found) is type(error)
        assert str(found) == str(error)

    def test_errors_of_others_tell_their_type_alone(self) -> None:
        found = Problem.of(OSError("/secret/path at 0x7f0012345678")).error()
        assert str(found) == "internal error: OSError"

    @pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
    def test_what_no_utf8_can_hold(self, text: str) -> None:
        with pytest.raises(ProtocolError):
            encode(Abort((text,)))

    @settings(max_examples=200)
    @given(st.binary(max_size=200))
    def test_random_bytes_are_refused(self, data: bytes) -> None:
        for decode in (decode_to_engine, decode_from_engine):
            with pytest.raises(ProtocolError):
                decode(data)

    @settings(max_examples=200)
    @given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
    def test_damaged_messages_are_refused_or_are_messages(self, place, byte, cut) -> None:
        request = EngineRequest(
            request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(stop=("a",))
        )
        data = bytearray(encode(Submit(request)))
        place %= len(data)
        if cut:
            del data[place:]
        else:
            data[place] = byte
        try:
            found = decode_to_engine(bytes(data))
        except ProtocolError:
            return
        assert isinstance(found, Submit)
        assert isinstance(found.request.sampling, SamplingParams)


class TestMerge:
    @settings(max_examples=100)
    @given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), min_size=1, max_size=30))
    def test_nothing_is_lost(self, parts) -> None:
        counts = dict.fromkeys(range(3), 0)
        outputs = []
        for index, text in parts:
            counts[index] += 1
            logprobs = [TokenLogprobs(counts[index], -0.5, 1, ())]
            outputs.append(
                EngineOutput("a", index, text, [counts[index]], counts[index], logprobs=logprobs)
            )
        merged = merge(outputs)
        assert len(merged) == len({index for index, _ in parts})
        for output in merged:
            texts = [text for index, text in parts if index == output.index]
            assert output.text == "".join(texts)
            assert output.token_ids == list(range(1, len(texts) + 1))
            assert output.completion_tokens == len(texts)
            assert output.logprobs is not None
            assert [item.token_id for item in output.logprobs] == output.token_ids

    def test_a_step_is_one_message(self) -> None:
        outputs = [EngineOutput(str(i), 0, " a", [7], 1) for i in range(64)]
        data = encode(Outputs(outputs, [], [], 64, 0))
        assert len(data) < 64 * 40
        found = decode_from_engine(data)
        assert isinstance(found, Outputs)
        assert [msgspec.structs.asdict(o) for o in found.outputs] == [
            msgspec.structs.asdict(o) for o in outputs
        ]

    def test_a_step_too_large_for_one_message_is_several(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_process, "MAX_FRAME", 1000)
        sent: list[Outputs] = []

        class Wire:
            congested = False

            def wake(self) -> None: ...

            def send(self, data: bytes) -> None:
                assert len(data) <= 1000
                message = decode_from_engine(data)
                assert isinstance(message, Outputs)
                sent.append(message)

        host = make_host(make_engine(ScriptedExecutor())[0])
        loop = engine_process.EngineLoop(Wire(), host, 1.0)  # type: ignore[arg-type]
        outputs = [EngineOutput(str(i), 0, "x" * 50, [7], 1) for i in range(64)]
        loop._send(Outputs(outputs, ["new"], [("bad", Problem("capacity", "why"))], 3, 4))
        assert len(sent) > 4
        found = [output.request_id for message in sent for output in message.outputs]
        assert found == [str(i) for i in range(64)]
        assert [name for message in sent for name in message.accepted] == ["new"]
        assert [name for message in sent for name, _ in message.refused] == ["bad"]


def test_tokens_per_second_are_those_of_now() -> None:
    def step(ended: float, tokens: int) -> StepRecord:
        return StepRecord(0, ended, 0.5, 0, 0, tokens, 1, 1, 0, 1)

    assert tokens_per_second([], 100.0) == 0.0
    assert tokens_per_second([step(80.0, 9)], 100.0) == 0.0  # it has been idle since
    assert tokens_per_second([step(99.5, 10), step(100.0, 20)], 100.0) == pytest.approx(30.0)
    many = [step(90.0 + i / 2, 10) for i in range(21)]
    assert tokens_per_second(many, 100.0) == pytest.approx(20.0)
