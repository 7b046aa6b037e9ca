"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's format."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequest
from paceline.server.body import read_request
from paceline.server.conversation import render
from paceline.server.fields import convert, decode_object, parse
from paceline.server.generate import json_response
from paceline.server.replies import Text, TokenizerInfo, Tokens
from paceline.server.requests import Detokenize, TokenizeChat, TokenizeText
from paceline.server.service import Service
from paceline.server.tools import read_tool_use

# Tokenising needs about a hundred bytes per character.
MAX_TOKENIZE_CHARS = 1 << 20


class TokenEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Text, or messages through the chat template, to token ids."""
        service = self._service
        client = service.client
        async with read_request(request, service, _either) as (asked, size):
            service.resolve_model(asked.model)
            if isinstance(asked, TokenizeChat):
                shown = read_tool_use(asked.tools).shown(hide_if_none=False)
                text = await render(service, asked, size, {"tools": shown})
                special = bool(asked.add_special_tokens)  # the template adds its own
            else:
                text = asked.prompt
                special = asked.add_special_tokens is not False
            if len(text) > MAX_TOKENIZE_CHARS:
                raise InvalidRequest(
                    f"The text has {len(text)} characters; /tokenize takes {MAX_TOKENIZE_CHARS}.",
                    param="messages" if isinstance(asked, TokenizeChat) else "prompt",
                )
            with_names, limit = bool(asked.return_token_strs), client.info.max_model_len

            def work() -> Response:
                ids = client.tokenizer.encode(text, special)
                names = [client.tokenizer.token_text(i) for i in ids] if with_names else None
                return json_response(
                    Tokens(count=len(ids), max_model_len=limit, tokens=ids, token_strs=names)
                )

            return await service.off_loop(len(text), work)

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        client = service.client
        async with read_request(request, service, partial(parse, kind=Detokenize)) as (asked, size):
            service.resolve_model(asked.model)

            def work() -> Response:
                largest, vocab_size = max(asked.tokens, default=0), client.info.vocab_size
                if largest >= vocab_size:
                    raise InvalidRequest(
                        f"token id {largest} is out of range; the vocabulary has {vocab_size} "
                        f"tokens (0 to {vocab_size - 1}).",
                        param="tokens",
                    )
                text = client.tokenizer.decode(asked.tokens, skip_special_tokens=False)
                return json_response(Text(text))

            return await service.off_loop(size, work)

    async def tokenizer_info(self, request: Request) -> Response:
        client, template = self._service.client, self._service.chat_template
        tokenizer, texts = client.tokenizer, template.texts
        return json_response(
            TokenizerInfo(
                vocab_size=tokenizer.vocab_size,
                model_max_length=client.info.max_model_len,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                special_tokens=tokenizer.named_tokens,
                all_special_ids=sorted(tokenizer.special_ids),
                chat_template=texts if len(texts) > 1 else next(iter(texts.values()), None),
            )
        )


def _either(body: bytes) -> TokenizeChat | TokenizeText:
    raw = decode_object(body)
    if "messages" in raw and "prompt" in raw:
        raise InvalidRequest("Send prompt or messages, not both.", param="prompt")
    return convert(raw, TokenizeChat) if "messages" in raw else convert(raw, TokenizeText)
