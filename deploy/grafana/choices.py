"""What a board lets its reader choose, the series that the choices leave, and what is marked in all boards.

Families of the router alone carry no role of their own, so they are chosen by `instance` only where that is of use;
`role` in them is the chosen server's.
"""

from __future__ import annotations

from deploy.grafana.panels import Annotation, Variable
from deploy.grafana.series import Series

MODEL_NAME = Variable("model_name", "model", "label_values(baton_model_info, model_name)")
ROLE = Variable("role", "role", "label_values(baton_build_info, role)")
INSTANCE = Variable("instance", "instance", 'label_values(baton_build_info{role=~"$role"}, instance)')
PREFILL_INSTANCE, DECODE_INSTANCE, ROUTER_INSTANCE = (
    Variable("instance", "instance", f'label_values(baton_build_info{{role="{role}"}}, instance)')
    for role in ("prefill", "decode", "router")
)
RANK = Variable("rank", "rank", "label_values(baton_engine_up, rank)")
# Bounds of the buckets as their label `le` has them.
TTFT_SLO = Variable("ttft_slo", "first token within (s)", choices=("2.5", "0.25", "0.5", "1.0", "5.0", "10.0"))
TPOT_SLO = Variable("tpot_slo", "output token within (s)", choices=("0.1", "0.02", "0.03", "0.05", "0.2", "0.5"))
E2E_SLO = Variable("e2e_slo", "answer within (s)", choices=("60.0", "5.0", "10.0", "20.0", "120.0", "240.0"))

DRAINS = Annotation("drains", "baton_drain_state > 0", "{{role}} {{instance}} drains", "orange")
RESTARTS = Annotation(
    "restarts",
    "changes(process_start_time_seconds[1m]) > 0 and on (instance) baton_build_info",
    "{{instance}} was restarted",
    "red",
)
ANNOTATIONS = (DRAINS, RESTARTS)

ALL = Series()
MODELS = Series('model_name=~"$model_name"')
SERVERS = Series('role=~"$role", instance=~"$instance"')
PLACES = Series('instance=~"$instance"')
RANKS = Series(f'{SERVERS}, rank=~"$rank"')
