"""The dashboards' contents. Every panel shows families of docs/metrics.md, with a unit."""

from deploy.grafana.boards.cuda_graphs import CUDA_GRAPHS
from deploy.grafana.boards.kv_ledger import KV_LEDGER
from deploy.grafana.boards.kv_transfer import KV_TRANSFER
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.router import ROUTER
from deploy.grafana.boards.servers import DECODE, PREFILL

BOARDS = (OVERVIEW, PREFILL, DECODE, KV_TRANSFER, KV_LEDGER, CUDA_GRAPHS, ROUTER)
