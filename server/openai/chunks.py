"""Stream chunks for chat and completions. Most chunks that have only text are filled into a bytes
template; other chunks go through the JSON encoder."""

from collections.abc import Callable

from config.json_text import Json
from server.generation.answer_parser import chat_deltas
from server.generation.outputs import Delta
from server.http.errors import Fault
from server.http.sse import DONE, frame, json_line, long_json_line
from server.serving.choices import TextLogprobs, chat_logprobs, joined_logprobs
from server.serving.job import ServingRequest


class _Chunks:
    def __init__(self, job: ServingRequest, kind: str) -> None:
        self._job = job
        self._envelope = job.envelope(kind)
        self._started: set[int] = set()
        self._has_logprobs = job.params.logprobs is not None
        self._has_ids = bool(job.body.return_token_ids)
        self._has_usage = job.includes_usage_in_chunks
        self._is_plain = not (self._has_logprobs or self._has_ids or self._has_usage)
        """Whether chunks of text come without log-probabilities, token ids and usage."""

    async def ending(self) -> bytes:
        if not self._job.includes_usage:
            return DONE
        return self._envelope.chunk(b"", {"usage": self._job.usage()}) + DONE

    async def failing(self, fault: Fault) -> bytes:
        return frame(fault.body()) + DONE

    def _extra(self) -> Json:
        return {"usage": self._job.usage()} if self._has_usage else {}


