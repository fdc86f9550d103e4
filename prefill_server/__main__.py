"""`python -m prefill_server --model FOLDER …`"""

from __future__ import annotations

from front.server import ServedRole, serve
from front.settings import engine_config
from prefill_server.service import PrefillService
from prefill_server.settings import PrefillSettings
from protos import prefill_pb2_grpc, worker_pb2
from rpc.lifecycle import run

SERVICE = "baton.v1.Prefill"


def main(prog: str = "prefill_server") -> None:
    settings = PrefillSettings.load(
        prog=prog, description="Computes prompts and keeps their KV staged for decode servers."
    )
    role = ServedRole(
        name="prefill",
        wire_role=worker_pb2.ROLE_PREFILL,
        service_name=SERVICE,
        add_service=prefill_pb2_grpc.add_PrefillServicer_to_server,
        make_service=PrefillService,
        allows_local_prefill=False,
    )
    # A prefill server always runs requests that end with their first token by itself.
    config = engine_config(settings, "prefill", allow_local_prefill=True)
    run(lambda: serve(role, settings, config))


if __name__ == "__main__":
    main()
