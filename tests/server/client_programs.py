"""Other people's clients at work: python client_programs.py NAME URL, in their own environment.

Reads JSON from standard input and prints what came as JSON; `tests.server.clients` starts it.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def langchain(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """langchain-openai, as its documentation uses it."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="fake", max_retries=0)

    async def later() -> str:
        return (await chat.ainvoke("Hi")).content

    chunks = list(chat.stream("Hi", stream_usage=True))
    tool = {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
    with_tools = chat.bind_tools([tool])
    question = HumanMessage("How is the weather in Oslo?")
    call = with_tools.invoke([question])
    streamed_call = None
    for chunk in with_tools.stream([question]):
        streamed_call = chunk if streamed_call is None else streamed_call + chunk
    result = ToolMessage("Rain", tool_call_id=call.tool_calls[0]["id"])
    schema = {"title": "answer", **tool["parameters"]}
    structured = chat.with_structured_output(schema, method="json_schema", strict=True)
    return {
        "whole": chat.invoke("Hi").content,
        "async": asyncio.run(later()),
        "streamed": "".join(chunk.content for chunk in chunks),
        "usage": [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata],
        "calls": call.tool_calls,
        "streamed_calls": streamed_call.tool_calls,
        "after": with_tools.invoke([question, call, result]).content,
        "structured": structured.invoke("Say it as JSON"),
        "logprobs": len(chat.invoke("Hi", logprobs=True).response_metadata["logprobs"]["content"]),
    }


def llm(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Simon Willison's `llm` from the command line, told of the server by its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        model = {"model_id": "here", "model_name": "fake", "api_base": f"{url}/v1"}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

        def run(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", "prompt", "-m", "here", *arguments]
            return subprocess.run(
                command, env=environment, check=True, text=True, stdout=subprocess.PIPE
            ).stdout

        return {
            "streamed": run("Hi"),
            "whole": run("--no-stream", "-s", "Be brief", "-o", "max_tokens", "200", "Hi"),
        }


def lm_eval(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's local-completions: of each (context, continuation), in tokens, the log-likelihood
    and whether it is what greedy sampling gives. It sends several prompts in one request."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=asked["model"], tokenizer_backend="none",
        batch_size=asked["batch_size"], num_concurrent=asked["num_concurrent"],
    )  # fmt: skip
    # Token ids are at hand, so no tokenizer has to be fetched; it only asks whether there is one.
    model.tokenized_requests, model.tokenizer = True, object()
    pairs = [(None, context, continuation) for context, continuation in asked["pairs"]]
    return {"found": list(model._loglikelihood_tokens(pairs))}


if __name__ == "__main__":
    found = globals()[sys.argv[1]](sys.argv[2], json.load(sys.stdin))
    print(json.dumps(found))
