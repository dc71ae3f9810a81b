"""Rewrites of a program: one file each."""
