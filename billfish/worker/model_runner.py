"""Runs the engine's plans on a model: plan to tensors, model, logits, tokens."""

import torch
from torch import Tensor

from billfish.engine.plan import NOT_FINITE, StepPlan, StepResult
from billfish.errors import ConfigError
from billfish.models.decoder import CausalLM
from billfish.worker.compiled_decode import CompiledDecode
from billfish.worker.grammar import DEAD_END, GrammarCompiler
from billfish.worker.input_batch import InputBatch, Row, StepInputs
from billfish.worker.kv_cache import move_blocks
from billfish.worker.logits_processor import LogitsProcessor
from billfish.worker.logprobs import prompt_logprobs, token_logprobs
from billfish.worker.sampler import NO_TOKEN, sample

NOTHING_LEFT = "allowed_token_ids, bad_words and min_tokens leave no token to choose"


class ModelRunner:
    """The executor of one model on one device; see `billfish.engine.plan.Executor`.

    kv_cache: [num_layers, 2, 1 + num_blocks, block_size, num_kv_heads, head_dim]. host_cache: the
    same in host memory, for blocks that are swapped out; None where none ever are. vocab_size:
    tokens that may be chosen; a model's own vocabulary may be longer, padded to a round number.
    grammars: for requests that ask for a form of their text; None where there are none. compiled:
    the same model and cache, for the steps that it takes.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: Tensor,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        host_cache: Tensor | None = None,
        grammars: GrammarCompiler | None = None,
        compiled: CompiledDecode | None = None,
    ) -> None:
        self.model = model
        self.compiled = compiled
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        self.vocab_size = vocab_size
        self.processor = LogitsProcessor(max_num_seqs, vocab_size)
        self.batch = InputBatch(max_num_seqs, max_model_len, kv_cache.shape[3], grammars)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        move_blocks(plan, self.kv_cache, self.host_cache)
        self.batch.apply(plan)
        if not plan.work:
            return StepResult(plan.step)
        inputs, compiled = self.batch.build(plan), self.compiled
        if compiled is None or not compiled.takes(inputs.positions, inputs.metadata):
            return self._run(plan, inputs, self.model)
        with compiled.alone():
            return self._run(plan, inputs, compiled)

    def _run(
        self, plan: StepPlan, inputs: StepInputs, model: CausalLM | CompiledDecode
    ) -> StepResult:
        hidden = model(inputs.token_ids, inputs.positions, self.kv_cache, inputs.metadata)
        result = StepResult(plan.step)
        work = [(item, self.batch.rows[item.request_id]) for item in plan.work]
        if any(row.sampling.prompt_logprobs is not None for _, row in work):
            found = prompt_logprobs(self.model, self.vocab_size, hidden, work, self.batch.token_ids)
            result.prompt_logprobs.update(found)
        if inputs.sampled:
            logits = model.logits(hidden[inputs.sample_index])[:, : self.vocab_size].float()
            self._sample(logits, inputs.sampled, result)
        return result

    def sleep(self) -> None:
        raise ConfigError("sleep gives the memory of a GPU back, and this model runs on a CPU")

    def wake(self) -> None:
        """Never asleep."""

    def _sample(self, logits: Tensor, request_ids: tuple[str, ...], result: StepResult) -> None:
        """Choose the next token of each request from the model's logits [S, vocab_size]."""
        rows = [self.batch.rows[request_id] for request_id in request_ids]
        token_ids = sample(
            self.processor.apply(logits, rows, self.batch.token_ids),
            [row.sampling for row in rows],
            [row.seed for row in rows],
            [row.num_tokens for row in rows],
        )
        asking: list[int] = []
        for i, (request_id, token_id) in enumerate(zip(request_ids, token_ids, strict=True)):
            if token_id == NO_TOKEN:
                broken = not logits[i].amax().isfinite()
                result.failed[request_id] = NOT_FINITE if broken else why_nothing_left(rows[i])
                continue
            self.batch.append(request_id, token_id)
            result.token_ids[request_id] = token_id
            if rows[i].sampling.logprobs is not None:
                asking.append(i)
        if asking:
            tops = [rows[i].sampling.logprobs or 0 for i in asking]
            found = token_logprobs(logits[asking], [token_ids[i] for i in asking], tops)
            result.logprobs.update(zip((request_ids[i] for i in asking), found, strict=True))


def why_nothing_left(row: Row) -> str:
    """Why no token can be chosen where the model's logits are numbers."""
    grammar = row.rules.grammar if row.rules else None
    if grammar is None:
        return NOTHING_LEFT
    return grammar.failure or f"{DEAD_END}, together with the request's other options"
