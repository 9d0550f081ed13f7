"""How the `tokenizers` library is called: other threads run while it works on a long text."""

import tokenizers

from billfish.errors import InvalidRequestError

RELEASE_AT = 4096
"""Characters from which a text is long: some milliseconds of work."""


def word_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, without special tokens around it.

    Of the library's calls only those for batches release the interpreter's lock; `encode` holds it
    for seconds with a megabyte of text. Raises InvalidRequestError where the library fails, as it
    does with text that a vocabulary without an unknown token lacks.
    """
    try:
        if len(text) < RELEASE_AT:
            return library.encode(text, add_special_tokens=False).ids
        return library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except BaseException as error:
        reason = failure(error)
    raise InvalidRequestError("text", f"this tokenizer cannot encode it: {reason}")


def failure(error: BaseException) -> str:
    """What went wrong in the library: an Exception, or a panic, which is none. Others are raised
    again."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)[:200]
