"""Servers that the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live import LiveServer, running
from tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Llama with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(make_tiny("llama", folder, max_position_embeddings=2048))


FLAGS = ("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=64")


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server, shared by all tests that leave it running."""
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with running(tiny_model, log, *FLAGS) as live:
        yield live


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk
