"""langchain-openai: messages, streams with usage, tools, structured output, a chain."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


@pytest.fixture
def model(base_url: str) -> Callable[..., ChatOpenAI]:
    def make(**fields: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model="demo",
            base_url=base_url,
            api_key=SecretStr("none"),
            temperature=0,
            max_retries=0,
            **{"max_tokens": 24, **fields},
        )

    return make


def test_a_chain_answers_with_usage(model: Callable[..., ChatOpenAI]) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Answer briefly."), ("user", "{text}")])

    answer = (prompt | model()).invoke({"text": QUESTION})
    text = (prompt | model() | StrOutputParser()).invoke({"text": QUESTION})

    assert answer.content == text
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


async def test_a_stream_equals_the_whole_answer_and_its_usage(
    model: Callable[..., ChatOpenAI],
) -> None:
    whole = await model().ainvoke(QUESTION)

    total = AIMessageChunk("")
    async for chunk in model(stream_usage=True).astream(QUESTION):
        total += chunk

    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata


async def test_a_batch_answers_in_order(model: Callable[..., ChatOpenAI]) -> None:
    questions = [QUESTION, "What is one and one?", "Name a colour."]
    alone = [(await model().ainvoke(question)).content for question in questions]

    together = await model().abatch(questions)

    assert [answer.content for answer in together] == alone


def test_a_bound_tool_call_and_its_result_round_trip(model: Callable[..., ChatOpenAI]) -> None:
    bound = model(max_tokens=100).bind_tools([get_weather], tool_choice="required")
    question = HumanMessage("What is the weather in Oslo?")

    answer = bound.invoke([question])

    call = answer.tool_calls[0]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model().bind_tools([get_weather]).invoke([question, answer, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object(model: Callable[..., ChatOpenAI], method: Any) -> None:
    structured = model(max_tokens=100).with_structured_output(City, method=method)

    assert isinstance(structured.invoke(QUESTION), City)


def test_a_text_model_completes_a_prompt(base_url: str) -> None:
    model = OpenAI(
        model="demo",
        base_url=base_url,
        api_key=SecretStr("none"),
        temperature=0,
        max_tokens=12,
        max_retries=0,
    )

    assert "four" in model.invoke("One, two, three,")
