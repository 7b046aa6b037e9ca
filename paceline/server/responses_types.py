"""The types of /v1/responses: items, the body of a request, the response object.

Items are the same in requests and replies. A field set to UNSET is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from paceline.server.requests import WITHOUT_EFFECT, Int, SampledBody

Status = Literal["in_progress", "completed", "incomplete"]
Text = str | UnsetType | None


class InputText(msgspec.Struct, kw_only=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = []


class RefusalPart(msgspec.Struct, kw_only=True, tag="refusal"):
    refusal: str


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag="summary_text"):
    text: str


ContentPart = InputText | OutputText | RefusalPart


class _Item(msgspec.Struct, kw_only=True):
    id: Text = UNSET
    status: Status | UnsetType | None = UNSET


class MessageItem(_Item, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    phase: Text = UNSET  # of an assistant's message; codex sends it back


class FunctionCallItem(_Item, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    namespace: Text = UNSET
    arguments: str


class FunctionOutputItem(_Item, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | list[InputText]


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType | None = UNSET
    encrypted_content: Text = UNSET


class ItemReference(msgspec.Struct, kw_only=True, tag="item_reference"):
    id: str


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference
OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class FunctionTool(msgspec.Struct, kw_only=True, tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(msgspec.Struct, kw_only=True, tag="namespace"):
    """A group of functions. The model sees `NAMESPACE__NAME`."""

    name: str
    description: str | None = None
    tools: list[FunctionTool]


class WebSearchTool(msgspec.Struct, kw_only=True, tag="web_search"):
    pass


class ImageGenerationTool(msgspec.Struct, kw_only=True, tag="image_generation"):
    pass


OfferedTool = FunctionTool | NamespaceTool
# codex sends these unasked, so a request with them is served. Paceline cannot run them: the model
# is not told of them, the reply's `tools` do not list them, and the log says so once.
HostedTool = WebSearchTool | ImageGenerationTool
Tool = FunctionTool | NamespaceTool | WebSearchTool | ImageGenerationTool
_HOSTED_TYPES = {kind.__struct_config__.tag for kind in get_args(HostedTool)}


class NamedTool(msgspec.Struct, kw_only=True, tag="function"):
    name: str


class TextFormat(msgspec.Struct, kw_only=True, tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    description: str | UnsetType | None = UNSET
    strict: bool | None = None


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


class TextOptions(msgspec.Struct, kw_only=True):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # no summary is written, which `auto` allows


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # padding, which Paceline does not add


# Additions to a reply. Those of tools that Paceline does not run never have anything to add.
Include = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_TEXT_ONLY = "this model reads text only"
_ECHOED = {"metadata", "prompt_cache_key", "safety_identifier", "user"}  # without effect, too


class ResponsesRequest(SampledBody, kw_only=True):
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT - _ECHOED | {"client_metadata"}
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
    }
    hints: ClassVar[Mapping[str, str]] = {
        "messages": "Send 'input', or messages to /v1/chat/completions.",
        "max_tokens": "Did you mean 'max_output_tokens'?",
        "max_completion_tokens": "Did you mean 'max_output_tokens'?",
        "response_format": "Did you mean 'text.format'?",
        "reasoning_effort": "Did you mean 'reasoning.effort'?",
    }
    advice: ClassVar[Mapping[str, str]] = {
        "content": _TEXT_ONLY,
        "output": _TEXT_ONLY,
        "tools": "offer functions, which the client runs",
        "tool_choice": "name a function, or use none, auto, required",
    }

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Int | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    include: list[Include] | None = None
    stream_options: ResponsesStreamOptions | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @classmethod
    def check_parts(cls, raw: Mapping[str, Any]) -> None:
        for item in _objects_in(raw.get("input")):
            item.setdefault("type", "message" if "role" in item else "item_reference")
        for tool in _objects_in(raw.get("tools")):
            if (kind := tool.get("type")) in _HOSTED_TYPES:
                tool.clear()  # its options
                tool["type"] = kind


def _objects_in(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


# ---- replies


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(msgspec.Struct, kw_only=True):
    """The response object, with all fields that the Open Responses specification requires."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | NamedTool
    tools: list[OfferedTool]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None  # null until the response has ended
    user: str | None = None
    metadata: dict[str, str]


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