class ChatChunks(_Chunks):
    """Chunks of /v1/chat/completions. The first chunk of a choice has the role."""

    def __init__(
        self, job: ServingRequest, echo: str = "", *, shows_reasoning: bool = True
    ) -> None:
        super().__init__(job, "chat.completion.chunk")
        self._shows_reasoning = shows_reasoning
        self._echo = echo
        self._token_formatter = job.token_formatter

    def feed(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in deltas])

    def _chunk(self, delta: Delta) -> bytes:
        begin = b"" if delta.index in self._started else self._begin(delta.index)
        if self._job.parsers is not None:
            return begin + self._parsed(delta)
        if self._is_plain and not delta.is_last:
            return begin + self._text_chunk(delta.index, delta.text) if delta.text else begin
        if delta.text:
            return begin + self._choice_chunk(delta, {"content": delta.text})
        if delta.is_last:
            return begin + self._choice_chunk(delta, {})
        has_tokens = delta.logprobs or self._has_ids
        return begin + self._choice_chunk(delta, {"content": ""}) if has_tokens else begin

    def _parsed(self, delta: Delta) -> bytes:
        payloads = chat_deltas(self._job.events(delta), shows_reasoning=self._shows_reasoning)
        finish_reason = self._job.finish_reason(delta) if delta.is_last else None
        if delta.is_last:
            payloads.append({})
        elif not payloads and (delta.logprobs or self._has_ids):
            payloads.append({"content": ""})
        frames = []
        # Only the first chunk has the tokens, and only the last chunk has the finish reason.
        rest = delta
        if delta.is_last:
            rest = Delta(delta.index, token_ids=delta.token_ids, logprobs=delta.logprobs)
        for payload in payloads:
            if self._is_plain and "content" in payload:
                frames.append(self._text_chunk(delta.index, payload["content"]))
                continue
            if not payload:
                rest.finish_reason, rest.stop_reason = finish_reason, delta.stop_reason
            frames.append(self._choice_chunk(rest, payload))
            rest = Delta(delta.index)
        return b"".join(frames)

    def _begin(self, index: int) -> bytes:
        is_first = not self._started
        self._started.add(index)
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = self._extra()
        if extra and is_first:
            # This chunk has no text yet, so its usage has no output tokens: clients attribute the
            # first output tokens to the next chunk.
            extra = {"usage": self._job.usage_of_prompt()}
        if self._has_ids:
            extra["prompt_token_ids"] = self._job.prompts[0].token_ids
        data = self._envelope.chunk(json_line(choice), extra)
        return data + self._text_chunk(index, self._echo, long_json_line) if self._echo else data

    def _text_chunk(
        self, index: int, text: str, encode: Callable[[str], bytes] = json_line
    ) -> bytes:
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
            index,
            encode(text),
        )
        return self._envelope.chunk(choice, self._extra() if self._has_usage else None)

    def _choice_chunk(self, delta: Delta, payload: Json) -> bytes:
        """Chunk with `payload`, and everything in `delta` except its text."""
        choice: Json = {
            "index": delta.index,
            "delta": payload,
            "logprobs": chat_logprobs(delta.logprobs, self._token_formatter)
            if delta.logprobs
            else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.is_last:
            choice["stop_reason"] = delta.stop_reason
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
        return self._envelope.chunk(json_line(choice), self._extra())


class CompletionChunks(_Chunks):
    """Chunks of /v1/completions. The first chunk of a choice has the prompt if echo is set."""

    def __init__(
        self, job: ServingRequest, prompt_texts: list[str] | None, hidden: frozenset[int]
    ) -> None:
        """`prompt_texts`: set with echo. `hidden`: ids of tokens without text."""
        super().__init__(job, "text_completion")
        self._prompt_texts = prompt_texts
        num_choices = len(job.prompts) * job.params.n
        self._buffered: list[Delta] = []
        """Deltas of choices that must first echo prompt log-probabilities, which are complete at
        the first delta of the prompt's first choice."""
        self._writers = [TextLogprobs(job.token_formatter, hidden) for _ in range(num_choices)]

    def feed(self, deltas: list[Delta]) -> bytes:
        if self._prompt_texts is None or not self._has_logprobs:
            return b"".join([self._chunk(delta) for delta in deltas])
        deltas, self._buffered = self._buffered + deltas, []
        frames = []
        for delta in deltas:
            if delta.index in self._started or self._is_scored(delta.index // self._job.params.n):
                frames.append(self._chunk(delta))
            else:
                self._buffered.append(delta)
        return b"".join(frames)

    def _is_scored(self, prompt_index: int) -> bool:
        """Whether all log-probabilities of the prompt have arrived."""
        positions = self._job.generation.prompt_logprobs[prompt_index] or ()
        return len(positions) == len(self._job.prompts[prompt_index].token_ids)

    def _chunk(self, delta: Delta) -> bytes:
        is_first = delta.index not in self._started
        self._started.add(delta.index)
        is_echo = is_first and self._prompt_texts
        if not self._is_plain or delta.is_last or is_echo:
            return self._encoded(delta, is_first)
        if not delta.text:
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (
            delta.index,
            json_line(delta.text),
        )
        return self._envelope.chunk(choice)

    def _encoded(self, delta: Delta, is_first: bool) -> bytes:
        prompt_index = delta.index // self._job.params.n
        text, parts = delta.text, []
        writer = self._writers[delta.index]
        if is_first and self._prompt_texts is not None:
            text = self._prompt_texts[prompt_index] + text
            if self._has_logprobs:
                parts.append(
                    echo_logprobs(self._job, prompt_index, writer, self._prompt_texts[prompt_index])
                )
        if self._has_logprobs and delta.logprobs:
            parts.append(writer.write(delta.logprobs))
        if not (text or parts or delta.finish_reason or self._has_ids):
            return b""
        choice: Json = {
            "index": delta.index,
            "text": text,
            "logprobs": joined_logprobs(parts) if parts else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.is_last:
            choice["stop_reason"] = delta.stop_reason
        if self._has_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._job.prompts[prompt_index].token_ids
        # An echoed prompt may be long.
        line = long_json_line if is_first else json_line
        return self._envelope.chunk(line(choice), self._extra())


def echo_logprobs(job: ServingRequest, prompt_index: int, writer: TextLogprobs, text: str) -> Json:
    """The logprobs object of an echoed prompt; `writer` continues with the generated text."""
    tokenizer = job.state.tokenizer
    first_id = job.prompts[prompt_index].token_ids[0]
    data = tokenizer.token_bytes(first_id) if tokenizer else b""
    positions = job.generation.prompt_logprobs[prompt_index] or ()
    width = job.params.logprobs or 0
    return writer.write_prompt(first_id, data, positions, width, text)
