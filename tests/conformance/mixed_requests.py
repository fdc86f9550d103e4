"""Requests of every fate, each with what its client saw: answered, refused as bad, cancelled, timed out, failed, and
answered after a retry or a migration.

The fates beyond the client's own power hang on the request's id, for which the servers are armed with FAULTS.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import httpx

from protos import common_pb2, generation_pb2
from rpc.errors import ErrorCode
from rpc.status import details_payload, parse_status

MODEL = "tiny"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = "/baton.v1.Generation/Generate"
LIMIT_S = 60.0
SOON_S = 3.0  # by then the router has the request, however slow the machine is
# The first attempt of `refused` and `moved` fails, every one of `doomed`; `held` ones get no token, `midway` ones no
# second one.
PREFILL_FAULTS = (
    "request.admit:raise=MALLOC_FAILED,request_key=refused#0*;"
    "prefill.answer:delay=60,request_key=held*;request.admit:raise=INVALID_ROUTE_REQUEST,request_key=doomed*"
)
DECODE_FAULTS = (
    "engine.stage:raise=EXECUTION_EXCEPTION,stage=generate,request_key=moved#0*;"
    "decode.reserved:delay=60,request_key=held*;decode.reserved:delay=60,request_key=midway*;"
    "request.admit:raise=INVALID_ROUTE_REQUEST,request_key=doomed*"
)


@dataclass(frozen=True)
class Seen:
    """What the client saw of one request. `status`: of HTTP as the router counts it, or gRPC's code. `cut_off`: by the
    client's own clock, which does not say whether that of the router, which has begun a little later, ran out first;
    for the router it may as well have left."""

    request_id: str
    api: str
    stream: bool
    outcome: str
    code: str
    status: str
    phase: str = ""  # of a failure
    prompt_tokens: int = 0
    tokens: int = 0
    attempts: int = 0
    cut_off: bool = False


def _ids(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + 7 * i) % 380 + 2 for i in range(length)]


class Mixed:
    """Sends requests to one router. May be used by several threads."""

    def __init__(self, http: str, grpc_address: str) -> None:
        self._http = httpx.Client(base_url=f"http://{http}", timeout=LIMIT_S, verify=False)
        self._channel = grpc.insecure_channel(grpc_address)
        self._alone = threading.Lock()  # for those that share an id

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    # -- over HTTP

    def _body(self, number: int, request_id: str, **fields: object) -> dict[str, object]:
        return {
            "model": MODEL, "prompt": _ids(number), "max_tokens": 2 + number % 7, "temperature": 0, "ignore_eos": True,
            "cache_salt": str(number), "request_id": request_id, **fields,
        }  # fmt: skip

    def _answered(self, api: str, request_id: str, stream: bool, status: int, body: dict) -> Seen:
        if "error" in body:
            code = ErrorCode(body["error"]["baton_code"]).name
            return Seen(request_id, api, stream, "error", code, str(status), "before_first_token")
        usage = body["usage"]
        return Seen(
            request_id, api, stream, body["choices"][0]["finish_reason"], "NONE_ERROR", str(status), "",
            usage["prompt_tokens"], usage["completion_tokens"], body["baton"]["attempts"],
        )  # fmt: skip

    def plain(self, number: int, request_id: str = "", **fields: object) -> Seen:
        request_id = request_id or f"plain-{number}"
        answer = self._http.post(COMPLETIONS, json=self._body(number, request_id, **fields))
        return self._answered("completions", request_id, False, answer.status_code, answer.json())

    def streamed(self, number: int, path: str = COMPLETIONS, **fields: object) -> Seen:
        api = "chat" if path == CHAT else "completions"
        request_id = f"streamed-{api}-{number}"
        body = self._body(number, request_id, stream=True, stream_options={"include_usage": True}, **fields)
        with self._http.stream("POST", path, json=body) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        whole = {"usage": chunks[-1]["usage"], "baton": chunks[-1]["baton"]}
        whole["choices"] = [{"finish_reason": next(reason for reason in reasons if reason)}]
        return self._answered(api, request_id, True, answer.status_code, whole)

    def chat(self, number: int) -> Seen:
        message = {"role": "user", "content": f"Say something about ledgers, {number}."}
        return self.streamed(number, CHAT, messages=[message], prompt=None)

    def bad_value(self, number: int) -> Seen:
        return self.plain(number, f"bad-value-{number}", temperature=9)

    def bad_model(self, number: int) -> Seen:
        return self.plain(number, f"bad-model-{number}", model="nobody-has-it")

    def unread(self, number: int) -> Seen:
        """Refused before its body is read."""
        request_id = f"unread-{number}"
        headers = {"Content-Type": "text/plain", "X-Request-Id": request_id}
        answer = self._http.post(COMPLETIONS, content=b"{}", headers=headers)
        return self._answered("completions", request_id, False, answer.status_code, answer.json())

    def doomed(self, number: int) -> Seen:
        return self.plain(number, f"doomed-{number}")

    def refused(self, number: int) -> Seen:
        with self._alone:
            return self.plain(number, "refused")

    def moved(self, number: int) -> Seen:
        with self._alone:
            return self.plain(number, "moved", max_tokens=5)

    def leaves_early(self, number: int) -> Seen:
        """Gone before there was an answer."""
        request_id = f"held-http-{number}"
        try:
            self._http.post(COMPLETIONS, json=self._body(number, request_id), timeout=SOON_S)
        except httpx.ReadTimeout:
            return Seen(request_id, "completions", False, "error", "CANCELLED", "499", "before_first_token")
        raise AssertionError(f"{request_id} was answered")

    def leaves_midway(self, number: int) -> Seen:
        """Gone after the first token."""
        request_id = f"midway-{number}"
        body = self._body(number, request_id, stream=True, max_tokens=6)
        with self._http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200, request_id
            assert next(answer.iter_lines()).startswith("data: "), request_id
        return Seen(request_id, "completions", True, "error", "CANCELLED", "499", "mid_stream", 0, 1)

    # -- over gRPC

    def _generate(self, number: int, request_id: str, timeout_s: float) -> grpc.Call:
        request = generation_pb2.GenerateRequest(
            request_id=request_id, model=MODEL, token_ids=generation_pb2.TokenIds(ids=_ids(number)),
            cache_salt=str(number),
            sampling=common_pb2.SamplingParams(max_tokens=2 + number % 7, temperature=0, ignore_eos=True),
        )  # fmt: skip
        return self._channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=timeout_s)

    def by_grpc(self, number: int) -> Seen:
        request_id = f"grpc-{number}"
        last = generation_pb2.GenerateResponse.FromString(list(self._generate(number, request_id, LIMIT_S))[-1])
        return Seen(
            request_id, "grpc", True, "length", "NONE_ERROR", "OK", "", last.usage.prompt_tokens,
            last.usage.completion_tokens, last.baton.attempts,
        )  # fmt: skip

    def _failed(self, call: grpc.Call, request_id: str) -> Seen:
        try:
            list(call)
        except grpc.RpcError as error:
            parsed = parse_status(details_payload(error.trailing_metadata() or ()))
            codes = {"CANCELLED": "CANCELLED", "DEADLINE_EXCEEDED": "GENERATE_TIMEOUT"}
            code = parsed.code.name if parsed is not None else codes[error.code().name]
            cut_off = parsed is None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            status, phase = error.code().name, "before_first_token"
            return Seen(request_id, "grpc", True, "error", code, status, phase, cut_off=cut_off)
        raise AssertionError(f"{request_id} was answered")

    def cancels(self, number: int) -> Seen:
        request_id = f"held-cancel-{number}"
        call = self._generate(number, request_id, LIMIT_S)
        timer = threading.Timer(SOON_S, call.cancel)
        timer.start()
        try:
            return self._failed(call, request_id)
        finally:
            timer.cancel()

    def times_out(self, number: int) -> Seen:
        request_id = f"held-deadline-{number}"
        return self._failed(self._generate(number, request_id, SOON_S), request_id)

    # -- all together

    def send(self, count: int, seed: int = 1, threads: int = 8) -> list[Seen]:
        """So many requests in a random order; each kind is among them."""
        kinds: dict[Callable[[int], Seen], int] = {
            self.plain: 28, self.streamed: 14, self.chat: 8, self.by_grpc: 10, self.bad_value: 5, self.bad_model: 3,
            self.doomed: 4, self.refused: 6, self.moved: 6, self.leaves_early: 4, self.leaves_midway: 4,
            self.cancels: 3, self.times_out: 3, self.unread: 2,
        }  # fmt: skip
        order = [kind for kind, share in kinds.items() for _ in range(max(1, round(count * share / 100)))]
        random.Random(seed).shuffle(order)
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(kind, number) for number, kind in enumerate(order)]
            return [future.result() for future in futures]


def tally(seen: list[Seen], *fields: str) -> Counter[tuple[str, ...]]:
    """How many there are of each combination of the fields' values, as labels have them."""
    return Counter(
        tuple(str(getattr(one, name)).lower() if name == "stream" else getattr(one, name) for name in fields)
        for one in seen
    )
