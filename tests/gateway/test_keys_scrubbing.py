"""The last line of defence: what is logged all the same is masked."""

from __future__ import annotations

import logging

from tide_gateway.scrubbing import ScrubbingFilter, scrub


def test_g28_what_is_logged_all_the_same_is_masked():
    key = "tide_0123abcd_" + "A" * 43
    assert scrub(f"x {key}, Authorization: Bearer {key} end") == (
        "x tide_0123abcd_***, Authorization: Bearer tide_0123abcd_*** end"
    )
    assert scrub("{'authorization': 'bearer s3cr3t-token'}") == "{'authorization': 'bearer ***'}"
    logger, lines = logging.getLogger("test.scrubbing"), []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.addFilter(ScrubbingFilter())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        raise ValueError(f"cannot use {key}")
    except ValueError:
        logger.exception("call with %s failed", f"Bearer {key}", stack_info=True)
    logger.removeHandler(handler)
    assert "A" * 43 not in lines[0]
    assert "tide_0123abcd_***" in lines[0]
    assert "ValueError" in lines[0]
