"""`baton up --kv-disk-path`: each server that computes prompts has a directory of its own."""

from __future__ import annotations

import pytest

from cli.launch import Launcher


@pytest.mark.parametrize(
    ("server_flags", "decode_flags", "wanted"),
    [
        ([], [], {"prefill-0": "/kv/prefill-0", "prefill-1": "/kv/prefill-1", "decode-0": "/kv/decode-0"}),
        ([], ["--no-allow-local-prefill"], {"prefill-0": "/kv/prefill-0", "prefill-1": "/kv/prefill-1"}),
    ],
)
def test_launcher_when_blocks_are_kept_on_disk_then_no_two_servers_share_a_directory(
    server_flags: list[str], decode_flags: list[str], wanted: dict[str, str]
) -> None:
    launcher = Launcher("m", kv_disk_path="/kv", server_flags=server_flags, decode_flags=decode_flags)
    servers = [launcher._server("prefill", 0, []), launcher._server("prefill", 1, [])]
    servers.append(launcher._server("decode", 0, decode_flags))
    flags = {server.name: server.arguments for server in servers}
    found = {name: each[each.index("--kv-disk-path") + 1] for name, each in flags.items() if "--kv-disk-path" in each}
    assert found == wanted


def test_launcher_when_nothing_is_kept_on_disk_then_no_server_has_a_directory() -> None:
    assert "--kv-disk-path" not in Launcher("m")._server("prefill", 0, []).arguments
