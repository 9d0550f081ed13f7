"""Every error that Billfish raises on purpose. No imports, so that any layer may use it."""


def shown(value: object) -> str:
    """A value as an error message shows it: however large it is, and whatever its repr does."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, somebody's own class
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


class BillfishError(Exception):
    """Base of all errors that Billfish raises on purpose."""


class CheckpointError(BillfishError, ValueError):
    """A model file is damaged, hostile or of a kind that is not supported.

    `file` names the file, `tensor` the tensor or metadata key where there is one.
    """

    def __init__(self, file: str, reason: str, *, tensor: str | None = None) -> None:
        where = f"{file}: {tensor}" if tensor else str(file)
        super().__init__(f"{where}: {reason}")
        self.file = str(file)
        self.tensor = tensor
        self.reason = reason


class InvalidRequestError(BillfishError, ValueError):
    """A request, or one of its parameters, is wrong. Raised before any work starts."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter
        self.reason = reason


class CapacityError(BillfishError):
    """What was asked for can never fit. The message says what was asked and what there is."""


class QueueFullError(CapacityError):
    """Too many requests wait already. The same request may be taken later."""


class EngineUnavailableError(BillfishError):
    """The engine takes no requests now. `state` is "starting", "dead" or "draining"."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class EngineDiedError(BillfishError):
    """The engine ended while it worked on the request; what comes after is lost."""


class ProtocolError(BillfishError):
    """What came over the boundary between the server and the engine is not a message of it."""


class KernelArgumentError(BillfishError, ValueError):
    """A kernel was called with a wrong shape, dtype, device or value."""


class ConfigError(BillfishError, ValueError):
    """A setting is out of range or two settings contradict each other."""


class ExecutorError(BillfishError):
    """The executor broke its side of the contract: its result does not answer the plan."""


class InvariantError(BillfishError):
    """The engine's books do not balance: a defect of Billfish, never of a request."""


class RecordError(BillfishError, ValueError):
    """A record of measurements, or the code that it points at, is missing or damaged.

    `file` names the file.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


_CONTROL = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


def visible(text: str) -> str:
    """The text with pictures instead of control characters, but for tabs and ends of lines: what
    a model or another machine says must not command the terminal that shows it."""
    return text.translate(_CONTROL)
