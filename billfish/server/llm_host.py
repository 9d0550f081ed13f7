"""The engine of a model, built from what a launch asks for. Imports torch; only the engine's
process does."""

from dataclasses import fields

from billfish.llm import LLM
from billfish.server.engine_host import EngineHost, Report
from billfish.server.messages import Launch, ModelInfo


def build(launch: Launch, report: Report) -> tuple[EngineHost, ModelInfo]:
    """Raises what LLM raises."""
    config = launch.config
    report("loading the model", 0, 0)
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    llm = LLM(
        **settings,
        seed=launch.seed,
        progress=lambda done, total: report("loading the model", done, total),
    )
    report("preparing grammars", 0, 0)
    llm.grammars.prepare()
    model = ModelInfo(
        name=config.model,
        architecture=llm.model_config.architecture,
        dtype=config.dtype,
        vocab_size=llm.tokenizer.vocab_size,
        max_model_len=llm.engine.max_model_len,
        num_blocks=llm.engine.stats().blocks_total,
        block_size=config.cache.block_size,
        max_num_seqs=llm.config.scheduler.seats,
        max_waiting=config.scheduler.max_waiting,
        eos_token_ids=tuple(llm.tokenizer.eos_token_ids),
        default_sampling=dict(llm.checkpoint_defaults.options),
        num_int4_layers=llm.num_int4_layers,
    )
    return EngineHost(llm.engine, llm.grammars.compile), model
