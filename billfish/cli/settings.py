"""Options from elsewhere than the command line. What is nearer wins: the command line, then the
environment (BILLFISH_ and the option's name), then a TOML file, then the default.

In the file a table has the name of a command, and its keys those of the command's options without
the dashes in front. Keys outside of any table count for every command that has such an option:

    model = "smollm2"
    kv-memory = 4

    [serve]
    port = 8080
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from billfish.errors import ConfigError, shown

CONTEXT = {"auto_envvar_prefix": "BILLFISH"}
"""context_settings of every command that takes options from elsewhere."""


EPILOG = (
    "Every option may also come from the environment, as BILLFISH_ and its name (BILLFISH_MODEL), "
    "or from a TOML file (billfish --config FILE); the command line wins, then the environment."
)


class Command(TyperCommand):
    """A command that takes options from elsewhere: its help says so once, not at every option."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "epilog": options.get("epilog") or EPILOG})
        for parameter in self.params:
            if hasattr(parameter, "show_envvar"):
                parameter.show_envvar = False


def from_file(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with options: a table for each command, or keys for all.",
            envvar="BILLFISH_CONFIG",
        ),
    ] = None,
) -> None:
    """Callback of the program: reads the file before a command looks at its own options."""
    if config is not None:
        context.default_map = defaults(config, _options(context))


def _options(context: typer.Context) -> dict[str, dict[str, str]]:
    """By command: names of options as a file may write them, and those of their parameters."""
    commands: dict[str, Any] = getattr(context.command, "commands", {})
    found: dict[str, dict[str, str]] = {}
    for name, command in commands.items():
        if getattr(command, "context_settings", {}).get("auto_envvar_prefix") is None:
            continue
        names = found[name] = {}
        for parameter in command.params:
            for flag in parameter.opts:
                if len(flag.lstrip("-")) > 1:
                    names[_plain(flag)] = parameter.name
    return found


def defaults(path: Path, options: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """What the file says, by command and parameter. ConfigError for a file that cannot be read, and
    for a key that no command knows: a misspelled setting must not be passed over."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    found: dict[str, dict[str, Any]] = {name: {} for name in options}
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for key, value in content.items():
        if key in tables:
            continue
        takers = [name for name in options if _plain(key) in options[name]]
        if not takers:
            raise ConfigError(f"{path}: no command has an option {shown(key)}")
        for name in takers:
            found[name][options[name][_plain(key)]] = value
    for name, table in tables.items():
        if name not in options:
            raise ConfigError(f"{path}: [{name}] is not a command that takes options from a file")
        for key, value in table.items():
            if _plain(key) not in options[name]:
                raise ConfigError(f"{path}: {name} has no option {shown(key)}")
            if isinstance(value, dict):
                raise ConfigError(f"{path}: {name}.{key} must not be a table")
            found[name][options[name][_plain(key)]] = value
    return found


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
