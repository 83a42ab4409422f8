"""``maru stat``: a server, its pool and its sessions at one moment."""

from __future__ import annotations

from maru_cli.looking import looking
from maru_cli.options import JsonFlag, RuntimeDir, ServerUrl, output_format
from maru_cli.output import Screen, age_text, plain, size_text
from maru_shm.control.messages import Stats


def run(
    server_url: ServerUrl = None, runtime_dir: RuntimeDir = None, json: JsonFlag = False
) -> None:
    """Show a running server: its pool, what it counted, and who uses it."""
    screen = Screen(output_format(json))
    with looking(server_url, runtime_dir) as looker:
        stats = looker.stats()
    _show(screen, looker.url, stats)
    screen.result({"url": looker.url, **plain(stats)})


def _show(screen: Screen, url: str, stats: Stats) -> None:
    pool_bytes = stats.pool.geometry.pool_bytes
    hit_share = f" ({stats.hit_keys / stats.lookup_keys:.0%})" if stats.lookup_keys else ""
    screen.facts(
        "Maru server",
        {
            "server": f"{url}, process {stats.server_pid}, up {age_text(stats.uptime_s)},"
            f" epoch {stats.epoch}",
            "pool": f"{stats.pool.path} ({stats.pool.medium})",
            "size": f"{size_text(pool_bytes)}, {size_text(stats.used_bytes)} in use"
            f" ({stats.used_bytes / pool_bytes:.0%}), {size_text(stats.populated_bytes)} populated",
            "objects": f"{stats.objects} sealed, {stats.reservations} being written,"
            f" {stats.quarantined} in quarantine",
            "lookups": f"{stats.lookups} for {stats.lookup_keys} keys,"
            f" {stats.hit_keys} found{hit_share}; {stats.leases} leases stand",
            "stores": f"{stats.reserved_total} reserved, {stats.committed_total} committed,"
            f" {stats.aborted_total} aborted, {stats.no_space_total} without space",
            "losses": f"{stats.evicted_total} evicted, {stats.suspect_total} reported as damaged",
        },
    )
    screen.table(
        "Sessions",
        ("client", "leases", "reservations"),
        [(s.client, str(s.leases), str(s.reservations)) for s in stats.sessions],
    )
