"""Runs the engine's plans on a model: plan to tensors, model, logits, tokens."""

import torch
from torch import Tensor

from billfish.engine.plan import BlockPairs, StepPlan, StepResult
from billfish.errors import ConfigError
from billfish.kernels import paged_attention
from billfish.models.llama import LlamaForCausalLM
from billfish.worker.input_batch import InputBatch
from billfish.worker.sampler import NO_TOKEN, sample


class ModelRunner:
    """The executor of one model on one device; see `billfish.engine.plan.Executor`.

    kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]. host_cache: the same
    in host memory, for blocks that are swapped out; None where none ever are. vocab_size: tokens
    that may be chosen; a model's own vocabulary may be longer, padded to a round number.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: Tensor,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        host_cache: Tensor | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        self.vocab_size = vocab_size
        self.batch = InputBatch(max_num_seqs, max_model_len, block_size=kv_cache.shape[3])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._move_blocks(plan)
        self.batch.apply(plan)
        if not plan.work:
            return StepResult(plan.step)
        inputs = self.batch.build(plan)
        hidden = self.model(inputs.token_ids, inputs.positions, self.kv_cache, inputs.metadata)
        if not inputs.sampled:
            return StepResult(plan.step)
        logits = self.model.logits(hidden[inputs.sample_index])[:, : self.vocab_size]
        rows = [self.batch.rows[request_id] for request_id in inputs.sampled]
        token_ids = sample(
            logits,
            [row.sampling for row in rows],
            [row.seed for row in rows],
            [row.num_tokens for row in rows],
        )
        result = StepResult(plan.step)
        for request_id, token_id in zip(inputs.sampled, token_ids, strict=True):
            if token_id == NO_TOKEN:
                result.failed[request_id] = "the model's logits are not finite"
            else:
                self.batch.append(request_id, token_id)
                result.token_ids[request_id] = token_id
        return result

    def _move_blocks(self, plan: StepPlan) -> None:
        """All swaps and copies of the plan, one call a kind, in the plan's order."""
        if plan.swap_out:
            source, target = _block_ids(plan.swap_out)
            paged_attention.swap_blocks(self.kv_cache, self._host(), source, target)
        if plan.copies:
            device = self.kv_cache.device
            source, target = (ids.to(device) for ids in _block_ids(plan.copies))
            paged_attention.copy_blocks(self.kv_cache, source, target)
        if plan.swap_in:
            source, target = _block_ids(plan.swap_in)
            paged_attention.swap_blocks(self._host(), self.kv_cache, source, target)

    def _host(self) -> Tensor:
        if self.host_cache is None:
            raise ConfigError("a plan swaps blocks, but there is no host memory for them")
        return self.host_cache


def _block_ids(pairs: BlockPairs) -> tuple[Tensor, Tensor]:
    """Sources and destinations, int64 [P] each."""
    source, target = torch.tensor(pairs).unbind(1)
    return source.contiguous(), target.contiguous()
