"""Token ids, block tables and sampling options of all admitted sequences, kept on a device.

The counterpart of `InputBatch` where the device has memory of its own. Plans bring only what is
new, and only that is sent; tokens that the device samples stay there.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from billfish.engine.plan import Admission, Fork, StepPlan, Work
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.worker import step_inputs
from billfish.worker.grammar import GrammarCompiler
from billfish.worker.host_copies import to_device
from billfish.worker.input_batch import Row
from billfish.worker.logits_processor import LogitsRules
from billfish.worker.step_inputs import NO_BLOCK, Header, StepInputs


@dataclass(frozen=True, slots=True)
class Step:
    """A plan's work as the device will see it. R requests, T new tokens, S sequences sampled.

    longest: most new tokens of a request. longest_kv: most KV tokens of one. sampled: ids of the
    sequences that get a token, and rows of what they are; in_order: they are all R requests, each
    sampled once, in the order of the work.
    """

    work: tuple[tuple[Work, Row], ...]
    num_tokens: int
    longest: int
    longest_kv: int
    sampled: tuple[tuple[str, Row], ...]
    in_order: bool

    @property
    def num_requests(self) -> int:
        return len(self.work)

    @property
    def decodes(self) -> bool:
        """Whether each request has one new token."""
        return self.longest == 1

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits of prompt tokens are asked for."""
        return any(row.sampling.prompt_logprobs is not None for _, row in self.work)


