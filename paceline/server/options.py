"""The HTTP options of `paceline serve`.

Imports no package of the server extra, because the command line lists these flags without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.option_values import check_positive, opt
from paceline.text.response_formats import check_parser_name

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Names are vLLM's if it has the option; `(ours)` marks the others."""

    host: str = opt("127.0.0.1", "address to listen on; 0.0.0.0 is every address of this machine")
    port: int = opt(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = opt(None, "clients must send it as a bearer token; PACELINE_API_KEY")
    api_key_file: str | None = opt(
        None, "file with one API key per line, with limits; read again when it changes (ours)"
    )
    served_model_name: tuple[str, ...] = opt(
        (), "names that requests may use for the model; replies and metrics carry the first"
    )
    allowed_origins: tuple[str, ...] = opt(
        (), "web origins that may call the server (CORS); * is all"
    )
    allowed_hosts: tuple[str, ...] = opt(
        (), "names in the Host header that are served besides localhost; * is all (ours)"
    )
    chat_template: str | None = opt(None, "file or text of a template instead of the model's own")
    trust_request_chat_template: bool = opt(False, "let a request bring its own chat_template")
    tool_call_parser: str = opt("auto", "format of tool calls, by vLLM's name; auto, none")
    reasoning_parser: str = opt("auto", "format of reasoning, by vLLM's name; auto, none")
    enable_auto_tool_choice: bool = opt(
        True, "let the model decide to call tools; on, unlike in vLLM"
    )
    exclude_tools_when_tool_choice_none: bool = opt(
        False, "leave tools out of the prompt if tool_choice is none"
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = opt(
        "none", "show in replies how the request's drafts did; detailed adds every step"
    )
    max_waiting: int = opt(1024, "most sequences waiting or running; more are answered 429 (ours)")
    max_queue_wait: float | None = opt(
        None, "most seconds that a request may wait; then it gets 429 (ours)"
    )
    max_request_bytes: int = opt(16 * MIB, "largest request body; more is answered 413 (ours)")
    max_stored_responses: int = opt(1024, "most responses of /v1/responses in the store (ours)")
    max_stored_response_bytes: int = opt(64 * MIB, "most bytes of JSON in that store (ours)")
    max_connections: int | None = opt(None, "most open connections; default by `ulimit -n` (ours)")
    drain_timeout: float = opt(30.0, "seconds for open requests after SIGTERM or Ctrl-C (ours)")
    write_timeout_s: float = opt(120.0, "seconds until a client that reads nothing is cut (ours)")
    header_timeout_s: float = opt(10.0, "seconds that a client has to send a header (ours)")
    keep_alive_timeout_s: int = opt(75, "seconds until an idle connection is closed (ours)")
    page: bool = opt(True, "the page at / for browsers, and /v1/live that it reads (ours)")
    metrics_compat: Literal["none", "vllm"] = opt(
        "none", "vllm: /metrics also has vLLM's names, which gateways read (ours)"
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = opt(
        "warning", "level of uvicorn's own log lines"
    )
    enable_request_logging: bool = opt(True, "one log line per HTTP request (ours)")

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.")
        check_positive(max_waiting=self.max_waiting, max_request_bytes=self.max_request_bytes)
        check_positive(max_connections=self.max_connections, max_queue_wait=self.max_queue_wait)
        check_positive(write_timeout_s=self.write_timeout_s)
        check_positive(header_timeout_s=self.header_timeout_s)
        stored = ("max_stored_responses", "max_stored_response_bytes")
        for name in ("drain_timeout", "keep_alive_timeout_s", *stored):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        check_parser_name("tool-call-parser", self.tool_call_parser, "tool_calls")
        check_parser_name("reasoning-parser", self.reasoning_parser, "reasoning")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out for a server without a key.")
