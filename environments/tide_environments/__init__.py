"""Environments that ship with TideRL, written with `tide_sdk` alone."""
