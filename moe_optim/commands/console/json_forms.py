"""Checks the types of values read from a JSON file."""

from typing import Any

from moe_optim.errors import quote

_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "names and values",
    list: "a list",
}


def find_misfit(value: object, form: Any, where: str = "") -> str | None:
    """Return where a JSON value differs from its form and how, or None.

    Args:
        value: value to check. Values in objects may be null or absent, except in lists.
        form: type of the value; {key: form} for an object, [form] for a list of any length.
        where: beginning of the answer, such as ``rank0: ``.
    """
    kind = form if isinstance(form, type) else type(form)
    is_of_kind = isinstance(value, (int, float) if kind is float else kind)
    if isinstance(value, bool) or not is_of_kind:
        return f"{where}expected {_NAMES[kind]}, got {quote(value)}"
    inner: list[tuple[str, object, Any]] = []
    if isinstance(value, dict) and isinstance(form, dict):
        inner = [(key, value[key], form[key]) for key in form if value.get(key) is not None]
    elif isinstance(value, list) and isinstance(form, list):
        inner = [(str(index), each, form[0]) for index, each in enumerate(value)]
    misfits = (find_misfit(each, of, f"{where}{key}: ") for key, each, of in inner)
    return next(filter(None, misfits), None)
