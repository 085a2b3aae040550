"""What ``moe-optim bench`` writes can be read by a program; the figures are the machine's."""

import json

from moe_optim.cli import main as cli

KEYS = {"command", "commit", "device", "copy_tb_per_s", "rows"}
ROW = {
    "format",
    "source",
    "shape_set",
    "shard",
    "members",
    "ms",
    "floor_ms",
    "fraction_of_floor",
    "te_ms",
    "host_us",
    "temporary_bytes",
}


def test_the_report_has_its_keys_and_covers_both_sources(tmp_path, capsys):
    path = tmp_path / "report.json"
    command = ["bench", "requantize", "--shape-set", "small", "--shard", "2", "--json", str(path)]
    assert cli.main(command) == 0
    report = json.loads(path.read_text())
    assert report.keys() == KEYS
    assert [row["source"] for row in report["rows"]] == ["fp32", "bf16, zeroed"]
    for row in report["rows"]:
        assert row.keys() == ROW
        assert (row["shard"], row["members"]) == ("1/2", 16)
    assert "of floor" in capsys.readouterr().out
