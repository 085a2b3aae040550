"""How numbers are spelt in tables and pictures."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def spell_count(number: int) -> str:
    """Return a number below a million as it is, others with three digits and M."""
    return f"{number:,}" if number < 10**6 else f"{number / 10**6:,.3g}M"


def spell_bytes(count: float) -> str:
    """Return a number of bytes with three digits and its unit."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = f"{count:#.3g}" if unit else f"{count:g}"
    return f"{digits.rstrip('.')} {_UNITS[unit]}"


def spell_difference(count: float) -> str:
    """Return a number of bytes with its sign, or 0."""
    return f"{'+' if count > 0 else '-'}{spell_bytes(abs(count))}" if count else "0"
