"""Every route: its method, path, types and one line about it.

The application, /openapi.json, `GET /`, the 404 reply and docs/reference read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server import messages_types, replies, requests, responses_types


@dataclass(frozen=True)
class Operation:
    """`body` is a type, or several of which the body is one. `reply` is the type of a JSON reply;
    None: the reply is text, as `media_type` says."""

    name: str  # of the handler
    route: str  # method and path, as Starlette writes it
    summary: str
    body: Any = None
    reply: Any = None
    streams: bool = False  # with `stream: true` it answers with server-sent events
    media_type: str = "text/plain"
    query: Mapping[str, str] = field(default_factory=dict)  # name -> what it does
    is_of_page: bool = False  # not served with --no-page

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def bodies(self) -> tuple[Any, ...]:
        if self.body is None:
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)

    @property
    def open_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


_STATUS = dict[str, str]
_PAGES = {
    "limit": "most items in the reply, 1 to 100; 20 if absent",
    "order": "asc or desc; desc if absent",
    "after": "id of the item after which to begin",
}
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "chat",
        "POST /v1/chat/completions",
        "messages in, an answer out",
        requests.ChatRequest,
        replies.ChatReply,
        streams=True,
    ),
    Operation(
        "completions",
        "POST /v1/completions",
        "text or token ids in, text out",
        requests.CompletionRequest,
        replies.TextReply,
        streams=True,
    ),
    Operation(
        "responses",
        "POST /v1/responses",
        "OpenAI's Responses: items in, items out",
        responses_types.ResponsesRequest,
        responses_types.Response,
        streams=True,
    ),
    Operation(
        "input_tokens",
        "POST /v1/responses/input_tokens",
        "tokens that the input of a response has",
        responses_types.ResponsesRequest,
        responses_types.InputTokens,
    ),
    Operation(
        "retrieve",
        "GET /v1/responses/{id}",
        "a stored response, or one that is being streamed",
        reply=responses_types.Response,
    ),
    Operation(
        "delete",
        "DELETE /v1/responses/{id}",
        "forget a stored response",
        reply=responses_types.DeletedResponse,
    ),
    Operation(
        "cancel",
        "POST /v1/responses/{id}/cancel",
        "end a response that is being streamed",
        reply=responses_types.Response,
    ),
    Operation(
        "input_items",
        "GET /v1/responses/{id}/input_items",
        "what the model was given for a stored response",
        reply=responses_types.ItemList,
        query=_PAGES,
    ),
    Operation(
        "messages",
        "POST /v1/messages",
        "Anthropic's Messages: blocks in, blocks out",
        messages_types.MessagesRequest,
        messages_types.MessageReply,
        streams=True,
    ),
    Operation(
        "count_tokens",
        "POST /v1/messages/count_tokens",
        "tokens that a message's prompt has",
        messages_types.CountTokensRequest,
        messages_types.CountTokensReply,
    ),
    Operation(
        "models",
        "GET /v1/models",
        "what is served, and its `max_model_len`",
        reply=replies.ModelList,
    ),
    Operation("model", "GET /v1/models/{id:path}", "one of them", reply=replies.ModelCard),
    Operation(
        "tokenize",
        "POST /tokenize",
        "text or messages to token ids",
        (requests.TokenizeText, requests.TokenizeChat),
        replies.Tokens,
    ),
    Operation(
        "detokenize", "POST /detokenize", "token ids to text", requests.Detokenize, replies.Text
    ),
    Operation(
        "tokenizer_info",
        "GET /tokenizer_info",
        "special tokens, sizes and the chat template",
        reply=replies.TokenizerInfo,
    ),
    Operation(
        "drain",
        "POST /admin/drain",
        "restart a rank; answers when it serves again",
        reply=dict[str, Any],
        query={"rank": "the number of the rank"},
    ),
    Operation(
        "health",
        "GET /health",
        "200 while the engine is alive, loads or restarts; 503 when it has ended",
        reply=_STATUS,
    ),
    Operation("ready", "GET /readyz", "200 when requests are served, else 503", reply=_STATUS),
    Operation("metrics", "GET /metrics", "for Prometheus"),
    Operation("version", "GET /version", "of Paceline", reply=_STATUS),
    Operation("openapi", "GET /openapi.json", "this list with all types", reply=dict[str, Any]),
    Operation("docs", "GET /docs", "the same to read", media_type="text/html"),
    Operation(
        "root",
        "GET /",
        "model, routes and a command to try; browsers get the page",
        reply=dict[str, Any],
    ),
    Operation("file", "GET /page/{name}", "files of the page", is_of_page=True),
    Operation(
        "live",
        "GET /v1/live",
        "load, latencies and the stages of the last steps, as server-sent events",
        media_type="text/event-stream",
        is_of_page=True,
    ),
    Operation(
        "trace",
        "GET /v1/live/trace",
        "the newest steps that /v1/live has shown, as a trace for ui.perfetto.dev",
        reply=dict[str, Any],
        is_of_page=True,
    ),
)
# Files of the page. They need no key, because the page asks for the key.
PAGE_TYPES = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
PAGE_PATHS = frozenset(f"/page/{name}" for name in PAGE_TYPES)
# Routes of OpenAI, Anthropic and vLLM that do not exist here.
NOT_BUILT_PATHS = (
    *("/v1/embeddings", "/v1/audio", "/v1/images", "/v1/moderations", "/v1/files", "/v1/uploads"),
    *("/v1/batches", "/v1/fine_tuning", "/v1/assistants", "/v1/threads", "/v1/vector_stores"),
    *("/v1/realtime", "/v1/conversations", "/v1/videos", "/v1/containers", "/v1/evals"),
    *("/v1/responses/compact", "/v1/messages/batches", "/v1/rerank", "/v2/rerank"),
    *("/rerank", "/v1/score", "/score", "/pooling", "/classify", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/invocations", "/sleep", "/wake_up"),
)


def served_operations(*, page: bool) -> tuple[Operation, ...]:
    return tuple(op for op in OPERATIONS if page or not op.is_of_page)


def is_not_built(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}/") for known in NOT_BUILT_PATHS)
