"""What `paceline serve` may be told about HTTP. Frozen values; never opens a socket.

Kept apart from the server itself, so that the command line can list the flags without its extras.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import ConfigError

MIB = 1 << 20


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The HTTP side. Names are vLLM's where it has them."""

    host: str = _opt("127.0.0.1", "address to listen on; 0.0.0.0 is every address of this machine")
    port: int = _opt(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = _opt(None, "clients must send it as a bearer token; PACELINE_API_KEY")
    served_model_name: tuple[str, ...] = _opt(
        (), "names that requests may use for the model; replies and metrics carry the first"
    )
    allowed_origins: tuple[str, ...] = _opt(
        (), "web origins that may call the server (CORS); * is all"
    )
    allowed_hosts: tuple[str, ...] = _opt(
        (), "names in the Host header that are served besides localhost; * is all (ours)"
    )
    chat_template: str | None = _opt(None, "file or text of a template instead of the model's own")
    trust_request_chat_template: bool = _opt(False, "let a request bring its own chat_template")
    max_waiting: int = _opt(1024, "most sequences waiting or running; more are answered 429 (ours)")
    max_request_bytes: int = _opt(16 * MIB, "largest request body; more is answered 413 (ours)")
    max_connections: int | None = _opt(None, "most open connections; default by `ulimit -n` (ours)")
    drain_timeout_s: float = _opt(30.0, "seconds for open requests after SIGTERM or Ctrl-C (ours)")
    write_timeout_s: float = _opt(120.0, "seconds until a client that reads nothing is cut (ours)")
    header_timeout_s: float = _opt(10.0, "seconds that a client has to send a header (ours)")
    keep_alive_timeout_s: int = _opt(75, "seconds until an idle connection is closed (ours)")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = _opt(
        "warning", "level of uvicorn's own log lines"
    )
    enable_request_logging: bool = _opt(True, "one log line per HTTP request (ours)")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535.")
        counts = ("max_waiting", "max_request_bytes", "max_connections")
        for name in (*counts, "write_timeout_s", "header_timeout_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("drain_timeout_s", "keep_alive_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out for a server without a key.")
