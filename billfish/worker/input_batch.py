"""What the worker remembers of each request, and the tensors of a step made from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.engine.plan import NULL_BLOCK, Admission, StepPlan, Work
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.sampling_params import SamplingParams
from billfish.worker.logits_processor import LogitsRules


@dataclass(slots=True)
class Row:
    """A request's place in the batch: its row in the token table and in the block table.

    resumed: it came with generated tokens, after a preemption. rules: what it asks of its logits.
    """

    index: int
    sampling: SamplingParams
    seed: int
    num_tokens: int
    num_prompt_tokens: int
    resumed: bool
    rules: LogitsRules | None
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors. T tokens, R requests, S of them sampled.

    token_ids, positions: int64 [T]. sample_index: int64 [S], which of the T tokens are sampled
    from; sampled: the requests, in the same order.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sample_index: Tensor
    sampled: tuple[str, ...]


class InputBatch:
    """Token ids and block tables of all admitted requests, kept from step to step."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_ids = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int64)
        self.block_table = torch.full((max_num_seqs, max_blocks), NULL_BLOCK, dtype=torch.int32)
        self.rows: dict[str, Row] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def apply(self, plan: StepPlan) -> None:
        """Forgets the released requests, learns the admitted ones, extends the block tables."""
        for request_id in plan.released:
            # A plan that failed half way may not have admitted what is now released.
            if row := self.rows.pop(request_id, None):
                self._free_rows.append(row.index)
        for admission in plan.admitted:
            self._admit(admission)
        for work in plan.work:
            row = self.rows[work.request_id]
            if work.new_block_ids:
                end = row.num_blocks + len(work.new_block_ids)
                new = torch.tensor(work.new_block_ids, dtype=torch.int32)
                self.block_table[row.index, row.num_blocks : end] = new
                row.num_blocks = end

    def append(self, request_id: str, token_id: int) -> None:
        """Adds a sampled token. At the very end of the context there is no place, nor a need."""
        row = self.rows[request_id]
        if row.num_tokens < self.token_ids.shape[1]:
            self.token_ids[row.index, row.num_tokens] = token_id
        row.num_tokens += 1

    def build(self, work: tuple[Work, ...]) -> StepInputs:
        """The tensors of a step; `work` must not be empty."""
        rows = [self.rows[item.request_id] for item in work]
        row_index = torch.tensor([row.index for row in rows])
        query_lens = torch.tensor([item.num_tokens for item in work])
        starts = torch.tensor([item.start for item in work])
        seq_lens = starts + query_lens

        ends = query_lens.cumsum(0)
        # Position of token t of the step: its request's start plus its place within the request.
        positions = torch.arange(int(ends[-1])) + (starts - ends + query_lens).repeat_interleave(
            query_lens
        )
        token_ids = self.token_ids[row_index.repeat_interleave(query_lens), positions]
        longest = -(-int(seq_lens.max()) // self.block_size)
        metadata = AttentionMetadata.build(
            self.block_table[row_index, :longest], seq_lens, query_lens, self.block_size
        )
        samples = [i for i, item in enumerate(work) if item.samples]
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            metadata=metadata,
            sample_index=ends[samples] - 1,
            sampled=tuple(work[i].request_id for i in samples),
        )

    def _admit(self, admission: Admission) -> None:
        index = self._free_rows.pop()
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64)
        self.token_ids[index, : len(tokens)] = tokens
        self.rows[admission.request_id] = Row(
            index,
            admission.sampling,
            admission.seed,
            num_tokens=len(tokens),
            num_prompt_tokens=admission.num_prompt_tokens,
            resumed=len(tokens) > admission.num_prompt_tokens,
            rules=LogitsRules.of(admission),
        )
