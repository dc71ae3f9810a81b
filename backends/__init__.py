"""Devices: one folder each."""
