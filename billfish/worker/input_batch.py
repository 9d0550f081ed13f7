"""What the worker remembers of each request, and the tensors of a step made from it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from billfish.engine.plan import NULL_BLOCK, Admission, Fork, StepPlan
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.kernels.paged_attention.metadata import PADDING_SLOT
from billfish.sampling_params import SamplingParams
from billfish.worker.grammar import GrammarCompiler
from billfish.worker.logits_processor import LogitsRules


@dataclass(slots=True)
class Row:
    """A sequence's place in the batch: its row in the token table and in the block table.

    resumed: it came with generated tokens, after a preemption. rules: what it asks of its logits.
    num_found_tokens: tokens whose KV was there when it was admitted.
    """

    index: int
    sampling: SamplingParams
    seed: int
    num_tokens: int
    num_prompt_tokens: int
    resumed: bool
    rules: LogitsRules | None
    num_blocks: int = 0
    num_found_tokens: int = 0

    @classmethod
    def admitted(cls, admission: Admission, index: int, rules: LogitsRules | None) -> "Row":
        """Of a new sequence; its blocks are to be added."""
        num_tokens, num_prompt_tokens = len(admission.token_ids), admission.num_prompt_tokens
        return cls(
            index,
            admission.sampling,
            admission.seed,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            resumed=num_tokens > num_prompt_tokens,
            rules=rules,
            num_found_tokens=admission.num_computed_tokens,
        )

    def forked(self, fork: Fork, index: int) -> "Row":
        """Of a sample that begins as a copy of this one."""
        rules = self.rules.fork() if self.rules else None
        return replace(self, index=index, seed=fork.seed, rules=rules)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tensors. T tokens, R sequences, S tokens sampled.

    token_ids, positions: int64 [T]. sample_index: int64 [S], which of the T tokens are sampled
    from; sampled: the sequences, in the same order. Forks repeat the place of their source.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sample_index: Tensor
    sampled: tuple[str, ...]


class InputBatch:
    """Token ids and block tables of all admitted sequences, kept from step to step."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.grammars = grammars
        self.token_ids = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int64)
        self.block_table = torch.full((max_num_seqs, max_blocks), NULL_BLOCK, dtype=torch.int32)
        self.rows: dict[str, Row] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def apply(self, plan: StepPlan) -> None:
        """Forgets what is released, learns what is admitted and forked, extends block tables."""
        for request_id in plan.released:
            # A plan that failed half way may not have admitted what is now released.
            if row := self.rows.pop(request_id, None):
                self._free_rows.append(row.index)
        for admission in plan.admitted:
            self._admit(admission)
        for work in plan.work:
            if work.new_block_ids:
                row = self.rows[work.request_id]
                row.num_blocks -= work.replaces_last
                self._add_blocks(row, work.new_block_ids)
        for fork in plan.forks:
            self._fork(fork)

    def append(self, request_id: str, token_id: int) -> None:
        """Adds a sampled token. At the very end of the context there is no place, nor a need."""
        row = self.rows[request_id]
        if row.num_tokens < self.token_ids.shape[1]:
            self.token_ids[row.index, row.num_tokens] = token_id
        row.num_tokens += 1
        grammar = row.rules.grammar if row.rules else None
        if grammar is not None and token_id not in grammar.stop_ids:
            grammar.advance((token_id,))

    def build(self, plan: StepPlan) -> StepInputs:
        """The tensors of a step; its work must not be empty."""
        work = plan.work
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
        found = torch.tensor([row.num_found_tokens for row in rows])
        if bool((starts < found).any()):  # the KV of these tokens is there, and stays as it is
            known = positions < found.repeat_interleave(query_lens)
            slots = metadata.slot_mapping.masked_fill(known, PADDING_SLOT)
            metadata = replace(metadata, slot_mapping=slots)
        places = {item.request_id: i for i, item in enumerate(work) if item.samples}
        places |= {fork.request_id: places[fork.source] for fork in plan.forks}
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            metadata=metadata,
            sample_index=ends[list(places.values())] - 1,
            sampled=tuple(places),
        )

    def _admit(self, admission: Admission) -> None:
        rules = LogitsRules.of(admission, self.grammars)  # before a row is taken: that may fail
        index = self._free_rows.pop()
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64)
        self.token_ids[index, : len(tokens)] = tokens
        row = Row.admitted(admission, index, rules)
        self._add_blocks(row, admission.block_ids)
        self.rows[admission.request_id] = row

    def _fork(self, fork: Fork) -> None:
        source, index = self.rows[fork.source], self._free_rows.pop()
        self.token_ids[index] = self.token_ids[source.index]
        self.block_table[index] = self.block_table[source.index]
        self.rows[fork.request_id] = source.forked(fork, index)

    def _add_blocks(self, row: Row, block_ids: tuple[int, ...]) -> None:
        end = row.num_blocks + len(block_ids)
        self.block_table[row.index, row.num_blocks : end] = torch.tensor(
            block_ids, dtype=torch.int32
        )
        row.num_blocks = end
