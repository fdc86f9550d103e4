"""Cache store: staged KV blocks of an engine rank, leased to decode servers and pulled by them layer by layer.

`agent.CacheStoreAgent` is what an engine uses. `serving/` is its side as a prefill server, `loading/` that as a decode
server, `tcp/` and `nixl/` are transports, `memory/` is the KV pool and copies of it, `geometry/` the arithmetic of
blocks and heads, `tiers/` what lies below the pool. `docs/protocol.md` describes the states; the pure machines are in
`serving/lease.py`, `serving/parking.py` and `loading/load.py`. Only `torch_pool.py`, `stream_copies.py` and
`cuda_pool.py` of `memory/` import torch.
"""

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported
