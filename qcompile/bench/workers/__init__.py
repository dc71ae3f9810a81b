"""What runs in processes of their own, some of them of interpreters without torch or qcompile.

Comes in: requests, JSON lines on stdin. Goes out: one answer each, JSON lines on stdout.
Always holds: modules here import each other relatively, the standard library, and what the package
they measure brings; only those called ``own_...`` import qcompile. ``start.py`` runs any of them
with any interpreter.
"""
