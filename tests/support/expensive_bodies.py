"""Request bodies that would be expensive for a server; each is refused."""

from collections.abc import Callable

CHAT = "/v1/chat/completions"
MANY = 1_000_000
MIB = 2**20


def chat(fields: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,%s}' % fields


TEXT = b"word " * (4 * MIB)
ATTACKS: dict[str, tuple[str, Callable[[], bytes], str | None]] = {
    "wrong words": (CHAT, lambda: chat(b'"bad_words":[%s0]' % (b"0," * MANY)), "bad_words"),
    "wrong ids": (
        CHAT,
        lambda: chat(b'"allowed_token_ids":[%s0]' % (b'"",' * 250_000)),
        "allowed_token_ids",
    ),
    "wrong biases": (
        CHAT,
        lambda: chat(b'"logit_bias":{%s}' % b",".join(b'"%d":""' % i for i in range(170_000))),
        "logit_bias",
    ),
    "wrong documents": (CHAT, lambda: chat(b'"documents":[%s0]' % (b"0," * MANY)), "documents"),
    "millions of lists": (CHAT, lambda: chat(b'"x":[%s0]' % (b"[]," * (5 * MIB))), None),
    "millions of objects": (
        CHAT,
        lambda: chat(b'"x":[%s0]' % (b'{"a":{}},' * (2 * MIB))),
        None,
    ),
    "millions of numbers": (CHAT, lambda: chat(b'"x":[%s0]' % (b"0," * (8 * MIB))), None),
    "many messages": (CHAT, lambda: b'{"messages":[%s0]}' % (b"[]," * 400_000), "messages"),
    "a long prompt": ("/v1/completions", lambda: b'{"prompt":"%s"}' % TEXT, "prompt"),
    "a long conversation": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"%s"}]}' % TEXT,
        "messages",
    ),
    "a long text to tokenize": ("/tokenize", lambda: b'{"prompt":"%s"}' % TEXT, "prompt"),
    "a long text to count": (
        f"{CHAT}/input_tokens",
        lambda: b'{"messages":[{"role":"user","content":"%s"}]}' % TEXT[: 10 * MIB],
        "messages",
    ),
    "many ids to detokenize": (
        "/detokenize",
        lambda: b'{"tokens":[%s1]}' % (b"65," * MANY),
        "tokens",
    ),
    "a long stop": (CHAT, lambda: chat(b'"stop":"%s"' % TEXT), "stop"),
}
"""Bodies by name: path, body, and `param` of the error."""
