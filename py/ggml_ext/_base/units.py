"""Bytes in units of memory."""

from __future__ import annotations

MIB = 1024 * 1024
GIB = 1024 * MIB
