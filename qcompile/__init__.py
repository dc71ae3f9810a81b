"""qcompile: a compiler for quantized models in PyTorch."""
