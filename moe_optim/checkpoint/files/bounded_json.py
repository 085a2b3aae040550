"""JSON of unknown origin."""

import json
from typing import Any

_DIGITS = 19  # of the numbers below 2^63, and one more


def parse_json(content: bytes) -> Any:
    """Return what a JSON document says.

    Raises:
        ValueError: it is none, is nested deeper than Python can follow, or holds a number that
            fits no 64 bits.
    """
    try:
        return json.loads(content, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("brackets within brackets, too many to follow") from error


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)
