"""POST /tokenize and /detokenize, in vLLM's shapes. Owns nothing but those."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequest
from paceline.server.body import read_body, read_request
from paceline.server.conversation import render
from paceline.server.fields import decode_object, parse
from paceline.server.generate import json_response
from paceline.server.replies import Text, Tokens
from paceline.server.requests import Detokenize, TokenizeChat, TokenizeText
from paceline.server.service import Service


class TokenEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Text, or messages through the chat template, to token ids."""
        service = self._service
        client = service.client
        async with read_body(request, service) as body:
            asked: TokenizeChat | TokenizeText
            if "messages" in decode_object(body):
                asked = parse(body, TokenizeChat)
                service.resolve_model(asked.model)
                text = await render(service, asked)
                special = bool(asked.add_special_tokens)  # the template brings its own
            else:
                asked = parse(body, TokenizeText)
                service.resolve_model(asked.model)
                text = asked.prompt
                special = asked.add_special_tokens is not False
            tokenizer = client.tokenizer
            ids = await service.off_loop(len(text), lambda: tokenizer.encode(text, special))
        names = [tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
        limit = client.info.max_model_len
        return json_response(
            Tokens(count=len(ids), max_model_len=limit, tokens=ids, token_strs=names)
        )

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        client = service.client
        async with read_request(request, service, Detokenize) as asked:
            service.resolve_model(asked.model)
            largest, size = max(asked.tokens, default=0), client.info.vocab_size
            if largest >= size:
                raise InvalidRequest(
                    f"token id {largest} is out of range; the vocabulary has {size} tokens "
                    f"(0 to {size - 1}).",
                    param="tokens",
                )
            tokenizer = client.tokenizer
            text = await service.off_loop(
                len(asked.tokens),
                lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False),
            )
        return json_response(Text(text))
