"""Formats numbers for tables and pictures."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def spell_count(number: int) -> str:
    """Format a count in full below one million, else with three digits and M."""
    if number < 10**6:
        return f"{number:,}"
    millions = number / 10**6
    return f"{millions:.3g}M" if millions < 999.5 else f"{millions:,.0f}M"


def spell_number(number: int, what: str) -> str:
    """Format a number of things, such as ``1 GPU`` or ``1,024 GPUs``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def spell_bytes(count: float) -> str:
    """Format a byte count with three digits and unit, in at most eight characters."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    if not unit:
        return f"{count:g} B"
    digits = f"{count:#.3g}" if count >= 1 else f"{count:.2f}"
    return f"{digits.rstrip('.')} {_UNITS[unit]}"


def spell_difference(count: float) -> str:
    """Format a signed byte count, or 0."""
    return f"{'+' if count > 0 else '-'}{spell_bytes(abs(count))}" if count else "0"
