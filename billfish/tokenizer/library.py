"""How the `tokenizers` library is called: other threads run while it works on a long text."""

import tokenizers

RELEASE_AT = 4096
"""Characters from which a text is long: some milliseconds of work."""


def word_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, without special tokens around it.

    Of the library's calls only those for batches release the interpreter's lock; `encode` holds it
    for seconds with a megabyte of text.
    """
    if len(text) < RELEASE_AT:
        return library.encode(text, add_special_tokens=False).ids
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids
