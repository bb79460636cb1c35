"""The OpenAI client for Python against llama-server with a quantized file: answers, streams, tool calls."""

from __future__ import annotations

import json

import gguf
import pytest

from helpers.commands import quantize, tool
from server import running_server

# The reference model knows no chats and no tools. With tool_choice the server constrains it to a call by a grammar, which allows
# text before the call and more calls after it. So a call begins with a word of one token in this template, and logit_bias makes
# the model choose that token and, where the grammar allows it, the end. No token joins ";" and a letter. The schema ends arguments.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}import{"name": {{ call.function.name | tojson }}, \
"arguments": {{ call.function.arguments | tojson }}};{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAME = "itq3"
CHAT = [{"role": "user", "content": "What is the weather in Paris?"}]
PLACES = ["Paris", "Rome"]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": PLACES}, "celsius": {"type": "boolean"}},
            "required": ["place", "celsius"],
        },
    },
}


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    openai = pytest.importorskip("openai")
    tool("llama-server")
    folder = tmp_path_factory.mktemp("client")
    path, template = folder / "model-itq3_s.gguf", folder / "template.jinja"
    quantize(model, path, "--type", "itq3_s")
    template.write_text(TEMPLATE)
    with running_server(path, "--jinja", "--chat-template-file", template, "--alias", NAME, "-c", 1024, "--parallel", 1, "-t", 1) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            yield client


@pytest.fixture(scope="module")
def call_options(client, model) -> dict:
    """Return options that force a tool call."""
    (token,) = client.post("/../tokenize", body={"content": "import"}, cast_to=object)["tokens"]
    end = gguf.GGUFReader(model).fields["tokenizer.ggml.eos_token_id"].contents()
    return {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200,
            "logit_bias": {str(token): 50, str(end): 100}}


def create_completion(client, **options):
    """Compute an answer without the prompt cache.

    The last bits of a product depend on the columns of the batch, those of attention on the cells of other slots. Answers with a
    cached prompt or from another slot may differ.
    """
    return client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, seed=1, extra_body={"cache_prompt": False}, **options)


def test_server_lists_its_model(client):
    assert [m.id for m in client.models.list().data] == [NAME]


def test_stream_equals_the_complete_answer(client):
    answer = create_completion(client, max_tokens=24)
    assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"
    parts = [part.choices[0] for part in create_completion(client, max_tokens=24, stream=True) if part.choices]
    pieces = [part.delta.content for part in parts if part.delta.content]
    assert len(pieces) > 1 and "".join(pieces) == answer.choices[0].message.content
    assert parts[-1].finish_reason == "length"


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    assert name == "weather" and values["place"] in PLACES and isinstance(values["celsius"], bool) and len(values) == 2


def test_tool_call_follows_its_schema(client, call_options):
    choice = create_completion(client, **call_options).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)


def test_streamed_tool_call_follows_its_schema(client, call_options):
    name, arguments = "", ""
    for part in create_completion(client, stream=True, **call_options):
        for call in part.choices[0].delta.tool_calls or [] if part.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    check_call(name, arguments)


def test_answer_follows_its_schema(client):
    schema = TOOL["function"]["parameters"]
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    answer = create_completion(client, response_format=response_format, max_tokens=200)
    check_call("weather", answer.choices[0].message.content)
