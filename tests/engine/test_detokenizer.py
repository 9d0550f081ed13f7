from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.engine.detokenizer import Detokenizer, StopStrings

FIXED = settings(derandomize=True, deadline=None, max_examples=300)
FISH = "🐟".encode()


class Pieces:
    """A vocabulary made of whatever byte strings a test needs."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def ids(self, *pieces: bytes | str) -> list[int]:
        start = len(self.pieces)
        self.pieces += [p.encode() if isinstance(p, str) else p for p in pieces]
        return list(range(start, len(self.pieces)))

    def __call__(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def stream(pieces, stops=(), prompt=()) -> tuple[list[str], str | None]:
    """The deltas of these pieces, the last one at the end of the stream, and the stop string."""
    vocabulary = Pieces()
    detokenizer = Detokenizer(vocabulary, vocabulary.ids(*prompt), stops)
    deltas = []
    for token_id in vocabulary.ids(*pieces):
        delta, stop = detokenizer.append(token_id)
        deltas.append(delta)
        if stop is not None:
            return deltas, stop
    tail, stop = detokenizer.finish()
    return [*deltas, tail], stop


def text_and_stop(text: str, stops) -> tuple[str, str | None]:
    """What the words say: read on until some stop string is complete; the longest, if several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def text_and_stop_after(text: str, stops, passed: int) -> tuple[str, str | None]:
    """The same, but no stop string counts that is complete within the first characters."""
    for end in range(passed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@FIXED
@given(st.text("ab", max_size=20), st.sets(st.text("ab", min_size=1, max_size=4), min_size=1),
       st.integers(0, 20))  # fmt: skip
def test_passing_over_stop_strings_in_the_beginning(text: str, stops, passed: int) -> None:
    expected, stop = text_and_stop_after(text, stops, passed)
    for include in (False, True):
        search = StopStrings(sorted(stops), include)
        pieces, found = [], None
        for i, char in enumerate(text):
            piece, found = search.push(char, passing=i < passed)
            pieces.append(piece)
            assert text.startswith("".join(pieces))
            if found is not None:
                break
        else:
            pieces.append(search.flush())
        assert found == stop
        if include:
            assert "".join(pieces) == expected + (stop or "")
        else:
            assert "".join(pieces) == expected


def cut(data, text):
    """Split text (or bytes) into a drawn number of non-empty pieces."""
    places = data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12))
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def test_characters_come_whole() -> None:
    pieces = [b"a", FISH[:1], FISH[1:3], FISH[3:] + b"b"]
    assert stream(pieces) == (["a", "", "", "🐟b", ""], None)


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert stream([b"a", FISH[:3]]) == (["a", "", "\ufffd"], None)


def test_control_tokens_have_no_text() -> None:
    assert stream([b"a", b"", b"b"]) == (["a", "", "b", ""], None)


@FIXED
@given(st.binary(max_size=24), st.data())
def test_any_bytes_cut_anywhere_decode_as_a_whole(raw: bytes, data) -> None:
    deltas, _ = stream(cut(data, raw))
    assert "".join(deltas) == raw.decode("utf-8", errors="replace")


class TestPromptThatEndsInHalfACharacter:
    def test_is_continued(self) -> None:
        deltas, _ = stream([FISH[2:3], FISH[3:], b"!"], prompt=[b"x" + FISH[:1], FISH[1:2]])
        assert deltas == ["", "🐟", "!", ""]

    def test_is_dropped_when_something_else_follows(self) -> None:
        assert stream([b"", b"yes"], prompt=[FISH[:2]])[0] == ["", "yes", ""]

    def test_a_whole_character_is_not_repeated(self) -> None:
        assert stream([b"yes"], prompt=[b"a", FISH])[0] == ["yes", ""]
        # A stray continuation byte after a complete character stays what it is.
        assert stream([FISH[3:]], prompt=[b"a", FISH])[0] == ["\ufffd", ""]

    def test_control_token_separates(self) -> None:
        assert stream([FISH[2:]], prompt=[FISH[:2], b""])[0] == ["\ufffd" * 2, ""]


class TestStopStrings:
    def test_inside_one_token(self) -> None:
        assert stream(["one STOP two"], ["STOP"]) == (["one "], "STOP")

    def test_across_tokens_never_leaks(self) -> None:
        assert stream(["one S", "TO", "P two"], ["STOP"]) == (["one ", "", ""], "STOP")

    def test_failed_match_is_released(self) -> None:
        assert stream(["ST", "OO", "P"], ["STOP"]) == (["", "STOO", "P", ""], None)

    def test_held_text_comes_at_the_end(self) -> None:
        assert stream(["one ST"], ["STOP"]) == (["one ", "ST"], None)

    def test_repeated_beginning(self) -> None:
        assert stream(["a", "a", "a", "b"], ["aab"]) == (["", "", "a", ""], "aab")
        assert stream(["\n", "\n", "\nUser:"], ["\n\nUser:"]) == (["", "", "\n"], "\n\nUser:")

    def test_first_complete_wins_however_tokens_cut(self) -> None:
        stops = ["abcd", "bc", "d"]
        assert stream(["xabcd"], stops) == (["xa"], "bc")
        assert stream(list("xabcd"), stops) == (["x", "", "", "a"], "bc")

    def test_longest_wins_at_the_same_character(self) -> None:
        assert stream(["say the end"], ["end", "the end"]) == (["say "], "the end")

    def test_shorter_stop_inside_the_held_text(self) -> None:
        assert stream(["</", "s", "!"], ["</s>", "!"]) == (["", "", "</s"], "!")

    def test_emoji_cut_in_the_middle(self) -> None:
        whole = "go 🐟🐠 on".encode()
        for size in range(1, 6):
            pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
            deltas, stop = stream(pieces, ["🐟🐠"])
            assert ("".join(deltas), stop) == ("go ", "🐟🐠")
            assert not any("\ufffd" in delta or "🐟" in delta for delta in deltas)

    def test_replacement_character_at_the_end_completes_a_stop(self) -> None:
        assert stream([b"a", FISH[:2]], ["\ufffd"]) == (["a", "", ""], "\ufffd")

    @FIXED
    @given(
        st.text("ab🐟", max_size=24),
        st.lists(st.text("ab🐟", min_size=1, max_size=5), min_size=1, max_size=4),
        st.data(),
    )
    def test_any_text_any_stops_any_cut(self, text: str, stops: list[str], data) -> None:
        want_text, want_stop = text_and_stop(text, stops)
        deltas, stop = stream(cut(data, text.encode()), stops)
        assert ("".join(deltas), stop) == (want_text, want_stop)
        sent = ""
        for delta in deltas[:-1]:
            sent += delta
            assert want_text.startswith(sent)

    @FIXED
    @given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
    def test_no_more_is_held_than_could_begin_a_stop(self, text: str, stops: list[str]) -> None:
        matcher = StopStrings(stops)
        sent = ""
        for end, char in enumerate(text, start=1):
            delta, stop = matcher.push(char)
            sent += delta
            if stop is not None:
                return
            held = text[len(sent) : end]
            assert not held or any(s.startswith(held) for s in stops)


class CountingList(list):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_matching_is_linear_in_the_text() -> None:
    """The worst text for the longest stop strings allowed: all beginning and no end."""
    stop = "a" * 1023 + "b"
    matcher = StopStrings([stop])
    borders = CountingList(matcher._borders[0])
    matcher._borders[0] = borders
    sent = [matcher.push("a" * 7)[0] for _ in range(3000)]
    assert len("".join(sent)) == 21_000 - 1023
    assert 0 < borders.reads <= 21_000  # one read for each step back, at most one a character
