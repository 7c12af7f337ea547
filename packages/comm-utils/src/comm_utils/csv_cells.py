"""Cells of CSV files that spreadsheets show as what they are."""

from __future__ import annotations

from typing import Any

__all__ = ["cell"]

# Spreadsheets take text with such a beginning for a formula, and run it when the file is opened.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> Any:
    """Return ``value`` for a CSV cell: text that a spreadsheet would execute gets an apostrophe in front.

    Numbers, None and all other text stay as they are.

    Source: https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
