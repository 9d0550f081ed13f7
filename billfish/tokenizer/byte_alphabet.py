"""GPT-2's alphabet: a visible character for every byte."""


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the others are numbered from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
LETTERS = {byte: character for character, byte in _ALPHABET.items()}
"""The character of each byte."""
_TO_LATIN1 = {ord(character): byte for character, byte in _ALPHABET.items()}


def alphabet_bytes(text: str) -> bytes:
    """The bytes that a token in the alphabet stands for; its own UTF-8 if it is not in it."""
    try:
        return text.translate(_TO_LATIN1).encode("latin-1") if " " not in text else text.encode()
    except UnicodeEncodeError:
        return text.encode()
