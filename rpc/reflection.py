"""gRPC server reflection under both of its names.

The installed package speaks `grpc.reflection.v1alpha`. `grpc.reflection.v1` has the same messages in another
package, so its service is made from the same descriptors and handlers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
SERVICE_V1 = f"{V1}.ServerReflection"
_FILE_V1 = "grpc/reflection/v1/reflection.proto"


def _add_v1_descriptor() -> None:
    """Puts the descriptor of the v1 service into the default pool, so that clients can describe it too."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE_V1)
        return
    except KeyError:
        pass
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = _FILE_V1
    file.package = V1
    for message in file.message_type:
        for item in message.field:
            if not item.HasField("type_name"):  # a scalar
                continue
            item.type_name = item.type_name.replace(f".{V1ALPHA}.", f".{V1}.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{V1ALPHA}.", f".{V1}.")
            method.output_type = method.output_type.replace(f".{V1ALPHA}.", f".{V1}.")
    pool.AddSerializedFile(file.SerializeToString())


class Methods(Protocol):
    """What services are added to."""

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None: ...


def enable_reflection(methods: Methods, services: Sequence[str]) -> list[str]:
    """Adds reflection of `services` (full names) and of itself; returns the names of the reflection
    services."""
    _add_v1_descriptor()
    own = [SERVICE_V1, reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer((*services, *own))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in own]
    )
    return own
