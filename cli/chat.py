"""`baton chat`: talk to a running router in the terminal; the answer streams as it is generated."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

import httpx

from cli.client import ApiError, StreamedAnswer, get_json, stream_chat


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="baton chat", description=__doc__)
    p.add_argument("message", nargs="*", help="ask this one question and leave; without it, a conversation")
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="router (default http://127.0.0.1:8000)")
    p.add_argument("--model", default="", help="served model name (default: the first one)")
    p.add_argument("--api-key", default=os.environ.get("BATON_API_KEY", ""), help="default: BATON_API_KEY")
    p.add_argument("--system", default="", help="system message")
    p.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    p.add_argument("--max-tokens", type=int, default=None, help="default: the rest of the context")
    p.add_argument("--seed", type=int, default=None, help="makes draws repeatable (default: another each time)")
    p.add_argument("--timings", action="store_true", help="print where the time went after each answer")
    return p


def ask(arguments: argparse.Namespace, model: str, messages: list[dict[str, str]], answer: StreamedAnswer) -> None:
    """Prints one answer as it comes; `answer` has what came also when it is interrupted."""
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        body["max_tokens"] = arguments.max_tokens
    if arguments.seed is not None:
        body["seed"] = arguments.seed
    try:
        # Closed explicitly, so that an interrupted answer is aborted on the servers now.
        with contextlib.closing(stream_chat(arguments.base_url, body, answer, arguments.api_key)) as pieces:
            for text in pieces:
                print(text, end="", flush=True)
    finally:
        print()
    if arguments.timings:
        timeline = ", ".join(f"{k} {v * 1000:.0f} ms" for k, v in answer.baton.get("timeline", {}).items())
        print(f"  [{answer.finish_reason}; {timeline}]", file=sys.stderr)


def converse(arguments: argparse.Namespace, model: str, messages: list[dict[str, str]]) -> None:
    """Until an empty line or the end of the input. Ctrl-C ends an answer, not the conversation."""
    print(f"{model} at {arguments.base_url}; an empty line or Ctrl-D ends, Ctrl-C interrupts an answer.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()  # the shell's prompt gets a line of its own
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        answer = StreamedAnswer()
        try:
            ask(arguments, model, messages, answer)
        except KeyboardInterrupt:
            print("(interrupted)", file=sys.stderr)
        except (ApiError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    arguments.base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    try:
        models = get_json(arguments.base_url, "/v1/models", arguments.api_key)["data"]
        if not arguments.model and not models:
            print("baton chat: the router knows no model yet; is a server running?", file=sys.stderr)
            return 1
        model = arguments.model or models[0]["id"]
        if arguments.message:
            messages.append({"role": "user", "content": " ".join(arguments.message)})
            ask(arguments, model, messages, StreamedAnswer())
        else:
            converse(arguments, model, messages)
    except KeyboardInterrupt:
        print()
        return 130
    except ApiError as error:
        print(f"baton chat: {error}", file=sys.stderr)
        return 1
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        print(
            f"baton chat: no router answers at {arguments.base_url} ({reason}); is --base-url right?", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
