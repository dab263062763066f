"""The results of checks hold together whatever a server said: as a table, as JSON, as XML."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from tide_sdk.check.case import Result, case
from tide_sdk.check.report import row, summary, write_json, write_junit

WILD = "a\0b\x1b[2Jc\x07d\udc80e\ufffef <&\"'> \u202e ]]> caf\u00e9 \U0001f680\r\nnext"


@case("turn.wild", "Exactly once", "Nothing <breaks> a report.")
async def wild(talk):
    """Never run."""


def results():
    return [
        Result(wild, "pass", "", (), 0.25),
        Result(wild, "fail", WILD, (WILD, "POST /end\n  200"), 1.0),
        Result(wild, "skip", WILD, (), 0.5),
    ]


def test_junit_is_xml_whatever_was_said(tmp_path):
    write_junit(tmp_path / "out.xml", results())
    suite = ET.parse(tmp_path / "out.xml").getroot().find("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "time")} == {
        "tests": "3", "failures": "1", "skipped": "1", "time": "1.750"
    }  # fmt: skip
    passed, failed, skipped = suite.findall("testcase")
    assert (passed.get("classname"), passed.get("name"), len(passed)) == ("turn", "wild", 0)
    words = failed.find("failure")
    assert words.get("message").startswith("a\\u0000b\\u001b[2Jc\\u0007d\\udc80e\\ufffef <&\"'>")
    assert "POST /end" in words.text
    assert "caf\u00e9 \U0001f680" in words.text
    assert skipped.find("skipped").get("message") == words.get("message")


def test_json_can_be_read_whatever_was_said(tmp_path):
    write_json(tmp_path / "out.json", "unix:/tmp/x", results())
    told = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert told["url"] == "unix:/tmp/x"
    assert [check["result"] for check in told["checks"]] == ["pass", "fail", "skip"]
    assert told["checks"][1]["detail"] == WILD.replace("\udc80", "\\udc80")
    assert told["checks"][1]["says"] == "Nothing <breaks> a report."


def test_a_row_moves_no_cursor_and_has_colours_only_where_they_are_seen():
    for result in results():
        plain = row(result, colour=False)
        assert not {"\x1b", "\0", "\x07", "\r", "\u202e", "\udc80"} & set(plain)
        assert row(result, colour=True).startswith("\x1b[3")
    assert len(row(results()[2], colour=False).splitlines()) == 1
    assert row(results()[0], colour=False) == "pass  turn.wild              Nothing <breaks> a report."
    assert "the contract says (Exactly once): Nothing <breaks> a report." in row(results()[1], colour=False)


def test_the_summary_counts():
    assert summary(results()) == "1 passed, 1 failed, 1 skipped in 1.8 s"
