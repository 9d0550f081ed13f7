"""`billfish serve`: the OpenAI-compatible server."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.cli.common import ENGINE
from billfish.config import CacheConfig, EngineConfig, SchedulerConfig
from billfish.errors import ConfigError

if TYPE_CHECKING:
    from billfish.server.messages import ModelInfo
    from billfish.server.settings import ServerSettings

logger = logging.getLogger("billfish.serve")

NETWORK, LIMITS = "Network", "Limits"


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A .gguf file, a Hugging Face directory or repository, or smollm2 (the demo).",
            envvar="BILLFISH_MODEL",
        ),
    ] = DEMO_MODEL,
    host: Annotated[
        str,
        typer.Option(
            help="Where to listen; 0.0.0.0 for all networks: then set --api-key.",
            rich_help_panel=NETWORK,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: a free one.", rich_help_panel=NETWORK)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,  # it may come from a file
            help="What clients must bring; repeatable. Better in BILLFISH_API_KEY or a file: "
            "others on this machine can see the command line.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with a key on each line.", rich_help_panel=NETWORK),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that clients may call this server by; repeatable, * for any. Without: "
            "only this machine's own names on a loopback address, any elsewhere.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may use the server from a browser; repeatable.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model; repeatable, the first is in answers. Without: "
            "the last part of its path."
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3_json, mistral or pythonic. "
            "Without: as its chat template says."
        ),
    ] = None,
    dtype: common.Dtype = "bfloat16",
    quantize: common.Quantize = None,
    device: common.Device = "auto",
    head: Annotated[
        str | None,
        typer.Option(help="int8 or int4: round a dense head too.", rich_help_panel=ENGINE),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Answers do not depend on the requests beside them; slower.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    kv_memory: common.KVMemory = None,
    gpu_memory: Annotated[
        float, typer.Option(help="Share of a GPU's memory to use.", rich_help_panel=ENGINE)
    ] = 0.92,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a KV block.", rich_help_panel=ENGINE)
    ] = 16,
    prefix_caching: Annotated[
        bool,
        typer.Option(help="Keep KV blocks for later requests.", rich_help_panel=ENGINE),
    ] = True,
    swap_blocks: Annotated[
        int,
        typer.Option(
            help="KV blocks in host memory, for requests put off; on a CPU with --preemption swap.",
            rich_help_panel=ENGINE,
        ),
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and answer in tokens; without: as the model allows.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Most samples computed at once; without: 64, on a GPU 256.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens computed in a step; without: 512, on a GPU 8192.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    preemption: Annotated[
        Literal["auto", "recompute", "swap"],
        typer.Option(
            help="What becomes of requests that lose their KV blocks.", rich_help_panel=ENGINE
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option(help="Draws the seeds of requests that bring none.", rich_help_panel=ENGINE),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(help="Most samples in the queue; then 429.", rich_help_panel=LIMITS),
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Of one request.", rich_help_panel=LIMITS)] = 4
    << 20,
    max_connections: Annotated[
        int, typer.Option(help="Open at once.", rich_help_panel=LIMITS)
    ] = 4096,
    shutdown_seconds: Annotated[
        float,
        typer.Option(
            help="After SIGTERM or Ctrl-C, for requests that run.", rich_help_panel=LIMITS
        ),
    ] = 30.0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the lines on standard error.")
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="The least that is logged.")
    ] = "info",
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API, with a page for people at /."""
    from billfish.server.settings import ServerSettings

    if os.environ.get("BILLFISH_API_KEY") == "":  # a secret that is not there must not open it
        raise ConfigError("BILLFISH_API_KEY is set, and empty: unset it to serve without a key")
    settings = ServerSettings(
        host=host,
        port=port,
        model_names=tuple(served_model_name or [_name(model)]),
        api_keys=(*(api_key or ()), *_keys(api_key_file)),
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        tool_call_parser=tool_call_parser,
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
        shutdown_seconds=shutdown_seconds,
        log_format=log_format,
    )
    engine = EngineConfig(
        model=model,
        dtype=dtype,
        quantize=quantize,
        device=device,
        batch_invariant=batch_invariant,
        head=head,
        cache=CacheConfig(
            block_size=block_size,
            memory_bytes=common.to_bytes(kv_memory),
            gpu_memory=gpu_memory,
            prefix_caching=prefix_caching,
            swap_blocks=swap_blocks,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            preemption=preemption,
        ),
    )
    _serve(settings, engine, seed, log_level)


def _serve(
    settings: "ServerSettings", config: EngineConfig, seed: int | None, log_level: str
) -> None:
    from billfish.server import logs, run
    from billfish.server.engine_client import EngineClient
    from billfish.server.load_tokenizer import load_tokenizer
    from billfish.server.messages import Launch
    from billfish.server.supervisor import EngineSupervisor

    level = logging.getLevelName(log_level.upper())
    logs.configure(settings.log_format, level)
    # Before the model is loaded: a port in use is told at once.
    listener = run.bind(settings.host, settings.port)
    launch = Launch(
        config=config,
        seed=seed,
        drain_seconds=settings.shutdown_seconds,
        log_format=settings.log_format,
        log_level=level,
    )
    engine = EngineClient(
        EngineSupervisor(launch),
        lambda: load_tokenizer(config.model),
        max_requests=config.scheduler.on_gpu().seats + config.scheduler.max_waiting,
    )
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"http://{shown}:{address[1]}"
    logger.info("loading %s; the server listens on %s already", config.model, url)
    if not settings.api_keys and not settings.is_loopback:
        logger.warning("no API key is set: whoever reaches %s can use the model", url)

    def ready(model: "ModelInfo") -> None:
        if model.default_sampling:
            logger.info("sampling defaults of the model: %s", model.default_sampling)
        logger.info(
            "ready: %s as %s, %d KV blocks of %d tokens, at most %d tokens a request",
            model.architecture,
            settings.model_names[0],
            model.num_blocks,
            model.block_size,
            model.max_model_len,
        )

    try:
        run.run(engine, settings, listener, ready)
    except KeyboardInterrupt:
        sys.exit(130)


def _name(model: str) -> str:
    """Of a file or directory only its own name: where it lies is nobody's business."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of API keys cannot be read: {error}") from None
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:  # an empty file must not open the server
        raise ConfigError(f"{path} holds no API key")
    return keys
