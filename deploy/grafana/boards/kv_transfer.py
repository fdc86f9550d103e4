"""The way of KV between servers."""

from __future__ import annotations

from deploy.grafana.choices import ANNOTATIONS, INSTANCE, PLACES, RANK, RANKS, ROLE, SERVERS
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import Series, rate

TO_FIRST_TOKEN = Series('stage!~"held|stream|generate"')
LOADED = Series(f'outcome="ok", {PLACES}')

KV_TRANSFER = Board(
    "kv_transfer",
    "Baton / KV transfer",
    "The way of a prompt's KV from the prefill to the decode server.",
    (
        Row(
            "Along the way",
            (
                TO_FIRST_TOKEN.mean("Mean time in each stage", "s", "baton_stage_seconds", "role, stage",
                                    "All legs, to the first token. Loads and prefill overlap, so the bars do not add "
                                    "up to the time to first token.", width=12),
                LOADED.quantiles("Transfers", "s", "baton_kv_transfer_seconds", "transport",
                                 "Opened to verified complete, for those that succeeded; it includes the wait for "
                                 "the prefill.", width=12),
                PLACES.quantiles("Exposed time", "s", "baton_kv_transfer_exposed_seconds", "transport",
                                 "From the computed prompt to the last verified block: what the prefill did not hide.",
                                 width=12),
                Panel("Exposed share", "percentunit",
                      (Query(f"{rate(f'baton_kv_transfer_exposed_seconds_sum{{{PLACES}}}', 'instance, transport')} / "
                             f"({rate(f'baton_kv_transfer_seconds_sum{{{LOADED}}}', 'instance, transport')} > 0)",
                             "{{instance}} {{transport}}"),),
                      "Exposed part of the transfers' time.", width=12),
                PLACES.counts("KV moved", "Bps", "baton_kv_transfer_bytes_total", "instance, transport, direction",
                              "Bytes per second, counted piece by piece.", width=12),
                PLACES.quantiles("Size of a load", "bytes", "baton_kv_transfer_size_bytes", "transport",
                                 "Blocks that the decode server has itself are not loaded.", width=12),
                PLACES.quantiles("First and last rank of a load", "s", "baton_load_rank_seconds", "stat",
                                 "Of decode servers of several ranks. Far apart, one rank's connection holds the "
                                 "others up.", width=12),
            ),
        ),
        Row(
            "Work in hand",
            (
                SERVERS.gauge("Open transfers", "short", "baton_kv_transfer_inflight", "instance, transport",
                              "An alert fires when they are open and no byte moves."),
                RANKS.gauge("Tasks waiting", "short", "baton_kv_transfer_queue_depth", "instance, rank",
                            "Publishes and loads; at --cache-store-queue-size new ones are refused."),
                PLACES.quantiles("Publishing", "s", "baton_kv_publish_seconds", "transport",
                                 "From the device's event to ready for the reader."),
                PLACES.counts("Pieces", "short", "baton_kv_transfer_pieces_total", "instance, transport, result",
                              "Per second; all but ok is refused, and a bad checksum is an alert."),
                PLACES.counts("Finished transfers", "short", "baton_kv_transfer_seconds_count", "instance, outcome",
                              "Per second, by how they ended."),
                SERVERS.counts("Failures by reason", "short", "baton_kv_transfer_failures_total",
                               "instance, transport, reason", "Per second; leases that end are not in it."),
            ),
        ),
        Row(
            "Leases",
            (
                PLACES.gauge("Active leases", "short", "baton_kv_leases_active", "instance",
                             "Prompts whose KV waits to be fetched."),
                PLACES.quantiles("Life of a lease", "s", "baton_kv_lease_hold_seconds", "outcome", "By how it ended."),
                PLACES.counts("Renewals", "short", "baton_kv_lease_renewals_total", "source, result",
                              "Per second, by what asked for it."),
                PLACES.counts("Expirations", "short", "baton_kv_lease_expirations_total", "instance, cause",
                              "Leases per second that ended on their own."),
                PLACES.counts("Calls that prove one-sided reads", "short", "baton_kv_lease_proof_calls_total",
                              "instance",
                              "Loads per second by ipc or nixl that asked whether they had read the lease's blocks: "
                              "of a prefill server that has no lease word left, or cannot show any."),
                SERVERS.counts("Stale references", "short", "baton_kv_stale_references_total", "instance, kind",
                               "References per second to blocks that were no longer, or never, valid."),
                SERVERS.quantiles("Quarantine", "s", "baton_kv_quarantine_seconds", "instance",
                                  "Time until nothing could write to the blocks of a broken load any more."),
            ),
        ),
        Row(
            "Peers",
            (
                SERVERS.gauge("Peers", "short", "baton_peers", "instance, state",
                              "Cache stores that this one has shaken hands with."),
                SERVERS.counts("Handshakes", "short", "baton_handshakes_total", "instance, result", "Per second."),
                SERVERS.quantile("p99 of handshakes", "s", 0.99, "baton_handshake_seconds", "result", "By result."),
                SERVERS.counts("Peers that were restarted", "short", "baton_peer_restarts_total", "instance",
                               "Per second: found with another engine than expected."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip
