"""`baton chat`: talk to a running router in the terminal; the answer streams as it is generated."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import httpx

from cli.client import ApiError, StreamedAnswer, get_json, stream_chat


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton chat", description=__doc__)
    p.add_argument("message", nargs="*", help="ask this one question and leave; without it, a conversation")
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="router (default http://127.0.0.1:8000)")
    p.add_argument("--model", default="", help="served model name (default: the first one)")
    p.add_argument("--api-key", default="")
    p.add_argument("--system", default="", help="system message")
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--max-tokens", type=int, default=None, help="default: the rest of the context")
    p.add_argument("--seed", type=int, default=None)
    p.add_argument("--timings", action="store_true", help="print where the time went after each answer")
    return p


def ask(arguments: argparse.Namespace, model: str, messages: list[dict[str, str]]) -> StreamedAnswer:
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        body["max_tokens"] = arguments.max_tokens
    if arguments.seed is not None:
        body["seed"] = arguments.seed
    answer = StreamedAnswer()
    for text in stream_chat(arguments.base_url, body, answer, arguments.api_key):
        print(text, end="", flush=True)
    print()
    if arguments.timings:
        timeline = ", ".join(f"{k} {v * 1000:.0f} ms" for k, v in answer.baton.get("timeline", {}).items())
        print(f"  [{answer.finish_reason}; {timeline}]", file=sys.stderr)
    return answer


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    arguments.base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    try:
        model = arguments.model or get_json(arguments.base_url, "/v1/models", arguments.api_key)["data"][0]["id"]
        if arguments.message:
            messages.append({"role": "user", "content": " ".join(arguments.message)})
            ask(arguments, model, messages)
            return 0
        print(f"{model} at {arguments.base_url}; an empty line or Ctrl-D ends.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return 0
            if not line:
                return 0
            messages.append({"role": "user", "content": line})
            try:
                answer = ask(arguments, model, messages)
            except ApiError as error:
                print(f"error: {error}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer.text})
    except KeyboardInterrupt:
        print()
        return 130
    except (ApiError, httpx.HTTPError) as error:
        print(f"baton chat: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
