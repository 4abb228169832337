"""Stop strings are held back, found, and cut at the same place for every split of the text."""

import time

from delays import least, machine_s
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop_strings import StopMatcher, Stopped


def run(
    chunks: list[str], stops: tuple[str, ...], include_stop: bool = False
) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    out = ""
    for chunk in chunks:
        result = matcher.push(chunk)
        if isinstance(result, Stopped):
            return out + result.text, result.stop
        out += result
    return out + matcher.flush(), None


def reference(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


small_text = st.text(alphabet="abé", max_size=12)
small_stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4).map(tuple)


@given(text=small_text, stops=small_stops, include_stop=st.booleans())
def test_every_split_in_two_equals_a_naive_search(
    text: str, stops: tuple[str, ...], include_stop: bool
) -> None:
    expected = reference(text, stops, include_stop)

    results = {run([text[:i], text[i:]], stops, include_stop) for i in range(len(text) + 1)}

    assert results == {expected}


@given(chunks=st.lists(st.text(alphabet="ab", max_size=3), max_size=8), stops=small_stops)
def test_any_chunks_equal_a_naive_search(chunks: list[str], stops: tuple[str, ...]) -> None:
    expected = reference("".join(chunks), stops, False)

    result = run(chunks, stops)

    assert result == expected


@given(text=small_text, stops=small_stops)
def test_text_that_may_be_part_of_a_stop_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    lengths = []

    for character in text:
        result = matcher.push(character)
        if isinstance(result, Stopped):
            break
        sent += result
        lengths.append(len(sent))

    for count, length in enumerate(lengths, start=1):
        tail = text[length:count]
        assert tail == "" or any(stop.startswith(tail) for stop in stops)


def test_a_partial_stop_is_sent_with_the_next_different_letter() -> None:
    matcher = StopMatcher(("STOP",))

    pieces = [matcher.push(piece) for piece in ("a ST", "O", "RE")]

    assert pieces == ["a ", "", "STORE"]


def test_a_stop_that_ends_before_min_tokens_is_ignored() -> None:
    matcher = StopMatcher(("END",))

    first = matcher.push("one END", armed=False)
    second = matcher.push(" two EN", armed=False)
    third = matcher.push("D three")

    assert (first, second, third) == ("one END", " two ", Stopped("", "END"))


def test_long_stops_take_little_time_for_each_token() -> None:
    # Only the last stop is a prefix of the output. The others were compared for each of their
    # lengths, in 0.7 ms for each token of each of 128 choices.
    stops = (*(letter * 1024 for letter in "bcd"), "a" * 1023 + "!")
    limit_s = machine_s(0.05)

    def push_s() -> float:
        matcher = StopMatcher(stops)
        start_s = time.thread_time()
        texts = [matcher.push("a") for _ in range(3_000)]
        took_s = time.thread_time() - start_s
        assert "".join(map(str, texts)) == "a" * (3_000 - 1023)
        return took_s

    assert least(push_s, limit_s) < limit_s


def test_the_stop_stays_in_the_output_on_request() -> None:
    assert run(["say E", "ND now"], ("END",), include_stop=True) == ("say END", "END")
