"""Helpers for programs that were written for older interfaces."""
