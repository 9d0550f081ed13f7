"""Options from the command line, the environment and a file, and which of them wins."""

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from billfish.cli import settings
from billfish.errors import ConfigError


@pytest.fixture
def program():
    """A program with two commands that print what they were told."""
    app = typer.Typer()
    app.callback()(settings.from_file)

    @app.command("serve", context_settings=settings.CONTEXT)
    def serve(
        model: str = typer.Argument("smollm2", envvar="BILLFISH_MODEL"),
        port: int = 8000,
        api_key: Annotated[list[str] | None, typer.Option()] = None,
        fast: bool = typer.Option(False, "--fast/--slow"),
        kv_memory: float = typer.Option(1.0, "--kv-memory"),
    ) -> None:
        print(model, port, api_key, fast, kv_memory)

    @app.command("chat", context_settings=settings.CONTEXT)
    def chat(kv_memory: float = 1.0, model: str = "smollm2") -> None:
        print(model, kv_memory)

    @app.command("other")
    def other(port: int = 1) -> None:
        print(port)

    def run(*arguments: str, **environment: str) -> str:
        result = CliRunner().invoke(app, arguments, env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output.strip()

    return run


FILE = """
kv-memory = 2.5
model = "from-file"
[serve]
port = 1
api_key = ["a", "b"]
fast = true
"""


@pytest.fixture
def path(tmp_path):
    def write(text: str = FILE) -> str:
        file = tmp_path / "billfish.toml"
        file.write_text(text)
        return str(file)

    return write


def test_defaults(program):
    assert program("serve") == "smollm2 8000 None False 1.0"


def test_a_file(program, path):
    assert program("--config", path(), "serve") == "from-file 1 ['a', 'b'] True 2.5"
    assert program("--config", path(), "chat") == "from-file 2.5"
    assert program("serve", BILLFISH_CONFIG=path()) == "from-file 1 ['a', 'b'] True 2.5"


def test_the_environment_wins_over_the_file(program, path):
    environment = {"BILLFISH_PORT": "2", "BILLFISH_MODEL": "m", "BILLFISH_API_KEY": "x y"}
    assert program("--config", path(), "serve", **environment) == "m 2 ['x', 'y'] True 2.5"


def test_the_command_line_wins_over_all(program, path):
    arguments = ("--config", path(), "serve", "--port", "3", "mine", "--slow", "--api-key", "z")
    found = program(*arguments, BILLFISH_PORT="2", BILLFISH_MODEL="m", BILLFISH_API_KEY="x")
    assert found == "mine 3 ['z'] False 2.5"


def test_commands_that_do_not_take_part(program, path):
    assert program("--config", path(), "other", BILLFISH_PORT="2") == "1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "no command has an option 'prot'"),
        ("[serve]\nprot = 1", "serve has no option 'prot'"),
        ("[other]\nport = 1", r"\[other\] is not a command"),
        ("[serve.port]\nx = 1", "must not be a table"),
        ("port = ", "Invalid value"),
        ("help = true", "no command has an option 'help'"),
    ],
)
def test_a_file_that_is_wrong(program, path, text, reason):
    with pytest.raises(ConfigError, match=reason):
        program("--config", path(text), "serve")


def test_a_file_that_is_missing(program):
    with pytest.raises(ConfigError, match="No such file"):
        program("--config", "/nowhere/billfish.toml", "serve")


def test_a_value_of_the_wrong_type(program, path):
    assert "--port" in program("--config", path('[serve]\nport = "x"'), "serve")
