"""`python -m decode_server --model FOLDER …`"""

from __future__ import annotations

import functools

from decode_server.service import DecodeService
from decode_server.settings import DecodeSettings
from front.server import ServedRole, serve
from front.settings import engine_config
from protos import decode_pb2_grpc, worker_pb2
from rpc.lifecycle import run

SERVICE = "baton.v1.Decode"


def main(prog: str = "decode_server") -> None:
    settings = DecodeSettings.load(prog=prog, description="Takes over prompts' KV from prefill servers and generates.")
    local = settings.allow_local_prefill
    role = ServedRole(
        name="decode",
        wire_role=worker_pb2.ROLE_DECODE,
        service_name=SERVICE,
        add_service=decode_pb2_grpc.add_DecodeServicer_to_server,
        make_service=functools.partial(DecodeService, allow_local_prefill=local),
        allows_local_prefill=local,
    )
    config = engine_config(settings, "decode", allow_local_prefill=local)
    run(lambda: serve(role, settings, config))


if __name__ == "__main__":
    main()
