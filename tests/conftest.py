"""Puts this folder on the import path, so that tests can share what lies in ``support``."""
