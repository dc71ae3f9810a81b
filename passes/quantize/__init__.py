"""Uses of quantized weights become canonical ops on handles.

Comes in: a canonicalized program and a catalogue of weights by parameter name.
Goes out: ``qcompile::linear`` and ``qcompile::embedding`` on handles of the stored parts.
Always holds: no byte of a weight is read; weights that are not quantized stay as they are.
"""