class DeviceBatch:
    """Tables of max_num_seqs rows of max_model_len tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.block_size = block_size
        self.grammars = grammars
        self.device = device
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self._num_tokens = max_num_seqs * max_model_len
        self._tables = torch.zeros(
            self._num_tokens + max_num_seqs * self.max_blocks, dtype=torch.int32, device=device
        )
        self.token_table = self._tables[: self._num_tokens].view(max_num_seqs, max_model_len)
        self.block_table = self._tables[self._num_tokens :].view(max_num_seqs, self.max_blocks)
        self.header = Header(max_num_seqs, device)
        self.rows: dict[str, Row] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def apply(self, plan: StepPlan) -> Step | None:
        """Learn what the plan says, and send it. None where it has no work.

        After this come `fill` or `mixed_inputs`, then the model, then `copy_forks`.
        """
        for request_id in plan.released:
            # A plan that failed half way may not have admitted what is now released.
            if row := self.rows.pop(request_id, None):
                self._free_rows.append(row.index)
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for admission in plan.admitted:
            self._admit(admission, places, values)
        one_each = all(item.num_tokens == 1 for item in plan.work)
        new_blocks = [NO_BLOCK] * len(plan.work)
        rows = [self.rows[item.request_id] for item in plan.work]
        for i, (item, row) in enumerate(zip(plan.work, rows, strict=True)):
            if item.new_block_ids:
                row.num_blocks -= item.replaces_last
                if not one_each:
                    self._place_blocks(row, item.new_block_ids, places, values)
                new_blocks[i] = item.new_block_ids[-1]
                row.num_blocks += len(item.new_block_ids)
            row.num_tokens = item.start + item.num_tokens
        if places:
            self._write(np.concatenate(places), np.concatenate(values))
        if not plan.work:
            return None
        return self._send(plan, rows, new_blocks if one_each else [])

    def _write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Queue the writing of values into the tables; of two for one place the last counts."""
        places, first = np.unique(places[::-1], return_index=True)
        both = torch.from_numpy(np.stack([places, values[::-1][first]]))
        where, what = to_device(both, self.device)
        self._tables.index_copy_(0, where, what.int())

    def _send(self, plan: StepPlan, rows: list[Row], new_blocks: list[int]) -> Step:
        work = plan.work
        indices, seq_lens = [row.index for row in rows], [row.num_tokens for row in rows]
        lengths = [item.num_tokens for item in work]
        starts = [0, *accumulate(lengths)]
        sampling = [i for i, item in enumerate(work) if item.samples]
        sampled = [(work[i].request_id, rows[i]) for i in sampling]
        in_order = len(sampled) == len(work) and not plan.forks
        if plan.forks:
            place = {work[i].request_id: i for i in sampling}
            sampling += [place[fork.source] for fork in plan.forks]
            sampled += [(fork.request_id, self._learn_fork(fork)) for fork in plan.forks]
        self.header.send(
            {
                "rows": indices,
                "seq_lens": seq_lens,
                "found": [row.num_found_tokens for row in rows],
                "new_blocks": new_blocks,
                "query_start": starts,
                "sample_index": [starts[i + 1] - 1 for i in sampling],
                "sample_rows": indices if in_order else [row.index for _, row in sampled],
                "sample_positions": seq_lens if in_order else [seq_lens[i] for i in sampling],
            }
        )
        both = tuple(zip(work, rows, strict=True))
        return Step(both, starts[-1], max(lengths), max(seq_lens), tuple(sampled), in_order)

    def fill(self, query_start: Tensor, out: StepInputs, longest: int) -> None:
        """Queue what fills the inputs of the last step that was sent."""
        step_inputs.make(
            self.header, query_start, self.token_table, self.block_table, self.block_size, out,
            longest,
        )  # fmt: skip

    def mixed_inputs(self, step: Step) -> tuple[StepInputs, AttentionMetadata]:
        """The inputs of a step of any kind, in memory of their own."""
        count = step.num_requests
        out = step_inputs.allocate(step.num_tokens, count, self.max_blocks, self.device)
        query_start = self.header.query_start[: count + 1]
        self.fill(query_start, out, step.longest)
        seq_lens = self.header.seq_lens[:count]
        metadata = AttentionMetadata(
            out.block_table, seq_lens, query_start, out.slots, step.longest, step.longest_kv
        )
        return out, metadata

    def copy_forks(self, plan: StepPlan) -> None:
        """Queue the copies of the rows that the plan forks: after its blocks are in the tables."""
        if not plan.forks:
            return
        pairs = torch.tensor(
            [[self.rows[f.source].index, self.rows[f.request_id].index] for f in plan.forks]
        )
        source, target = to_device(pairs.T.contiguous(), self.device)
        for table in (self.token_table, self.block_table):
            table.index_copy_(0, target, table.index_select(0, source))

    def _admit(
        self, admission: Admission, places: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        rules = LogitsRules.of(admission, self.grammars)  # before a row is taken: that may fail
        index = self._free_rows.pop()
        count = len(admission.token_ids)
        row = Row.admitted(admission, index, rules)
        start = index * self.max_model_len
        places.append(np.arange(start, start + count))
        values.append(np.array(admission.token_ids, dtype=np.int64))
        if admission.block_ids:
            self._place_blocks(row, admission.block_ids, places, values)
            row.num_blocks = len(admission.block_ids)
        self.rows[admission.request_id] = row
        self._set_sampling(row)

    def _learn_fork(self, fork: Fork) -> Row:
        source, index = self.rows[fork.source], self._free_rows.pop()
        row = source.forked(fork, index)
        self.rows[fork.request_id] = row
        self._set_sampling(row)
        return row

    def _set_sampling(self, row: Row) -> None:
        params, seed = row.sampling, row.seed % 2**64
        numbers = (params.temperature, params.top_p, params.min_p, 0.0)
        self.header.numbers_by_row[row.index] = numbers
        self.header.integers_by_row[row.index] = (
            seed - 2**64 if seed >= 2**63 else seed,
            params.top_k,
        )

    def _place_blocks(
        self, row: Row, block_ids: tuple[int, ...], places: list[np.ndarray],
        values: list[np.ndarray],
    ) -> None:  # fmt: skip
        start = self._num_tokens + row.index * self.max_blocks + row.num_blocks
        places.append(np.arange(start, start + len(block_ids)))
        values.append(np.array(block_ids, dtype=np.int64))
