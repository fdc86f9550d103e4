"""`/v1/models`, `/tokenize`, `/detokenize`: the model without a generation."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.http.body import check_media_type, parse_object, read_body
from router.http.errors import json_response
from router.http.schemas import DetokenizeBody, TokenizeBody, required
from router.http.services import HttpServices
from router.validation import GenerationParams, check_model, check_ranges, check_token_ids, out_of_range


def model_routes(services: HttpServices) -> list[Route]:
    async def models(request: Request) -> Response:
        facts = services.serving.model()
        data = [
            {
                "id": name,
                "object": "model",
                "created": services.created,
                "owned_by": "baton",
                "root": facts.root,
                "max_model_len": facts.max_model_len,
            }
            for name in facts.served_names
        ]
        return json_response({"object": "list", "data": data})

    async def tokenize(request: Request) -> Response:
        check_media_type(request.headers)
        body = TokenizeBody.parse(
            parse_object(await read_body(request.headers, request.receive, services.max_payload_bytes))
        )
        facts = services.serving.model()
        check_model(body.model, facts)
        if (body.prompt is None) == (body.messages is None):
            if body.prompt is None:
                raise required("prompt (or messages)")
            raise out_of_range("messages", "both", "absent with prompt")
        if body.messages is not None:
            check_ranges(GenerationParams(api="chat", messages=body.messages), services.validator.vocab_size)
            text = services.validator.render(body.messages)
        else:
            assert body.prompt is not None
            text = body.prompt
        # A chat template writes the special tokens itself.
        special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        ids = await services.validator.encode(text, add_special_tokens=special)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": facts.max_model_len})

    async def detokenize(request: Request) -> Response:
        check_media_type(request.headers)
        body = DetokenizeBody.parse(
            parse_object(await read_body(request.headers, request.receive, services.max_payload_bytes))
        )
        check_model(body.model, services.serving.model())
        if body.tokens is None:
            raise required("tokens")
        check_token_ids("tokens", body.tokens, services.validator.vocab_size)
        return json_response({"prompt": services.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
