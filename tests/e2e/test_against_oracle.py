"""The whole path, from text to text, against transformers on the same file."""

import json
import os

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig
from billfish.kernels.paged_attention import AttentionMetadata
from tests.e2e.prompts import PROMPTS

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@torch.inference_mode()
def logits_of(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Float32 logits [T, vocab_size] at every position, through shuffled blocks full of NaN."""
    runner = llm.executor
    cache = torch.full_like(runner.kv_cache[:, :, :64], float("nan"))
    block_size = cache.shape[3]
    count = -(-len(token_ids) // block_size)
    blocks = torch.randperm(63, generator=torch.Generator().manual_seed(count))[:count] + 1
    metadata = AttentionMetadata.build(
        blocks[None].int(), [len(token_ids)], [len(token_ids)], block_size
    )
    hidden = runner.model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache, metadata)
    return runner.model.logits(hidden)


@torch.inference_mode()
def oracle_logits(oracle, token_ids: list[int]) -> torch.Tensor:
    return oracle(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("prompt", PROMPTS[::4])
def test_prompt_logits_in_float32(llm: LLM, oracle, prompt: str) -> None:
    token_ids = llm.tokenizer.encode(prompt)
    ours, theirs = logits_of(llm, token_ids), oracle_logits(oracle, token_ids)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    # And no single one is far off, which a norm could hide.
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_greedy_continuations_are_the_oracles(llm: LLM, oracle, record_property) -> None:
    """Fed what we generated, the oracle must choose each token as we did.

    That is the same as generating alike, by induction, and costs it one pass. Where it does not,
    its first two candidates must be within 1e-3, which rounding may turn either way.
    """
    outputs = llm.generate(list(PROMPTS), GREEDY)
    near_ties = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.token_ids) == 64
        prompt_ids = llm.tokenizer.encode(prompt)
        logits = oracle_logits(oracle, [*prompt_ids, *output.token_ids])
        for position, token_id in enumerate(output.token_ids, len(prompt_ids) - 1):
            best = int(logits[position].argmax())
            if best != token_id:
                gap = float(logits[position, best] - logits[position, token_id])
                near_ties.append((prompt, position, gap))
    record_property("near_ties", near_ties)
    print(f"{len(near_ties)} of {64 * len(PROMPTS)} tokens differ from the oracle's: {near_ties}")
    assert all(gap < 1e-3 for _, _, gap in near_ties), near_ties


def test_written_as_safetensors_it_gives_the_same_tokens(llm: LLM, oracle, tmp_path) -> None:
    """The same model, every INT4 weight written out in float32, with the tokenizer that
    transformers makes of the GGUF file."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    tensors = {k: v.contiguous() for k, v in oracle.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    config = oracle.config.to_dict()
    config.pop("quantization_config")  # which says that it was a GGUF file
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    source = llm.config.model
    tokenizer = AutoTokenizer.from_pretrained(
        os.path.dirname(source), gguf_file=os.path.basename(source)
    )
    tokenizer.save_pretrained(tmp_path)
    dense = LLM(str(tmp_path), dtype="float32", cache=CacheConfig(num_blocks=256))
    prompts = list(PROMPTS[::16])
    for prompt in PROMPTS:
        assert dense.tokenizer.encode(prompt) == llm.tokenizer.encode(prompt)
    assert dense.num_int4_layers == 0
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(prompts, greedy)]
    assert [output.token_ids for output in dense.generate(prompts, greedy)] == expected


def test_bfloat16_stays_close(llm_bf16: LLM, oracle, record_property) -> None:
    """States what bfloat16 costs: same next token, and difference of log-probabilities.

    Both models read the oracle's text, so that one early difference does not spoil the rest.
    Scales, activations and KV are rounded to 8 significant bits, a relative error of up to 2^-8,
    in each of 30 layers.
    """
    agree, total, differences = 0, 0, []
    for prompt in PROMPTS:
        prompt_ids = llm_bf16.tokenizer.encode(prompt)
        text_ids = oracle.generate(torch.tensor([prompt_ids]), max_new_tokens=16, do_sample=False)[
            0
        ].tolist()
        theirs = oracle_logits(oracle, text_ids)[len(prompt_ids) - 1 : -1]
        ours = logits_of(llm_bf16, text_ids)[len(prompt_ids) - 1 : -1]
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total += len(theirs)
        chosen = torch.tensor(text_ids[len(prompt_ids) :])[:, None]
        gap = ours.log_softmax(-1).gather(1, chosen) - theirs.log_softmax(-1).gather(1, chosen)
        differences.append(gap.abs().flatten())
    difference = torch.cat(differences)
    mean, worst = float(difference.mean()), float(difference.max())
    print(f"bfloat16: {agree}/{total} same next token, log-probability off by {mean:.4f} on "
          f"average, {worst:.4f} at most")  # fmt: skip
    record_property("agreement", agree / total)
    record_property("logprob_mean_difference", mean)
    record_property("logprob_max_difference", worst)
    assert agree / total >= 0.95
    assert mean <= 0.05
    assert worst <= 0.5
