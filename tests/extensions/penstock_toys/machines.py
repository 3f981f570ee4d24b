"""`two-toys`: two processes of this machine, each with 1 MB."""

from __future__ import annotations

from penstock.ir.machine.presets import Document, cpu_document


def two_toys() -> Document:
    return cpu_document(2, "1MB", "1GB") | {"source": "sizes that make a toy model move"}
