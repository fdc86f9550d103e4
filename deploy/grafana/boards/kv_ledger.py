"""Who holds the KV blocks."""

from __future__ import annotations

from deploy.grafana.choices import ANNOTATIONS, INSTANCE, PLACES, RANK, RANKS, ROLE, SERVERS
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import Series, rate, share

USABLE = Series(f'{RANKS}, state!="reserved"')

KV_LEDGER = Board(
    "kv_ledger",
    "Baton / KV ledger",
    "Who holds the KV blocks.",
    (
        Row(
            "Blocks",
            (
                USABLE.gauge("Blocks by state", "short", "baton_kv_blocks", "instance, rank, state",
                             "They add up to the capacity.", stacked=True, width=12),
                RANKS.gauge("Usage", "percentunit", "baton_kv_cache_usage_ratio", "instance, rank, group",
                            "Neither free nor cached.", how="max", width=12),
                RANKS.gauge("Capacity", "short", "baton_kv_blocks_capacity", "instance, rank, group",
                            "Blocks of the pool, reserved ones not counted."),
                RANKS.gauge("Imbalance", "short", "baton_kv_ledger_imbalance_blocks", "instance, rank, group",
                            "Capacity less the sum of the states. Anything but 0 is a defect.", minimum=None),
                RANKS.gauge("Oldest hold", "s", "baton_kv_oldest_hold_seconds", "instance, rank, state",
                            "No value when nothing is held. Above four leases: blocks leak.", how="max"),
                SERVERS.counts("Refused reservations", "short", "baton_kv_allocation_failures_total", "instance, code",
                               "Per second, for want of blocks."),
                SERVERS.gauge("Tombstones", "short", "baton_tombstones", "instance",
                              "Aborts that wait for a request that has not come yet."),
                SERVERS.counts("Tombstone hits", "short", "baton_tombstone_hits_total", "instance",
                               "Requests per second that came after their abort."),
            ),
        ),
        Row(
            "Prefix cache",
            (
                Panel("Hit share", "percentunit",
                      (Query(share(f"baton_prefix_cache_hit_tokens_total{{{SERVERS}}}",
                                   f"baton_prefix_cache_queried_tokens_total{{{SERVERS}}}", "instance"),
                             "{{instance}}"),),
                      "Of the prompt tokens looked up."),
                SERVERS.counts("Evictions", "short", "baton_prefix_cache_evicted_blocks_total", "instance, reason",
                               "Blocks per second that left the cache."),
                PLACES.counts("Blocks not loaded", "short", "baton_kv_blocks_skipped_total", "instance",
                              "Per second: the decode server's own cache had them."),
            ),
        ),
        Row(
            "Tiers below the pool",
            (
                SERVERS.counts("Prompts that asked the tiers", "reqps", "baton_kv_tier_fetches_total",
                               "instance, outcome", "By what came of it; docs/metrics.md has the outcomes."),
                SERVERS.counts("Prompt tokens from tiers", "short", "baton_kv_tier_fetched_tokens_total", "instance",
                               "Per second; they need not be computed."),
                SERVERS.quantiles("Delay of their prompts", "s", "baton_kv_tier_fetch_seconds", "instance",
                                  "From the queue to the end of what a tier was asked for, at most "
                                  "--kv-tier-timeout-ms."),
                SERVERS.counts("Blocks loaded", "short", "baton_kv_tier_hit_blocks_total", "tier", "Per second."),
                SERVERS.counts("Where a prefix ended", "short", "baton_kv_tier_missed_blocks_total", "tier, reason",
                               "Per second. Damaged ones point at the medium."),
                SERVERS.counts("Blocks written", "short", "baton_kv_tier_writes_total", "tier, outcome",
                               "Per second. Dropped: the tier does not keep up."),
                SERVERS.counts("Blocks not written", "short", "baton_kv_tier_skipped_writes_total", "instance, reason",
                               "Per second. Reused: the pool is too small for the copies to keep up."),
                SERVERS.counts("Bytes", "Bps", "baton_kv_tier_bytes_total", "tier, direction",
                               "Of records, read and written."),
                Panel("Filled", "percentunit",
                      (Query(f"sum by (instance, tier) (baton_kv_tier_stored_bytes{{{SERVERS}}}) / "
                             f"(sum by (instance, tier) (baton_kv_tier_limit_bytes{{{SERVERS}}}) > 0)",
                             "{{tier}} {{instance}}"),),
                      "Share of the limit; of tiers that have one."),
                SERVERS.gauge("Blocks", "short", "baton_kv_tier_blocks", "instance, tier",
                              "In the tier now, where it can tell."),
                SERVERS.counts("Blocks that had to go", "short", "baton_kv_tier_evicted_blocks_total",
                               "instance, tier", "Per second, for want of room in the tier."),
                SERVERS.counts("Errors", "short", "baton_kv_tier_errors_total", "tier, reason",
                               "Operations per second that failed. Each costs a miss or a lost write."),
                Panel("Threads of a tier", "short",
                      (Query(rate(f"baton_kv_tier_busy_seconds_total{{{SERVERS}}}", "instance, tier"),
                             "{{tier}} {{instance}}"),),
                      "Seconds per second in its operations; two readers and a writer: 3 is all there is."),
                SERVERS.counts("Fetched in vain", "short", "baton_kv_tier_wasted_blocks_total", "instance, tier",
                               "Blocks per second that were read ahead of a prompt that then did not ask for them."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip
