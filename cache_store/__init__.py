"""Cache store: staged KV blocks of an engine rank, leased to decode servers and pulled by them layer by layer.

`agent.CacheStoreAgent` is what an engine uses. `docs/protocol.md` describes the states; the pure machines are in
`lease.py`, `parking.py` and `load.py`. Only `torch_pool.py`, `stream_copies.py` and `cuda_pool.py` import torch.
"""

import rpc  # noqa: F401 - says how the gRPC library logs, which that reads when it is first imported
