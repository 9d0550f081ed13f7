"""Runs the engine's plans on a device with memory of its own: queues a step, and goes on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.engine.plan import NULL_BLOCK, StepPlan, StepResult
from billfish.errors import CapacityError
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.kernels.paged_attention.metadata import PADDING_SLOT
from billfish.models.decoder import CausalLM
from billfish.worker import step_inputs, warm_up
from billfish.worker.device_batch import DeviceBatch, Step
from billfish.worker.device_rules import DeviceRules
from billfish.worker.device_step import DeviceStep
from billfish.worker.grammar import GrammarCompiler
from billfish.worker.host_copies import pinned, to_device, to_host
from billfish.worker.input_batch import Row
from billfish.worker.kv_cache import move_blocks
from billfish.worker.logprobs import SLICE, PendingLogprobs
from billfish.worker.memory import gib
from billfish.worker.parking import ParkedWeights, park, unpark
from billfish.worker.sampler import sample
from billfish.worker.step_graphs import StepGraphs, ladder, mixed_ladder
from billfish.worker.warm_up import TYPICAL_KV_TOKENS


class DeviceRunner:
    """The executor of one model on one GPU; see `billfish.engine.plan.OverlappingExecutor`.

    Arguments as for `ModelRunner`. max_num_batched_tokens: most tokens of a step. graphs: capture
    steps with `capture`, all that decode and others of up to 2048 tokens; without, and for larger
    steps, kernels are launched one by one. Either way steps are padded to the same sizes, so that
    the kernels and their results are the same. batch_invariant: attention adds a sequence's keys up
    in an order that batch-mates do not change.

    It also runs on a CPU, where nothing overlaps, so that all but the kernels can be tested there.
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
        max_num_batched_tokens: int = 512,
        graphs: bool = True,
        batch_invariant: bool = False,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        self.vocab_size = vocab_size
        self.device = device = kv_cache.device
        self.batch = DeviceBatch(max_num_seqs, max_model_len, kv_cache.shape[3], device, grammars)
        self._last = DeviceStep(-1)
        self._parked: ParkedWeights | None = None
        self._cache_shape: tuple[int, ...] = ()
        self._cache_bytes = 0
        self._peak = 0
        self.rules = DeviceRules(self.batch.token_table)
        self._make_plans = partial(_attention_plans, model, kv_cache, max_num_seqs, batch_invariant)
        self._plans = self._make_plans()
        self._graphs = graphs and device.type == "cuda"
        sizes, mixed_sizes = ladder(max_num_seqs), mixed_ladder(max_num_batched_tokens)
        self._inputs = step_inputs.allocate(
            max(max_num_seqs, mixed_sizes[-1]), max_num_seqs, self.batch.max_blocks, device
        )
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        copies = step_inputs.Header.COPIES
        self._host_tokens = [pinned((max_num_seqs,), torch.int32, device) for _ in range(copies)]
        self._decode_graphs = StepGraphs(self._decode, sizes)
        self._mixed_graphs = StepGraphs(self._mixed, mixed_sizes)
        # One for all captures: libraries keep memory for each stream that they have seen.
        self._capture_stream = torch.cuda.Stream(device) if self._graphs else None
        self._counters: Any = None  # of products in graphs: those of a wake take them again

    def compile(self, max_num_batched_tokens: int) -> None:
        """Compile all that steps launch, several kernels at a time."""
        if self.device.type == "cuda":
            from billfish.worker import compilation

            compilation.compile_all(self._launches(max_num_batched_tokens), self.device)

    def _launches(self, budget: int) -> list[Callable[[], object]]:
        """Jobs that launch every kernel of steps of up to `budget` tokens, those that take longest
        first. The last ones share most of their kernels with the first, which are then done."""
        seqs = self.batch.max_num_seqs
        attention = partial(warm_up.attention, self.model, self.kv_cache, self._make_plans)
        dtypes = (self.kv_cache.dtype, torch.float32)
        return [
            *(partial(self._sample_nothing, dtype, False) for dtype in dtypes),
            *attention([(1, min(256, budget)), (seqs, 1), (1, 1)]),
            *warm_up.products(self.model, [*ladder(seqs), *mixed_ladder(budget)], budget),
            *(partial(self._sample_nothing, dtype, True) for dtype in dtypes),
            *warm_up.norms(self.model, budget),
            self._make_no_inputs,
            *attention([(count, 1) for count in (16, 64) if count < seqs]),
        ]

    def _make_no_inputs(self) -> None:
        """Make the inputs of a step of no requests."""
        count, blocks = self.batch.max_num_seqs, self.batch.max_blocks
        inputs = step_inputs.allocate(count, count, blocks, self.device)
        self.batch.fill(self._one_each, inputs, longest=1)

    def _sample_nothing(self, dtype: torch.dtype, greedy: bool) -> None:
        """Launch the sampler on a row of the tables that nobody has."""
        from billfish.kernels.general import sample_gpu

        logits = torch.zeros(1, self.model.config.vocab_size, dtype=dtype, device=self.device)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        sample_gpu.sample(
            logits[:, : self.vocab_size], zero, zero, self.batch.header.numbers,
            self.batch.header.integers, self.batch.token_table, zero.clone(), greedy=greedy,
        )  # fmt: skip

    def capture(self) -> None:
        """Capture the graphs, if there are to be any: compiles what they launch.

        Steps of every size run for it: of no requests, because those of the last header may have
        more tokens than there is room for, and would be written behind the buffers.
        """
        self.batch.header.clear()
        if self._capture_stream is not None:
            from billfish.kernels.marlin import workspace

            self._counters = self._counters or workspace.captured_counters(self.device)
            shared = torch.cuda.graph_pool_handle(), self._capture_stream
            layers = warm_up.kinds_of_layers(self.model)
            with workspace.captured_into(self._counters, self.device):
                self._mixed_graphs.capture(partial(self._mixed, layers=layers), *shared)
                self._decode_graphs.capture(partial(self._decode, layers=layers), *shared)

    @torch.inference_mode()
    def measure_peak(self, num_tokens: int) -> int:
        """Bytes that the largest step takes for a while: so many tokens, all sequences sampled.

        Compiles what such a step launches. It reads and writes no KV but the null block's.
        """
        count = self.batch.max_num_seqs
        spread = [num_tokens // count + (i < num_tokens % count) for i in range(count)]
        lens = [min(n, self.batch.max_model_len) for n in spread if n]
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        self.batch.header.send({"rows": [0] * len(lens), "seq_lens": lens, "query_start": starts,
                                "found": lens})  # fmt: skip
        total, device = starts[-1], self.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        inputs = step_inputs.allocate(total, len(lens), self.batch.max_blocks, device)
        query_start = self.batch.header.query_start[: len(lens) + 1]
        self.batch.fill(query_start, inputs, max(lens))
        seq_lens = self.batch.header.seq_lens[: len(lens)]
        metadata = AttentionMetadata(
            inputs.block_table, seq_lens, query_start, inputs.slots, max(lens), max(lens)
        )
        hidden = self._forward(inputs, metadata)
        rows = torch.arange(count, device=device) % total
        logits = self.model.logits(hidden[rows])[:, : self.vocab_size]
        logits.float().softmax(dim=-1, dtype=torch.float64)
        torch.cuda.synchronize(device)
        self._peak = torch.cuda.max_memory_allocated(device) - before
        return self._peak

    def reserve(self) -> None:
        """Take the memory that was measured from the driver at once, for steps to use parts of it.

        So none has to ask for memory that others may have taken meanwhile. To be called after
        `capture`, which gives back all that is not in use.
        """
        torch.empty(self._peak, dtype=torch.uint8, device=self.device)

    def sleep(self) -> None:
        """Give the memory of weights, KV cache and graphs back; the weights wait in host memory.

        No sequence may be known. What the KV cache held is lost. CapacityError, and nothing has
        changed, where the host has not the memory.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._parked = park(self.model, self.device)
        self._cache_shape, self._cache_bytes = tuple(self.kv_cache.shape), self.kv_cache.nbytes
        self._give_back(self._parked)

    def _give_back(self, parked: ParkedWeights) -> None:
        """Whatever there is of what sleeps."""
        parked.empty()
        self._decode_graphs.release()
        self._mixed_graphs.release()
        self.kv_cache = self.kv_cache.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring back what `sleep` gave away, and capture the graphs again.

        CapacityError where the GPU has not as much to give any more. Whatever fails, it may be
        asked again.
        """
        if self._parked is None:
            return
        try:
            self.kv_cache = self.kv_cache.new_empty(self._cache_shape)
            self.kv_cache[:, :, NULL_BLOCK] = 0
            unpark(self._parked)
            self.capture()
            self.reserve()
        except torch.OutOfMemoryError as error:
            cause = error.with_traceback(None)  # what it holds of the calls would not be freed
            self._give_back(self._parked)
            size = self._parked.nbytes + self._cache_bytes
            raise CapacityError(
                f"{gib(size)} of weights and KV cache, and graphs besides, do not fit into what "
                f"{self.device} has left: end what else uses it, and wake again"
            ) from cause
        except BaseException:
            self._give_back(self._parked)
            raise
        self._parked = None

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> DeviceStep:
        """Queue a step. At most two may be queued and not asked for their results."""
        move_blocks(plan, self.kv_cache, self.host_cache)
        step = self.batch.apply(plan)
        pending = DeviceStep(plan.step)
        if step is None:
            return pending
        if step.decodes and not step.wants_prompt_logits:
            logits = self._decode_graphs.replay(step.num_requests)
            if step.sampled and not step.in_order:
                logits = logits[self._sample_index(step)]
        else:
            if step.num_tokens <= self._mixed_graphs.largest:
                hidden = self._mixed_graphs.replay(step.num_tokens)
            else:
                hidden = self._forward(*self.batch.mixed_inputs(step))
            if step.wants_prompt_logits:
                self._prompt_logprobs(hidden, step, pending)
            logits = hidden
            if step.sampled:
                # As many as decode together in a graph: their kernels are loaded, and to load one
                # the driver may wait for the GPU.
                size = self._decode_graphs.size(len(step.sampled))
                logits = self.model.logits(hidden[self.batch.header.sample_index[:size]])
                logits = logits[: len(step.sampled)]
        self.batch.copy_forks(plan)
        if step.sampled:
            self._sample(logits[:, : self.vocab_size], step, pending)
        if self.device.type == "cuda":
            pending.done = torch.cuda.Event()
            pending.done.record()
        return pending

    def _decode(self, count: int, layers: Sequence[int] | None = None) -> Tensor:
        """Logits [count, V] of the step in the header, padded to `count` rows of a token each.

        layers: through these alone, which means nothing but launches their kernels; None: all.
        """
        inputs = step_inputs.StepInputs(
            self._inputs.token_ids[:count], self._inputs.positions[:count],
            self._inputs.slots[:count], self._inputs.block_table[:count],
        )  # fmt: skip
        query_start = self._one_each[: count + 1]
        self.batch.fill(query_start, inputs, longest=1)
        seq_lens = self.batch.header.seq_lens[:count]
        metadata = AttentionMetadata(
            inputs.block_table, seq_lens, query_start, inputs.slots, 1, TYPICAL_KV_TOKENS
        )
        hidden = self._forward(inputs, metadata, layers)
        return self.model.logits(hidden)

    def _mixed(self, count: int, layers: Sequence[int] | None = None) -> Tensor:
        """Hidden states [count, hidden_size] of the step in the header, of any kind: as many
        requests as there may be, and tokens of no request behind theirs. layers: as above."""
        inputs = step_inputs.StepInputs(
            self._inputs.token_ids[:count], self._inputs.positions[:count],
            self._inputs.slots[:count], self._inputs.block_table,
        )  # fmt: skip
        inputs.slots.fill_(PADDING_SLOT)
        header = self.batch.header
        self.batch.fill(header.query_start, inputs, longest=count)
        metadata = AttentionMetadata(
            inputs.block_table, header.seq_lens, header.query_start, inputs.slots, count,
            TYPICAL_KV_TOKENS,
        )  # fmt: skip
        return self._forward(inputs, metadata, layers)

    def _forward(
        self, inputs: step_inputs.StepInputs, metadata: AttentionMetadata,
        layers: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        if self.device.type == "cpu":
            metadata = _on_cpu(metadata, self.batch.block_size)
        for plan in self._plans:
            metadata = plan.update(metadata)
        return self.model(inputs.token_ids, inputs.positions, self.kv_cache, metadata, layers)

    def _sample_index(self, step: Step) -> Tensor:
        return self.batch.header.sample_index[: len(step.sampled)]

    def _sample(self, logits: Tensor, step: Step, pending: DeviceStep) -> None:
        """Choose the next tokens from the model's logits [S, V]; they go into the token table."""
        rows = [row for _, row in step.sampled]
        count = len(rows)
        header = self.batch.header
        positions = header.sample_positions[:count]
        pending.grammars = any(row.rules and row.rules.grammar for row in rows)
        if pending.grammars:
            # The masks depend on the last tokens. The model's part of this step is queued already,
            # so the device computes while the host waits for them and makes the masks.
            self._last.follow()
        self._last = pending
        processed = self.rules.apply(logits, rows, positions)
        tokens = self._tokens[:count]
        if self.device.type == "cuda":
            from billfish.kernels.general import sample_gpu

            sample_gpu.sample(
                processed, header.sample_rows[:count], positions, header.numbers, header.integers,
                self.batch.token_table, tokens, greedy=all(row.sampling.greedy for row in rows),
            )  # fmt: skip
        else:
            self._sample_on_cpu(processed.float(), rows, positions, tokens)
        pending.sampled = step.sampled
        pending.tokens = self._host_tokens[pending.step % len(self._host_tokens)][:count]
        pending.tokens.copy_(tokens, non_blocking=True)
        if processed is not logits:
            pending.finite = to_host(logits.amax(dim=-1).isfinite())
        asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if asking:
            index = to_device(torch.tensor(asking), self.device)
            tops = [rows[i].sampling.logprobs or 0 for i in asking]
            measured = PendingLogprobs.measure(logits[index], tokens[index].clamp(min=0), tops)
            pending.logprobs = ([step.sampled[i][0] for i in asking], measured)

    def _sample_on_cpu(
        self, logits: Tensor, rows: Sequence[Row], positions: Tensor, out: Tensor
    ) -> None:
        places = positions.tolist()
        tokens = sample(logits, [r.sampling for r in rows], [r.seed for r in rows], places)
        out.copy_(torch.tensor(tokens, dtype=torch.int32))
        for row, place, token in zip(rows, places, tokens, strict=True):
            if place < self.batch.max_model_len:
                self.batch.token_table[row.index, place] = max(token, 0)

    def _prompt_logprobs(self, hidden: Tensor, step: Step, pending: DeviceStep) -> None:
        """Of the prompt tokens after those of this step, for the requests that ask for them."""
        offset = 0
        for item, row in step.work:
            top = row.sampling.prompt_logprobs
            count = min(item.num_tokens, row.num_prompt_tokens - 1 - item.start)
            # A request that comes with tokens of its own was preempted after its prompt was done.
            if top is not None and not row.resumed and count > 0:
                start = item.start + 1
                parts = []
                for i in range(0, count, SLICE):
                    size = min(SLICE, count - i)
                    begin = offset + i
                    logits = self.model.logits(hidden[begin : begin + size])[:, : self.vocab_size]
                    targets = self.batch.token_table[row.index, start + i : start + i + size]
                    parts.append(PendingLogprobs.measure(logits, targets, [top] * size))
                pending.prompt_logprobs.append((item.request_id, start, parts))
            offset += item.num_tokens


def _attention_plans(
    model: CausalLM, kv_cache: Tensor, max_num_seqs: int, batch_invariant: bool
) -> list[Any]:
    """How decode attention is split, one plan for each window that layers have; none on a CPU."""
    if kv_cache.device.type == "cpu":
        return []
    from billfish.kernels.paged_attention.planner import AttentionPlan

    config = model.config
    return [
        AttentionPlan.allocate(
            max_requests=max_num_seqs,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_query_len=1,  # more would cost every step, and serve few
            sliding_window=window,
            batch_invariant=batch_invariant,
            block_size=kv_cache.shape[3],
            device=kv_cache.device,
        )
        for window in dict.fromkeys(layer.sliding_window for layer in config.layers)
    ]


def _on_cpu(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata:
    """What a CPU prepares for a step besides, from inputs made as for a GPU."""
    built = AttentionMetadata.build(
        metadata.block_table, metadata.seq_lens, metadata.query_start.diff(), block_size
    )
    return replace(built, slot_mapping=metadata.slot_mapping)
